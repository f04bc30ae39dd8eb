"""The rig on fake tensors: the bytes of layers without a device, and without their numbers.

Shapes, types, views, saved tensors and autograd graphs are those of a run, since its own code runs under torch's
FakeTensorMode; nothing is computed and no memory is taken. What code would read off a tensor is answered: losses and
norms are 1, and experts have even loads, times `model.imbalance` on a rank that shares them with others.

Fake tensors are of the CPU: those of a GPU need a torch built with CUDA. `GPU` has what its kernels save otherwise.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from zbc.errors import ZbcError
from zbc.job.profile import LayerProfile, Origin, Profile, about, order_of
from zbc.job.spec import Job
from zbc.job.userobject import FAILURES
from zbc.runtime.core.grouped import Loads
from zbc.runtime.core.private import NUMBERLESS, FakeTensor, FakeTensorMode, grouped_kernel, load_fakes, pytree, reader
from zbc.runtime.features.slices.slicing import last_rows
from zbc.topology import INNER
from zbc.training import frames
from zbc.training.profiling import words
from zbc.training.profiling.kernels import FP8, MOVED, PRODUCT, Kernels, count
from zbc.training.profiling.rig import Rig, build_rig
from zbc.training.profiling.weigh import parts

CPU = torch.device("cpu")


def profile(job: Job) -> Profile:
    """The profile of a job: bytes, kernels and collectives of its layers, without times. Raises as `profiles`."""
    return profiles(job.with_vocabulary("ends"))[0]


def profiles(job: Job, policy: str = "keep", cuts: Sequence[int] = ()) -> list[Profile]:
    """The same under a `policy` for activations: "keep", or "selective" as memory.attention says; for each slice of a
    microbatch that is cut at `cuts`. Where ranks share the vocabulary, of the rest of its layers; with the policy
    "words" of a rank's share of it; with "ends" of the first and the last layer alone.

    Raises E110 for a graph of layers, E505 for layers that need numbers to run, E5xx as training."""
    run = job.parallel.topology
    axes = {run.sharing(0): "ep", **{run.beside(axis.name, 0): axis.name for axis in INNER}}  # of groups within ops
    kernels = Kernels(job.hardware.device, axes)
    on = Origin(source="dry", device=job.hardware.device, torch=torch.__version__)
    made: dict[str, Any] = {"on": on, **about(job)}
    if policy == "words":
        with fakes(job):
            return [Profile(**made, layers={}, order=[], shared=words.weighed(_rig(job), kernels))]
    rig, found = weighed(job, kernels, policy, cuts)
    stages = rig.plain().kinds

    def layer(kind: str, part: int) -> LayerProfile:
        stage = stages.index(kind)
        done = {name: kernels.kernels((stage, part, name)) for name in ("f", "b", "w", "bw")}
        done["again"] = kernels.kernels((stage, part, "again"), less=(stage, part, "bw"))
        if job.model.dtype == "fp8" and kind not in ("embed", "head"):
            done = {name: [(FP8 if k[0] == PRODUCT else k[0], *k[1:]) for k in each] for name, each in done.items()}
        joined = {name: kernels.collectives.get((stage, part, name)) for name in ("f", "b", "w", "bw")}
        both: dict[str, dict[str, Any]] = {"kernels": done, "collectives": joined}
        more = {what: {name: each for name, each in of.items() if each} for what, of in both.items()}
        return found[part][kind].model_copy(update=more)

    kinds, made["order"] = [*dict.fromkeys(rig.order)], order_of(rig.order)
    return [Profile(**made, layers={kind: layer(kind, part) for kind in kinds}) for part in range(len(found))]


def weighed(
    job: Job, kernels: Kernels | None = None, policy: str = "keep", cuts: Sequence[int] = ()
) -> tuple[Rig, list[dict[str, LayerProfile]]]:
    """The rig of a job, and for each slice the bytes of each kind of layer. Raises as `profiles`."""
    try:
        with fakes(job):
            rig = _rig(job, policy)
            return rig, parts(rig, CPU, kernels, cuts)
    except FAILURES as error:
        causes: list[BaseException] = [error]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        if not any(isinstance(cause, NUMBERLESS) for cause in causes):
            if isinstance(error, ZbcError) or not frames.of_users(error):
                raise
            raise frames.failure(error, "profile: a layer, the loss or the data of the job failed") from error
        text = "profile: a layer, or the loss, cannot run without numbers"
        hint = "measure it on its device: `zbc profile JOB.toml -o FILE`, without --dry"
        who = [error.message] if isinstance(error, ZbcError) else list(getattr(error, "__notes__", []))
        raise ZbcError("E505", text, hint=hint, details=[*who, *frames.raised(causes[-1])]) from error


def _rig(job: Job, policy: str = "keep") -> Rig:
    plain = {"dtype": "bfloat16"} if job.model.dtype == "fp8" else {}  # nothing multiplies in it: kernels are renamed
    job, ends = replace(job, model=job.model.model_copy(update=plain)), policy == "ends"
    rig = build_rig(job, CPU, "keep" if ends else policy, apart=bool(job.vocabulary))
    return rig.of(("embed", "head")) if ends else rig


@contextmanager
def fakes(job: Job) -> Iterator[None]:
    """Tensors that are made in it are fake, of the device of a job."""

    def even(rows: int, sizes: list[int]) -> list[list[int]]:
        got = math.ceil(rows * job.model.imbalance)
        each = zip((rows, *len(sizes) * [got]), sizes, strict=False)
        return [[total // parts + (i < total % parts) for i in range(parts)] for total, parts in each]

    load_fakes()
    before, Loads.answer = Loads.answer, even
    gc.disable()  # nothing of it is in cycles, and fake tensors are many objects: a quarter of the time
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), Answers(GPU if job.hardware.device == "cuda" else {}):
            yield
    finally:
        gc.enable()
        Loads.answer = before


class Answers(TorchFunctionMode):
    """Functions that a fake tensor cannot compute, or computes otherwise on its device."""

    def __init__(self, more: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._rows: dict[Any, Callable[..., Any]] = {**ANSWERS, **more}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        row = self._rows.get(func) if args and isinstance(args[0], FakeTensor) else None  # data are real
        if row is None or (func in READS and not _ends_step(reader(__name__))):
            return func(*args, **(kwargs or {}))
        return row(*args, **(kwargs or {}))


def _ends_step(module: str) -> bool:
    return module.startswith(_ENDS) and (module == _OF_LOSS or not module.startswith(_INSIDE))


def _grouped(a: Tensor, b: Tensor, *, offs: Tensor, **_: Any) -> Tensor:
    """The result of a grouped product, of any type."""
    groups = (len(offs),) if a.dim() == b.dim() == 2 else ()
    made = a.new_empty(*groups, a.shape[0], b.shape[-1])
    count(PRODUCT, 2 * math.prod(a.shape) * b.shape[-1], a, b, made)
    return made


def _copied(x: Tensor, memo: dict[int, Any]) -> Tensor:
    """A deep copy; torch's own looks at addresses."""
    made = x.detach().clone()
    memo[id(x)] = made = nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made
    return made


