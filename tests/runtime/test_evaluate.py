"""Evaluation: the right number for every partition, from a proven program, without a change of the training."""

import math
from itertools import product

import pytest
import torch

from tests.refusals import refused
from tests.runtime import one_by_one
from tests.runtime.small_plans import GPT, LLAMA, make_plan, make_program, parameters
from tests.threads import each_layer, run_threads
from tests.tiers import few
from zbc.compiler import check
from zbc.compiler.check import check_forward
from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Placement, forward
from zbc.plan.forward import SHARED, forward_only
from zbc.runtime.seeding import seed_of
from zbc.training.building.context import Settings
from zbc.training.data.data import Batches, build_validation
from zbc.training.models import model

# ---- the program -----------------------------------------------------------------------------------------------

PLACEMENTS = [Placement.linear, lambda p: Placement.looped(p, 3), Placement.vshape]
PLACEMENTS.append(lambda p: Placement.bidirectional(tuple(range(p))))


@pytest.mark.parametrize("make", PLACEMENTS)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_every_placement_has_a_forward_program_that_is_proven(make, p):
    placement = make(p)
    for m, slices in ((1, 1), (2, 2), (5, 1), (8, 1)):
        units = list(product(range(placement.stages), range(m), (0,), range(slices)))
        for shared in (False, True)[: 3 - len(placement.pipes)]:
            program = forward_only(placement, m, slices, shared=shared)
            check_forward(program)
            made = [(rank, op) for rank, _, op in program if op.kind.is_forward]
            assert sorted(op for _, op in made) == [forward(*unit) for unit in units]
            assert all(placement.rank_of(op.stage) == rank for rank, op in made)
            words = sorted(Op(kind, 0, mb, 0, part) for kind in SHARED for _, mb, _, part in units[: m * slices])
            for ops in program.ranks if shared else ():
                assert sorted(op for op in ops if op.kind.unit_wide) == words


V, WORDS = forward_only(Placement.vshape(2), 2), forward_only(Placement.linear(2), 2, shared=True)


@pytest.mark.parametrize(
    ("program", "rank", "change", "code"),
    [
        (V, 0, lambda ops: [op for op in ops if op.kind is not Kind.SEND_F], "E203"),
        (V, 1, lambda ops: [op for op in ops if op != Op(Kind.RECV_F, 1, 1)], "E203"),
        (V, 0, lambda ops: [op for op in ops if op.stage == 3] + [op for op in ops if op.stage == 0], "E201"),
        (WORDS, 0, lambda ops: [op._replace(mb=1 - op.mb) if op.kind is Kind.SPREAD else op for op in ops], "E201"),
    ],
)
def test_a_wrong_forward_program_is_refused(monkeypatch, program, rank, change, code):
    ranks = [list(ops) for ops in program.ranks]
    ranks[rank] = change(ranks[rank])
    monkeypatch.setattr(check, "forward_of", lambda _: program.with_ranks(ranks, by="broken"))
    with pytest.raises(ZbcError) as caught:
        check_forward(program)
    assert caught.value.errors[0].code == code


# ---- the numbers -----------------------------------------------------------------------------------------------

EVERY = {"eval_every": 2}
DATA = {"kind": "text", "validation": 0.3}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(chr(97 + (i * i) % 23) for i in range(16 * 100 + 1)))
    return str(path)


def plan_for(schedule, p, text, *, m=4, train=EVERY, section=GPT, how=None, **options):
    data = {**DATA, "path": text} if section.get("family") in ("gpt", "llama") else section["data"]
    section = {key: value for key, value in section.items() if key != "data"}
    section = {**section, "vocab": 256} if "vocab" in section else section
    program = make_program(schedule, p, m, **(how or {}))
    return make_plan(program, model=section, data=data, train=train, **options)


def results(workers):
    return [(r.step, r.loss, r.samples) for r in workers[0].evaluation.results]


