"""Optional features of a plan, each with its ops, its state and its hooks (core/feature.py).

A feature is a module here, or in a folder with its parts, with a function `build(context) -> Feature | None`. What else
a rank has of features is made here: the groups in which it shares layers, the optimizers of its parameters.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from zbc.ir import Op
from zbc.ops import MAKER, WORDS
from zbc.plan.directory import meeting
from zbc.runtime.core.feature import Context, Feature, Features, Site
from zbc.runtime.core.muon import Whole
from zbc.runtime.core.optimizer import NO_WHOLES, StageOptimizer, build_optimizer
from zbc.runtime.core.split import SplitLinear
from zbc.runtime.core.tensors import AUTOCAST

if TYPE_CHECKING:
    from zbc.runtime.features.tensor_parallel import Shared

# The order of their hooks. What wraps handlers comes from the inside out, then what decides how steps end, then what
# joins entries of a script; means take the place of weights before these are gathered; gradients are whole (tensor
# parallelism) before they are scaled (freezing); the last one to keep what F leaves does so (offload).
ORDER = (
    "words.vocabulary_state",
    "added",
    "packing",
    "moving",
    "shards.gathers",
    "qk_clip",
    "experts.expert_parallel",
    "scaling",
    "slices.stage_slice",
    "tensor_parallel",
    "ties",
    "freezing",
    "offload.offload",
    "unflushed.cycle",
    "ahead",
    "groups.units",
    "averaging",
)


def built(context: Context, made: Iterable[Feature | None] = ()) -> Features:
    """The features of a rank; first those that were `made` before, last those of other modules."""
    more = sorted({info.name for info in pkgutil.iter_modules(__path__) if not info.ispkg} - {*ORDER})
    modules = (importlib.import_module(f"{__name__}.{name}") for name in (*ORDER, *more))
    builders = (module.build for module in modules if hasattr(module, "build"))
    every = (*made, *(build(context) for build in builders))
    return Features(feature for feature in every if feature is not None)


def groups_of(site: Site) -> Shared:
    """The groups of ranks that shard layers, experts and tokens with a rank."""
    from zbc.runtime.features.tensor_parallel import Shared

    return Shared.of(site)


def optimizer_of(
    site: Site,
    owner: int,
    parameters: Mapping[str, nn.Parameter],
    casts: Sequence[SplitLinear],
    wholes: Mapping[str, Whole] = NO_WHOLES,
    *,
    tied: Collection[str] = (),
    late: int = 0,
) -> StageOptimizer:
    """The optimizer of the `parameters` of `owner` (a stage, its experts, or a rank's words), and of their `casts`:
    sharded over replicas, with averages of the weights, or with versions of them. `tied`: names of weights that stages
    share; `late`: the delay of its gradients in steps of the stage, in asynchronous training."""
    from zbc.runtime.features.moving import Mean
    from zbc.runtime.features.shards.sharded import Sharded
    from zbc.runtime.features.unflushed.versions import versioned

    manifest, settings, options = site.manifest, site.settings, site.settings.optimizer
    ranks, own = (meeting(manifest, Op(kind, owner), site.rank) for kind in (MAKER["total"], MAKER["weights"]))
    own = ranks if manifest.one_sided or owner == WORDS else own  # two pipes take from each other, without meeting
    of, ahead = (options, parameters, casts, wholes), options.sync == "post-validate"
    how: dict[str, Any] = {"lowered": settings.lowered, "masters": settings.model.master, "ahead": ahead}
    if manifest.sharded and len(own) > 1:
        how |= {"ranks": own, "rank": site.rank, "among": ranks, "whole": frozenset(parameters.keys() & tied)}
        if owner != WORDS:
            low = AUTOCAST.get(settings.model.dtype) if settings.model.builtin else None
            how |= {"frees": bool(manifest.resident), "low": low, "scatters": manifest.scatters}
        found: StageOptimizer = Sharded(*of, **how, cycles=manifest.flushless)
    else:
        found = build_optimizer(*of, **how)
    found = found if options.ema is None else Mean(found, options.ema)
    return versioned(options, found, casts, late) if manifest.flushless else found
