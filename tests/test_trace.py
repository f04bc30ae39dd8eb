"""A recorded run as files: it reads back the same, truncated files are read as far as they go, damage is an error."""

import json
import shutil

import pytest

from tests.jobs import job
from tests.refusals import refused
from zbc.compiler.compile import compile_job
from zbc.errors import ZbcError
from zbc.trace import recording as trace
from zbc.trace.recording import Cause, ClockOffset, Head, MemorySamples, Timing, Wait, Writer


@pytest.fixture
def run(tmp_path):
    """A run directory with room for a trace of two ranks."""
    compile_job(job(kind="1f1b", m=2, pp=2)).write(tmp_path / "plan")
    trace.start(tmp_path / "run", tmp_path / "plan")
    return tmp_path / "run"


def ops_of(run, rank):
    return trace.plans.StoredPlan.read(run / "trace/plan").program.ranks[rank]


def writer(run, rank):
    plan = trace.plans.read_manifest(run / "trace/plan").id
    return Writer(run, Head(plan, rank, "cpu", f"host:{rank}", len(ops_of(run, rank))))


def timing(ops, step, begin=1000, *, took=10, lead=4, waits=(), close=5):
    compute = sum(op.kind.computes for op in ops)
    return Timing(step, begin, [took] * len(ops), [lead] * compute, list(waits), close)


def write(run, steps=(3, 4), clocks=((0, 0, 0),)):
    for rank in range(2):
        with_rank = writer(run, rank)
        for clock in clocks[:1]:
            with_rank.clock(ClockOffset(*clock))
        for step in steps:
            with_rank.step(timing(ops_of(run, rank), step, begin=1000 * step))
        for clock in clocks[1:]:
            with_rank.clock(ClockOffset(*clock))
        with_rank.close()
    return [run / "trace" / trace.rank_file(rank) for rank in range(2)]


def test_what_is_written_is_read_back(run):
    ops = ops_of(run, 0)
    rows = [[i, 2 * i] for i in range(len(ops))]
    write(run)
    one = writer(run, 0)
    one.clock(ClockOffset(5, -7, 3))
    one.step(timing(ops, 3, waits=[0, 0, 3, len(ops), 3, 2]))
    one.memory(MemorySamples(9, ("weights", "peak"), rows))
    one.close()
    found = trace.read(run)
    assert found.steps == (3,) and found.device == "cpu" and found.uncertainty_ns == 3
    first = found.ranks[0]
    assert first.head.process == "host:0" and first.clocks == (ClockOffset(5, -7, 3),)
    assert first.memory is not None and [list(row) for row in first.memory.bytes] == rows
    step = found.recorded(0, 3)
    assert step.begins == 1000 - 7 and step.start == [993 + 10 * i for i in range(len(ops))]
    assert step.end == [start + 10 for start in step.start] and step.ends == step.end[-1] + 5
    assert step.waits == (Wait(0, Cause.MESSAGE, 3), Wait(len(ops), Cause.DELIVERY, 2))
    assert step.waited(Cause.MESSAGE) == {0: 3}


def test_an_op_works_from_when_it_has_what_it_needs(run):
    write(run)
    ops = ops_of(run, 0)
    validate = next(i for i, op in enumerate(ops) if str(op) == "VALIDATE")
    one = writer(run, 0)
    one.step(timing(ops, 3, waits=[validate, 1, 4, validate, 2, 5]))
    one.close()
    step = trace.read(run).recorded(0, 3)
    for i, op in enumerate(ops):
        lead = 4 if op.kind.computes or i == validate else 0  # of VALIDATE the wait for sums, not that for all ranks
        assert step.work[i] == step.start[i] + lead, op


def test_moments_are_put_on_the_clock_of_rank_0_with_its_drift(run):
    write(run, clocks=((0, 100, 1), (10_000, 300, 2)))
    rank = trace.read(run).ranks[1]
    assert [rank.aligned(ns) for ns in (-50, 0, 5000, 10_000, 20_000)] == [50, 100, 5200, 10_300, 20_300]


def test_steps_that_a_rank_has_not_finished_do_not_count(run):
    files = write(run, steps=(3, 4, 5))
    lines = files[1].read_text().splitlines(keepends=True)
    for keep in range(1, len(lines[-1])):  # killed at any byte of its last line
        files[1].write_text("".join(lines[:-1]) + lines[-1][:keep])
        assert trace.read(run).steps == ((3, 4) if keep < len(lines[-1]) else (3, 4, 5))
    files = write(run, steps=())
    files[0].write_text(files[0].read_text()[:-3])
    with refused("E430", match="no step that all ranks have completed"):
        trace.read(run)


