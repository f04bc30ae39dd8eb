"""Weights that layers of a factory share: one weight everywhere, with the gradient of one process."""

import pytest
import torch

from tests.refusals import refused
from tests.runtime.small_plans import hold, make_plan, make_program, parameters, reference
from tests.runtime.test_gradients import VECTORS, check_gradients, user, without_step
from tests.threads import each_layer, losses_of, run_threads
from tests.tiers import few
from zbc.job.model_section import Model
from zbc.ops import TIED

TIES = {
    "layers.4.down.weight": "layers.0.down.weight",
    "layers.7.down.weight": "layers.0.down.weight",
    "layers.3.up.weight": "layers.2.up.weight",
}
WAYS = [("1f1b", 4), ("zb-h1", 2), ("zb-v", 4), ("interleaved-1f1b", 2), ("chimera", 4)]


def plan_of(schedule="1f1b", p=4, m=4, *, ties=TIES, copies=1, sync="before-step", sharded=False, how=(), **options):
    """A plan of layers two by two on 4 stages, or one by one on 8."""
    model = {**user("sharing", layers=8, **dict(how)), "ties": ties}
    layers = Model.model_validate(model).tied_layers
    stages = make_program(schedule, p, m).placement.stages
    tied = tuple(s for s in range(stages) if {i for i in layers if i * stages // 8 == s})
    tied = tied if len(tied) > 1 else ()
    how = {"sync": sync, "copies": copies, "sharded": sharded, "tied": bool(tied), "ties": tied}
    return make_plan(make_program(schedule, p, m, **how), model=model, data=VECTORS["data"], **options)


def copies(workers, name):
    """The weight in every stage that has it, once per object."""
    owners = [name, *(other for other, owner in TIES.items() if owner == name)]
    named = [(f"{layer.name}.{n}", p) for layer in each_layer(workers) for n, p in layer.module.named_parameters()]
    return list({id(parameter): parameter for name, parameter in named if name in owners}.values())


@pytest.mark.long("chimera-4", "1f1b-4-True", "zb-v-4-True")
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("schedule", "p"), few(WAYS, lambda way: way[0] != "zb-h1"))
def test_gradients_are_those_of_one_process(schedule, p, together):
    """The order of sums differs, so up to 1e-6."""
    plan = plan_of(schedule, p, keep=without_step, how={"together": together})
    assert not parameters(check_gradients(plan, tolerance=1e-6, loss=1e-6)).keys() & TIES.keys()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_ranks_without_the_weight_stand_in_with_its_type_and_leave_out_what_is_frozen(dtype, frozen):
    ties = {"layers.3.down.weight": "layers.0.down.weight", "layers.2.down.weight": "layers.1.down.weight"}
    model = {**user("sums_in", dtype=dtype, frozen=frozen), "ties": ties}
    program = make_program("1f1b", 4, 1, tied=True, ties=(0, 1, 2, 3))
    plan = make_plan(program, model=model, data=VECTORS["data"], optimizer={"lr": 1e-2, "clip_grad_norm": 0.5})
    found, expected = run_threads(plan, 2), reference(plan, 2)
    near = {"rtol": 1e-12, "atol": 1e-12} if dtype == "float64" else {"rtol": 2**-7, "atol": 1e-3}
    assert losses_of(found) == pytest.approx(expected.losses, rel=1e-6 if dtype == "float64" else 1e-3)
    for name, parameter in parameters(found).items():
        torch.testing.assert_close(parameter.detach(), expected.weights[name], msg=name, **near)


COPIED = [("1f1b", 4, {}), ("zb-v", 2, {}), ("1f1b", 2, {"copies": 2}), ("1f1b", 2, {"copies": 2, "sharded": True})]
COPIED += [("zb-h1", 4, {"sync": "post-validate"})]


@pytest.mark.long("1f1b-4-how0", "1f1b-2-how2", "1f1b-2-how3")
@pytest.mark.parametrize(("schedule", "p", "how"), few(COPIED, lambda way: way[0] != "zb-v"))
def test_all_copies_of_a_weight_stay_one(schedule, p, how):
    plan = plan_of(schedule, p, **how, optimizer={"lr": 1e-2, "clip_grad_norm": 0.5})
    workers, expected = run_threads(plan, 3), reference(plan, 3)
    for owner in set(TIES.values()):
        held = copies(workers, owner)
        assert all(torch.equal(held[0], one) for one in held)
        torch.testing.assert_close(held[0].detach(), expected.weights[owner], rtol=1e-5, atol=1e-6)
    hold(workers, expected, tolerance=1e-5)
    assert sum(op.stage == TIED for _, _, op in plan.program) > 0


def test_where_all_layers_of_a_weight_are_in_one_stage_nothing_travels():
    plan = plan_of("1f1b", 2, ties={"layers.1.down.weight": "layers.0.down.weight"}, keep=without_step)
    assert not plan.manifest.tied and not any(op.stage == TIED for _, _, op in plan.program)
    check_gradients(plan, tolerance=1e-6)


@pytest.mark.parametrize(
    ("ties", "said"),
    [
        ({"layers.4.down.wait": "layers.0.down.weight"}, "names layers.4.down.wait, which is no parameter"),
        ({"layers.4.down.weight": "layers.0.up.bias"}, "they cannot be one"),
    ],
)
def test_weights_that_cannot_be_one_are_refused(ties, said):
    with refused("E508", match=said):
        run_threads(plan_of(ties=ties), 1)


def test_sharing_that_nobody_has_said_is_refused_with_the_way_to_say_it():
    with refused("E508", match=r"layers\.0 and layers\.4 and layers\.7 share a parameter", hint="[model.ties]"):
        run_threads(plan_of(ties={}, how={"together": True}), 1)
