"""What is on its way while an op runs: posted for, handed over, and sent as long as the neighbour has not taken it."""

import pytest

from tests.compiler.grid import make
from tests.lowered import lower
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.ledger import ledger
from zbc.compiler.sim.simulate import simulate


def in_transit(timeline, costs):
    """Per rank and op the tensors on their way as it runs, its own result included and what it is given left out."""
    found = []
    for entries in ledger(timeline, costs):
        units, counts = 0.0, {}
        for entry in entries:
            units += sum(each.units for each in (*entry.begin, *entry.end) if each.category == "transit")
            units -= entry.gone[0]
            counts[entry.op] = units + entry.still[0]
        found.append(counts)
    return found


def moving(microbatches, f):
    """Per rank and compute op of GPipe on two ranks the tensors on their way; B and W take 1."""
    program = lower(make("gpipe", 2, microbatches))
    costs = Costs.uniform(program.placement).with_ms(f=f)
    timeline = simulate(program, costs)
    ops = timeline.graph.ops
    found = in_transit(timeline, costs)
    return [{str(ops[i]): count for i, count in counts.items() if ops[i].kind.computes} for counts in found]


def test_results_and_posted_buffers_count_and_what_a_neighbour_waits_for_leaves_at_once():
    first, _ = moving(3, (1.0, 1.0))
    assert first == {"F s0 m0": 1, "F s0 m1": 1, "F s0 m2": 2, "BW s0 m0": 1, "BW s0 m1": 1, "BW s0 m2": 0}


def test_a_tensor_that_leaves_in_the_middle_of_an_op_counts_for_its_share_of_it():
    """Rank 1 posts for m2 as F m0 ends, at 3.5 or 3.25; rank 0 has sent it at 3 and runs F m3 until 4."""
    assert moving(4, (1.0, 2.5))[0]["F s0 m3"] == pytest.approx(2.5)
    assert moving(4, (1.0, 2.25))[0]["F s0 m3"] == pytest.approx(2.25)
    assert moving(4, (1.0, 3.0))[0]["F s0 m3"] == pytest.approx(3.0)


@pytest.mark.parametrize(("ms", "share"), [(4.0, 0.25), (2.0, 0.5), (1.0, 1.0), (0.0, 1.0)])
def test_what_is_sent_right_before_a_tentative_step_leaves_while_it_runs(ms, share):
    """The last rank's last gradient takes 1 ms to the first rank, which has posted for it."""
    program = lower(make("1f1b", 2, 3), "post-validate")
    costs = Costs.uniform(program.placement, comm=1.0).with_ms(tentative=(ms, ms))
    counts = list(in_transit(simulate(program, costs), costs)[1].values())
    assert str(program.ranks[1][-1]) == "TENTATIVE s1" and str(program.ranks[1][-2]) == "SEND_B s1 m2"
    assert counts[-1] == pytest.approx(share)
