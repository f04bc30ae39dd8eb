"""`train.hook`: a user's function that every rank calls after each step, and that may end the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from zbc.job import userobject
from zbc.runtime.core.progress import StepResult
from zbc.runtime.core.state import Worker
from zbc.training.guest import Guest
from zbc.training.launch.board import Board

KEY = "train.hook"


class Step(NamedTuple):
    """A completed step, as passed to a hook. All but `rank`, `seconds` and `layers` is the same on all ranks."""

    number: int  # from 1
    loss: float
    grad_norm: float  # before clipping
    skipped: bool  # gradients were not finite: no weight changed
    rank: int  # of the run
    ranks: int
    seconds: float
    eval_loss: float | None  # of the newest evaluation
    eval_metric: float | None  # likewise, of the function that checkpoint.keep_best names
    layers: Mapping[str, nn.Module]  # this rank's, by name


class Hook(Guest):
    """Calls the hook on every rank. If it returns True on any, the next step becomes the last one of the run."""

    def __init__(self, name: str, worker: Worker, board: Board) -> None:
        self._name, self._worker, self._board = name, worker, board
        self._call, self._asked = userobject.load(name, KEY), False
        self._layers = {layer.name: layer.module for stage in worker.stages.values() for layer in stage.layers}

    def told(self, result: StepResult) -> None:
        rank, ranks = self._worker.rank, self._worker.topology.world
        whole = result.step + 1, result.loss, result.grad_norm, result.skipped
        evaluated = getattr(self._worker.evaluation, "results", None)
        loss, metric = (evaluated[-1].loss, evaluated[-1].metric) if evaluated else (None, None)
        step = Step(*whole, rank, ranks, result.seconds, loss, metric, self._layers)
        if userobject.call(lambda: self._call(step), {}, self._name, KEY) and not self._asked:
            self._board.ask_stop(f"{KEY} = {self._name} of rank {rank}")
            self._asked = True

    def asks(self) -> bool:
        return self._asked
