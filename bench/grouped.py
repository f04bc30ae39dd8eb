"""The experts of a layer as grouped products beside the loop over matrices, in the same process, by turns.

    python bench/grouped.py [--experts 16] [--hidden 512] [--width 1024] [--tokens 1024] [--top-k 2] [--device cpu]

Prints for each type the median of F + B + W of both, their ratio, and whether all results have the same bits.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.record import Record
from zbc.runtime.core import grouped
from zbc.runtime.core.slot import Slot, using
from zbc.runtime.core.split import split_backward
from zbc.training.models.experts import Experts


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, count in (("experts", 16), ("hidden", 512), ("width", 1024), ("tokens", 1024), ("top-k", 2), ("runs", 9)):
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="write no file")
    asked = parser.parse_args()
    record = Record("grouped")
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        sizes = asked.hidden, asked.width, asked.experts, asked.top_k
        layer = Experts(*sizes, layers=1, activation=nn.SiLU()).to(asked.device, dtype)
        split_backward(layer)
        x = torch.randn(1, asked.tokens, asked.hidden, device=asked.device, dtype=dtype)
        ms, found = beside(layer, x, runs=asked.runs)
        equal = all(map(torch.equal, found["grouped"], found["loop"]))
        shown = " ".join(f"{name} {value:.1f} ms" for name, value in ms.items())
        bits = "same bits" if equal else "other bits"
        record(f"{str(dtype).removeprefix('torch.')}: {shown}, {ms['grouped'] / ms['loop']:.3f} of it, {bits}")
    if not asked.quick:
        record.write()


def beside(layer: Experts, x: Tensor, *, runs: int) -> tuple[dict[str, float], dict[str, list[Tensor]]]:
    """Median ms of F + B + W of "grouped" and "loop", and what `_ran` returns of each."""
    ways: dict[str, Callable[..., bool]] = {"grouped": grouped._together, "loop": lambda rows, *sizes: False}
    times: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, list[Tensor]] = {}
    for _ in range(runs):
        for name, way in ways.items():
            grouped._together = way
            began = time.perf_counter()
            found[name] = _ran(layer, x)
            times[name].append(time.perf_counter() - began)
    grouped._together = ways["grouped"]
    return {name: 1e3 * statistics.median(some[1:]) for name, some in times.items()}, found


def _ran(layer: Experts, x: Tensor) -> list[Tensor]:
    """F, B and W; the output, and the gradients of the input and of all parameters."""
    for parameter in layer.parameters():
        parameter.grad = None
    given, slot = x.clone().requires_grad_(True), Slot()
    with using(slot):
        y = layer(given)
    slot.split = True
    y.sum().backward()
    slot.run()
    if x.is_cuda:
        torch.cuda.synchronize()
    return [y.detach(), *(t.grad for t in (given, *layer.parameters()) if t.grad is not None)]


if __name__ == "__main__":
    main()
