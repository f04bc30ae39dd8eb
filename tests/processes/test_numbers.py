"""Runs with `schedule.renumber = "steps"`: microbatches in the order that a process beside finds for each step."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen

from tests.processes.plans import metrics, run_here, write_plan
from zbc.compiler.restepping import Restepper
from zbc.plan.directory import StoredPlan
from zbc.trace.recording import read
from zbc.training.data.unequal import dealer_of

ROOT = str(Path(__file__).parents[2])
TOKENS = [32, 24, 16, 12, 8, 4]
TABLES = {
    "parallel": {"pp": 2, "dp": 2},
    "model": {"family": "llama", "layers": 4, "hidden": 32, "heads": 2, "seq_len": 32, "vocab": 61},
    "schedule": {"kind": "zb-h1", "microbatches": 6, "microbatch_size": 1, "tokens": TOKENS, "renumber": "steps"},
    "costs": {"f": 100.0, "b": 100.0, "w": 100.0, "comm": 0.0},
    "data": {"kind": "synthetic", "balance": "tokens"},
    "train": {"steps": 6},
    "checkpoint": {"every": 3},
}


def losses(run):
    return [(line["step"], line["loss"]) for line in metrics(run)]


def recorded(run):
    """By step the tokens of the rows of each microbatch, the most of both replicas."""
    trace = read(run)
    of_ranks = [[rank.timings[step].tokens for rank in trace.ranks] for step in trace.steps]
    return [[max(column) for column in zip(*step, strict=True)] for step in of_ranks]


def test_steps_have_their_own_numbers_and_a_resumed_run_the_same(tmp_path):
    plan = write_plan(tmp_path, "plan", **TABLES)
    stored = StoredPlan.read(plan)
    restepper, dealer, steps = Restepper(stored), dealer_of(stored.manifest), range(6)
    found = [restepper.of(dealer.asks(step))[0] for step in steps]
    assert len(set(found)) > 1  # or it would not matter which step has which
    lines = run_here(plan, 4, tmp_path / "whole", trace=frozenset(steps))
    asked = [dealer.asks(step) for step in steps]
    ran = [[tokens[k] for k in numbers] for tokens, numbers in zip(asked, found, strict=True)]
    assert recorded(tmp_path / "whole") == ran
    run_here(plan, 4, tmp_path / "parts", steps=3)
    run_here(plan, 4, tmp_path / "parts", resume="auto")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert not any("process that finds others" in line for line in lines)


def test_a_run_whose_process_for_numbers_ends_goes_on_with_those_of_the_plan(tmp_path):
    plan, told = write_plan(tmp_path, "plan", **{**TABLES, "train": {"steps": 30}}), []

    def each(line):
        if line.startswith("step") and not told:
            told.append([pid for pid in children_named("zbc.compiler.restepping")])
            told.append(os.getpgid(told[0][0]))
            os.kill(told[0][0], signal.SIGKILL)

    lines = run_here(plan, 4, tmp_path / "run", each)
    assert len(told[0]) == 1 and told[1] == told[0][0], "it gets no signals of a terminal"
    assert len(losses(tmp_path / "run")) == 30
    assert sum("have the plan's numbers: the process that finds others has ended" in line for line in lines) == 1


def test_that_process_ends_without_a_word_when_its_run_has_ended(tmp_path):
    """Whether it waits for a step or computes one: nobody reads what it answers."""
    command = [sys.executable, "-m", "zbc.compiler.restepping", str(write_plan(tmp_path, "plan", **TABLES))]
    for asked in ("", f"{TOKENS}\n"):
        child = Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, env={**os.environ, "PYTHONPATH": ROOT})
        child.stdout.close()
        child.stdin.write(asked)
        child.stdin.close()
        assert (child.stderr.read(), child.wait()) == ("", 0)
        child.stderr.close()


def children_named(module):
    """The processes that run a module."""
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if module.encode() in (folder / "cmdline").read_bytes():
                yield int(folder.name)
