"""The transport between processes: torch.distributed with gloo (CPU) or NCCL (CUDA).

Every ordered pair of ranks that exchange tensors has a 2-rank process group of its own. With one communicator per
*unordered* pair even 1F1B has a cycle of waits on NCCL; with one per direction it has none, and the messages of a
direction are FIFO, as the compiler's proof assumes. On gloo each message of a step also has its own tag: a plan with a
wrong order hangs and is reported by the watchdog, instead of delivering a tensor to the wrong receive.

On CUDA the calls only enqueue: `wait` makes the current stream wait for the message, and the host runs ahead as far as
cuda.py lets it. NCCL raises nothing there; failures are read from its work objects (background.py). Only the watchdog
is to end a run that hangs, so the timeouts of groups are far above its own.

Gradient all-reduces have groups of their own, one for each set of ranks with replicas of a stage, and start without
blocking. All ranks start them in one order; on NCCL each group has a stream of its own, so that they overlap with each
other and with transfers, and a rank that started two of them in another order than the others could wait forever.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, view_as_real

from zbc.errors import ZbcError
from zbc.ir import Placement
from zbc.plan.directory import Manifest
from zbc.plan.groups import gatherings, of_replica, pipelines, signalled, swapping
from zbc.runtime.core.private import symmetric
from zbc.runtime.features.shards import windows
from zbc.runtime.transports import background
from zbc.runtime.transports.transport import Again, Letter, Offer, Pending, Ranks, Shared, Signal, Then, Transport

Lost = Callable[[BaseException], ZbcError]  # makes the error of a transfer that failed
_Way = tuple[Callable[..., dist.Work], int, int, Lost]  # function that starts a message, rank of its other end, its tag
_Out = tuple[Callable[..., dist.Work], int, int, Lost, background.Sends]  # and the one that keeps it in flight
_Sum = tuple[Callable[..., dist.Work], Lost]  # function that starts a sum


def bind_loopback() -> None:
    """Restricts gloo to loopback, for ranks on one machine. To be called before the process group is made."""
    names = {name for _, name in socket.if_nameindex()}
    for name in ("lo", "lo0"):
        if name in names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return


def directions(placement: Placement) -> list[tuple[int, int]]:
    """The ordered pairs (from, to) of ranks that exchange tensors, in the order in which all ranks create groups."""
    pairs = {
        pair
        for pipe in range(len(placement.pipes))
        for a, b in placement.links(pipe)
        if a != b
        for pair in ((a, b), (b, a))  # outputs one way, gradients the other
    }
    return sorted(pairs)


def rounds(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The ordered pairs in rounds, in each of which a rank is in at most one pair. Ranks that go through their own
    pairs round by round never wait for each other in a cycle. A chain of any length takes four rounds: pairs of an even
    rank and the next one first, then the others."""
    return in_turns(sorted(set(pairs), key=lambda pair: (min(pair) % 2, min(pair), max(pair), pair)), int)


def in_turns(pairs: Iterable[tuple[int, int]], of: Callable[[int], Any]) -> list[list[tuple[int, int]]]:
    """The pairs in turns, each in the first one with no other pair `of` the same."""
    turns, busy = list[list[tuple[int, int]]](), list[set[Any]]()
    for pair in pairs:
        its = {*map(of, pair)}
        at = next((number for number, taken in enumerate(busy) if taken.isdisjoint(its)), len(busy))
        if at == len(busy):
            turns.append([])
            busy.append(set())
        turns[at].append(pair)
        busy[at] |= its
    return turns


