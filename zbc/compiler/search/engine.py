"""The kernels, compiled if numba is installed, else plain Python; same results."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import Any

from zbc.compiler.search import anneal, listing, moves, retiming, timing

_MODULES = (listing, timing, moves, retiming, anneal)
_INLINED = (  # called in every step: passing their arguments would take as long as their work
    "following",
    "choose_b",
    "choose_f",
    "destination",
    "fits",
    "shift_op",
    "steps",
    "time_near",
    "time_far",
    "too_long",
    "tails",
)


class Engine:
    """Calls to the kernels. `numbers` makes their arguments: a list, or an array for compiled kernels."""

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        names = _names()
        if compiled:
            import numpy

            self._numpy = numpy
            names = _compile()
        self.list_schedule: Callable[..., bool] = names["list_schedule"]
        self.measure: Callable[..., tuple[bool, float, float]] = names["measure"]
        self.period: Callable[..., float] = names["period"]
        self.anneal: Callable[..., int] = names["anneal"]

    def numbers(self, values: Sequence[int] | Sequence[float]) -> Any:
        if not self.compiled:
            return list(values)
        kind = self._numpy.float64 if values and isinstance(values[0], float) else self._numpy.int64
        return self._numpy.array(values, dtype=kind)

    def columns(self, columns: Any) -> Any:
        """Converts a tuple of columns, and nested tuples, with `numbers`."""
        made = [self.columns(part) if isinstance(part, tuple) else self.numbers(part) for part in columns]
        return columns._make(made) if hasattr(columns, "_make") else tuple(made)

    def whole(self, numbers: Any) -> list[int]:
        """Converts whole numbers made by `numbers` back to a list of Python ints."""
        return list(numbers.tolist()) if self.compiled else list(numbers)


def _names() -> dict[str, Any]:
    return {name: value for module in _MODULES for name, value in vars(module).items()}


def _kernels() -> list[str]:
    """The functions of the modules; each is compiled when it is first called."""
    own = ((module.__name__, *item) for module in _MODULES for item in vars(module).items())
    return [name for home, name, value in own if inspect.isfunction(value) and value.__module__ == home]


@cache  # loading them takes longer than a small search
def _compile() -> dict[str, Any]:
    """The kernels jitted in a namespace of their own, so that they call one another compiled. numba caches compiled
    code until a kernel's own file changes, with its callees linked in: so the cache name includes a hash of the text of
    all of them. Without a folder to keep them in, each process compiles them."""
    import numba

    kept = cache_folder()
    if kept is not None and kept not in _beside():
        vars(numba.config)["CACHE_DIR"] = str(kept)  # it has no declaration
    names = _names()
    version = _version()
    for name in _kernels():
        function = names[name]
        copy = type(function)(function.__code__, names, name, function.__defaults__)
        copy.__qualname__ = f"{name}_{version}"
        names[name] = jitted = numba.njit(copy, cache=kept is not None, forceinline=name in _INLINED)
        if kept is not None:
            jitted._cache.save_overload = _if_it_fits(jitted._cache.save_overload)
    return names


def _if_it_fits(save: Callable[..., None]) -> Callable[..., None]:
    """A call that saves a kernel for later processes, and does without on a full disk."""

    def saved(*arguments: Any) -> None:
        with suppress(OSError):
            save(*arguments)

    return saved


def cache_folder() -> Path | None:
    """The folder of compiled kernels: NUMBA_CACHE_DIR, or beside the sources, the user's cache or a private folder of
    temporary files, the first that can be written; None if none can."""
    named, user = os.environ.get("NUMBA_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = ([Path(named)] if named else _beside()[:1]) + ([Path(user) / "zbc"] if os.path.isabs(user) else [])
    for place in places:
        with suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=place).close()
            return place
    with suppress(OSError):
        private = Path(gettempdir()) / f"zbc-{os.getuid()}"
        private.mkdir(mode=0o700, exist_ok=True)
        about = private.lstat()
        if about.st_uid == os.getuid() and about.st_mode == 0o40700:  # nobody else puts code there
            TemporaryFile(dir=private).close()
            return private
    return None


def _beside() -> list[Path]:
    """Where numba keeps kernels next to their sources."""
    return sorted({Path(inspect.getfile(module)).parent / "__pycache__" for module in _MODULES})


def _version() -> str:
    """The cache name of the compiled kernels."""
    text = "".join(map(inspect.getsource, _MODULES)) + repr(_INLINED)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def compiles_first() -> bool:
    """Whether the first search here compiles the kernels, which takes some 20 s, judging by numba's cache folders."""
    if not available():
        return False
    kept = cache_folder()
    return kept is None or not any(kept.rglob(f"*_{_version()}-*.nbi"))


def engine_name() -> str:
    """The engine of searches large enough for it to matter."""
    return "numba" if available() else "plain Python"


def available() -> bool:
    """Whether kernels can be compiled."""
    return importlib.util.find_spec("numba") is not None
