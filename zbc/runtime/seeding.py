"""Random numbers that depend on names, never on which rank draws them or when.

Initial weights are seeded per layer, active randomness in a forward (dropout) per (step, microbatch, layer). Both use
the default generators of torch, which ranks running as threads share: `RNG_LOCK` is held from seeding to the last draw.
Forwards of users that are not known to draw are watched.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.runtime.core.private import Dropouts, TorchDispatchMode, real_tensors

RNG_LOCK: Any = threading.RLock()
_CPU = torch.device("cpu")
_HELD: list[list[tuple[torch.Generator, Tensor]]] = []  # by the thread that has the lock: generators, as it met them
_READING = threading.RLock()  # held while generators outside of torch are seeded for data, until they are restored
_SEEDS: list[Callable[[int], None]] = []  # of the thread that holds it, what seeds them


def seed_of(*parts: object) -> int:
    """A 63-bit seed from the printed `parts`; the same in every process."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@contextmanager
def seeded(seed: int, device: torch.device = _CPU) -> Iterator[None]:
    """Seeds the generators of `device` with `seed`, holds them exclusively in the body, restores them afterwards."""
    with RNG_LOCK:
        generators = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index or 0])
        held = [(generator, generator.get_state()) for generator in generators]  # 1 us each
        _HELD.append(held)
        for generator, _ in held:
            generator.manual_seed(seed)  # 2 us; torch.manual_seed, which visits every device, takes 375
        try:
            yield
        finally:
            _HELD.pop()
            for generator, state in held:
                generator.set_state(state)


@contextmanager
def let_go() -> Iterator[None]:
    """Lets other threads draw while this one waits for them in the body, in an exchange inside of a layer that draws.
    Its draws go on afterwards from where they were."""
    if not (RNG_LOCK._is_owned() and _HELD):
        yield
        return
    held, own = _HELD[:], [(generator, generator.get_state()) for generator, _ in _HELD[0]]
    for generator, state in held[0]:
        generator.set_state(state)
    _HELD.clear()
    depth = RNG_LOCK._release_save()  # as threading.Condition
    try:
        yield
    finally:
        RNG_LOCK._acquire_restore(depth)
        _HELD[:] = held
        for generator, state in own:
            generator.set_state(state)


@contextmanager
def reading() -> Iterator[Callable[[int], None]]:
    """Holds the generators of torch, Python and numpy exclusively; yields a function that seeds all of them. For
    reading data: every rank has to draw the same for a sample. Restores the generators afterwards; inside of another
    one that does."""
    with RNG_LOCK, _READING:
        if _SEEDS:
            yield _SEEDS[0]
            return
        with real_tensors():
            numpy: Any = importlib.import_module("numpy.random")
            torchs, pythons, numpys = torch.default_generator.get_state(), random.getstate(), numpy.get_bit_generator()

            def seed(number: int) -> None:
                torch.default_generator.manual_seed(number)
                random.seed(number)
                numpy.seed(number & 0xFFFFFFFF)  # a list of numbers takes nine times as long

            try:
                numpy.set_bit_generator(_instead())  # restoring its state would take 50 us
                _SEEDS.append(seed)
                yield seed
            finally:
                _SEEDS.clear()
                torch.default_generator.set_state(torchs)
                random.setstate(pythons)
                numpy.set_bit_generator(numpys)


@functools.cache
def _instead() -> Any:
    return importlib.import_module("numpy.random").MT19937()


class Watch:
    """Refuses random draws on `device` that trials did not show: of layers and, with `loss`, of the loss."""

    def __init__(self, device: torch.device, *, loss: bool) -> None:
        self._cuda = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else None
        self.loss = loss
        self.outside = False  # something draws from Python or numpy: looks at these generators, too, in 60 us

    def run(self, name: str, call: Callable[..., Tensor], *given: Any, compiled: bool = False) -> Tensor:
        """`call(*given)`. Raises E509 if it draws; `name` is its name in the message."""
        others = unseeded() if self.outside else {}
        if compiled or threading.current_thread() is threading.main_thread():
            before = self._position()
            y = call(*given)
            if self._position() != before:
                raise _unexpected(name)
        else:  # ranks are threads: only the op itself shows whose draw it is; compiled code would not run under it
            with _Refuses(name):
                y = call(*given)
        if others and (source := moved(others)) is not None:
            raise draws_unseeded(name, source)
        return y

    def _position(self) -> tuple[bytes, int]:
        """The positions of the generators: Mersenne Twister's counters and first words, which a refill changes."""
        with RNG_LOCK:
            state = torch.default_generator.get_state()
        return ctypes.string_at(state.data_ptr(), 128), 0 if self._cuda is None else self._cuda.get_offset()


class _Refuses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and samples(func, arguments(func, args, kwargs)):
            raise _unexpected(self._name)
        return func(*args, **(kwargs or {}))


def arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    usual = {argument.name: argument.default_value for argument in func._schema.arguments}
    return {**usual, **dict(zip(usual, args, strict=False)), **(kwargs or {})}


def samples(func: Any, given: Mapping[str, Any]) -> bool:
    """Whether an op draws random numbers. Attention draws for its dropout only; its argument says if it has none."""
    return torch.Tag.nondeterministic_seeded in func.tags and bool(given.get("dropout_p", True))


def _unexpected(name: str) -> ZbcError:
    text = f"run: {name} draws random numbers in its forward, which it did not in the trials before training"
    hint = "set zbc_random = True on it: its draws are then seeded for each step and microbatch"
    return ZbcError("E509", text, hint=hint)


def unseeded() -> dict[str, object]:
    """The states of generators outside of torch, by their names in messages; numpy's only if it was imported."""
    numpy: Any = sys.modules.get("numpy.random")
    with _READING:  # not the states that another rank in this process has set for its data
        states: dict[str, object] = {"Python's random module": random.getstate()}
        if numpy is not None:
            state = numpy.get_state(legacy=False)["state"]
            states["numpy.random"] = (state["pos"], state["key"].tobytes())
    return states


def moved(before: Mapping[str, object]) -> str | None:
    """The name of a generator outside of torch whose state differs from `before`; None if there is none."""
    return next((what for what, state in unseeded().items() if before.get(what, state) != state), None)


def draws_unseeded(layer: str, source: str) -> ZbcError:
    """E509 for a layer that draws from `source` in its forward."""
    text = f"model: {layer} draws from {source} in its forward"
    hint = "draw with torch's own generator, which is seeded for each step, microbatch and layer"
    return ZbcError("E509", text, hint=hint)


def draws(module: nn.Module) -> bool:
    """Whether a forward of `module` in training draws random numbers. Recognises dropout modules with p > 0, a number
    above 0 in an attribute named `dropout` or `dropout_p` (as in attention and recurrent modules), and a true attribute
    `zbc_random`, for layers that draw by other means."""
    return any(_draws(inner) for inner in module.modules())


def _draws(module: nn.Module) -> bool:
    if isinstance(module, Dropouts):
        return module.p > 0
    if isinstance(module, nn.RReLU) or getattr(module, "zbc_random", False) is True:
        return True
    rates = (getattr(module, name, 0) for name in ("dropout", "dropout_p"))
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)
