"""Two pipes in opposite directions, between processes."""

import pytest
import torch

from tests.processes.gloo_ranks import digests, train, unpack, without_step
from tests.processes.plans import metrics, run_here, write_plan
from tests.runtime.small_plans import GPT, make_plan, make_program, reference
from tests.runtime.test_freed_weights import plan_of
from tests.threads import run_threads
from tests.tiers import few

TWO = ["chimera", "bitpipe", "dualpipe", "chimera-zb", "bitpipe-zb"]  # on four ranks: test_gloo.py
SMALL = {**GPT, "hidden": 16}
pytestmark = pytest.mark.usefixtures("one_thread_per_kernel")


@pytest.mark.parametrize("name", few(TWO, ("dualpipe", "bitpipe-zb")))
def test_gradients_on_two_ranks_are_those_of_one_process(pair, name):
    plan = make_plan(make_program(name, 2, 5), keep=without_step)
    expected, found = reference(plan), pair.run(train, plan, 1)
    assert [losses for losses, *_ in found] == [expected.losses] * 2
    for rank in found:
        for key, grad in unpack([rank[2]]).items():
            torch.testing.assert_close(grad, expected.grads[key], rtol=1e-6, atol=1e-6, msg=key)


@pytest.mark.repeats
@pytest.mark.parametrize("name", ["chimera", "bitpipe-zb"])
def test_copies_have_the_same_bits_after_each_of_fifty_clipped_steps(pool, name):
    plan = make_plan(make_program(name, 4, 4), model=SMALL, optimizer={"lr": 1e-2, "clip_grad_norm": 0.05}, size=1)
    found = pool.run(digests, plan, 50)
    assert all(norm > 0.05 for _, norms in found for norm in norms[:5]), "clipping was at work"
    for step in range(50):
        seen = {}
        for stages, _ in found:
            for s, digest in stages[step].items():
                seen.setdefault(s, []).append(digest)
        assert all(len(copies) == 2 and len(set(copies)) == 1 for copies in seen.values()), f"step {step}"
    assert found[0][0][0] != found[0][0][49], "and they do change"


@pytest.mark.repeats
@pytest.mark.parametrize("name", ["bitpipe-zb"])
def test_a_run_has_the_losses_norms_and_learning_rates_of_the_run_with_one_pipe(tmp_path, name):
    """As written in metrics.jsonl; sums are in another order, so losses are equal to 1e-6."""
    optimizer = {"lr": 1e-2, "clip_grad_norm": 0.5, "schedule": {"kind": "cosine", "warmup_steps": 3, "min_lr": 1e-3}}
    found = {}
    for kind in ("1f1b", name):
        schedule = {"kind": kind, "microbatches": 5}
        plan = write_plan(
            tmp_path, kind, parallel={"pp": 2}, schedule=schedule, optimizer=optimizer, train={"steps": 20}
        )
        run_here(plan, 2, tmp_path / f"run-{kind}")
        found[kind] = metrics(tmp_path / f"run-{kind}")
    one, two = found["1f1b"], found[name]
    assert [row["lr"] for row in two] == [row["lr"] for row in one] and len({row["lr"] for row in one}) == 20
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], abs=1e-6)
    assert [row["grad_norm"] for row in two] == pytest.approx([row["grad_norm"] for row in one], rel=1e-4)


def test_replicas_of_a_holder_share_out_its_weights_as_threads_do(pool):
    plan = plan_of("chimera", 2, 4, 1)
    found, workers = pool.run(train, plan, 3), run_threads(plan, 3)
    for worker, one in zip(workers, found, strict=True):
        for told, key in zip(one[:2], ("loss", "grad_norm"), strict=True):  # four ranks sum in another order
            assert told == pytest.approx([getattr(result, key) for result in worker.results], rel=1e-6)
