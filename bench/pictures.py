"""How long pictures of a plan of 64 ranks and 512 microbatches take, how large they are, how quick the page is."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from bench.record import Record  # noqa: E402
from tests.viz import browser, trace_reader  # noqa: E402

JOB = f"""extends = "{ROOT / "plans" / "paper-1.5b.toml"}"
[model]
layers = 128
[parallel]
pp = 64
[schedule]
microbatches = 512
"""
PICTURES = (
    ("terminal, 160 columns", "term", ("--width", "160")),
    ("terminal, by slot", "term", ("--width", "160", "--by", "slot")),
    ("svg", "svg", ()),
    ("html", "html", ()),
    ("perfetto", "perfetto", ()),
)
FRAMES = 40
_HERE = "const c = document.getElementById('time').getBoundingClientRect();"


def zbc(*arguments: str) -> tuple[float, float]:
    """Run a command; wall and processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "zbc", *arguments], check=True, capture_output=True, env=environment)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def pictures(record: Record, folder: Path, schedule: str) -> Path:
    """Make every kind of picture of one schedule; returns the page."""
    zbc("plan", str(folder / "job.toml"), "--schedule", schedule, "-o", str(folder / schedule), "-q")
    record(f"{schedule}, 64 ranks, 512 microbatches")
    for name, form, more in PICTURES:
        path = folder / f"{schedule}.{name.split(',')[0]}"
        wall, busy = zbc("visualize", str(folder / schedule), "--as", form, "-o", str(path), *more)
        record(f"  {name:<22} {wall:6.2f} s ({busy:.2f} s of processor time)  {path.stat().st_size / 1e6:7.2f} MB")
    trace = trace_reader.read((folder / f"{schedule}.perfetto").read_text())
    count = sum(map(len, trace.slices.values()))
    record(f"  the trace keeps the rules: {count} slices on {len(trace.tracks)} tracks, {len(trace.flows)} arrows")
    return folder / f"{schedule}.html"


def page(record: Record, path: Path) -> None:
    """Zoom and hover in headless Chromium: from the event until the frame that shows it has been drawn."""
    chromium = browser.Browser(path.parent)
    named = path.with_suffix(".page.html")
    named.write_bytes(path.read_bytes())
    began = time.perf_counter()
    chromium.open(named)
    record(f"  page opened and drawn in {time.perf_counter() - began:.2f} s")
    for title, fit in (("all of it in view", True), ("zoomed in 1000 times", False)):
        chromium.run("zbc.look(0, zbc.state.b)" if fit else "zbc.look(zbc.state.b / 2, zbc.state.b / 2 * 1.001)")
        zooms = _times(chromium, "wheel")
        hovers = _times(chromium, "move")
        texts = [
            f"{what} median {median(times):.0f} ms, longest {max(times):.0f} ms"
            for what, times in (("zoom", zooms), ("hover", hovers))
        ]
        record(f"  {title}: {'; '.join(texts)}")
    chromium.close()


def _times(chromium: browser.Browser, what: str) -> list[float]:
    """Milliseconds from an event to the end of the frame that draws it, measured inside the page."""
    event = (
        "new WheelEvent('wheel', {clientX: x, clientY: y, deltaY: (k % 2 ? 90 : -90), cancelable: true})"
        if what == "wheel"
        else "new PointerEvent('pointermove', {clientX: x + 7 * k, clientY: y + 5 * (k % 30)})"
    )
    script = f"""(async () => {{ {_HERE} const times = [];
      for (let k = 0; k < {FRAMES}; k++) {{
        const x = c.left + 300, y = c.top + 30, began = performance.now();
        document.getElementById('time').dispatchEvent({event});
        await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
        times.push(performance.now() - began);
      }} return times; }})()"""
    found: list[float] = chromium.run(script)
    return found


def main() -> None:
    record = Record("pictures")
    record(
        f"# load of the machine before: {os.getloadavg()[0]:.1f}; wanted: terminal < 3 s, html < 12 MB, trace < 60 s,"
    )
    record("# zoom and hover < 100 ms")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.toml").write_text(JOB)
        for schedule in ("zb-h1", "interleaved-1f1b"):
            path = pictures(record, folder, schedule)
            if browser.found() is None:
                record("  no Chromium on this machine: the page was not opened")
            else:
                page(record, path)
    record(f"# load of the machine after: {os.getloadavg()[0]:.1f}")
    record.write()


if __name__ == "__main__":
    main()
