"""Prices of exchanges between nodes: what crosses, and when a row crosses to each node once."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from tests.jobs import job
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.choices import Choices
from zbc.compiler.cost.machine import Link, Machine
from zbc.topology import Topology


@pytest.mark.parametrize(
    ("choices", "count"),
    [(Choices(8, 3), p) for p in (2, 4)]
    + [(Choices(8, 3, 4, 2), 2), (Choices(8, 3, 2, 1), 4), (Choices(12, 3, 4, 2), 3)],
)
def test_nodes_that_a_token_chooses_are_counted_over_all_its_choices(choices, count):
    """With groups also where nodes do not align with them."""
    size, share = choices.experts // choices.groups, choices.experts // count
    found = list[int]()
    for some in itertools.combinations(range(choices.groups), choices.limit):
        inside = [group * size + i for group in some for i in range(size)]
        for chosen in itertools.combinations(inside, choices.top_k):
            found += [len({e // share for e in chosen} - {own}) for own in range(count)]
    assert choices.away(count) == pytest.approx(sum(found) / len(found), rel=1e-12)


RUN = Topology(1, 8, ep=8)
MACHINE = Machine(1, 1, 1, Link(0.25, 1000.0), Link(0.5, 100.0), 4, RUN)


def test_rows_inside_a_node_do_not_cross_the_network():
    one, two = MACHINE.swaps_ms(8000.0, Choices(8, 2))
    assert one == 0.5 + 4000 / 100  # the rows inside are sent meanwhile
    away = Choices(8, 2).away(2)
    assert away == pytest.approx(1 - 6 / 28)
    assert two == pytest.approx(0.5 + 4000 * away / 100 + 0.25 + 6000 / 1000)
    assert MACHINE.swaps_ms(8000.0, None) == (one, math.inf)
    slow = replace(MACHINE, near=Link(0.25, 10.0))
    assert slow.swaps_ms(8000.0, None)[0] == 0.25 + 3000 / 10


def test_a_group_inside_a_node_and_one_rank_per_node_exchange_in_one_step():
    inside = replace(MACHINE, topology=replace(RUN, ep=4))
    assert inside.swaps_ms(8000.0, Choices(8, 2)) == (0.25 + 6.0, math.inf)
    assert replace(MACHINE, node=1).swaps_ms(8000.0, Choices(8, 2)) == (0.5 + 70.0, math.inf)
    unlike = replace(MACHINE, node=3)  # 3, 3 and 2 ranks
    assert unlike.swaps_ms(8000.0, Choices(8, 2)) == (0.5 + 60.0, math.inf)


MODEL = {"family": "llama", "hidden": 64, "heads": 4, "vocab": 256, "seq_len": 256}
MODEL |= {"experts": 8, "top_k": 4, "ffn_hidden": 32}
NODES = {"ranks_per_node": 2, "link_gbps": 800.0, "link_us": 1.0, "device": "cuda"}


@pytest.mark.long("10.0-2-groups1")
@pytest.mark.parametrize(
    ("far", "near", "groups"), [(10.0, 2, {}), (10.0, 2, {"expert_groups": [2, 1]}), (800.0, 0, {})]
)
def test_a_plan_takes_two_steps_where_they_are_faster(far, near, groups):
    table = {"model": MODEL | groups, "hardware": {**NODES, "inter_node_gbps": far}, "parallel": {"dp": 4, "ep": 4}}
    schedule = {"kind": "1f1b", "microbatch_size": 1}
    made = compile_job(job(layers=2, pp=1, m=2, schedule=schedule, **table), suggest=False, budget=0.0)
    assert made.program.topology.near == made.costs.near == near
    ms = 256 * 4 * 64 * 4 / (800.0 * 1e6 / 8)  # of all rows inside a node
    once = Choices(8, 4, *groups.get("expert_groups", ())).away(2) / 4
    there = 0.002 + (1 / 2 + once * 800 / far) * ms if near else 0.001 + ms / 2
    counts = 0.002 if near else 0.001
    assert made.costs.of("f_sums", 0) == pytest.approx(2 * (2 * there + counts), rel=1e-3)  # of few bytes
