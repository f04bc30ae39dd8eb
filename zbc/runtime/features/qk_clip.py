"""Clip of attention scores (QK-clip of MuonClip, arXiv 2507.20534, section 2.1).

    F       reports the largest score S of each head, before the softmax (slicing.py)
    REDUCE  starts an all-gather of a stage's S over all ranks that sum its gradients; their maximum is the step's
    STEP    multiplies, after the update, queries and keys so that q k of each head comes times min(1, tau / S)

Keys are multiplied by the square root of the smallest factor of the heads that share them, queries by the rest of their
own factor; biases as well. A rank multiplies what its optimizer updates: weights, masters, or its pieces of either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from zbc.ir import Op
from zbc.ops import MAKER
from zbc.plan.directory import meeting
from zbc.runtime.core.feature import Context, Feature
from zbc.runtime.core.optimizer import Held, StageOptimizer
from zbc.runtime.core.stage import Stage
from zbc.runtime.core.state import Worker
from zbc.runtime.features.added import Added
from zbc.runtime.transports.transport import Pending


@runtime_checkable
class Attends(Protocol):
    """A block whose `qkv` has the rows of all queries, keys and values, of heads of `size`; `limits` of attention."""

    heads: int
    kv_heads: int
    size: int
    limits: dict[str, Any]


class Attending(NamedTuple):
    """A block by its number, and what this rank updates of its `qkv`."""

    number: int
    block: Attends
    updated: Sequence[Held]

    def clip(self, peaks: Tensor, tau: float) -> None:
        """Scales rows by the largest scores (heads,)."""
        factors = torch.where((peaks > tau) & peaks.isfinite(), tau / peaks, 1.0).view(self.block.kv_heads, -1)
        keys = factors.amin(1).sqrt()
        queries = (factors / keys[:, None]).flatten()
        rows = torch.cat((queries, keys, torch.ones_like(keys))).repeat_interleave(self.block.size)
        for held in self.updated:
            if held.tensor.grad is None:  # not in this update
                continue
            width = held.shape[1] if len(held.shape) > 1 else 1
            first, skipped = divmod(held.start, width)
            whole = rows[first : -(-(held.start + held.tensor.numel()) // width)].repeat_interleave(width)
            own = whole[skipped : skipped + held.tensor.numel()].view(held.tensor.shape)
            held.tensor.data.mul_(own)


class Clipped:
    """A stage's blocks, the `ranks` that sum its gradients, and the largest scores of the step."""

    def __init__(self, tau: float, blocks: Sequence[Attending], ranks: tuple[int, ...]) -> None:
        self._tau, self._blocks, self._ranks = tau, blocks, ranks
        self.coming: tuple[Pending, Tensor] | None = None
        self._peaks: Sequence[Tensor] = ()  # of each block

    def gather(self, worker: Worker, told: Sequence[Mapping[int, Tensor]]) -> None:
        """Starts the all-gather of what this rank's forwards reported."""
        found = [[peaks[one.number] for peaks in told if one.number in peaks] for one in self._blocks]
        zeros = (torch.zeros(one.block.heads, device=worker.device) for one in self._blocks)
        mine = torch.cat([torch.stack([zero, *own]).amax(0) for zero, own in zip(zeros, found, strict=True)])
        parts = mine.new_empty(len(self._ranks), len(mine))
        self.coming = worker.transport.start_gather(mine, parts, self._ranks), parts

    def finish(self, worker: Worker) -> None:
        if self.coming is not None:
            (pending, parts), self.coming = self.coming, None
            worker.wait_for("the largest scores", pending)
            self._peaks = torch.split(parts.amax(0), [one.block.heads for one in self._blocks])

    @torch.no_grad()
    def after(self, *_: Any) -> None:
        """Called after each update of the optimizer."""
        for one, peaks in zip(self._blocks, self._peaks, strict=False):  # none before the first step
            one.clip(peaks, self._tau)


class Clip(Feature):
    def __init__(self, stages: Mapping[int, Clipped]) -> None:
        self._stages = stages

    def reduces(self, worker: Worker, op: Op) -> None:
        if op.kind.sums:
            self._begin(worker, op.stage)

    def _begin(self, worker: Worker, stage: int) -> None:
        if stage in self._stages and self._stages[stage].coming is None:
            told = worker.features.of(Added).peaks
            self._stages[stage].gather(worker, [told.pop(key) for key in list(told) if key.stage == stage])

    def settles(self, worker: Worker, stages: Sequence[int]) -> None:
        for stage in self._stages.keys() & {*stages}:
            self._begin(worker, stage)
            self._stages[stage].finish(worker)


def _attending(stage: Stage, optimizer: StageOptimizer) -> Iterable[Attending]:
    """The blocks of a stage, which report their scores from now on."""
    held = [one for one in optimizer.held() if one.tensor.requires_grad]
    for layer in stage.layers:
        block: object = layer.module
        if isinstance(block, Attends):
            number = int(layer.name.rpartition(".")[2])
            block.limits["block"] = number
            names = {f"{layer.name}.qkv.weight", f"{layer.name}.qkv.bias"}
            yield Attending(number, block, [one for one in held if one.name in names])


def build(context: Context) -> Clip | None:
    tau = context.manifest.training["optimizer"].get("qk_clip")
    if tau is None:
        return None
    found = dict[int, Clipped]()
    for s, stage in context.stages.items():
        blocks, optimizer = [*_attending(stage, context.optimizers[s])], context.optimizers[s].optimizer
        if blocks and optimizer is not None:
            found[s] = Clipped(tau, blocks, meeting(context.manifest, Op(MAKER["total"], s), context.rank))
            optimizer.register_step_post_hook(found[s].after)
    return Clip(found)
