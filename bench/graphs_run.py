"""Two towers and what joins them, as a graph of stages and as a chain of the same layers, on four ranks as processes.

    python bench/graphs_run.py [--steps N] [--quick]

Both forms of a model of plans/graphs.py train over gloo, with two layers in each tower and four behind them. As a chain
the layers of one tower pass on what the other one needs. What one machine can compute is not measured: each op is made
to take `MS` for a layer's F, B or W from when it has its inputs; all messages are real. The step beside the predicted
one, and what the graph gains, predicted and measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from ranks import results
from record import Record
from vocabulary_run import rank_main

import zbc
from plans.graphs import PATCH, Block, Captions, Join, Verdict, towers
from zbc.ir import Kind
from zbc.plan.directory import StoredPlan

RANKS, MS = 4, 10.0
COUNTS = {"vision": 2, "text": 2, "decoder": 4}
CASES = (("1f1b", 4), ("1f1b", 8), ("zb-h1", 4), ("zb-h1", 8))


class First(nn.Module):
    """What comes in one row: the picture goes through the layer, the words are passed on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, row: Tensor) -> tuple[Tensor, Tensor]:
        words = row.shape[1] - 3
        return self.layer(row[:, :words].unflatten(1, (-1, PATCH))), row[:, words:]


class One(nn.Module):
    """A layer of one tower, which passes the other one's on."""

    def __init__(self, place: int, layer: nn.Module) -> None:
        super().__init__()
        self.place, self.layer = place, layer

    def forward(self, picture: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        if self.place == 0:
            return self.layer(picture), words
        return picture, self.layer(words if words.dim() == 3 else words.long())


def chain(width: int = 32) -> list[Callable[[], nn.Module]]:
    """The same layers in a row."""
    return [
        lambda: First(nn.Linear(PATCH, width)),
        lambda: One(0, Block(width)),
        lambda: One(1, nn.Embedding(16, width)),
        lambda: One(1, Block(width)),
        partial(Join, width),
        partial(Block, width),
        partial(Block, width),
        partial(Verdict, width),
    ]


def graph() -> dict[str, list[Callable[[], nn.Module]]]:
    return towers(**COUNTS)


class Rows(Captions):
    """Picture and words in one row, for a chain has one input."""

    def __getitem__(self, index: int) -> Any:
        both, target = super().__getitem__(index)
        return torch.cat([both["vision"].flatten(), both["text"].float()]), target


def plan_of(form: str, kind: str, microbatches: int, folder: Path) -> tuple[StoredPlan, float, dict[Any, float]]:
    """A plan with these times, its predicted step, and ms by kind and stage."""
    named = 'graph = { vision = [], text = [], decoder = ["vision", "text"] }\n'
    named += f"groups = {{ {', '.join(f'{name} = {count}' for name, count in COUNTS.items())} }}\n"
    text = f"""
[model]
family = "graphs_run:{form}"
layers = {sum(COUNTS.values())}
loss = "cross_entropy"
{named if form == "graph" else ""}
[parallel]
pp = {RANKS}
[schedule]
kind = "{kind}"
microbatches = {microbatches}
microbatch_size = 4
[costs]
per = "layer"
f = {MS}
b = {MS}
w = {MS}
comm = 0.0
[data]
kind = "graphs_run:{"Captions" if form == "graph" else "Rows"}"
"""
    path = folder / f"{form}.toml"
    path.write_text(text)
    made = zbc.plan(zbc.load(path))
    made.write(folder / "plan")
    stored, ms = StoredPlan.read(folder / "plan"), {}
    for stage, names in enumerate(stored.manifest.layers):
        one = MS * len(names)
        ms |= {(Kind.F, stage): one, (Kind.B, stage): one, (Kind.W, stage): one, (Kind.BW, stage): 2 * one}
    return stored, made.simulate().makespan, ms


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="two steps, and write no file")
    given = parser.parse_args()
    record = Record("graphs-run")
    record(f"# layers of {MS} + {MS} + {MS} ms: {COUNTS}; a graph beside the chain of its layers, {RANKS} ranks")
    record("schedule    m     chain: predicted  measured     graph: predicted  measured     gain: predicted  measured")
    for number, (kind, microbatches) in enumerate(CASES):
        found = list[tuple[float, float]]()
        for form in ("chain", "graph"):
            with tempfile.TemporaryDirectory() as folder:
                plan, predicted, ms = plan_of(form, kind, microbatches, Path(folder))
            arguments = (29700 + 2 * number + (form == "graph"), plan, ms, 2 if given.quick else given.steps)
            preload = ("zbc.training.worker",)
            (took,) = results(rank_main, arguments, ranks=RANKS, count=1, preload=preload, limit=240)
            found.append((predicted, statistics.median(one for one, _ in took)))
        (chain_p, chain_m), (graph_p, graph_m) = found
        record(
            f"{kind:8} {microbatches:4}  {chain_p:18.1f}  {chain_m:8.1f}  {graph_p:19.1f}  {graph_m:8.1f}"
            f"  {chain_p / graph_p:18.3f}  {chain_m / graph_m:8.3f}"
        )
    if not given.quick:
        record.write()


if __name__ == "__main__":
    main()
