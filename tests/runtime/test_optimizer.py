"""Weights, masters and state after steps of a stage's optimizer."""

import copy

import pytest
import torch
from torch import nn

from tests.runtime.small_plans import GPT, make_plan, make_program, parameters, reference
from tests.threads import losses_of, norms_of, run_threads
from tests.tiers import few
from zbc.job import spec
from zbc.plan import dealing
from zbc.runtime.core.optimizer import Masters, build_optimizer, torch_optimizer

KINDS = {"adamw": {"kind": "adamw", "lr": 0.01}, "adam": {"kind": "adam", "lr": 0.01}}
KINDS |= {"sgd": {"kind": "sgd", "lr": 0.1}, "momentum": {"kind": "sgd", "lr": 0.1, "momentum": 0.9}}
LOW = {**GPT, "dtype": "bfloat16", "parameters": "bfloat16"}
kinds = pytest.mark.parametrize("kind", KINDS)
types = pytest.mark.parametrize("lowered", [None, torch.bfloat16], ids=["float32", "bfloat16"])


def weights() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"a": (37, 5), "b": (64,), "frozen": (3,), "idle": (4, 4), "transposed": (6, 9)}
    made = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    made["transposed"].data = made["transposed"].data.t()
    made["frozen"].requires_grad_(False)
    return made


def fill(parameters: dict[str, nn.Parameter], step: int) -> None:
    """Sets gradients for all trained parameters; `idle` gets one only in every other step."""
    generator = torch.Generator().manual_seed(100 + step)
    for name, parameter in parameters.items():
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.requires_grad and (name != "idle" or step % 2):
            parameter.grad = drawn.as_strided(parameter.shape, parameter.stride())


def options(kind: str) -> spec.Optimizer:
    return spec.Optimizer.model_validate(KINDS[kind])


def held(optimizer: Masters) -> list[torch.Tensor]:
    """A copy of all state that the next step depends on."""
    states = copy.deepcopy([optimizer.optimizer.state.get(m, {}) for m in optimizer.masters.values()])
    tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return [*(m.detach().clone() for m in optimizer.masters.values()), *tensors]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def read(parameters: dict[str, nn.Parameter]) -> list[torch.Tensor]:
    return [p.detach().clone() for p in parameters.values()]


@kinds
@types
def test_a_tentative_step_shows_the_weights_of_the_commit_and_leaves_no_trace_if_it_does_not_stand(
    kind, lowered, monkeypatch
):
    monkeypatch.setattr(dealing, "BATCH", 100)  # several batches
    sync, ahead = weights(), weights()
    plain, tentative = (build_optimizer(options(kind), p, lowered=lowered, ahead=True) for p in (sync, ahead))
    for step, scale in enumerate((0.5, None, 0.25, None, None)):
        fill(sync, step)
        fill(ahead, step)
        skip = step in (1, 3)
        if skip:
            ahead["a"].grad[0, 0] = torch.nan
        else:
            plain.step(scale)
        before = held(tentative)
        tentative.tentative()
        assert equal(held(tentative), before)
        assert not skip or not equal(read(ahead), read(sync))
        assert skip or scale is not None or equal(read(ahead), read(sync))
        if not skip:
            tentative.commit(scale)
        tentative.publish()
        plain.drop()
        tentative.drop()
        assert equal(read(ahead), read(sync)) and equal(held(tentative), held(plain))


@pytest.mark.parametrize(("dtype", "fused"), [(torch.float32, True), (torch.complex64, None)])
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD"])
def test_fused_kernels_are_not_for_complex_weights(kind, dtype, fused, monkeypatch):
    """They refuse them in their first step on a GPU; one among others keeps all from it."""
    told = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.optim, kind, lambda groups, **how: told.append(how["fused"]))
    named = {"a": nn.Parameter(torch.zeros(3)), "b": nn.Parameter(torch.zeros(3, dtype=dtype))}
    torch_optimizer(spec.Optimizer.model_validate({"kind": kind.lower()}), named)
    assert told == [fused]


@pytest.mark.parametrize(("schedule", "p"), few([("zb-v", 2), ("1f1b", 3), ("zb-h1", 4)], ("zb-v", "1f1b")))
@pytest.mark.parametrize("kind", few(["adamw", "adam"], ("adamw",)))
def test_bfloat16_parameters_train_as_in_one_process(schedule, p, kind):
    plan = make_plan(make_program(schedule, p, 4), model=LOW, optimizer={**KINDS[kind], "clip_grad_norm": 1.0})
    workers = run_threads(plan, 3)
    wanted = reference(plan, 3)
    assert losses_of(workers) == wanted.losses
    assert norms_of(workers) == pytest.approx(wanted.norms, rel=1e-12)
    for name, parameter in parameters(workers).items():
        assert parameter.dtype is torch.bfloat16 and torch.equal(parameter, wanted.weights[name]), name
