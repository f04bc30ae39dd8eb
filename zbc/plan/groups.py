"""The sets of ranks of a run that communicate, for which it creates process groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from zbc.ir import Op
from zbc.ops import MAKER, TIED, experts_of
from zbc.plan.directory import averagings, judges, meetings
from zbc.plan.manifest import Manifest
from zbc.topology import At


def of_replica(
    manifest: Manifest, replica: int, pairs: Iterable[tuple[int, int]], at: At = ()
) -> list[tuple[int, int]]:
    """Pairs of ranks of a pipeline, as ranks of the run in one of its replicas, at coordinates `at` of inner axes."""
    rank = manifest.topology.rank
    return [(rank(replica, a, at), rank(replica, b, at)) for a, b in pairs]


def signalled(manifest: Manifest) -> list[tuple[int, int]]:
    """The ordered pairs of ranks of a pipeline that exchange NORM and VERDICT signals, in steps without a barrier."""
    if not manifest.ahead:
        return []
    return [pair for r in range(manifest.ranks - 1) for pair in ((r, r + 1), (r + 1, r))]


def gatherings(manifest: Manifest) -> list[tuple[int, ...]]:
    """The sets of ranks of the run with collectives, besides all ranks, in the order in which they create groups.

    The replicas of each stage that has several, and the holders of a weight that the first and the last stage share;
    the replicas of a rank that shard its weights; without a barrier also the last ranks of all replicas, which make
    the verdict; and the ranks with collectives inside of ops.
    """
    run = manifest.topology
    owners = [*range(manifest.stages), *([TIED] if manifest.tied else [])]
    groups = meetings(manifest, (Op(MAKER["total"], owner) for owner in owners))
    groups |= averagings(manifest) if manifest.averages else set()
    groups |= run.inside
    if manifest.ahead:
        groups.add(judges(manifest))
    if manifest.resident:  # replicas of one rank shard its weights
        groups |= {run.ranks((rank,), at) for rank in range(run.pp) for at in run.every}
    if manifest.ep:  # each expert has replicas of its own
        of = [Op(kind, experts_of(s)) for kind in (MAKER["total"], MAKER["weights"]) for s in range(manifest.stages)]
        groups |= meetings(manifest, of)
    if manifest.flushless:  # a stage's norm, over all its shards
        groups |= {run.held(rank) for rank in range(run.pp)}
        groups |= run.wholes if manifest.ep else set()
    groups |= set(pipelines(manifest))
    return sorted(ranks for ranks in groups if 1 < len(ranks) < manifest.topology.world)


def swapping(manifest: Manifest) -> list[tuple[int, ...]]:
    """The sets of ranks of the run that exchange rows of experts, in the order in which they make groups."""
    return sorted(manifest.topology.exchanging) if manifest.ep else []


def pipelines(manifest: Manifest) -> list[tuple[int, ...]]:
    """The ranks of each replica of the pipeline, if it is vocabulary parallel; otherwise nothing. With tensor or
    context parallelism, one set per index along these axes."""
    if manifest.vocabulary is None:
        return []
    run = manifest.topology
    places = itertools.product(range(run.dp), run.every)
    return [tuple(sorted(run.rank(dp, part, at) for part in range(run.pp))) for dp, at in places]
