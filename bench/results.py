"""The newest number of each bench beside its peer: `python bench/results.py`, or `make results`.

Reads the newest record of each bench in bench/results, and writes docs/results.md and the block of README.md. A record
older than the last change of what it measures (by git) is refused: the row says what to run, and the exit code is 1.
Rows of a GPU keep their numbers with their date, and say so.
"""

from __future__ import annotations

import datetime
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS, PAGE, README = ROOT / "bench" / "results", ROOT / "docs" / "results.md", ROOT / "README.md"
BLOCK = re.compile(r"<!-- results -->\n(.*?)<!-- end -->", re.DOTALL)


class Found(NamedTuple):
    """The cells of a row; the worst stands beside what is usual."""

    zbc: str
    beside: str
    ratio: str
    worst: str


class Row(NamedTuple):
    what: str
    peer: str
    record: str  # name of the files
    command: str  # of bench/
    measures: tuple[str, ...]  # paths whose change makes a record old
    read: Callable[[str], Found]
    gpu: bool = False


def numbers(pattern: str, text: str) -> list[tuple[float, ...]]:
    """All groups of all matches in the lines of a text."""
    found = [match.groups() for match in re.finditer(pattern, text, re.MULTILINE)]
    if not found:
        raise ValueError(f"no line is like {pattern}")
    return [tuple(map(float, groups)) for groups in found]


def ratios(pairs: Sequence[Sequence[float]], worst: Callable[..., float] = max) -> tuple[str, str]:
    """The median of first over second, and the worst, which is the largest or the smallest."""
    each = [one / other for one, other, *_ in pairs]
    return f"{statistics.median(each):.3f}", f"{worst(each):.3f}"


def cells(text: str) -> Found:
    """Bubbles of the paper's tables, ours beside printed ones."""
    part = text.partition("(a)")[2].partition("cells above")[0]
    pairs = numbers(r"(0\.\d{4})/(0\.\d{4})", part.replace(" 0.", "\n0."))
    middle, worst = ratios([(1 - printed, 1 - ours) for ours, printed in pairs])
    above = int(numbers(r"^(\d+) cells above", text)[0][0])
    return Found(f"{len(pairs) - above} of {len(pairs)} no longer", "printed", middle, worst)


def searched(text: str) -> Found:
    """Cases for which a public implementation has a number: to reach, public, ours."""
    pairs = [(1 - public, 1 - ours) for _, public, ours in numbers(r"^.*? (0\.\d{4}) +(0\.\d{4}) +(0\.\d{4}) ", text)]
    shorter = sum(a < b + 1e-9 for a, b in pairs)
    return Found(f"{shorter} of {len(pairs)} shorter", "public", *ratios(pairs))


def planned(text: str) -> Found:
    """`zbc plan` as a whole, and its messages beside torch's."""
    *_, (seconds, mib, ours, theirs) = numbers(r"^ *64 +512 \S+ +([\d.]+) +(\d+) +([\d.]+) +([\d.]+)", text)
    all_of_them = numbers(r"^ *\d+ +\d+ \S+ +[\d.]+ +\d+ +([\d.]+) +([\d.]+)", text)
    worst = max(a / b for a, b in all_of_them if b > 0.02)
    return Found(
        f"{seconds:.1f} CPU s, {mib:.0f} MiB; messages {ours:.2f} s",
        f"{theirs:.2f} s",
        f"{ours / theirs:.2f}",
        f"{worst:.2f}",
    )


def per_op(text: str) -> Found:
    pairs = numbers(r"^idle .*? +\d +\d+ +[\d.]+ +[\d.]+ +([\d.]+) +([\d.]+)", text)
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    return Found(f"{ours:.0f} us", f"{theirs:.0f} us", *ratios(pairs))


def split(text: str) -> Found:
    pairs = [(apart, fused) for fused, apart in numbers(r"^\S+ +(?:keep|recompute) +([\d.]+) +([\d.]+)", text)]
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    return Found(f"{ours:.1f} ms", f"{theirs:.1f} ms", *ratios(pairs))


