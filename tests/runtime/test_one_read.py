"""A step that suits a GPU: the host reads from the device once, in the verdict, and transfers no numbers to it.

Ranks on a CPU run the code for a device, under modes that see every op and every method of a tensor.
"""

from contextlib import contextmanager

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.small_plans import LLAMA
from tests.runtime.test_warm import plan_for
from tests.threads import run_threads
from tests.tiers import few
from zbc.runtime.core import execute, optimizer, validate
from zbc.runtime.core.state import Worker
from zbc.runtime.core.tensors import constant
from zbc.runtime.core.validate import VectorLayout
from zbc.training.warm import warm

READS = {"_local_scalar_dense", "nonzero", "nonzero_static", "masked_select", "equal", "is_nonzero", "item"}
READS |= {"unique_dim", "unique_consecutive", "_unique", "_unique2", "repeat_interleave"}
CARRIES = {"lift_fresh", "lift"}  # the ops of torch.tensor for Python's numbers
STEPS = 4
METHODS = {"item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__float__", "__int__", "__index__", "__array__"}


class Ops(TorchDispatchMode):
    """Records ops that read from, or transfer numbers to, the device, called by any code."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = name == "index" and any(one is not None and one.dtype is torch.bool for one in args[1])
        if masks or name in READS | CARRIES:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    """Records methods that read: on a CPU some do so without an op."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in METHODS:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(found):
    with Ops(found), Methods(found):
        yield


@pytest.fixture
def as_on_a_device(monkeypatch):
    """Makes the runtime use its code for devices."""
    constant.cache_clear()
    monkeypatch.setattr(validate, "_written", validate._copied)
    monkeypatch.setattr(validate, "_one_by_one", validate._together)
    adamw = torch.optim.AdamW
    monkeypatch.setattr(optimizer.torch.optim, "AdamW", lambda *args, **how: adamw(*args, **{**how, "fused": True}))


def notes(plan, monkeypatch, steps=STEPS):
    """(step, rank) -> reads and transfers; each rank counts its own end of a step without a barrier."""
    found = {}
    read = VectorLayout.read

    def verdict(layout, vector):
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return read(layout, vector)

    def learn(worker, vector):
        found[worker.rank][-1].append("verdict")
        return verdict(worker.layout, vector)

    monkeypatch.setattr(Worker, "learn", learn)

    def step(worker):
        worker.on_host = False
        found[worker.rank] = [[]]

        def run(worker, number, **how):
            if number == 0:
                warm(worker)  # constants are carried over now
                found[worker.rank].clear()
            found[worker.rank].append([])
            with watched(found[worker.rank][-1]):
                return execute.run_step(worker, number, **how)

        return run

    def finish(worker):
        found[worker.rank].append([])
        with watched(found[worker.rank][-1]):
            return original(worker)

    original = execute.finish
    monkeypatch.setattr("zbc.training.train.finish", finish)
    return run_threads(plan, steps, step=step), found


CASES = {
    "a barrier": {"schedule": "zb-h1"},
    "no barrier": {"schedule": "zb-h1", "sync": "post-validate"},
    "clipping": {"schedule": "1f1b", "optimizer": {"clip_grad_norm": 1e-3}},
    "clipping without a barrier": {"schedule": "zb-v", "sync": "post-validate", "optimizer": {"clip_grad_norm": 1e-3}},
    "replicas": {"schedule": "1f1b", "copies": 2},
    "replicas without a barrier": {"schedule": "zb-h1", "copies": 2, "sync": "post-validate"},
    "ZeRO-1": {"schedule": "zb-h1", "copies": 2, "sharded": True},
    "ZeRO-1 without a barrier": {"schedule": "zb-h1", "copies": 2, "sharded": True, "sync": "post-validate"},
    "tied weights": {"schedule": "zb-h1", "tied": True},
    "two pipes": {"schedule": "chimera"},
    "recompute": {"schedule": "zb-v", "activations": "recompute", "model": LLAMA},
}


@pytest.mark.always("replicas", "a barrier")
@pytest.mark.long("ZeRO-1", "clipping without a barrier")
@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("case", few(CASES, ("clipping without a barrier", "replicas", "ZeRO-1", "tied weights")))
def test_the_host_reads_the_verdict_and_nothing_else(case, monkeypatch):
    workers, found = notes(plan_for(CASES[case]), monkeypatch)
    assert all(result.grad_norm > 0 for worker in workers for result in worker.results)
    ahead = CASES[case].get("sync") == "post-validate"
    for rank, steps in found.items():
        for number, what in enumerate(steps):
            assert what == ["verdict"] * (number > 0 if ahead else number < STEPS), (rank, number)
