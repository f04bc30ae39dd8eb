"""Specifications of tensors in a plan: shape, dtype and memory layout; the type of a loss function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import Tensor, nn

from zbc.runtime.core.private import fake_mode

Batch = Tensor | Mapping[str, Tensor]  # inputs or targets of a microbatch: one tensor, or several by name
Loss = Callable[[Any, Any], Tensor]  # of an output and its target, a `Batch`: one number
IGNORED = -100  # a target that does not count, as in torch's cross entropy


def each(function: Callable[[Tensor], Any], batch: Batch) -> Any:
    """Returns the result of a function of tensors for each tensor of a batch, under the same names."""
    if isinstance(batch, Tensor):
        return function(batch)
    return {name: function(tensor) for name, tensor in batch.items()}


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to `device` without blocking."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


P = ParamSpec("P")


def cached(maxsize: int) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    """A cache of the last `maxsize` results of a function that makes tensors. Fake ones belong to their mode, and those
    of a compiler to what it compiles."""

    def around(make: Callable[P, Tensor]) -> Callable[P, Tensor]:
        kept: Any = functools.lru_cache(maxsize)(lambda mode, *args, **named: make(*args, **named))

        @functools.wraps(make)
        def run(*args: P.args, **named: P.kwargs) -> Tensor:
            if torch.compiler.is_compiling():
                return make(*args, **named)
            found: Tensor = kept(fake_mode(), *args, **named)
            return found

        run.cache_clear = kept.cache_clear  # type: ignore[attr-defined]
        return run

    return around


@cached(256)
def constant(values: tuple[int, ...] | tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of `values` on `device`, cached since its copy to the device blocks. Not to be written to."""
    return torch.tensor(values, dtype=dtype, device=device)


class Length(NamedTuple):
    """The tokens of a microbatch's rows, and those of whole rows."""

    tokens: int
    whole: int


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor for one microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def of_rows(self, length: Length | None) -> TensorSpec:
        """The spec for shorter rows; None: for whole ones. Ranks may share the tokens."""
        if length is None:
            return self
        batch, tokens, *rest = self.shape
        return self._replace(shape=(batch, tokens * length.tokens // length.whole, *rest))

    @property
    def numbers(self) -> bool:
        """Whether gradients may flow through it."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def drawn(self, device: torch.device | None = None, *, below: int = 1) -> Tensor:
        """Random values, drawn on the CPU; integers and masks are in [0, `below`): by default zeros, which are valid
        indices of every table."""
        made = torch.randn(self.shape, dtype=self.dtype) if self.numbers else torch.randint(below, self.shape)
        return made.to(device, self.dtype)

    def maker(self, device: torch.device) -> Callable[[], Tensor]:
        """Returns a function that makes uninitialised tensors of this shape and dtype, in 2/3 of torch.empty's time."""
        like = torch.empty((), dtype=self.dtype, device=device).expand(self.shape)  # has no memory of its own
        return functools.partial(torch.empty_like, like, memory_format=torch.contiguous_format)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class Laid(NamedTuple):
    """The spec and memory layout of a tensor; `strides` is None if it is contiguous."""

    spec: TensorSpec
    strides: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> Laid:
        """The layout of a copy of the tensor: dense, also if the tensor is a slice or expanded."""
        with torch.no_grad():
            strides = None if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        contiguous = strides is None or torch.empty(tensor.shape, device="meta").stride() == strides
        return cls(TensorSpec.of(tensor), None if contiguous else strides)

    def of_rows(self, length: Length) -> Laid:
        spec = self.spec.of_rows(length)
        if self.strides is None:
            return Laid(spec)
        return Laid.of(self.zeros(torch.device("meta"))[:, : spec.shape[1]])

    def zeros(self, device: torch.device) -> Tensor:
        shape, dtype = self.spec
        if self.strides is None:
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.empty_strided(shape, self.strides, dtype=dtype, device=device).zero_()

    def lay(self, tensor: Tensor) -> Tensor:
        """Copies a contiguous tensor into this layout."""
        if self.strides is None:
            return tensor
        return torch.empty_strided(tensor.shape, self.strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class Part(NamedTuple):
    """Slice `number` of a microbatch: rows [start, stop) of a sequence of `length`."""

    number: int
    start: int
    stop: int
    length: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def last(self) -> bool:
        return self.stop == self.length

    def of(self, whole: Tensor) -> Tensor:
        return whole[:, self.start : self.stop]


def share_of(target: Tensor, part: Part) -> float:
    """The weight of a slice in the mean over its microbatch; `target` has the microbatch's targets, on the CPU. Integer
    targets count unless they are IGNORED; 0 if none counts."""
    if target.is_floating_point() or target.is_complex():
        return part.rows / part.length
    counted = target != IGNORED
    total = int(counted.sum())
    return int(part.of(counted).sum()) / total if total else 0.0


AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}  # by model.dtype; others compute as they are


def lower_precision(parameters: Iterable[nn.Parameter], dtype: torch.dtype | None) -> None:
    """Casts floating-point parameters to `dtype`; those that train accumulate their gradients in float32. None leaves
    all parameters as they are."""
    if dtype is None:
        return
    for parameter in parameters:
        if not parameter.is_floating_point():
            continue
        parameter.data = parameter.data.to(dtype)
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32