class Network(Transport):
    """The `Transport` of one rank. `dist.init_process_group` has run; all ranks construct theirs together."""

    def __init__(self, manifest: Manifest, device: torch.device, timeout: timedelta) -> None:
        placement = manifest.to_placement()
        self.rank = dist.get_rank()
        self._manifest, self._device, self._nccl = manifest, device, device.type == "cuda"
        self._edges = {edge: number for number, edge in enumerate(placement.edges)}
        self._pairs: dict[Ranks, Any] = {}
        self._signals: dict[Ranks, Any] = {}
        swift = _swift if self._nccl else None
        run = manifest.topology
        for replica, at in itertools.product(range(run.dp), run.every):
            for pairs, groups in ((directions(placement), self._pairs), (signalled(manifest), self._signals)):
                ways = itertools.chain.from_iterable(rounds(of_replica(manifest, replica, pairs, at)))
                groups |= self._groups(ways, timeout, swift)
        self._circles: dict[Ranks, Any] = {tuple(range(run.world)): dist.group.WORLD}
        self._circles |= self._groups(gatherings(manifest), timeout)
        self._swaps = self._groups(swapping(manifest), timeout)  # inside of ops: they do not queue after sums
        # For the reduces that follow gathers: they start whenever the gather has completed.
        self._after = self._groups((ranks for ranks in pipelines(manifest) if len(ranks) > 1), timeout)
        self._there: dict[Letter, _Out] = {}  # of messages that this rank sends
        self._here: dict[Letter, _Way] = {}  # of messages that it receives
        self._sums: dict[tuple[int, ...], _Sum] = {}
        self._posted: dict[Letter, tuple[dist.Work | background.Threaded, Tensor, Lost]] = {}
        # By receiver: tensors delivered to one are not kept until a slower one has received its own.
        self._sends = defaultdict[int, background.Sends](
            background.EventSends if self._nccl else background.ThreadSends
        )
        self._connect(device)

    def send(self, message: Letter, tensor: Tensor, peer: int) -> None:
        way = self._there.get(message)
        if way is None:
            way = self._there[message] = *self._way(message, peer, sending=True), self._sends[peer]
        start, number, tag, lost, sends = way
        tensor = tensor.contiguous()
        if tensor.is_neg() or tensor.is_conj():  # a lazy view: its memory has other values
            tensor = tensor.resolve_neg().resolve_conj()
        try:
            work = start([view_as_real(tensor) if tensor.is_complex() else tensor], number, tag)
        except RuntimeError as error:
            raise lost(error) from error
        sends.add(work, tensor, lost)

    def post(self, message: Letter, buffer: Tensor, peer: int) -> None:
        if message in self._posted:
            raise ZbcError("E703", f"run: {message.recv} was posted twice", where=f"rank {self.rank}")
        way = self._here.get(message)
        if way is None:
            way = self._here[message] = self._way(message, peer, sending=False)
        start, number, tag, lost = way
        try:
            work = start([view_as_real(buffer) if buffer.is_complex() else buffer], number, tag)
        except RuntimeError as error:
            raise lost(error) from error
        self._posted[message] = work, buffer, lost

    def wait(self, message: Letter) -> Tensor:
        try:
            work, buffer, lost = self._posted.pop(message)
        except KeyError:
            text = f"run: {message.recv} is needed but was not posted"
            raise ZbcError("E703", text, where=f"rank {self.rank}") from None
        try:
            work.wait()
        except RuntimeError as error:
            raise lost(error) from error
        return buffer

    def ready(self, message: Letter) -> bool:
        posted = self._posted.get(message)
        if posted is None:
            return True
        work, buffer, lost = posted
        if not self._nccl and not isinstance(work, background.Threaded):  # gloo cannot be polled: a thread waits
            work = background.Threaded(self._arrivals.start(work.wait))
            self._posted[message] = work, buffer, lost
        return work.is_completed()

    def start_sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> Pending:
        if ranks == (self.rank,):
            return _DONE
        start, lost = self._sums.get(ranks) or self._sum(ranks)
        try:
            work = start([view_as_real(tensor) if tensor.is_complex() else tensor], _SUM)
        except RuntimeError as error:
            raise lost(error) from error
        return _Collective(work, lost)

    def start(self, offer: Offer, ranks: Ranks) -> Pending:
        if offer.what == "sum":
            return self.start_sum(offer.target, ranks)
        if ranks == (self.rank,):
            if offer.target is not offer.source:
                offer.target.view(-1).copy_(offer.source.reshape(-1))
            if offer.then is not None:
                offer.then.make()
            return _DONE
        if offer.then is not None:
            return self._chained(offer, offer.then, ranks)
        group = self._swaps[ranks] if offer.what == "swap" else self._circle(ranks)
        lost = partial(self._lost_sum, ranks)
        try:
            return _Collective(_STARTS[offer.what](offer, group), lost)
        except RuntimeError as error:
            raise lost(error) from error

    def _chained(self, offer: Offer, then: Then, ranks: Ranks) -> Pending:
        gather = partial(_STARTS[offer.what], offer, self._circle(ranks))
        reduce = partial(dist.reduce, dst=then.root, group=self._after[ranks], async_op=True)
        chain = self._chains.chain(gather, then.make, reduce)
        return _Collective(chain, partial(self._lost_sum, ranks))

    def share(self, size: int, ranks: tuple[int, ...], device: torch.device) -> Shared:
        # The failure of a rank is detected by its peers in messages, and by the launcher.
        if device.type == "cuda":
            try:
                return Shared(symmetric(size, self._circle(ranks), len(ranks), device), lambda: None)
            except (ImportError, RuntimeError) as error:
                text = f"run: the GPUs of ranks {', '.join(map(str, ranks))} cannot see each other's memory"
                raise ZbcError("E603", text, details=[_first_line(error)], hint=windows.COLLECTIVE) from error
        return Shared(windows.share(size, self.rank, ranks, partial(self._say, ranks)), lambda: None)

    def _say(self, ranks: tuple[int, ...], word: bytes) -> list[bytes]:
        mine = torch.zeros(windows.NAME, dtype=torch.uint8)
        if word:
            mine[: len(word)] = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        parts = torch.empty(len(ranks), windows.NAME, dtype=torch.uint8, device=self._device)
        self.start_gather(mine.to(self._device), parts, ranks).wait()
        return [bytes(row).rstrip(b"\0") for row in parts.tolist()]

    def _groups(
        self, sets: Iterable[Ranks], timeout: timedelta, make_options: Callable[[], Any] | None = None
    ) -> dict[Ranks, Any]:
        """Makes a group for each of `sets`, in this order on all ranks; returns those that this rank is in."""
        made = [(ranks, _group(ranks, timeout, make_options)) for ranks in sets]
        return {ranks: group for ranks, group in made if self.rank in ranks}

    @functools.cached_property
    def _arrivals(self) -> background.Background:
        return background.Background("zbc-arrivals")

    @functools.cached_property
    def _chains(self) -> background.Chains:
        return background.StreamChains(self._device) if self._nccl else background.ThreadChains("zbc-chains")

    def _circle(self, ranks: tuple[int, ...]) -> Any:
        group = self._circles.get(ranks)
        if group is None:
            raise ZbcError("E703", f"run: no group for a sum over ranks {ranks}", where=f"rank {self.rank}")
        return group

    def _sum(self, ranks: tuple[int, ...]) -> _Sum:
        """The function that starts a sum, looked up once: the lookup in dist.all_reduce takes as long as the start."""
        way = self._sums[ranks] = self._backend(self._circle(ranks)).allreduce, partial(self._lost_sum, ranks)
        return way

    def _backend(self, group: Any) -> Any:
        """The backend of a group. The group's own methods look it up on every call, a sixth of the call's cost."""
        return group._get_backend(self._device) if hasattr(group, "_get_backend") else group

    def _lost_sum(self, ranks: tuple[int, ...], error: BaseException) -> ZbcError:
        others, name = ", ".join(str(rank) for rank in ranks if rank != self.rank), self._manifest.topology.name
        text = f"run: {name(self.rank)} lost a rank in a sum over all of them (the others are {others})"
        return ZbcError("E702", text, details=[_first_line(error)])

    def finish_step(self, *, drain: bool = True) -> None:
        if self._posted:
            names = ", ".join(str(message.recv) for message in self._posted)
            raise ZbcError("E703", f"run: received but never used: {names}", where=f"rank {self.rank}")
        if drain:
            for sends in self._sends.values():
                sends.drain()

    def close(self) -> None:
        """To be called when all sends and receives of this rank have completed; ends gloo's threads of each group."""
        for sends in self._sends.values():
            sends.close()
        self.__dict__.pop("_arrivals", None)  # its thread ends with it
        if "_chains" in self.__dict__:
            self._chains.close()
        self._there.clear()
        self._here.clear()
        self._sums.clear()
        for table in (self._pairs, self._signals, self._circles, self._after, self._swaps):
            for group in table.values():
                if group is not dist.group.WORLD:
                    dist.destroy_process_group(group)
            table.clear()

    def _way(self, message: Letter, peer: int, *, sending: bool) -> _Way:
        """The function, rank and tag that start a message. Looked up once: dist.isend and irecv do so on each call,
        which takes as long as starting the transfer."""
        group = self._pair(*((self.rank, peer) if sending else (peer, self.rank)), message)
        number, lost = dist.get_group_rank(group, peer), partial(self._lost, message, peer, sending)
        backend = self._backend(group)
        return backend.send if sending else backend.recv, number, self._tag(message), lost

    def _pair(self, source: int, target: int, message: Letter) -> Any:
        groups = self._signals if isinstance(message, Signal) else self._pairs
        try:
            return groups[source, target]
        except KeyError:
            text = f"run: the placement has no way from rank {source} to rank {target}"
            raise ZbcError("E703", text, where=f"rank {self.rank}") from None

    def _tag(self, message: Letter) -> int:
        """A unique number for each message in flight, whatever number its microbatch has: the next step's have larger
        ones. 0 on NCCL, which has no tags."""
        if self._nccl or isinstance(message, Signal):
            return 0
        again = isinstance(message, Again)
        carried = message.message if isinstance(message, Again) else message
        manifest, (_, _, mb, pipe, part) = self._manifest, carried
        index = 2 * (mb * len(self._edges) + self._edges[carried.edge]) + carried.forward
        return 2 * ((index * len(manifest.placement[0]) + pipe) * manifest.slices + part) + again

    def _lost(self, message: Letter, peer: int, sending: bool, error: BaseException) -> ZbcError:
        op = f"{message.send} >r{peer}" if sending else f"{message.recv} <r{peer}"
        name = self._manifest.topology.name
        return ZbcError("E702", f"run: {name(self.rank)} lost {name(peer)} at {op}", details=[_first_line(error)])

    def _connect(self, device: torch.device) -> None:
        """Uses every group once, in the order in which they were made, the same on all ranks; see `rounds`. NCCL builds
        a communicator at its first use, which blocks both ends: within a step that would be a wait that is not in the
        plan. training/warm.py sets up the additional resources of large transfers."""
        number = torch.zeros(1, device=device)
        groups = [(pair, table[pair]) for table in (self._pairs, self._signals) for pair in table]
        for (source, target), group in groups:
            peer = target if source == self.rank else source
            start: Callable[..., Any] = dist.isend if source == self.rank else dist.irecv
            try:
                start(number, peer, group).wait()
            except RuntimeError as error:
                text = f"run: rank {self.rank} cannot reach rank {peer}"
                raise ZbcError("E702", text, details=[_first_line(error)]) from error
        for ranks in sorted(self._circles):
            self.all_reduce(number, ranks)
        for group in (*self._after.values(), *self._swaps.values()):
            dist.all_reduce(number, group=group)


