"""`[hardware]` with its defaults filled in: times of arithmetic, memory traffic and messages.

A kernel takes some us to start, then the larger of its arithmetic at `tflops` and its memory traffic at
`memory_gbps` (the roofline of Williams et al., 2009). Kernels run one after another, so their times add up: a matrix
product does not hide the norm before it. A message takes a latency and its bytes over the bandwidth of its link.
`ranks_per_node` ranks share a node, chosen by nodes.py, and links between nodes have their own speed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import NamedTuple

from zbc.compiler.cost.choices import Choices
from zbc.job.links import LinkTable
from zbc.job.profile import Kernel
from zbc.job.spec import Hardware, Job
from zbc.topology import Topology, by_node, even

# What a message costs each of its ranks: us of the host, and a share of its transfer (evidence: docs/costs.md).
_MESSAGE = {"cuda": (15.0, 0.06), "cpu": (15.0, 0.7)}
_DEFAULTS = {  # (tflops, memory GB/s, kernel us, link Gbit/s, link us): an A100's, as measured by bench/published.py
    "cuda": (230.0, 1750.0, 3.0, 200.0, 10.0),
    "cpu": (0.1, 20.0, 5.0, 20.0, 700.0),
}
_LINKS = {"cuda": "a network's; inside a node NVLink is some ten times as fast", "cpu": "gloo's inside a machine"}


# Relative to the rate of products: FlashAttention 2 reaches 50 to 73% of an A100's peak where products reach 80 to 90%
# (arXiv 2307.08691); torch's CPU kernel is as fast as its products in float32.
ATTENTION = {"cpu": 1.0, "cuda": 0.7}


class Link(NamedTuple):
    """A link between two ranks: ms of latency, and bytes per ms."""

    latency: float
    speed: float

    def ms(self, size: float) -> float:
        """ms of a message of `size` bytes."""
        return self.latency + size / self.speed


def message_of(job: Job) -> tuple[float, float]:
    """What a message keeps each of its two ranks from computing: ms, and a share of its transfer.

    From `costs.message`, else the profile; else the runtime's own where op times are estimated, and
    none where they are given or assumed.
    """
    if job.costs.message is not None:
        return job.costs.message, 0.0
    if job.timed is not None:
        return job.timed.host.transfer_us / 1e3, job.timed.host.transfer_share
    estimated = job.costs.f is None and job.counted
    us, share = _MESSAGE[job.hardware.device] if estimated else (0.0, 0.0)
    return us / 1e3, share


def assumed_link(job: Job) -> str | None:
    """The link between ranks that nothing in the job or its profile describes, in words; None if something does."""
    given = job.hardware
    known = (job.links, job.costs.comm, job.costs.f, given.link_gbps, job.profile and job.profile.link)
    if job.parallel.pp * job.parallel.dp == 1 or not job.counted or any(each is not None for each in known):
        return None
    *_, gbps, us = _DEFAULTS[given.device]
    return f"{gbps:g} Gbit/s and {us if given.link_us is None else given.link_us:g} us, {_LINKS[given.device]}"


def _rate(given: float | list[float] | None, default: float) -> float:
    return given if isinstance(given, float | int) else default


@dataclass(frozen=True, slots=True)
class Machine:
    """The speed of one rank and of its links."""

    flops_per_ms: float
    bytes_per_ms: float
    kernel_ms: float
    near: Link  # within a node
    far: Link  # between nodes
    node: int  # ranks of the run on a node
    topology: Topology
    links: LinkTable | None = None  # in place of near and far
    attention: float = 1.0  # its rate, relative to that of products

    @classmethod
    def of(cls, job: Job, hardware: Hardware | None = None) -> Machine:
        """The machine of the fastest rank, or of `hardware`. Link speeds it leaves out come from the profile, if
        measured there, else from defaults."""
        given = job.hardware.fastest if hardware is None else hardware
        tflops, memory, kernel, link, latency = _DEFAULTS[given.device]
        if job.profile is not None and job.profile.link is not None:
            link, latency = 8 * job.profile.link.gbps, job.profile.link.latency_us
        near = Link((latency if given.link_us is None else given.link_us) / 1e3, (given.link_gbps or link) * 1e6 / 8)
        far = near if given.inter_node_gbps is None else near._replace(speed=given.inter_node_gbps * 1e6 / 8)
        return cls(
            _rate(given.tflops, tflops) * 1e9,
            _rate(given.memory_gbps, memory) * 1e6,
            kernel / 1e3,
            near,
            far,
            given.ranks_per_node,
            job.topology,
            job.links,
            ATTENTION[given.device],
        )

    def ms(self, kernels: Iterable[Kernel]) -> float:
        """ms of kernels that run one after another; classes have rates of their own, relative to that of products."""
        rate = {"attention": self.attention, "fp8": 2.0}
        return sum(
            starts * self.kernel_ms + max(flops / rate.get(what, 1.0) / self.flops_per_ms, moved / self.bytes_per_ms)
            for what, flops, moved, starts in kernels
        )

    def link(self, ranks: Sequence[int]) -> Link:
        """The slowest link among these ranks of a pipeline, over all its replicas."""
        if self.links is None:
            return self._worst([(self.near, self.far)[far] for far in _apart(self.topology, self.node, tuple(ranks))])
        seats = itertools.product(range(self.topology.dp), self.topology.every)
        return self._slowest(
            (self.topology.rank(dp, a, at), self.topology.rank(dp, b, at))
            for dp, at in seats
            for a, b in combinations(ranks, 2)
        )

    def swaps_ms(self, size: float, choices: Choices | None) -> tuple[float, float]:
        """ms of an all-to-all of rows to experts, in one step and in two. A rank has `size` bytes of rows, for all
        `choices` of its tokens, in equal shares for the ranks that share out experts with it.

        In one step rows inside a node and rows between nodes are sent at once, over links of their own. In two a
        token's row crosses to each node once, and is then sent on there; inf if the ranks are not evenly on several
        nodes, or choices are not known.
        """
        one, two, spans = 0.0, 0.0, False
        for nodes in _by_nodes(self.topology, self.node):
            most, least, ep = max(map(len, nodes)), min(map(len, nodes)), sum(map(len, nodes))
            near, far = self.near, self.far
            if self.links is not None:
                near = self._slowest(pair for ranks in nodes for pair in combinations(ranks, 2))
                far = self._slowest(pair for some in combinations(nodes, 2) for pair in itertools.product(*some))
            direct = near.ms((most - 1) / ep * size) if most > 1 else 0.0
            direct = max(direct, far.ms((ep - least) / ep * size)) if len(nodes) > 1 else direct
            one = max(one, direct)
            if choices is not None and even(nodes):
                once, spans = size / choices.top_k * choices.away(len(nodes)), True
                direct = far.ms(once) + near.ms((most - 1) / most * size)
            two = max(two, direct)
        return one, two if spans else math.inf

    def between(self, a: int, b: int) -> Link:
        """The link between two ranks of the run."""
        if self.links is None:
            return self.near if a // self.node == b // self.node else self.far
        if self.links.per == "node":
            a, b = a // self.node, b // self.node
        return Link(self.links.us[a][b] / 1e3, self.links.gbps[a][b] * 1e6)

    def _slowest(self, pairs: Iterable[tuple[int, int]]) -> Link:
        """The longest latency and the lowest speed among pairs of ranks of the run; the near link if there are none."""
        return self._worst({self.between(a, b) for a, b in pairs if a != b})

    def _worst(self, found: Collection[Link]) -> Link:
        return Link(max(one.latency for one in found), min(one.speed for one in found)) if found else self.near

    def rings_ms(self, rings: Iterable[Sequence[int]], size: float, *, halves: int = 2) -> float:
        """ms of a ring all-reduce of `size` bytes in each of these rings of ranks at once, as fast as the slowest link
        of any; 0 for one rank. `halves` = 2 is reduce-scatter and all-gather, 1 is one of them: (n-1)/n of the bytes.
        """
        every = [*rings]
        count = max(map(len, every), default=1)
        if count == 1:
            return 0.0
        latency, speed = self._slowest(pair for ranks in every for pair in pairwise([*ranks, ranks[0]]))
        return latency + halves * (count - 1) / count * size / speed


@functools.lru_cache(maxsize=4096)
def _apart(run: Topology, size: int, ranks: tuple[int, ...]) -> set[bool]:
    """Whether two of these ranks of a pipeline are on different nodes of `size` ranks: for all pairs of any replica."""
    seats = itertools.product(range(run.dp), run.every)
    nodes = (sorted(run.rank(dp, pp, at) // size for pp in {*ranks}) for dp, at in seats)
    return {a != b for each in nodes for a, b in pairwise(each)}


@functools.lru_cache(maxsize=64)
def _by_nodes(run: Topology, size: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The ranks that share out experts, of each group by nodes of `size` ranks."""
    return tuple(by_node(group, size) for group in {run.sharing(rank) for rank in range(run.world)})
