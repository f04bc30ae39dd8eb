"""Replicas with one-sided exchange: bitwise equal to collectives, for any timing."""

import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.jobs import job, stored
from tests.runtime.test_freed_weights import CASES, SAMPLE, STEPS, plan_of, plan_of_case, same, weights, whole
from tests.runtime.test_nonfinite import poisoned
from tests.threads import last_of, losses_of, run_threads, side_by_side, watch
from tests.tiers import few
from zbc.compiler.compile import compile_job
from zbc.errors import ZbcError
from zbc.ir import Kind
from zbc.plan.directory import StoredPlan
from zbc.runtime.features.shards import windows as module
from zbc.runtime.features.shards.windows import Window


def one_sided(plan):
    """The same plan with windows in place of collectives."""
    manifest = plan.manifest.model_copy(update={"one_sided": True})
    return StoredPlan(manifest, replace(plan.program, one_sided=True), plan.ramp)


@pytest.mark.always(
    "gis-2-bfloat16", "hanayo-1-float32", "v-half-2-float32", "looped-zb-2-float32", "1f1b-1-float32", "1f1b-1-bfloat16"
)
@pytest.mark.long("zb-v-1-float32", "zb-v-2-bfloat16", "breadth-first-1-bfloat16", "interleaved-1f1b-1-bfloat16")
@pytest.mark.parametrize(("schedule", "resident", "dtype"), few(CASES, SAMPLE))
def test_windows_change_no_bit(schedule, resident, dtype):
    plan = plan_of_case(schedule, resident, dtype)
    if plan is not None:
        same(run_threads(one_sided(plan), STEPS), whole(schedule, 2, 4, dtype))


def late(monkeypatch, seed, longest=0.004):
    """Delays ranks at random when they write and read shared memory."""
    source = random.Random(seed)
    for name in ("publish", "post", "_count", "_wait"):
        plain = getattr(Window, name)

        def held_up(self, *how, plain=plain):
            time.sleep(source.random() * longest)
            return plain(self, *how)

        monkeypatch.setattr(Window, name, held_up)


@pytest.mark.long
@pytest.mark.parametrize("seed", few(range(6), (0,)))
@pytest.mark.parametrize("schedule", few(["interleaved-1f1b", "zb-v", "breadth-first"], 1))
def test_windows_of_ranks_that_are_held_up_change_no_bit(schedule, seed, monkeypatch):
    late(monkeypatch, seed)
    same(run_threads(one_sided(plan_of(schedule, 2, 4, 1)), 4), run_threads(plan_of(schedule, 2, 4, 0), 4))


def three_replicas(shard="weights", m=4, exchange="one-sided"):
    how = {"parallel": {"dp": 3, "shard": shard, "exchange": exchange}, "memory": {"resident": 1}}
    how |= {"schedule": {"chunks": 2, "microbatch_size": 2}, "optimizer": {"lr": 1e-2, "clip_grad_norm": 0.5}}
    return compile_job(job(kind="interleaved-1f1b", pp=2, m=m, layers=6, data={"kind": "synthetic"}, **how))


@pytest.mark.always
@pytest.mark.parametrize("shard", ["weights", "all"])
def test_slots_are_added_in_the_order_of_the_ranks(shard, monkeypatch):
    """Three numbers: another order would give another sum."""
    compiled = three_replicas(shard)
    assert (Kind.SCATTER in {op.kind for _, _, op in compiled.program}) == (shard == "all")
    plain, met = (run_threads(stored(one), 4) for one in (compiled, three_replicas(shard, exchange="collective")))
    if shard == "weights":  # a hub sums in that order, too
        same(plain, met)
    assert losses_of(plain) == pytest.approx(losses_of(met), abs=1e-5)  # runs of backwards are summed before ranks
    for seed in range(2):
        with monkeypatch.context() as patch:
            late(patch, seed)
            same(run_threads(stored(compiled), 4), plain)


