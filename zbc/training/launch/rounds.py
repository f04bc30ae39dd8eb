"""The number of a run's start: torchrun restarts ranks, which must not read keys of earlier starts in its store.

torchrun's own count (TORCHELASTIC_RESTART_COUNT) is per machine: if another machine failed first, a machine may restart
without counting. So rank 0 draws a number from the store, which lives as long as the launch, and every other rank asks
for it:

    every rank but 0    reads the number of the next answer, and waits for it
    rank 0              gives answers until all have joined: who reads one that it gives has asked while it was there

Ranks may start in any order, without coordination.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from zbc.errors import ZbcError

if TYPE_CHECKING:
    from zbc.runtime.core.private import Store

_TICK_S = 0.05
_NO_NAME = ("", "none")  # torchrun's names without --rdzv-id


@contextmanager
def joined(store: Store, rank: int, ranks: int, patience: float) -> Iterator[int]:
    """The number of this start, from 1, the same on all ranks; rank 0 answers the others inside of the block. `store`
    holds the keys of all starts of this launch. Raises E609 if rank 0 does not answer for `patience` seconds."""
    if rank > 0:
        yield _ask(store, patience)
        return
    number, done = store.add("starts", 1), threading.Event()
    thread = threading.Thread(target=_answer, args=(store, number, ranks, done), name="zbc-starts", daemon=True)
    thread.start()
    try:
        yield number
    finally:
        done.set()
        thread.join(timeout=1.0)


def launch_of(store: Store, name: str, number: int, *, restarted: bool) -> str:
    """A unique id of this launch: torchrun's `name` for it, and a random word in its store.

    The name is not unique: without --rdzv-id it is "none", and with one it may be reused the next day. If the launcher
    counts a restart that is not in the store (`number` is 1), the id is the name only.
    """
    if restarted and number == 1 and name not in _NO_NAME:
        return name
    return f"{name}/{store.compare_set('launch', '', uuid.uuid4().hex).decode()}"


def same_launch(told: object, launch: str) -> bool:
    """Whether the launch id in a run's run.json is `launch`."""
    return isinstance(told, str) and (told == launch or told.startswith(f"{launch}/"))


def _ask(store: Store, patience: float) -> int:
    answer = f"answer/{store.add('answers', 0)}"
    try:
        store.wait([answer], timedelta(seconds=patience))
    except RuntimeError as error:
        text = f"run: rank 0 has not started within {patience:g} s"
        raise ZbcError("E609", text, hint="look at the machine of rank 0: its output says why") from error
    number = int(store.get(answer))
    store.add(f"joined/{number}", 1)
    return number


def _answer(store: Store, number: int, ranks: int, done: threading.Event) -> None:
    try:
        while store.add(f"joined/{number}", 0) < ranks - 1 and not done.is_set():
            # Counted before it is given: no rank that asks later reads it.
            store.set(f"answer/{store.add('answers', 1) - 1}", str(number))
            done.wait(_TICK_S)
    except RuntimeError:
        return  # the store is gone, and the run with it
