"""`model.graph`: named groups of layers, the groups that each one reads, and the checks of such a graph.

    graph = { vision = [4], text = [2], fuse = [1, "vision", "text"], decoder = [4, "fuse"] }

Each group has the number of its layers and the groups that it reads. The layers of a model are numbered group by group,
each group after the groups it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from zbc.job.section import Problem

if TYPE_CHECKING:
    from zbc.job.model_section import Model

Graph = Mapping[str, Sequence[str]]


def in_order(graph: Graph) -> list[str]:
    """The groups in topological order, else as written; without groups on a cycle or after one."""
    order: list[str] = []
    while ready := [name for name, reads in graph.items() if name not in order and {*reads} <= {*order}]:
        order.append(ready[0])
    return order


def spans(model: Model) -> dict[str, range]:
    """The numbers of each group's layers, group after group; {} for a model without a graph."""
    numbers, at = dict[str, range](), 0
    for name in in_order(model.reads):
        numbers[name] = range(at, at + model.groups[name])
        at += model.groups[name]
    return numbers


def names(model: Model) -> list[str]:
    """The names of all layers of a factory, in their order."""
    if not model.graph:
        return [f"layers.{i}" for i in range(model.layers)]
    return [f"{name}.{i}" for name, layers in spans(model).items() for i in range(len(layers))]


def problems(model: Model) -> Iterator[Problem]:
    """E110 for groups of a built-in model, and for an invalid graph."""
    if model.builtin and model.graph:
        text = f"model.graph is for layers of a factory, family is {model.family}"
        yield "E110", "model.graph", text, 'drop it, or set family = "package.module:factory"'
    elif model.graph:
        yield from (("E110", "model.graph", *wrong) for wrong in islice(_wrong(model), 1))
        if model.ties:
            text = "model.ties names layers by their numbers, and those of a graph have names"
            yield "E110", "model.ties", text, "drop it, or model.graph"


def _wrong(model: Model) -> Iterator[tuple[str, str]]:
    """Problems of a graph, each with a fix."""
    graph, groups = model.reads, model.groups
    counts = {name: [one for one in of if isinstance(one, int)] for name, of in model.graph.items()}
    if wrong := [name for name, of in counts.items() if len(of) != 1]:
        yield f"model.graph has no one number of layers of {_list(wrong)}", 'begin with it, as in decoder = [4, "text"]'
    for name, reads in graph.items():
        if unknown := [group for group in reads if group not in graph]:
            yield f"model.graph: {name} reads {_list(unknown)}, which is no group", f"groups are {_list([*graph])}"
        if len({*reads}) < len(reads):
            yield f"model.graph: {name} reads one group twice", "name each group once; a layer may use its input twice"
    if not {*graph} <= {*in_order(graph)}:
        cycle = _cycle(graph)
        yield f"model.graph has a cycle: {' -> '.join(cycle)}", f"let {cycle[1]} not read {cycle[0]}"
    ends = [name for name in graph if not any(name in reads for reads in graph.values())]
    if len(ends) > 1:
        text = f"model.graph: nobody reads {_list(ends)}, and only one group may end in the loss"
        yield text, f"let {ends[-1]} read {_list(ends[:-1])}, or drop what is not needed"
    if (count := sum(groups.values())) != model.layers:
        text = f"groups of model.graph have {count} layers in all, model.layers is {model.layers}"
        yield text, f"set layers = {count}"


def _cycle(graph: Graph) -> list[str]:
    """A cycle in the direction of outputs, with its first group again at its end."""
    left = [name for name in graph if name not in in_order(graph)]
    path = [left[0]]
    while True:  # each group of `left` reads another group of `left`
        path.append(next(group for group in graph[path[-1]] if group in left))
        if path[-1] in path[:-1]:
            return path[path.index(path[-1]) :][::-1]


def _list(found: Sequence[str]) -> str:
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}"
