"""sys.exit() in users' code is a failure of that code with its place, like any other exception."""

import sys

import pytest
import torch
from torch import nn

from tests.runtime.small_plans import make_plan, make_program
from tests.threads import run_threads
from zbc.errors import ZbcError
from zbc.training.train import explain

HERE = __name__


class Leaves(nn.Linear):
    def __init__(self, where):
        super().__init__(8, 8)
        self.where = where
        if where == "constructor":
            sys.exit(where)

    def __deepcopy__(self, memo):
        sys.exit("copy")

    def forward(self, x):
        if self.where == "forward":
            sys.exit(self.where)
        return super().forward(x)


class Fine(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)


def layers(where=""):
    if where == "factory":
        sys.exit(where)
    yield Fine
    if where == "generator":
        sys.exit(where)
    if where == "copy":
        yield Leaves(where)
    elif where in ("constructor", "forward"):
        yield type("Named", (Leaves,), {"__init__": lambda self: Leaves.__init__(self, where), "__deepcopy__": None})
    else:
        yield Fine


class Vectors:
    def __init__(self, where=""):
        self.where = where
        if where == "dataset":
            sys.exit(where)

    def __len__(self):
        return sys.exit(self.where) if self.where == "length" else 64

    def __getitem__(self, index):
        return sys.exit(self.where) if self.where == "sample" else (torch.ones(8), torch.ones(8))


def loss(output, target):
    sys.exit("loss")


PLACES = dict.fromkeys(("factory", "generator", "constructor", "dataset", "length", "sample"), "E502")
PLACES |= {"copy": "E509", "forward": "E505"}


def plan(where="", loss="mse"):
    of_data = where in ("dataset", "length", "sample")
    model = {"family": f"{HERE}:layers", "layers": 2, "loss": loss, "args": {} if of_data else {"where": where}}
    data = {"kind": f"{HERE}:Vectors", "args": {"where": where} if of_data else {}}
    return make_plan(make_program("1f1b", 2, 2), model=model, data=data)


@pytest.mark.parametrize("where", PLACES)
def test_leaving_before_training_is_an_error_with_its_place(where):
    with pytest.raises(ZbcError) as caught:
        run_threads(plan(where), 1)
    error = caught.value
    assert error.code == PLACES[where] and f"SystemExit: {where}" in error.details
    assert where == "copy" or "test_leaving.py" in error.render()


def test_leaving_in_an_op_names_it_and_the_line():
    with pytest.raises(SystemExit) as caught:
        run_threads(plan(loss=f"{HERE}:loss"), 1)
    error = explain(caught.value, 1)
    assert (error.code, error.message) == ("E703", "run: rank 1 failed: SystemExit: loss")
    assert error.details[0].startswith("while rank 1 ran op ") and error.details[0].endswith(" of step 1: F s1 m0")
    assert 'sys.exit("loss")' in error.render()


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (MemoryError(), ""),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0"), ": it asked for 20.00 GiB"),
        (None, ": it asked for 4096 TiB"),
        (RuntimeError("std::bad_alloc"), ""),
    ],
)
def test_a_rank_that_is_out_of_memory_says_what_it_asked_for_and_what_was_predicted(error, asked, monkeypatch):
    def greedy(output, target):
        if error is None:
            torch.empty(2**52, dtype=torch.uint8)
        raise error

    monkeypatch.setattr(sys.modules[HERE], "loss", greedy)
    found = plan(loss=f"{HERE}:loss")
    found.manifest.predicted["per_rank"] = [{"peak_bytes": 0}, {"peak_bytes": 3 * 2**29}]
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        run_threads(found, 1)
    told = explain(caught.value, 1)
    assert (told.code, told.message) == ("E703", f"run: rank 1 is out of memory{asked}")
    assert "the plan predicts a peak of 1.5 GiB for this rank, beside what Python and torch take" in told.details
    assert "microbatch_size" in told.hint


def test_an_interrupt_that_code_of_users_raises_is_told_as_any_other_failure(monkeypatch):
    def interrupted(output, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[HERE], "loss", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        run_threads(plan(loss=f"{HERE}:loss"), 1)
    told = explain(caught.value, 1)
    assert told.message == "run: rank 1 failed: KeyboardInterrupt" and told.details[0].endswith("of step 1: F s1 m0")


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_what_torch_refuses_is_told_with_the_layer_and_what_it_was_given(activations):
    args = {"kind": "tests.runtime.user_models:Vectors", "args": {"width": 8}}
    family = {"family": "tests.runtime.zoo:late_to_refuse", "layers": 4, "loss": "mse"}
    with pytest.raises(RuntimeError) as caught:
        run_threads(make_plan(make_program("1f1b", 2, 2), model=family, data=args, activations=activations), 1)
    details = explain(caught.value, 1).details
    assert details[0].endswith(" of step 1: F s1 m0") and details[1] == "in layer layers.3, for float32 [2, 8]"
