"""An operational machine: the meaning of a program run by ranks, which check/ has to agree with.

A state machine per rank, FIFO queues between ranks, rendezvous. It uses neither graphs nor proofs, and imports nothing
from the compiler. A run is a success if

- every rank gets to its end, and every op can do its work on its rank (the rank holds the stage, the inputs exist,
  nothing runs twice, no weights change after they were summed or judged);
- each message matches the receive that was posted for it, and every tensor that arrives is used once;
- nothing is left over: no message in flight, no receive still open, no tensor unused;
- every collective that was started has completed: all its ranks, in all data-parallel copies of the pipeline, have
  started it, and none of them had an earlier one still in progress;
- afterwards each microbatch (each slice of it) has been through all stages of exactly one pipe, forward, backward and
  weight gradients, and, if the program steps at all, each copy of each stage was stepped once, its gradients (and those
  of a weight that two stages share) summed over all copies before, its weights gathered before they are used if it is
  stepped in parts (after its tentative step without a barrier).

Otherwise it is *stuck* (every rank waits) or has *failed* (an op cannot do its work, or the step is incomplete).
"""

import random
from collections import deque
from dataclasses import dataclass, field

from zbc.ir import Kind, Op, Program

COMPUTE = {"F", "B", "BW", "W"}
WORDS = {"S", "T", "I", "E"}  # of every rank, for each unit
MEETINGS = {"SPREAD", "MEET", "SUM", "GIVE", "TAKE"}  # of the ranks of one copy, for each unit
SUMS = {"REDUCE", "GATHER", "SCATTER"}
ROWS, TIED = -1, -2  # `Op.stage` of a rank's rows of the vocabulary, and of weights that both ends share
AHEAD = {"NORM", "VERDICT", "REDO", "COMMIT", "TENTATIVE"}
BURSTS = (0, 0, 1, 5, 20)  # additional ops of a chosen rank, if it can run them
REPEATABLE = {"F", "SEND_F", "RECV_F", "NORM", "VERDICT"}


@dataclass(frozen=True)
class Outcome:
    state: str  # "success", "stuck" or "failed"
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.state == "success"


class FailureError(Exception):
    pass


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise FailureError(reason)


@dataclass
class Channel:
    """Tensors in flight from one rank to another: both queues are strictly first in, first out."""

    sent: deque[tuple] = field(default_factory=deque)
    posted: deque[tuple] = field(default_factory=deque)
    moved: int = 0
    entered: int = 0


@dataclass
class Rank:
    ops: tuple[Op, ...]
    pc: int = 0
    outputs: set[tuple] = field(default_factory=set)  # keys whose F ran here
    gradients: set[tuple] = field(default_factory=set)  # keys whose B or BW ran here
    weights: set[tuple] = field(default_factory=set)  # keys whose W or BW ran here
    arrived: set[tuple] = field(default_factory=set)  # messages in their buffers
    queue: deque[Op] = field(default_factory=deque)  # collectives started and not over, first in, first out
    summed: set[object] = field(default_factory=set)  # stages, ROWS and TIED: started to sum
    shared: set[tuple] = field(default_factory=set)  # of a shared vocabulary: (kind, mb, slice), once done or started
    came: set[tuple] = field(default_factory=set)  # its collectives that have completed
    averaged: set[int] = field(default_factory=set)  # stages
    awaited: Op | None = None  # the AVERAGE that this rank waits for
    judging: bool = False
    validated: bool = False
    stepped: set[int] = field(default_factory=set)
    gathered: set[int] = field(default_factory=set)
    there: dict[int, bool] = field(default_factory=dict)  # if weights are resharded: stage -> whether it was used
    begun: set[Op] = field(default_factory=set)  # GATHER, FREE and SCATTER, which come more than once
    tentative: set[int] = field(default_factory=set)
    committed: set[int] = field(default_factory=set)
    agreed: set[str] = field(default_factory=set)  # NORM, VERDICT and REDO, once they have run
    ticket: tuple[Channel, int] | None = None  # the message a blocking send waits for

    @property
    def op(self) -> Op | None:
        return self.ops[self.pc] if self.pc < len(self.ops) else None


