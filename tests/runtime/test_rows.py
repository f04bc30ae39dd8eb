"""Handlers follow the rows of zbc/ops.py: each op of a run is watched, and its reads, writes and frees are compared
with its row.

Tensors of microbatches are watched in their stores and in flight; other values as far as they show from outside.
"""

from collections import defaultdict
from functools import cache

import pytest

from tests.runtime.small_plans import make_plan, make_program
from tests.threads import run_threads
from zbc.ir import COPY, Message, Op, Placement, Program
from zbc.ops import TIED, VALUES, At, Kind, Ref, Scope
from zbc.runtime.core.ending import STORES
from zbc.runtime.features.shards.gathers import Gathers
from zbc.runtime.handlers import HANDLERS
from zbc.runtime.transports.transport import Signal

HERE = "tests.runtime.user_models"
RESIDUAL = {"family": f"{HERE}:residual", "layers": 8, "loss": "mse", "args": {"count": 8}}
VECTORS = {"kind": f"{HERE}:Vectors"}
PLANS = {"halves": dict(schedule="zb-h1", p=2, m=3), "two stages of a rank": dict(schedule="zb-v", p=2, m=3)}
PLANS |= {"two pipes": dict(schedule="dualpipe", p=2, m=4), "groups": dict()}
PLANS |= {"a shared weight, weights in shares": dict(schedule="1f1b", p=2, m=3, copies=2, tied=True, sharded=True)}
PLANS |= {"without a barrier": dict(schedule="zb-h1", p=3, m=4, copies=2, sharded=True, sync="post-validate")}
GROUPED = dict(
    placement=Placement.linear(1),
    microbatches=2,
    ranks=(tuple(map(Op.parse, ["F s0 m0", "OVERLAP", "F s0 m1", "BW s0 m0", "BW s0 m1", "VALIDATE", "STEP s0"])),),
    history=("test",),
)
STEPS = 3  # the first is not looked at: there is no step before it to make final

PER_UNIT = {value for values in STORES.values() for value in values}  # of these all is seen
FROM_OUTSIDE = {"part", "total", "norm", "verdict", "shard", "weights", "clean"}  # of these, that it is made
NOT_THERE = {"kv", "dkv"}  # without slices
SHARES = {name for name, value in VALUES.items() if value.scope == "share"}  # see test_shared_words.py
UNSEEN = {"stands"}  # REDO does nothing visible if the last step is accepted


class Watched(dict):
    """A store that records its accesses."""

    def __init__(self, watch, ref_of):
        super().__init__()
        self.watch, self.ref_of = watch, ref_of

    def __setitem__(self, key, value):
        self.watch("writes", self.ref_of(key))
        super().__setitem__(key, value)

    def __getitem__(self, key):
        self.watch("reads", self.ref_of(key))
        return super().__getitem__(key)

    def pop(self, key, *default):
        if key in self:
            self.watch("reads", self.ref_of(key))
            self.watch("frees", self.ref_of(key))
        return super().pop(key, *default)


class Travelling:
    """A transport that records posts and waits."""

    def __init__(self, inner, watch, ref_of):
        self.inner, self.watch, self.ref_of = inner, watch, ref_of

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def post(self, letter, buffer, peer):
        self.watch("writes", self.ref_of(letter))
        self.inner.post(letter, buffer, peer)

    def wait(self, letter):
        self.watch("reads", self.ref_of(letter))
        self.watch("frees", self.ref_of(letter))
        return self.inner.wait(letter)

    def send(self, letter, tensor, peer):
        if isinstance(letter, Signal):
            self.watch("writes", Ref(letter.kind.value.lower()))
        self.inner.send(letter, tensor, peer)


