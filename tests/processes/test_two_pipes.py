"""Two pipes in opposite directions, between processes."""

import pytest
import torch

from tests.processes.gloo_ranks import digests, train, unpack, without_step
from tests.runtime.small_plans import GPT, make_plan, make_program, reference
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
