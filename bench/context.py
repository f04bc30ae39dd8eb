"""The longest context that fits, by schedule and number of slices: `python bench/context.py [JOB.toml]`.

Of each the largest `model.seq_len` in multiples of 2,048 tokens whose plan keeps to `hardware.memory_gib`. Of schedules
made by hand, on the partitions that every plan begins with; a search would take an hour. Without a job: 32 layers of
width 4,096 with 8 heads of keys and values, on 8 GPUs of 80 GB.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.record import Record
from zbc.compiler.check.memory import check_memory
from zbc.compiler.compile import load_job
from zbc.compiler.cost import estimate
from zbc.compiler.order import order
from zbc.errors import ZbcError

STEP = 2048
NAMES, SLICES = ("1f1b", "zb-h1", "interleaved-1f1b", "gis"), (1, 2, 4, 8, 16)
JOB = """zbc = 1
[model]
family = "llama"
layers = 32
hidden = 4096
heads = 32
kv_heads = 8
ffn_hidden = 14336
vocab = 32000
seq_len = 2048
dtype = "bfloat16"
[parallel]
pp = 8
[schedule]
kind = "1f1b"
microbatches = 16
[hardware]
device = "cuda"
memory_gib = 80
"""


def fits(path: Path, name: str, slices: int, length: int) -> bool:
    """Whether such a plan keeps to the memory of the device."""
    if slices * 128 > length:
        return False
    job = load_job(path, [f"model.seq_len={length}", f"schedule.slices={slices}"], name)
    try:
        found = order(job, estimate.layers(job), 0.0)
        check_memory(job, found.memory, found.costs)
    except ZbcError:
        return False
    return True


def longest(path: Path, name: str, slices: int, begin: int) -> int:
    """In tokens; 0 if nothing fits. `begin`: what is likely to fit."""
    low, high = 0, max(1, begin // STEP)
    while fits(path, name, slices, high * STEP):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(path, name, slices, middle * STEP) else (low, middle)
    return low * STEP


def main() -> None:
    record = Record("context")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "zbc.toml"
        if len(sys.argv) == 1:
            path.write_text(JOB)
        record("| schedule | " + " | ".join(f"k = {k}" for k in SLICES) + " |")
        record("| --- | " + " | ".join("---:" for _ in SLICES) + " |")
        for name in NAMES:
            cells, begin = list[str](), STEP
            for k in SLICES:
                begin = longest(path, name, k, begin) or STEP
                cells.append(f"{begin:,}")
            record(f"| {name} | " + " | ".join(cells) + " |")
    record.write()


if __name__ == "__main__":
    main()
