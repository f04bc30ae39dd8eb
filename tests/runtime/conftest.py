"""One thread per kernel: sums do not depend on the machine, and ranks as threads do not compete for cores."""

from collections import defaultdict

import pytest
import torch

from zbc.runtime.handlers import HANDLERS


@pytest.fixture(autouse=True, scope="session")
def one_thread_per_kernel():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ran(monkeypatch):
    """The ops that the ranks of a pipeline have run, by rank."""
    seen = defaultdict(list)
    for kind, handler in HANDLERS.items():

        def record(worker, op, handler=handler):
            seen[worker.plan.rank].append(op)
            handler(worker, op)

        monkeypatch.setitem(HANDLERS, kind, record)
    return seen


@pytest.fixture
def default(request):
    """Models of zbc's own have parameters of this type, by default of double precision."""
    before, chosen = torch.get_default_dtype(), getattr(request, "param", torch.float64)
    torch.set_default_dtype(chosen)
    yield chosen
    torch.set_default_dtype(before)
