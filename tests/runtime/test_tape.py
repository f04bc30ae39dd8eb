"""The way back through a stage's graph, whichever function of torch walks it."""

import pytest
import torch
from torch import nn

from zbc.runtime.core import tape


@pytest.mark.parametrize("engine", [None, tape.engine], ids=["public", "direct"])
def test_gradients_are_those_of_torch_whichever_function_walks_the_graph(engine, monkeypatch):
    monkeypatch.setattr(tape, "engine", engine)
    torch.manual_seed(3)
    layer, x, grad = nn.Linear(4, 3), torch.randn(2, 4, requires_grad=True), torch.randn(2, 3)
    expected = torch.autograd.grad(layer(x).tanh(), [x, *layer.parameters()], grad)
    for times in (1, 2):  # gradients add up over microbatches
        tape.RecordedGraph(layer(x).tanh()).backward(grad)
        found = [x.grad, *(p.grad for p in layer.parameters())]
        assert all(torch.equal(a, times * b) for a, b in zip(found, expected, strict=True))


def test_a_loss_starts_with_one_and_what_needs_no_gradient_has_no_way_back():
    x = torch.tensor(2.0, requires_grad=True)
    tape.RecordedGraph(x * x).backward(None)
    assert x.grad == 4.0
    tape.RecordedGraph(torch.ones(3)).backward(torch.ones(3))


def test_a_graph_is_gone_after_its_way_back():
    graph = tape.RecordedGraph(torch.ones(3, requires_grad=True).exp())
    graph.backward(torch.ones(3))
    with pytest.raises(RuntimeError, match="second time"):
        graph.backward(torch.ones(3))
