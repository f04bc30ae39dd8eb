"""Memory for copies of a rank's state."""

from types import SimpleNamespace

import pytest
import torch

from zbc.training.checkpoint.saving import Arena

TENSORS = {"turned": torch.randn(3, 4, 5).transpose(0, 2), "one": torch.tensor(7.0, dtype=torch.float64)}
TENSORS |= {"low": torch.randn(5).bfloat16(), "none": torch.zeros(0, 3), "whole": torch.arange(9)}


def test_copies_lie_in_one_piece_of_memory_that_is_used_again():
    arena = Arena()
    places = arena.places(TENSORS)
    for name, tensor in TENSORS.items():
        places[name].copy_(tensor)
    for name, tensor in TENSORS.items():
        assert torch.equal(places[name], tensor) and places[name].dtype is tensor.dtype, name
        assert places[name].is_contiguous() and places[name].data_ptr() % 64 == 0
    assert len({place.untyped_storage().data_ptr() for place in places.values()}) == 1
    again = arena.places({name: tensor.clone() for name, tensor in TENSORS.items()})
    assert [place.data_ptr() for place in again.values()] == [place.data_ptr() for place in places.values()]
    assert arena.places({"other": torch.ones(2)})["other"].shape == (2,)


def test_pinned_memory_is_given_to_the_driver_as_it_is_and_taken_back(monkeypatch):
    calls = []

    def checked(code):
        if code:
            raise RuntimeError(code)

    runtime = SimpleNamespace(
        cudaHostRegister=lambda at, size, flags: calls.append(("pin", at, size)) or 0,
        cudaHostUnregister=lambda at: calls.append(("unpin", at)) or 0,
    )
    monkeypatch.setattr("torch.cuda.cudart", lambda: runtime)
    monkeypatch.setattr("torch.cuda.check_error", checked)
    arena = Arena(pinned=True)
    first = arena.places({"a": torch.zeros(100)})["a"].data_ptr()
    arena.places({"a": torch.zeros(100)})
    arena.places({"b": torch.zeros(1000)})
    assert calls[:2] == [("pin", first, 448), ("unpin", first)] and calls[2][2] == 4032
    runtime.cudaHostRegister = lambda at, size, flags: 2
    with pytest.raises(RuntimeError):
        arena.places({"c": torch.zeros(3)})
