"""CSV files of torch.distributed.pipelining in the form it calls compute_comms: with the transfers, as zbc proved them.

A row per rank, with the actions of compute_only (torch_csv.py) and those that torch would otherwise add itself:

    1RECV_F0,1F0,1SEND_F0       post the buffer of stage 1 for microbatch 0, compute, start to send the result
    1RECV_B0,1B0,1SEND_B0       the same for gradients
    1REDUCE_GRAD                after the last backward of a stage: torch divides its gradients by the microbatches

torch's runtime posts at RECV and waits when the tensor is used, as zbc's does, so the order of messages is the plan's:
receives posted ahead, FIFO in each direction. Modules in FSDP, which need UNSHARD and RESHARD too, are not supported.

From 2.15 on torch needs explicit waits for asynchronous actions, in cells that older versions misread:

    1WAIT_SEND_F0               after the backward of stage 1 for microbatch 0, when the output has been used
    1WAIT_SEND_B0               at the end of the row, when no rank can wait for this one
    1WAIT_REDUCE_GRAD           right after 1REDUCE_GRAD
"""

from __future__ import annotations

from collections.abc import Iterator

from zbc.interop import torch_csv
from zbc.ir import Op, Program, groups
from zbc.ops import At

DIALECTS = {"compute_comms": False, "compute_comms-2.15": True}  # whether the dialect has waits


def dumps(program: Program, dialect: str = "compute_comms") -> str:
    """A complete program as CSV text. Raises E413 for a program that torch cannot express."""
    torch_csv.refuse(program)
    return torch_csv.as_text(_row(ops, waits=DIALECTS[dialect]) for ops in program.ranks)


def _row(ops: tuple[Op, ...], *, waits: bool) -> Iterator[str]:
    last = {op.stage: step for step, op in enumerate(ops) if op.kind.makes_part}
    ends = {step: stage for stage, step in last.items()}
    grouped = groups(ops)
    sent: dict[tuple[At | None, int, int], str] = {}  # started sends without a wait so far
    for step, op in enumerate(ops):
        if op.kind.is_mark:
            yield from torch_csv.paired(ops[step + 1], ops[step + 2])
        elif op.kind.is_transfer:
            yield f"{op.stage}{op.kind.value}{op.mb}"
            if waits and op.kind.is_send:
                sent[op.kind.takes, op.stage, op.mb] = f"{op.stage}WAIT_{op.kind.value}{op.mb}"
        elif op.kind.computes and step not in grouped:
            yield torch_csv.action(op)
        if op.kind.is_backward and (wait := sent.pop((At.SINKS, op.stage, op.mb), None)):
            yield wait
        if step in ends:
            yield f"{ends[step]}REDUCE_GRAD"
            if waits:
                yield f"{ends[step]}WAIT_REDUCE_GRAD"
    yield from sent.values()
