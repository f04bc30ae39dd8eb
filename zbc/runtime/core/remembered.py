"""Buffers that a forward changes, such as the running statistics of BatchNorm.

In a pipeline several microbatches are between F and B at once, and with recompute a forward runs twice. So a forward
never writes into a tensor that another microbatch may still need: a copy takes the buffer's place. What backward saved
stays as it was, a second forward starts from what the first one found, and each microbatch changes the buffers once, in
the order of the forwards. A buffer may also come to be in the first forward only: until then it is absent.

What a forward *decides*, such as the experts that tokens meet, the second one takes over: a tie that it broke otherwise
would give the gradients of another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from torch import Tensor, nn

from zbc.runtime.core.current import Current

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


class Decisions:
    """What the forward of a layer decided for one microbatch, in order."""

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
        """The forward runs in here, for the first time or again."""
        self._next = 0
        with _decisions.using(self):
            yield


_decisions = Current[Decisions]()


def decided(make: Callable[[], Tensor]) -> Tensor:
    """What `make` returns, without a gradient; in a forward that runs again for its backward, what it did before."""
    decisions = _decisions.value
    return make() if decisions is None else decisions.take(make)


def _copies(values: Sequence[Kept]) -> list[Kept]:
    return [value.clone() if isinstance(value, Tensor) else value for value in values]
