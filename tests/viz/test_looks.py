"""Ops and groups can be told apart without colour; cells never lie: each is checked against the timeline."""

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.check.braids import with_sums
from tests.compiler.grid import FIXED, chunk_counts, make, timed
from tests.listing import listing
from tests.lowered import lower
from tests.viz.drawing import both_ways, whole
from tests.viz.drawing import drawn as schedule
from zbc.compiler.cost.cost import Costs
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.sim.beside import shared
from zbc.compiler.sim.simulate import simulate, steady_state
from zbc.ir import Kind, Op, Placement
from zbc.viz import perfetto, svg, terminal
from zbc.viz.cells import by_slot, by_time
from zbc.viz.look import HIDDEN, LOOKS, MEETING, RESERVED, label, letter
from zbc.viz.strip import once, repeated
from zbc.viz.terminal import View, draw

SLICED = "rank 0: F s0 m0, F s0 m0.1, BW s0 m0.1, BW s0 m0"


def rows(text):
    return [line.split("|")[1] for line in text.split("\n") if line.count("|") == 2]


def test_no_two_things_share_a_letter():
    mine = [found.letter for found in LOOKS.values()]
    second = [found.other for found in LOOKS.values() if found.other != found.letter]
    letters = [*mine, *second, *RESERVED.values()]
    assert len(letters) == len(set(letters))
    assert all(len(found) == 1 and found.isupper() for found in letters)
    assert LOOKS.keys() >= {kind for kind in Kind if kind.computes}


