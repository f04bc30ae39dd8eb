"""The HTML page: its contents, and in a real browser its picture, search and answers."""

import json
import re

import pytest

from tests.compiler.grid import make
from tests.jobs import job
from tests.lowered import lower
from tests.viz import browser
from tests.viz.drawing import both_ways, drawn, whole
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.sim.simulate import simulate
from zbc.compiler.whatif.why import chain
from zbc.ir import Kind
from zbc.viz import html
from zbc.viz.strip import Drawn, signs


def data_of(page):
    return json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.S)[1].replace("<\\/", "</"))


def spans(data, panel, row):
    """(kind, stage, mb, start, end) of a row, computed as in the page."""
    raw, at, found = panel["ranks"][row], 0.0, []
    for k, s, m, d, g in zip(raw["k"], raw["s"], raw["m"], raw["d"], raw["g"], strict=True):
        start = at + g * data["unit"]
        at = start + panel["durations"][d]
        found.append((data["kinds"][k]["op"], s, m, start, at))
    return found


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "zb-h2", "interleaved-1f1b"])
def test_the_data_of_the_page_are_the_timeline(name):
    one = drawn(name, steps=2)
    data = data_of(html.draw([one]))
    (panel,) = data["panels"]
    for rank in range(4):
        mine = list(one.strip.pieces(rank))
        shown = spans(data, panel, rank)
        assert [(kind, s, m) for kind, s, m, _, _ in shown] == [(p.op.kind, p.op.stage, p.op.mb) for p in mine]
        times = [time for piece in mine for time in (piece.start, piece.end)]
        assert [time for *_, start, end in shown for time in (start, end)] == pytest.approx(times, abs=1e-6)
    flat = [(rank, p) for rank in range(4) for p in one.strip.pieces(rank)]
    where = {piece.id: k for k, (_, piece) in enumerate(flat)}
    sources = list(one.strip.sources())
    assert panel["source"] == [where.get(sources[piece.id], -1) for _, piece in flat]
    timeline = one.strip.steps[0]
    nodes = chain(timeline, max(range(4), key=timeline.closes))
    path = [i for i in nodes if i < len(timeline.graph.ops)]
    assert [flat[k][1].op for k in panel["path"][-len(path) :]] == [timeline.graph.ops[i] for i in path]


@pytest.mark.parametrize(("name", "stages"), [("zb-v", 8), ("1f1b", 0), ("dualpipe", 0)])
def test_a_joined_backward_is_drawn_as_two_where_the_schedule_splits_all(name, stages):
    one = whole(lower(make(name, 4, 8)), Costs.uniform(make(name, 4, 8).placement, 1.0, 3.0, 1.0))
    (panel,) = data_of(html.draw([one]))["panels"]
    assert panel["apart"] == {str(stage): 0.75 for stage in range(stages)}
    assert (Kind.BW in signs([one]).kinds) == (stages == 0) and Kind.BW in one.program.kinds


def test_a_page_is_one_file_that_names_cannot_break_with_the_ranks_asked_for():
    page = html.draw([drawn("zb-v"), drawn("1f1b")])
    assert page.startswith("<!doctype html>")
    assert not re.search(r"(src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest|import\(", page)
    assert "{{" not in page
    assert re.findall(r'"https?:[^"]*"', page) == ['"https://ui.perfetto.dev"']  # the target of a button
    assert page.count("http") == page.count("http-equiv") + 1
    one = drawn("1f1b")
    page = html.draw([Drawn("</script><b>", one.program, one.strip, one.costs), one])
    assert page.count("</script>") == 2
    assert "<b>" not in page.split("<script")[0]
    (panel,) = data_of(html.draw([drawn("1f1b")], ranks=(3, 1)))["panels"]
    assert panel["names"] == [3, 1]
    assert len(panel["ranks"]) == 2
    assert max(panel["source"]) < sum(len(raw["k"]) for raw in panel["ranks"])


# ---- in a browser --------------------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(browser.found() is None, reason="no Chromium on this machine")


def frozen():
    program = make("1f1b", 4, 8)
    ranks = [
        [op._replace(share=40) if op.kind.makes_part and op.mb == 2 else op for op in ops] for ops in program.ranks
    ]
    program = program.with_ranks(ranks, by="freeze")
    return whole(program, Costs.uniform(program.placement, 1.0, 1.3, 0.6, 0.2), "frozen")


@pytest.mark.long
@needs_browser
def test_a_page_names_the_share_of_ops_with_frozen_layers(tmp_path):
    with browser.showing(html.draw([frozen()]), tmp_path) as page:
        found = page.run("zbc.rows.flatMap(row => Array.from({length: row.n}, (_, i) => zbc.described({row, i}).head))")
    assert {f"BW s{s} m2 40%" for s in range(4)} <= set(found) and "BW s0 m3" in found and "BW s0 m2" not in found


