"""The GPUs of this machine, without loading torch."""

from __future__ import annotations

import os
import subprocess


def gpus() -> list[float]:
    """GiB of each GPU that this process may use, by nvidia-smi; [] without that program."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = [float(line) / 1024 for line in said.split("\n") if line.strip().isdecimal()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    named = [one.strip() for one in visible.split(",") if one.strip()]
    chosen = [int(one) for one in named if one.isdecimal()]
    return (
        [found[index] for index in chosen if index < len(found)] if len(chosen) == len(named) else found[: len(named)]
    )
