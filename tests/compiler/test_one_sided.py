"""Plans whose replicas take weights from each other's memory: what they go with, and what they hold."""

import pytest

from tests.jobs import job
from zbc.compiler.compile import compile_job
from zbc.errors import ZbcError
from zbc.plan.directory import read_manifest

BASE = {"kind": "interleaved-1f1b", "m": 4, "schedule": {"chunks": 2}}


def asked(dp=2, pp=4, shard="weights", exchange="one-sided", **more):
    parallel = {"pp": pp, "dp": dp, "shard": shard, "exchange": exchange, **more.pop("parallel", {})}
    return job(**{**BASE, "parallel": parallel, **more})


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
def test_it_is_for_weights_that_come_and_go(shard):
    with pytest.raises(ZbcError, match=r'E115.*goes with shard = "weights" or "all"'):
        asked(shard=shard)


def test_not_for_two_pipes():
    with pytest.raises(ZbcError, match=r"E118.*chimera, a schedule with several copies"):
        compile_job(asked(kind="chimera", schedule={}))


def test_replicas_of_a_rank_are_put_on_one_node():
    """Which sends more between nodes than the tile that would be taken else."""
    hardware = {"hardware": {"ranks_per_node": 4}, "schedule": {"chunks": 2, "microbatch_size": 256}}
    compiled = compile_job(asked(dp=4, **hardware))
    assert compiled.program.node == (1, 4) and compiled.program.one_sided
    assert compile_job(asked(dp=4, exchange="collective", **hardware)).program.node != (1, 4)
    assert compile_job(asked(dp=2, **hardware)).program.node == (2, 2)
    alone = compile_job(asked(dp=2, hardware={"ranks_per_node": 8})).program
    assert alone.node is None, "all of the run is on one"


@pytest.mark.parametrize(
    ("dp", "more"),
    [
        (4, {"hardware": {"ranks_per_node": 2}}),
        (4, {"hardware": {"ranks_per_node": 4}, "parallel": {"node": [4, 1]}}),
        (2, {"hardware": {"ranks_per_node": 4}, "parallel": {"order": [0, 1, 2, 3, 4, 5, 6, 7]}}),
    ],
)
def test_replicas_on_several_nodes_are_refused(dp, more):
    with pytest.raises(ZbcError, match=r"E118.*the replicas of rank 0 are on 2 nodes|E118.*are on 4 nodes") as caught:
        compile_job(asked(dp=dp, **more))
    assert 'use "collective"' in caught.value.hint


def test_windows_take_the_place_of_messages():
    """Each window has a row of its weights, and a slot of each replica for their gradients."""
    met, taken = (compile_job(asked(exchange=how)) for how in ("collective", "one-sided"))
    assert met.program.ranks == taken.program.ranks
    for one, other in zip(met.costs.bytes, taken.costs.bytes, strict=True):
        assert one.window == other.summed == other.gathered == other.pending == 0
        assert other.window == pytest.approx(one.summed + one.gathered / 3), "messages of a rank and of its replicas"
    for one, other in zip(met.memory, taken.memory, strict=True):
        assert other.weights > one.weights and other.together <= one.together


def test_a_manifest_says_so(tmp_path):
    compile_job(asked()).write(tmp_path / "taken")
    compile_job(asked(exchange="collective")).write(tmp_path / "met")
    assert read_manifest(tmp_path / "taken").one_sided and not read_manifest(tmp_path / "met").one_sided
    assert '"one_sided"' not in (tmp_path / "met" / "plan.json").read_text()