def change(file, line, **values):
    lines = file.read_text().splitlines()
    lines[line - 1] = json.dumps({**json.loads(lines[line - 1]), **values})
    file.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("line", "values", "says"),
    [
        (1, {"format": "other"}, "format 'other'"),
        (1, {"plan": "another"}, "plan is 'another'"),
        (1, {"rank": 0}, "rank is 0, the plan beside it says 1"),
        (1, {"ops": 3}, "ops is 3"),
        (1, {"device": 1}, "device and process have to be texts"),
        (2, {"clock": {"at_ns": 1}}, "a clock has at_ns, offset_ns, uncertainty_ns"),
        (2, {"clock": {"at_ns": 1, "offset_ns": 0.5, "uncertainty_ns": 0}}, "offset_ns has to be a whole number"),
        (3, {"took_ns": [1]}, "took_ns has 1 numbers"),
        (3, {"lead_ns": [1.5]}, "lead_ns has to be a list of whole numbers"),
        (3, {"took_ns": [2**53]}, "took_ns has 9007199254740992, more than 2^50"),
        (3, {"begin_ns": 2**63}, "begin_ns has to be a whole number"),
        (3, {"waits": [1, 0]}, "three numbers each"),
        (3, {"waits": [1, 9, 1]}, "a cause beyond 5"),
        (3, {"step": "3"}, "step has to be a whole number, not '3'"),
        (3, {"more": 1}, "a step has step, begin_ns"),
        (4, {"step": 3}, "step 3 is there twice"),
        (5, {"memory": {"step": 5, "categories": ["a"], "bytes": [[1]]}}, "bytes needs a row for each of"),
        (5, {"other": 5}, "neither clock, step nor memory: other"),
        pytest.param(3, "took_ns", "not JSON", id="no quotes"),
        pytest.param(3, '"x":' + 100_000 * "[", "not JSON", id="deep"),
    ],
)
def test_damage_is_named_with_its_file_and_line(run, line, values, says):
    file = write(run)[1]
    file.write_text(file.read_text() + "{}\n")
    if isinstance(values, str):
        file.write_text(file.read_text().replace('"took_ns"', values, 1))
    else:
        change(file, line, **values)
    with refused("E430", says) as raised:
        trace.read(run)
    assert raised.value.where == f"{file}:{line}"


def test_a_training_that_goes_on_keeps_what_it_recorded_before(run, tmp_path):
    files = write(run, steps=(3, 4, 5), clocks=((0, 0, 1), (9000, 0, 2)))
    files[1].write_text(files[1].read_text()[:-20])  # killed; the newest checkpoint has four steps
    trace.start(run, tmp_path / "plan")
    for rank in range(2):
        with_rank = Writer(run, Head(trace.read(run).plan.manifest.id, rank, "cpu", "later", len(ops_of(run, rank))), 4)
        with_rank.clock(ClockOffset(20_000, 0, 1))
        with_rank.step(timing(ops_of(run, rank), 5, begin=20_000))
        with_rank.close()
    found = trace.read(run)
    assert found.steps == (3, 4, 5) and found.recorded(0, 5).begins == 20_000
    assert [len(rank.clocks) for rank in found.ranks] == [3, 2] and found.ranks[0].head.process == "host:0"


def test_a_trace_of_another_plan_makes_room(run, tmp_path):
    write(run)
    compile_job(job(kind="gpipe", m=2, pp=2)).write(tmp_path / "other")
    trace.start(run, tmp_path / "other")
    assert not trace.has_trace(run) and trace.plans.read_manifest(run / "trace/plan").schedule == "gpipe"


def test_a_trace_without_the_file_of_a_rank_or_without_its_plan_is_no_run_without_a_trace(run):
    files = write(run)
    files[0].unlink()
    assert trace.has_trace(run)
    with refused("E430", match="has no file of rank 0"):
        trace.read(run)
    write(run)[1].unlink()
    with refused("E430", match="has no file of rank 1"):
        trace.read(run)
    shutil.rmtree(run / "trace" / "plan")
    with pytest.raises(ZbcError, match="has lost plan, its copy of the plan that ran"):
        trace.read(run)


def test_a_large_step_is_compact(run):
    ops = ops_of(run, 0)
    one = writer(run, 0)
    waits = [number for index, op in enumerate(ops) if op.kind.computes for number in (index, 0, 1_234_567)]
    one.step(timing(ops, 3, begin=10**15, took=1_234_567, lead=4_567, waits=waits))
    one.close()
    line = (run / "trace" / trace.rank_file(0)).read_text().splitlines()[1]
    assert len(line) - 100 < 25 * len(ops)  # a step of 400k ops takes less than 10 MB
