"""Chrome traces: the rules of the format, and the timeline slice by slice."""

from itertools import pairwise

import pytest

from tests.compiler.grid import FIXED
from tests.viz.drawing import drawn
from tests.viz.trace_reader import read
from zbc.compiler.memory.per_rank import peaks
from zbc.viz.perfetto import draw

US = 1000  # in a millisecond


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("comm", [0.0, 0.2, 5.0])
def test_a_trace_keeps_the_rules_and_holds_every_op_and_message(name, comm):
    one = drawn(name, costs=(1.1037, 1.3011, 0.60071, comm))
    trace = read(draw([one]))
    assert list(trace.processes.values()) == [f"rank {rank}" for rank in range(one.strip.ranks)]
    for rank in range(one.strip.ranks):
        pieces = list(one.strip.pieces(rank))
        slices = trace.slices[rank + 1, 1]
        assert [text for _, _, text, _ in slices] == [str(piece.op) for piece in pieces]
        assert [about for *_, about in slices] == [{"stage": p.op.stage, "microbatch": p.op.mb} for p in pieces]
        assert [float(start) for start, *_ in slices] == pytest.approx([US * p.start for p in pieces], abs=1e-3)
        assert [float(end) for _, end, *_ in slices] == pytest.approx([US * p.end for p in pieces], abs=1e-3)
    graph = one.strip.steps[0].graph
    pairs = [(i, j) for i, j in enumerate(graph.sources) if j >= 0 and graph.rank(i) != graph.rank(j)]
    crossing = {(str(graph.ops[j]), str(graph.ops[i])) for i, j in pairs}
    arrows = set()
    for (pid, tid, (_, _, text, about)), (_, _, taken) in trace.flows:
        if comm:
            assert trace.tracks[pid, tid].startswith("to rank ")
            assert about["for"] == taken[2]
        arrows.add((text.rpartition(" of ")[2], taken[2]))
    assert arrows == crossing
    assert len(trace.flows) == len(crossing)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_counters_reach_the_peak_of_the_rank_and_end_at_nothing(name):
    one = drawn(name)
    trace = read(draw([one]))
    most = [rank.units for rank in peaks(one.program, one.costs)]
    for rank, peak in enumerate(most):
        values = [float(value) for _, value in trace.counters[rank + 1, "activations (shares of a microbatch)"]]
        assert max(values) == pytest.approx(peak, abs=1e-6)
        assert values[-1] == 0


def test_tensors_on_their_way_together_get_tracks_of_their_own():
    trace = read(draw([drawn("gpipe", costs=(1.0, 1.0, 1.0, 7.0))]))
    names = [name for name in trace.tracks.values() if name.startswith("to rank 1")]
    assert "to rank 1" in names
    assert "to rank 1 (2)" in names


def test_several_plans_steps_and_ranks_share_a_trace():
    trace = read(draw([drawn("1f1b", steps=3), drawn("zb-h1")]))
    assert "1f1b: rank 0" in trace.processes.values()
    assert "zb-h1: rank 3" in trace.processes.values()
    first = trace.slices[1, 1]
    assert len(first) == 3 * 2 * 8
    assert all(one[1] <= two[0] for one, two in pairwise(first))
    assert sorted(read(draw([drawn("1f1b")], ranks=(2, 3))).processes.values()) == ["rank 2", "rank 3"]


def test_the_reader_itself_is_strict():
    good = draw([drawn("1f1b", 2, 2)])
    read(good)
    for wrong in (
        good.replace('"dur":', '"duration":', 1),
        good.replace('"ph":"f","bp":"e"', '"ph":"f","bp":"x"', 1),
        good.replace('"ts":0,', '"ts":900,', 1),
        good.replace('"name":"thread_name"', '"name":"process_sort_index"', 1),
    ):
        assert wrong != good
        with pytest.raises(AssertionError):
            read(wrong)
