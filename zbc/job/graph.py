"""`model.graph`: named groups of layers and which groups each one reads, and what makes a graph wrong.

    graph  = { vision = [], text = [], fuse = ["vision", "text"], decoder = ["fuse"] }
    groups = { vision = 4, text = 2, fuse = 1, decoder = 4 }

The layers of a model are numbered group by group, each group after those it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from zbc.errors import ZbcError
from zbc.job.toml import Document

if TYPE_CHECKING:
    from zbc.job.job import Draft
    from zbc.job.model_section import Model

KINDS = ("1f1b", "zb-h1", "zb-auto", "auto")  # that have orders for a graph
Graph = Mapping[str, Sequence[str]]


def in_order(graph: Graph) -> list[str]:
    """The groups, each after those it reads and else as they are written; those on a cycle, and behind one, are left
    out."""
    found: list[str] = []
    while ready := [name for name, reads in graph.items() if name not in found and {*reads} <= {*found}]:
        found.append(ready[0])
    return found


def spans(model: Model) -> dict[str, range]:
    """The layers of each group by their numbers, group after group; of a model without a graph nothing."""
    found, at = dict[str, range](), 0
    for name in in_order(model.graph):
        found[name] = range(at, at + model.groups[name])
        at += model.groups[name]
    return found


def names(model: Model) -> list[str]:
    """The names of all layers of a factory, in their order."""
    if not model.graph:
        return [f"layers.{i}" for i in range(model.layers)]
    return [f"{name}.{i}" for name, layers in spans(model).items() for i in range(len(layers))]


def problems(model: Model, document: Document) -> Iterator[ZbcError]:
    """E110 for groups of a built-in model, E128 for a graph that is none."""
    where = document.where(("model", "graph"))
    if model.builtin and (model.graph or model.groups):
        text = f"config: model.graph is for layers of a factory, family is {model.family}"
        yield ZbcError("E110", text, where=where, hint='drop it, or set family = "package.module:factory"')
    elif not model.graph and model.groups:
        text = "config: model.groups counts the layers of groups, and there is no model.graph"
        hint = f"add graph = {{ {', '.join(f'{name} = []' for name in model.groups)} }} with what each group reads"
        yield ZbcError("E128", text, where=document.where(("model", "groups")), hint=hint)
    elif model.graph:
        wrong = next(_wrong(model), None)
        if wrong is not None:
            yield ZbcError("E128", f"config: {wrong[0]}", where=where, hint=wrong[1])
        if model.ties:
            text = "config: model.ties names layers by their numbers, and those of a graph have names"
            yield ZbcError("E110", text, where=document.where(("model", "ties")), hint="drop it, or model.graph")


def _wrong(model: Model) -> Iterator[tuple[str, str]]:
    """What is wrong with a graph, and what to do."""
    graph, groups = model.graph, model.groups
    if missing := [name for name in graph if name not in groups]:
        hint = f"add groups = {{ {', '.join(f'{name} = 1' for name in missing)} }} with the layers of each"
        yield f"model.groups has no number of layers for {_list(missing)}", hint
    if extra := [name for name in groups if name not in graph]:
        yield f"model.groups has {_list(extra)}, which model.graph does not have", "add it to graph, or drop it"
    for name, reads in graph.items():
        if unknown := [one for one in reads if one not in graph]:
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
    """A cycle in the direction in which outputs go, its first group once more at its end."""
    left = [name for name in graph if name not in in_order(graph)]
    path = [left[0]]
    while True:  # each of these reads another one of these
        path.append(next(one for one in graph[path[-1]] if one in left))
        if path[-1] in path[:-1]:
            return path[path.index(path[-1]) :][::-1]


def _list(found: Sequence[str]) -> str:
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}"


def unfit(draft: Draft) -> Iterator[ZbcError]:
    """E110 for what does not go with a graph."""
    sections = draft.sections
    model: Model | None = sections.get("model")
    if model is None or not model.graph:
        return
    schedule, parallel, optimizer = (sections.get(name) for name in ("schedule", "parallel", "optimizer"))
    memory, data, partition, freeze = (sections.get(name) for name in ("memory", "data", "partition", "freeze"))
    kind = "" if schedule is None else (schedule.kind or "").lower()
    known = " or ".join(f'"{name}"' for name in KINDS)
    checks: list[tuple[bool, tuple[str, str], str, str]] = [
        (bool(kind) and kind not in KINDS, ("schedule", "kind"), f"{kind} has no order for it", f"use kind = {known}"),
        (bool(schedule and schedule.file), ("schedule", "file"), "a CSV file holds the order of a chain", f"use kind = {known}"),
        (bool(schedule and schedule.plugin), ("schedule", "plugin"), "plugins make orders of chains", f"use kind = {known}"),
        (bool(schedule and schedule.slices != 1), ("schedule", "slices"), "slices are of sequences in a chain", "drop it"),
        (bool(schedule and schedule.chunks not in (None, 1)), ("schedule", "chunks"), "a rank has one stage of it", "drop it"),
        (bool(schedule and schedule.memory_limit), ("schedule", "memory_limit"), "its orders keep to no limit", "drop it"),
        (bool(parallel and parallel.tp > 1), ("parallel", "tp"), "layers of a factory are not shared", "set tp = 1"),
        (bool(parallel and parallel.vocabulary == "shared"), ("parallel", "vocabulary"), "its ends are several", "drop it"),
        (bool(parallel and parallel.replicas), ("parallel", "replicas"), "replicas are of stages in a chain", "use dp"),
        (bool(parallel and parallel.shard in ("gradients", "weights")), ("parallel", "shard"), "nobody has tried it", 'use shard = "optimizer"'),
        (bool(optimizer and optimizer.sync != "before-step"), ("optimizer", "sync"), "norms travel along a chain", "drop it"),
        (bool(freeze and freeze.most), ("freeze", "most"), "the shares are found for a chain", "drop it"),
        (bool(data and data.balance == "length"), ("data", "balance"), "rows of several samples are of tokens", "drop it"),
        (bool(memory and _moves(memory.activations)), ("memory", "activations"), "stages with several inputs do not move to the host", 'use "keep" or "recompute"'),
        (bool(partition and partition.layout), ("partition", "layout"), "a layout is of a chain", "use layers_per_stage"),
        (model.compile, ("model", "compile"), "layers with several inputs are not compiled", "drop it"),
    ]  # fmt: skip
    for wrong, place, why, hint in checks:
        if wrong:
            text = f"config: {'.'.join(place)} does not go with model.graph: {why}"
            yield ZbcError("E110", text, where=draft.document.where(place), hint=hint)


def _moves(asked: str | Mapping[str, str]) -> bool:
    named = [asked] if isinstance(asked, str) else [*asked.values()]
    return any(one not in ("keep", "recompute") for one in named)
