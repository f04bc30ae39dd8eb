"""zbc: compile pipeline-parallel training schedules into proven, runnable per-rank plans.

    zbc.load(path, settings, schedule)             a Job, a Plan, or a Run, whichever the path is
    zbc.plan(job, budget=None)                     a Plan
    zbc.compare(job, schedules, sweep=..)          a row for each schedule, the fastest first
    zbc.graph(plan)                                ops and their dependencies, as a networkx.DiGraph
    zbc.torch_schedule(plan, stages, loss_fn)      torch's own pipelining runtime with the order of a plan
    zbc.forward(run, plan, out)                    inference: a file with a row per sample, by the ranks of a plan
    zbc.Plan, zbc.Run, zbc.ZbcError                see help(zbc.Plan)
    zbc.attention(q, k, v), zbc.positions(x)       for your layers that run in slices of a sequence
    zbc.add_loss(x, value), zbc.loss_scale()       for your layers with losses of their own
    zbc.alongside(x, **others)                     for your layers whose masks or tables all later layers take
    zbc.selective(module)                          for your layers that recompute selectively
    zbc.experts(group), zbc.decided(make)          for your layers with experts that replicas share out

All but the last eight mirror the commands. Each is imported when first used, so that `import zbc` costs nothing.
Only those eight, `zbc.torch_schedule` and `zbc.forward` need torch. docs/python.md has examples.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zbc.api import Plan as Plan
    from zbc.api import Run as Run
    from zbc.api import compare as compare
    from zbc.api import graph as graph
    from zbc.api import load as load
    from zbc.api import plan as plan
    from zbc.errors import ZbcError as ZbcError
    from zbc.forwarding import forward as forward
    from zbc.pipelining import torch_schedule as torch_schedule
    from zbc.runtime.core.again import selective as selective
    from zbc.runtime.core.bundle import alongside as alongside
    from zbc.runtime.core.remembered import decided as decided
    from zbc.runtime.features.added import add_loss as add_loss
    from zbc.runtime.features.added import loss_scale as loss_scale
    from zbc.runtime.features.experts.expert_parallel import experts as experts
    from zbc.runtime.features.slices.slicing import attention as attention
    from zbc.runtime.features.slices.slicing import positions as positions

__version__ = "0.1.0"
__all__ = [
    "Plan",
    "Run",
    "ZbcError",
    "__version__",
    "add_loss",
    "alongside",
    "attention",
    "compare",
    "decided",
    "experts",
    "forward",
    "graph",
    "load",
    "loss_scale",
    "plan",
    "positions",
    "selective",
    "torch_schedule",
]

_HOMES = {
    "ZbcError": "zbc.errors",
    "torch_schedule": "zbc.pipelining",
    "forward": "zbc.forwarding",
    "add_loss": "zbc.runtime.features.added",
    "alongside": "zbc.runtime.core.bundle",
    "attention": "zbc.runtime.features.slices.slicing",
    "decided": "zbc.runtime.core.remembered",
    "experts": "zbc.runtime.features.experts.expert_parallel",
    "loss_scale": "zbc.runtime.features.added",
    "positions": "zbc.runtime.features.slices.slicing",
    "selective": "zbc.runtime.core.again",
}

# Importing the package zbc/plan sets `zbc.plan`, once: done first, it leaves the name to the function `zbc.plan(job)`.
importlib.import_module("zbc.plan")
globals().pop("plan")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'zbc' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "zbc.api")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