def by_one_process(plan, workers):
    """Mean loss of the trained weights over the kept samples, by unpatched layers."""
    settings, size = Settings.of(plan.manifest), plan.manifest.microbatch_size
    low = settings.model.parameters == "bfloat16"
    layers = one_by_one.built(plan)
    with torch.no_grad():
        for name, parameter in parameters(workers).items():
            module = next(layer for layer in layers if name.startswith(f"{layer}."))
            layers[module].get_parameter(name.removeprefix(f"{module}.")).copy_(parameter)
    modules = [(module.bfloat16() if low else module).eval() for module in layers.values()]
    samples = build_validation(settings.data, settings.model, 7)
    batches = Batches(samples, seed=seed_of(7, "evaluation"), microbatches=1, size=size)
    losses = []
    for number in range(len(samples) // size):  # all that is whole, the last batch smaller
        x = batches.inputs(number, 0)
        x = x.bfloat16() if low and x.is_floating_point() else x
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low):
            for module in modules:
                x = module(*x) if isinstance(x, tuple) else module(x)
            losses.append(model.loss(settings.model.loss)(x, batches.targets(number, 0)).item())
    return sum(losses) / len(losses), len(losses) * size


@pytest.mark.parametrize(
    ("schedule", "p", "section"), few([("1f1b", 1, GPT), ("1f1b", 4, LLAMA), ("zb-v", 2, GPT)], ("zb-v",))
)
def test_the_loss_is_that_of_one_process_over_the_samples_kept(text, schedule, p, section):
    plan = plan_for(schedule, p, text, section=section, optimizer={"lr": 1e-2})
    workers = run_threads(plan, 5)
    assert [step for step, _, _ in results(workers)] == [1, 3, 4]
    loss, samples = by_one_process(plan, workers)
    assert results(workers)[-1] == (4, pytest.approx(loss, rel=1e-12), samples)
    assert samples == 30 and results(workers)[0][1] > results(workers)[-1][1], "it learns"
    assert all(results([worker]) == results(workers) for worker in workers)


RESIDUAL = {"family": "tests.runtime.user_models:residual", "layers": 4, "loss": "mse", "args": {"dropout": 0.2}}
RESIDUAL |= {"data": {"kind": "tests.runtime.user_models:Vectors", "validation": 0.3}}
HANDED_OUT = {**RESIDUAL, "family": "tests.runtime.zoo:hands_out_weights", "args": {}}
CHANGING = {**RESIDUAL, "family": "tests.runtime.zoo:averages", "args": {}}  # in evaluation mode as well
AVERAGED = {**RESIDUAL, "family": "tests.runtime.zoo:batchnorm", "args": {}}


@pytest.mark.parametrize("family", ["tests.runtime.user_models:residual", "tests.runtime.zoo:inline"])
def test_inputs_in_floating_point_have_the_type_of_the_weights_as_in_training(text, family):
    """The norm at the start of the first model refuses another type; the second would accept it, with a wrong loss."""
    section = {**RESIDUAL, "family": family, "args": {}, "dtype": "bfloat16", "parameters": "bfloat16"}
    plan = plan_for("zb-h1", 2, text, section=section, optimizer={"lr": 1e-2})
    workers = run_threads(plan, 3)
    loss, samples = by_one_process(plan, workers)
    assert results(workers)[-1] == (2, pytest.approx(loss, rel=1e-12), samples)


LOOKED_AT = [("1f1b", 2, AVERAGED, {}), ("1f1b", 1, HANDED_OUT, {}), ("1f1b", 2, CHANGING, {})]
LOOKED_AT += [("zb-h1", 2, GPT, {"sync": "post-validate"}), ("1f1b", 4, GPT, {})]
LOOKED_AT += [("zb-v", 2, {**LLAMA, "dtype": "bfloat16"}, {})]
LOOKED_AT += [("zb-h1", 2, {**GPT, "dtype": "bfloat16", "parameters": "bfloat16"}, {}), ("zb-h1", 4, RESIDUAL, {})]
LOOKED_AT += [("1f1b", 2, RESIDUAL, {"sync": "post-validate"}), ("bitpipe", 2, GPT, {})]


