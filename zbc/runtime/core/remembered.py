"""Buffers that a forward changes, such as the running statistics of BatchNorm.

In a pipeline several microbatches are between F and B at once, and with recompute a forward runs twice. So a forward
never writes into a tensor that another microbatch may still need: a copy replaces the buffer. Tensors saved for
backward stay unchanged, a recomputed forward starts from the buffers of the first one, and each microbatch updates the
buffers once, in the order of the forwards. A buffer that only the first forward creates is absent until then.

A recomputed forward reuses the *decisions* of the first one, such as the experts chosen for tokens: if it broke a tie
differently, the gradients would be those of another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

from torch import Tensor, nn

from zbc.runtime.core.current import Current

Place = tuple[nn.Module, str]  # a module and the name of one of its buffers
Kept = Tensor | Literal["absent"] | None


def places(layer: nn.Module, names: Sequence[str]) -> tuple[Place, ...]:
    """The owning module and local name of each of the buffers `names` of a layer."""
    modules = dict(layer.named_modules(remove_duplicate=False))
    split = [name.rpartition(".") for name in names]
    return tuple((modules[path], key) for path, _, key in split)


def present(buffers: Sequence[Place]) -> list[Kept]:
    """The current buffers, to be passed to `put_back`."""
    return [module._buffers.get(name, "absent") for module, name in buffers]


def put_back(buffers: Sequence[Place], values: Sequence[Kept]) -> None:
    for (module, name), value in zip(buffers, values, strict=True):
        if isinstance(value, str):
            module._buffers.pop(name, None)
        else:
            module._buffers[name] = value


def renew(buffers: Sequence[Place]) -> list[Kept]:
    """Replaces each buffer by a copy; returns the previous ones, which are never written to again."""
    before = present(buffers)
    put_back(buffers, _copies(before))
    return before


@contextmanager
def as_before(buffers: Sequence[Place], before: Sequence[Kept]) -> Iterator[None]:
    """Runs its body with copies of the buffers `before` that an earlier forward started from, then restores them."""
    now = present(buffers)
    try:
        put_back(buffers, _copies(before))
        yield
    finally:
        put_back(buffers, now)


def left_alone(buffers: Sequence[Place]) -> AbstractContextManager[None]:
    """Runs its body on copies of the buffers, then restores them."""
    return as_before(buffers, present(buffers))


class Decisions:
    """The decisions of a layer's forward for one microbatch, in order."""

    __slots__ = ("_made", "_next")

    def __init__(self) -> None:
        self._made, self._next = list[Tensor](), 0

    def take(self, make: Callable[[], Tensor]) -> Tensor:
        if self._next == len(self._made):
            self._made.append(make())
        self._next += 1
        return self._made[self._next - 1]

    @contextmanager
    def again(self) -> Iterator[None]:
        """To run a forward in, for the first time or again."""
        self._next = 0
        with _decisions.using(self):
            yield


_decisions = Current[Decisions]()


def decided(make: Callable[[], Tensor]) -> Tensor:
    """Returns `make()`, without a gradient; a forward recomputed for backward gets the value of the first one."""
    decisions = _decisions.value
    return make() if decisions is None else decisions.take(make)


def _copies(values: Sequence[Kept]) -> list[Kept]:
    return [value.clone() if isinstance(value, Tensor) else value for value in values]