@pytest.mark.long
def test_a_step_that_is_skipped_leaves_rows_as_they_were():
    """The next step still uses them."""
    how = {"train": {"skip_limit": 5}, "optimizer": {"clip_grad_norm": 1e6}}
    plan = plan_of("interleaved-1f1b", 2, 4, 1, **how)
    one, other = (run_threads(each, 4, setup=poisoned({1})) for each in (one_sided(plan), plan))
    assert [result.skipped for result in one[0].results] == [False, True, False, False]
    assert losses_of(one) == losses_of(other)
    found, expected = weights(one), weights(other)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_ranks_that_wait_for_one_that_failed_end():
    """Its gradients never come; without checks of its state they would wait forever."""

    def stop(worker, op):
        if worker.rank == 3:
            raise ValueError("out of order")

    def fail(worker):
        last = worker.script[last_of(worker, Kind.REDUCE)][1]
        watch(worker, before=stop, of=lambda op: op == last)

    with pytest.raises(ValueError, match="out of order"):
        run_threads(one_sided(plan_of("zb-v", 2, 4, 1)), 1, setup=fail)


def test_a_sum_is_not_started_twice():
    def twice(worker):
        at = last_of(worker, Kind.REDUCE)
        worker.script.insert(at, worker.script[at])

    with pytest.raises(ZbcError, match="started twice"):
        run_threads(one_sided(plan_of("zb-v", 2, 4, 1)), 1, setup=twice)


def talking(count, act):
    """Ranks as threads that exchange words: the result or exception of `act(rank, exchange)`, by rank."""
    barrier, said = threading.Barrier(count, timeout=20), {}

    def run(rank):
        def exchange(word):
            said[rank] = word
            barrier.wait()
            words = [said[r] for r in range(count)]
            barrier.wait()
            return words

        try:
            return act(rank, exchange)
        except ZbcError as error:
            return error

    return side_by_side(count, run)


def test_memory_is_seen_by_all_and_has_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_FOLDER", tmp_path)
    found = talking(3, lambda rank, exchange: module.share(100, rank, (0, 1, 2), exchange))
    assert all(len(tensors) == 3 and not any(t.any() for t in tensors) for tensors in found)
    found[1][2][7] = 9
    assert found[0][2][7] == found[2][2][7] == 9
    assert not [*tmp_path.iterdir()]


def test_too_little_memory_is_told_on_every_rank(tmp_path, monkeypatch):
    plain, short = os.posix_fallocate, []

    def fallocate(handle, start, size):
        if threading.current_thread() in short:
            raise OSError(28, os.strerror(28))
        plain(handle, start, size)

    def act(rank, exchange):
        short.extend([threading.current_thread()] * (rank == 1))
        return module.share(64, rank, (0, 1), exchange)

    monkeypatch.setattr(module, "_FOLDER", tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    found = talking(2, act)
    assert all(error.code == "E603" for error in found)
    assert f"no 64 bytes of shared memory in {tmp_path}: No space left on device" in found[1].message
    assert "--shm-size" in found[1].hint and 'exchange = "collective"' in found[1].hint
    assert "rank 1 cannot share memory with rank 0" in found[0].message
    assert not [*tmp_path.iterdir()]


def test_ranks_on_other_hosts_are_told(tmp_path, monkeypatch):
    """The file of a rank on another host does not exist."""
    monkeypatch.setattr(module, "_FOLDER", tmp_path)

    def act(rank, exchange):
        def away(word):
            return [bytes(w).replace(b"zbc-", b"zbc-elsewhere-") if w[:1] == b"/" else w for w in exchange(word)]

        return module.share(64, rank, (0, 1), away if rank == 0 else exchange)

    first, second = talking(2, act)
    assert first.code == second.code == "E603"
    assert "rank 0 cannot see the memory of rank 0" in first.message and "two hosts" in first.message
    assert "rank 0 cannot share memory with rank 1" in second.message
    assert not [*Path(tmp_path).iterdir()]
