"""Published and independently computed numbers from tests/reference; published runs, planned again."""

from __future__ import annotations

import csv
import functools
import statistics
from itertools import product
from pathlib import Path

import pytest

from bench import published
from bench.published import cases
from tests.compiler.grid import make, timed, units
from tests.jobs import job
from tests.lowered import lower
from tests.tiers import few
from zbc.compiler.check import check_all
from zbc.compiler.cost import estimate
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.sim.simulate import simulate

FOLDER = Path(__file__).parent.parent / "reference"


def rows(name):
    with (FOLDER / name).open(newline="") as file:
        return list(csv.DictReader(file))


PAPER = {"1F1B": "1f1b", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2", "1F1B-I": "interleaved-1f1b", "ZB-V": "zb-v"}
# To 4 digits if the paper's own time model gives the cell. The 1F1B-I column comes out up to 0.005 above print under
# it; ZB-V's cells were made with an order chosen for the profiled times, ours is the one for uniform times.
TOLERANCE = {"1F1B": 0.5e-4, "ZB-H1": 0.5e-4, "ZB-H2": 0.5e-4, "1F1B-I": 0.006, "ZB-V": 0.002}


@pytest.mark.long
@pytest.mark.parametrize("schedule", few(PAPER, ("ZB-H1",)))
def test_bubble_rates_of_the_zero_bubble_paper(schedule):
    cells = [row for row in rows("zero_bubble_paper.csv") if row["schedule"] == schedule]
    assert len(cells) >= 9
    for row in cells:
        program = make(PAPER[schedule], int(row["p"]), int(row["m"]), int(row["v"]))
        times = (float(row[key]) for key in ("T_F_ms", "T_B_ms", "T_W_ms", "T_comm_ms"))
        rate = timed(program, *times).bubble_rate_span
        assert abs(rate - float(row["bubble_rate_span"])) <= TOLERANCE[schedule] + 1e-9, (row, rate)


ORDERS = {  # variant -> schedule, stages per rank and pipe, forwards that run early
    "gpipe": ("gpipe", 1, None),
    "1f1b": ("1f1b", 1, None),
    "interleaved1f1b_v2": ("interleaved-1f1b", 2, None),
    "interleaved1f1b_v4": ("interleaved-1f1b", 4, None),
    "breadth_first_v2": ("breadth-first", 2, None),
    "chimera": ("chimera", 1, None),
    "bitpipe_figure": ("bitpipe", 2, None),
    "bitpipe_code": ("bitpipe", 2, 1),
    "dualpipe": ("dualpipe", 1, None),
    "dualpipev": ("dualpipe-v", 2, None),
    "hanayo_w1": ("hanayo", 2, None),
    "hanayo_w2": ("hanayo", 4, None),
}


@pytest.mark.parametrize("variant", ORDERS)
def test_unit_cost_orders(variant):
    """Hanayo's reference drains the pipe between units, ours joins them; all others are equal."""
    cells = [row for row in rows("unit_cost_orders.csv") if row["variant"] == variant]
    assert len(cells) >= 6
    for row in cells:
        (name, v, early), p, m = ORDERS[variant], int(row["p"]), int(row["m"])
        program = SCHEDULES[name].make(Request(p, m, v, early=early))
        timeline = timed(program, comm=float(row["comm"]))
        if name == "hanayo" and m > p:
            assert timeline.makespan < float(row["makespan"]), row
        else:
            assert timeline.makespan == pytest.approx(float(row["makespan"])), row
            assert timeline.span == pytest.approx(float(row["span"])), row
        assert units(program) == pytest.approx([float(x) for x in row["peak_act_per_rank"].split()]), row
        sends = sum(op.kind.is_send for _, _, op in lower(program))
        assert sends == int(row["p2p_msgs_sent_total"]), row


@pytest.mark.long
def test_generalized_interleaved_orders_are_the_public_ones():
    for row in rows("gis_orders.csv"):
        p, m, v, group = (int(row[key]) for key in ("p", "m", "v", "group"))
        program = SCHEDULES["gis"].make(Request(p, m, v, group=group))
        f, b, w, comm = (float(row[key]) for key in ("f", "b", "w", "comm"))
        costs = Costs.uniform(program.placement, f, b, w, comm, float(f == b == w))
        assert simulate(program, costs).makespan == pytest.approx(float(row["makespan"]), rel=1e-4), row
        assert max(rank.units for rank in peaks(program, costs)) == pytest.approx(float(row["peak"]), rel=1e-4), row


@pytest.mark.long("4", "6", "7", "8", "9")
@pytest.mark.parametrize("p", range(1, 10))
def test_generalized_interleaved_orders_run_for_any_group_and_microbatches(p):
    card = SCHEDULES["gis"]
    for group, v, m in product(card.groups(p), (1, 2, 3), (*range(1, p + 2), 2 * p + 1, 3 * p - 1)):
        program = card.make(Request(p, m, v, group=group))
        check_all(lower(program))
        assert max(units(program)) <= (p + (v - 1) * group) / v + 1e-9


@pytest.fixture(scope="module")
def found():
    return list(cases())


@pytest.mark.long
def test_steps_and_memory_of_naive_and_balanced_vocabularies_are_near_what_was_published(found):
    # The eighth is half as fast and 8 GB larger than its neighbours, for reasons its paper does not give.
    assert [one.odd for one in found] == [False] * 3 + [True] + [False] * 4
    assert all(abs(one.error) <= 0.06 for one in found if not one.odd), [one.error for one in found]
    for one in found:
        assert one.seconds[1] == pytest.approx(one.published_s[1], rel=0.03 if not one.odd else 0.05)
    # Under autocast norms run in float32, and keep their input in it; Megatron-LM's keep it in bfloat16.
    for one in found:
        assert one.odd or 1 < one.gb / one.published_gb < 1.12


@functools.cache
def throughput() -> tuple[published.Throughput, ...]:
    """Table 4 with a given time for a message."""
    return tuple(published.zero_bubble())


@pytest.mark.long
def test_steps_of_1f1b_on_a100s_follow_from_the_op_times_of_their_ranks():
    ratios = [row.ratio for row in published.one_f_one_b()]
    assert len(ratios) == 8
    assert statistics.fmean(ratios) == pytest.approx(1, abs=0.015) and all(abs(x - 1) < 0.03 for x in ratios)


@pytest.mark.long
def test_one_number_for_a_message_brings_1f1b_and_interleaved_1f1b_to_what_was_measured():
    for row in throughput():
        assert row.ratios["1f1b"] == pytest.approx(1, abs=0.05), row
        assert row.ratios["1f1bi"] == pytest.approx(1, abs=0.05), row


@pytest.mark.long
def test_schedules_rank_as_they_were_measured_where_these_are_more_than_two_percent_apart():
    pairs = 0
    for row in throughput():
        for one, ours in row.predicted.items():
            for other, theirs in row.predicted.items():
                if row.measured[one] > 1.02 * row.measured[other]:
                    pairs += 1
                    assert ours > theirs, (row, one, other)
    assert pairs > 25


@pytest.mark.long
def test_inside_a_node_the_schedules_that_were_faster_than_1f1b_come_out_faster():
    """By 8 to 15% as measured; also if no link is given, and a network's is assumed."""
    found = [*published.in_a_node(), *published.in_a_node(assumed=True)]
    assert len(found) == 8
    assert all(row.measured > 1.07 and row.predicted > 1.04 for row in found), found
    assert all(row.ratio == pytest.approx(1, abs=0.11) for row in found), found


@pytest.mark.long
def test_half_of_the_activations_on_the_host_cost_a_tenth_of_the_throughput_and_not_half():
    """A tenth was measured; the cost is half if a block keeps all of its activations."""
    found = [*published.offload()]
    assert len(found) == 2
    assert all(row.predicted > 0.88 and abs(row.predicted - row.measured) < 0.05 for row in found), found


@pytest.mark.long
def test_without_the_cost_of_messages_interleaved_1f1b_would_come_out_too_fast():
    assert all(row.ratios["1f1bi"] > 1.08 for row in published.zero_bubble(message={}, only=["1f1bi"]))


@pytest.mark.long
def test_w_is_estimated_within_a_quarter_where_gradients_are_added_inside_products():
    """Megatron-LM adds them there; a sum of its own would make it 1.4 to 2.3 times as long. Here the sums for the
    gradients of biases are a part of W: .06 of that of the small model."""
    assert all(step.ratio == pytest.approx(1, abs=0.25) for step in published.weight_gradients())
    assert all(step.ratio > 1.35 for step in published.weight_gradients(fused=False))


@pytest.mark.long
def test_steps_of_large_models_with_sequence_parallelism_are_near_what_was_measured_and_fit():
    """The smallest spent more on attention, whose scores went through memory."""
    for large in published.sequence_parallel():
        assert 0.87 < large.step.ratio < 1.06 and large.gib < 80, large


@pytest.mark.long
@pytest.mark.parametrize("hidden", [6144, 12288, 20480, 25600])
def test_a_block_that_gathers_again_keeps_what_korthikanti_count_but_what_they_need_not(hidden):
    """34 bytes for a number of the residual stream, less masks of two dropouts and the outputs of two norms."""
    made = job(
        layers=4,
        pp=2,
        model={**published.GPT, "hidden": hidden, "heads": 128, "vocab": 51200, "seq_len": 2048},
        parallel={"tp": 8, "tp_sequence": "regather"},
        hardware=published.A100,
    )
    kept = estimate.layers(made)[1].size.act_b / (2048 * made.schedule.microbatch_size * hidden / 8)
    assert kept == pytest.approx(34 - 2 - 4, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("name", ["experts over 4 nodes", "16k tokens", "32k tokens", "7 chunks"])
def test_mixtures_of_experts_take_about_as_long_as_they_were_measured(name):
    """The authors fuse rotary positions, SwiGLU and the exchange of rows: these move three times as much here."""
    (step,) = published.mixtures([name])
    assert step.ratio == pytest.approx(1, abs=0.15), step
    assert name != "experts over 4 nodes" or step.measured == pytest.approx(19.7, rel=0.01)
