"""Two copies of a pipeline of two ranks, as four processes."""

import math
from pathlib import Path

import pytest
import torch

from tests.processes.gloo_ranks import train, unpack
from tests.processes.plans import GPT, killing, metrics, run_here, write_plan
from tests.processes.test_checkpoints import weights as written
from tests.processes.test_gloo import same
from tests.refusals import error_of
from tests.runtime import test_averaging as averaging
from tests.runtime import test_freed_weights as freed
from tests.runtime import test_freezing as freezing
from tests.runtime.small_plans import GPT as SMALL
from tests.runtime.small_plans import make_plan, make_program, parameters, reference
from tests.runtime.test_flushless import plan_of as flushless
from tests.runtime.test_unequal import unequal
from tests.runtime.test_windows import one_sided
from tests.threads import losses_of, norms_of, run_threads
from tests.tiers import few
from zbc.plan.directory import StoredPlan

TWO = {"pp": 2, "dp": 2}
pytestmark = pytest.mark.usefixtures("one_thread_per_kernel")


def plan_of(schedule, *, zero1=False, tied=False, low=False, sync="before-step", node=()):
    model = {"family": "gpt", "layers": 4, "hidden": 32, "heads": 4, "vocab": 61, "seq_len": 16, "ties": tied}
    model |= {"dtype": "bfloat16", "parameters": "bfloat16"} if low else {}
    options = {"lr": 1e-2, "clip_grad_norm": 0.5, "zero1": zero1, "sync": sync}
    program = make_program(schedule, 2, 4, sync=sync, copies=2, sharded=zero1, tied=tied)
    return make_plan(program, model=model, optimizer=options, node=node)


def as_threads(pool, plan, steps=3, rel=0.0, atol=0.0):
    """Compares losses, norms and weights of processes with those of threads, exactly or nearly."""
    found, workers = pool.run(train, plan, steps), run_threads(plan, steps)
    for losses, norms, *_ in found:
        assert losses == pytest.approx(losses_of(workers), rel=rel)
        assert norms == pytest.approx(norms_of(workers), rel=rel)
    expected, seen = freed.weights(workers) if plan.program.resident else parameters(workers), {}
    for name, value in (item for *_, weights in found for item in unpack([weights]).items()):
        assert torch.equal(seen.setdefault(name, value), value), name
        torch.testing.assert_close(value, expected[name].detach(), rtol=rel, atol=atol, msg=name)
    assert seen.keys() == expected.keys()
    return found, workers


def frozen(sharded):
    program = freezing.shared_out(make_program("zb-h1", 2, 4, copies=2, sharded=sharded), freezing.mixed)
    optimizer = {**freezing.ADAMW, "clip_grad_norm": 0.5, "zero1": sharded}
    return make_plan(program, optimizer=optimizer, seed=freezing.SEED)


OTHERS = {
    "frozen layers, a shared optimizer": (lambda: frozen(True), 0.0, 0.0),
    "weights that two pipes share out": (lambda: freed.plan_of("chimera", 2, 4, 1), 1e-6, 1e-4),
    "frozen layers": (lambda: frozen(False), 0.0, 0.0),
    "unequal numbers of microbatches": (lambda: unequal("zb-h1"), 1e-6, 1e-6),
    "such, and a shared optimizer": (lambda: unequal("zb-h1", zero1=True), 1e-6, 1e-6),
    "no flush": (lambda: flushless("1f1b", 4, 4, 1), 0.0, 0.0),
}


@pytest.mark.parametrize("name", few(OTHERS, 2))
def test_processes_of_other_plans_compute_what_threads_compute(pool, name):
    """Four ranks sum in a different order."""
    make, rel, atol = OTHERS[name]
    as_threads(pool, make(), rel=rel, atol=atol)


@pytest.mark.parametrize(
    ("schedule", "how"),
    few([("zb-v", {"zero1": True, "sync": "post-validate"}), ("zb-h1", {"tied": True}), ("1f1b", {"low": True})], 1),
)
def test_staged_transfers_change_no_bit(pool, schedule, how):
    """Staged as if ranks shared a GPU; on a CPU by a copy. Messages, sums, scatters and gathers."""
    plan = plan_of(schedule, **how)
    plain, staged = pool.run(train, plan, 3), pool.run(train, plan, 3, False, True)
    for one, other in zip(plain, staged, strict=True):
        assert one[:2] == other[:2]
        same(unpack([one[3]]), unpack([other[3]]))


def test_processes_average_as_threads_do(pool, tmp_path):
    plan = averaging.plan(tmp_path, {"share": 0.3})
    found, workers = pool.run(train, plan, 6), run_threads(plan, 6)
    for worker, one in zip(workers, found, strict=True):
        assert one[:2] == ([r.loss for r in worker.results], [r.grad_norm for r in worker.results])
    assert found[0][1] != found[2][1], "each replica has its own gradients"


WAYS = [("zb-v", {"zero1": True, "sync": "post-validate"}), ("zb-h1", {"tied": True})]
WAYS += [("chimera", {"zero1": True, "node": (1, 2)}), ("1f1b", {}), ("zb-v", {"zero1": True})]
WAYS += [("zb-v", {"zero1": True, "low": True}), ("zb-h1", {"tied": True, "zero1": True})]


