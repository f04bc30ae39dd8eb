"""Random numbers that depend on names, never on which rank draws them or when.

Initial weights are seeded per layer, active randomness in a forward (dropout) per (step, microbatch, layer). Both use
the default generators of torch, which ranks running as threads share: `RNG_LOCK` is held from seeding to the last draw.
Forwards that are not known to draw hold it shared, and are checked for draws afterwards.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zbc.errors import ZbcError
from zbc.runtime.core.private import Dropouts

PATIENCE = 2.0  # seconds for which a thread that draws waits for threads that check for draws


class _Lock:
    """A reentrant lock, held by one thread that draws or shared by any number of threads that check for draws."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._none_looks = threading.Condition(self._lock)
        self._looking = 0
        self._round = 0  # increases when threads that share it are no longer waited for

    def __enter__(self) -> None:
        self._lock.acquire()
        # A forward may hang, or wait for another rank. It then takes draws of others for its own, and runs again.
        if self._looking and not self._none_looks.wait_for(lambda: not self._looking, PATIENCE):
            self._looking, self._round = 0, self._round + 1

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def share(self) -> int:
        """Starts to share the lock; returns the round to be passed to `leave`."""
        with self._lock:
            self._looking += 1
            return self._round

    def leave(self, round_: int) -> None:
        with self._lock:
            if round_ == self._round:
                self._looking -= 1
                if not self._looking:
                    self._none_looks.notify_all()


RNG_LOCK = _Lock()
_READING = threading.RLock()  # held while generators outside of torch are seeded for data, until they are restored


def seed_of(*parts: object) -> int:
    """A 63-bit seed from the printed `parts`; the same in every process."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch's CPU generator with `seed`, holds it exclusively in the body, and restores its state afterwards."""
    with RNG_LOCK, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def drawing(device: torch.device, seed: int) -> Iterator[None]:
    """Seeds the generators of `device` with `seed` and holds them exclusively, for a forward that draws."""
    with RNG_LOCK:
        torch.default_generator.manual_seed(seed)  # 2 us; torch.manual_seed, which visits every device, takes 375
        if device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)
        yield


@contextmanager
def reading() -> Iterator[Callable[[int], None]]:
    """Holds the generators of torch, Python and numpy exclusively; yields a function that seeds all of them.

    For reading data: every rank has to draw the same for a sample. Restores the generators afterwards.
    """
    numpy: Any = importlib.import_module("numpy.random") if "numpy" in sys.modules else None
    with RNG_LOCK, _READING:
        torchs, pythons = torch.default_generator.get_state(), random.getstate()
        numpys = None if numpy is None else numpy.get_bit_generator()

        def seed(number: int) -> None:
            torch.default_generator.manual_seed(number)
            random.seed(number)
            if numpy is not None:
                numpy.seed([number & 0xFFFFFFFF, number >> 32])

        try:
            if numpy is not None:  # swaps the generator: restoring its state would take 50 us
                numpy.set_bit_generator(_instead())
            yield seed
        finally:
            torch.default_generator.set_state(torchs)
            random.setstate(pythons)
            if numpy is not None:
                numpy.set_bit_generator(numpys)


@functools.cache
def _instead() -> Any:
    return importlib.import_module("numpy.random").MT19937()


class Look:
    """The context of a forward on `device` that is not known to draw: no other thread draws meanwhile; `drew` says
    afterwards whether the forward drew."""

    __slots__ = ("_before", "_device", "_round", "drew")

    def __init__(self, device: torch.device) -> None:
        self._device, self.drew = device, False

    def __enter__(self) -> Look:
        self._round, self._before = RNG_LOCK.share(), _position(self._device)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            # Not after a failure: without free memory the check would fail, too, and hide the first error.
            self.drew = kind is None and _position(self._device) != self._before
        finally:
            RNG_LOCK.leave(self._round)


def _position(device: torch.device) -> tuple[bytes, int]:
    """The positions of the generators: Mersenne Twister's counters and first words, which a refill changes."""
    state = torch.default_generator.get_state()
    offset = torch.cuda.default_generators[device.index or 0].get_offset() if device.type == "cuda" else 0
    return ctypes.string_at(state.data_ptr(), _HEAD), offset


_HEAD = 128  # bytes of 5056


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
    text = f"model: layer {layer} draws from {source} in its forward"
    hint = "draw with torch's own generator, which is seeded for each step, microbatch and layer"
    return ZbcError("E509", text, hint=hint)


@contextmanager
def accused(layer: str) -> Iterator[None]:
    """Raises E509 if the forward in its body draws from a generator outside of torch."""
    with RNG_LOCK:
        before = unseeded()
        yield
        source = moved(before)
    if source is not None:
        raise draws_unseeded(layer, source)


def draws(module: nn.Module) -> bool:
    """Whether a forward of `module` in training draws random numbers.

    Recognises dropout modules with p > 0, a number above 0 in an attribute named `dropout` or `dropout_p` (as in
    attention and recurrent modules), and a true attribute `zbc_random`, for layers that draw by other means.
    """
    return any(_draws(inner) for inner in module.modules())


def _draws(module: nn.Module) -> bool:
    if isinstance(module, Dropouts):
        return module.p > 0
    if isinstance(module, nn.RReLU) or getattr(module, "zbc_random", False) is True:
        return True
    rates = (getattr(module, name, 0) for name in ("dropout", "dropout_p"))
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)
