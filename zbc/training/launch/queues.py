"""How many hardware queues the streams of a GPU have; the driver reads it when a process first uses the GPU."""

from __future__ import annotations

import os
from pathlib import Path

from zbc.errors import ZbcError
from zbc.plan.directory import Manifest, read_ramp

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_MOST = "32"  # that there are; without the variable 8, which a rank's streams may exceed


def set_queues(folder: Path, manifest: Manifest) -> None:
    """Have a queue for every stream, unless the user says otherwise. Raises E618 where one is not enough for the plan.

    See zbc/compiler/check/device.py for what a plan does with a single one.
    """
    if os.environ.setdefault(VARIABLE, _MOST) != "1":
        return
    phases = [manifest, *(its for _, its in read_ramp(folder, manifest))]
    if not all(phase.predicted.get("survives_one_queue", False) for phase in phases):
        text = (
            f"run: {VARIABLE} is 1: all streams of a GPU then share one queue, and ranks of this plan may wait forever"
        )
        raise ZbcError("E618", text, hint=f"unset {VARIABLE}, or set it to {_MOST}")