@pytest.mark.long("zb-v-how0", "zb-h1-how1")
@pytest.mark.parametrize(("schedule", "how"), few(WAYS, 3))
def test_processes_compute_what_threads_compute(pool, schedule, how):
    """Sums of two terms have only one order; sums of a tied weight have four terms."""
    plan, rel = plan_of(schedule, **how), 1e-6 if how.get("tied") or schedule == "chimera" else 0.0
    found, workers = as_threads(pool, plan, rel=rel, atol=1e-4 if rel else 0.0)
    assert found[0][:2] == found[1][:2] == found[2][:2] == found[3][:2]
    assert losses_of(workers) == pytest.approx(reference(plan, 3).losses, abs=1e-2 if how.get("low") else 1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "resident", "dtype"),
    few(freed.CASES[1::3], [("breadth-first", 1, "float32"), ("zb-v", 1, "bfloat16")]),
)
def test_processes_whose_weights_come_and_go_compute_bit_by_bit(pool, schedule, resident, dtype):
    """Equal to threads whose weights stay, with collective and with one-sided exchange; shared memory is unlinked
    afterwards."""
    model = {**SMALL, "dtype": dtype}
    plan, threads = freed.plan_of(schedule, 2, 4, resident, model=model), freed.whole(schedule, 2, 4, dtype)
    expected = freed.weights(threads)
    for one, warmed in ((plan, False), (one_sided(plan), schedule == "zb-v")):
        found = pool.run(train, one, freed.STEPS, warmed)
        for losses, norms, _, _ in found:
            assert losses == losses_of(threads)
            assert norms == norms_of(threads)
        for name, value in unpack([packed for *_, packed in found]).items():
            assert torch.equal(value, expected[name]), name
    assert not [*Path("/dev/shm").glob("zbc-*")]


def trains_as_one(plan, out, ranks, tolerance):
    """Compares a run in processes, and the weights it leaves, with one process; returns what it shows and writes."""
    lines, expected = run_here(plan, ranks, out / "out", save_hf=out / "hf"), reference(StoredPlan.read(plan), 3)
    found, saved = metrics(out / "out"), written(out / "hf")
    assert [row["loss"] for row in found] == pytest.approx(expected.losses, abs=1e-6)
    assert [row["grad_norm"] for row in found] == pytest.approx(expected.norms, rel=1e-5)
    for theirs, ours in (("transformer.wte.weight", "embed.tokens.weight"), ("lm_head.weight", "head.logits.weight")):
        if ours in expected.weights:  # tied ones are there once
            torch.testing.assert_close(saved[theirs], expected.weights[ours], rtol=tolerance, atol=tolerance)
    return lines, found


@pytest.mark.long
def test_a_run_shows_the_loss_of_all_copies_and_writes_each_weight_once(tmp_path):
    plan = write_plan(tmp_path, parallel=TWO, optimizer={"zero1": True, "lr": 0.01}, model={**GPT, "ties": True})
    lines, found = trains_as_one(plan, tmp_path, 4, 1e-4)
    assert found[0]["tokens_per_s"] == pytest.approx(2 * 4 * 2 * 8 / found[0]["step_ms"] * 1e3)
    assert len(found[0]["busy_ms"]) == len(found[0]["peak_bytes"]) == 4
    assert lines[0].startswith("1f1b on 4 cpu ranks (2 pp x 2 dp), 4 microbatches of 2, 3 steps")
    assert " [dp " in lines[1]


def test_a_rank_that_dies_is_named_with_its_copy(tmp_path):
    plan = write_plan(tmp_path, parallel=TWO, train={"steps": 10**6})
    error = error_of(run_here, plan, 4, tmp_path / "out", each=killing(tmp_path / "out", {3: 3}))
    assert (error.code, error.message) == ("E702", "run: rank 3 [dp 1, pp 1] was killed by SIGKILL")


@pytest.mark.long
def test_a_batch_grows_while_four_processes_train(tmp_path):
    """Positions, rates and losses of one process, without a barrier."""
    ramp = [{"microbatches": 1, "steps": 1}, {"microbatches": 2, "samples": 9}]
    schedule = {"kind": "zb-h1", "microbatches": 3, "ramp": ramp}
    rate = {"lr": 1e-2, "schedule": {"kind": "cosine", "by": "samples"}}
    optimizer = {"sync": "post-validate", "clip_grad_norm": 0.5, **rate}
    together = {"parallel": {**TWO, "order": [0, 2, 1, 3]}}  # copies next to each other
    folder = write_plan(tmp_path, schedule=schedule, optimizer=optimizer, train={"steps": 5}, **together)
    assert "1, then 2, then 3 microbatches of 2" in run_here(folder, 4, tmp_path / "run")[0]
    expected, found = reference(StoredPlan.read(folder), 5), metrics(tmp_path / "run")
    assert [row["samples"] for row in found] == [4, 12, 20, 32, 44]
    assert [row["loss"] for row in found] == pytest.approx(expected.losses, abs=1e-6)
    assert [row["grad_norm"] for row in found] == pytest.approx(expected.norms, rel=1e-5)
    assert [row["lr"] for row in found] == [
        pytest.approx(5e-3 * (1 + math.cos(math.pi * row["samples"] / 44))) for row in found
    ]


RUNS = ["2 1", "1 2", "2 3"]  # ranks of each stage


@pytest.mark.long("1 2")
@pytest.mark.parametrize("replicas", few(RUNS, 2))
def test_processes_train_as_one_process(tmp_path, replicas):
    counts = [*map(int, replicas.split())]
    how = {"parallel": {"pp": sum(counts), "replicas": counts}, "model": {**GPT, "layers": 6}}
    how |= {"schedule": {"kind": "replicated-1f1b", "microbatches": 5, "microbatch_size": 2}}
    plan = write_plan(tmp_path, optimizer={"kind": "sgd", "lr": 0.1, "clip_grad_norm": 0.5}, **how)
    lines, _ = trains_as_one(plan, tmp_path, sum(counts), 1e-6)
    assert any("[stage " in line for line in lines)
