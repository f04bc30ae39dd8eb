"""`model.graph`: named groups of layers, the groups that each one reads, and the checks of such a graph.

    graph  = { vision = [], text = [], fuse = ["vision", "text"], decoder = ["fuse"] }
    groups = { vision = 4, text = 2, fuse = 1, decoder = 4 }

The layers of a model are numbered group by group, each group after the groups it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from zbc.errors import ZbcError
from zbc.job.toml import Document

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
    for name in in_order(model.graph):
        numbers[name] = range(at, at + model.groups[name])
        at += model.groups[name]
    return numbers


def names(model: Model) -> list[str]:
    """The names of all layers of a factory, in their order."""
    if not model.graph:
        return [f"layers.{i}" for i in range(model.layers)]
    return [f"{name}.{i}" for name, layers in spans(model).items() for i in range(len(layers))]


def problems(model: Model, document: Document) -> Iterator[ZbcError]:
    """E110 for groups of a built-in model, and for an invalid graph."""
    where = document.where(("model", "graph"))
    if model.builtin and (model.graph or model.groups):
        text = f"config: model.graph is for layers of a factory, family is {model.family}"
        yield ZbcError("E110", text, where=where, hint='drop it, or set family = "package.module:factory"')
    elif not model.graph and model.groups:
        text = "config: model.groups counts the layers of groups, and there is no model.graph"
        hint = f"add graph = {{ {', '.join(f'{name} = []' for name in model.groups)} }} with what each group reads"
        yield ZbcError("E110", text, where=document.where(("model", "groups")), hint=hint)
    elif model.graph:
        wrong = next(_wrong(model), None)
        if wrong is not None:
            yield ZbcError("E110", f"config: {wrong[0]}", where=where, hint=wrong[1])
        if model.ties:
            text = "config: model.ties names layers by their numbers, and those of a graph have names"
            yield ZbcError("E110", text, where=document.where(("model", "ties")), hint="drop it, or model.graph")


def _wrong(model: Model) -> Iterator[tuple[str, str]]:
    """Problems of a graph, each with a fix."""
    graph, groups = model.graph, model.groups
    if missing := [name for name in graph if name not in groups]:
        hint = f"add groups = {{ {', '.join(f'{name} = 1' for name in missing)} }} with the layers of each"
        yield f"model.groups has no number of layers for {_list(missing)}", hint
    if extra := [name for name in groups if name not in graph]:
        yield f"model.groups has {_list(extra)}, which model.graph does not have", "add it to graph, or drop it"
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
        yield f"model.groups have {count} layers in all, model.layers is {model.layers}", f"set layers = {count}"


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
