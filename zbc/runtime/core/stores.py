"""The stores of a worker: their values, and messages for values left over at the end of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from zbc.ir import Key, Kind, Message
from zbc.ops import VALUES

if TYPE_CHECKING:
    from zbc.runtime.core.state import Worker


class Store(NamedTuple):
    """A store of a worker: the values that it holds, and the message for a key left over at the end of a step."""

    name: str
    values: tuple[str, ...]  # of `ops.VALUES`
    left: str


STORES = (
    Store("edges", ("act", "grad"), "{}"),
    Store("kept", ("kept",), "F {} has no backward"),
    Store("slots", ("left",), "B {} has no W"),
    Store("away", ("host",), "what F {} left went to the host and was never fetched back"),
)
# The values made by ops that REDO runs again.
REPEATED = frozenset(ref.what for kind in Kind if kind.row.repeats for ref in kind.row.writes)


def leftovers(worker: Worker) -> list[str]:
    """Messages for values that a finished step should have consumed but did not."""

    def late(mb: int) -> bool:
        return worker.phase_run.ending.due(worker, mb)

    due = (store for store in STORES[1:] if not any(VALUES[value].stays for value in store.values))
    texts = [store.left.format(key.name) for store in due for key in worker.store(store) if late(key.mb)]
    texts += [_left_on(worker, edge) for edge in worker.edges if late(edge.mb)]
    texts += [text for feature in worker.features for text in feature.leftovers(worker)]
    texts += ["a sum of gradients was started and never used"] * len(worker.summing)
    texts += [
        f"the slices of m{number - worker.phase_run.first} did not all run"
        for _, step, number in worker.reading
        if step <= worker.step
    ]
    return [*texts, *(f"the loss of m{mb} was never reported" for mb in worker.losses if late(mb))]


def _left_on(worker: Worker, edge: Message) -> str:
    """The message for a value left over on an edge."""
    placement = worker.placement
    sent = placement.crosses(edge.source, edge.sink, edge.pipe)
    name = Key(edge.source if sent or placement.branches else edge.sink, *edge[2:]).name
    name += f" to s{edge.sink}" if placement.branches else ""
    what, reader = ("output", "F") if edge.forward else ("gradient", "B")
    if sent:
        return f"the {'output of F' if edge.forward else 'input gradient of B'} {name} was never sent"
    return f"the {what} handed over for {reader} {name} was never used"
