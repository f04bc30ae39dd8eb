"""Experiments 17 to 20 of bench/gpu.py: what has been built since a GPU was last there, for ten minutes of one."""

from __future__ import annotations

import gc
from typing import Any

import torch
from experiments.job import Bench, Case
from overhead import beside, experts_of

from zbc.runtime.core import grouped
from zbc.text import MIB

LLAMA = {"family": "llama", "more": "kv_heads = {groups}\nffn_hidden = {mlp}"}
EXPERTS = {"family": "llama", "more": "kv_heads = {groups}\nexperts = {experts}\ntop_k = 2\nffn_hidden = {expert}"}
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA,
    "experts": EXPERTS,
    "selective": {**LLAMA, "activations": "selective"},
    "slices": {**LLAMA, "schedule": "slices = 2"},
    "adapters": {**LLAMA, "adapter": "[adapter]\nrank = 8"},
    "muon": {**LLAMA, "optimizer": 'kind = "muon"\nlr = 0.01'},
    "chunked loss": {"family": "llama", "more": "kv_heads = {groups}\nffn_hidden = {mlp}\nloss_chunk = 256"},
}


def cards(bench: Bench) -> None:
    """Activations of a run, and the allocator's peak, beside plans by dry runs, in bfloat16 (autocast) and float32."""
    off = dict[str, float]()
    for dtype in ("bfloat16", "float32"):
        for name, options in KINDS.items():
            case = _case(bench, apart=False, dtype=dtype, **options)
            rank, held = case.compiled.report.per_rank[0], case.held()
            share = held["activations"] / rank.activation_bytes - 1
            said = (
                f"{dtype} {name:12} activations {held['activations'] / MIB:8.1f} MiB, {100 * share:+.2f}% of the plan"
            )
            if bench.cuda:
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                case.run(3)
                peak = torch.cuda.max_memory_allocated()
                said += f"; peak {peak / MIB:8.1f}, {100 * (peak / rank.peak_bytes - 1):+.2f}%"
            bench.say(said)
            off[f"{dtype} {name}"] = abs(share)
    most = max(off, key=off.__getitem__)
    bench.wants(off[most] < 0.01, f"activations of {most} are {100 * off[most]:.1f}% off the plan")


def products_of_experts(bench: Bench) -> None:
    """Grouped products beside the loop over experts, F + B + W: times, and differences beside the largest gradient."""
    shapes = (
        [(8, 4096, 4096, 8192), (64, 2048, 1408, 8192), (128, 2048, 768, 8192)] if bench.cuda else [(4, 32, 16, 64)]
    )
    for count, hidden, width, tokens in shapes:
        torch.manual_seed(0)
        layer = experts_of(hidden, width, count).to(bench.device, torch.bfloat16)
        x = torch.randn(1, tokens, hidden, device=bench.device, dtype=torch.bfloat16)
        ms, found = beside(layer, x, runs=9)
        apart = max(
            ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()
            for a, b in zip(found["grouped"], found["loop"], strict=True)
        )
        shown = f"{ms['grouped']:8.3f} ms, the loop {ms['loop']:8.3f}, ratio {ms['grouped'] / ms['loop']:.3f}"
        bench.say(f"{count:4} experts {hidden} x {width}, {tokens} tokens: {shown}, {apart:.1e} apart")
        bench.wants(apart < 0.02, "the results differ by more than bfloat16 rounds")


def waits(bench: Bench) -> None:
    """How often the host reads numbers of experts off the device in a step: once for each block and F."""
    case, reads = _case(bench, dtype="bfloat16", **EXPERTS), list[int]()
    own = grouped.Loads.of.__func__  # type: ignore[attr-defined]

    def counted(cls: type[grouped.Loads], *given: Any) -> Any:
        reads[-1] += 1
        return own(cls, *given)

    grouped.Loads.of = classmethod(counted)  # type: ignore[assignment, method-assign]
    try:
        for steps in (1, 2):  # looking at shapes reads, too
            reads.append(0)
            case.run(steps)
    finally:
        grouped.Loads.of = classmethod(own)  # type: ignore[assignment, method-assign]
    manifest = case.plan.manifest
    blocks = sum(name.startswith("layers.") for stage in manifest.layers for name in stage)
    each = reads[1] - reads[0]
    bench.say(f"{each} reads in a step of {manifest.microbatches} microbatches and {blocks} blocks")
    bench.wants(each == manifest.microbatches * blocks, "not once for each block and F")


def whole(bench: Bench) -> None:
    """Compiled layers beside plain ones, fused and apart, and selective recompute: losses, and times of a step."""
    plain = {apart: _case(bench, apart=apart, dtype="bfloat16", **LLAMA) for apart in (False, True)}
    for apart, case in plain.items():
        others = {"selective": {"activations": "selective"}}
        if bench.cuda:  # a minute of compiling
            others["compiled"] = {"compile": "true"}
        base, expected = case.step_ms(), case.told()
        for name, options in others.items():
            other = _case(bench, apart=apart, dtype="bfloat16", **LLAMA, **options)
            ms, found = other.step_ms(), other.told()
            off = max(abs(a[0] - b[0]) for a, b in zip(found, expected, strict=True))
            how = "B and W apart" if apart else "fused"
            bench.say(
                f"{name:9} {how:13}: {ms:8.2f} ms, plain {base:8.2f}, ratio {ms / base:.3f}; loss {off:.1e} apart"
            )
            bench.wants(off < 0.02, f"{name}: the loss is {off:.3f} apart")


def _case(bench: Bench, *, apart: bool = True, more: str = "", **options: Any) -> Case:
    sizes = {"hidden": 2048, "heads": 16, "seq_len": 2048, "size": 2, "m": 4, "layers": 4, "vocab": 8192}
    sizes = (
        sizes if bench.cuda else {"hidden": 64, "heads": 4, "seq_len": 32, "size": 2, "m": 4, "layers": 4, "vocab": 64}
    )
    hidden = sizes["hidden"]
    counts = {"groups": 4, "mlp": 7 * hidden // 2, "experts": 16 if bench.cuda else 4, "expert": hidden // 2}
    return bench.case(pp=1, kind="1f1b", apart=apart, **{**sizes, "more": more.format(**counts), **options})
