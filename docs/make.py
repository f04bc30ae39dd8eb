"""Makes the pictures and the schedule pages of the documentation with zbc itself: `make docs`.

Screenshots of the page need a Chromium on the machine; without one the old ones stay.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from rich._export_format import CONSOLE_SVG_FORMAT  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.text import Text  # noqa: E402

import zbc  # noqa: E402
from tests.recorded_runs import World, record  # noqa: E402
from tests.viz import browser  # noqa: E402
from zbc import cli  # noqa: E402
from zbc.api import Plan  # noqa: E402
from zbc.commands.explaining import card_parts  # noqa: E402
from zbc.compiler.check import survival  # noqa: E402
from zbc.compiler.compile import compile_job  # noqa: E402
from zbc.compiler.cost.cost import Costs  # noqa: E402
from zbc.compiler.graph import build  # noqa: E402
from zbc.compiler.lowering import Lowering  # noqa: E402
from zbc.compiler.passes.offload import Offload  # noqa: E402
from zbc.compiler.passes.weave import Weave  # noqa: E402
from zbc.compiler.schedules import SCHEDULES, Request, ScheduleCard  # noqa: E402
from zbc.compiler.schedules.searched import even_slices  # noqa: E402
from zbc.compiler.shapes import load_job  # noqa: E402
from zbc.compiler.sim.context import Context  # noqa: E402
from zbc.explain import glossary  # noqa: E402
from zbc.ir import Op  # noqa: E402
from zbc.job.spec import SECTIONS, json_schema  # noqa: E402
from zbc.text import percent, short  # noqa: E402
from zbc.viz import svg  # noqa: E402
from zbc.viz.strip import Drawn, once, repeated  # noqa: E402
from zbc.viz.terminal import View, draw  # noqa: E402

README = ROOT / "README.md"
BIDIRECTIONAL = ROOT / "docs" / "bidirectional.md"
FIDELITY = ROOT / "docs" / "results.md"
UNIT = "\n[costs]\nf = 1\nb = 1\nw = 1\n"
PICTURES = ROOT / "docs" / "pictures"
PAGES = ROOT / "docs" / "schedules"
LESSON = ROOT / "plans" / "lesson.toml"
PAPER = ROOT / "plans" / "paper-1.5b.toml"
STEPS = ("1f1b", "zb-h1", "zb-h2", "zb-v")  # of the tutorial
WIDTH = 860
CARD = (4, 8)  # ranks and microbatches of the pictures of schedules
SURVIVAL = re.compile(r"<!-- survival -->\n(.*?)\n<!-- end -->", re.DOTALL)
WORDS = re.compile(r"<!-- words -->\n(.*?)<!-- end -->", re.DOTALL)
_FONT = re.compile(r"\s*@font-face \{\{.*?\}\}", re.DOTALL)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    tutorial()
    terminals()
    recorded()
    screenshots()
    schedules()
    sequence()
    memory()
    vocabulary()
    braid()
    gpu()
    write(ROOT / "docs" / "reference.md", reference())
    for page, names in ((README, ("picture", "compare")), (FIDELITY, ("fidelity",)), (BIDIRECTIONAL, TWO_PIPES_BLOCKS)):
        write(page, fill(page.read_text(encoding="utf-8"), names))
    write(ROOT / "docs" / "words.md", words((ROOT / "docs" / "words.md").read_text(encoding="utf-8")))


# ---- tables --------------------------------------------------------------------------------------------------


def reference() -> str:
    """All keys of a job file: type, default and meaning, from the schema that `zbc explain keys --json` prints."""
    schema = json_schema()
    about = "Made by `make docs` from the schema of `zbc explain keys --json`; `zbc explain KEY` shows one of them."
    parts = [f"# Keys of a job file\n\n{about}\n"]
    for name in SECTIONS:
        lines = [f"## [{name}]\n", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        parts.append("\n".join([*lines, *rows(name, schema["$defs"][name], schema["$defs"])]) + "\n")
    return "\n".join(parts)


def rows(name: str, section: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[str]:
    """A row of a table for each key, with those of the tables inside."""
    for key, value in section["properties"].items():
        kind, below = typed(value, known)
        default = "" if value.get("default") is None else f"`{json.dumps(value['default'])}`"
        if key in section.get("required", ()):
            default = "required"
        cells = (f"`{key}`", kind, "" if below else default, value.get("description", ""))
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"
        inside = {"properties": {f"{key}.{part}": of for part, of in below.get("properties", {}).items()}}
        yield from rows(name, inside, known)


def typed(value: Mapping[str, Any], known: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The type of a value in words, and the table that it is, {} for others."""
    if "$ref" in value:
        return "table", known[value["$ref"].rpartition("/")[2]]
    if "anyOf" in value:
        kinds = [typed(one, known) for one in value["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kind for kind, _ in kinds)), next((below for _, below in kinds if below), {})
    if "enum" in value or "const" in value:
        return ", ".join(f"`{json.dumps(one)}`" for one in value.get("enum", [value.get("const")])), {}
    if value.get("type") == "array":
        items = value.get("items", {})
        return ("tables" if "$ref" in items else f"list of {typed(items, known)[0]}s"), {}
    names = {"integer": "whole number", "boolean": "true or false", "object": "table"}
    return names.get(value.get("type", ""), value.get("type", "any value")), {}


def words(page: str) -> str:
    """The page with all words that `zbc explain` knows."""
    lines = ["| word | also | meaning |", "| --- | --- | --- |"]
    for word in glossary.WORDS:
        own, *others = word.names
        lines.append(f"| [{own}]({word.page}) | {', '.join(others)} | {word.text} |")
    return WORDS.sub(lambda _: "<!-- words -->\n" + "\n".join(lines) + "\n<!-- end -->", page)


def planned(path: Path, schedule: str) -> Plan:
    return zbc.plan(zbc.load(path, schedule=schedule))


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    print(path.relative_to(ROOT))


# ---- blocks of pages between `<!-- NAME -->` and `<!-- end -->` ------------------------------------------------


def example_picture() -> str:
    """ZB-V on four ranks at unit times."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "unit.toml"
        job.write_text((ROOT / "plans" / "tiny.toml").read_text() + UNIT)
        return f"```\n{_printed('visualize', str(job))}```"


def comparison() -> str:
    """The schedules at the published times of the 1.5B model."""
    job, cards = str(ROOT / "plans" / "paper-1.5b.toml"), ("--set", "hardware.memory_gib=80")
    return _printed("compare", job, *cards, "--format", "md").rstrip()


def fidelity() -> str:
    """Measured against simulated steps, from the newest result file."""
    newest = sorted((ROOT / "bench" / "results").glob("*-fidelity-run.txt"))[-1]
    rows = re.findall(
        r"^(\S+)\s+(zbc|torch, our order|Schedule\w+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)", newest.read_text(), re.M
    )
    lines = ["| schedule | runtime | simulated ms | measured ms | ratio |", "| --- | --- | ---: | ---: | ---: |"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), "", f"From bench/results/{newest.name}."])


ONE_PIPE = "1f1b,interleaved-1f1b,zb-v,dualpipe-v"
TWO_PIPES = "chimera,bitpipe,dualpipe,chimera-zb,bitpipe-zb"
COLUMNS = ("schedule", "makespan", "of makespan", "units", "params", "reduced")


def two_pipes(p: int, m: int) -> str:
    """Schedules with one pipe and with two at unit times, some columns of the table."""
    settings = [f"parallel.pp={p}", f"schedule.microbatches={m}", *(f"costs.{key}=1" for key in "fbw")]
    settings += ["costs.comm=0", "costs.act_w=1", "costs.reduce=0"]
    wanted = [part for setting in settings for part in ("--set", setting)]
    schedules = ("--schedule", f"{ONE_PIPE},{TWO_PIPES}")
    table = _printed("compare", str(ROOT / "plans" / "paper-1.5b.toml"), *schedules, *wanted, "--format", "md", "-v")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    kept = [rows[0].index(name) for name in COLUMNS]
    return "\n".join("| " + " | ".join(row[k] for k in kept) + " |" for row in rows)


BLOCKS = {
    "picture": example_picture,
    "compare": comparison,
    "fidelity": fidelity,
    "two pipes, p = 8, m = 8": lambda: two_pipes(8, 8),
    "two pipes, p = 8, m = 32": lambda: two_pipes(8, 32),
}
TWO_PIPES_BLOCKS = tuple(name for name in BLOCKS if name.startswith("two "))


def fill(text: str, names: tuple[str, ...]) -> str:
    """The text with the named blocks made again."""
    for name in names:
        start, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, _, rest = text.partition(start)
        text = f"{before}{start}{BLOCKS[name]()}\n{end}{rest.partition(end)[2]}"
    return text


def _printed(*arguments: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main(list(arguments))
    return out.getvalue()


# ---- the tutorial --------------------------------------------------------------------------------------------


def tutorial() -> None:
    plans = {name: planned(LESSON, name) for name in STEPS}
    for name, plan in plans.items():
        write(PICTURES / f"lesson-{name}.svg", plan.svg(width=WIDTH))
    ends = plans["zb-h2"]
    for barrier in (True, False):
        strip = repeated(ends.timeline, ends.program, ends.costs, 3, barrier=barrier)
        drawn = Drawn("zb-h2", ends.program, strip, ends.costs)
        name = "with" if barrier else "without"
        write(PICTURES / f"lesson-steps-{name}-barrier.svg", svg.draw([drawn], svg.SvgView(width=WIDTH)))
    both = [Drawn(name, plan.program, once(plan.timeline), plan.costs) for name, plan in plans.items()]
    write(PICTURES / "lesson-compared.svg", svg.draw([both[0], both[-1]], svg.SvgView(width=WIDTH)))


# ---- what a terminal and a browser show ----------------------------------------------------------------------


def terminals() -> None:
    plan = planned(PAPER, "zb-v")
    for width in (80, 160):
        text = draw([Drawn("", plan.program, once(plan.timeline), plan.costs)], View(width=width))
        write(PICTURES / f"terminal-{width}.svg", terminal(text, width))
        write(PICTURES / f"terminal-{width}-plain.svg", terminal(Text(text.plain), width))


def made_up(folder: Path) -> zbc.Run:
    """A recorded run with a slow rank 2 and one op out of line: made up, so that it is always the same."""
    plan = compile_job(load_job(LESSON, ["schedule.kind=zb-h1"]))
    draw = random.Random(1)

    def took(op: Op, rank: int, step: int) -> float:
        usual = plan.costs.duration(op) * (1.5 if rank == 2 else 1.02) * draw.uniform(0.97, 1.05)
        return usual + (3.0 if (str(op), step) == ("F s0 m5", 5) else 0.0)

    world = World(took, lambda sender, receiver: 0.08, transfer=0.01, data=0.02, agree=0.1)
    return zbc.Run(folder / "run", record(plan, folder, world))


def recorded() -> None:
    with tempfile.TemporaryDirectory() as name:
        run = made_up(Path(name))
        write(PICTURES / "recorded.svg", svg.draw(run.drawn(first=5), svg.SvgView(width=WIDTH)))
        for width in (80, 160):
            text = draw(run.drawn(first=5), View(width=width))
            write(PICTURES / f"recorded-{width}.svg", terminal(text, width))
            write(PICTURES / f"recorded-{width}-plain.svg", terminal(Text(text.plain), width))


def terminal(text: Text, width: int) -> str:
    """What a terminal of that width shows; the fonts are those of the reader."""
    console = Console(record=True, width=width, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    console.print(text, soft_wrap=True)
    code = _FONT.sub("", CONSOLE_SVG_FORMAT)
    return console.export_svg(title="zbc visualize", code_format=code, unique_id=f"zbc{width}") + "\n"


def screenshots() -> None:
    if browser.found() is None:
        print("no Chromium on this machine: the screenshots of the page stay as they are", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # Chromium writes to its profile to the last
        folder = Path(name)
        (folder / "plan.html").write_text(planned(LESSON, "zb-v").html(), encoding="utf-8")
        chromium = browser.Browser(folder, 1100, 470)
        chromium.open(folder / "plan.html")
        for theme, key, kind, stage, mb in (("light", "c", "B", 5, 2), ("dark", "t", "F", 2, 3)):
            chromium.key(key)
            chromium.mouse("mouseMoved", *chromium.place(kind, stage, mb))
            chromium.frame()
            chromium.picture(PICTURES / f"page-{theme}.png")
            chromium.key("c")
            print((PICTURES / f"page-{theme}.png").relative_to(ROOT))
        (folder / "run.html").write_text(made_up(folder).html(), encoding="utf-8")
        chromium.call("Emulation.setDeviceMetricsOverride", width=1100, height=580, deviceScaleFactor=1, mobile=False)
        chromium.open(folder / "run.html")
        at = """zbc.rows.filter(row => row.rank === 1).slice(-1).map(row => {
          const box = document.getElementById("time").getBoundingClientRect();
          for (let i = 0; i < row.n; i++) if (D.kinds[row.k[i]].op === "B" && row.m[i] === 4)
            return [box.left + zbc.xOf((row.start[i] + row.end[i]) / 2), box.top + zbc.tops()[row.index] + 4];
        })[0]"""
        chromium.key("c")
        chromium.mouse("mouseMoved", *chromium.run(at))
        chromium.frame()
        chromium.picture(PICTURES / "recorded-page.png")
        print((PICTURES / "recorded-page.png").relative_to(ROOT))
        chromium.close()


# ---- one page per schedule -----------------------------------------------------------------------------------


def schedules() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    (PAGES / "pictures").mkdir(parents=True)
    for card in SCHEDULES.values():
        one = example(card)
        write(PAGES / "pictures" / f"{card.name}.svg", svg.draw([one], svg.SvgView(width=WIDTH)))
        write(PAGES / f"{card.name}.md", page(card, one))
    lines = [f"| [{card.name}]({card.name}.md) | {card.summary} | {card.source} |" for card in SCHEDULES.values()]
    head = "# Schedules\n\nOne page each, made by `make docs` from the cards that `zbc explain schedules` shows.\n\n"
    write(
        PAGES / "README.md",
        head + "| schedule | what it does | source |\n| --- | --- | --- |\n" + "\n".join(lines) + "\n",
    )


def example(card: ScheduleCard) -> Drawn:
    """The schedule on four ranks with eight microbatches, at F = B = W = 1 per rank; twelve where groups need them."""
    p, m = CARD
    shown = Lowering().lower(Context.of(card.make(Request(p, 3 * p if card.grouped else m, card.default_chunks))))
    return Drawn(card.name, shown.program, once(shown.timeline), shown.costs)


def sequence() -> None:
    """The picture of docs/sequence.md: one step in slices."""
    card, p, m, k = SCHEDULES["1f1b"], 4, 4, 3
    costs = even_slices(card.placement(p, 1), k)
    shown = Lowering().lower(Context(card.make(Request(p, m, slices=k, costs=costs)), costs))
    drawn = Drawn("1f1b, three slices", shown.program, once(shown.timeline), costs)
    write(PICTURES / "sequence.svg", svg.draw([drawn], svg.SvgView(width=WIDTH)))


def memory() -> None:
    """The picture of docs/memory.md: one step with activations on the host, at half of what the order asks for."""
    p, m, v, half = 4, 6, 2, 2.0
    order = SCHEDULES["gis"].make(Request(p, m, v))
    each = (0.3 * 3 / v,) * order.placement.stages
    costs = Costs.uniform(order.placement).with_ms(out=each, back=each)
    moved = Offload((half,) * p, frozenset(range(order.placement.stages)), "makespan").run(order, Context(order, costs))
    shown = Lowering().lower(Context(moved, costs))
    drawn = Drawn("gis, offload", shown.program, once(shown.timeline), costs)
    write(PICTURES / "memory.svg", svg.draw([drawn], svg.SvgView(width=WIDTH)))


def vocabulary() -> None:
    """The picture of docs/vocabulary.md: one step in which all ranks share the output layer."""
    card, p, m = SCHEDULES["1f1b"], 4, 6
    order = card.make(Request(p, m))
    costs = Costs.uniform(order.placement).with_ms(s=(0.4,) * p, t=(0.2,) * p, meet=(0.05,) * p, spread=(0.05,) * p)
    woven = Weave(1).run(order, Context.of(order, costs))
    shown = Lowering().lower(Context(woven, costs))
    drawn = Drawn("1f1b, vocabulary shared", shown.program, once(shown.timeline), costs)
    write(PICTURES / "vocabulary.svg", svg.draw([drawn], svg.SvgView(width=WIDTH)))


def braid() -> None:
    """The picture of docs/tensor_parallel.md: one step whose groups hide the sums of ranks that share layers."""
    card, p, m, sums = SCHEDULES["braid-v"], 4, 12, 0.15
    plain = Costs.uniform(card.placement(p, 2))
    each = (sums,) * plain.stages
    f, b = (plain.each(lambda ms: ms + sums, name) for name in ("f", "b"))
    costs = plain.with_ms(f=f, b=b, bw=plain.each(lambda b, w: b + max(w, sums), "b", "w"), f_sums=each, b_sums=each)
    shown = Lowering().lower(Context(card.make(Request(p, m, 2, costs=costs)), costs))
    drawn = Drawn("braid-v", shown.program, once(shown.timeline), costs)
    write(PICTURES / "braid.svg", svg.draw([drawn], svg.SvgView(width=WIDTH)))


def survival_table() -> str:
    """Which schedules survive what a GPU may do to a rank, on the ranks and microbatches of the pictures."""
    heads = ("schedule", "a rank waits for its whole GPU", "all streams share one queue")
    rows = [" | ".join(("", *heads, "")).strip(), "| --- | --- | --- |"]
    for card in SCHEDULES.values():
        found = survival(build(example(card).program))
        said = ["yes" if holds else "no" for holds in (found.device_waits, found.one_queue)]
        rows.append(f"| {card.name} | {' | '.join(said)} |")
    return "\n".join(rows)


def gpu() -> None:
    """The table of docs/gpu.md."""
    path = ROOT / "docs" / "gpu.md"
    before, after = SURVIVAL.split(path.read_text(encoding="utf-8"))[::2]
    write(path, f"{before}<!-- survival -->\n{survival_table()}\n<!-- end -->{after}")


def page(card: ScheduleCard, one: Drawn) -> str:
    """A page in CommonMark."""
    timeline = one.strip.steps[0]
    numbers = [
        ("makespan", f"{short(timeline.makespan)}, of which bubble {percent(timeline.bubble_rate_makespan)}"),
        ("span", f"{short(timeline.span)}, of which bubble {percent(timeline.bubble_rate_span)}"),
        ("peak activations", f"{short(max(r.units for r in svg.peaks(one.program, one.costs, timeline)))} units"),
    ]
    rows = "\n".join(f"| {name} | {value} |" for name, value in numbers)
    found = "made by search for these costs" if card.searched else "by formula"
    many = {8: "eight", 12: "twelve"}[one.program.microbatches]
    shown = "\n".join(part if isinstance(part, str) else part.plain for part in card_parts(card, width=88))
    return (
        f"# {card.name}\n\n{card.summary[0].upper()}{card.summary[1:]}.\n\n"
        f"![{card.name} on four ranks with {many} microbatches](pictures/{card.name}.svg)\n\n"
        f"On four ranks with {many} microbatches, one rank's F, B and W of a microbatch taking 1 each, {found}:\n\n"
        f"| | |\n| --- | --- |\n{rows}\n\n"
        f"`zbc explain {card.name}` shows this card:\n\n```\n{shown}\n```\n\n"
        "[All schedules](README.md); [how to read the bubble rates](../reading.md).\n"
    )


if __name__ == "__main__":
    main()