def luminance(fill):
    red, green, blue = (int(fill[k : k + 2], 16) / 255 for k in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_fills_of_compute_kinds_stay_apart_in_grey():
    shades = {kind: [luminance(fill) for fill in LOOKS[kind].fills] for kind in Kind if kind.computes}
    for one, mine in shades.items():
        for other, theirs in shades.items():
            if one is not other:
                assert abs(min(mine) - min(theirs)) > 0.08, (one, other)
                assert not (min(theirs) < max(mine) < max(theirs)), (one, other)


def test_ink_is_readable_on_every_fill():
    """Contrast of at least 4.5 to 1 (WCAG 2.1, AA)."""

    def linear(fill):
        parts = [int(fill[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    for found in LOOKS.values():
        for fill in found.fills:
            bright, dark = sorted([linear(fill), linear(found.ink)], reverse=True)
            assert (bright + 0.05) / (dark + 0.05) >= 4.5, found


def test_pipes_slices_and_sums_have_letters_of_their_own():
    text = draw([both_ways()], View(width=80, by="slot")).plain
    assert rows(text) == ["F0P1Q1D0", "P1F0D0Q1"]
    assert "F/P forward" in text
    assert "second letters: the pipe that runs upwards" in text
    assert "lower case" not in text
    program = listing(SLICED)
    text = draw([whole(program)], View(width=80, by="slot")).plain
    assert rows(text)[0].split() == ["F0", "F0.1D0.1D0"]
    assert [label(Op(Kind.F, 0, 3)), label(Op(Kind.F, 4, 3), odd=True)] == ["F3", "f3"]
    assert label(Op(Kind.BW, 0, 2, 1, 1)) == "Q2.1"
    assert letter(Op(Kind.REDUCE, 0)) == "S"
    program = lower(replace(make("1f1b", 2, 2), dp=2))
    costs = Costs.uniform(program.placement).with_ms(reduce=(2.0, 0.0))
    text = draw([whole(program, costs)], View(width=80)).plain
    assert rows(text)[0].rstrip().endswith("S")
    assert "S sum of gradients" in text
    assert "S" not in rows(text)[1]


@pytest.mark.parametrize("name", FIXED)
def test_steps_with_a_barrier_repeat_and_without_one_settle(name):
    program = make(name, 4, 8)
    costs = Costs.uniform(program.placement, 1.0, 1.2, 0.7, 0.1)
    timeline = simulate(program, costs)
    strip = repeated(timeline, program, costs, 3, barrier=True)
    assert strip.length == pytest.approx(3 * timeline.makespan)
    for rank in range(4):
        pieces = list(strip.pieces(rank))
        size = len(pieces) // 3
        for k, piece in enumerate(pieces):
            assert piece.op == pieces[k % size].op
            assert piece.start == pytest.approx(pieces[k % size].start + k // size * timeline.makespan)
    free = repeated(timeline, program, costs, 8, barrier=False)
    ends = [step.last_end(0) for step in free.steps]
    assert ends[-1] - ends[-2] == pytest.approx(steady_state(timeline, costs), rel=1e-6)
    assert free.length <= 8 * timeline.makespan + 1e-9
    ids = [piece.id for rank in range(4) for piece in strip.pieces(rank)]
    assert len(ids) == len(set(ids)) == len(list(strip.sources()))


def test_three_steps_say_how_far_apart_they_end():
    text = draw([schedule("zb-h1", steps=3, costs=())], View(width=120)).plain
    assert "3 steps, 81 ms; the last ends 27 ms after the one before" in text
    assert "|80" in text


def test_of_two_plans_each_says_below_itself_what_is_too_short_for_a_cell():
    found = [whole(make("1f1b", 4, m), name=f"m={m}") for m in (64, 4)]
    lines = draw(found, View(width=80)).plain.split("\n")
    notes = [k for k, line in enumerate(lines) if line.startswith("too short for a cell")]
    second = next(k for k, line in enumerate(lines) if line.startswith("m=4"))
    assert len(notes) == 2 and notes[0] < second < notes[1]
    assert "of 256 F" in " ".join(lines[notes[0] : second]) and "of 16 F" in " ".join(lines[notes[1] :])


def test_two_plans_share_one_time_axis():
    text = draw([whole(make(name, 4, 8), name=name) for name in ("1f1b", "zb-h1")], View(width=120)).plain
    lines = text.split("\n")
    assert len({len(row) for row in rows(text)}) == 1
    first, second = (k for k, line in enumerate(lines) if line.startswith("ms"))
    assert lines[first] == lines[second]
    assert max(map(len, lines)) <= 120
    long, short = (rows(text)[k].rstrip(".") for k in (0, 4))
    assert len(short) / len(long) == pytest.approx(27 / 33, abs=0.02)
    assert "makespan 33 ms" in text
    assert "makespan 27 ms" in text


def drawn(name="braid-v", p=3, m=9, a=0.3):
    costs = with_sums(Costs.uniform(Placement.vshape(p), 2.0, 2.0, 2.0), a)
    program = SCHEDULES[name].make(Request(p, m, 2, costs=costs))
    return whole(program, costs, name)


def pieces(one):
    timeline = one.strip.steps[0]
    return [piece for rank in range(timeline.ranks) for piece in shared(timeline, one.costs, rank)]


def test_a_picture_has_a_box_for_each_and_red_ones_for_those_that_are_waited_for():
    one = drawn()
    text = svg.draw([one], svg.SvgView(width=1200))
    boxes = {fill: len(re.findall(f'fill="{fill}"><title>sums of', text)) for fill in (HIDDEN, MEETING)}
    wide = [piece for piece in pieces(one) if piece.end - piece.start > 0.01]
    assert boxes == {HIDDEN: sum(piece.hidden for piece in wide), MEETING: sum(not piece.hidden for piece in wide)}
    assert "sums and swaps inside of ops" in text and "that their rank waits for" in text


def test_the_terminal_has_a_line_below_each_rank():
    one = drawn()
    lines = terminal.draw([one], terminal.View(width=140)).plain.split("\n")
    rows = [line for line in lines if line.count("|") == 2]
    below = [line.split("|")[1] for line in rows if set(line.split("|")[1]) <= set(" -!")]
    assert len(rows) == 6 and len(below) == 3 and all(set("-!") <= set(line) for line in below)
    cell = one.strip.length / len(below[0])
    for rank, line in enumerate(below):
        found = list(shared(one.strip.steps[0], one.costs, rank))
        for at, sign in enumerate(line):
            if sign != " ":
                near = [piece for piece in found if piece.start < (at + 2) * cell and piece.end > (at - 1) * cell]
                assert any(piece.hidden == (sign == "-") for piece in near), (rank, at)
    assert "! those that their rank waits for" in " ".join(lines)


def test_a_trace_has_a_track_for_each_rank():
    events = json.loads(perfetto.draw([drawn()]))["traceEvents"]
    named = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "sums and swaps inside of ops" in named
    found = [event for event in events if event["name"].startswith("sums of")]
    assert {event["cat"] for event in found} == {"hidden", "waited for"}


every = pytest.mark.parametrize("name", FIXED)
few = settings(max_examples=25, deadline=None, derandomize=True)
times = st.sampled_from([0.25, 0.5, 1.0, 1.7, 3.0])


def every_drawn(test):
    return every(few(given(data=st.data())(test)))


def cells_of(data, name):
    """A timeline of a small pipeline with cells_of costs."""
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
    timeline = cells_of(data, name)
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


@pytest.mark.long("zb-v")
@every_drawn
def test_ops_without_a_cell_are_counted(name, data):
    timeline = cells_of(data, name)
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


@pytest.mark.long("gis")
@every_drawn
def test_slots_keep_the_order_of_ranks_and_of_what_feeds_what_and_are_busy_exactly_while_their_op_runs(name, data):
    timeline = cells_of(data, name)
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
