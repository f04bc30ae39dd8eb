"""Times of transfers between two ranks, by the transport of training runs; and a table of all pairs of ranks.

One rank computes for a moment and sends; the other has posted its buffer and waits, asleep, like an idle rank. The
message carries the time at which it was sent: processes of one machine share a clock. Sizes take turns.

The table, which hardware.links names, is measured by every rank that torchrun started. Pairs exchange a small and a
large tensor, pairs without a common machine at the same time; a message takes half of the lower quartile of the round
trips, since other load only adds to them. On CPUs the first ranks of two machines are measured for all ranks there.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from itertools import combinations
from statistics import median

import torch
import torch.distributed as dist

from zbc.ir import Message, Placement, Program, forward
from zbc.job.links import LinkTable
from zbc.job.profile import Copy, LinkProfile, Point, spread
from zbc.plan.directory import Manifest, assemble
from zbc.runtime.transports.network import Network, bind_loopback, in_turns
from zbc.training.devices import Laps, settled
from zbc.training.launch.board import Board, open_store, prefixed
from zbc.training.launch.reach import bind_towards
from zbc.training.profiling.times import quick

_BUSY = 0.002  # seconds that the sender computes
_LATE = 0.004  # seconds after which a message has surely arrived
_WARM_UP = 3
_REPEATS = 6
_COPIED, _COPIES = 2**26, 10  # bytes of a copy to or from the host, and how many follow one another
_IN_A_ROW = 4  # sums
_PRODUCTS, _SIDE = 24, {"cpu": 256, "cuda": 4096}  # of matrices
_SIZE = {"cpu": 2**22, "cuda": 2**28}  # bytes of a message beside them

Samples = dict[str, list[float]]  # bytes of a tensor -> us one way; "send", "post", "take" and "agree" -> us


class Pair:
    """One of two ranks. Both call the same methods in the same order; `dist.init_process_group` has run."""

    def __init__(self, rank: int, device: torch.device, rounds: int) -> None:
        self.rank, self.device, self._rounds = rank, device, _WARM_UP + rounds
        self._network = Network(_manifest(2 * self._rounds), device, timedelta(seconds=300))
        self._factor = torch.ones(2 * [_SIDE[device.type]], device=device)
        self._messages = [[Message(*way, mb, 0, 0) for mb in range(2 * self._rounds)] for way in ((0, 1), (1, 0))]

    def measure(self, sizes: Sequence[int]) -> Samples:
        """This rank's samples: rank 0 sends, rank 1 receives. No size below 8 bytes."""
        found: Samples = defaultdict(list)
        for number in range(self._rounds):
            samples: Samples = found if number >= _WARM_UP else defaultdict(list)
            for size in sizes:
                self._move(number, size, samples)
            self._take(number, sizes[0], samples)
            self._beside(number, samples, _SIZE[self.device.type])
            self._meet()
            samples["agree"].append(self._meet())
        self._network.close()
        return dict(found)

    def _move(self, number: int, size: int, found: Samples) -> None:
        network, message = self._network, self._messages[0][number]
        tensor = torch.zeros(-(-size // 8), dtype=torch.float64, device=self.device)
        if self.rank:
            began = time.perf_counter()
            network.post(message, tensor, 0)
            found["post"].append(1e6 * (time.perf_counter() - began))
            self._meet()
            network.wait(message)
            settled(self.device)
            found[str(size)].append(1e6 * (time.perf_counter() - float(tensor[0])))
        else:
            self._meet()
            end = time.perf_counter() + _BUSY
            while (began := time.perf_counter()) < end:
                pass
            tensor[0] = began
            settled(self.device)
            network.send(message, tensor, 1)
            found["send"].append(1e6 * (time.perf_counter() - began))
        network.finish_step()

    def _take(self, number: int, size: int, found: Samples) -> None:
        """Measures the time that rank 0 takes to receive a message that has arrived."""
        message = self._messages[1][self._rounds + number]
        tensor = torch.zeros(size, dtype=torch.uint8, device=self.device)
        if self.rank:
            self._network.send(message, tensor, 0)
        else:
            self._network.post(message, tensor, 1)
            time.sleep(_LATE)
            began = time.perf_counter()
            self._network.wait(message)
            found["take"].append(1e6 * (time.perf_counter() - began))
        self._network.finish_step()

    def _beside(self, number: int, found: Samples, size: int) -> None:
        """Measures a large message, products alone, and products during such a message each way, which takes less."""
        large, other = defaultdict[str, list[float]](list), 1 - self.rank
        self._move(number, size, large)
        found["large"] += large.get(str(size), [])
        out, back = (torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(2))
        ways = self._messages[0][self._rounds + number], self._messages[1][number]
        for name in ("alone", "beside"):
            self._meet()
            began = time.perf_counter()
            if name == "beside":
                self._network.post(ways[other], back, other)
                self._network.send(ways[self.rank], out, other)
            _multiply(self._factor, _PRODUCTS)
            settled(self.device)
            found[name].append(1e6 * (time.perf_counter() - began))
        self._network.wait(ways[other])
        self._network.finish_step()

    def _meet(self) -> float:
        """us of a sum of a few numbers."""
        began = time.perf_counter()
        self._network.all_reduce(torch.zeros(64, dtype=torch.float64, device=self.device), (0, 1))
        settled(self.device)
        return 1e6 * (time.perf_counter() - began)


def sums_of(rank: int, count: int, device: torch.device, sizes: Sequence[int], rounds: int) -> Samples:
    """us of an all-reduce over all `count` ranks, as inside of ops, by its bytes; the mean of some in a row."""
    network, everyone = Network(_manifest(1, tp=count), device, timedelta(seconds=300)), (*range(count),)
    found = Samples()
    for number in range(_WARM_UP + rounds):
        for size in sizes:
            tensor = torch.zeros(-(-size // 4), device=device)
            network.all_reduce(tensor, everyone)
            settled(device)
            began = time.perf_counter()
            for _ in range(_IN_A_ROW):
                network.start_sum(tensor, everyone).wait()
            settled(device)
            took = 1e6 * (time.perf_counter() - began) / _IN_A_ROW
            if number >= _WARM_UP:
                found.setdefault(str(size), []).append(took)
    network.close()
    return found


def _manifest(messages: int, tp: int = 1) -> Manifest:
    """A manifest of two stages on two ranks, or of one on `tp`, which determines the groups and number of messages."""
    stages = 2 if tp == 1 else 1
    ops = tuple((forward(stage),) for stage in range(stages))
    manifest, _ = assemble(
        Program(Placement.linear(stages), messages, ops, ("link",), tp=tp),
        layers=[[f"{stage}"] for stage in range(stages)],
        microbatch_size=1,
        planning={},
        training={},
    )
    return manifest


def fit(samples: Mapping[str, Sequence[float]]) -> LinkProfile | None:
    """The latency and the bandwidth fitted to the medians; None without samples.

    The time of the sender's call is subtracted, since it is the rank's own time. Least squares of relative errors, so
    that small messages count as much as large ones.
    """
    less = quick(samples.get("send", ()))
    found = {int(size): times for size, times in samples.items() if size.isdigit()}
    if not found:
        return None
    points = [Point(bytes=n, us=max(0.1, median(us) - less), spread=spread(us)) for n, us in sorted(found.items())]
    latency, per_byte = _line([(point.bytes, point.us) for point in points])
    return LinkProfile(latency_us=latency, gbps=1 / (1e3 * per_byte), points=points)


def share_of(samples: Mapping[str, Sequence[float]]) -> float:
    """The share of a transfer by which it holds up products of each of its ranks; 0 without samples."""
    alone, beside, large = (median(samples.get(name, [0.0])) for name in ("alone", "beside", "large"))
    return max(0.0, beside - alone) / 2 / large if large else 0.0


def _line(rows: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """us = a + b bytes with the least sum of (us fitted / us measured - 1)^2, a >= 0 and b > 0."""
    each = [(1 / us**2, size, us) for size, us in rows]
    x, y = (sum(row[0] * row[k] for row in each) / sum(row[0] for row in each) for k in (1, 2))
    across = sum(w * (size - x) ** 2 for w, size, _ in each)
    slope = sum(w * (size - x) * (us - y) for w, size, us in each) / across if across else 0.0
    if slope <= 0:
        return y, 1e-9  # the size makes no difference: 1000 TB/s
    if y - slope * x < 0:  # through the origin
        return 0.0, sum(w * size * us for w, size, us in each) / sum(w * size**2 for w, size, _ in each)
    return y - slope * x, slope


class HostCopies:
    """Copies between pinned memory of the host and a cuda device, on one stream per direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host = [torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._there = [torch.empty(_COPIED, dtype=torch.uint8, device=device) for _ in range(2)]
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._factor = torch.randn(2 * [_SIDE["cuda"]], dtype=torch.bfloat16, device=device)

    def measure(self) -> Copy:
        """Measures each direction alone, both at once, and both during products of matrices."""
        back, out = self._copies((0,), busy=False)[0], self._copies((1,), busy=False)[0]
        both, busy = self._copies((0, 1), busy=False), self._copies((0, 1), busy=True)
        return Copy(
            to_device_gbps=back,
            to_host_gbps=out,
            both_to_device_gbps=both[0],
            both_to_host_gbps=both[1],
            busy_to_device_gbps=busy[0],
            busy_to_host_gbps=busy[1],
        )

    def _copies(self, ways: Sequence[int], *, busy: bool) -> list[float]:
        """GB/s of each direction (0: to the device), with some copies in a row."""
        took, laps = list[list[float]]([] for _ in ways), Laps(self.device)
        for _ in range(_REPEATS):
            torch.cuda.synchronize(self.device)
            if busy:
                _multiply(self._factor, 8 * _COPIES)
            for way, ms in zip(ways, took, strict=True):
                with torch.cuda.stream(self._streams[way]):
                    laps.take(partial(self._copy, way), ms)
            laps.read()
        return [_COPIES * _COPIED / (median(ms[1:]) * 1e6) for ms in took]  # the first warms up

    def _copy(self, way: int) -> None:
        ends = self._there[way], self._host[way]
        target, source = ends if way == 0 else reversed(ends)
        for _ in range(_COPIES):
            target.copy_(source, non_blocking=True)


def _multiply(factor: torch.Tensor, count: int) -> None:
    for _ in range(count):
        factor @ factor


_LIMIT = timedelta(seconds=300)
_SMALL, _LARGE = 256, 4 << 20  # bytes
_FEWEST, _ENOUGH_S = 3, 3.0  # minimum of round trips, and the time after which no more follow
_FASTEST = 1e5  # GB/s: upper bound for any link

Bar = Callable[[int], AbstractContextManager[Callable[[], None]]]  # a progress bar of n turns; yields its increment


def measure(device: str, rounds: int, bar: Bar) -> LinkTable | None:
    """The table, on rank 0; the other ranks take part."""
    env = os.environ
    if env.get("LOCAL_WORLD_SIZE") == env.get("WORLD_SIZE"):
        bind_loopback()
    else:
        bind_towards(env["MASTER_ADDR"])
    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device("cuda", int(env.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_LIMIT)
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        store = open_store(env["MASTER_ADDR"], int(env["MASTER_PORT"]), host_it=False)
        board = Board(prefixed("links", store), rank, world)
        board.meet("hosts", _LIMIT, f"{socket.gethostname()} {env.get('GROUP_RANK', '')}")
        hosts = board.said("hosts")
        stands = [hosts.index(host) if device == "cpu" else r for r, host in enumerate(hosts)]
        mine, order = dict[tuple[int, int], tuple[float, float]](), turns(hosts, stands)
        with bar(len(order)) as done:
            for pairs in order:
                for a, b in (pair for pair in pairs if rank in pair):
                    small, large = (
                        _trip(b if rank == a else a, rank == a, size, where, rounds) for size in (_SMALL, _LARGE)
                    )
                    mine[a, b] = small, large
                dist.barrier()
                done()
        board.meet("times", _LIMIT, json.dumps([*mine.items()]))
        found = [{(a, b): (small, large) for (a, b), (small, large) in json.loads(t)} for t in board.said("times")]
        dist.barrier()  # rank 0 may host the store
        return table_of(world, found, hosts, stands) if rank == 0 else None
    finally:
        dist.destroy_process_group()


def turns(hosts: Sequence[str], stands: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The pairs to measure, in turns of pairs without a common machine; `stands`: by rank, its proxy elsewhere."""
    pairs = combinations(range(len(hosts)), 2)
    wanted = ((a, b) for a, b in pairs if hosts[a] == hosts[b] or (stands[a], stands[b]) == (a, b))
    return in_turns(wanted, hosts.__getitem__)


def _trip(other: int, first: bool, size: int, where: torch.device, rounds: int) -> float:
    """Seconds one way of a message of `size` bytes, from some round trips, `rounds` of them if they are fast."""
    tensor, took = torch.zeros(size // 4, device=where), list[float]()
    more, end = torch.ones(1, device=where), time.perf_counter() + _ENOUGH_S
    while more.item():
        began = time.perf_counter()
        for move in (dist.send, dist.recv) if first else (dist.recv, dist.send):
            move(tensor, other)
        settled(where)
        took.append((time.perf_counter() - began) / 2)
        if first:
            late = time.perf_counter() > end and len(took) > _FEWEST
            more.fill_(0.0 if late or len(took) > rounds + 1 else 1.0)
            dist.send(more, other)
        else:
            dist.recv(more, other)
    return sorted(took[1:])[len(took[1:]) // 4]  # the first warms up


def table_of(
    world: int,
    found: Sequence[dict[tuple[int, int], tuple[float, float]]],
    hosts: Sequence[str] = (),
    stands: Sequence[int] = (),
) -> LinkTable:
    """Latency and bandwidth of each pair, from the seconds of a small and a large message measured by both ranks."""
    gbps, us = ([[0.0] * world for _ in range(world)] for _ in range(2))
    for a, b in combinations(range(world), 2):
        apart = stands and hosts[a] != hosts[b]
        c, d = sorted((stands[a], stands[b])) if apart else (a, b)
        small, large = (max(found[rank][c, d][which] for rank in (c, d)) for which in (0, 1))
        speed = min(_FASTEST, (_LARGE - _SMALL) / max(large - small, 1e-12) / 1e9)
        gbps[a][b] = gbps[b][a] = speed
        us[a][b] = us[b][a] = max(0.0, small - _SMALL / speed / 1e9) * 1e6
    return LinkTable("rank", tuple(map(tuple, gbps)), tuple(map(tuple, us)))
