"""Steps without a flush with other features: equal to training without these, and to one process a step late."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.composed import TOLERANCE, apart, beside, settings, toml, trained
from tests.runtime.small_plans import hold, parameters, reference
from tests.runtime.test_checkpoints import at, tensors
from tests.runtime.test_flushless import SMALL, plan_of
from tests.threads import losses_of, run_threads
from tests.tiers import few
from zbc.compiler.compile import compile_job
from zbc.compiler.shapes import load_job
from zbc.ir import Kind
from zbc.ops import experts_of
from zbc.plan.directory import StoredPlan
from zbc.runtime.core.execute import run_step
from zbc.runtime.features.tensor_parallel import SharedLayers
from zbc.runtime.features.unflushed.versions import TwoVersions

KINDS = ["1f1b", "interleaved-1f1b", "gis"]
WITH = [["slices"], ["tp"], ["tp_sequence"], ["sharded optimizer"], ["slices", "tp", "sharded optimizer"]]
CASES = [(traits, kind) for traits in WITH for kind in KINDS]


@pytest.mark.parametrize(("traits", "kind"), few(CASES, [CASES[0], CASES[4], CASES[-1]]), ids=str)
def test_it_trains_as_without_what_must_not_change_it(traits, kind):
    both, plain = beside("two versions", *traits, schedule__kind=kind)
    both["parallel"]["pp"] = plain["parallel"]["pp"] = 2
    both["model"]["layers"] = plain["model"]["layers"] = 4
    assert apart(trained(both), trained(plain)) <= TOLERANCE


EXPERTS = {"family": "llama", "experts": 4, "top_k": 2, "ffn_hidden": 64}
OF_EXPERTS = [(2, 2, {}), (4, 2, {}), (4, 2, {"shard": "optimizer"}), (4, 4, {"tp": 2})]


def mixture(**parallel):
    tables = settings("two versions")
    tables["model"] |= {"layers": 4, **EXPERTS}
    tables["parallel"], tables["schedule"]["microbatches"] = {"pp": 2, **parallel}, 4
    return tables


@pytest.mark.parametrize(("dp", "ep", "more"), few(OF_EXPERTS, OF_EXPERTS[:1]), ids=str)
def test_experts_of_several_replicas_step_with_their_stage(dp, ep, more):
    found = trained(mixture(dp=dp, ep=ep, **more), steps=5)
    assert apart(found, trained(mixture(dp=dp), steps=5)) <= TOLERANCE


def test_experts_go_on_with_both_versions_and_on_other_ranks(tmp_path):
    tables = mixture(dp=2, ep=2)
    tables["checkpoint"] = {"every": 3, "keep": 9}
    plan = planned(tmp_path, tables)
    whole = losses_of(run_threads(plan, 6, folder=tmp_path / "a"))[3:]
    assert losses_of(run_threads(plan, 6, folder=tmp_path / "b", resume=at(tmp_path / "a", 3))) == whole
    (tmp_path / "other").mkdir()
    other = planned(tmp_path / "other", mixture(dp=2))
    rest = losses_of(run_threads(other, 6, folder=tmp_path / "c", resume=at(tmp_path / "a", 3)))
    assert rest == pytest.approx(whole, rel=1e-5)


def test_experts_skip_a_step_with_their_stage_on_all_ranks(tmp_path):
    plan = planned(tmp_path, mixture(dp=2, ep=2))

    def poisoned(worker):
        ending = worker.phase_run.ending
        plain = ending.handlers[Kind.STEP]

        def poison(one, op):
            if one.step == 1 and one.rank == 0 and op.stage == 0:  # of two ranks with experts of the first stage
                next(iter(one.optimizers[experts_of(0)].parameters.values())).grad.fill_(math.nan)
            plain(one, op)

        ending.handlers = {**ending.handlers, Kind.STEP: poison}
        return lambda one, number, *, stop=False: run_step(one, number, stop=stop)

    workers = run_threads(plan, 3, step=poisoned)
    taken = [
        {owner: {int(one["step"]) for one in optimizer.optimizer.state.values()} for owner, optimizer in kept.items()}
        for kept in (worker.optimizers for worker in workers)
    ]
    assert [set().union(*steps.values()) for steps in taken] == [{2}, {3}, {2}, {3}]


def planned(folder, tables):
    path = Path(folder) / "zbc.toml"
    path.write_text(toml(tables))
    compile_job(load_job(path), budget=0.0, suggest=False).write(Path(folder) / "plan")
    return StoredPlan.read(Path(folder) / "plan")


@pytest.mark.parametrize("parameters", ["float32", "bfloat16"])
def test_in_bfloat16_two_versions_have_the_bits_of_one_process_a_step_late(parameters):
    plan = plan_of("interleaved-1f1b", 2, 4, 2, model={**SMALL, "dtype": "bfloat16", "parameters": parameters})
    hold(run_threads(plan, 6), reference(plan, 6, delayed=True))


def test_a_cast_of_the_other_version_is_noticed(monkeypatch):
    plan = plan_of("1f1b", 3, 4, model={**SMALL, "dtype": "bfloat16"})
    monkeypatch.setattr("zbc.runtime.core.split.SplitLinear.exchange", lambda cast, low: None)
    wanted, found = reference(plan, 6, delayed=True).weights, parameters(run_threads(plan, 6))
    assert any(not p.detach().equal(wanted[name]) for name, p in found.items())


def test_a_growing_batch_drains_where_it_grows(tmp_path):
    losses = []
    for p in (1, 2):
        (tmp_path / f"{p}").mkdir()
        tables = settings("two versions")
        tables["parallel"]["pp"], tables["train"]["steps"] = p, 5
        tables["schedule"]["ramp"] = [{"microbatches": 4, "steps": 2}]
        losses.append(losses_of(run_threads(planned(tmp_path / f"{p}", tables), 5)))
    assert losses[0] == losses[1]


def test_a_run_in_shares_goes_on_with_the_same_bits(tmp_path):
    """The older weights, written in parts by ranks, are whole again on all ranks."""
    tables = settings("two versions", "sharded optimizer", "slices")
    tables["parallel"]["pp"], tables["checkpoint"] = 2, {"every": 3, "keep": 9}
    plan = planned(tmp_path, tables)
    whole = run_threads(plan, 6, folder=tmp_path / "a")
    rest = run_threads(plan, 6, folder=tmp_path / "b", resume=at(tmp_path / "a", 3))
    assert losses_of(rest) == losses_of(whole)[3:]
    kept = tensors(at(tmp_path / "a", 3))
    older = [name for name in kept if name.endswith(".older")]
    assert older
    assert all(
        kept[name].shape == kept["model." + name.removeprefix("optim.").removesuffix(".older")].shape for name in older
    )
    tables["parallel"] = {"pp": 4}
    tables["schedule"] |= {"slices": 1, "microbatches": 8}
    (tmp_path / "other").mkdir()
    other = run_threads(planned(tmp_path / "other", tables), 6, folder=tmp_path / "c", resume=at(tmp_path / "a", 3))
    assert losses_of(other) == pytest.approx(losses_of(whole)[3:], rel=1e-5)


def test_ranks_that_share_layers_skip_a_step_together(tmp_path):
    tables = settings("two versions", "tp")
    tables["parallel"]["pp"] = 2
    plan = planned(tmp_path, tables)

    def poisoned(worker):
        ending = worker.phase_run.ending
        plain = ending.handlers[Kind.STEP]

        def poison(one, op):
            if one.step == 1 and one.rank == 1:  # the second rank of the first stage
                cut = one.features.of(SharedLayers).cuts
                next(p for name, p in one.stages[0].parameters.items() if name in cut).grad.fill_(math.nan)
            plain(one, op)

        ending.handlers = {**ending.handlers, Kind.STEP: poison}
        return lambda one, number, *, stop=False: run_step(one, number, stop=stop)

    workers = run_threads(plan, 3, step=poisoned)
    states = [next(iter(worker.optimizers.values())).optimizer.state for worker in workers]
    assert [{int(one["step"]) for one in state.values()} for state in states] == [{2}, {2}, {3}, {3}]
    assert all(
        torch.isfinite(p).all() for worker in workers for p in worker.stages[worker.plan.rank].parameters.values()
    )


def test_both_versions_are_whole_after_every_step(tmp_path):
    """Replicas that step parts have equal weights, including the older version."""
    tables = settings("two versions", "sharded optimizer")
    tables["parallel"]["pp"] = 2
    workers = run_threads(planned(tmp_path, tables), 3)
    for one, other in pairwise(sorted(workers, key=lambda worker: worker.plan.rank)):
        if one.plan.rank == other.plan.rank:
            mine, theirs = one.optimizers[one.plan.rank], other.optimizers[one.plan.rank]
            assert isinstance(mine, TwoVersions)
            pairs = [*zip(mine._older + mine._newer, theirs._older + theirs._newer, strict=True)]
            assert all(torch.equal(a, b) for a, b in pairs)
