"""Overlap groups with tensor parallelism: two ops in turns at each sum, bitwise equal to one after the other."""

import threading
import time
from contextlib import closing
from dataclasses import replace
from itertools import groupby, pairwise

import pytest
import torch

from tests.runtime.small_plans import GPT, make_plan, make_program
from tests.runtime.test_gradients import VECTORS
from tests.runtime.test_tensor_parallel import WIDE, numbers, plan_of
from tests.threads import each_parameter, run_threads
from tests.tiers import few
from zbc.ir import Kind, Op
from zbc.runtime.core import slot
from zbc.runtime.features.groups.strands import PAIR, Pair
from zbc.runtime.features.groups.units import Braids, _reason
from zbc.runtime.features.offload.offload import Offloads
from zbc.runtime.features.tensor_parallel import Group, Meter, SharedLayers
from zbc.training.recording.measure import Scale

pytestmark = pytest.mark.usefixtures("one_thread_per_kernel")

CPU = torch.device("cpu")


def braided(folder, kind="dualpipe-v", *, m=6, **how):
    """A plan with overlap groups, on 2 x 2 ranks."""
    more = {"layers": 4, **how.pop("model_more", {})}
    return plan_of(folder, kind, pp=2, tp=2, m=m, model_more=more, schedule_more={"overlap": True}, **how)


def found(plan, *, one_by_one=False, steps=2, setup=lambda worker: None):
    """Losses, norms and weights; and per rank the op that started each sum over its group, by its place."""
    starts = {}

    def watch(worker):
        worker.features.of(Braids).one_by_one = one_by_one
        mine = starts[worker.rank] = []
        watched(worker, mine)
        setup(worker)

    workers = run_threads(plan, steps, setup=watch)
    weights = {(worker.rank, name): p.detach().clone() for worker, name, p in each_parameter(workers)}
    return numbers(workers), weights, starts


def watched(worker, said):
    transport = worker.features.of(SharedLayers).group.transport
    begin = transport.start

    def start(*args):
        if args[-1] == worker.features.of(SharedLayers).group.ranks:
            said.append((worker.step, worker.progress.index, worker.progress.op))
        return begin(*args)

    transport.start = start


def same(one, other):
    return one[0] == other[0] and all(torch.equal(one[1][key], other[1][key]) for key in other[1])


