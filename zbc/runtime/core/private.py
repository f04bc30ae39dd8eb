"""What zbc uses of torch that torch does not document, in one place. All of it is in torch 2.13.

What is only faster than the public way is left out where torch has it no more. Gains were measured on a CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode  # tensors of a device without memory there
from torch.autograd import graph
from torch.nn.modules.dropout import _DropoutNd as Dropouts  # the base of all dropout modules
from torch.utils._python_dispatch import TorchDispatchMode  # sees every op, whoever calls it
from torch.utils._pytree import tree_leaves  # what is in dicts, lists and tuples

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed has it too, without saying that it exports it

__all__ = ["Dropouts", "FakeTensorMode", "Store", "TorchDispatchMode", "tree_leaves"]

# ---- faster than the public way ------------------------------------------------------------------------------

# torch.autograd.backward without its look at shapes and types, which takes half as long as the walk of a small graph.
engine: Any = getattr(graph, "_engine_run_backward", None)
# functional.mse_loss without its warnings and its expansion, which take half as long as a small loss itself.
mse_kernel: Any = getattr(torch._C._nn, "mse_loss", None)
# What torch.no_grad calls, too, in four times the time.
set_grad_enabled: Callable[[bool], object] = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)


def scale_all(tensors: list[Tensor], scale: float) -> None:
    """Multiply all tensors in place, in one call."""
    torch._foreach_mul_(tensors, scale)


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target; on a GPU in a few launches for all."""
    if targets:
        torch._foreach_copy_(targets, sources)


def add_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Add each source to its target; on a GPU in a few launches for all."""
    if targets:
        torch._foreach_add_(targets, sources)


def go_on(tensors: list[Tensor], before: list[Tensor], times: float) -> None:
    """Add to each tensor so many times what it has gained since `before`."""
    torch._foreach_add_(tensors, torch._foreach_sub(tensors, before), alpha=times)


def norms_of(tensors: list[Tensor]) -> Tensor:
    """The 2-norm of each tensor, in float64; on a GPU in a few launches for all."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64))


# ---- what torch has no public way for ------------------------------------------------------------------------


def workspaces(device: torch.device) -> int:
    """Bytes that cuBLAS holds of torch's own memory on a GPU; they are let go, and made again when they are needed."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    before = torch.cuda.memory_allocated(device)
    if clear is not None:
        clear()
    return before - torch.cuda.memory_allocated(device)


_holders = getattr(torch._C, "_storage_Use_Count", None)
# Whether torch.vmap or another transform of torch.func runs; 35 ns.
transforming: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def users(storage: torch.UntypedStorage) -> int:
    """How many hold its memory: tensors, and the storage asked for itself, once; 0 where torch cannot tell."""
    return 0 if _holders is None else int(_holders(storage._cdata))


def shares_memory(tensor: Tensor) -> bool:
    """Whether anything but this tensor holds its memory; said of all where torch cannot tell."""
    storage = tensor.untyped_storage()
    return _holders is None or _holders(storage._cdata) > 2  # the tensor and the storage asked for to count


def unversioned(tensors: tuple[Tensor, ...]) -> AbstractContextManager[None]:
    """What is done to them in here does not count as a change to autograd, which may have saved them."""
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter

    return _unsafe_preserve_version_counter(tensors)


def flight_record() -> bytes:
    """NCCL's last operations, by the name that torch has for them; empty where it has none."""
    there: Any = torch._C._distributed_c10d
    dump: Any = getattr(there, "_dump_nccl_trace", None) or getattr(there, "_dump_fr_trace", bytes)
    return bytes(dump())


def symmetric(size: int, group: Any, ranks: int, device: torch.device) -> list[Tensor]:
    """Bytes of zeros on the GPU of each of `ranks` that all of a process group see. Has not run on GPUs."""
    import torch.distributed._symmetric_memory as memory

    mine = memory.empty(size, dtype=torch.uint8, device=device).zero_()
    torch.cuda.synchronize(device)
    handle = memory.rendezvous(mine, group)
    return [mine if rank == handle.rank else handle.get_buffer(rank, (size,), torch.uint8) for rank in range(ranks)]


# ---- torch.compile: a second or two to import, so only where something is compiled ----------------------------


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module is what torch.compile made of one."""
    from torch._dynamo import OptimizedModule

    return isinstance(module, OptimizedModule)


def compile_here(limit: int, total: int) -> None:
    """Let torch compile code `limit` times and all code `total` times, in this process alone.

    Workers beside every rank would outnumber the cores, and ranks do not end in a way that lets them go in peace; nor
    would a progress bar, for which torch has tqdm make a lock between processes.
    """
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
