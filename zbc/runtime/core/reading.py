"""Reading the data of a microbatch or a slice, for ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor

from zbc.errors import ZbcError
from zbc.runtime.core.tensors import to_device
from zbc.runtime.features.slicing import Part, share_of

if TYPE_CHECKING:
    from zbc.runtime.core.state import BatchSource, Worker


def read(
    worker: Worker,
    batches: BatchSource | None,
    kind: Literal["inputs", "targets"],
    number: int,
    part: Part | None,
    group: str = "",
) -> tuple[Tensor, float]:
    """The inputs or targets of a microbatch, or of a slice of it, on the rank's device; and the slice's share in the
    loss. `group` selects the inputs of a group of layers if there are several. Each microbatch is looked up once, for
    all its slices. Raises E505 for sequences of another length."""
    if batches is None:
        raise ZbcError("E703", "run: this rank reads no data, and its plan asks for some")
    look_up = batches.inputs if kind == "inputs" else batches.targets
    if part is None:
        x = batches.inputs(worker.step, number, group) if group else look_up(worker.step, number)
        return x if worker.on_host else to_device(x, worker.device), 1.0
    at = (kind, worker.step, number)
    whole = worker.reading.pop(at, None)
    if whole is None:
        whole = look_up(worker.step, number)
        if whole.dim() > 1 and whole.shape[1] != part.length:
            text = f"run: {kind} have {whole.shape[1]} tokens, the slices of the plan are cut from {part.length}"
            hint = "samples of one length, for evaluation too: model.seq_len; or schedule.slices = 1"
            raise ZbcError("E505", text, hint=hint)
    if not part.last:
        worker.reading[at] = whole
    share = share_of(whole, part) if kind == "targets" else 1.0
    return to_device(part.of(whole).contiguous(), worker.device), share
