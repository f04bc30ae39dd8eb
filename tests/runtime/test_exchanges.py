"""Exchanges of experts' rows between nodes: a row crosses to each once, is sent on there, and their sum comes back."""

from __future__ import annotations

import pytest
import torch

from tests.composed import TOLERANCE, apart
from tests.runtime.test_expert_parallel import numbers, plan
from tests.runtime.test_experts import SLICED
from tests.threads import run_threads
from tests.tiers import few
from zbc.runtime.features.experts.expert_parallel import Copies

FAST, SLOW = 8.0, 0.01  # Gbit/s inside a node and between nodes
HARDWARE = {"ranks_per_node": 2, "link_gbps": FAST, "link_us": 0.0, "inter_node_gbps": SLOW}
MODEL = {"experts": 8, "top_k": 3}


def ms_of(sent):
    """Of rows sent inside a node and between nodes."""
    return 32 * 4 * 8 / 1e6 * (sent[True] / SLOW + sent[False] / FAST)


def planned(folder, way, *, steps=2, **parallel):
    """A plan whose exchanges take one step or two; a group of four is on two nodes."""
    hardware = HARDWARE if steps == 2 else {**HARDWARE, "inter_node_gbps": FAST}
    found = plan(folder, {"model": {}, **way, "hardware": {**way.get("hardware", {}), **hardware}}, **parallel)
    assert found.manifest.near == (2 if steps == 2 else 0)
    return found


WAYS = [
    ({"schedule": {"kind": "zb-v"}, "model": MODEL}, {"dp": 4, "ep": 4}),
    ({"schedule": {"kind": "1f1b"}}, {"tp": 2, "dp": 2, "ep": 4}),
    (SLICED, {"dp": 4, "ep": 4}),
    ({"schedule": {"kind": "interleaved-1f1b"}, "model": MODEL}, {"dp": 8, "ep": 4, "shard": "all"}),
    ({"schedule": {"kind": "zb-h1"}, "memory": {"activations": "recompute"}, "model": MODEL}, {"dp": 4, "ep": 4}),
    ({"schedule": {"kind": "1f1b"}, "model": {**MODEL, "dtype": "bfloat16"}}, {"dp": 4, "ep": 4}),
    ({"schedule": {"kind": "braid-v"}}, {"dp": 4, "ep": 4}),
    ({"schedule": {"kind": "dualpipe-v", "overlap": True}, "model": MODEL}, {"dp": 4, "ep": 4}),
    ({"schedule": {"kind": "1f1b"}}, {"tp": 2, "ep": 4, "dp": 2, "tp_sequence": True}),
    ({"schedule": {"kind": "zb-h1"}, "memory": {"activations": "selective"}}, {"dp": 4, "ep": 4, "shard": "optimizer"}),
    ({"schedule": {"kind": "zb-v"}}, {"dp": 4, "ep": 4, "shard": "weights"}),
    ({"schedule": {"kind": "zb-v"}}, {"dp": 2, "cp": 2, "ep": 4, "shard": "gradients"}),
    ({"schedule": {"kind": "1f1b"}, "model": {"router": "sigmoid", "shared_hidden": None}}, {"dp": 4, "ep": 4}),
    ({"schedule": {"kind": "dualpipe"}, "model": MODEL}, {"dp": 4, "ep": 4}),
]


@pytest.mark.parametrize(("way", "parallel"), few(WAYS, 3), ids=str)
def test_experts_on_several_nodes_train_as_in_one_process(tmp_path, way, parallel):
    single = plan(tmp_path / "one", {key: way[key] for key in ("model",) if key in way}, pp=1)
    found = numbers(run_threads(planned(tmp_path / "all", way, **parallel), 3))
    assert apart(found, numbers(run_threads(single, 3))) <= (0.02 if "bfloat16" in str(way) else TOLERANCE)


def test_copies_are_added_row_by_row_in_their_order():
    of = torch.tensor([4, 0, 2, 0, 4, 4])
    copies, x = Copies.rows(of, 5), torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(copies.summed(x), torch.zeros(5, 3, dtype=torch.float64).index_add(0, of, x))
    assert torch.equal(copies.spread(rows), rows[of])
    assert torch.autograd.gradcheck(copies.summed, x) and torch.autograd.gradcheck(copies.spread, rows)
    nothing = Copies.rows(of[:0], 5)
    assert torch.equal(nothing.summed(x[:0]), torch.zeros(5, 3, dtype=torch.float64))
