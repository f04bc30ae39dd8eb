"""CSV files of torch.distributed.pipelining in the form it calls compute_comms: with the transfers, as zbc proved them.

A row per rank, and beside the actions of compute_only (torch_csv.py) those that torch would have worked out itself:

    1RECV_F0,1F0,1SEND_F0       post the buffer of stage 1 for microbatch 0, compute, start to send the result
    1RECV_B0,1B0,1SEND_B0       the same for gradients
    1REDUCE_GRAD                after the last backward of a stage: torch divides its gradients by the microbatches

torch's runtime posts at RECV and waits where the tensor is used, as zbc's does, so the order of messages is the one of
the plan: receives posted ahead, FIFO in each direction. Modules in FSDP, which need UNSHARD and RESHARD too, are not
meant.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from zbc.interop import torch_csv
from zbc.ir import Op, Program, groups


def dumps(program: Program) -> str:
    """A complete program as CSV text. Raises E413 for what torch cannot express."""
    torch_csv.refuse(program)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for ops in program.ranks:
        writer.writerow(_row(ops))
    return out.getvalue()


def _row(ops: tuple[Op, ...]) -> Iterator[str]:
    last = {op.stage: step for step, op in enumerate(ops) if op.kind.makes_part}
    ends = {step: stage for stage, step in last.items()}
    grouped = groups(ops)
    for step, op in enumerate(ops):
        if op.kind.is_mark:
            yield f"({torch_csv.action(ops[step + 1])};{torch_csv.action(ops[step + 2])})OVERLAP_F_B"
        elif op.kind.is_transfer:
            yield f"{op.stage}{op.kind.value}{op.mb}"
        elif op.kind.computes and step not in grouped:
            yield torch_csv.action(op)
        if step in ends:
            yield f"{ends[step]}REDUCE_GRAD"
