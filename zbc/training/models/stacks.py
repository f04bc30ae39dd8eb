"""Stacks of experts' weights: one parameter of a layer in memory, one for each expert in files.

    layers.3.mlp.experts.down.weight        (E, out, in) in memory
    layers.3.mlp.experts.7.down.weight      (out, in) in checkpoints and Hugging Face folders

With expert parallelism a rank has a part of a stack.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from zbc.runtime.core.grouped import of_expert
from zbc.runtime.core.split import GroupedLinear
from zbc.runtime.core.state import Worker


class Stack(NamedTuple):
    """The experts in a rank's parameter: `own` from `first` on, of `all`."""

    first: int
    own: int
    all: int


def stacks_in(layers: Iterable[tuple[str, nn.Module]]) -> dict[str, Stack]:
    """The stacked parameters of named layers."""
    return {
        ".".join(filter(None, (name, path, key))): Stack(inner.first, len(inner.weight), inner.all)
        for name, layer in layers
        for path, inner in layer.named_modules()
        if isinstance(inner, GroupedLinear)
        for key, _ in inner.named_parameters(recurse=False)
    }


def stacks_of(worker: Worker) -> dict[str, Stack]:
    """Those of a rank, by global name."""
    return stacks_in((one.name, one.module) for stage in worker.stages.values() for one in stage.layers)


def unstacked(parameters: Iterable[tuple[str, Tensor]], stacks: Mapping[str, Stack]) -> Iterator[tuple[str, Tensor]]:
    """Parameters by their names in files, stacks expert by expert."""
    for name, parameter in parameters:
        if (stack := stacks.get(name)) is None:
            yield name, parameter
        else:
            yield from ((of_expert(name, stack.first + place), one) for place, one in enumerate(parameter))


def pieces(shape: tuple[int, ...], start: int, tensor: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """The elements of a stack of this shape from `start` on as the place of an expert, the first element in its weight,
    and the elements of that."""
    flat, size, at = tensor.reshape(-1), math.prod(shape[1:]), 0
    while at < len(flat):
        place, begin = divmod(start + at, size)
        stop = min(len(flat), at + size - begin)
        yield place, begin, flat[at:stop]
        at = stop
