"""Cells never lie: each is checked against the timeline."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compiler.grid import FIXED, chunk_counts, make, timed
from zbc.compiler.schedules import SCHEDULES
from zbc.ir import Kind
from zbc.viz.cells import by_slot, by_time
from zbc.viz.strip import once

every = pytest.mark.parametrize("name", FIXED)
few = settings(max_examples=25, deadline=None, derandomize=True)
times = st.sampled_from([0.25, 0.5, 1.0, 1.7, 3.0])


def every_drawn(test):
    return every(few(given(data=st.data())(test)))


def drawn(data, name):
    """A timeline of a small pipeline with drawn costs."""
    p, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    program = make(name, p, m, data.draw(st.sampled_from(chunk_counts(name))))
    f, b, w = (data.draw(times) for _ in range(3))
    return timed(program, f, b, w, data.draw(st.sampled_from([0.0, 0.3])))


def covered(span, left, right):
    return max(0.0, min(span.end, right) - max(span.start, left))


def shown(grid, rank):
    """The op of each cell of a rank, None where it is idle."""
    cells = [None] * grid.columns
    for block in grid.rows[rank]:
        for c in range(block.first, block.first + block.cells):
            assert cells[c] is None
            cells[c] = block.op
    return cells


@every_drawn
def test_a_cell_of_time_shows_the_op_that_covers_most_of_it_and_idle_cells_are_idle_for_most_of_it(name, data):
    timeline = drawn(data, name)
    begin = data.draw(st.sampled_from([0.0, 0.2])) * timeline.makespan
    end = data.draw(st.sampled_from([0.6, 1.0])) * timeline.makespan
    grid = by_time(once(timeline), (begin, end), data.draw(st.integers(5, 60)))
    assert grid.edges[0] == begin
    assert grid.edges[-1] == pytest.approx(end)
    for rank in range(timeline.ranks):
        mine = [span for span in timeline if span.rank == rank]
        for c, op in enumerate(shown(grid, rank)):
            left, right = grid.edges[c], grid.edges[c + 1]
            amounts = {span.op: covered(span, left, right) for span in mine}
            idle = (right - left) - sum(amounts.values())
            if op is None:
                assert idle >= (right - left) / 2 - 1e-6
            else:
                assert amounts[op] >= max(amounts.values()) - 1e-6
                assert idle <= (right - left) / 2 + 1e-6


@every_drawn
def test_ops_without_a_cell_are_counted(name, data):
    timeline = drawn(data, name)
    grid = by_time(once(timeline), (0.0, timeline.makespan), data.draw(st.integers(3, 40)))
    visible = {block.op for row in grid.rows for block in row}
    for kind in Kind:
        ops = [span.op for span in timeline if span.op.kind is kind]
        missing = [op for op in ops if op not in visible]
        assert grid.hidden.get(kind, (0, 0)) == (len(missing), len(ops))


@every
def test_equal_ops_get_equally_many_cells_where_there_is_room(name):
    timeline = timed(make(name, 4, 8, SCHEDULES[name].default_chunks), 1.0, 1.0, 1.0, 0.0)
    grid = by_time(once(timeline), (0.0, timeline.makespan), 150)
    assert grid.columns > 75
    assert not any(few for few, _ in grid.hidden.values())
    lengths = {op: block.cells for row in grid.rows for block in row for op in [block.op]}
    shortest = min(lengths.values())
    for span in timeline:
        unit = min(other.end - other.start for other in timeline)
        assert lengths[span.op] == shortest * round((span.end - span.start) / unit)


@every_drawn
def test_slots_keep_the_order_of_ranks_and_of_what_feeds_what_and_are_busy_exactly_while_their_op_runs(name, data):
    timeline = drawn(data, name)
    grid = by_slot(once(timeline), (0.0, timeline.makespan))
    graph, spans = timeline.graph, {span.op: span for span in timeline}
    column = {block.op: block.first for row in grid.rows for block in row}
    assert len(column) == sum(len(timeline.ops(rank)) for rank in range(timeline.ranks))
    for rank, row in enumerate(grid.rows):
        assert [block.op for block in row] == [graph.ops[i] for i in timeline.ops(rank)]
        assert all(a.first + a.cells <= b.first for a, b in pairwise(row))
        started, mine = {block.first: block.op for block in row}, [span for span in timeline if span.rank == rank]
        for c, op in enumerate(shown(grid, rank)):
            running = [s.op for s in mine if s.start <= grid.edges[c] + 1e-6 and grid.edges[c] < s.end - 1e-6]
            assert op == started.get(c, running[0] if running else None)
    for i, op in enumerate(graph.ops):
        if graph.sources[i] >= 0:
            assert column[graph.ops[graph.sources[i]]] < column[op]
    starts = sorted((column[span.op], span.start) for span in timeline)
    for (left, early), (right, late) in pairwise(starts):
        assert left == right or early <= late + 1e-6
    for c in range(grid.columns):
        together = [spans[block.op] for row in grid.rows for block in row if block.first == c]
        assert together, "ops that start in one slot run at the same time"
        assert max(span.start for span in together) <= min(span.end for span in together) + 1e-6


def test_a_pipeline_that_takes_no_time_has_no_cells_to_show():
    grid = by_time(once(timed(make("1f1b", 2, 2, 1), 0.0, 0.0, 0.0, 0.0)), (0.0, 1.0), 10)
    assert [len(row) for row in grid.rows] == [0, 0]
    assert not grid.hidden
