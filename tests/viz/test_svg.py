"""SVG pictures: every op at its time and with its length, nothing clipped, nothing overlapping."""

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

import zbc
from tests.compiler.grid import FIXED
from tests.listing import listing
from tests.viz.drawing import both_ways, drawn, whole
from zbc.ir import Placement
from zbc.viz.look import LOOKS
from zbc.viz.svg import LEFT, MARGIN, RIGHT, SvgView, draw, measured

SPACE = "{http://www.w3.org/2000/svg}"
FILLS = {fill for found in LOOKS.values() for fill in found.fills}


def read(text):
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SPACE}svg"
    return root


def blocks(root):
    return [r for r in root.iter(f"{SPACE}rect") if r.get("fill") in FILLS and r.get("stroke") is None]


def box(text):
    """(left, right, top, bottom) of a text, rather too large."""
    style = (text.get("class") or "").split()
    size = float(text.get("font-size") or (15 if "t" in style else 11))
    width = measured(text.text, size)
    x, y = float(text.get("x")), float(text.get("y"))
    left = x - width if "e" in style else x - width / 2 if "m" in style else x
    return left, left + width, y - 0.75 * size, y + 0.2 * size


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("width", [600, 1000, 1600])
def test_every_op_has_a_block_where_it_runs(name, width):
    one = drawn(name)
    found = blocks(read(draw([one], SvgView(width=width))))
    pieces = [piece for rank in range(4) for piece in one.strip.pieces(rank)]
    assert len(found) == len(pieces)
    scale = (width - 2 * MARGIN - LEFT - RIGHT) / one.strip.length
    for rect, piece in zip(found, pieces, strict=True):
        assert float(rect.get("x")) == pytest.approx(MARGIN + LEFT + piece.start * scale, abs=0.011)
        assert float(rect.get("width")) == pytest.approx((piece.end - piece.start) * scale, abs=0.011)
        assert rect.get("fill") == LOOKS[piece.op.kind].fills[piece.op.mb % 2]
        assert rect.find(f"{SPACE}title").text.startswith(f"{piece.op}: ")


PICTURES = {
    "narrow": lambda: draw([drawn("zb-v")], SvgView(width=600)),
    "paper": lambda: draw([drawn("zb-h1", 8, 24)]),
    "zoomed": lambda: draw([drawn("zb-v", 8, 24)], SvgView(zoom=(100.0, 300.0), ranks=(0, 3, 7))),
    "three steps": lambda: draw([drawn("1f1b", steps=3)]),
    "two plans": lambda: draw([drawn("1f1b"), drawn("interleaved-1f1b", 4, 8)]),
    "many ranks": lambda: draw([drawn("zb-h1", 48, 64)]),
    "a long title": lambda: draw([drawn("1f1b")], SvgView(width=500, title="a title that goes on " * 8)),
    "deep in a long step": lambda: draw(
        [drawn("1f1b", costs=(18e3, 18e3, 9e3, 10.0))], SvgView(zoom=(1e5 + 10, 1e5 + 10.001245))
    ),
    "fast ops": lambda: draw([drawn("zb-v", costs=(1e-4, 1e-4, 5e-5, 0.0))]),
}


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_is_clipped_none_lies_on_another_and_labels_lie_inside_their_blocks(name):
    root = read(PICTURES[name]())
    width, height = map(float, root.get("viewBox").split()[2:])
    texts = [(box(text), text.text) for text in root.iter(f"{SPACE}text")]
    rows = {}
    for found, text in texts:
        left, right, top, bottom = found
        assert left >= 0 and right <= width and top >= 0 and bottom <= height, text
        rows.setdefault(round(bottom, 1), []).append((found, text))
    for row in rows.values():
        for (one, text), (two, other) in pairwise(sorted(row)):
            assert one[1] <= two[0] + 0.01, (text, other)
    for above, below in pairwise(sorted(rows)):
        tops = [found[2] for found, _ in rows[below]]
        overlapping = [
            (text, other)
            for found, text in rows[above]
            for lower, other in rows[below]
            if found[3] > min(tops) + 0.5 and found[3] > lower[2] + 0.5 and found[0] < lower[1] and lower[0] < found[1]
        ]
        assert not overlapping
    rects = [(float(r.get("x")), float(r.get("x")) + float(r.get("width")), float(r.get("y"))) for r in blocks(root)]
    labels = [text for text in root.iter(f"{SPACE}text") if text.get("font-size")]
    for text in labels:
        left, right, top, bottom = box(text)
        over = [r for r in rects if r[0] <= left + 0.01 and right <= r[1] + 0.01]
        assert any(y <= top + 2 <= bottom <= y + 24 for _, _, y in over), text.text
    if name in ("paper", "two plans", "three steps"):
        assert len(labels) > 0.6 * len(rects)