# Thread blocks of a GPU that one transfer may use, unless NCCL_MAX_CTAS is set: a posted receive holds its blocks until
# the message arrives. Not measured.
_BLOCKS = 4


def _swift() -> Any:
    """Options of NCCL for a group of transfers: priority over compute, and few thread blocks."""
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if "NCCL_MAX_CTAS" not in os.environ:
        options.config.min_ctas, options.config.max_ctas = 1, _BLOCKS
    return options


def _group(ranks: tuple[int, ...], timeout: timedelta, make_options: Callable[[], Any] | None = None) -> Any:
    """A process group of `ranks`, made by all ranks in one order. Not by its members only: the names of such groups
    depend on the number of groups a rank is in (torch 2.13), so that two ranks would wait for each other under
    different names."""
    options = None
    if make_options is not None:  # torch writes the group's name into them: each has its own
        options = make_options()
        options._timeout = timeout
    return dist.new_group(list(ranks), timeout=timeout, pg_options=options)


_DONE: Pending = SimpleNamespace(wait=lambda: None, ready=lambda: True)  # of a collective of one rank
_SUM = dist.AllreduceOptions()  # as dist.all_reduce with async_op=True
_SUM.asyncOp = True

# torch renames these; the old names warn where the new ones exist.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# By the kind of a collective, the function that starts it in a group; sums have a shorter way.
_STARTS: dict[str, Callable[[Offer, Any], Any]] = {
    "scatter": lambda one, of: _reduce_scatter(one.target, one.source.view(-1), group=of, async_op=True),
    "gather": lambda one, of: _all_gather(one.target.view(-1), one.source.reshape(-1), group=of, async_op=True),
    "broadcast": lambda one, of: dist.broadcast(one.target, one.root, group=of, async_op=True),
    "reduce": lambda one, of: dist.reduce(one.target, one.root, group=of, async_op=True),
    "swap": lambda one, of: dist.all_to_all_single(
        one.target, one.source.contiguous(), [*one.into], [*one.rows], group=of, async_op=True
    ),
}


class _Collective(NamedTuple):
    work: dist.Work | background.Chain
    lost: Callable[[BaseException], ZbcError]

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.lost(error) from error

    def ready(self) -> bool:
        return self.work.is_completed()


def _first_line(error: BaseException) -> str:
    """The backend's message, without its source location and without its advice."""
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return re.split(r"\. (?=[A-Z])", re.sub(r"^\[\S+:\d+\] ", "", first))[0][:200]
