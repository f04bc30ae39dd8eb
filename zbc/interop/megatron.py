"""A plan as arguments of Megatron-LM.

Megatron runs 1F1B, or interleaved 1F1B with several stages per rank, of its own built-in GPT; the arguments describe
exactly that plan.
"""

from __future__ import annotations

from collections.abc import Iterator

from zbc.compiler.partition import megatron_layout
from zbc.compiler.passes.fuse_backward import fuse
from zbc.compiler.schedules import Request, find
from zbc.interop.refused import refuse
from zbc.ir import Placement, Program
from zbc.plan.directory import Manifest


def dumps(program: Program, manifest: Manifest) -> str:
    """One argument per line, comments after `#`. Raises E413 for a plan that Megatron would run differently."""
    model, placement, m = manifest.planning.get("model", {}), program.placement, program.microbatches
    p, v, family = placement.ranks, placement.chunks or 0, model.get("family")
    looped = v > 0 and placement == Placement.looped(p, v)
    name = "1F1B" if v == 1 else "interleaved 1F1B in rounds of one microbatch per rank"
    reasons = {
        "it has a flush between steps, the plan has none": program.flushless,
        f"its arguments are written for the built-in gpt only, model.family is {family!r}": family != "gpt",
        "it deals stages round and round the ranks; the plan places them otherwise": not looped,
        f"it runs {name} here, the plan has another order ({manifest.schedule})": looped and not _runs(program, p, v),
        f"its interleaved schedule wants microbatches in multiples of {p}, the plan has {m}": v > 1 and m % p,
        "it does not cut microbatches into slices": program.slices > 1,
        "it leaves out no weight gradients (freeze.most)": program.freezes,
        "the training begins with smaller batches (schedule.ramp); export a plan without, add --rampup-batch-size": (
            manifest.ramp
        ),
    }
    refuse("megatron", "Megatron-LM", reasons)
    return "\n".join(_lines(program, manifest, model)) + "\n"


def _runs(program: Program, p: int, v: int) -> bool:
    """Whether the compute ops are in Megatron's order; a backward may be split into adjacent B and W."""
    request = Request(p, program.microbatches, v)
    expected = find("1f1b" if v == 1 else "interleaved-1f1b").make(request).ranks
    return tuple(tuple(fuse([op for op in ops if op.kind.computes])) for ops in program.ranks) == expected


def _lines(program: Program, manifest: Manifest, model: dict[str, object]) -> Iterator[str]:
    p, v = program.placement.ranks, program.placement.chunks or 1
    dp = manifest.planning.get("parallel", {}).get("dp", 1)
    yield f"# {manifest.schedule}: {p} ranks, {program.microbatches} microbatches"
    yield f"# virtual pipeline size {v}; Megatron works it out from the layout"
    yield f"--pipeline-model-parallel-size {p}"
    yield f'--pipeline-model-parallel-layout "{megatron_layout.dumps(manifest.layers)}"'
    if v > 1:
        yield f"--microbatch-group-size-per-virtual-pipeline-stage {p}"
    yield f"--micro-batch-size {manifest.microbatch_size}"
    yield f"--global-batch-size {manifest.microbatch_size * program.microbatches * dp}"
    yield f"--num-layers {model['layers']}"
    yield f"--hidden-size {model['hidden']}"
    yield f"--num-attention-heads {model['heads']}"
    yield f"--seq-length {model['seq_len']}"
    if not model.get("ties"):
        yield "--untie-embeddings-and-output-weights"
