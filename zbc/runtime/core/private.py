"""Undocumented functions of torch that zbc uses. All of them are in torch 2.13.

Those that are only faster than a public function have it as a fallback. Gains were measured on a CPU.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # tensors of a device without its memory
from torch.autograd import graph
from torch.nn.modules.dropout import _DropoutNd as Dropouts  # the base of all dropout modules
from torch.utils import _pytree as pytree  # dicts, lists, tuples and registered types
from torch.utils._python_dispatch import TorchDispatchMode  # intercepts every op, also those called inside of others
from torch.utils._pytree import tree_leaves  # the elements of dicts, lists and tuples

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed has it too, but not in __all__

__all__ = ["Dropouts", "FakeTensor", "FakeTensorMode", "Store", "TorchDispatchMode", "pytree", "tree_leaves"]

# ---- faster than the public functions ------------------------------------------------------------------------

# torch.autograd.backward without its checks of shapes and types, half the time of the backward of a small graph.
engine: Any = getattr(graph, "_engine_run_backward", None)
# functional.mse_loss without its warnings and its expansion, half the time of a small loss.
mse_kernel: Any = getattr(torch._C._nn, "mse_loss", None)
# torch.no_grad calls it, too, in four times the time.
set_grad_enabled: Callable[[bool], object] = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)


def scale_all(tensors: list[Tensor], scale: float) -> None:
    """Multiplies all tensors in place, in one call."""
    torch._foreach_mul_(tensors, scale)


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies each source into its target; on a GPU in a few launches for all."""
    if targets:
        torch._foreach_copy_(targets, sources)


def add_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Adds each source to its target; on a GPU in a few launches for all."""
    if targets:
        torch._foreach_add_(targets, sources)


def go_on(tensors: list[Tensor], before: list[Tensor], times: float) -> None:
    """Adds `times` its change since `before` to each tensor, in place."""
    torch._foreach_add_(tensors, torch._foreach_sub(tensors, before), alpha=times)


def norms_of(tensors: list[Tensor]) -> Tensor:
    """The 2-norm of each tensor, in float64; on a GPU in a few launches for all."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64))


# ---- without a public function in torch ----------------------------------------------------------------------


def workspaces(device: torch.device) -> int:
    """Frees the cuBLAS workspaces in torch's memory pool on a GPU, made again on demand; returns their bytes."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    before = torch.cuda.memory_allocated(device)
    if clear is not None:
        clear()
    return before - torch.cuda.memory_allocated(device)


_holders = getattr(torch._C, "_storage_Use_Count", None)
# Whether torch.vmap or another transform of torch.func runs; 35 ns.
transforming: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def users(storage: torch.UntypedStorage) -> int:
    """Reference count of a storage: tensors, and the storage object passed in; 0 if torch cannot tell."""
    return 0 if _holders is None else int(_holders(storage._cdata))


def shares_memory(tensor: Tensor) -> bool:
    """Whether another tensor shares this one's storage; True if torch cannot tell."""
    storage = tensor.untyped_storage()
    return _holders is None or _holders(storage._cdata) > 2  # the tensor and `storage` itself


def valued(tensor: Tensor) -> bool:
    """Whether a tensor has numbers: not on the meta device, nor a fake one."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


# What torch asks of every fake tensor that an op takes or makes: its device. Answered, other modes need not see it.
DEVICE: Any = torch.ops.prim.device.default
# Raised by ops on fake tensors that need numbers, or have no rule for shapes alone.
NUMBERLESS: tuple[type[Exception], ...] = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)
grouped_kernel: Any = getattr(torch, "_grouped_mm", None)  # what functional.grouped_mm calls
_FAKE: Any = getattr(getattr(torch._C, "_TorchDispatchModeKey", None), "FAKE", None)


def load_fakes() -> None:
    """Imports what the first op on fake tensors would import, which fails inside of a kernel; 1.3 s."""
    import torch._dynamo

    torch._subclasses.fake_tensor.log.disabled = True  # it prints the stack of an op that fails, and so does its error


def flop_rules() -> dict[Any, Callable[..., int]]:
    """By op, a function that counts its operations."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def reader(within: str) -> str:
    """The module that reads a number of a fake tensor, called from the module `within`. Its `tolist` reads each."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"] in (within, fake_tensor.__name__):
        frame = frame.f_back
    return str(frame.f_globals["__name__"])


def fake_mode() -> object:
    """The mode that makes new tensors fake, if one does; .1 us."""
    return None if _FAKE is None else torch._C._get_dispatch_mode(_FAKE)


@contextmanager
def real_tensors() -> Iterator[None]:
    """New tensors are not fake in it: of data, whose makers look at numbers."""
    mode = None if fake_mode() is None else torch._C._unset_dispatch_mode(_FAKE)
    try:
        yield
    finally:
        if mode is not None:
            torch._C._set_dispatch_mode(mode)


def unversioned(tensors: tuple[Tensor, ...]) -> AbstractContextManager[None]:
    """In-place changes of `tensors` in its body do not count for autograd, which may have saved them."""
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter

    return _unsafe_preserve_version_counter(tensors)


def flight_record() -> bytes:
    """The flight recorder's dump of NCCL's last operations; empty if this torch has none."""
    there: Any = torch._C._distributed_c10d
    dump: Any = getattr(there, "_dump_nccl_trace", None) or getattr(there, "_dump_fr_trace", bytes)
    return bytes(dump())


def symmetric(size: int, group: Any, ranks: int, device: torch.device) -> list[Tensor]:
    """`size` zero bytes on the GPU of each of `ranks`, mapped by all of a process group. Has not run on GPUs."""
    import torch.distributed._symmetric_memory as memory

    local = memory.empty(size, dtype=torch.uint8, device=device).zero_()
    torch.cuda.synchronize(device)
    handle = memory.rendezvous(local, group)
    return [local if rank == handle.rank else handle.get_buffer(rank, (size,), torch.uint8) for rank in range(ranks)]


# ---- torch.compile: takes 1 or 2 s to import, so it is imported only if something is compiled -----------------


def compile_here(limit: int, total: int) -> None:
    """Lets torch compile each function `limit` times, `total` times in all, without compile workers. Worker processes
    of every rank would outnumber the cores, and ranks exit without joining them; the same holds for a progress bar, for
    which torch has tqdm make a lock between processes."""
    import torch._dynamo
    import torch._inductor.config
    import torch.hub

    bars: Any = getattr(torch.hub, "tqdm", None)
    if hasattr(bars, "set_lock"):
        bars.set_lock(threading.RLock())
    inductor: Any = torch._inductor.config
    inductor.compile_threads = 1
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, limit)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, total)
