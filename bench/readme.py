"""Fill the marked blocks of README.md with what the tool prints: `python bench/readme.py`.

A block stands between `<!-- NAME -->` and `<!-- end -->`. The picture and the comparison are computed anew, which a
test holds the README to; the fidelity table comes from the newest file of bench/results.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
UNIT = "\n[costs]\nf = 1\nb = 1\nw = 1\n"


def picture() -> str:
    """ZB-V on four ranks at unit times."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "unit.toml"
        job.write_text((ROOT / "plans" / "tiny.toml").read_text() + UNIT)
        return f"```\n{_printed('visualize', str(job), '--width', '100')}```"


def comparison() -> str:
    """The schedules at the published times of the 1.5B model."""
    return _printed("compare", str(ROOT / "plans" / "paper-1.5b.toml"), "--md").rstrip()


def fidelity() -> str:
    """Measured against simulated steps, from the newest result file."""
    newest = sorted((ROOT / "bench" / "results").glob("*-fidelity.txt"))[-1]
    rows = re.findall(
        r"^(\S+)\s+(zbc|torch, our order|Schedule\w+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)", newest.read_text(), re.M
    )
    lines = ["| schedule | runtime | simulated ms | measured ms | ratio |", "| --- | --- | ---: | ---: | ---: |"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), "", f"From bench/results/{newest.name}."])


BLOCKS = {"picture": picture, "compare": comparison, "fidelity": fidelity}


def fill(text: str, names: tuple[str, ...] = tuple(BLOCKS)) -> str:
    """README text with the named blocks made anew."""
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
    README.write_text(fill(README.read_text()))