class Machine:
    """Rank r of the d-th copy of the pipeline is `d * self.p + r`."""

    def __init__(self, program: Program, blocking: bool, redo: bool, device: str = "") -> None:
        self.pipes, self.stages = program.placement.pipes, len(program.placement.pipes[0])
        edges = program.placement.edges
        self.before = [[a for a, b in edges if b == s] for s in range(self.stages)]
        self.behind = [[b for a, b in edges if a == s] for s in range(self.stages)]
        self.microbatches, self.slices = program.microbatches, program.slices
        self.p, self.copies, self.tied, self.sharded = len(program.ranks), program.copies, program.tied, program.sharded
        self.ranks = [Rank(ops) for _ in range(self.copies) for ops in program.ranks]
        self.channels: dict[tuple[int, int], Channel] = {}
        self.blocking, self.redo, self.device = blocking, redo, device
        self.words = program.vocabulary
        self.averages = program.averages
        self.resident, self.with_w, self.scatters = program.resident, program.with_w, program.scatters
        kinds = {op.kind.value for ops in program.ranks for op in ops}
        self.ahead = bool(kinds & AHEAD)
        self.renews = "GATHER" in kinds and not self.ahead  # steps begin with weights that have to be gathered
        single = COMPUTE | {"OVERLAP"} | WORDS | MEETINGS
        self.explicit = any(op.kind.value not in single for ops in program.ranks for op in ops)

    def run(self, rng: random.Random) -> Outcome:
        try:
            waiting: set[int] = set()
            while len(waiting) < len(self.ranks):
                r = rng.choice([r for r in range(len(self.ranks)) if r not in waiting])
                if not self.advance(r):
                    waiting.add(r)
                    continue
                waiting.clear()
                burst = rng.choice(BURSTS)
                while burst and self.advance(r):
                    burst -= 1
            fronts = [f"rank {r} at {rank.op}" for r, rank in enumerate(self.ranks) if rank.op is not None]
            if fronts:
                return Outcome("stuck", ", ".join(fronts))
            self.finish()
        except FailureError as failure:
            return Outcome("failed", str(failure))
        return Outcome("success")

    def advance(self, r: int) -> bool:
        """Lets rank r run one op; False if it has none left or has to wait."""
        rank = self.ranks[r]
        op = rank.op
        if op is None or (self.device and self.held_up(r, op)):
            return False
        over = self.RUN.get(op.kind.value, Machine.compute)(self, r, op) is not False
        rank.pc += over
        return over

    def held_up(self, r: int, op: Op) -> bool:
        """Whether a rank driven by a host waits here: for its whole device, or for its only stream."""
        rank, kind = self.ranks[r], op.kind.value
        if self.device == "waits":
            if kind.startswith(("SEND", "RECV")) or kind in SUMS | MEETINGS | {"OVERLAP", "VALIDATE"}:
                return False
            return bool(rank.queue) or any(
                (source == r and channel.sent) or (target == r and channel.posted)
                for (source, target), channel in self.channels.items()
            )
        if kind.startswith(("SEND", "RECV")):
            _, other = self.peer(r, op)
            channel = self.channels.get((r, other) if kind.startswith("SEND") else (other, r), Channel())
            return bool(channel.sent if kind.startswith("SEND") else channel.posted)
        return kind in SUMS | MEETINGS and bool(rank.queue)

    def both(self, r: int, op: Op) -> bool:
        """OVERLAP: starts a group if both its ops could start."""
        rank = self.ranks[r]
        pair = rank.ops[rank.pc + 1 : rank.pc + 3]
        kinds = {op.kind.value for op in pair}
        require(len(pair) == 2 and "F" in kinds and kinds <= COMPUTE, f"OVERLAP before {pair}")
        require(pair[0].mb != pair[1].mb, f"OVERLAP before {pair}, of one microbatch")
        for op in pair:
            kind, key = op.kind.value, self.key(r, op)
            if (kind != "W" or (self.resident and self.with_w)) and not self.renewed(r, op):
                return False
            if kind == "W":
                require(key in rank.gradients, f"{op} in a group has no B before it")
                continue
            require(kind == "F" or key in rank.outputs, f"{op} in a group has no F before it")
            if not self.there(r, "F" if kind == "F" else "B", key):
                return False
        return True

    # ---- compute ----

    def key(self, r: int, op: Op) -> tuple:
        """(stage, mb, pipe, slice), after checking that rank r may work on it."""
        fits = 0 <= op.stage < self.stages and 0 <= op.mb < self.microbatches
        require(fits and 0 <= op.pipe < len(self.pipes) and 0 <= op.slice < self.slices, f"{op} does not exist")
        require(self.pipes[op.pipe][op.stage] == r % self.p, f"rank {r} has no weights for {op}")
        return (op.stage, op.mb, op.pipe, op.slice)

    def renewed(self, r: int, op: Op) -> bool:
        """Whether the weights of a stage that is stepped in parts are resident; False while they are in flight."""
        rank, gather = self.ranks[r], Op(Kind.GATHER, op.stage)
        if not self.renews or not self.sharded or len(self.members(gather)) == 1:
            return True
        if self.resident and op.stage != ROWS:
            require(op.stage in rank.there, f"{op} needs weights that are not here")
            if any(other.kind is Kind.GATHER and other.stage == op.stage for other in rank.queue):
                return False
            rank.there[op.stage] = True
            return True
        require(op.stage in rank.gathered, f"{op} needs weights that were not gathered")
        return gather not in rank.queue

    def compute(self, r: int, op: Op) -> bool:
        rank, key = self.ranks[r], self.key(r, op)
        if (op.kind.value != "W" or (self.resident and self.with_w)) and not self.renewed(r, op):
            return False
        require(not rank.validated, f"{op} comes after the step was judged")
        require(op.stage not in rank.tentative, f"{op} comes after its weights were stepped")
        kind = op.kind.value
        final = not self.ahead or kind == "F" or op.stage in rank.committed
        require(final, f"{op} adds to the gradients of a step that is not final")
        if kind == "W":
            require(key in rank.gradients, f"{op} has no B before it")
        elif kind == "F":
            if self.words and op.stage == 0 and not self.have(r, op, "GIVE"):
                return False
            require(key not in rank.outputs, f"{op} ran before")
            require(op.slice == 0 or (*key[:3], op.slice - 1) in rank.outputs, f"{op} lacks the slice before")
            if not self.take(r, "F", key):
                return False
            rank.outputs.add(key)
        else:
            require(key in rank.outputs, f"{op} has no F before it")
            require(key not in rank.gradients, f"{op} ran before")
            turn = "MEET" if self.words == 1 else "SUM"
            if self.words and op.stage == self.stages - 1 and not self.have(r, op, turn):
                return False
            last = op.slice == self.slices - 1
            require(last or (*key[:3], op.slice + 1) in rank.gradients, f"{op} lacks the slice behind")
            if not self.take(r, "B", key):
                return False
            rank.gradients.add(key)
        if kind in ("W", "BW"):
            require(key not in rank.weights, f"{op} would count its gradient twice")
            require(op.stage not in rank.summed, f"{op} comes after the sum over copies")
            ends = op.stage in (0, self.stages - 1)
            require(not ends or TIED not in rank.summed, f"{op} comes after the sum over both stages")
            rank.weights.add(key)
        return True

    def take(self, r: int, direction: str, key: tuple) -> bool:
        """Takes the inputs from other stages; False while one has not arrived."""
        if not self.there(r, direction, key):
            return False
        self.ranks[r].arrived -= {(direction, source, *key) for source in self.makers(direction, key)}
        return True

    def makers(self, direction: str, key: tuple) -> list[int]:
        return (self.before if direction == "F" else self.behind)[key[0]]

    def there(self, r: int, direction: str, key: tuple) -> bool:
        """Whether all inputs from other stages have arrived."""
        come = True
        for source in self.makers(direction, key):
            maker = self.pipes[key[2]][source] + r - r % self.p
            made = self.ranks[maker].outputs if direction == "F" else self.ranks[maker].gradients
            if maker == r:
                require((source, *key[1:]) in made, f"rank {r} has no input for {direction} {key}")
            elif not self.explicit:
                come = come and (source, *key[1:]) in made
            else:
                come = come and (direction, source, *key) in self.ranks[r].arrived
        return come

    # ---- a vocabulary that all ranks share ----

    def have(self, r: int, op: Op, what: str) -> bool:
        """Whether a collective of the op's unit has completed; this rank must have started it."""
        unit = what, op.mb, op.slice
        require(unit in self.ranks[r].shared, f"{op} comes before this rank's {what}")
        return unit in self.ranks[r].came

    def of_words(self, r: int, op: Op) -> bool:
        rank, kind, unit = self.ranks[r], op.kind.value, (op.mb, op.slice)
        require(self.words > 0 and (kind != "SUM" or self.words == 2), f"{op} has no words")
        require(op.mb < self.microbatches and op.slice < self.slices and not op.pipe, f"{op} does not exist")
        require((kind, *unit) not in rank.shared, f"{op} again")
        require(not rank.judging and not rank.validated, f"{op} comes after the step was judged")
        if kind in ("T", "E"):
            require(ROWS not in rank.summed, f"{op} comes after the sum of this rank's rows")
        if kind in ("S", "T", "I") and not self.renewed(r, op._replace(stage=ROWS)):
            return False
        after = {"S": "SPREAD", "T": "MEET", "E": "TAKE"}.get(kind)
        if after and not self.have(r, op, after):
            return False
        before = {"MEET": "S", "SUM": "T", "GIVE": "I", "T": "S"}.get(kind)
        require(before is None or (before, *unit) in rank.shared, f"{op} has no {before} before it")
        top, bottom = (op._replace(stage=stage) for stage in (self.stages - 1, 0))
        if kind == "SPREAD" and self.pipes[0][top.stage] == r % self.p:
            require(self.key(r, top) in rank.outputs, f"{op} has nothing to send")
        if kind == "TAKE" and self.pipes[0][0] == r % self.p:
            require(self.key(r, bottom) in rank.gradients, f"{op} has nothing to send")
        rank.shared.add((kind, *unit))
        if kind in MEETINGS:
            rank.queue.append(op)
            self.settle()
        return True

    # ---- transfers ----

    def peer(self, r: int, op: Op) -> tuple[int, int]:
        """(stage, rank) at the other end of a transfer."""
        self.key(r, op)
        others = (self.behind if op.kind.value in ("SEND_F", "RECV_B") else self.before)[op.stage]
        require(bool(others), f"{op} leaves the pipeline")
        require((op.other in others) if len(others) > 1 else op.other == -1, f"{op} does not say which tensor")
        stage = op.other if len(others) > 1 else others[0]
        rank = self.pipes[op.pipe][stage] + r - r % self.p
        require(rank != r, f"{op} does not leave its rank")
        return stage, rank

    def send(self, r: int, op: Op) -> bool:
        rank = self.ranks[r]
        if rank.ticket is None:
            (stage, other), direction = self.peer(r, op), op.kind.value[-1]
            made = rank.outputs if direction == "F" else rank.gradients
            require((op.stage, op.mb, op.pipe, op.slice) in made, f"{op} has nothing to send")
            channel = self.channels.setdefault((r, other), Channel())
            channel.sent.append((direction, op.stage, stage, op.mb, op.pipe, op.slice))
            rank.ticket = channel, channel.entered
            channel.entered += 1
            self.move(channel, other)
        channel, place = rank.ticket
        if self.blocking and channel.moved <= place:
            return False
        rank.ticket = None
        return True

    def recv(self, r: int, op: Op) -> None:
        stage, other = self.peer(r, op)
        channel = self.channels.setdefault((other, r), Channel())
        channel.posted.append((op.kind.value[-1], stage, op.stage, op.mb, op.pipe, op.slice))
        self.move(channel, r)

    def move(self, channel: Channel, receiver: int) -> None:
        while channel.sent and channel.posted:
            sent, posted = channel.sent.popleft(), channel.posted.popleft()
            require(sent == posted, f"{sent} arrives in the buffer for {posted}")
            require(sent not in self.ranks[receiver].arrived, f"{sent} arrives twice")
            self.ranks[receiver].arrived.add(sent)
            channel.moved += 1

    # ---- the end of the step ----

    def start(self, r: int, op: Op) -> None:
        """REDUCE and GATHER: starts and continues."""
        rank, kind = self.ranks[r], op.kind.value
        require(op.stage != ROWS or self.copies > 1, f"{op} meets nobody")
        require(r in self.members(op), f"rank {r} has no part in {op}")
        if kind in ("GATHER", "SCATTER"):
            require(op.stage != TIED, f"{op} is of no optimizer")
            shared = self.sharded and len(self.members(op)) > 1
            self.begin(rank, op)
        if kind == "SCATTER":
            require(self.scatters and shared and op.stage != ROWS, f"{op} has nothing to share out")
            require(op.stage not in rank.summed and not rank.judging, f"{op} comes after the last sum of its stage")
        elif kind == "GATHER" and self.resident and op.stage != ROWS:
            require(shared and op.stage not in rank.stepped, f"{op} has nothing to gather")
            require(op.stage not in rank.there, f"{op} gathers what is here")
            require(len(rank.there) < self.resident, f"{op} finds no room")
            rank.there[op.stage] = False
            rank.gathered.add(op.stage)
            op = op._replace(other=r % self.p)  # of this rank's copies alone
        elif kind == "GATHER":
            there = op.stage in rank.tentative if self.ahead else op.stage not in rank.stepped
            require(self.sharded and there, f"{op} has nothing to gather")
            require(op.stage not in rank.gathered, f"{op} again")
            rank.gathered.add(op.stage)
        else:
            require(not rank.judging and not rank.validated, f"{op} comes after the step was judged")
            require(op.stage not in rank.summed, f"{op} again")
            stages = (0, self.stages - 1) if op.stage == TIED else (op.stage,)
            final = [s for s in stages if r % self.p in self.holders(s)]
            require(not self.ahead or rank.committed.issuperset(final), f"{op} sums the gradients of the step before")
            rank.summed.add(op.stage)
        rank.queue.append(op)
        self.settle()

    def begin(self, rank, op: Op) -> None:
        """Numbers collectives that occur more than once."""
        number = sum((other.kind, other.stage) == (op.kind, op.stage) for other in rank.begun)
        require(op not in rank.begun and op.mb == number, f"{op} is number {number}")
        rank.begun.add(op)

    def average(self, r: int, op: Op) -> bool:
        """AVERAGE, in place of sums of gradients: starts and continues, or waits for all replicas."""
        rank = self.ranks[r]
        if op in rank.queue:  # it waits here
            return False
        if op.stage in rank.averaged and rank.awaited == op:
            rank.awaited = None
            return True
        require(self.averages > 0 and r in self.members(op), f"rank {r} has no part in {op}")
        require(op.stage not in rank.averaged, f"{op} again")
        of = (0, self.stages - 1) if op.stage == TIED else (op.stage,)
        used = any(key[0] in of for key in rank.outputs) or not rank.stepped.isdisjoint(of)
        used |= op.stage == ROWS and bool(rank.shared)
        require(not used, f"{op} changes weights that were used")
        rank.averaged.add(op.stage)
        if self.copies > 1:
            rank.queue.append(op)
            self.settle()
        if self.averages > 1 and op in rank.queue:
            rank.awaited = op
            return False
        return True

    def free(self, r: int, op: Op) -> None:
        """FREE: frees weights that ops have used."""
        rank = self.ranks[r]
        require(r % self.p in self.holders(op.stage), f"{op} is not here")
        self.begin(rank, op)
        require(self.resident > 0 and rank.there.get(op.stage, False), f"{op} frees what nothing used, or is not here")
        del rank.there[op.stage]

    def validate(self, r: int, op: Op) -> bool:
        """VALIDATE: waits for the sums, then for all ranks."""
        rank = self.ranks[r]
        if not rank.judging:
            require(not rank.validated, f"{op} again")
            if any(other.kind.value != "GATHER" for other in rank.queue):
                return False
            rank.judging = True
            rank.queue.append(op)
            self.settle()
        rank.judging = not rank.validated
        return rank.validated

    def settle(self) -> None:
        """Completes every collective that is the next of all its ranks."""
        moved = True
        while moved:
            moved = False
            for op in {rank.queue[0] for rank in self.ranks if rank.queue}:
                for members in self.groups(op):
                    while all(self.ranks[r].queue and self.ranks[r].queue[0] == op for r in members):
                        moved = True
                        for r in members:
                            self.ranks[r].queue.popleft()
                            self.ranks[r].validated |= op.kind.value == "VALIDATE"
                            self.ranks[r].came.add((op.kind.value, op.mb, op.slice))

    def groups(self, op: Op) -> list[set[int]]:
        """Groups of a collective: the ranks of each copy, for words; a rank of all copies, for its rows; else one."""
        if op.kind.value in MEETINGS:
            return [{copy * self.p + r for r in range(self.p)} for copy in range(self.copies)]
        if op.stage == ROWS or op.kind.value == "AVERAGE":
            return [{copy * self.p + r for copy in range(self.copies)} for r in self.holders(op.stage)]
        return [self.members(op)]

    def members(self, op: Op) -> set[int]:
        if op.kind.value == "VALIDATE":
            return set(range(len(self.ranks)))
        if op.kind.value == "GATHER" and op.other >= 0:
            return {copy * self.p + op.other for copy in range(self.copies)}
        return {copy * self.p + r for r in self.holders(op.stage) for copy in range(self.copies)}

    def holders(self, stage: int) -> set[int]:
        """The holders in one copy."""
        if stage == ROWS:
            require(self.words > 0, "there are no words")
            return set(range(self.p))
        if stage == TIED:
            require(self.tied, "no weight is shared")
            return self.holders(0) | self.holders(self.stages - 1)
        require(0 <= stage < self.stages, f"there is no stage {stage}")
        return {pipe[stage] for pipe in self.pipes}

    def step(self, r: int, op: Op) -> bool:
        rank = self.ranks[r]
        require(r % self.p in self.holders(op.stage), f"rank {r} has no copy of {op}")
        require(rank.validated, f"{op} comes before the step was judged")
        require(op.stage not in rank.stepped, f"{op} again")
        require(op.stage not in rank.there, f"{op} leaves weights of before behind")
        if not self.resident and not self.renewed(r, op):
            return False
        rank.stepped.add(op.stage)
        return True

    # ---- a step without a barrier ----

    def agree(self, r: int, op: Op) -> bool:
        """NORM, which goes from the first rank to the last, and VERDICT, which comes back."""
        agreed, what = self.ranks[r].agreed, op.kind.value
        require(what == "NORM" or "NORM" in agreed, f"{op} without this rank's numbers")
        require(what not in agreed, f"{op} again")
        source = r - 1 if what == "NORM" else r + 1
        if source // self.p == r // self.p and what not in self.ranks[source].agreed:
            return False
        agreed.add(what)
        return True

    def again(self, r: int, op: Op) -> bool:
        """REDO: forgets the forwards so far and runs them again, once all their inputs in flight have arrived."""
        rank = self.ranks[r]
        require("VERDICT" in rank.agreed, f"{op} does not know the verdict")
        require("REDO" not in rank.agreed, f"{op} again")
        before = rank.ops[: rank.pc]
        for other in before:
            require(other.kind.value in REPEATABLE, f"{other} cannot run again")
        if self.redo:
            if self.sharded and not rank.judging:  # the weights as they are to be, from all who stepped a part of them
                rank.judging = True
                mine = [stage for stage in range(self.stages) if r % self.p in self.holders(stage)]
                gathers = [Op(Kind.GATHER, stage) for stage in mine]
                rank.queue += [gather for gather in gathers if len(self.members(gather)) > 1]
                self.settle()
            if rank.queue or any(channel.posted for (_, receiver), channel in self.channels.items() if receiver == r):
                return False
            rank.outputs.clear()
            rank.arrived.clear()
            again = tuple(other for other in before if other.kind.value not in AHEAD)
            rank.judging = False
            rank.ops = (*rank.ops[: rank.pc + 1], *again, *rank.ops[rank.pc + 1 :])
        rank.agreed.add("REDO")
        return True

    def commit(self, r: int, op: Op) -> bool:
        rank = self.ranks[r]
        require(r % self.p in self.holders(op.stage), f"rank {r} has no copy of {op}")
        require("REDO" in rank.agreed, f"{op} may not stand")
        require(op.stage not in rank.committed, f"{op} again")
        rank.committed.add(op.stage)
        return True

    def tentative(self, r: int, op: Op) -> bool:
        rank = self.ranks[r]
        require(r % self.p in self.holders(op.stage), f"rank {r} has no copy of {op}")
        require(op.stage not in rank.tentative, f"{op} again")
        sums = [op.stage, *([TIED] if self.tied and op.stage in (0, self.stages - 1) else [])]
        for what in sums:
            members = self.members(Op(Kind.REDUCE, what))
            require(len(members) == 1 or what in rank.summed, f"{op} comes before the sum over copies")
        if any(other.stage in sums for other in rank.queue):
            return False
        rank.tentative.add(op.stage)
        return True

    RUN = (
        dict.fromkeys(WORDS | MEETINGS, of_words)
        | dict.fromkeys(SUMS, start)
        | dict.fromkeys(("SEND_F", "SEND_B"), send)
        | dict.fromkeys(("RECV_F", "RECV_B"), recv)
        | {"OVERLAP": both, "AVERAGE": average, "FREE": free, "VALIDATE": validate, "STEP": step}
        | {"NORM": agree, "VERDICT": agree, "REDO": again, "COMMIT": commit, "TENTATIVE": tentative}
    )

    def finish(self) -> None:
        for (a, b), channel in self.channels.items():
            require(not channel.sent and not channel.posted, f"left over between {a} and {b}")
        for r, rank in enumerate(self.ranks):
            require(not rank.arrived, f"rank {r} never used {rank.arrived}")
            require(not rank.queue, f"rank {r} never finished {rank.queue}")
        for mb in range(self.microbatches):
            homes = [pipe for pipe in range(len(self.pipes)) if self.touched(pipe, mb)]
            require(len(homes) == 1, f"microbatch {mb} was in {len(homes)} pipes")
            for stage in range(self.stages):
                for part in range(self.slices):
                    rank, key = self.ranks[self.pipes[homes[0]][stage]], (stage, mb, homes[0], part)
                    done = key in rank.outputs and key in rank.gradients and key in rank.weights
                    require(done, f"{key} is not finished")
        kinds = WORDS | MEETINGS - ({"SUM"} if self.words == 1 else set()) if self.words else set()
        units = {(kind, mb, part) for kind in kinds for mb in range(self.microbatches) for part in range(self.slices)}
        barrier = any(rank.validated or rank.stepped for rank in self.ranks)
        require(not (barrier and self.ahead), "a step with and without a barrier")
        for r, rank in enumerate(self.ranks):
            require(rank.shared == units, f"rank {r} lacks {units - rank.shared} of its words")
            mine = {stage for stage in range(self.stages) if r % self.p in self.holders(stage)}
            if self.ahead:
                shared = {s for s in mine if self.sharded and len(self.holders(s)) * self.copies > 1}
                require(rank.agreed == {"NORM", "VERDICT", "REDO"}, f"rank {r} did not agree")
                require(rank.gathered == shared, f"rank {r} did not gather its stages")
                require(rank.tentative == mine and rank.committed == mine, f"rank {r} did not step all its stages")
            tied = self.tied and r % self.p in self.holders(TIED)
            for one in [*mine, *[ROWS] * (self.words > 0), *[TIED] * tied] if barrier else []:
                holders = 1 if one == ROWS else len(self.holders(one))
                alone = holders * (1 if self.averages else self.copies) == 1
                apart = not self.averages or self.copies == 1 or one in rank.averaged
                require(apart, f"stage {one} was not averaged")
                require(one == TIED or one in rank.stepped, f"stage {one} was not stepped on rank {r}")
                require(alone or one in rank.summed, f"stage {one} was not summed")
                unused = self.resident and not any(key[0] == one for key in rank.outputs)
                gathered = one < 0 or not self.sharded or one in rank.gathered or unused
                require(alone or gathered, f"stage {one} was not gathered")

    def touched(self, pipe: int, mb: int) -> bool:
        return any(key[1:3] == (mb, pipe) for rank in self.ranks for key in rank.outputs)


def run(program: Program, *, blocking: bool = False, seed: int = 0, redo: bool = False, device: str = "") -> Outcome:
    """Runs one step of a program; `seed` decides which rank runs next whenever several can.

    `device`: "waits" for all that is under way before each op that computes; "queue": all streams share one queue.
    `redo`: the step before turns out not to stand, so what comes before REDO runs twice.
    """
    return Machine(program, blocking, redo, device).run(random.Random(seed))
