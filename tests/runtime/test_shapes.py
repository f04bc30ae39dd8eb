"""Boundary tensors come from the model itself, and a plan with others is refused before training."""

import pytest
import torch

from tests.refusals import refused
from tests.runtime.small_plans import GPT, make_plan, make_program, make_worker
from tests.runtime.test_gradients import VECTORS, user
from zbc.errors import ZbcError
from zbc.job import spec
from zbc.plan.directory import Boundary
from zbc.runtime.core.tensors import TensorSpec
from zbc.training.models import model
from zbc.training.probing.shapes import derive

LOW = torch.device("cpu"), torch.bfloat16

HIDDEN = TensorSpec((2, 16, 32), torch.float32)


def shapes_of(plan, first, *, autocast=None):
    settings = spec.Model.model_validate(plan.manifest.planning["model"])
    return derive(model.layers(settings, 7), lambda layer: first, plan.manifest, autocast=autocast)


def gpt_plan(**options):
    return make_plan(make_program("1f1b", 4, 4), **options)


def test_a_gpt_passes_its_residual_stream():
    shapes = shapes_of(gpt_plan(), TensorSpec((2, 16), torch.int64))
    assert [s.takes for s in shapes.stages] == [TensorSpec((2, 16), torch.int64), HIDDEN, HIDDEN, HIDDEN]
    assert shapes.parameters == tuple(sorted(shapes.parameters)) and len(shapes.parameters) == 77
    assert "layers.5.qkv.weight" in shapes.parameters and "head.logits.weight" in shapes.parameters


def test_a_gpt_passes_float32_under_autocast_too_and_a_net_passes_what_its_layers_return():
    plan = gpt_plan(model={**GPT, "dtype": "bfloat16"})
    shapes = shapes_of(plan, TensorSpec((2, 16), torch.int64), autocast=LOW)
    assert [s.takes for s in shapes.stages[1:]] == [HIDDEN] * 3
    net = {"family": "plans.convnet:layers", "layers": 8, "dtype": "bfloat16"}
    data = {"kind": "plans.convnet:Quadrants"}
    first = TensorSpec((2, 1, 16, 16), torch.float32)
    wanted = TensorSpec((2, 16, 16, 16), torch.bfloat16)
    shapes = shapes_of(gpt_plan(model=net, data=data), first, autocast=LOW)
    assert [s.takes for s in shapes.stages[1:]] == [wanted] * 3


OTHER = [Boundary(shape=[2, 16, 31], dtype="float32"), Boundary(shape=[2, 16, 32], dtype="float64")]
OTHER += [Boundary(shape=[2, 16, 32], dtype="int7")]


@pytest.mark.parametrize("boundary", OTHER)
def test_a_plan_with_another_boundary_is_refused_with_both(boundary):
    plan = gpt_plan(boundaries=[None, boundary, None])
    with refused("E505", "after stage 1") as caught:
        make_worker(plan)
    if boundary.dtype != "int7":
        assert "float32 [2, 16, 32]" in caught.value.message and str(boundary.shape) in caught.value.message


def test_a_plan_may_send_bfloat16_under_autocast_only():
    boundaries = [Boundary(shape=[2, 16, 32], dtype="bfloat16")] * 3
    low = gpt_plan(model={**GPT, "dtype": "bfloat16"}, boundaries=boundaries)
    assert make_worker(low, 1).stages[1].takes.dtype is torch.bfloat16
    with pytest.raises(ZbcError, match="bfloat16"):
        make_worker(gpt_plan(boundaries=boundaries))


def test_a_plan_with_other_layers_is_refused():
    plan = gpt_plan()
    for layers, text in (
        ([*plan.manifest.layers[:3], ["layers.5"]], "the plan has 7 layers, the model has 8"),
        ([*plan.manifest.layers[:3], ["layers.5", "tail"]], "the plan has 'tail' as layer 7, the model has 'head'"),
    ):
        changed = type(plan)(plan.manifest.model_copy(update={"layers": layers}), plan.program)
        with refused("E505", text):
            make_worker(changed)


def test_layers_that_look_at_values_are_run_for_real():
    plan = gpt_plan(model=user("value_dependent"), **VECTORS)
    assert make_worker(plan).stages[0].gives == TensorSpec((2, 8), torch.float32)


def test_layers_that_do_not_fit_together_are_named():
    with refused("E505", "layer layers.1 cannot take a tensor float32 [2, 8]"):
        make_worker(gpt_plan(model=user("narrow"), **VECTORS))


def test_buffers_that_kernels_refuse_beside_lowered_parameters_are_found_before_the_first_step():
    """BatchNorm on a CPU; it shows with real values only."""
    low = {"dtype": "bfloat16", "parameters": "bfloat16"}
    plan = make_plan(make_program("1f1b", 2, 2), model={**user("mixed"), **low}, **VECTORS)
    with refused("E505", match=r"layer layers\.0 cannot take", hint="model.parameters"):
        make_worker(plan, 0)
    kept = {**user("mixed"), "dtype": "bfloat16"}
    assert make_worker(make_plan(make_program("1f1b", 2, 2), model=kept, **VECTORS), 0)
