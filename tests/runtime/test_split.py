"""The two halves of a backward: bitwise equal to autograd, with only inputs and output gradients kept between."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.refusals import refused
from tests.runtime import user_models
from zbc.errors import ZbcError
from zbc.runtime.core.slot import Slot, using
from zbc.runtime.core.split import refuse_wrapped, split_backward

LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), (3, 6)),
    "linear-of-a-vector": (lambda: nn.Linear(6, 5), (6,)),
    "linear-3d": (lambda: nn.Linear(6, 5), (2, 3, 6)),
    "linear-4d": (lambda: nn.Linear(6, 5), (2, 2, 3, 6)),
    "linear-without-bias": (lambda: nn.Linear(6, 5, bias=False), (2, 3, 6)),
    "linear-of-one-row": (lambda: nn.Linear(6, 5), (1, 6)),
    "linear-to-one": (lambda: nn.Linear(6, 1), (4, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2), (2, 4, 9, 9)),
    "conv2d-reflect": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", bias=False), (2, 4, 9, 9)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4)),
}
INDEX = torch.tensor([[0, 2, 2], [6, 2, 0]])
LAYERS |= {
    f"embedding-{padding}": (lambda padding=padding: nn.Embedding(7, 4, padding_idx=padding), INDEX)
    for padding in (None, 2)
}
LAYERS |= {  # inputs that are not contiguous
    f"{kind}-turned": (LAYERS[kind][0], torch.randn(LAYERS[kind][1][::-1]).permute(*reversed(range(n))))
    for kind, n in (("linear-3d", 3), ("linear-4d", 4), ("linear-without-bias", 3))
}
LAYERS |= {
    f"{kind}-frozen-{name}": (lambda make=LAYERS[kind][0], name=name: frozen(make(), name), LAYERS[kind][1])
    for kind in ("linear", "conv2d")
    for name in ("weight", "bias")
}


def frozen(layer, name):
    getattr(layer, name).requires_grad_(False)
    return layer


def pair(make):
    """An unchanged layer and its patched twin."""
    plain = make()
    split = copy.deepcopy(plain)
    return plain, split, split_backward(split)


def backward(module, x, slot, halves):
    """Output, input gradient and parameter gradients of one microbatch through `module`."""
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    with using(slot):
        y = module(x)
    torch.manual_seed(1)
    slot.split = halves
    y.backward(torch.randn_like(y))
    before = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    slot.run()
    return y.detach(), x.grad, [p.grad for p in module.parameters()], before


def equal(a, b):
    return (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("halves", [True, False])
def test_each_layer_has_the_bits_of_autograd_fused_and_in_halves(layer, halves):
    make, shape = LAYERS[layer]
    plain, split, patches = pair(make)
    assert len(patches) == 1
    for seed in (0, 1):  # the second microbatch accumulates
        torch.manual_seed(seed)
        x = shape if isinstance(shape, torch.Tensor) else torch.randn(shape)
        y, grad_x, grads, _ = backward(plain, x, Slot(), False)
        y2, grad_x2, grads2, before = backward(split, x, Slot(), halves)
        assert seed or not halves or before == [None] * len(before), "all of them are W's"
        assert torch.equal(y, y2) and equal(grad_x, grad_x2)
        assert all(equal(a, b) for a, b in zip(grads, grads2, strict=True))


def after_b(module, x):
    split_backward(module)
    slot = Slot()
    with using(slot):
        y = module(x)
    slot.split = True
    y.sum().backward()
    return slot


def test_a_weight_that_changed_is_cast_again():
    layer = nn.Linear(4, 4)
    split_backward(layer)

    def output():
        with using(Slot()), torch.autocast("cpu", torch.bfloat16):
            return layer(torch.ones(2, 4))

    before = output()
    with torch.no_grad():
        layer.weight.mul_(2)
    assert not torch.equal(before, output())


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def hooked():
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(lambda module, inputs, output: output * 2)
    return layer


def with_gradient_hook():
    layer = nn.Linear(3, 3)

    def double(parameter):
        parameter.grad.mul_(2)

    layer.weight.register_post_accumulate_grad_hook(double)
    return layer


def with_forward_of_its_own():
    layer = nn.Linear(3, 3)
    layer.forward = lambda x: nn.functional.linear(x, layer.weight) * 3
    return layer


LEFT_ALONE = {
    "a subclass with its own forward": lambda: OwnForward(3, 3),
    "an instance with its own forward": with_forward_of_its_own,
    "forward hooks": hooked,
    "gradient hooks": with_gradient_hook,
    "parametrizations": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "sparse gradients": lambda: nn.Embedding(3, 3, sparse=True),
    "renormalised embeddings": lambda: nn.Embedding(3, 3, max_norm=1.0),
    "a compiled module": lambda: torch.compile(nn.Linear(3, 3), backend="eager"),
    "norms": lambda: nn.LayerNorm(3),
}


@pytest.mark.parametrize("why", LEFT_ALONE)
def test_a_module_that_patching_could_change_is_left_alone_with_its_gradient_in_b(why):
    module = LEFT_ALONE[why]()
    assert split_backward(module) == []
    if why in ("a subclass with its own forward", "gradient hooks", "parametrizations", "forward hooks"):
        assert len(after_b(module, torch.randn(2, 3))) == 0 and all(p.grad is not None for p in module.parameters())


def test_wrapped_layers_are_refused_with_the_reason_ddp_too():
    for layer in (user_models.FSDPModule(3, 3), nn.Sequential(nn.ReLU(), user_models.FSDPModule(3, 3))):
        with refused("E509", "layers.2", "FSDPModule"):
            refuse_wrapped("layers.2", layer)
    refuse_wrapped("layers.2", user_models.Residual(8))
    from torch.nn.parallel import DistributedDataParallel

    layer = DistributedDataParallel.__new__(DistributedDataParallel)  # a real one needs a process group
    nn.Module.__init__(layer)
    with pytest.raises(ZbcError, match="DistributedDataParallel"):
        refuse_wrapped("layers.0", layer)


def test_deferred_work_of_users_runs_at_once_when_the_backward_is_not_split():
    ran = []
    slot = Slot()
    slot.defer(lambda: ran.append(("now", torch.is_grad_enabled())))
    slot.split = True
    slot.defer(lambda: ran.append(("first", torch.is_grad_enabled())))
    slot.defer(lambda: ran.append(("second", torch.is_grad_enabled())))
    assert ran == [("now", False)]
    slot.run()
    assert ran == [("now", False), ("first", False), ("second", False)]
