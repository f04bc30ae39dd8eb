"""Gradients reduce-scattered after each run of backwards (ZeRO-2): equal to a training without."""

import pytest
import torch

from tests.jobs import job
from tests.runtime.small_plans import GPT, make_plan, make_program, parameters
from tests.runtime.weighed import most_held
from tests.threads import run_threads, scaled
from tests.tiers import few
from zbc.compiler.check import check_all
from zbc.compiler.compile import compile_job
from zbc.compiler.memory.per_rank import peaks
from zbc.errors import ZbcError
from zbc.ir import Kind, Op
from zbc.plan.directory import StoredPlan

CLIP, FAST = {"clip_grad_norm": 0.5}, {"link_gbps": 1e5, "link_us": 0.0}
OPTIMIZER = {"lr": 1e-2, **CLIP, "zero1": True}
STEPS = 3


def plan_of(schedule, *, scatters, m=8, model=GPT, **how):
    program = make_program(schedule, 2, m, copies=2, sharded=True, scatters=scatters, **how)
    return make_plan(program, model=model, optimizer=OPTIMIZER)


def test_a_sum_stands_behind_each_run_of_backwards_but_the_last():
    program = make_program("interleaved-1f1b", 2, 4, copies=2, sharded=True, scatters=True)
    backwards = [str(op) for op in program.ranks[0] if op.kind.makes_part or op.kind in (Kind.SCATTER, Kind.REDUCE)]
    assert backwards == (
        ["BW s2 m0", "BW s2 m1", "SCATTER s2", "BW s0 m0", "BW s0 m1", "SCATTER s0"]
        + ["BW s2 m2", "BW s2 m3", "REDUCE s2", "BW s0 m2", "BW s0 m3", "REDUCE s0"]
    )
    whole = make_program("breadth-first", 2, 4, copies=2, sharded=True, scatters=True)
    assert not any(op.kind is Kind.SCATTER for _, _, op in whole), "one run of backwards for each stage"


def near(found, wanted, *, loss, norm):
    for one, other in zip(found, wanted, strict=True):
        assert [r.loss for r in one.results] == pytest.approx([r.loss for r in other.results], rel=loss)
        assert [r.grad_norm for r in one.results] == pytest.approx([r.grad_norm for r in other.results], rel=norm)


@pytest.mark.parametrize("schedule", few(["interleaved-1f1b", "zb-v", "breadth-first"], 1))
def test_losses_and_weights_are_those_of_whole_gradients(schedule):
    """Parts are summed in another order, so not bitwise."""
    whole, shared = (run_threads(plan_of(schedule, scatters=how), STEPS) for how in (False, True))
    assert any(op.kind is Kind.SCATTER for op in shared[0].plan.ops) == (schedule != "breadth-first")
    near(shared, whole, loss=1e-6, norm=1e-5)
    before = parameters(whole)
    for name, found in parameters(shared).items():
        torch.testing.assert_close(found, before[name], rtol=0, atol=2e-5, msg=name)


def trained(folder, schedule, shard, resident, exchange="collective", *, weighed=False, **model):
    """Four steps of a job on 2 x 2 ranks, 4 stages each; the predicted peaks of each rank, and the measured ones if
    requested."""
    more = {"memory": {"resident": resident}} if resident else {}
    how = {"model": {"hidden": 64, "heads": 4, "vocab": 64, "seq_len": 16, **model}, "data": {"kind": "synthetic"}}
    how |= {"schedule": {"kind": schedule, "chunks": 4, "microbatch_size": 2}, "optimizer": {"lr": 1e-3, **CLIP}}
    how |= {"parallel": {"dp": 2, "shard": shard, "exchange": exchange}, "hardware": FAST, **more}
    compiled = compile_job(job(layers=14, pp=2, m=4, **how))
    compiled.write(folder)
    plan = StoredPlan.read(folder)
    workers, scales = scaled(plan, 4) if weighed else (run_threads(plan, 4), [])
    found = [[scales[one] for one in plan.manifest.topology.ranks([rank]) if weighed] for rank in range(2)]
    return compiled, workers, list(zip(peaks(compiled.program, compiled.costs), found, strict=True))


@pytest.mark.parametrize("schedule", few(["interleaved-1f1b", "breadth-first"], 1))
@pytest.mark.parametrize("resident", few([1, 2], 1))
def test_weights_and_gradients_are_shared_out_together(schedule, resident, tmp_path):
    """ZeRO-3: equal to a training without. In a model this small messages take as much memory as is saved."""
    _, plain, _ = trained(tmp_path / "plain", schedule, "optimizer", None)
    _, _, weights = trained(tmp_path / "weights", schedule, "weights", resident)
    compiled, both, found = trained(tmp_path / "all", schedule, "all", resident, weighed=True)
    kinds = {op.kind for _, _, op in compiled.program}
    assert {Kind.FREE, Kind.GATHER} <= kinds and (Kind.SCATTER in kinds) == (schedule != "breadth-first")
    near(both, plain, loss=1e-5, norm=1e-4)
    for (predicted, scales), (before, _) in zip(found, weights, strict=True):
        assert predicted.gradients < 0.8 * before.gradients and predicted.weights == before.weights
        held = min((one.held.peak for one in scales), key=lambda peak: abs(peak - predicted.bytes))
        assert predicted.bytes == pytest.approx(held, rel=0.06)


