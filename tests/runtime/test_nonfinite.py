"""Agreement of ranks: exact sums, one norm, a correct verdict, steps skipped by all; scales of float16 as torch's."""

import math
from itertools import pairwise

import pytest
import torch

from tests.composed import beside, trained
from tests.jobs import job
from tests.refusals import refused
from tests.runtime.small_plans import GPT, LLAMA, make_plan, make_program, parameters, reference
from tests.runtime.test_added import plan_of as added_plan
from tests.threads import last_of, losses_of, run_threads, watch
from tests.tiers import few
from zbc.compiler.compile import compile_job
from zbc.errors import ZbcError
from zbc.ir import Kind
from zbc.runtime.core import validate
from zbc.runtime.core.progress import StepResult
from zbc.runtime.core.validate import CHUNK, VectorLayout, squares_of
from zbc.training.guest import Skips, origin
from zbc.training.recording.measure import Ledger

PARAMETER = "up.weight"
WAYS = {
    "barrier": ("zb-h1", {}),
    "post-validate": ("zb-v", {"sync": "post-validate"}),
    "two copies": ("1f1b", {"copies": 2}),
    "two copies, zero1": ("1f1b", {"copies": 2, "sharded": True}),
    "weights come and go": ("breadth-first", {"copies": 2, "sharded": True, "resident": 1}),
}


def plan_for(way="barrier", **train):
    schedule, how = WAYS[way]
    return make_plan(make_program(schedule, 2, 4, **how), optimizer={"clip_grad_norm": 1e6}, train=train)


def poisoned(steps, layer="layers.3"):
    """Makes one gradient of that layer NaN in these steps, on the last copy of its stage alone."""

    def setup(worker):
        manifest = worker.plan.manifest
        (stage,) = [s for s, names in enumerate(manifest.layers) if layer in names]
        if stage not in worker.stages or worker.rank < manifest.topology.world - manifest.ranks:
            return
        parameter = worker.stages[stage].parameters[f"{layer}.{PARAMETER}"]
        last = worker.script[last_of(worker, Kind.W, Kind.BW, stage=stage)][1]

        def spoil(worker, op):
            if worker.step in steps:
                parameter.grad[0] = math.nan

        watch(worker, after=spoil, of=lambda op: op == last)

    return setup


def ends(plan, steps, setup):
    """The error that ends a run of `steps` steps, and the steps of each rank."""
    seen = {}

    def remember(worker):
        setup(worker)
        seen[worker.rank] = worker.results

    with pytest.raises(ZbcError) as raised:
        run_threads(plan, steps, setup=remember)
    assert raised.value.code == "E704" and raised.value.exit_code == 7
    return raised.value, {rank: [(r.step, r.skipped) for r in results] for rank, results in seen.items()}


@pytest.mark.parametrize("way", few(WAYS, ("barrier", "two copies, zero1")))
def test_stop_ends_the_run_at_the_first_such_step_and_names_it_and_its_stage(way):
    error, seen = ends(plan_for(way, skip_limit=1), 4, poisoned({1}))
    assert error.message == "run: step 2 has gradients that are not finite"
    assert "every loss is finite, so it happened in backward" in error.details
    stage = next(s for s, names in enumerate(plan_for(way).manifest.layers) if "layers.3" in names)
    assert f"backward met it first in stage {stage}: layers.3.{PARAMETER}" in error.details
    assert max(seen.values(), key=len) == [(0, False), (1, True)], "the run went on"


@pytest.mark.long
@pytest.mark.parametrize("way", few(["barrier", "post-validate"], ("barrier",)))
def test_skip_ends_the_run_when_too_many_follow_each_other(way):
    plan = plan_for(way, skip_limit=3)
    workers = run_threads(plan, 6, setup=poisoned({0, 1, 3, 4}))
    assert [r.skipped for r in workers[0].results] == [True, True, False, True, True, False]
    error, seen = ends(plan, 6, poisoned({0, 2, 3, 4}))
    assert error.message == "run: step 5 has gradients that are not finite, the 3rd in a row"
    assert max(seen.values(), key=len) == [(step, step != 1) for step in range(5)]


