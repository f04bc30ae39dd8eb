"""Pictures of recorded runs: the prediction, and below it the measurement, on one time axis, in all four forms."""

from itertools import pairwise

import pytest

from tests.compiler.test_recorded import as_predicted, compiled, slowed
from tests.recorded_runs import MS, record
from tests.refusals import refused
from tests.viz import browser
from tests.viz.test_html import data_of, spans
from tests.viz.trace_reader import read
from zbc.api import Run
from zbc.compiler.recorded.view import step_of
from zbc.errors import ZbcError
from zbc.trace import recording as trace
from zbc.viz import recorded
from zbc.viz.terminal import View, draw


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """A run whose rank 2 takes 1.5 times as long as predicted."""
    folder = tmp_path_factory.mktemp("slow")
    plan = compiled("zb-h1")
    held = lambda op: 2**20 * (1 + op.mb)  # noqa: E731
    world = as_predicted(plan, op=slowed(plan, 2, 1.5), transfer=0.05, agree=0.4, held=held)
    return record(plan, folder, world, steps=(4, 5, 6, 9))


def test_measured_stands_below_predicted_on_one_scale(slow):
    predicted, measured = recorded.drawn(slow)
    step = step_of(slow, 5)
    assert (predicted.name, measured.name) == ("predicted", "measured, step 5")
    assert measured.strip.length == pytest.approx(step.makespan_ns / MS) and predicted.strip.length == 120
    lines = draw([predicted, measured], View(width=90, unicode=False)).plain.splitlines()
    rows = [line for line in lines if line[:3].strip().isdigit() and line[3] == "|"]
    assert len(rows) == 8 and len({len(row) for row in rows}) == 1
    first, second = (line for line in lines if line.startswith("makespan"))
    assert first.startswith(f"makespan {predicted.strip.length:.4g} ms") and first != second
    idle = [row.count(".") for row in rows]
    assert all(row.rstrip("|").endswith("." * 8) for row in rows[:4])  # the prediction ends before the axis does
    assert idle[6] < min(idle[4], idle[5], idle[7])  # rank 2 hardly waits


def test_every_op_stands_where_it_ran(slow):
    step, (_, measured) = step_of(slow, 5), recorded.drawn(slow)
    begin = min(start for start, _ in step.own)
    for rank in range(4):
        one = step.ranks[rank]
        wanted = [(op, (one.work[i] - begin) / MS, (one.end[i] - begin) / MS) for i, op in step.compute(rank)]
        found = [(piece.op, piece.start, piece.end) for piece in measured.strip.pieces(rank)]
        assert [op for op, *_ in found] == [op for op, *_ in wanted]
        assert [time for _, *times in found for time in times] == pytest.approx(
            [time for _, *times in wanted for time in times], abs=1e-6
        )


def test_steps_in_a_row_and_from_one_on(slow):
    assert [one.name for one in recorded.drawn(slow, 2)] == ["predicted", "measured, steps 4-5"]
    assert [one.name for one in recorded.drawn(slow, 1, first=9)] == ["predicted", "measured, step 9"]
    predicted, measured = recorded.drawn(slow, 3)
    assert len(predicted.strip.steps) == len(measured.strip.steps) == 3
    assert measured.strip.length > 1.3 * predicted.strip.length
    assert draw([predicted, measured], View(width=120)).plain.count("3 steps, ") == 2
    for steps, first in ((2, 6), (1, 8), (4, None)):
        with refused("E430", match="was not recorded", hint="4, 5, 6, 9"):
            recorded.drawn(slow, steps, first=first)


def test_the_page_says_what_an_op_waited_for_and_what_was_predicted(slow):
    page = Run(slow.folder, slow).html()
    predicted, measured = data_of(page)["panels"]
    assert "waited" not in predicted and measured["twin"] == 0
    step = step_of(slow, 5)
    waits = {str(op): i for i, op in step.compute(1)}
    ops = [f"{kind} s{s} m{m}" for kind, s, m, *_ in spans(data_of(page), measured, 1)]
    shown = dict(zip(ops, measured["waited"][len(measured["ranks"][0]["k"]) :], strict=False))
    one = step.ranks[1]
    for text, index in waits.items():
        meant = sum(wait.ns for wait in one.waits if wait.op == index) / MS
        assert shown[text] == pytest.approx(meant, rel=1e-3, abs=1e-6)
    assert max(shown.values()) > 3


