"""bench/gpu.py is for a person with a GPU; that it works is tested here, without one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import gpu

    yield gpu
    sys.modules.pop("gpu", None)


def test_halves_have_the_gradients_of_plain_autograd_and_times_of_their_own(gpu):
    case = gpu.Case(CPU, apart=True, pp=2, kind="1f1b", activations="recompute")
    assert case.gradient_error() == 0.0
    assert {"F", "B", "W", "VALIDATE", "STEP"} <= case.timed().keys()
    assert case.held()["activations"] > 0


def test_an_optimizer_without_a_barrier_has_its_ops_timed(gpu):
    case = gpu.Case(CPU, pp=2, kind="zb-h1", sync="post-validate")
    assert {"TENTATIVE", "COMMIT", "NORM", "VERDICT"} <= case.timed().keys()