def test_a_loss_that_is_not_finite_is_told_from_a_gradient_that_is_not():
    def setup(worker):
        loss = worker.loss
        seen = iter(range(100))
        worker.loss = lambda y, target: loss(y, target) * (math.nan if next(seen) in (5, 6) else 1.0)

    error, _ = ends(plan_for(skip_limit=1), 3, setup)
    assert error.details[0] == "the loss is not finite for microbatches 1, 2, so it happened in forward"
    assert "in stage 1: head" in error.details[1] or "in stage 1: logits" in error.details[1]


def test_the_origin_is_the_last_layer_of_the_model_and_ten_comes_behind_nine():
    layers = [["embed", "layers.1"], ["layers.9", "layers.10"], ["head"]]
    names = ["embed.tokens.weight", "layers.1.a", "layers.10.b", "layers.9.a", "layers.10.a"]
    assert origin(layers, sorted(names)) == (1, ["layers.10.a", "layers.10.b"])
    assert origin(layers, ["layers.1.a"]) == (0, ["layers.1.a"])
    assert origin(layers, []) is None


LAYOUT, CPU = VectorLayout(("a", "b", "c"), microbatches=2, ranks=2), torch.device("cpu")


@pytest.fixture(params=["number by number", "as on a device"])
def filled(request, monkeypatch):
    """Both ways to fill a vector."""
    if request.param == "as on a device":
        monkeypatch.setattr(validate, "_written", validate._copied)


def summed(*ranks):
    """The verdict on the numbers that ranks fill in."""
    vector = torch.zeros(LAYOUT.size, dtype=torch.float64)
    for rank, (squares, losses, stop) in enumerate(ranks):
        scalars = {k: torch.tensor(v) for k, v in squares.items()}
        fp32 = {k: torch.tensor(v) for k, v in losses.items()}
        vector += LAYOUT.vector(scalars, fp32, rank=rank, stop=stop, busy=1.5 + rank, peak=10**12 + rank, device=CPU)
    return LAYOUT.read(vector)


@pytest.mark.usefixtures("filled")
def test_each_rank_fills_its_own_entries():
    verdict = summed(({"c": 4.0}, {}, False), ({"a": 5.0}, {1: 2.0, 0: 3.0}, True))
    assert verdict == StepResult(2.5, 3.0, True, (1.5, 2.5), (10**12, 10**12 + 1))
    assert not verdict.skipped
    assert not summed(({}, {}, False), ({}, {}, False)).stop


@pytest.mark.usefixtures("filled")
def test_a_loss_that_is_not_finite_is_reported_as_it_is():
    found = summed(({}, {0: math.inf}, False), ({}, {1: -math.inf}, False))
    assert math.isnan(found.loss) and found.bad_losses == (0, 1)


def test_clipping_follows_torch():
    verdict, parameter = StepResult(0.0, 4.0, False, (), ()), torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 2.0)
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    torch.testing.assert_close(parameter.grad, torch.full((4,), 2.0) * verdict.clip(1.0))
    assert verdict.clip(5.0) is None and verdict.clip(None) is None
    assert summed(({"c": math.inf}, {}, False), ({"a": 5.0}, {}, False)).clip(1.0) is None


