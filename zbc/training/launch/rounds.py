"""Which start of a run this is: torchrun restarts ranks, and what earlier ones left in its store must not be read.

torchrun's own count (TORCHELASTIC_RESTART_COUNT) is each machine's: where another machine failed first, a machine may
restart without counting. So rank 0 draws a number from the store, which lives as long as the launch, and every other
rank asks for it:

    every rank but 0    queue a question with a word of its own, wait for the answer to that word
    rank 0              answer the questions in the queue, those of earlier starts too, which nobody reads

Ranks may come in any order, and nobody has to know who is still missing.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zbc.errors import ZbcError

if TYPE_CHECKING:
    from zbc.runtime.core.private import Store

_TICK_S = 0.05
_NO_NAME = ("", "none")  # torchrun's without --rdzv-id


@contextmanager
def joined(store: Store, rank: int, ranks: int, patience: float) -> Iterator[int]:
    """The number of this start, from 1, the same on all ranks; rank 0 goes on answering inside of the block.

    `store` holds the keys of all starts of this launch. Raises E609 if rank 0 does not answer for `patience` seconds.
    """
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
    """What tells this launch from every other one: `name`, which torchrun calls it by, and a word kept in its store.

    The name alone does not: without --rdzv-id it is "none", and with one it may be given again the next day. Where the
    launcher counts a restart that the store knows nothing of (`number` is 1), there is only the name.
    """
    if restarted and number == 1 and name not in _NO_NAME:
        return name
    return f"{name}/{store.compare_set('launch', '', uuid.uuid4().hex).decode()}"


def same_launch(told: object, launch: str) -> bool:
    """Whether what a run says it was launched by is `launch`."""
    return isinstance(told, str) and (told == launch or told.startswith(f"{launch}/"))


def _ask(store: Store, patience: float) -> int:
    word = uuid.uuid4().hex
    store.set(f"question/{store.add('questions', 1)}", word)
    answer, deadline = f"answer/{word}", time.monotonic() + patience
    while not store.check([answer]):
        if time.monotonic() > deadline:
            text = f"run: rank 0 has not started within {patience:g} s"
            raise ZbcError("E609", text, hint="look at the machine of rank 0: its output says why")
        time.sleep(_TICK_S)
    number = int(store.get(answer))
    store.add(f"joined/{number}", 1)
    return number


def _answer(store: Store, number: int, ranks: int, done: threading.Event) -> None:
    """Answer every question, until all ranks are there."""
    question = 1
    try:
        while store.add(f"joined/{number}", 0) < ranks - 1 and not done.is_set():
            if store.check([f"question/{question}"]):
                store.set(f"answer/{store.get(f'question/{question}').decode()}", str(number))
                question += 1
            else:
                done.wait(_TICK_S)
    except RuntimeError:
        return  # the store is gone, and the run with it
