"""torch.distributed.pipelining: its runtime with the order of a plan, and the orders of its schedules.

    place = plan.program.placement
    stages = [PipelineStage(part(s), s, place.stages, device) for s in place.stages_of(rank)]
    schedule = zbc.torch_schedule(plan, stages, loss_fn)
    schedule.step(x, target=y)

The only private names of torch that a plan uses are `_PipelineScheduleRuntime` and `_load_csv` (torch 2.13 and 2.15).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.pipelining import schedules
from torch.nn.parallel import DistributedDataParallel

from zbc.api import Plan, open_plan
from zbc.compiler.schedules import Request, find
from zbc.errors import ZbcError
from zbc.host.torch_version import release
from zbc.interop import torch_csv
from zbc.ir import Program

_PLAIN = {"Schedule1F1B": "1f1b", "ScheduleGPipe": "gpipe"}  # run from code in torch; its table of 1F1B differs
_LOOPED = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
_V = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
NAMES = (*_PLAIN, *_LOOPED, *_V)
_TURNS = (2, 13)  # the first torch with neighbouring stages on one rank


def torch_schedule(
    plan: Plan | str | Path, stages: Sequence[Any], loss_fn: Callable[..., Any], **options: Any
) -> schedules._PipelineScheduleRuntime:
    """Torch's pipelining runtime for the `PipelineStage`s of this rank, with the order of a plan (or its path).

    `loss_fn(output, target)` is a mean over a microbatch. `options` go to torch's schedule, such as
    `args_chunk_spec`. Raises E413 for a plan that torch cannot express, and for stages that are not the plan's.
    """
    order = open_plan(plan) if isinstance(plan, str | Path) else plan
    text = torch_csv.dumps(order.program)
    problems = list(_problems(order.program, stages))
    if problems:
        raise ZbcError("E413", f"torch: these stages cannot run {order.name}", details=problems)
    runtime: Any = schedules._PipelineScheduleRuntime  # not typed by torch
    schedule: schedules._PipelineScheduleRuntime = runtime(
        list(stages), order.program.microbatches, loss_fn=loss_fn, **options
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "order.csv")
        path.write_text(text, encoding="utf-8")
        schedule._load_csv(str(path))
    return schedule


def _problems(program: Program, stages: Sequence[Any]) -> Iterator[str]:
    """Reasons why these stages would hang or train wrongly with this order."""
    placement = program.placement
    if not stages:
        yield "there are none; every rank has stages of its own"
        return
    rank, size, total = stages[0].group_rank, stages[0].group_size, {stage.num_stages for stage in stages}
    if size != placement.ranks:
        yield f"the plan is for {placement.ranks} ranks, the stages are in a group of {size}"
    elif (given := sorted(stage.stage_index for stage in stages)) != (planned := sorted(placement.stages_of(rank))):
        yield f"rank {rank} has stages {_list(planned)}, it was given {_list(given)}"
    if total != {placement.stages}:
        yield f"the plan has {placement.stages} stages, theirs is {_list(sorted(total))} (num_stages)"
    wrapped = [stage.stage_index for stage in stages if isinstance(stage.submod, DistributedDataParallel)]
    if wrapped and any(kind.splits for kind in program.kinds):
        yield (
            f"stage {_list(wrapped)} is in DistributedDataParallel, which sums gradients before W has made them; take "
            "it off, and sum gradients over replicas after step"
        )
    turns = any(placement.rank_of(source) == placement.rank_of(sink) for source, sink in placement.edges)
    if release(torch.__version__) < _TURNS and turns and placement.ranks > 1:
        yield f"torch {torch.__version__} hangs in its own transfers where neighbouring stages share a rank; 2.13 works"


def _list(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))


def __getattr__(name: str) -> Callable[[Request], Program]:
    """The schedule classes of torch as plugins: `--schedule torch:ScheduleZBVZeroBubble`."""
    if name not in NAMES:
        raise AttributeError(f"{name} is not one of {', '.join(NAMES)}")
    return lambda request: torch_csv.loads(own_order(name, request.p, request.m, max(2, request.v))).program


def own_order(name: str, ranks: int, microbatches: int, chunks: int = 2) -> str:
    """The order of torch's schedule class of this name as CSV, with `chunks` stages per rank if it takes several.

    Raises ValueError if torch has no such schedule for these numbers.
    """
    if name in _PLAIN:
        return torch_csv.dumps(find(_PLAIN[name]).make(Request(ranks, microbatches)))
    many = 2 if name in _V else chunks
    stages = [
        SimpleNamespace(
            stage_index=chunk * ranks,
            num_stages=ranks * many,
            group_size=ranks,
            group_rank=0,
            is_first=chunk == 0,
            is_last=False,
            has_backward=True,
            submod=torch.nn.Identity(),
        )
        for chunk in range(many)
    ]
    made = getattr(schedules, name)(stages, microbatches, loss_fn=lambda output, target: output)
    rows = [[str(action) if action else "" for action in made.pipeline_order[rank]] for rank in range(ranks)]
    return "".join(",".join(row) + "\n" for row in rows)
