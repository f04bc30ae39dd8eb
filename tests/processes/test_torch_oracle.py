"""torch's own runtime computes the same losses and gradients with the same order from an exported CSV."""

import pytest
import torch

from tests.lowered import lower
from tests.processes import gloo_ranks, torch_peer
from tests.runtime.small_plans import make_plan, make_program
from tests.tiers import few
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.errors import ZbcError
from zbc.interop import torch_csv, torch_lowered
from zbc.training.building.context import Settings
from zbc.training.data.data import Batches, build_samples
from zbc.training.models import model

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
UNORDERED = ("braid-v",)  # a W runs after W of later microbatches, and torch sums gradients of norms in W, zbc in B
M = 8  # torch scales gradients by 1/8 at the end, ours from the start, which is the same bits


@pytest.mark.long("1f1b")
@pytest.mark.parametrize("ranks", few([2, 4], (2,)))
@pytest.mark.parametrize("schedule", few(SCHEDULES))
def test_torch_runs_every_order_it_can_express_to_the_same_bits(request, schedule, ranks):
    if SCHEDULES[schedule].placement_name in ("V", "waves") and TORCH < (2, 13):
        pytest.skip("torch 2.11 hangs in its own transfers of such orders")
    program = make_program(schedule, ranks, M)
    try:
        torch_csv.dumps(program)
    except ZbcError as error:
        assert error.code == "E413"
        pytest.skip(error.details[0])
    pool = request.getfixturevalue("pool" if ranks == 4 else "pair")
    agrees(pool, program, exactly=schedule not in UNORDERED)


@pytest.mark.long
@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11 hangs in its own transfers of such orders")
def test_torch_runs_groups_of_two_to_the_same_bits(pool):
    program = lower(SCHEDULES["dualpipe-v"].make(Request(4, M, 2, overlap=True)))
    assert "OVERLAP_F_B" in torch_csv.dumps(program)
    agrees(pool, program)


@pytest.mark.always("gis")
@pytest.mark.long("zb-h1")
@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11 hangs in its own transfers of such orders")
@pytest.mark.parametrize("schedule", few(SCHEDULES, ("1f1b", "zb-h1")))
def test_torch_runs_our_transfers_too_to_the_same_bits(pool, tmp_path, schedule):
    """In the dialect compute_comms, which torch runs unchanged; dualpipe-v in groups of two."""
    overlap = schedule == "dualpipe-v"
    try:
        program = lower(SCHEDULES[schedule].make(Request(4, M, SCHEDULES[schedule].default_chunks, overlap=overlap)))
        text = torch_lowered.dumps(program, "compute_comms" if TORCH < (2, 15) else "compute_comms-2.15")
    except ZbcError as error:
        assert error.code == "E413"
        pytest.skip(error.details[0])
    assert (overlap or SCHEDULES[schedule].grouped) == ("OVERLAP_F_B" in text)
    (tmp_path / "order.csv").write_text(text)
    agrees(pool, program, str(tmp_path / "order.csv"), exactly=schedule not in UNORDERED)


def agrees(pool, program, path=None, *, exactly=True):
    """Asserts that both runtimes agree on one step: torch by `zbc.torch_schedule`, or with this lowered form."""
    plan = make_plan(program, keep=gloo_ranks.without_step)
    theirs = pool.run(torch_peer.train, plan, path)
    ours = pool.run(gloo_ranks.train, plan, 1)
    (losses,) = [losses for losses, _ in theirs if losses]
    assert sum(losses) / M == ours[0][0][0]
    expected = gloo_ranks.unpack([grads for _, grads in theirs])
    found = gloo_ranks.unpack([grads for _, _, grads, _ in ours])
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        if exactly:
            assert torch.equal(found[name], grad), name
        else:
            torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11 hangs in its own transfers of such orders")
@pytest.mark.parametrize("schedule", few(["1f1b", "zb-h1", "zb-v", "looped-zb"], ("zb-v",)))
def test_stages_in_fsdp2_get_the_gradients_of_one_process_with_b_and_w_apart(pool, schedule):
    """Two replicas of two ranks, with the weights of each stage sharded."""
    program = make_program(schedule, 2, 4)
    plan = make_plan(program, keep=gloo_ranks.without_step)
    found = gloo_ranks.unpack(pool.run(torch_peer.sharded, plan))
    settings = Settings.of(plan.manifest)
    layers = {one.name: one.build(settings.train.seed) for one in model.layers(settings.model, settings.train.seed)}
    samples = build_samples(settings.data, settings.model, settings.train.seed)
    batches = Batches(samples, seed=settings.train.seed, microbatches=8, size=plan.manifest.microbatch_size)
    for mb in range(8):
        x = batches.inputs(0, mb)
        for layer in layers.values():
            x = layer(x)
        (model.loss(settings.model.loss)(x, batches.targets(0, mb)) / 8).backward()
    expected = {f"{n}.{local}": p.grad for n, layer in layers.items() for local, p in layer.named_parameters()}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] - grad).norm() <= 5e-7 * grad.norm(), name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stages": {0: (0, 2), 1: (1, 3)}}, ["E413 rank 0 has stages 0 and 3, it was given 0 and 2", "rank 1 has"]),
        ({"total": 8}, ["E413 the plan has 4 stages, theirs is 8 (num_stages)"] * 2),
        ({"ddp": True}, ["stage 0 and 3 is in DistributedDataParallel", "stage 1 and 2 is in Distributed"]),
    ],
)
def test_torch_schedule_refuses_stages_that_would_hang_or_learn_wrongly(pair, changes, said):
    found = pair.run(torch_peer.refused, make_plan(make_program("zb-v", 2, 4)), changes)
    assert all(words in text for words, text in zip(said, found, strict=True)), found


def test_torch_schedule_takes_ddp_where_the_backward_is_in_one(pair):
    assert pair.run(torch_peer.refused, make_plan(make_program("1f1b", 2, 4)), {"ddp": True}) == ["", ""]


def test_torch_schedule_refuses_groups_of_another_size_and_two_pipes(pair):
    (text, _) = pair.run(torch_peer.refused, make_plan(make_program("1f1b", 4, 4)), {"stages": {0: (0,), 1: (1,)}})
    assert "the plan is for 4 ranks, the stages are in a group of 2" in text
    found = pair.run(torch_peer.refused, make_plan(make_program("chimera", 2, 4)), {"stages": {0: (0,), 1: (1,)}})
    assert all(text.startswith("E413 it has one pipe, the plan has 2") for text in found), found