# Losses, norms and the like that end a step. Inside of layers shapes may depend on what is read.
READS: dict[Any, Callable[..., Any]] = {
    Tensor.item: lambda x: 1.0 if x.is_floating_point() else 1,
    Tensor.__float__: lambda x: 1.0,
    Tensor.__int__: lambda x: 1,
    Tensor.__bool__: lambda x: True,
    torch.equal: lambda x, y: True,  # a layer in slices beside it in one
}
_ENDS, _INSIDE, _OF_LOSS = ("zbc.", "torch.optim."), "zbc.runtime.features.", "zbc.runtime.features.slices.slicing"

ANSWERS: dict[Any, Callable[..., Any]] = {
    **READS,
    Tensor.__deepcopy__: _copied,
    grouped_kernel: _grouped,  # the kernel's own rule of shapes takes bfloat16 alone
}


class _RmsNorm(torch.autograd.Function):
    """One kernel, which saves its input and a number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        rows = x.new_empty((*x.shape[:-dims], *dims * [1]), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        count(MOVED, 0, x, x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        count(MOVED, 0, *needs[0] * (x, x, x))
        count(MOVED, 0, *needs[1] * (x, x))
        return *(torch.empty_like(t) if need else None for t, need in zip((x, weight), needs, strict=True)), None


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if weight is not None and weight.dtype is not input.dtype:  # torch has no kernel for two types
        return functional.rms_norm(input, normalized_shape, weight, eps)
    found: Tensor = _RmsNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return found


def _wide(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function under a GPU's autocast, which runs it in float32."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map(_widened, (args, kwargs))
        with torch.autocast("cpu", enabled=False):
            return func(*args, **kwargs)

    return run


def _widened(value: Any) -> Any:
    low = isinstance(value, Tensor) and value.is_floating_point() and value.itemsize < 4
    return value.float() if low else value


# Of those that torch's autocast runs in float32 on a GPU alone.
WIDE = (functional.layer_norm, functional.softmax, torch.softmax, Tensor.softmax, functional.log_softmax, Tensor.pow)
# On a GPU. RMSNorm is one kernel that saves a number per row, as torch declares it (not measured). The runtime's own
# choices there: products add to sums of gradients, and an optimizer steps in one kernel.
GPU: dict[Any, Callable[..., Any]] = {
    **{func: _wide(func) for func in WIDE},
    functional.rms_norm: _wide(_rms_norm),
    last_rows: lambda q, k, v: functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=k.shape[-3] < q.shape[-3]
    ),
    Tensor.is_cuda.__get__: lambda x: True,  # type: ignore[attr-defined]
}