@pytest.mark.parametrize("lowered", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "parameters": "bfloat16"}])
def test_gradients_of_narrow_weights_are_shared_out(lowered, tmp_path):
    """Gradients are float32, too; forward rounds, so another order of sums shows in the fourth digit."""
    _, plain, _ = trained(tmp_path / "plain", "interleaved-1f1b", "optimizer", None, **lowered)
    _, shared, _ = trained(tmp_path / "shared", "interleaved-1f1b", "gradients", None, **lowered)
    near(shared, plain, loss=1e-4, norm=1e-3)


def broken(change):
    program = make_program("interleaved-1f1b", 2, 4, copies=2, sharded=True, scatters=True)
    ops = list(program.ranks[0])
    change(ops)
    return program.with_ranks([ops, program.ranks[1]], by="broken")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda ops: ops.append(ops.pop(ops.index(Op(Kind.SCATTER, 2)))), "E206"),
        (lambda ops: ops.insert(1, Op(Kind.SCATTER, 1)), "E205"),
        (lambda ops: ops.insert(ops.index(Op(Kind.SCATTER, 2)), Op(Kind.SCATTER, 2)), "E202"),
    ],
)
def test_a_sum_out_of_place_is_refused(change, code):
    with pytest.raises(ZbcError, match=code):
        check_all(broken(change))


@pytest.mark.parametrize("asked", [{"copies": 2}, {"scatters": True}])
def test_no_plan_scatters_what_is_not_shared_out(asked):
    program = make_program("interleaved-1f1b", 2, 4, sharded=True, **asked)
    ops = [Op(Kind.SCATTER, 0), *program.ranks[0]]
    with pytest.raises(ZbcError, match=r"E202.*gradients are not shared out"):
        check_all(program.with_ranks([ops, program.ranks[1]], by="broken"))


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "breadth-first"])
def test_gradients_that_are_shared_out_take_less_and_as_much_as_predicted(schedule, tmp_path):
    ways = [trained(tmp_path / shard, schedule, shard, None, weighed=True)[2] for shard in ("optimizer", "gradients")]
    for (one, held_by_one), (two, held_by_two) in zip(*ways, strict=True):
        first, second = ([scale.held.peak for scale in scales] for scales in (held_by_one, held_by_two))
        assert two.gradients < 0.8 * one.gradients
        if schedule == "interleaved-1f1b":  # the other one is fullest before its first backward
            assert two.bytes < 0.97 * one.bytes and min(second) < min(first)
        assert two.bytes == pytest.approx(min(second, key=lambda peak: abs(peak - two.bytes)), rel=0.03)


def of_two_pipes(folder, kind, shard):
    """A job whose stages are on two ranks each, in two replicas, with costs that let the two close runs in turns."""
    how = {"model": {"hidden": 64, "heads": 4, "vocab": 256, "seq_len": 64}, "data": {"kind": "synthetic"}}
    how |= {"schedule": {"kind": kind, "microbatch_size": 2}, "memory": {"activations": "selective"}}
    compiled = compile_job(job(layers=4, pp=2, m=4, parallel={"dp": 2, "shard": shard}, **how))
    compiled.write(folder)
    return compiled, StoredPlan.read(folder)


@pytest.mark.parametrize("kind", few(["chimera-zb", "bitpipe-zb"], 1))
def test_ranks_of_two_pipes_meet_in_one_order(kind, tmp_path):
    compiled, plan = of_two_pipes(tmp_path / "some", kind, "gradients")
    first, second = ([op for op in ops if op.kind in (Kind.SCATTER, Kind.REDUCE)] for ops in compiled.program.ranks)
    assert first == second and any(op.kind is Kind.SCATTER for op in first)
    _, plain = of_two_pipes(tmp_path / "none", kind, "none")
    near(run_threads(plan, STEPS), run_threads(plain, STEPS), loss=1e-5, norm=1e-4)


def test_parts_of_gradients_that_each_pipe_shares_out_for_itself_are_predicted(tmp_path):
    """Weights that ranks free are gathered in one pipe, so that a rank has parts of two holders, not of four."""
    compiled, plan = of_two_pipes(tmp_path, "chimera", "all")
    predicted = [rank.bytes for rank in peaks(compiled.program, compiled.costs)]
    assert most_held(plan, predicted, rel=0.02)[1] == pytest.approx(predicted, rel=0.02)
