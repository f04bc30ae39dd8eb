"""Recordings of ranks as threads: every op, in order, without gaps, and without a change of the training."""

import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests import composed
from tests.jobs import tiny_tensors_move
from tests.runtime.small_plans import make_plan, make_program, make_worker
from tests.threads import each_layer, run_threads, side_by_side
from tests.tiers import few
from zbc.compiler.recorded.report import build
from zbc.ir import Kind
from zbc.plan.directory import assemble, write
from zbc.trace import recording as trace
from zbc.trace.recording import Cause, ClockOffset, Head, Writer
from zbc.training.launch.board import Board
from zbc.training.recording.measure import CATEGORIES
from zbc.training.recording.tracing import Recorder, Tracer, compare_clocks

LIMIT = timedelta(seconds=20)


def traced(tmp_path, plan, steps, total, change=lambda worker: None):
    """Trains `total` steps with all ranks as threads and records `steps` (from 0); returns the workers and the trace.
    `change` may change each worker before."""
    folder = tmp_path / "run"
    manifest = plan.manifest
    fields = ("layers", "boundaries", "microbatch_size", "planning", "training")
    how = {name: getattr(manifest, name) for name in fields}
    write(tmp_path / "plan", *assemble(plan.program, **how))
    trace.start(folder, tmp_path / "plan")
    tracers = {}

    def setup(worker):
        change(worker)
        head = Head(manifest.id, worker.rank, "cpu", "here:1", len(worker.script))
        same = ClockOffset(time.perf_counter_ns(), 0, 0)
        tracers[worker.rank] = Tracer(worker, Writer(folder, head), frozenset(steps), total, lambda: same)

    workers = run_threads(plan, total, setup=setup, step=lambda worker: tracers[worker.rank].step)
    for tracer in tracers.values():
        tracer.end()
    return workers, trace.read(folder)


CASES = {"1f1b": ("1f1b", {}), "zb-h1": ("zb-h1", {}), "zb-v": ("zb-v", {}), "two copies": ("1f1b", {"copies": 2})}
CASES |= {"sharded": ("1f1b", {"copies": 2, "sharded": True}), "no barrier": ("zb-h1", {"sync": "post-validate"})}


def plan_of_case(case):
    schedule, how = CASES[case]
    return make_plan(make_program(schedule, 2, 4, **how))


