"""Optional features of a plan, each with its ops, its state and its hooks (core/feature.py).

A feature is a module here with a function `build(context) -> Feature | None`.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zbc.runtime.core.feature import Context, Feature


def built(context: Context) -> list[Feature]:
    """The features of a rank, in the order of their modules."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    builders = (getattr(importlib.import_module(f"{__name__}.{name}"), "build", None) for name in names)
    made = (build(context) for build in builders if build is not None)
    return [feature for feature in made if feature is not None]
