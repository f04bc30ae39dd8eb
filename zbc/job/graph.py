"""`model.graph`: named groups of layers and which groups each one reads, and what makes a graph wrong.

    graph  = { vision = [], text = [], fuse = ["vision", "text"], decoder = ["fuse"] }
    groups = { vision = 4, text = 2, fuse = 1, decoder = 4 }

The layers of a model are numbered group by group, each group after those it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    kind = _asked(draft, "schedule", "kind")
    if isinstance(kind, str) and kind.lower() not in KINDS:
        yield no_order(kind.lower(), draft.document.where(("schedule", "kind")))
    for (section, key), fits, why, hint in _LIMITS:
        if section in sections and not fits(_asked(draft, section, key)):
            text = f"config: {section}.{key} does not go with model.graph: {why}"
            yield ZbcError("E110", text, where=draft.document.where((section, key)), hint=hint)


def no_order(kind: str, where: str) -> ZbcError:
    """E110 for a schedule of chains."""
    text = f"config: schedule.kind does not go with model.graph: {kind} has no order for it"
    return ZbcError("E110", text, where=where, hint=f"use kind = {' or '.join(map(repr, KINDS))}".replace("'", '"'))


def _asked(draft: Draft, section: str, key: str) -> object:
    return getattr(draft.sections.get(section), key, None)


def _stays(asked: object) -> bool:
    """Whether activations do not move, and nothing is left open."""
    named = [*asked.values()] if isinstance(asked, dict) else [asked]
    return all(one in ("keep", "recompute") for one in named)


def _is(*values: object) -> Callable[[object], bool]:
    return lambda asked: asked in values


_ORDER = 'use kind = "1f1b" or "zb-h1"'
# (section, key), whether a value goes with a graph, why it does not, what to do
_LIMITS: tuple[tuple[tuple[str, str], Callable[[object], bool], str, str], ...] = (
    (("schedule", "file"), _is(None), "a CSV file holds the order of a chain", _ORDER),
    (("schedule", "plugin"), _is(None), "plugins make orders of chains", _ORDER),
    (("schedule", "slices"), _is(1), "slices are of sequences in a chain", "drop it"),
    (("schedule", "chunks"), _is(None, 1), "a rank has one stage of it", "drop it"),
    (("schedule", "memory_limit"), _is(None), "its orders keep to no limit", "drop it"),
    (("parallel", "tp"), _is(1), "ranks do not share the layers of a factory", "set tp = 1"),
    (("parallel", "vocabulary"), _is("ends", "auto"), "its ends are more than two", "drop it"),
    (("parallel", "replicas"), _is(None), "they are of stages in a chain", "use dp"),
    (("parallel", "shard"), _is("none", "optimizer"), "it has not been tried", 'use shard = "optimizer"'),
    (("optimizer", "sync"), _is("before-step"), "norms travel along a chain", 'use sync = "before-step"'),
    (("freeze", "most"), _is(0), "shares are found for a chain", "drop it"),
    (("data", "balance"), lambda asked: asked != "length", "it packs sequences of tokens", "drop it"),
    (("memory", "activations"), _stays, "packed inputs stay where they are", 'use "keep" or "recompute"'),
    (("model", "compile"), _is(False), "layers with several inputs are not compiled", "drop it"),
)
