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
    sizes = [float(line) / 1024 for line in said.split("\n") if line.strip().isdecimal()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return sizes
    named = [name.strip() for name in visible.split(",") if name.strip()]
    chosen = [int(name) for name in named if name.isdecimal()]
    if len(chosen) < len(named):
        return sizes[: len(named)]
    return [sizes[index] for index in chosen if index < len(sizes)]
