"""Steps without a flush, unrolled and clocked from the text of their ops alone, and random jobs to compare with that.

An op starts when its rank is free and its message has arrived. A message leaves when it was sent, its link is free and,
if it needs a buffer, one was posted; it arrives `comm` later and occupies its link for `occupies`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add

from tests.jobs import job
from zbc.job.spec import Job

_OP = re.compile(r"(F|BW|SEND_F|RECV_F|SEND_B|RECV_B|STEP|REDUCE) s(\d+)(?: m(\d+)( next)?)?(?: #\d+)?")
Text = tuple[str, int, int]  # kind, stage, microbatch


@dataclass(frozen=True)
class Work:
    """ms of the ops of each stage, and of messages between ranks."""

    f: Sequence[float]
    bw: Sequence[float]
    step: Sequence[float]
    comm: float = 0.0
    occupies: float = 0.0
    reduce: float = 0.0
    rendezvous: bool = False


def unrolled(body: Sequence[str], m: int, steps: int) -> list[Text]:
    """A rank's ops of `steps` steps: first the body's ops of the next step, and none of a next step in the last."""
    found: list[Text] = []
    for step in range(-1, steps):
        for text in body:
            match = _OP.fullmatch(text)
            assert match is not None, text
            kind, stage, mb, later = match.groups()
            number = step + (later is not None)
            if (mb is None and step >= 0) or (mb is not None and 0 <= number < steps):
                found.append((kind, int(stage), -1 if mb is None else int(mb) + m * number))
    return found


def peaks(bodies: Sequence[Sequence[str]], m: int, kept: Sequence[float], steps: int = 12) -> list[float]:
    """The peak units of each rank: those of a stage are held from its F to its BW."""
    found = []
    for body in bodies:
        held = most = 0.0
        for kind, stage, _ in unrolled(body, m, steps):
            held += {"F": kept[stage], "BW": -kept[stage]}.get(kind, 0.0)
            most = max(most, held)
        found.append(most)
    return found


@dataclass
class _Message:
    before: _Message | None  # on its link
    sent: float | None = None
    posted: float | None = None
    left: float | None = None

    def leaves(self, work: Work) -> float | None:
        """When it starts, once that is known."""
        if self.left is not None or self.sent is None or (work.rendezvous and self.posted is None):
            return self.left
        free = 0.0
        if work.occupies and self.before is not None:
            earlier = self.before.leaves(work)
            if earlier is None:
                return None
            free = earlier + work.occupies
        self.left = max(self.sent, free, self.posted or 0.0 if work.rendezvous else 0.0)
        return self.left


@dataclass
class _Rank:
    ops: list[Text]
    now: float = 0.0
    at: int = 0
    sums: float = 0.0  # when its last sum is over
    summed: dict[int, float] = field(default_factory=dict)
    ends: list[float] = field(default_factory=list)  # of the last STEP of each of its steps


def ends(bodies: Sequence[Sequence[str]], m: int, home: Sequence[int], work: Work, steps: int) -> list[list[float]]:
    """The end of each rank's last STEP in each step; `home` is the rank of each stage."""
    ranks = [_Rank(unrolled(body, m, steps)) for body in bodies]
    messages = dict[Text, _Message]()  # maker, ("F", stage, mb) or ("BW", stage, mb) -> message
    for rank in ranks:
        last: dict[int, _Message] = {}
        for kind, stage, mb in rank.ops:
            if kind.startswith("SEND"):
                to = home[stage + 1] if kind == "SEND_F" else home[stage - 1]
                last[to] = messages["F" if kind == "SEND_F" else "BW", stage, mb] = _Message(last.get(to))
    closing = [sum(text.startswith("STEP") for text in body) for body in bodies]
    while any(rank.at < len(rank.ops) for rank in ranks):
        moved = False
        for rank in ranks:
            while rank.at < len(rank.ops) and _ran(rank, home, work, messages):
                moved = True
        assert moved, "the steps come to an end"
    return [rank.ends[closing[r] - 1 :: closing[r]] for r, rank in enumerate(ranks)]


def _ran(rank: _Rank, home: Sequence[int], work: Work, messages: dict[Text, _Message]) -> bool:
    """Whether the next op of a rank could run."""
    kind, stage, mb = rank.ops[rank.at]
    if kind in ("F", "BW"):
        source = stage - 1 if kind == "F" else stage + 1
        if 0 <= source < len(home) and home[source] != home[stage]:
            leaves = messages[kind, source, mb].leaves(work)
            if leaves is None:
                return False
            rank.now = max(rank.now, leaves + work.comm)
        rank.now += work.f[stage] if kind == "F" else work.bw[stage]
    elif kind.startswith("SEND"):
        messages["F" if kind == "SEND_F" else "BW", stage, mb].sent = rank.now
    elif kind.startswith("RECV"):
        made = ("F", stage - 1, mb) if kind == "RECV_F" else ("BW", stage + 1, mb)
        messages[made].posted = rank.now
    elif kind == "REDUCE":
        rank.sums = rank.summed[stage] = max(rank.now, rank.sums) + work.reduce
    else:
        rank.now = max(rank.now, rank.summed.get(stage, 0.0)) + work.step[stage]
        rank.ends.append(rank.now)
    rank.at += 1
    return True


def period(bodies: Sequence[Sequence[str]], m: int, home: Sequence[int], work: Work, over: int = 24) -> float:
    """ms of a step: the mean over some steps, after as many others and before the last ones, which end with a flush."""
    return max((one[-3] - one[-3 - over]) / over for one in ends(bodies, m, home, work, 2 * over + 2))


# ---- drawn jobs ----------------------------------------------------------------------------------------------------


def drawn(seed: int) -> tuple[Job, Work]:
    """A job of steps without a flush that two versions allow, and the work of its stages."""
    rng = random.Random(seed)
    p, v = rng.randint(1, 4), rng.choice([1, 1, 2])
    m = rng.randint(max(1, p - 1), 2 * p + 2) if v == 1 else p * rng.randint(2, 3)
    sync = rng.choice(["two-versions", "two-versions", "asynchronous"])
    dp = rng.randint(1, 2) if sync == "two-versions" else 1
    alike = rng.random() < 0.5

    def times(least: float, most: float) -> list[float]:
        found = [round(rng.uniform(least, most), 2) for _ in range(p * v)]
        return found[:1] * len(found) if alike else found

    f, b, w = times(0.5, 1.5), times(0.5, 1.5), times(0.3, 1.2)
    comm, step, reduce = rng.choice([0.0, 0.1, 0.3, 0.8, 1.5]), rng.choice([0.0, 0.4]), rng.choice([0.0, 0.3, 2.0])
    occupies, transfer = rng.choice([0.0, 0.0, comm / 2]), rng.choice(["eager", "rendezvous"])
    made = job(
        layers=p * v,
        m=m,
        schedule={"kind": "1f1b"} if v == 1 else {"kind": "interleaved-1f1b", "chunks": v},
        parallel={"pp": p, "dp": dp},
        costs={"per": "stage", "f": f, "b": b, "w": w, "comm": comm, "optimizer": step, "reduce": reduce},
        optimizer={"sync": sync},
    )
    one = Work(f, list(map(add, b, w)), [step] * (p * v), comm, occupies, reduce * (dp > 1), transfer == "rendezvous")
    return made, one
