"""A model and a dataset as a user would write them; one layer can be told to misbehave."""

import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zbc.trace.recording import Writer
from zbc.training.checkpoint import saving
from zbc.training.metrics.metrics import RunRecord


class Trouble(nn.Module):
    """A linear layer that fails after `good` forwards, in the way named `how`."""

    def __init__(self, how: str, good: int) -> None:
        super().__init__()
        self.linear, self.how, self.left = nn.Linear(8, 8), how, good
        self.eaten: list[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and type(x) is Tensor:  # not in evaluation, nor on fake tensors
            self.left -= 1
            if self.left < 0:
                self.misbehave()
        y = self.linear(x)
        return y * float("nan") if self.how == "nan" and self.left < 0 else y

    def misbehave(self) -> None:
        if self.how == "raise":
            raise ValueError("out of luck\nand out of time")
        if self.how == "exit":
            os._exit(3)
        if self.how == "leave":
            sys.exit("out of here")
        if self.how == "interrupt":
            raise KeyboardInterrupt
        if self.how == "eat":  # all that the process may have, which is next to nothing from here on
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 2**20, used + 2**20))
            while True:
                self.eaten.append([0] * 1000)
        if self.how == "hang":
            threading.Event().wait()


def layers(how: str = "", good: int = 0) -> list[nn.Module]:
    return [nn.Linear(8, 8), nn.Linear(8, 8), Trouble(how, good), nn.Linear(8, 8)]


def slow_layers(how: str = "", good: int = 0) -> list[nn.Module]:
    """The same, in a run whose rank 0 takes a second to log a skipped step, and whose disks take half a second for a
    file and a tenth for a line of a trace."""

    def late(seconds: Callable[..., float], then: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (time.sleep(seconds(*given)), then(*given))[1]

    RunRecord.record = late(lambda _, result: float(result.skipped), RunRecord.record)  # type: ignore[method-assign]
    saving.write_parts = late(lambda *_: 0.5, saving.write_parts)
    Writer.step = late(lambda *_: 0.1, Writer.step)  # type: ignore[method-assign]
    return layers(how, good)


class Vectors:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((8,), index / 64), torch.zeros(8)
