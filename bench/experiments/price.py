"""Experiments 15 and 16 of bench/gpu.py: the accuracy of estimated costs, and the overhead of the runtime."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from experiments.job import Bench, Case

from zbc.training.building.context import Settings
from zbc.training.data.data import Batches, build_samples
from zbc.training.models import model
from zbc.training.probing.checkup import plain_modules

CARDS = {"H100 PCIe": "h100-pcie", "H100": "h100-sxm", "H200": "h200", "B200": "b200", "A100": "a100-80g"}
FAMILIES = {
    "gpt": "",
    "llama": "ffn_hidden = {mlp}\nkv_heads = {groups}",
    "experts": "kv_heads = {groups}\nexperts = 8\ntop_k = 2\nffn_hidden = {expert}",
}


def card(device: torch.device) -> str:
    """The name of this GPU in `hardware.gpu`."""
    name = torch.cuda.get_device_name(device)
    return next((ours for theirs, ours in CARDS.items() if theirs in name), "h100-sxm")


def priced(bench: Bench) -> None:
    """Measured F, B and W of blocks in bfloat16, and the ratio to the estimate by `hardware.gpu` without a profile."""
    shapes = [(2048, 4096, 2), (4096, 4096, 1), (4096, 16384, 1), (8192, 4096, 1)]
    bench.say(f"{'family':8} {'hidden':>6} {'seq':>6} {'F':>8} {'B':>8} {'W':>8}   beside the price: F B W")
    off = list[float]()
    for family, more in FAMILIES.items():
        for hidden, seq, size in shapes if bench.cuda else [(32, 16, 2)]:
            if family == "experts" and hidden == 8192:
                continue
            groups = max(2, hidden // 512)
            sizes = {"hidden": hidden, "heads": max(2, hidden // 128), "seq_len": seq, "size": size, "vocab": 1024}
            args = more.format(mlp=7 * hidden // 2, groups=groups, expert=hidden)
            options: dict[str, Any] = {
                **sizes,
                "family": "gpt" if family == "gpt" else "llama",
                "layers": 2,
                "m": 4,
                "dtype": "bfloat16",
                "hardware": f'gpu = "{card(bench.device)}"' if bench.cuda else "",
                "more": args,
            }
            case = bench.case(pp=1, kind="1f1b", apart=True, **options)
            ms, costs = case.timed(), case.compiled.costs
            found = [ms[kind] for kind in ("F", "B", "W")]
            ratios = [one / costs.of(column) for one, column in zip(found, ("f", "b", "w"), strict=True)]
            off += ratios
            times = " ".join(f"{one:8.3f}" for one in found)
            bench.say(f"{family:8} {hidden:6} {seq:6} {times}   {' '.join(f'{one:5.2f}' for one in ratios)}")
    bench.say(f"median {statistics.median(off):.2f}, from {min(off):.2f} to {max(off):.2f}")


def plain(bench: Bench) -> None:
    """A step of pp = 1 compared with the same layers in a loop of plain torch: the overhead of the runtime."""
    for hidden, seq, size in ((64, 16, 1), (1024, 1024, 4), (4096, 2048, 1)) if bench.cuda else [(32, 16, 2)]:
        for kind in ("1f1b", "zb-h1"):
            case = bench.case(
                pp=1, kind=kind, hidden=hidden, heads=max(2, hidden // 128), seq_len=seq, size=size, layers=4,
                dtype="bfloat16", vocab=8192 if bench.cuda else 64,
            )  # fmt: skip
            ours = case.step_ms(10)
            theirs = _loop(bench, case)
            bench.say(f"hidden {hidden} {kind:6}: {ours:8.2f} ms, plain torch {theirs:8.2f}, ratio {ours / theirs:.3f}")


def _loop(bench: Bench, case: Case, steps: int = 10) -> float:
    """Median ms of a step of plain torch: autocast, gradients summed over microbatches, a fused AdamW, one read."""
    settings = Settings.of(case.plan.manifest)
    modules = [module.to(bench.device) for module in plain_modules(settings).values()]
    criterion, samples = model.loss(settings.model.loss), build_samples(settings.data, settings.model, 0)
    manifest = case.plan.manifest
    batches = Batches(samples, seed=0, microbatches=manifest.microbatches, size=manifest.microbatch_size, lowered=None)
    parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=bench.cuda)
    count, took = manifest.microbatches, list[float]()
    for step in range(steps):
        bench.wait()
        began = time.perf_counter()
        total = torch.zeros((), device=bench.device)
        for mb in range(count):
            with torch.autocast(bench.device.type, torch.bfloat16, enabled=settings.model.dtype == "bfloat16"):
                x = batches.inputs(step, mb).to(bench.device, non_blocking=True)
                for module in modules:
                    x = module(x)
                loss = criterion(x, batches.targets(step, mb).to(bench.device, non_blocking=True)) / count
            loss.backward()
            total += loss.detach()
        torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        total.item()
        bench.wait()
        took.append((time.perf_counter() - began) * 1e3)
    return statistics.median(took[2:])