@pytest.mark.long("1f1b-2-section2-how2", "zb-h1-2-section3-how3")
@pytest.mark.parametrize(("schedule", "p", "section", "how"), few(LOOKED_AT, 4))
def test_training_goes_on_as_if_nobody_had_looked(text, schedule, p, section, how):
    optimizer = {"lr": 1e-2, "clip_grad_norm": 0.4, "sync": how.get("sync", "before-step")}
    runs = []
    for train in ({}, {"eval_every": 2}):
        plan = plan_for(schedule, p, text, section=section, train=train, how=how, optimizer=optimizer)
        runs.append(run_threads(plan, 5))
    found = runs[1][0].evaluation.results
    assert len(found) == 3 and all(math.isfinite(r.loss) for r in found) and runs[0][0].evaluation is None
    numbers = [[(r.step, r.loss, r.grad_norm) for r in run[0].results] for run in runs]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 5
    before, after = (parameters(run) for run in runs)
    assert all(torch.equal(before[name], after[name]) for name in before)
    buffers = [[buffer for layer in each_layer(run) for buffer in layer.module.buffers()] for run in runs]
    assert all(torch.equal(a, b) for a, b in zip(*buffers, strict=True))


def test_modules_return_into_the_mode_each_had(text):
    modes = []

    def freeze(worker):
        for stage in worker.stages.values():
            stage.layers[0].module.eval()
            modes.append((stage, [m.training for x in stage.layers for m in x.module.modules()]))

    run_threads(plan_for("1f1b", 2, text), 2, setup=freeze)
    for stage, before in modes:
        assert [m.training for x in stage.layers for m in x.module.modules()] == before
        assert len(set(before)) == 2


def test_few_batches_are_the_same_ones_every_time(text):
    plan = plan_for("1f1b", 2, text, train={"eval_every": 1, "eval_batches": 1}, optimizer={"lr": 0.0})
    found = results(run_threads(plan, 3))
    assert [samples for _, _, samples in found] == [8, 8, 8] and len({loss for _, loss, _ in found}) == 1


@pytest.mark.parametrize(
    ("m", "said", "end"),
    [(16, "samples are kept for evaluation, which takes 32", "of which data.validation = 0.3 keeps"), (256, "", "")],
    ids=["an evaluation", "a step"],
)
def test_too_little_data_is_refused_with_the_file(text, m, said, end):
    with refused("E504", said, hint="data.validation" if said else "") as caught:
        run_threads(plan_for("1f1b", 2, text, m=m), 1)
    assert caught.value.where.startswith("data.path = ") and caught.value.where.endswith(end)


@pytest.mark.long
def test_each_of_several_sets_has_the_numbers_that_it_has_alone_and_the_first_says_which_is_best(text, tmp_path):
    (other := tmp_path / "other.txt").write_text("ab" * 16 * 50)
    sets = {"odd": str(other), "same": text}

    def evaluated(paths):
        data = {"kind": "text", "path": text, "validation": paths}
        plan = make_plan(
            make_program("zb-v", 2, 4), model=GPT | {"vocab": 256}, data=data, train=EVERY | {"eval_batches": 2}
        )
        return [worker.evaluation.results for worker in run_threads(plan, 4)]

    both, alone = evaluated(sets), {name: evaluated(path)[0] for name, path in sets.items()}
    for found in both:
        assert [[row.name for row in (each, *each.others)] for each in found] == [["odd", "same"]] * 2
        for number, each in enumerate(found):
            for row in (each, *each.others):
                single = alone[row.name][number]
                assert (row.loss, row.samples, row.kept) == (single.loss, single.samples, single.kept)
    with refused("E504", "kept for evaluation", hint="to a larger file") as caught:
        (tmp_path / "few.txt").write_text("abc" * 16)
        evaluated({"odd": text, "few": str(tmp_path / "few.txt")})
    assert caught.value.where.startswith("data.validation.few = ")


def test_a_synthetic_set_is_not_evaluated_whole_unless_asked_to():
    data = {"kind": "synthetic", "validation": 0.5}
    (worker,) = run_threads(make_plan(make_program("1f1b", 1, 1), model=GPT, data=data, train={"eval_every": 1}), 1)
    assert (worker.evaluation.results[0].samples, worker.evaluation.results[0].kept) == (200, 2**19)
