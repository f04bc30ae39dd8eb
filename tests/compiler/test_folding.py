"""Ranks that share out experts, along tp, cp and dp: their groups, what they send, and which are offered."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.runtime.test_expert_parallel import plan
from tests.threads import run_threads
from zbc.compiler.cost import estimate, pricing
from zbc.compiler.shapes import load_job
from zbc.job import world
from zbc.job.toml import loads
from zbc.topology import Topology
from zbc.training.models.experts import Experts

RUN = Topology(2, 2, inner=(2, 2), ep=4, folded=True)  # ranks 0 to 3 of stage 0 and replica 0, 8 to 11 of replica 1


def test_neighbours_along_tp_then_cp_then_dp_share_out_experts():
    assert RUN.sharing(1) == (0, 1, 2, 3) and RUN.sharing(9) == (8, 9, 10, 11)
    assert RUN.alike([0], 9) == (1, 9) and RUN.alike([0, 1], 9) == (1, 5, 9, 13)
    assert [RUN.first(rank) for rank in (3, 11)] == [True, False] and RUN.span == 1
    both = replace(RUN, ep=8)
    assert both.sharing(9) == (0, 1, 2, 3, 8, 9, 10, 11) and both.alike([0], 9) == (9,) and both.span == 2
    small = replace(RUN, ep=2)
    assert small.sharing(3) == (2, 3) and small.alike([0], 3) == (1, 3, 9, 11)
    assert [rank for rank in RUN.held(0) if small.first(rank)] == [0, 1]


def test_without_folding_the_place_along_tp_is_the_same():
    cut = replace(RUN, folded=False)
    assert cut.sharing(1) == (1, 3, 9, 11) and cut.alike([0], 1) == (1,) and cut.span == 2
    assert cut.whole(1) == (0, 1, 2, 3, 8, 9, 10, 11) and RUN.whole(1) == (0, 1, 2, 3)
    assert replace(cut, ep=2).sharing(1) == (1, 3)


ORDER = (5, 3, 0, 11, 8, 1, 9, 2, 10, 7, 4, 6)
EVERY = [Topology(2, 6, inner=inner, folded=f, order=ORDER) for inner in product((1, 2), (1, 2)) for f in (False, True)]


@pytest.mark.parametrize("ep", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("bare", EVERY, ids=lambda run: f"{run.inner} {run.folded}")
def test_every_group_has_all_experts_once_and_every_copy_is_in_another_group(ep, bare):
    run = replace(bare, ep=ep)
    if run.dp * run.listed % ep:
        return
    for rank in range(run.world):
        group, copies = run.sharing(rank), run.alike([run.of(rank).pp], rank)
        assert len(group) == ep and rank in group and list(group) == sorted(group)
        assert {run.sharing(other).index(other) for other in copies} == {group.index(rank)}
        assert len({run.sharing(other) for other in copies}) == len(copies) == run.dp * run.listed // ep
        assert sum(run.first(other) for other in copies) == 1


WAYS = [
    {"dp": 2, "tp": 2, "ep": 4},
    {"cp": 2, "ep": 2},
    {"tp": 2, "ep": 2, "tp_sequence": True},
    {"tp": 2, "dp": 2, "ep": 2, "expert_tp": 2},
]


@pytest.mark.parametrize("parallel", WAYS, ids=str)
@pytest.mark.parametrize("shared", [None, 32])
def test_a_rank_sends_the_bytes_that_are_priced(tmp_path, monkeypatch, parallel, shared):
    """In F and B: rows of experts, with even loads, and what ranks that share layers, or tokens, sum and gather."""
    monkeypatch.setattr(Experts, "_chosen", in_turn)
    way = {"schedule": {"kind": "1f1b"}, "model": {"balance_loss": 0.0, "router_z_loss": 0.0, "shared_hidden": shared}}
    way["hardware"] = {"link_gbps": 1.0, "link_us": 0.0}
    made, sent = plan(tmp_path, way, **parallel), dict[tuple[int, str], float]()
    inner = "tp" if "tp" in parallel else "cp"

    def watch(worker):
        transport = worker.transport
        start = transport.start

        def started(offer, ranks):
            axis = "ep" if offer.what == "swap" else inner
            if worker.plan.ops[worker.progress.index].kind.computes:
                key, halves = (worker.rank, axis), 1 + (offer.what == "sum")
                whole = offer.target if offer.what == "gather" else offer.source
                sent[key] = sent.get(key, 0.0) + halves * (len(ranks) - 1) / len(ranks) * whole.nbytes
            return start(offer, ranks)

        transport.start = started

    run_threads(made, 1, setup=watch)
    found = load_job(tmp_path / "zbc.toml")
    exchanged = pricing.exchanges(found, [(table := estimate.layers(found))[:3], table[3:]])
    for axis, one in zip((inner, "ep"), exchanged, strict=True):
        ms = made.manifest.microbatches * (one.forward[0] + one.backward[0])
        for rank in (rank for rank in range(made.manifest.topology.world) if made.manifest.topology.of(rank).pp == 0):
            assert sent[rank, axis] == pytest.approx(ms * 1e6 / 8), (rank, axis)


def shapes(model, parallel, hardware=""):
    text = f"[model]\n{model}\n[schedule]\nbatch = 64\n[parallel]\n{parallel}\n{hardware}"
    return {(shape.pp, shape.dp, shape.tp, shape.ep) for shape in world.read(loads(text, source="zbc.toml")).shapes}


def test_shapes_of_a_world_say_how_experts_are_shared():
    model, node = "heads = 8\nlayers = 8\nexperts = 64", "[hardware]\nranks_per_node = 8"
    found = shapes(model, 'world = 64\ntp = 2\nep = "auto"', node)
    assert {ep for pp, _, _, ep in found if pp == 1} == {1, 2, 4, 8, 16, 32, 64}
    assert {ep for pp, _, _, ep in found if pp == 8} == {1, 2, 4, 8}
    cut = shapes(model, 'world = 64\ntp = 2\nexpert_tp = 2\nep = "auto"', node)
    assert {ep for pp, _, _, ep in cut if pp == 8} == {1, 2, 4}
    text = '[model]\nexperts = 4\n[schedule]\nbatch = 8\n[parallel]\nworld = 2\nexpert_tp = 1\nep = "auto"'
    opened = world.read(loads(text, source="zbc.toml"))
    for shape in opened.shapes:
        assert "expert_tp" not in opened.of(shape).values["parallel"]
    text = '[model]\nexperts = 4\n[schedule]\nbatch = 8\n[parallel]\nworld = 4\ntp = 4\nep = "auto"\nshard = "all"'
    opened = world.read(loads(text, source="zbc.toml"))
    kept = {shape.ep: "shard" in opened.of(shape).values["parallel"] for shape in opened.shapes}
    assert kept == {1: False, 2: True, 4: False}


def in_turn(self, likely):
    return torch.arange(len(likely) * self.top_k).view(-1, self.top_k) % self.count
