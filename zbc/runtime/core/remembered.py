"""Buffers that a forward changes, such as the running statistics of BatchNorm.

In a pipeline several microbatches are between F and B at once, and with recompute a forward runs twice. So a forward
never writes into a tensor that another microbatch may still need: a copy takes the buffer's place. What backward saved
stays as it was, a second forward starts from what the first one found, and each microbatch changes the buffers once, in
the order of the forwards. A buffer may also come to be in the first forward only: until then it is absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from torch import Tensor, nn

Place = tuple[nn.Module, str]  # a module and the name of one of its buffers
Kept = Tensor | Literal["absent"] | None


def places(layer: nn.Module, names: Sequence[str]) -> tuple[Place, ...]:
    """Where the buffers `names` of a layer are kept."""
    modules = dict(layer.named_modules(remove_duplicate=False))
    split = [name.rpartition(".") for name in names]
    return tuple((modules[path], key) for path, _, key in split)


def present(buffers: Sequence[Place]) -> list[Kept]:
    """What is in the places; for `put_back`."""
    return [module._buffers.get(name, "absent") for module, name in buffers]


def put_back(buffers: Sequence[Place], values: Sequence[Kept]) -> None:
    """Put `values` into the places."""
    for (module, name), value in zip(buffers, values, strict=True):
        if isinstance(value, str):
            module._buffers.pop(name, None)
        else:
            module._buffers[name] = value


def renew(buffers: Sequence[Place]) -> list[Kept]:
    """Put a copy into each place; return what was there, which nobody writes to any more."""
    before = present(buffers)
    put_back(buffers, _copies(before))
    return before


@contextmanager
def as_before(buffers: Sequence[Place], before: Sequence[Kept]) -> Iterator[None]:
    """The buffers as an earlier forward found them; afterwards they are as they were."""
    now = present(buffers)
    try:
        put_back(buffers, _copies(before))
        yield
    finally:
        put_back(buffers, now)


@contextmanager
def left_alone(buffers: Sequence[Place]) -> Iterator[None]:
    """What runs in here writes to copies; afterwards places have what they had."""
    before = renew(buffers)
    try:
        yield
    finally:
        put_back(buffers, before)


def _copies(values: Sequence[Kept]) -> list[Kept]:
    return [value.clone() if isinstance(value, Tensor) else value for value in values]
