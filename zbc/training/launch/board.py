"""Messages between the ranks of a run other than tensors: identity, heartbeats, the first failure.

All of them are keys in the TCPStore of the run. A store connection serves one call at a time and some calls block, so
every thread that uses it has a `Board` with a connection of its own.

The store is one thread. So what ranks say together goes to the first of some neighbours, from these to rank 0, and back
as one text: each rank makes a few calls, however many ranks there are.

The identity that all ranks must share is plan, versions, and the code itself. A machine that was not updated runs other
code under the same version, and a run with two kinds of code may go on without an error and learn nothing. So the
sources are compared: zbc's, and every module imported by the job's own modules (except installed packages: only torch's
version is compared).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import zbc
from zbc.errors import ZbcError
from zbc.job import userobject
from zbc.plan.directory import Manifest

if TYPE_CHECKING:
    from zbc.runtime.core.private import Store

_PIECE = 2**20  # characters of one value; torch's store accepts 8 MiB at most
_NEAR = 16  # neighbours, on one host or two
_CONNECT_S = 120.0  # other machines may start later
_MANY = 256  # values in one call; of more at once each takes longer


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat of a rank. `count` increases with each; `seconds` is its time in `op` so far."""

    count: int
    step: int
    index: int
    total: int  # 0 while the rank starts or ends, with its activity in `op`
    op: str
    waiting: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Heard:
    """A rank's last heartbeat and the time (`time.monotonic` of this process) when it was first read."""

    beat: Beat
    at: float


def near(rank: int, ranks: int) -> range:
    """The neighbours of a rank, itself included: they hear each other, and the first gathers what they say."""
    first = rank - rank % _NEAR
    return range(first, min(first + _NEAR, ranks))


def before(rank: int) -> list[int]:
    """The ranks of which one has to be heard, else this one listens to all: the first of neighbours, then its own."""
    return [*range(0, rank, _NEAR), *range(rank - rank % _NEAR + 1, rank)]


def plain_name(rank: int) -> str:
    """The name of a rank in messages, with one replica of the pipeline."""
    return f"rank {rank}"