def throughput(text: str) -> Found:
    """Of each case torch's line, then ours with the gain."""
    gains = [gain for (gain,) in numbers(r"^\S+ \S+ +zbc +- +[\d.]+ +- +([\d.]+)", text)]
    ours = numbers(r"^\S+ \S+ +zbc +- +([\d.]+)", text)
    theirs = numbers(r"^\S+ \S+ +torch +- +([\d.]+)", text)
    middle = sorted(zip(ours, theirs, strict=True))[len(ours) // 2]
    shown = (f"{one[0]:.1f} ms" for one in middle)
    return Found(*shown, f"{1 / statistics.median(gains):.3f}", f"{1 / min(gains):.3f}")


def fidelity(text: str) -> Found:
    """Measured over simulated, of both runtimes."""
    mine = [ratio for (ratio,) in numbers(r"^\S+ +zbc +[\d.]+ +[\d.]+ +([\d.]+)", text)]
    other = [ratio for (ratio,) in numbers(r"^\S+ +(?:torch, our order|Schedule\w+) +[\d.]+ +[\d.]+ +([\d.]+)", text)]
    ours, theirs = statistics.median(mine), statistics.median(other)
    return Found(f"{ours:.3f} of predicted", f"{theirs:.3f}", f"{ours / theirs:.3f}", f"{max(mine) / theirs:.3f}")


def published(text: str) -> Found:
    ((count, middle, worst),) = numbers(
        r"^# steps of (\d+) runs: off by ([\d.]+)% at the median, ([\d.]+)% at most", text
    )
    return Found("predicted", f"{count:.0f} published steps", f"{1 + middle / 100:.3f}", f"{1 + worst / 100:.3f}")


def memory(text: str) -> Found:
    off = [abs(all_of_it) for (all_of_it,) in numbers(r"^\w+ +\S+ +\w+ .* ([+-][\d.]+) +[\d.]+$", text)]
    return Found(
        "predicted",
        f"{len(off)} measured peaks",
        f"{1 + statistics.median(off) / 100:.3f}",
        f"{1 + max(off) / 100:.3f}",
    )


def plain(text: str) -> Found:
    """In the last run that came to its end, without split B and W."""
    pairs = numbers(r"^hidden \d+ 1f1b +: +([\d.]+) ms, plain torch +([\d.]+)", text)
    return Found(f"{pairs[-1][0]:.0f} ms", f"{pairs[-1][1]:.0f} ms", *ratios(pairs))


def profiled(text: str) -> Found:
    pairs = numbers(r"^step ([\d.]+) ms, planned ([\d.]+)", text)
    return Found("predicted from a profile", f"{len(pairs)} measured steps", *ratios([pair[::-1] for pair in pairs]))


def planted(text: str) -> Found:
    ((bugs, both),) = numbers(r"^(\d+) bugs, (\d+) caught by both", text)
    return Found(f"{both:.0f} caught", f"{bugs:.0f} planted", f"{both / bugs:.3f}", "")


SIM = ("zbc/compiler/sim", "zbc/compiler/schedules", "zbc/compiler/search")
RUNTIME = ("zbc/runtime/core", "zbc/runtime/transports", "zbc/training/worker.py")
ROWS = (
    Row("step of Zero Bubble's published cells", "arXiv 2401.10241", "search-compiled", "plan.py search", SIM, cells),
    Row(
        "step where memory is short or stages are uneven",
        "public search",
        "search-compiled",
        "plan.py search",
        SIM,
        searched,
    ),
    Row(
        "`zbc plan` of 64 ranks, 512 microbatches, 2 chunks",
        "torch's lowering",
        "compile",
        "plan.py compile",
        ("zbc/compiler/passes", "zbc/compiler/lowering.py", "zbc/plan"),
        planned,
    ),
    Row(
        "main thread of a rank, for an op of no work",
        "torch.distributed.pipelining",
        "per-op",
        "overhead.py ops",
        RUNTIME,
        per_op,
    ),
    Row("B and W apart", "the fused backward", "split", "overhead.py split", ("zbc/runtime/core",), split),
    Row(
        "step of a GPT on two processes",
        "torch.distributed.pipelining",
        "throughput-run",
        "run.py throughput",
        RUNTIME,
        throughput,
    ),
    Row(
        "measured over simulated step, ops that sleep",
        "torch.distributed.pipelining",
        "fidelity-run",
        "run.py fidelity",
        RUNTIME,
        fidelity,
    ),
    Row(
        "predicted over measured step of published GPU runs",
        "their authors",
        "published",
        "published.py runs",
        ("zbc/compiler/cost",),
        published,
    ),
    Row(
        "predicted over measured peak of memory, CPU",
        "this runtime",
        "memory",
        "predict.py memory",
        ("zbc/compiler/memory",),
        memory,
    ),
    Row(
        "step of a GPT on one H100, pp = 1",
        "a loop of plain torch",
        "gpu-plain",
        "gpu.py plain",
        RUNTIME,
        plain,
        gpu=True,
    ),
    Row(
        "predicted over measured step, one H100",
        "this runtime",
        "gpu-profiled",
        "gpu.py profiled",
        ("zbc/compiler/cost",),
        profiled,
        gpu=True,
    ),
    Row("planted bugs that `make test` catches", "", "planted", "planted.py", ("bench/planted.py",), planted),
)


def newest(name: str, folder: Path = RESULTS) -> Path | None:
    """The newest record of that name."""
    return max(folder.glob(f"????-??-??-{name}.txt"), default=None)


def measured(record: Path) -> datetime.datetime:
    """When a record was made: as its head says, or at the end of the day of its name."""
    said = re.search(r"^# .*; (\d{4}-\d\d-\d\d \d\d:\d\d)$", record.read_text(), re.MULTILINE)
    return datetime.datetime.fromisoformat(said[1] if said else f"{record.name[:10]} 23:59")


def changed(paths: Sequence[str], root: Path = ROOT) -> datetime.datetime:
    """When these paths were last changed, by the date of the author of the commit."""
    command = ["git", "log", "-1", "--date=format-local:%Y-%m-%d %H:%M", "--format=%ad", "--", *paths]
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    return datetime.datetime.fromisoformat(said or "1970-01-01 00:00")


HEAD = "| what | zbc | beside | ratio | worst | from |\n| --- | --- | --- | ---: | ---: | --- |"


def line(row: Row, record: Path | None, late: bool, folder: str) -> str:
    """A line of the table; without numbers where there is no record that counts."""
    if record is None or (late and not row.gpu):
        why = "no record" if record is None else f"record of {record.name[:10]}, older than the code"
        return f"| {row.what} |  | {row.peer} |  |  | {why}: `python bench/{row.command}` |"
    found = row.read(record.read_text())
    beside = " ".join(part for part in (row.peer + ":" * bool(row.peer), found.beside) if part)
    date = f"[{record.name[:10]}]({folder}bench/results/{record.name}){', older than the code' if late else ''}"
    return f"| {row.what} | {found.zbc} | {beside} | {found.ratio} | {found.worst} | `{row.command}`, {date} |"


def main() -> int:
    late, lines = [], {"": [HEAD], "../": [HEAD]}
    for row in ROWS:
        record = newest(row.record)
        old = record is None or measured(record) < changed(row.measures)
        if old and not row.gpu:
            late.append(f"bench/{row.command}: its record is older than the last change of {', '.join(row.measures)}")
        for folder in lines:
            lines[folder].append(line(row, record, old, folder))
    for path, folder in ((README, ""), (PAGE, "../")):
        table = "\n".join(lines[folder])
        path.write_text(BLOCK.sub(lambda _, table=table: f"<!-- results -->\n{table}\n<!-- end -->", path.read_text()))
        print(path.relative_to(ROOT))
    print(*late, sep="\n", file=sys.stderr)
    return int(bool(late))


if __name__ == "__main__":
    sys.exit(main())