def test_title_idle_time_axis_and_legend_are_there():
    texts = [text.text for text in read(draw([drawn("zb-v")])).iter(f"{SPACE}text")]
    assert texts[0] == "zb-v: 4 ranks, 8 stages, 8 microbatches"
    assert any("makespan" in text and "span" in text and "idle" in text for text in texts)
    for words in ("F forward", "W backward for the weights", "idle", "second stage of a rank", "ms", "rank", "0"):
        assert words in texts
    assert "D both backwards in one" not in texts


def test_a_second_pipe_is_hatched():
    picture = draw([both_ways()])
    assert picture.count('fill="url(#up)"') == 4 + 1  # the legend has one too
    assert "pipe that runs upwards" in picture
    assert ">P1<" in picture


def test_large_pictures_are_drawn_as_cells_and_stay_small():
    picture = draw([drawn("zb-h1", 32, 256)])
    assert len(picture) < 4_000_000
    assert not re.search(r"<title>[FBW]", picture)


@pytest.mark.long
def test_a_graph_says_whose_layers_its_stages_have(tmp_path):
    named = "4 ranks, 4 stages, 8 microbatches; vision 0-1, text 2, decoder 3"
    plan = zbc.plan(Path(__file__).parents[2] / "plans/towers.toml")
    plan.write(tmp_path)
    for one in (plan, zbc.load(tmp_path)):
        assert all(named in text for text in (one.svg(), one.html(), one.text(), one.perfetto()))


def test_stages_of_a_rank_have_bars_below_above_and_both():
    ops = "".join(f"{kind} s{s} m0, " for kind, order in (("F", range(4)), ("BW", range(3, -1, -1))) for s in order)
    picture = draw([whole(listing(f"rank 0: {ops[:-2]}", Placement.looped(1, 4), microbatches=1))])
    rects = [*read(picture).iter(f"{SPACE}rect")]
    rows = {r.get("x"): float(r.get("y")) for r in rects if r.get("fill") in FILLS and r.get("stroke") is None}
    bars = {x: sorted(round(float(r.get("y")) - y, 1) for r in rects if r.get("height") == "2.4" and r.get("x") == x)
            for x, y in rows.items()}  # fmt: skip
    assert [bars[x] for x in rows] == [[], [18], [1.6], [1.6, 18], [1.6, 18], [1.6], [18], []]
    texts = [text.text for text in read(picture).iter(f"{SPACE}text")]
    assert [text for text in texts if text in ("second stage of a rank", "third", "fourth")] == [
        "second stage of a rank",
        "third",
        "fourth",
    ]


def test_several_plans_share_an_axis():
    plans = [drawn("1f1b"), drawn("zb-v"), drawn("1f1b", costs=(10.0, 13.0, 6.0, 2.0))]
    root = read(draw(plans, SvgView()))
    titles = [text.text.partition(":")[0] for text in root.iter(f"{SPACE}text") if text.get("class") == "t"]
    assert titles == ["1f1b", "zb-v", "1f1b"]
    ends = [max(float(r.get("x")) + float(r.get("width")) for r in blocks(read(draw([one])))) for one in plans]
    last = max(float(r.get("x")) + float(r.get("width")) for r in blocks(root)[: plans[0].program.size // 2])
    assert last < ends[0] - 1