class Board:
    """One thread's view of the shared table."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._store, self.rank, self.ranks = store, rank, ranks
        self._heard: set[int] = set()

    def beat(self, beat: Beat) -> None:
        """Publishes a heartbeat; does not wait for the store."""
        self._store.set(f"beat/{self.rank}", json.dumps(asdict(beat)))

    def beats(self, of: Iterable[int] | None = None) -> dict[int, Beat]:
        """The last heartbeat of every rank, or of these, that has one."""
        asked = range(self.ranks) if of is None else sorted(of)
        self._heard.update(self._beating([rank for rank in asked if rank not in self._heard]))
        ranks = [rank for rank in asked if rank in self._heard]
        texts = self._all([f"beat/{rank}" for rank in ranks])
        return {rank: Beat(**json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}

    def _beating(self, ranks: Sequence[int]) -> list[int]:
        if not ranks or self._store.check([f"beat/{rank}" for rank in ranks]):
            return [*ranks]
        half = len(ranks) // 2
        return [*self._beating(ranks[:half]), *self._beating(ranks[half:])] if half else []

    def _all(self, keys: list[str]) -> list[str]:
        parts = [keys[first : first + _MANY] for first in range(0, len(keys), _MANY)]
        return [text.decode() for part in parts for text in self._store.multi_get(part)]

    def claim(self) -> bool:
        """Claims the report of a failure; True for the first rank only, all others stay silent."""
        return self._store.compare_set("failed", "", str(self.rank)) == str(self.rank).encode()

    def failed(self) -> int | None:
        """The rank that claimed the report of a failure, if any."""
        return int(self._store.get("failed")) if self._store.check(["failed"]) else None

    def reported(self) -> int | None:
        """The exit code of all ranks, once that rank has reported and the run may end."""
        return int(self._store.get("reported")) if self._store.check(["reported"]) else None

    def report(self, code: int) -> None:
        """Marks the failure as reported; `code` is the exit code of all ranks."""
        self._store.set("reported", str(code))
        self._store.get("reported")  # `set` does not wait for the store, and this process is about to end

    def stacks(self, ranks: Iterable[int]) -> dict[int, list[str]]:
        """The stacks that these ranks have published so far."""
        told = [rank for rank in ranks if self._store.check([f"stack/{rank}"])]
        return {rank: self._store.get(f"stack/{rank}").decode().split("\n") for rank in told}

    def tell_killed(self, rank: int, signal: str) -> None:
        """Publishes that a rank was killed by a signal; several ranks may."""
        self._store.set(f"killed/{self._store.add('killed', 1)}", f"{rank} {signal}")

    def killed(self) -> dict[int, str]:
        """The ranks that were killed by a signal, as published by others, with its name."""
        told = self._all([f"killed/{number}" for number in range(1, self._store.add("killed", 0) + 1)])
        return {int(rank): signal for rank, signal in map(str.split, told)}

    def ask_stop(self, reason: str) -> None:
        """Publishes the reason why this rank asks the run to stop; the request itself is part of VALIDATE."""
        self._store.compare_set("stop", "", reason)

    def stop_reason(self) -> str | None:
        return self._store.get("stop").decode() if self._store.check(["stop"]) else None

    def tell(self, key: str, text: str) -> None:
        """Publishes a text under a key that is used once."""
        self._store.set(key, text)

    def hear(self, key: str, limit: timedelta) -> str:
        """Waits for a text and returns it."""
        self._store.set_timeout(limit)  # `wait` would be one more call
        return self._store.get(key).decode()

    def meet(
        self, name: str, limit: timedelta, say: str = "", decide: Callable[[list[str]], str] = lambda texts: texts[0]
    ) -> str:
        """Waits until every rank has called this, once for each name; returns rank 0's decision on the texts of all, by
        default its own one."""
        self._store.set(f"{name}/{self.rank}", say)
        its = near(self.rank, self.ranks)
        if self.rank == its[0]:
            self._store.set(f"{name}/near/{self.rank}", json.dumps(self._waited(name, its, limit)))
        if self.rank == 0:
            self._store.set(name, decide(self.said(name, limit)))
        return self.hear(name, limit)

    def said(self, name: str, limit: timedelta = timedelta(seconds=_CONNECT_S)) -> list[str]:
        """The texts of all ranks in a meeting; for few ranks to ask for."""
        texts = self._waited(f"{name}/near", range(0, self.ranks, _NEAR), limit)
        return [text for some in texts for text in json.loads(some)]

    def said_near(self, name: str) -> dict[int, str]:
        """The texts of the neighbours in a meeting that is over."""
        its = near(self.rank, self.ranks)
        return dict(zip(its, json.loads(self._store.get(f"{name}/near/{its[0]}")), strict=True))

    def _waited(self, name: str, ranks: Iterable[int], limit: timedelta) -> list[str]:
        self._store.set_timeout(limit)
        return self._all([f"{name}/{rank}" for rank in ranks])

    def judge(self, name: str, limit: timedelta, say: str, judge: Callable[[list[str]], ZbcError | None]) -> None:
        """A meeting after which all ranks raise the error that rank 0 finds in the texts, if there is one."""
        found = self.meet(name, limit, say, lambda texts: json.dumps((error := judge(texts)) and error.as_json()))
        if (error := json.loads(found)) is not None:
            raise ZbcError(**error)

    def be_there(self, name: str) -> None:
        """Is counted, without waiting for others; `hear` of this name waits until all are. The store has it when this
        returns."""
        if self._store.add(f"{name}/count", 1) == self.ranks:
            self._store.set(name, "")
            self._store.get(name)

    def leave(self, name: str, text: str) -> None:
        """Publishes a long text for one rank to `collect` after all have met; replaces the previous one."""
        pieces = range(0, len(text), _PIECE)
        self._store.set(f"{name}/{self.rank}", str(len(pieces)))
        for number, start in enumerate(pieces):
            self._store.set(f"{name}/{self.rank}/{number}", text[start : start + _PIECE])

    def collect(self, name: str) -> list[str]:
        """The texts that all ranks have published with `leave`."""
        texts = []
        for rank in range(self.ranks):
            count = int(self._store.get(f"{name}/{rank}"))
            texts.append(b"".join(self._store.get(f"{name}/{rank}/{number}") for number in range(count)).decode())
        return texts

    def agree(self, identity: Mapping[str, str], limit: timedelta, name: Callable[[int], str] = plain_name) -> None:
        """Waits for the `identity` of every rank. Raises E601 that names the ranks that differ, and their entries.
        Entries that only some ranks have are compared among these. The entries are sent where their digests differ."""
        text = json.dumps(identity)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if not self.meet("identity", limit, digest, lambda texts: "" if len({*texts}) == 1 else "differs"):
            return
        self.judge("identities", limit, text, lambda texts: _unlike([json.loads(text) for text in texts], name))


def _unlike(said: Sequence[Mapping[str, str]], name: Callable[[int], str]) -> ZbcError | None:
    problems = list[str]()
    for what in dict.fromkeys(what for identities in said for what in identities):
        values = {rank: identity[what] for rank, identity in enumerate(said) if what in identity}
        usual, _ = Counter(values.values()).most_common(1)[0]
        if odd := [f"{name(rank)} has {value}" for rank, value in values.items() if value != usual]:
            problems.append(f"{what}: {', '.join(odd)}, the others {usual}")
    if not problems:
        return None
    text, hint = problems[0], "give every machine the same plan directory, the same code and the same environment"
    details = [f"and in {problem}" for problem in problems[1:]]
    return ZbcError("E601", f"run: the ranks differ in {text}", hint=hint, details=details)


def hosts_of(processes: Iterable[str]) -> list[str]:
    return [process.rpartition(":")[0] for process in processes]


def host_of(known: Mapping[int, str], ask: Callable[[], list[str]]) -> Callable[[int], str]:
    """The host of a rank, empty if it is not found; all are asked for once, when one that is not `known` is named."""

    @functools.cache
    def others() -> list[str]:
        with suppress(RuntimeError, ZbcError):  # without the store they have no names
            return ask()
        return []

    return lambda rank: known.get(rank) or (others()[rank : rank + 1] or [""])[0]


Connect = Callable[[], "Store"]  # a new connection to the store of this run


@dataclass(frozen=True)
class Place:
    """The place of one rank of a run, and the address of its store."""

    rank: int
    ranks: int
    host: str  # of the store
    port: int
    keys: str  # prefix of its keys, which separates runs, and restarts of one, in a shared store
    local_rank: int = 0
    one_machine: bool = True  # whether all ranks are surely on one machine
    # torchrun's agent hosts one that outlives every rank; other launchers leave that to rank 0.
    hosts_store: bool = False
    error_file: str | None = None  # of a failure, shown in torchrun's summary
    recorder_file: str | None = None  # for NCCL's flight recorder

    def connect(self) -> Store:
        """A new connection to the store. Raises E609 if it cannot be reached."""
        return prefixed(self.keys, open_store(self.host, self.port, host_it=False))

    def board(self) -> Board:
        return Board(self.connect(), self.rank, self.ranks)


def open_store(host: str, port: int, *, host_it: bool) -> Store:
    """Connects to the store of a run, or hosts it. Raises E609 if that fails."""
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=host_it, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S)
        )
    except RuntimeError as error:
        text = f"run: cannot {'host' if host_it else 'reach'} the store of the run at {host}:{port}"
        hint = "rank 0 or torchrun's first machine has to be reachable there: check MASTER_ADDR and MASTER_PORT"
        raise ZbcError("E609", text, hint=hint, details=[str(error).partition("\n")[0]]) from error


def prefixed(prefix: str, store: Store) -> Store:
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


_DIGITS = 12
# The first is compared as a whole, the second by its version: code compiled by torch is in a cache of its own.
_NOT_MODULES = ("zbc", "torch", "__main__", "__mp_main__")
_PACKAGES = {"site-packages", "dist-packages"}


def identity(manifest: Manifest, steps: int, trace: frozenset[int] = frozenset()) -> dict[str, str]:
    """The identity of this rank's run, by names for messages. Raises E502 if the job's code cannot be imported."""
    return {
        "plan id": manifest.id,
        "plan.json (sha256)": manifest.sha256,
        "steps": str(steps),
        "steps to record": f"{len(trace)} of {min(trace) + 1}-{max(trace) + 1}" if trace else "none",
        "zbc version": zbc.__version__,
        "torch version": torch.__version__,
        "Python version": platform.python_version(),
        "the code of zbc (sha256)": _digest(sorted(Path(zbc.__file__).parent.rglob("*.py"))),
        **{f"the code of {name} (sha256)": _digest([file]) for name, file in _modules(_named(manifest))},
    }


def _named(manifest: Manifest) -> set[str]:
    """The top-level packages of the callables in the job, which are imported here."""
    model, data = manifest.planning["model"], manifest.training["data"]
    keys = {"model.family": model.get("family"), "model.loss": model.get("loss"), "data.kind": data.get("kind")}
    keys["train.hook"] = manifest.training["train"].get("hook")
    keys["checkpoint.keep_best"] = manifest.training.get("checkpoint", {}).get("keep_best")
    keys["filler.task"] = manifest.training.get("filler", {}).get("task")
    names = {what: str(name) for what, name in keys.items() if ":" in str(name)}
    for what, name in names.items():
        userobject.load(name, what)
    return {name.partition(":")[0].partition(".")[0] for name in names.values()}


def _modules(packages: set[str]) -> list[tuple[str, Path]]:
    """The loaded modules of users, and their files: those of `packages`, and others that are not installed."""
    modules, standard = [], sysconfig.get_paths()["stdlib"] + os.sep
    for name, module in sorted(sys.modules.items()):
        file, top = getattr(module, "__file__", None), name.partition(".")[0]
        if not isinstance(file, str) or not os.path.isabs(file) or not file.endswith(".py"):
            continue  # not Python, or synthetic: torch has some
        installed = file.startswith(standard) or not _PACKAGES.isdisjoint(Path(file).parts)
        if top not in _NOT_MODULES and (top in packages or not installed):
            modules.append((name, Path(file)))
    return modules


def _digest(files: Iterable[Path]) -> str:
    """A digest of the files' names and contents; a file that cannot be read counts as empty."""
    seen = hashlib.sha256()
    for file in files:
        found = b"\0"
        with suppress(OSError):
            found = hashlib.sha256(file.read_bytes()).digest()
        seen.update(file.name.encode() + b"\0" + found)
    return seen.hexdigest()[:_DIGITS]
