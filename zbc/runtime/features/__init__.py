"""Optional features of a plan, each with its ops, its state and its hooks (core/feature.py).

A feature is a module here, or in a folder with its parts, with a function `build(context) -> Feature | None`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable

from zbc.runtime.core.feature import Context, Feature, Features

# The order of their hooks. What wraps handlers comes from the inside out, then what decides how steps end, then what
# joins entries of a script; means take the place of weights before these are gathered; gradients are whole (tensor
# parallelism) before they are scaled (freezing); the last one to keep what F leaves does so (offload).
ORDER = (
    "added",
    "packing",
    "moving",
    "shards.gathers",
    "qk_clip",
    "experts.routing",
    "scaling",
    "slices.stage_slice",
    "tensor_parallel",
    "ties",
    "lengths",
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
