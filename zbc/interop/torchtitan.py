"""A plan as the settings of torchtitan: its `[parallelism]` and `[training]` keys, and the CSV file they name.

torchtitan loads the CSV into torch's own pipelining runtime, which takes any order of one pipe. But the name of a
schedule alone decides which stages a rank builds, and torchtitan hangs silently if the CSV has others. So the settings
name a schedule with the placement of the plan, and other placements are refused. torchtitan splits the model by names
of modules; modules of its transformer models map to zbc's layers: tok_embeddings, layers.N, and the final norm with the
head.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zbc.interop import torch_csv
from zbc.interop.refused import refuse
from zbc.ir import Placement, Program
from zbc.plan.directory import Manifest


@dataclass(frozen=True)
class TitanVersion:
    """The names that a version of torchtitan expects."""

    suffix: str
    head: str  # the name of its last module


DIALECTS = {"0.2": TitanVersion(".toml", "output"), "0.3": TitanVersion(".py", "lm_head")}


def schedule_name(placement: Placement) -> str | None:
    """The name of a torchtitan schedule with this placement of stages; None if there is none. All V plans get
    ZBVZeroBubble: with DualPipeV, placed alike, torchtitan prints the loss of a rank that has none."""
    p, v = placement.ranks, placement.chunks
    if v is not None and placement == Placement.looped(p, v):
        return "PipelineScheduleSingle" if v == 1 else "PipelineScheduleMulti"
    return "ZBVZeroBubble" if v == 2 and placement == Placement.vshape(p) else None


def dumps(program: Program, manifest: Manifest, csv_name: str, dialect: str) -> dict[str, str]:
    """Suffix -> text: the settings, which name the CSV file `csv_name` by its absolute path, and that file. Raises E413
    for plans that torch cannot express, and for stages that torchtitan would place on other ranks."""
    csv = torch_csv.dumps(program)
    model, name = manifest.planning.get("model", {}), schedule_name(program.placement)
    family = model.get("family")
    reasons = {
        f"it has models of its own, the plan is for model.family = {family!r}": family not in ("gpt", "llama"),
        "it deals stages round and round the ranks, or in one V; the plan places them otherwise": name is None,
        "all of its batches are of one size; the training begins with smaller ones (schedule.ramp)": manifest.ramp,
    }
    hint = "`--format torch-csv` writes the order alone, for torch's runtime with stages of your own"
    refuse("torchtitan", "torchtitan", reasons, hint)
    form = DIALECTS[dialect]
    names = {"embed": ["tok_embeddings"], "head": ["norm", form.head]}
    settings = {
        "training": {"local_batch_size": manifest.microbatch_size * program.microbatches, "seq_len": model["seq_len"]},
        "parallelism": {
            "pipeline_parallel_degree": program.placement.ranks,
            "pipeline_parallel_schedule": name,
            "pipeline_parallel_schedule_csv": str(Path(csv_name).absolute()),
            "pipeline_parallel_microbatch_size": manifest.microbatch_size,
            "module_fqns_per_model_part": [
                [module for layer in layers for module in names.get(layer, [layer])] for layers in manifest.layers
            ],
            **_degrees(manifest.planning.get("parallel", {})),
        },
    }
    title = (
        f"{manifest.schedule}: {program.placement.ranks} ranks, {program.placement.stages} stages, "
        f"{program.microbatches} microbatches"
    )
    write = _toml if form.suffix == ".toml" else _python
    return {form.suffix: "\n".join(write(title, settings, program, model)) + "\n", ".csv": csv}


def _degrees(parallel: Mapping[str, Any]) -> dict[str, int]:
    """The other axes. torchtitan replicates weights or shards them with gradients; its default shards over the rest."""
    dp, shards = parallel.get("dp", 1), parallel.get("shard") in ("weights", "all")
    found = {"data_parallel_replicate_degree": 1 if shards else dp, "data_parallel_shard_degree": dp if shards else 1}
    axes = {"tp": "tensor_parallel_degree", "cp": "context_parallel_degree", "ep": "expert_parallel_degree"}
    more = {name: parallel[axis] for axis, name in axes.items() if parallel.get(axis, 1) > 1}
    return (found if dp > 1 else {}) | more


def _watch(program: Program) -> Iterator[str]:
    """Warnings about silent failures, as lines of a comment."""
    last = program.placement.rank_of(program.placement.ends[-1])
    yield "The schedule's name says which rank holds which stage; the order is the CSV's. Do not change one alone."
    times = f" (with data parallelism: {last}/{program.placement.ranks} of all processes)" if last else ""
    yield f"The loss is on rank {last}{times}: LOG_RANK must name it."
    yield "Initial weights depend on the rank that makes them. To compare schedules, begin with one checkpoint:"
    yield "--checkpoint.create_seed_checkpoint in one process, then --checkpoint.enable --checkpoint.load_only."


def _toml(title: str, settings: dict[str, dict[str, object]], program: Program, _: object) -> Iterator[str]:
    yield f"# {title}, for torchtitan 0.2 (--job.config_file)"
    yield from (f"# {line}" for line in _watch(program))
    for section, values in settings.items():
        yield f"\n[{section}]"
        yield from (f"{key} = {text}" for key, text in _values(values))


def _python(
    title: str, settings: dict[str, dict[str, object]], program: Program, model: dict[str, object]
) -> Iterator[str]:
    layers = model["layers"]
    yield f'"""{title}, for torchtitan 0.3:'
    yield "torchrun .. -m torchtitan.train --module NAME --config planned, where NAME is this file's, without .py."
    yield ""
    yield from _watch(program)
    yield '"""'
    yield ""
    yield "from torchtitan.models.llama3.config_registry import llama3_debugmodel as base  # put your model here"
    yield "\n\ndef planned():"
    yield "    config = base()"
    yield "    layers = len(config.model_spec.model.layers)"
    yield f"    if layers != {layers}:"
    yield f'        raise ValueError(f"the plan is for {layers} layers, {{base.__name__}} has {{layers}}")'
    for section, values in settings.items():
        yield from (f"    config.{section}.{key} = {text}" for key, text in _values(values, "    "))
    yield "    config.training.disable_cuda_graphs = True  # torchtitan refuses them with pipelining"
    if any(kind.splits for kind in program.kinds):
        yield "    # where B and W are apart, the final norm gets no gradient under torchtitan's chunked loss"
        yield '    config.loss = getattr(config.loss, "loss_fn", config.loss)'
    yield "    return config"


def _values(values: dict[str, object], indent: str = "") -> Iterator[tuple[str, str]]:
    """Key and value in a syntax that TOML and Python share; lists with one item per line."""
    for key, value in values.items():
        if isinstance(value, list):
            items = "".join(f"{indent}    {json.dumps(item)},\n" for item in value)
            yield key, f"[\n{items}{indent}]"
        else:
            yield key, json.dumps(value)