@pytest.mark.parametrize("way", ["_one_by_one", "_together"])
def test_sums_of_squares_are_exact_where_float32_is_not(monkeypatch, way):
    monkeypatch.setattr(validate, "_one_by_one", getattr(validate, way))  # that of a GPU, too
    grad = torch.full((5, 2**21), 0.1)
    value = float(torch.tensor(0.1)) ** 2
    grads = {"a": grad, "none": torch.zeros(0, 3), "far": torch.tensor([1e30]), "two": torch.tensor([3 + 4j, 1j])}
    with Ledger() as ledger:
        found = squares_of({**grads, "low": torch.tensor([0.5, 0.5], dtype=torch.bfloat16)})
    assert len(found["a"]) == -(-grad.numel() // CHUNK) and {one.dtype for one in found.values()} == {torch.float64}
    assert found["a"].sum().item() == pytest.approx(grad.numel() * value, rel=1e-10)
    assert found["none"].tolist() == [0.0]
    assert found["far"].item() == pytest.approx(1e60)
    assert found["two"].tolist() == pytest.approx([26.0]) and found["low"].tolist() == pytest.approx([0.5])
    assert squares_of({}) == {} and ledger.peak <= 8 * CHUNK + 1000, "one chunk in float64 at a time"


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(("apart", "found"), [(1, 5.0), (2, 2.5)])
def test_what_layers_add_is_of_a_step_or_the_mean_of_replicas_that_average(apart, found):
    layout = VectorLayout(("a",), 4, 2, apart=apart)
    both = torch.zeros(layout.size, dtype=torch.float64)
    for rank, added in enumerate((2.0, 3.0)):
        losses = {2 * rank: 1.0, layout.microbatches: torch.tensor(added)}
        both += layout.vector({}, losses, rank=rank, stop=False, busy=0.0, peak=0, device=CPU)
    verdict = layout.read(both)
    assert (verdict.added, verdict.loss, verdict.stop) == (found, 0.5, False)


@pytest.mark.usefixtures("filled")
def test_every_chunk_of_a_parameter_has_an_entry_of_its_own():
    layout = VectorLayout(("a", "b"), 2, 1, sizes=(2 * CHUNK + 1, 3))
    assert layout.size == 3 + 1 + 2 + 1 + 1 + 2
    both = torch.zeros(layout.size, dtype=torch.float64)
    for part in (torch.tensor([1.0, 0.0, 4.0]), torch.tensor([0.0, 4.0, 0.0])):  # two ranks that share out `a`
        squares = {"a": part.double(), "b": torch.tensor([8.0]).double()}
        both += layout.vector(squares, {}, rank=0, stop=False, busy=0.0, peak=0, device=CPU)
    assert layout.read(both).grad_norm == (1 + 4 + 4 + 16) ** 0.5


HALF = {**GPT, "dtype": "float16", "loss_scale": (65536.0, 2)}
LOUD = {**HALF, "loss": "tests.runtime.losses:loud"}
ADAMW = {"lr": 1e-2, "clip_grad_norm": 0.5}
SGD = {"kind": "sgd", "lr": 0.1, "clip_grad_norm": 0.5}
STEPS = 8


def plan_of(schedule="1f1b", p=2, m=4, *, model=LOUD, how=None, **options):
    program = make_program(schedule, p, m, **(how or {}))
    return make_plan(program, model=model, **{"optimizer": ADAMW, "size": 1, **options})


def check(plan, steps=STEPS, tolerance=0.0):
    workers, wanted = run_threads(plan, steps), reference(plan, steps)
    for worker in workers:
        assert [one.scale for one in worker.results] == wanted.scales
        skips = [low < high for high, low in pairwise(wanted.scales)]
        assert [one.skipped for one in worker.results][:-1] == skips
    assert losses_of(workers) == pytest.approx(wanted.losses, rel=tolerance, abs=0.0)
    finite = [at for at, norm in enumerate(wanted.norms) if norm < float("inf")]
    norms = [workers[0].results[at].grad_norm for at in finite]
    assert norms == pytest.approx([wanted.norms[at] for at in finite], rel=tolerance or 1e-12)
    for name, parameter in parameters(workers).items():
        expected = wanted.weights[name]
        torch.testing.assert_close(parameter.detach(), expected, rtol=tolerance, atol=tolerance, msg=name)
    return wanted


SCALED = [
    (schedule, p, kept) for schedule in ("1f1b", "zb-h1", "zb-v") for p in (1, 2) for kept in ("keep", "recompute")
]


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "p", "kept"), few(SCALED, lambda way: way in (SCALED[2], SCALED[5], SCALED[10])))
def test_training_is_that_of_one_process_with_a_grad_scaler_bit_by_bit(schedule, p, kept):
    """The first steps overflow; two in a row that do not double the scale."""
    scales = check(plan_of(schedule, p, activations=kept)).scales
    assert scales[0] == 65536.0 and min(scales) < 65536.0
    assert any(low < high for low, high in pairwise(scales)), "it grows"


