"""Pictures: golden ones that a person has reviewed, and properties of all of them."""

import pytest

from tests.compiler.grid import BRAIDS, FIXED, WAVES, make
from tests.lowered import lower
from tests.tiers import few
from tests.viz.drawing import whole
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.schedules import SCHEDULES
from zbc.ir import Kind
from zbc.viz.look import letter
from zbc.viz.terminal import View, draw

every = pytest.mark.parametrize("name", [*FIXED, *WAVES, *BRAIDS])
PAPER = (18.522, 18.086, 9.337, 0.601)  # ms of F, B, W and a transfer; arXiv 2401.10241, 1.5B


def picture(name, p, m, view, costs=(1.0, 1.0, 1.0, 0.0)):
    program = lower(make(name, p, m, SCHEDULES[name].default_chunks))
    known = Costs.uniform(program.placement, *costs)
    return draw([whole(program, known)], view)


def rows(text):
    """The cells of each row, by rank."""
    return {int(line.split("|")[0]): line.split("|")[1] for line in text.split("\n") if line.count("|") == 2}


@every
def test_four_ranks_and_eight_microbatches_look_as_they_did(name, golden):
    times = picture(name, 4, 8, View(width=120))
    slots = picture(name, 4, 8, View(width=120, by="slot"))
    real = picture(name, 4, 8, View(width=160), PAPER)
    golden(f"timeline-{name}.txt", "\n\n".join(part.plain for part in (times, slots, real)) + "\n")


@pytest.mark.long("time-80-hanayo", "time-80-breadth-first")
@every
@pytest.mark.parametrize("width", few([60, 80, 100, 120, 160, 240], (80,)))
@pytest.mark.parametrize("by", ["time", "slot"])
def test_no_line_is_wider_than_asked_for_and_all_rows_are_equally_wide(name, width, by):
    text = picture(name, 8, 12, View(width=width, by=by), PAPER).plain
    assert max(map(len, text.split("\n"))) <= width
    panels = [line for line in text.split("\n") if line.count("|") == 2]
    assert len(panels) % 8 == 0
    for first in range(0, len(panels), 8):
        assert len({line.rindex("|") for line in panels[first : first + 8]}) == 1


def test_slots_of_unit_ops_are_the_figure_of_the_paper():
    """arXiv 2401.10241, figure 3, ZB-H1: with F = B = W = 1 a slot is a time."""
    found = rows(picture("zb-h1", 4, 8, View(width=120, by="slot")).plain)
    assert found == {
        0: "F0F1F2F3......B0W0F4B1W1F5B2W2F6B3W3F7B4W4B5W5B6W6B7W7",
        1: "..F0F1F2....B0F3B1W0F4B2W1F5B3W2F6B4W3F7B5W4B6W5B7W6W7",
        2: "....F0F1..B0F2B1F3B2W0F4B3W1F5B4W2F6B5W3F7B6W4B7W5W6W7",
        3: "......F0B0F1B1F2B2F3B3W0F4B4W1F5B5W2F6B6W3F7B7W4W5W6W7",
    }


def test_zoom_shows_the_window_and_labels_it():
    whole = rows(picture("1f1b", 4, 8, View(width=120)).plain)
    text = picture("1f1b", 4, 8, View(width=120, zoom=(10.0, 21.0), ranks=(3, 0))).plain
    part = rows(text)
    assert list(part) == [3, 0]  # the ranks asked for, and no others
    assert "|10" in text
    assert "|0" not in text
    letters = [[c for c in row if c.isalpha()] for row in (whole[0], part[0])]
    assert len(letters[1]) < len(letters[0])
    assert part[0].startswith("D0")


def test_what_is_idle_is_named_and_where_asked_for_both_bubble_rates():
    text = picture("zb-v", 4, 8, View(width=120)).plain
    assert "makespan 25.5 ms, idle 5.9%, balance 100.0%; span 24 ms\n" in text + "\n" and "bubble" not in text
    text = picture("zb-v", 4, 8, View(width=140, bubbles=True)).plain
    assert "span 24 ms; bubble 5.9% of the makespan, 0.0% of the span" in text


def test_the_axis_puts_a_bar_under_the_cell_that_begins_at_its_time():
    text = picture("1f1b", 4, 8, View(width=120)).plain.split("\n")
    row, axis = text[1], text[5]
    assert axis.startswith("ms  |0")
    per_ms = len(row.split("|")[1]) / 33
    for label in ("10", "20", "30"):
        assert axis.index(f"|{label}") == pytest.approx(row.index("|") + 1 + int(label) * per_ms, abs=0.51)


@every
def test_the_memory_line_ends_with_the_peak_of_its_rank_and_is_full_where_the_peak_is_highest(name):
    program = lower(make(name, 4, 8, SCHEDULES[name].default_chunks))
    costs = Costs.uniform(program.placement)
    text = draw([whole(program, costs)], View(width=120)).plain
    found = [line.rsplit("| ", 1)[1] for line in text.split("\n") if line.count("|") == 2]
    most = [memory.units for memory in peaks(program, costs)]
    assert [float(tail.split()[-1]) for tail in found] == pytest.approx(most, rel=5e-3)
    assert ["█" in tail for tail in found] == [units > 15 / 16 * max(most) - 1e-9 for units in most]


def test_narrow_pictures_and_plain_consoles_have_no_memory_line():
    assert "█" not in picture("1f1b", 4, 8, View(width=80)).plain
    assert picture("1f1b", 4, 8, View(width=120, unicode=False)).plain.isascii()


@pytest.mark.long
@pytest.mark.parametrize("width", [80, 160])
def test_of_a_long_step_three_windows_show_every_op_in_its_order(width):
    text = picture("zb-v", 16, 64, View(width=width)).plain
    program = lower(make("zb-v", 16, 64, 2))
    found = rows(text)
    for rank, row in found.items():
        ops = [op for op in program.ranks[rank] if op.kind.computes]
        halves = [
            op._replace(kind=kind) for op in ops for kind in ((Kind.B, Kind.W) if op.kind is Kind.BW else (op.kind,))
        ]
        order = "".join(letter(op, odd=op.stage >= 16) for op in halves)
        begin, middle, end = (part.strip(".") for part in row.split("~"))
        assert order.startswith(begin) and order.endswith(end)
        assert middle in order and set(middle) == set("fbwFBW")
    left = next(line for line in text.split("\n") if line.startswith("left out at ~: "))
    a, b, c, d = (float(word) for word in left.replace("-", " ").split() if word[0].isdigit())
    assert len(found[0].replace("~", "")) / 2 == 199.5 - (b - a) - (d - c)


def test_windows_narrow_only_where_they_must():
    assert rows(picture("zb-h1", 8, 64, View(width=80), (1.0, 1.0, 0.001, 0.0)).plain)[0].startswith("F0 F1")
    fits = picture("zb-v", 4, 8, View(width=80)).plain
    zoomed = picture("zb-v", 16, 64, View(width=80, zoom=(0.0, 150.0))).plain
    assert "~" not in fits + zoomed and "left out" not in fits + zoomed
    assert "too short for a cell of" in zoomed and "--zoom" in zoomed and "too short" not in fits


def test_colours_tell_kinds_and_neighbouring_microbatches_apart():
    spans = {str(span.style) for span in picture("zb-v", 4, 8, View(width=120)).spans}
    assert len([style for style in spans if " on " in style]) == 6  # three kinds, two shades each