def test_the_critical_path_runs_through_the_slow_rank(slow):
    _, measured = recorded.drawn(slow)
    graph = measured.recorded.graph
    ranks = [graph.rank(i) for i in measured.recorded.path()]
    assert ranks.count(2) > 0.6 * len(ranks)
    times = measured.strip.steps[0]
    path = measured.recorded.path()
    assert all(times.end[b] <= times.start[a] + 1e-9 for a, b in pairwise(path))


def test_the_trace_holds_both_as_groups_of_processes_and_what_ranks_did_besides(slow):
    found = read(Run(slow.folder, slow).perfetto())
    names = list(found.processes.values())
    assert names == [f"{group}: rank {r}" for group in ("predicted", "measured, step 5") for r in range(4)]
    runtime = {pid: slices for (pid, tid), slices in found.slices.items() if "waits" in found.tracks[pid, tid]}
    assert len(runtime) == 4 and all(pid > 1000 for pid in runtime)
    for rank, slices in enumerate(runtime.values()):
        texts = [text for _, _, text, _ in slices]
        assert any(text.startswith("SEND_F" if rank < 3 else "SEND_B") for text in texts)
        assert "VALIDATE" in texts and any(text.startswith("wait for ") for text in texts)


def test_the_trace_has_counters_of_what_was_held(slow):
    found = read(Run(slow.folder, slow).perfetto())
    step, pids = step_of(slow, 5), {name: pid for pid, name in found.processes.items()}
    begin = min(start for start, _ in step.own)
    for rank in range(4):
        points = found.counters[pids[f"measured, step 5: rank {rank}"], "activations, measured (MiB)"]
        one = step.ranks[rank]
        last = {end - begin: 1.0 + op.mb for op, end in zip(one.ops, one.end, strict=True) if end >= begin}
        assert [(float(at) * 1000, float(value)) for at, value in points] == [
            (pytest.approx(at, abs=1), value) for at, value in sorted(last.items())
        ]


def test_two_copies_are_drawn_below_one_another(tmp_path):
    plan = compiled("1f1b", p=2, m=4, parallel={"dp": 2})
    found = recorded.drawn(record(plan, tmp_path, as_predicted(plan, op=slowed(plan, 3, 2.0))))
    assert [one.name for one in found] == ["predicted", "measured, step 5, replica 0", "measured, step 5, replica 1"]
    assert found[2].strip.length > 1.3 * found[1].strip.length


def test_a_run_without_a_trace_says_how_to_get_one(tmp_path):
    with pytest.raises(ZbcError, match="not a run directory"):
        Run.read(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    run = Run.read(tmp_path)
    with pytest.raises(ZbcError, match="no trace in") as raised:
        run.svg()
    assert "--trace" in raised.value.hint and not trace.has_trace(tmp_path)


@pytest.mark.long
@pytest.mark.skipif(browser.found() is None, reason="there is no Chromium")
def test_in_a_browser_the_pointer_tells_measured_from_predicted(slow, tmp_path):
    with browser.showing(Run(slow.folder, slow).html(), tmp_path) as page:
        tips = page.run(
            """zbc.rows.filter(row => row.rank === 1).map(row => {
              for (let i = 0; i < row.n; i++) if (D.kinds[row.k[i]].op === "B" && row.m[i] === 4)
                return zbc.described({ row, i });
            })"""
        )
        assert page.errors == []
    predicted, measured = tips
    assert predicted["head"] == measured["head"] == "B s1 m4"
    text = "\n".join(measured["lines"])
    assert "needs B s2 m4 of rank 2, which was done at" in text and "waited" in text and "predicted: " in text
    assert "which arrives at" in "\n".join(predicted["lines"])
