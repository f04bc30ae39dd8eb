"""Agreement of ranks: exact sums, the same norm for every partition, a correct verdict."""

import math

import pytest
import torch

from zbc.runtime.core import validate
from zbc.runtime.core.progress import StepResult
from zbc.runtime.core.validate import CHUNK, VectorLayout, squares_of

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
    found = squares_of({**grads, "low": torch.tensor([0.5, 0.5], dtype=torch.bfloat16)})
    assert len(found["a"]) == -(-grad.numel() // CHUNK) and {one.dtype for one in found.values()} == {torch.float64}
    assert found["a"].sum().item() == pytest.approx(grad.numel() * value, rel=1e-10)
    assert found["none"].tolist() == [0.0]
    assert found["far"].item() == pytest.approx(1e60)
    assert found["two"].tolist() == pytest.approx([26.0]) and found["low"].tolist() == pytest.approx([0.5])
    assert squares_of({}) == {}


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
