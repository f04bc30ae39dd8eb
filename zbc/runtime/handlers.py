"""The handler of each op: ops of the pipeline (core/ops.py), and ops of features."""

from __future__ import annotations

from collections.abc import Callable

from zbc.ir import Kind, Op
from zbc.runtime.core.ops import backward, backward_weight, forward, optimizer_step, receive, reduce, send, validate
from zbc.runtime.core.state import Worker
from zbc.runtime.features.ahead import AHEAD
from zbc.runtime.features.averaging import average
from zbc.runtime.features.groups.units import overlap
from zbc.runtime.features.offload.offload import OFFLOAD
from zbc.runtime.features.shards.gathers import GATHERS
from zbc.runtime.features.words.vocabulary_state import VOCABULARY

HANDLERS: dict[Kind, Callable[[Worker, Op], None]] = {
    Kind.F: forward,
    Kind.B: backward,
    Kind.W: backward_weight,
    Kind.BW: backward,
    Kind.SEND_F: send,
    Kind.RECV_F: receive,
    Kind.SEND_B: send,
    Kind.RECV_B: receive,
    Kind.REDUCE: reduce,
    Kind.VALIDATE: validate,
    Kind.STEP: optimizer_step,
    Kind.OVERLAP: overlap,
    Kind.AVERAGE: average,
    **AHEAD,
    **GATHERS,
    **OFFLOAD,
    **VOCABULARY,
}
