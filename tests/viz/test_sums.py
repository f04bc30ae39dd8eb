"""Sums of ranks that share layers, drawn below the ops of groups that hide them."""

import json
import re

from tests.check.braids import with_sums
from zbc.compiler.cost.cost import Costs
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.sim.shared import shared
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Placement
from zbc.viz import perfetto, svg, terminal
from zbc.viz.look import HIDDEN, MEETING
from zbc.viz.strip import Drawn, once


def drawn(name="braid-v", p=3, m=9, a=0.3):
    costs = with_sums(Costs.uniform(Placement.vshape(p), 2.0, 2.0, 2.0), a)
    program = SCHEDULES[name].make(Request(p, m, 2, costs=costs))
    return Drawn(name, program, once(simulate(program, costs)), costs)


def pieces(one):
    timeline = one.strip.steps[0]
    return [piece for rank in range(timeline.ranks) for piece in shared(timeline, one.costs, rank)]


def test_a_picture_has_a_box_for_each_and_red_ones_for_those_that_are_waited_for():
    one = drawn()
    text = svg.draw([one], svg.SvgView(width=1200))
    boxes = {fill: len(re.findall(f'fill="{fill}"><title>sums of', text)) for fill in (HIDDEN, MEETING)}
    wide = [piece for piece in pieces(one) if piece.end - piece.start > 0.01]
    assert boxes == {HIDDEN: sum(piece.hidden for piece in wide), MEETING: sum(not piece.hidden for piece in wide)}
    assert "sums of ranks that share layers" in text and "sums that their rank waits for" in text


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
    assert "! sums that their rank waits for" in " ".join(lines)


def test_a_trace_has_a_track_for_each_rank():
    events = json.loads(perfetto.draw([drawn()]))["traceEvents"]
    named = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "sums of ranks that share layers" in named
    found = [event for event in events if event["name"].startswith("sums of")]
    assert {event["cat"] for event in found} == {"hidden", "waited for"}


def test_pictures_without_groups_or_sums_are_as_they_were():
    for one in (drawn("zb-v"), drawn(a=0.0)):
        assert one.braided == ("f_sums" in one.costs.ms and one.program.grouped)
    plain = drawn("zb-v")
    assert "sums of" not in svg.draw([plain], svg.SvgView()) and "share layers" not in terminal.draw([plain]).plain