def changes(starts, plan, rank, kinds):
    """The number of changes between the two ops among the sums of a group, for each group of these kinds."""
    ops = plan.program.ranks[rank // 2]
    marks = [i for i, op in enumerate(ops) if op.kind.is_mark and [ops[i + 1].kind, ops[i + 2].kind] == kinds]
    mine = [index for step, index, _ in starts[rank] if step == 0]
    return [len(list(groupby(i for i in mine if at < i < at + 3))) for at in marks]


WAYS = {"gpt": {}, "llama": {"model": "llama"}, "qwen3": {"model": "qwen3"}}
WAYS |= {"recompute": {"memory": {"activations": "recompute"}}, "sequence": {"more": {"tp_sequence": True}}}
WAYS |= {"bfloat16": {"model_more": {"dtype": "bfloat16"}}}
WAYS |= {"bfloat16 recomputed": {"model_more": {"dtype": "bfloat16"}, "memory": {"activations": "recompute"}}}
WAYS |= {"replicas": {"dp": 2}, "sharded": {"dp": 2, "more": {"shard": "optimizer"}}}
WAYS |= {"ahead": {"optimizer": {"sync": "post-validate"}}}


@pytest.mark.long
@pytest.mark.parametrize("way", few(WAYS, ("gpt", "recompute", "sequence", "bfloat16")))
def test_in_turns_every_bit_is_that_of_one_after_the_other(way, tmp_path):
    plan = braided(tmp_path, **WAYS[way])
    alone, together = found(plan, one_by_one=True), found(plan)
    assert same(together, alone)
    for rank in range(4):
        turns = changes(together[2], plan, rank, [Kind.F, Kind.BW])
        assert turns and min(turns) > 2 and max(changes(alone[2], plan, rank, [Kind.F, Kind.BW])) <= 2
    for first, second in ((0, 1), (2, 3)):
        assert together[2][first] == together[2][second], "ranks that share layers start their sums in one order"


def grouped(program, first, second):
    """The program with groups of these kinds: of consecutive ops, with transfers between them moved before or after the
    group; of an F and a W that waits for it."""
    make = _with_late_w if Kind.W in (first, second) else _with_neighbours
    return program.with_ranks([make(list(ops), first, second) for ops in program.ranks], by="grouped")


def _with_late_w(ops, first, second):
    mine, late = [], []
    for op in ops:
        if op.kind is Kind.W:
            late.append(op)
        elif late and op.kind is Kind.F:
            w = late.pop(0)
            mine += [Op(Kind.OVERLAP, 0), *((op, w) if first is Kind.F else (w, op))]
        else:
            if op.kind.stage_wide:
                mine, late = mine + late, []
            mine.append(op)
    return mine


def _with_neighbours(ops, first, second):
    at = [i for i, op in enumerate(ops) if op.kind.computes]
    mine, done = [], 0
    for a, b in pairwise(at):
        one, other, middle = ops[a], ops[b], ops[a + 1 : b]
        alike = one.kind is other.kind and one.stage + other.stage > 0  # may wait for each other but on the first stage
        if a < done or [one.kind, other.kind] != [first, second] or one.mb == other.mb or alike:
            continue
        before, behind = ([op for op in middle if op.kind.is_recv is recv] for recv in (True, False))
        mine += [*ops[done:a], *before, Op(Kind.OVERLAP, 0), one, other, *behind]
        done = b + 1
    return mine + ops[done:]


PAIRS = [("zb-h1", Kind.F, Kind.B), ("zb-v", Kind.F, Kind.W), ("zb-v", Kind.W, Kind.F), ("gpipe", Kind.F, Kind.F)]
DEEP = {**WIDE, "layers": 8, "args": {"width": 8, "count": 8}}


@pytest.mark.long(
    "zb-v-F-W-gpt", "zb-v-W-F-layers of a user", "zb-h1-F-B-layers of a user", "gpipe-F-F-layers of a user"
)
@pytest.mark.parametrize("model", ["gpt", "layers of a user"])
@pytest.mark.parametrize(("kind", "first", "second"), PAIRS)
def test_any_op_runs_in_turns_with_a_forward(kind, first, second, model):
    program = grouped(replace(make_program(kind, 2, 6), tp=2), first, second)
    assert any(op.kind.is_mark for ops in program.ranks for op in ops)
    how = {"model": DEEP, **VECTORS} if model != "gpt" else {"model": {**GPT, "layers": 6}}
    plan = make_plan(program, **how)
    alone, together = found(plan, one_by_one=True), found(plan)
    assert same(together, alone)
    assert together[2][0] == together[2][1] and together[2][2] == together[2][3]
    assert (together[2] == alone[2]) is (Kind.W in (first, second)), "W starts no sums"


def strands():
    return [thread for thread in threading.enumerate() if thread.name == "zbc-strand"]


def on_sums(worker, act):
    transport = worker.features.of(SharedLayers).group.transport
    begin = transport.start_sum

    def start_sum(*args):
        act(worker)
        return begin(*args)

    transport.start_sum = start_sum


@pytest.mark.long
@pytest.mark.parametrize("kind", ["F", "BW"])
def test_an_op_that_fails_is_named_and_leaves_no_thread_behind(kind, tmp_path):
    plan = braided(tmp_path)
    texts = []

    def fail(worker):
        if worker.rank == 1 and PAIR.value is not None and worker.progress.op.split()[0] == kind:
            texts.append(worker.progress.op)
            if len(texts) == 3:
                raise ValueError("broken on purpose")

    with pytest.raises(ValueError, match="broken on purpose") as caught:
        run_threads(plan, 1, setup=lambda worker: on_sums(worker, fail))
    assert any(texts[2] in note for note in caught.value.__notes__), "the op that failed is named"
    for thread in strands():
        thread.join(10)
    assert not strands()
    assert same(found(plan), found(plan, one_by_one=True))


def test_the_thread_of_who_has_the_turn_is_known(tmp_path):
    """For the watchdog, which shows the position of a rank without progress."""
    seen = set()

    def look(worker):
        strand = threading.current_thread().name == "zbc-strand"
        seen.add((strand, worker.progress.thread == threading.get_ident()))

    workers = run_threads(braided(tmp_path), 1, setup=lambda worker: on_sums(worker, look))
    assert seen == {(True, True), (False, False)}
    assert all(worker.progress.thread is None for worker in workers)


@pytest.mark.parametrize("failing", [0, 1])
def test_work_that_waits_for_its_turn_is_left_when_the_other_fails(failing):
    pair, left = Pair(CPU), []

    def work(side):
        try:
            for number in range(3):
                if side == failing and number == 2:
                    raise KeyError(side)
                pair.turn()
        except BaseException as error:
            left.append((side, type(error).__name__))
            raise

    with pytest.raises(KeyError):
        pair.run(lambda: work(0), lambda: work(1))
    assert sorted(left) == sorted([(failing, "KeyError"), (1 - failing, "Left")])
    (thread,) = strands()
    pair.close()
    thread.join(10)
    assert not thread.is_alive()


def test_parts_without_sums_go_round_the_sums_of_the_other():
    """8 parts and 3 sums: the second time, when the number of sums is known, each hides its share."""
    pair = Pair(CPU)

    def once():
        said = []

        def forward():
            pair.turn()
            for number in range(3):
                said.append(f"s{number}")
                pair.pause()

        def weights():
            pair.turn()
            for left in reversed(range(8)):
                said.append("w")
                pair.part_done(left)

        pair.run(forward, weights, ("F", "W"))
        return [f"{len(list(some))}{what[0]}" for what, some in groupby(said)]

    first, second = once(), once()
    pair.close()
    assert first[:2] == ["1s", "1w"] and second == ["1s", "3w", "1s", "3w", "1s", "2w"]


def test_layers_that_draw_run_one_after_the_other_and_the_run_says_why():
    program = grouped(replace(make_program("zb-h1", 2, 6), tp=2), Kind.F, Kind.B)
    plan = make_plan(program, model={**DEEP, "args": {"width": 8, "count": 8, "dropout": 0.5}}, **VECTORS)
    (first, *_) = workers = run_threads(plan, 0)  # as threads they would wait for one generator
    assert first.features.of(Braids).in_turn == ("layers.0 draws random numbers (dropout)",)
    assert all(worker.features.of(Braids).units is None for worker in workers)


def test_what_moves_to_the_host_runs_one_after_the_other(tmp_path):
    (worker, *_) = run_threads(braided(tmp_path), 1)
    run, ops = worker.phase_run, [op for _, op, _ in worker.script]
    at = next(i for i, op in enumerate(ops) if op.kind.is_mark)
    assert _reason(worker, run, *ops[at + 1 : at + 3]) is None
    worker.features.of(Offloads)._keys[id(run.plan)] = frozenset([ops[at + 2].key])
    assert _reason(worker, run, *ops[at + 1 : at + 3]) == "their activations go to the host"


class Slow:
    """A sum whose time begins when it is waited for."""

    def __init__(self, seconds):
        self.seconds = seconds

    def wait(self):
        time.sleep(self.seconds)


def test_what_is_hidden_is_what_is_not_waited_for():
    group, mine = Group((0, 1), 0, None, meter=Meter()), slot.Slot()
    assert group.meter.read() is None
    group.settle(Slow(0.02))
    assert group.meter.read() < 0.1
    mine.split = mine.fills = True
    mine.defer(lambda: time.sleep(0.04))
    group.settle(Slow(0.02), mine)
    assert 0.5 < group.meter.read() < 0.9 and group.meter.read() is None


def test_ops_of_groups_are_weighed_one_after_the_other(tmp_path):
    (worker, *_) = run_threads(braided(tmp_path), 1)
    with closing(Scale(worker)):
        assert worker.features.of(Braids).one_by_one
    assert not worker.features.of(Braids).one_by_one
