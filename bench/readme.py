"""Fills the marked blocks of README.md and two pages of docs with output of zbc: `python bench/readme.py`.

A block is between `<!-- NAME -->` and `<!-- end -->`. The picture and the comparison are computed each time, and a
test compares them with the README; the fidelity table comes from the newest file of bench/results.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BIDIRECTIONAL = ROOT / "docs" / "bidirectional.md"
FIDELITY = ROOT / "docs" / "fidelity.md"
UNIT = "\n[costs]\nf = 1\nb = 1\nw = 1\n"


def picture() -> str:
    """ZB-V on four ranks at unit times."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "unit.toml"
        job.write_text((ROOT / "plans" / "tiny.toml").read_text() + UNIT)
        return f"```\n{_printed('visualize', str(job), '--width', '100')}```"


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
    schedules = ("--schedules", f"{ONE_PIPE},{TWO_PIPES}")
    table = _printed("compare", str(ROOT / "plans" / "paper-1.5b.toml"), *schedules, *wanted, "--format", "md", "-v")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    kept = [rows[0].index(name) for name in COLUMNS]
    return "\n".join("| " + " | ".join(row[k] for k in kept) + " |" for row in rows)


BLOCKS = {
    "picture": picture,
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
    from zbc.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(list(arguments))
    return out.getvalue()


if __name__ == "__main__":
    README.write_text(fill(README.read_text(), ("picture", "compare")))
    FIDELITY.write_text(fill(FIDELITY.read_text(), ("fidelity",)))
    BIDIRECTIONAL.write_text(fill(BIDIRECTIONAL.read_text(), TWO_PIPES_BLOCKS))
