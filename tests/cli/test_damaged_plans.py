"""Plans that can run but violate their job: `zbc check` refuses them, even with correct hashes."""

import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.jobs import job
from zbc.api import load
from zbc.commands.checking import proven
from zbc.compiler.compile import compile_job
from zbc.errors import ZbcError
from zbc.ir import Kind, Op

UNIT = {"f": 1.0, "b": 1.0, "w": 1.0, "act_b": 1.0, "act_w": 1.0}
EVEN = {"layers_per_stage": [3, 3, 3, 3]}
MADE = {
    "limited": compile_job(job(kind="zb-h1", costs=UNIT, schedule={"memory_limit": "1.0x"}), budget=0.0),
    "plain": compile_job(job(kind="zb-h1", m=4, layers=12, costs=UNIT, partition=EVEN), budget=0.0),
    "frozen": compile_job(
        job(kind="zb-h1", m=4, layers=12, costs=UNIT, partition=EVEN, freeze={"most": 0.5}), budget=0.0
    ),
}


def refused(name: str, rank: int, ops: list[Op]) -> list[str]:
    """The codes of errors for a plan with other ops on a rank; from the command, and the same from Python."""
    made, found = MADE[name], list[list[str]]()
    ranks = list(made.program.ranks)
    ranks[rank] = tuple(ops)
    with tempfile.TemporaryDirectory() as folder:
        replace(made, program=replace(made.program, ranks=tuple(ranks))).write(Path(folder) / "plan")
        for check in (lambda path: load(path).check(), proven):
            try:
                check(Path(folder) / "plan")
                found.append([])
            except ZbcError as error:
                found.append(sorted({each.code for each in error.errors}))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("name", MADE)
def test_a_plan_as_it_was_made_passes(name):
    assert refused(name, 0, list(MADE[name].program.ranks[0])) == []


@pytest.mark.long
@settings(max_examples=15, deadline=None, derandomize=True)
@given(rank=st.integers(0, 3), late=st.sets(st.integers(0, 7)))
def test_weight_gradients_that_are_put_off_take_memory(rank, late):
    """Of 4 units; a microbatch takes one from its F to its W."""
    fused = MADE["limited"].program.ranks[rank]
    apart = {Kind.BW: (Kind.B, Kind.W)}
    ops = [op._replace(kind=kind) for op in fused for kind in apart.get(op.kind, (op.kind,))]
    end = max(i for i, op in enumerate(ops) if op.kind is Kind.W) + 1
    moved = [op for op in ops[:end] if op.kind is Kind.W and op.mb in late]
    listed = [op for op in ops[:end] if op not in moved] + moved
    held = most = 0
    for op in listed:
        held += (op.kind is Kind.F) - (op.kind is Kind.W)
        most = max(most, held)
    assert refused("limited", rank, listed + ops[end:]) == (["E302"] if most > 4 else [])


@pytest.mark.long
@settings(max_examples=15, deadline=None, derandomize=True)
@given(name=st.sampled_from(["plain", "frozen"]), rank=st.integers(1, 2), seed=st.integers(0, 999))
def test_layers_are_frozen_only_as_the_job_says(name, rank, seed):
    """A stage has 3 layers; of its 4 W or BW half may be frozen."""
    ops, rng = list(MADE[name].program.ranks[rank]), random.Random(seed)
    places = [i for i, op in enumerate(ops) if op.kind.makes_part]
    for i in rng.sample(places, rng.randint(1, 4)):
        ops[i] = ops[i]._replace(share=rng.choice([0, 33, 50, 67, 100]))
    shares = [ops[i].share for i in places]
    whole = all(share in (0, 33, 67, 100) for share in shares)
    fits = sum(100 - share for share in shares) / 4 <= 50.5
    right = (whole and fits) if name == "frozen" else shares == [100] * 4
    assert refused(name, rank, ops) == ([] if right else ["E202"])