@pytest.mark.long
@pytest.mark.parametrize("case", few(CASES, ("zb-v", "sharded")))
def test_ops_fill_the_step_and_causality_holds(tmp_path, case):
    workers, found = traced(tmp_path, plan_of_case(case), {1, 2}, 4)
    assert found.steps == (2, 3)
    for step in found.steps:
        ends = {}
        for rank, worker in enumerate(workers):
            one = found.recorded(rank, step)
            assert one.ops == worker.plan.ops
            assert one.start[0] == one.begins and one.start[1:] == one.end[:-1] and one.end[-1] <= one.ends
            assert all(a <= w <= e for a, w, e in zip(one.start, one.work, one.end, strict=True))
            ends |= {(rank // len(found.plan.program.ranks), op): end for op, end in zip(one.ops, one.end, strict=True)}
        for rank, worker in enumerate(workers):
            one = found.recorded(rank, step)
            for op, work in zip(one.ops, one.work, strict=True):
                if op.kind is Kind.F and op.stage:  # a forward does not begin before the one that feeds it has ended
                    assert ends[worker.replica, op._replace(stage=op.stage - 1)] <= work
    busy = workers[0].results[1].busy_seconds[0]
    one = found.recorded(0, 2)
    computed = [(e - w) / 1e9 for op, w, e in zip(one.ops, one.work, one.end, strict=True) if op.kind.computes]
    if case != "no barrier":  # without one, a step reports the numbers of the step before
        assert sum(computed) >= busy > 0.0


@pytest.mark.long
@pytest.mark.parametrize("case", few(["zb-v", "no barrier"], ("zb-v",)))
def test_recording_changes_nothing_of_the_training(tmp_path, case):
    plan = plan_of_case(case)
    workers, _ = traced(tmp_path, plan, {0, 1, 3}, 6)
    for one, other in zip(workers, run_threads(plan, 6), strict=True):
        assert [r.loss for r in one.results] == [r.loss for r in other.results]
        assert [r.grad_norm for r in one.results] == [r.grad_norm for r in other.results]
        assert named(one.script) == named(other.script)


def named(script):
    return [(getattr(handler, "func", handler).__qualname__, op) for handler, op, _ in script]


def test_waiting_is_counted_apart_from_computing_to_the_nanosecond():
    now, buffers = [0], {}

    def passing(ns, then=lambda *args: None):
        def call(*args, **how):
            now[0] += ns
            return then(*args)

        return call

    worker = make_worker(make_plan(make_program("zb-h1", 2, 2)), rank=1)
    worker.transport = SimpleNamespace(
        rank=1,
        send=passing(2),
        post=lambda message, buffer, peer: buffers.update({message: buffer.zero_()}),
        wait=passing(1000, buffers.pop),
        all_reduce=passing(100),
        finish_step=passing(10),
    )
    for layer in each_layer([worker]):
        layer.module.register_forward_pre_hook(passing(7))
    clock = SimpleNamespace(open=lambda: None, stamp=lambda: now[0], read=list)
    result, stamped = Recorder(worker, clock).record(4, stop=False)
    timing = stamped.timing()
    layers, ops = sum(len(stage.layers) for stage in worker.stages.values()), worker.plan.ops
    assert result is not None and timing.step == 5 and timing.close_ns == 10
    leads = dict(zip([op for op in ops if op.kind.computes], timing.lead_ns, strict=True))
    for index, (op, took) in enumerate(zip(ops, timing.took_ns, strict=True)):
        waited = [w for i, *w in zip(*(iter(timing.waits),) * 3, strict=True) if i == index]
        if op.kind is Kind.F:
            assert (took, leads[op], waited) == (1000 + 7 * layers, 1000, [[Cause.MESSAGE, 1000]])
        elif op.kind is Kind.VALIDATE:
            assert (took, waited) == (100, [[Cause.ALL, 100]])
        else:
            assert (took, leads.get(op, 0), waited) == (2 if op.kind.is_send else 0, 0, [])
    assert timing.waits[-3:] == [len(ops), Cause.DELIVERY, 10]


@pytest.mark.long
def test_copies_to_the_host_and_waits_for_them_are_recorded_and_reported(tmp_path):
    plan = composed.planned(composed.settings("offload"))
    with tiny_tensors_move():
        _, found = traced(tmp_path, plan, {1, 2}, 4)
    told = build(found).copies
    assert told and all(copies.measured_ms > 0 and 0 <= copies.measured_hidden <= 1 for copies in told)
    for rank in (copies.rank for copies in told):
        one = found.recorded(rank, 2)
        started = [i for i, op in enumerate(one.ops) if op.kind in (Kind.OFFLOAD, Kind.RELOAD)]
        assert [copy.op for copy in one.copies] == started
        assert all(one.start[copy.op] <= copy.start < copy.end <= one.ends for copy in one.copies)
        waiting = {one.ops[i].kind for i in one.waited(Cause.COPY)}
        assert Kind.RELEASE in waiting and waiting <= {Kind.RELEASE, Kind.B, Kind.BW}


def test_memory_is_looked_at_in_a_step_of_its_own(tmp_path):
    _, found = traced(tmp_path, plan_of_case("zb-h1"), {1}, 4)
    for rank in found.ranks:
        assert rank.memory is not None and rank.memory.step == 3
        assert rank.memory.categories == (*CATEGORIES, "peak") and len(rank.memory.bytes) == len(rank.ops)
        weights = {row[0] for row in rank.memory.bytes}
        assert len(weights) == 1 and weights.pop() > 1000


@pytest.mark.parametrize(
    ("steps", "total", "weighed"), few([({1}, 2, None), ({2, 3}, 4, 2), ({0}, 1, None), ({0}, 2, 2)], 2)
)
def test_memory_is_looked_at_before_where_nothing_comes_behind(tmp_path, steps, total, weighed):
    _, found = traced(tmp_path, plan_of_case("1f1b"), steps, total)
    for rank in found.ranks:
        assert (None if rank.memory is None else rank.memory.step) == weighed


def compared(offsets, machines):
    """The clock offsets found by ranks as threads whose clocks are `offsets` ns behind that of rank 0."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank(number):
        board = Board(dist.TCPStore("127.0.0.1", host.port, is_master=False), number, len(offsets))
        now = lambda: time.perf_counter_ns() - offsets[number]  # noqa: E731
        return compare_clocks(board, "test", LIMIT, now=now, machine=machines[number])

    return side_by_side(len(offsets), rank)


def test_clocks_of_other_machines_are_compared_and_that_of_one_machine_is_shared():
    offsets = [0, 10**12, -5 * 10**9, 123]
    for clock, offset in zip(compared(offsets, "abcd"), offsets, strict=True):
        assert abs(clock.offset_ns - offset) <= clock.uncertainty_ns
        assert clock.uncertainty_ns < 10**8
    same, shared, other = compared([0, 0, 10**12], "aaa")
    assert same == (same.at_ns, 0, 0) and shared == (shared.at_ns, 0, 0)
    assert abs(other.offset_ns - 10**12) <= other.uncertainty_ns
