"""`zbc run --forward` as a user starts it: weights of a run, ranks as processes and as threads, errors by code."""

import pytest
import torch
from safetensors.torch import load_file

import zbc
from tests.processes.plans import run_here, write_plan

RANKS = 4


@pytest.mark.long
def test_rows_are_by_the_weights_of_the_run_and_alike_for_processes_and_threads(tmp_path):
    plan = write_plan(tmp_path, checkpoint={"every": 2}, train={"steps": 4})
    run_here(plan, RANKS, tmp_path / "run")
    run, lines = zbc.load(tmp_path / "run"), list[str]()
    found = [load_file(zbc.forward(run, plan, tmp_path / "a", steps=2, tell=lines.append))["log_probs"]]
    found += [load_file(zbc.forward(run, plan, tmp_path / "b", steps=2, threads=True))["log_probs"]]
    assert lines[-1].startswith("wrote log_probs of ") and torch.equal(*found) and found[0].std() > 0
    run_here(plan, RANKS, tmp_path / "short", steps=2)
    other = load_file(zbc.forward(tmp_path / "short", plan, tmp_path / "c", steps=2, threads=True))
    assert not torch.equal(found[0], other["log_probs"]), "other weights"
    left = {path.name for path in tmp_path.iterdir()} - {"job.toml"}
    assert left == {"a", "b", "c", "plan", "run", "short"}