@needs_browser
def test_a_page_of_unequal_microbatches_has_what_each_holds_and_when_its_messages_arrive(tmp_path):
    tokens = [16, 4, 8, 2, 16, 2, 4, 8]
    times = {"f": 4.0, "b": 4.0, "w": 4.0, "comm": 1.0}
    made = compile_job(job(schedule={"tokens": tokens, "renumber": False}, kind="zb-h1", costs=times), suggest=False)
    with browser.showing(html.draw([whole(made.compute, made.costs)]), tmp_path) as page:
        held = page.run("zbc.rows.map((row) => curveOf(row).peak)")
        said = page.run("zbc.rows[1].m.map((_, i) => zbc.described({row: zbc.rows[1], i}).lines.join(' '))")
    assert held == pytest.approx([rank.units for rank in peaks(made.compute, made.costs)])
    ends = {(one.op.kind, one.op.stage, one.op.mb): one.end for one in simulate(made.compute, made.costs)}
    for op, text in zip(made.compute.ranks[1], said, strict=True):
        if op.kind is Kind.F:
            arrives = ends[Kind.F, 0, op.mb] + made.costs.link(0, 0, 1, op.mb)
            assert float(re.search(r"which arrives at ([\d.]+)", text)[1]) == pytest.approx(arrives, rel=1e-4)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A browser with the page of one plan, fresh for each test by `page.open`."""
    with browser.showing(html.draw([drawn("zb-v")]), tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def opened(page):
    page.errors.clear()
    page.requests.clear()
    page.open(page.path)
    yield page
    assert page.errors == []
    assert page.requests == [page.path.as_uri()]


def tip(page):
    page.frame()
    return page.run("""(() => { const tip = document.getElementById("tip");
      return tip.style.display === "block" ? tip.textContent : null; })()""")


def view(page):
    page.frame()
    return page.run("[zbc.state.a, zbc.state.b]")


@needs_browser
def test_hovering_tells_op_times_dependency_and_what_it_waited_for(opened):
    one = drawn("zb-v")
    pieces = {piece.op: piece for rank in range(4) for piece in one.strip.pieces(rank)}
    op = next(op for op in pieces if str(op) == "F s2 m0")
    opened.mouse("mouseMoved", *opened.place("F", 2, 0))
    text = tip(opened)
    assert text.startswith("F s2 m0")
    assert "rank 2, forward" in text
    assert f"{pieces[op].start:.6g} ms to {pieces[op].end:.6g} ms" in text
    assert "needs F s1 m0 of rank 1, which arrives at 1.4 ms" in text
    assert "waited 1.4 ms for F s1 m0" in text
    assert "feeds F s3 m0 of rank 3" in text
    opened.mouse("mouseMoved", 5, 5)
    assert tip(opened) is None


@needs_browser
def test_every_op_answers_where_it_is_drawn(opened):
    """Over all ops: the op under the middle of its block is the op itself."""
    missed = opened.run("""(() => { let missed = 0;
      for (const row of zbc.rows) for (let i = 0; i < row.n; i++) {
        const at = zbc.hit(zbc.xOf((row.start[i] + row.end[i]) / 2), zbc.tops()[row.index] + 3);
        if (!at || at.row !== row || at.i !== i) missed++;
      } return missed; })()""")
    assert missed == 0


@needs_browser
def test_the_wheel_zooms_where_the_pointer_is_and_dragging_pans(opened):
    before = view(opened)
    x, y = map(round, opened.place("F", 2, 3))
    apart = opened.place("F", 2, 3)[0] - x
    opened.mouse("mouseWheel", x, y, deltaX=0, deltaY=-400)
    after = view(opened)
    assert after[1] - after[0] == pytest.approx((before[1] - before[0]) / 2.71828, rel=1e-3)
    assert opened.place("F", 2, 3)[0] == pytest.approx(x + 2.71828 * apart, abs=0.01)
    opened.mouse("mousePressed", x, y)
    opened.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
    opened.mouse("mouseReleased", x - 100, y)
    assert opened.place("F", 2, 3)[0] == pytest.approx(x - 100 + 2.71828 * apart, abs=0.01)
    opened.key("f")
    assert view(opened) == pytest.approx(before)


@needs_browser
def test_an_op_is_found_by_its_text(opened):
    opened.key("/")
    opened.type("F s3 m5")
    assert opened.run('document.getElementById("found").textContent') == "1 found, Enter shows the next"
    opened.key("Enter")
    begin, end = view(opened)
    pieces = {str(piece.op): piece for rank in range(4) for piece in drawn("zb-v").strip.pieces(rank)}
    assert begin < pieces["F s3 m5"].start < pieces["F s3 m5"].end < end
    assert opened.run("zbc.state.pinned.i") is not None
    opened.key("Escape")
    opened.run('zbc.find("X9")')
    assert opened.run('document.getElementById("found").textContent') == "no such kind of op"
    opened.run('zbc.find("m5 r2")')
    assert opened.run("zbc.state.matches.length") == sum(op.mb == 5 for op in make("zb-v", 4, 8).ranks[2])


@needs_browser
def test_a_key_shows_the_critical_path_and_another_the_dark_theme(opened):
    opened.key("c")
    assert opened.run("zbc.state.path") is True
    assert opened.run('document.getElementById("path").getAttribute("aria-pressed")') == "true"
    light = opened.run("getComputedStyle(document.body).backgroundColor")
    opened.key("t")
    assert opened.run("document.documentElement.dataset.theme") == "dark"
    assert opened.run("getComputedStyle(document.body).backgroundColor") != light
    opened.key("t")


@needs_browser
def test_blocks_have_the_colours_of_their_kinds(opened):
    """The pixels of the canvas themselves."""
    for kind, op in (("F", (2, 0)), ("B", (7, 0)), ("W", (7, 0))):
        x, y = opened.place(kind, *op)
        pixel = opened.run(f"""(() => {{ const c = document.getElementById("time"), b = c.getBoundingClientRect();
          return [...c.getContext("2d").getImageData({x} - b.left, {y} - b.top - 2, 1, 1).data].slice(0, 3); }})()""")
        fill = opened.run(f'D.kinds.find((kind) => kind.op === "{kind}").fills[0]')
        assert pixel == [int(fill[k : k + 2], 16) for k in (1, 3, 5)]


@needs_browser
def test_the_memory_below_ends_at_nothing_and_peaks_where_the_plan_does(opened):
    one = drawn("zb-v")
    found = opened.run("zbc.rows.map((row) => [curveOf(row).peak, curveOf(row).held[row.n - 1]])")
    assert [peak for peak, _ in found] == pytest.approx([rank.units for rank in peaks(one.program, one.costs)])
    assert [last for _, last in found] == pytest.approx([0.0] * 4, abs=1e-9)
    late = opened.run("""zbc.rows.flatMap((row) => [...curveOf(row).times].filter((ms, i) =>
      ms !== (D.kinds[row.k[i]].op === "F" ? row.start[i] : row.end[i])))""")
    assert late == []  # F fills as it starts, backwards free as they end


@needs_browser
def test_pages_of_two_plans_and_of_two_pipes_draw_without_errors(page, tmp_path):
    path = tmp_path / "two.html"
    path.write_text(html.draw([drawn("1f1b", steps=3), both_ways("both ways")]), encoding="utf-8")
    page.errors.clear()
    page.open(path)
    x, y = page.place("F", 1, 1)
    page.mouse("mouseMoved", x, y)
    assert "F s1 m1" in tip(page)
    page.run('zbc.find("up")')
    assert page.run("zbc.state.matches.length") == 4
    assert page.errors == []


@needs_browser
def test_the_button_hands_perfetto_the_picture_once_its_page_answers(opened):
    found = opened.run("""(() => { const sent = [];
      window.open = (url) => ({ postMessage: (what, to) => sent.push([url, to, what]) });
      document.getElementById("perfetto").click();
      const answer = (origin) => window.dispatchEvent(new MessageEvent("message", { origin, data: "PONG" }));
      answer("https://elsewhere.example");
      const early = sent.length;
      answer("https://ui.perfetto.dev");
      answer("https://ui.perfetto.dev");
      const [url, to, what] = sent[0];
      const text = new TextDecoder().decode(what.perfetto.buffer);
      return { early, count: sent.length, url, to, title: what.perfetto.title, text }; })()""")
    assert (found["early"], found["count"]) == (0, 1)
    assert found["url"] == found["to"] == "https://ui.perfetto.dev" and "zb-v" in found["title"]
    events = json.loads(found["text"])["traceEvents"]
    one = drawn("zb-v")
    times = {(e["tid"], e["name"]): (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    for rank in range(4):
        for piece in one.strip.pieces(rank):
            expected = 1e3 * piece.start, 1e3 * (piece.end - piece.start)
            assert times.pop((rank, str(piece.op))) == pytest.approx(expected, abs=1e-3)
    assert not times
