"""A plan as the settings of torchtitan: its `[parallelism]` and `[training]` keys, and the CSV file they name.

torchtitan loads the CSV into torch's own pipelining runtime, which takes any order of one pipe. It cuts the model by
names of modules; those of its transformer models stand for zbc's layers: tok_embeddings, layers.N, and norm and output
for the head.
"""

from __future__ import annotations

import json

from zbc.interop import torch_csv
from zbc.interop.refused import Refused
from zbc.ir import Placement, Program
from zbc.plan.directory import Manifest

_NAMES = {"embed": ["tok_embeddings"], "head": ["norm", "output"]}


def dumps(program: Program, manifest: Manifest, csv_name: str) -> tuple[str, str]:
    """The settings, which name the CSV file `csv_name`, and the text of that file.

    Raises E413 for what torch cannot express, and for stages that torchtitan would put on other ranks.
    """
    csv = torch_csv.dumps(program)
    refused = Refused("torchtitan", "torchtitan")
    placement = program.placement
    p, v = placement.ranks, placement.chunks
    model = manifest.planning.get("model", {})
    if model.get("family") not in ("gpt", "llama"):
        refused.add(f"it has models of its own, the plan is for model.family = {model.get('family')!r}")
    if v is None or placement != Placement.looped(p, v):
        refused.add("with a CSV file it deals stages round and round the ranks; the plan places them otherwise")
    if manifest.ramp:
        refused.add("all of its batches are of one size; the training begins with smaller ones (schedule.ramp)")
    refused.raise_any("`--to torch-csv` writes the order alone, for torch's runtime with stages of your own")
    parts = [[name for layer in names for name in _NAMES.get(layer, [layer])] for names in manifest.layers]
    batch = manifest.microbatch_size * program.microbatches
    lines = [
        f"# {manifest.schedule}: {p} ranks, {placement.stages} stages, {program.microbatches} microbatches",
        "[training]",
        f"local_batch_size = {batch}",
        f"seq_len = {model['seq_len']}",
        "",
        "[parallelism]",
        f"pipeline_parallel_degree = {p}",
        'pipeline_parallel_schedule = "_PipelineScheduleRuntime"',
        f"pipeline_parallel_schedule_csv = {json.dumps(csv_name)}",
        f"pipeline_parallel_microbatch_size = {manifest.microbatch_size}",
        "module_fqns_per_model_part = [",
        *(f"  {json.dumps(part)}," for part in parts),
        "]",
    ]
    return "\n".join(lines) + "\n", csv