class Watch:
    """Records the accesses of the running op; `seen` has every op with the refs it read, wrote and freed."""

    def __init__(self, worker):
        self.worker, self.seen, self.op = worker, [], None
        self.found = defaultdict(set)
        for name, values in STORES.items():
            setattr(worker, name, Watched(self.note, lambda key, values=values: self.stored(values, key)))
        worker.transport = Travelling(worker.transport, self.note, self.sent)
        for op, one in worker.sums.items():
            self.tell(one, "start", "writes", op.kind.row.writes[0])
            self.tell(one, "finish", "reads", op.kind.row.writes[0])
        for optimizer in worker.optimizers.values():
            self.tell(optimizer, "drop", "writes", Ref("clean"))
        for run in worker.phase_runs:
            run.wrap([*Kind], self.watched)

    def tell(self, one, name, what, ref):
        inner = getattr(one, name)

        def told(*args):
            self.note(what, ref)
            return inner(*args)

        setattr(one, name, told)

    def note(self, what, ref):
        self.found[what].add(ref)

    def stored(self, values, key):
        """The ref of an entry in a store of `values`, relative to the running op."""
        if isinstance(key, Message):
            return self.on_edge("act" if key.forward else "grad", key.source, key.sink, key)
        assert key == self.op.key
        return Ref(*values)

    def sent(self, letter):
        if isinstance(letter, Signal):
            before = letter.kind is Kind.NORM
            return Ref(letter.kind.value.lower(), At.RANK_BEFORE if before else At.RANK_AFTER)
        assert isinstance(letter, Message)
        return self.on_edge("act" if letter.forward else "grad", letter.source, letter.sink, letter)

    def on_edge(self, value, one, other, unit):
        op = self.op
        assert (unit.mb, unit.pipe, unit.slice) == (op.mb, op.pipe, op.slice) and op.stage in (one, other)
        other = other if op.stage == one else one
        return Ref(value, At.SOURCES if other in self.worker.placement.sources(op.stage) else At.SINKS)

    def watched(self, handler, worker, op):
        self.op, self.found = op, defaultdict(set)
        if Ref("weights") in op.kind.row.reads:
            stage = worker.features.of(Gathers).stages.get(op.stage)
            worker.features.of(Gathers).finish(worker, stage)  # its own wait: a GATHER has written the weights
        before = self.outside()
        handler(worker, op)
        for what in (what for what, value in self.outside().items() if value != before[what]):
            self.note("writes", Ref(what))
        if worker.step > 0:
            self.seen.append((op, {what: frozenset(refs) for what, refs in self.found.items()}))

    def outside(self):
        """A comparable snapshot of the values of the op's stage, or of the rank."""
        worker, kind = self.worker, self.op.kind
        pending = getattr(worker.phase_run.ending, "pending", None)
        verdict = worker.verdict if pending is None else getattr(pending, "verdict", None)
        found = {"verdict": verdict is not None, "weights": len(worker.features.of(Gathers).coming)}
        if kind is Kind.NORM and pending is not None:  # VERDICT takes the sums of all, and need not keep them
            found["norm"] = hasattr(pending, "sums")
        if kind.row.scope is not Scope.RANK and self.op.stage != TIED:
            weights = list(worker.stages[self.op.stage].parameters.values())
            found["shard"] = sizes(weights)
            if kind.computes:  # sums are stored in place of the gradients
                found["part"] = sizes([p.grad for p in weights])
        return found


def sizes(tensors):
    return [None if one is None else one.detach().double().abs().sum().item() for one in tensors]


@cache
def watched(name):
    """Every op of a run with its accesses, by rank."""
    how = PLANS[name]
    model = {} if how.get("tied") else {"model": RESIDUAL, "data": VECTORS}
    program = Program(**GROUPED) if name == "groups" else make_program(**how)
    plan = make_plan(program, optimizer={"clip_grad_norm": 1e6}, **model)
    watches = []
    run_threads(plan, STEPS, setup=lambda worker: watches.append(Watch(worker)))
    return [(watch.worker, *entry) for watch in watches for entry in watch.seen]


def there(worker, refs, op):
    """The refs of a row that apply on this rank."""
    edges = (At.SOURCES, At.SINKS)
    return {ref for ref in refs if ref.at not in edges or worker.placement.beside(op.stage, ref.at)}


@pytest.mark.long(
    "without a barrier", "reads-two pipes", "reads-two stages of a rank", "writes-a shared weight, weights in shares"
)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("what", ["reads", "writes", "frees"])
def test_tensors_of_microbatches_are_read_made_and_used_up_as_the_row_says(name, what):
    for worker, op, found in watched(name):
        if op.kind.row.scope is Scope.UNIT:
            expected = there(worker, getattr(op.kind.row, what), op)
            seen = {ref for ref in found.get(what, ()) if ref.what in PER_UNIT}
            assert seen == {ref for ref in expected if ref.what in PER_UNIT}, f"{op} {what}"
        else:
            assert not {ref for ref in found.get(what, ()) if ref.what in PER_UNIT}, f"{op} {what}"


@pytest.mark.long("without a barrier")
@pytest.mark.parametrize("name", PLANS)
def test_an_op_makes_and_waits_for_what_its_row_says(name):
    """Gradients, weights, sums and verdicts."""

    def where(refs):
        return {(ref.what, ref.at if ref.at in (At.RANK_BEFORE, At.RANK_AFTER) else At.OWN) for ref in refs}

    for _, op, found in watched(name):
        made = {ref.what for ref in found.get("writes", ()) if ref.what in FROM_OUTSIDE}
        if op.kind is Kind.B:
            made -= {"part"}  # layers whose halves do not come apart have theirs at once
        assert made == {ref.what for ref in op.kind.row.writes if ref.what in FROM_OUTSIDE}, str(op)
        seen = {ref for ref in found.get("reads", ()) if ref.what not in PER_UNIT}
        assert where(seen) <= where(op.kind.row.reads), str(op)


def test_every_kind_and_value_is_watched_or_named():
    seen = {op.kind for name in PLANS for _, op, _ in watched(name)}
    # See test_averaging.py, test_freed_weights.py, test_sharded.py, test_parcels.py, test_shared_words.py.
    elsewhere = {Kind.AVERAGE, Kind.FREE, Kind.SCATTER, *COPY, *(kind for kind in Kind if kind.unit_wide)}
    assert HANDLERS.keys() == set(Kind) == seen | elsewhere
    assert VALUES.keys() == PER_UNIT | FROM_OUTSIDE | NOT_THERE | SHARES | UNSEEN
    assert {name for name, value in VALUES.items() if not value.stays and name not in NOT_THERE | SHARES} == PER_UNIT