@pytest.mark.parametrize("model", [HALF, {**LLAMA, "dtype": "float16"}])
def test_a_training_without_overflows_is_that_of_one_process(model):
    assert min(check(plan_of("zb-h1", model=model), 4).scales) == 65536.0


@pytest.mark.long
@pytest.mark.parametrize(("how", "optimizer"), [({}, {}), ({"sharded": True}, {"zero1": True})])
def test_an_overflow_on_one_replica_skips_the_step_on_all(how, optimizer):
    check(plan_of("1f1b", 2, 2, how={"copies": 2, **how}, optimizer={**SGD, **optimizer}), tolerance=1e-4)


FEATURES = ["sharded weights", "slices", "copies", "sharded all", "offload", "cp", "tp_sequence", "tp", "freeze"]
FEATURES += ["overlap", "replicas", "ramp", "tied embeddings", "fused gradients", "loss by chunks", "shared vocabulary"]


@pytest.mark.parametrize("trait", few(FEATURES, 0))
def test_steps_that_overflow_are_the_same_with_other_features(trait):
    parts = trait in ("slices", "cp")  # products over fewer tokens overflow later
    how = {"model__dtype": "float16", "model__loss_scale": [2.0**10, 3] if parts else [2.0**21, 1]}
    found, wanted = (trained(tables, steps=4) for tables in beside(trait, optimizer__kind="sgd", **how))
    finite = [norm < float("inf") for _, norm in wanted]
    assert [norm < float("inf") for _, norm in found] == finite and set(finite) == ({True} if parts else {True, False})
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in wanted], rel=3e-3)


@pytest.mark.parametrize("how", ["add", "scaled"])
def test_losses_that_layers_add_are_scaled_and_told_as_they_are(how):
    """Layers in double precision, which autocast leaves alone: all is as without a scale, to the bit."""

    def trained(**changes):
        plan = added_plan(("zb-h1", 2, 1, "before-step"), how, clip=0.1, model=changes)
        workers = run_threads(plan, 3)
        told = [(one.loss, one.added, one.grad_norm, one.scale) for one in workers[0].results]
        return told, {name: p.detach() for name, p in parameters(workers).items()}

    (told, weights), (plain, wanted) = trained(dtype="float16"), trained()
    assert [one[3] for one in told] == [65536.0] * 3 and [one[:3] for one in told] == [one[:3] for one in plain]
    assert all(torch.equal(weights[name], value) for name, value in wanted.items()) and (how != "add" or told[0][1] > 0)


@pytest.mark.long
def test_a_plan_counts_with_the_times_and_bytes_of_bfloat16():
    jobs = (job(model={"dtype": dtype}, parallel={"dp": 2, "shard": "weights"}) for dtype in ("float16", "bfloat16"))
    one, other = (compile_job(found).assemble()[0] for found in jobs)
    assert one.predicted == other.predicted and one.id != other.id


def test_overflows_that_a_lower_scale_mends_are_no_skipped_steps_that_end_a_run():
    skips = Skips(plan_of(train={"skip_limit": 2}).manifest)
    result = StepResult(1.0, float("inf"), False, (), (), skipped=True, scale=65536.0)
    for _ in range(5):
        skips.told(result)
    with refused("E704", match="the 2nd in a row"):
        for one in (StepResult(1.0, float("inf"), False, (), (), skipped=True), result):
            skips.told(one)
            skips.told(StepResult(float("nan"), float("inf"), False, (), (), skipped=True, scale=8.0, bad_losses=(1,)))
