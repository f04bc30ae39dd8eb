"""Torch's own runtime, told by an exported CSV to run the same order, finds the same losses and gradients."""

from __future__ import annotations

import pytest
import torch

from tests.lowered import lower
from tests.processes import gloo_ranks, torch_peer
from tests.runtime.small_plans import make_plan, make_program
from tests.tiers import few
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.errors import ZbcError
from zbc.interop import torch_csv, torch_lowered

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
M = 8  # torch scales gradients by 1/8 at the end, ours from the start, which is the same bits


@pytest.mark.parametrize("ranks", few([2, 4], (2,)))
@pytest.mark.parametrize("schedule", few(SCHEDULES))
def test_torch_runs_every_order_it_can_express_to_the_same_bits(request, tmp_path, schedule, ranks):
    if SCHEDULES[schedule].placement_name in ("V", "waves") and TORCH < (2, 13):
        pytest.skip("torch 2.11 hangs in its own transfers of such orders")
    program = make_program(schedule, ranks, M)
    try:
        text = torch_csv.dumps(program)
    except ZbcError as error:
        assert error.code == "E413"
        pytest.skip(error.details[0])
    pool = request.getfixturevalue("pool" if ranks == 4 else "pair")
    agrees(pool, tmp_path, program, text)


@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11 hangs in its own transfers of such orders")
def test_torch_runs_groups_of_two_to_the_same_bits(pool, tmp_path):
    program = lower(SCHEDULES["dualpipe-v"].make(Request(4, M, 2, overlap=True)))
    text = torch_csv.dumps(program)
    assert "OVERLAP_F_B" in text
    agrees(pool, tmp_path, program, text)


@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11 hangs in its own transfers of such orders")
@pytest.mark.parametrize("schedule", few(SCHEDULES, ("1f1b", "zb-h1")))
def test_torch_runs_our_transfers_too_to_the_same_bits(pool, tmp_path, schedule):
    """In the dialect compute_comms, which torch takes as it is; dualpipe-v in groups of two."""
    overlap = schedule == "dualpipe-v"
    try:
        program = lower(SCHEDULES[schedule].make(Request(4, M, SCHEDULES[schedule].default_chunks, overlap=overlap)))
        text = torch_lowered.dumps(program, "compute_comms" if TORCH < (2, 15) else "compute_comms-2.15")
    except ZbcError as error:
        assert error.code == "E413"
        pytest.skip(error.details[0])
    assert overlap == ("OVERLAP_F_B" in text)
    agrees(pool, tmp_path, program, text, "compute_comms")


def agrees(pool, folder, program, text, form="compute_only"):
    """Both runtimes train one step with the order."""
    path = folder / "order.csv"
    path.write_text(text)
    plan = make_plan(program, keep=gloo_ranks.without_step)
    theirs = pool.run(torch_peer.train, plan, str(path), form)
    ours = pool.run(gloo_ranks.train, plan, 1)
    (losses,) = [losses for losses, _ in theirs if losses]
    assert sum(losses) / M == ours[0][0][0]
    expected = gloo_ranks.unpack([grads for _, grads in theirs])
    found = gloo_ranks.unpack([grads for _, _, grads, _ in ours])
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name
