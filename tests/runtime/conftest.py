"""One thread per kernel: sums do not depend on the machine, and ranks as threads do not compete for cores. `moved`
collects what OFFLOAD moves."""

import pytest
import torch

from zbc.runtime.features.offload import parcels


@pytest.fixture(autouse=True, scope="session")
def one_thread_per_kernel():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def moved(monkeypatch):
    """Bytes that each OFFLOAD moves, of storages of any size."""
    found, plain = [], parcels.Parcel.offload

    def offload(parcel, op):
        plain(parcel, op)
        found.append(sum(kept.size for kept in parcel._moved))

    monkeypatch.setattr(parcels, "SMALL", 1)
    monkeypatch.setattr(parcels.Parcel, "offload", offload)
    return found


@pytest.fixture
def default(request):
    """Models of zbc's own have parameters of this type, by default of double precision."""
    before, chosen = torch.get_default_dtype(), getattr(request, "param", torch.float64)
    torch.set_default_dtype(chosen)
    yield chosen
    torch.set_default_dtype(before)
