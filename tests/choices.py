"""Randomly drawn jobs of features that change how a step is timed or weighed, and `auto` beside all named schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import NamedTuple

from tests.composed import Tables, compiled
from zbc.compiler.schedules import AUTO, SCHEDULES
from zbc.errors import ZbcError

NO_PLAN = float("inf")


class Compared(NamedTuple):
    """ms of a step of `auto`, as reported, and of each named schedule; infinite without a plan."""

    auto: float
    taken: str  # the schedule that `auto` took, or why there is no plan
    named: dict[str, float]

    @property
    def best(self) -> str:
        return min(self.named, key=lambda name: self.named[name])

    @property
    def behind(self) -> float:
        """The share by which `auto` is longer than the best named schedule; infinite if only that has a plan."""
        least = self.named[self.best]
        return 0.0 if least == NO_PLAN else self.auto / least - 1


def _sizes(rng: Random, p: int, microbatches: int) -> Tables:
    """A model with op times from its sizes, or with given ones for each layer."""
    hidden, layers = rng.choice((1024, 2048)), rng.choice((2 * p, 2 * p + 1, 3 * p + 1))
    model = {"family": "llama", "layers": layers, "hidden": hidden, "heads": hidden // 128}
    tables: Tables = {
        "model": {**model, "vocab": rng.choice((32000, 128256)), "seq_len": 2048, "dtype": "bfloat16"},
        "parallel": {"pp": p},
        "schedule": {"kind": AUTO, "microbatches": microbatches},
        "hardware": {"device": "cuda", "link_gbps": rng.choice((50, 100, 400)), "link_us": rng.choice((10, 50))},
    }
    if rng.random() < 0.3:
        means = {"f": 1.0, "b": 1.1, "w": 0.9}
        times = {key: [round(mean * rng.uniform(0.6, 1.4), 2) for _ in range(layers)] for key, mean in means.items()}
        tables["costs"] = {"per": "layer", **times, "comm": rng.choice((0.05, 0.2, 0.5))}
    return tables


def _limit(rng: Random, low: float, high: float) -> dict[str, str]:
    return {"memory_limit": f"{rng.uniform(low, high):.2f}x"}


def without_a_flush(rng: Random) -> Tables:
    """Steps that follow one another: with two versions of the weights, per stage, or validated afterwards."""
    p = rng.choice((2, 3, 4))
    tables = _sizes(rng, p, rng.choice((p, p + 1, 2 * p)))
    sync = rng.choice(("two-versions", "two-versions", "asynchronous", "post-validate"))
    tables["optimizer"] = {"sync": sync}
    if rng.random() < 0.3:
        tables["schedule"] |= _limit(rng, 0.8, 1.6)
    if sync == "two-versions" and rng.random() < 0.3:
        tables["parallel"]["dp"] = 2
    return tables


def shared_vocabulary(rng: Random) -> Tables:
    """Output layers on all ranks, under a limit."""
    p = rng.choice((2, 2, 3))
    tables = _sizes(rng, p, rng.choice((2, 3, 4)))
    tables.pop("costs", None)
    tables["parallel"]["vocabulary"] = "shared"
    tables["schedule"] |= _limit(rng, 0.6, 1.3)
    return tables


def offload(rng: Random) -> Tables:
    """Activations that move to the host under a limit, or may."""
    p = rng.choice((2, 2, 3))
    tables = _sizes(rng, p, rng.choice((2, 3, 4)))
    tables.pop("costs", None)
    tables["memory"] = {"activations": rng.choice(("offload", "offload", "recompute+offload", "auto"))}
    tables["hardware"]["host_gbps"] = rng.choice((50.0, 100.0, 200.0))
    tables["schedule"] |= _limit(rng, 0.4, 1.0)
    return tables


def unequal_tokens(rng: Random) -> Tables:
    """Microbatches of unequal length, with numbers of their own or as given."""
    p, count = rng.choice((2, 3, 4)), rng.choice((3, 4, 6))
    tables = _sizes(rng, p, count)
    tables["schedule"]["tokens"] = [128 * rng.randint(1, 16) for _ in range(count)]
    if rng.random() < 0.3:
        tables["schedule"]["renumber"] = False
    if rng.random() < 0.3:
        tables["schedule"] |= _limit(rng, 0.8, 1.6)
    return tables


CLASSES: dict[str, Callable[[Random], Tables]] = {
    "without a flush": without_a_flush,
    "a shared vocabulary": shared_vocabulary,
    "offload": offload,
    "unequal tokens": unequal_tokens,
}


def drawn(what: str, seed: int) -> Tables:
    """The job of a class for a seed."""
    return CLASSES[what](Random(f"{what} {seed}"))


def compared(tables: Tables, names: Iterable[str] = SCHEDULES) -> Compared:
    """`auto` and named schedules, all with the fast tier of searches."""
    named = dict[str, float]()
    for name in names:
        try:
            named[name] = compiled(tables, name).step_ms
        except ZbcError:
            named[name] = NO_PLAN
    try:
        found = compiled(tables)
    except ZbcError as error:
        return Compared(NO_PLAN, f"{error.code} {error.message}", named)
    return Compared(found.step_ms, found.schedule, named)
