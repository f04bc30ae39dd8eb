"""The number of hardware queues for the streams of a GPU; the driver reads it when a process first uses the GPU."""

from __future__ import annotations

import os
from pathlib import Path

from zbc.errors import ZbcError
from zbc.plan.directory import Manifest, read_ramp

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_MOST = "32"  # the maximum; without the variable it is 8, less than a rank may have streams


def set_queues(folder: Path, manifest: Manifest) -> None:
    """Sets a queue for every stream, unless the user set it otherwise. Raises E603 if that is one, and the plan may
    deadlock with it; see zbc/compiler/check/device.py.
    """
    if os.environ.setdefault(VARIABLE, _MOST) != "1":
        return
    phases = [manifest, *(its for _, its in read_ramp(folder, manifest))]
    if not all(phase.predicted.get("survives_one_queue", False) for phase in phases):
        text = (
            f"run: {VARIABLE} is 1: all streams of a GPU then share one queue, and ranks of this plan may wait forever"
        )
        raise ZbcError("E603", text, hint=f"unset {VARIABLE}, or set it to {_MOST}")
