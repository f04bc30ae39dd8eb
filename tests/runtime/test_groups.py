"""The order in which ranks create and first use their process groups, and their requests to NCCL."""

from datetime import timedelta
from types import SimpleNamespace

import pytest

from zbc.ir import Placement
from zbc.runtime.transports import network
from zbc.runtime.transports.network import directions, rounds

PLACEMENTS = [*(Placement.linear(p) for p in (2, 3, 64)), *(Placement.looped(p, 2) for p in (2, 3, 7, 64))]
PLACEMENTS += [Placement.vshape(5), Placement.bidirectional([*range(8)])]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda one: f"{one.stages} stages on {one.ranks}")
def test_first_connections_take_a_few_rounds_however_long_the_pipeline_is(placement):
    found, wanted = rounds(directions(placement)), directions(placement)
    assert sorted(pair for some in found for pair in some) == wanted
    for some in found:
        met = [rank for pair in some for rank in pair]
        assert len(met) == len(set(met))
    ring = any(abs(a - b) > 1 for a, b in wanted) and placement.ranks % 2
    assert len(found) <= (6 if ring else 4)
    assert rounds(reversed(wanted)) == found  # all ranks have the same


def test_groups_of_transfers_go_first_and_take_few_blocks_of_a_gpu(monkeypatch):
    """As far as possible without NCCL: the requests to torch."""
    asked = []

    class Options:
        def __init__(self, is_high_priority_stream):
            self.first, self.config = is_high_priority_stream, SimpleNamespace(min_ctas=None, max_ctas=None)

    torch_side = SimpleNamespace(
        ProcessGroupNCCL=SimpleNamespace(Options=Options),
        new_group=lambda ranks, timeout, pg_options: asked.append((ranks, pg_options)),
    )
    monkeypatch.setattr(network, "dist", torch_side)
    for variable in (None, "8"):
        if variable is not None:
            monkeypatch.setenv("NCCL_MAX_CTAS", variable)
        network._group((0, 1), timedelta(seconds=9), network._swift)
    network._group((0, 2), timedelta(seconds=9))
    (_, first), (_, second), (_, plain) = asked
    assert plain is None and first is not second and first.first and second.first
    assert first.config.max_ctas == 4 and second.config.max_ctas is None
    assert first._timeout == timedelta(seconds=9)
