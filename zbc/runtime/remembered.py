"""Buffers that a forward changes, such as the running statistics of BatchNorm.

In a pipeline several microbatches are between F and B at once, and with recompute a forward runs twice. So a forward
never writes into a tensor that another microbatch may still need: it gets a copy, which takes the buffer's place. What
backward saved stays as it was, a second forward starts from what the first one found, and each microbatch changes the
buffers once, in the order of the forwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

Place = tuple[nn.Module, str]  # a module and the name of one of its buffers


def places(layer: nn.Module, names: Sequence[str]) -> tuple[Place, ...]:
    """Where the buffers `names` of a layer are kept."""
    modules = dict(layer.named_modules(remove_duplicate=False))
    split = [name.rpartition(".") for name in names]
    return tuple((modules[path], key) for path, _, key in split)


def renew(buffers: Sequence[Place]) -> list[Tensor | None]:
    """Put a copy into each place; return what was there, which nobody writes to any more."""
    before = [module._buffers[name] for module, name in buffers]
    for (module, name), old in zip(buffers, before, strict=True):
        module._buffers[name] = None if old is None else old.clone()
    return before


@contextmanager
def as_before(buffers: Sequence[Place], before: Sequence[Tensor | None]) -> Iterator[None]:
    """The buffers as an earlier forward found them; afterwards they are as they were."""
    now = [module._buffers[name] for module, name in buffers]
    try:
        for (module, name), old in zip(buffers, before, strict=True):
            module._buffers[name] = None if old is None else old.clone()
        yield
    finally:
        for (module, name), current in zip(buffers, now, strict=True):
            module._buffers[name] = current
