"""The orders that always run include every kind of op."""

import pytest

from tests.lowered import lower
from tests.runtime.small_plans import GPT, make_plan, make_program
from tests.runtime.test_averaging import plan as averaging_plan
from tests.runtime.test_freed_weights import freeing
from tests.threads import run_threads
from tests.tiers import SIX
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.ir import COPY
from zbc.ops import ROWS
from zbc.runtime import handlers

SMALL = {**GPT, "layers": 6, "hidden": 16, "vocab": 31}


@pytest.mark.long
def test_the_six_orders_run_every_handler(ran, tmp_path):
    for name in SIX:
        run_threads(make_plan(make_program(name, 2, 4), model=SMALL, size=1), 1)
    shared = make_program("zb-h1", 2, 4, sync="post-validate", copies=2, sharded=True)
    run_threads(make_plan(shared, model=SMALL, size=1), 2)
    shares = make_program("interleaved-1f1b", 2, 4, copies=2, sharded=True, scatters=True)
    run_threads(make_plan(shares, model=SMALL, size=1), 1)
    run_threads(make_plan(make_program("1f1b", 2, 4, tied=True), model=SMALL, size=1), 1)
    groups = lower(SCHEDULES["dualpipe"].make(Request(2, 4, 1, overlap=True)))
    run_threads(make_plan(groups, model=SMALL, size=1), 1)
    run_threads(make_plan(freeing("1f1b", 2, 4, 1), model=SMALL, size=1), 1)
    run_threads(averaging_plan(tmp_path, {"share": 0.5}), 1)
    elsewhere = COPY | {kind for kind in ROWS if kind.unit_wide}
    found = {op.kind for ops in ran.values() for op in ops}
    assert found == handlers.HANDLERS.keys() - elsewhere == ROWS.keys() - elsewhere


def test_the_six_orders_stand_for_every_placement_and_every_backward():
    cards = [SCHEDULES[name] for name in SIX]
    others = {card.placement_name for card in SCHEDULES.values()} - {card.placement_name for card in cards}
    assert others == {"waves", "two V pipes"}, "these are made of V and two pipes"
    assert {card.splits_backward for card in cards} == {True, False}
