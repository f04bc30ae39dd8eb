"""Published and independently computed numbers, read from tests/reference."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.compiler.grid import make, timed, units
from tests.lowered import lower
from tests.tiers import few

FOLDER = Path(__file__).parent.parent / "reference"


def rows(name):
    with (FOLDER / name).open(newline="") as file:
        return list(csv.DictReader(file))


PAPER = {"1F1B": "1f1b", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2", "1F1B-I": "interleaved-1f1b", "ZB-V": "zb-v"}
# To 4 digits where the paper's own time model gives the cell. The 1F1B-I column comes out up to 0.005 above print under
# it; ZB-V's cells were made with an order chosen for the profiled times, ours is the one for uniform times.
TOLERANCE = {"1F1B": 0.5e-4, "ZB-H1": 0.5e-4, "ZB-H2": 0.5e-4, "1F1B-I": 0.006, "ZB-V": 0.002}


@pytest.mark.parametrize("schedule", few(PAPER, ("ZB-H1",)))
def test_bubble_rates_of_the_zero_bubble_paper(schedule):
    cells = [row for row in rows("zero_bubble_paper.csv") if row["schedule"] == schedule]
    assert len(cells) >= 9
    for row in cells:
        program = make(PAPER[schedule], int(row["p"]), int(row["m"]), int(row["v"]))
        times = (float(row[key]) for key in ("T_F_ms", "T_B_ms", "T_W_ms", "T_comm_ms"))
        rate = timed(program, *times).bubble_rate_span
        printed = float(row["bubble_rate_span"])
        assert abs(rate - printed) <= TOLERANCE[schedule] + 1e-9, (row, rate)


ORDERS = {
    "gpipe": ("gpipe", 1),
    "1f1b": ("1f1b", 1),
    "interleaved1f1b_v2": ("interleaved-1f1b", 2),
    "interleaved1f1b_v4": ("interleaved-1f1b", 4),
    "breadth_first_v2": ("breadth-first", 2),
}


@pytest.mark.parametrize("variant", ORDERS)
def test_unit_cost_orders(variant):
    cells = [row for row in rows("unit_cost_orders.csv") if row["variant"] == variant]
    assert len(cells) >= 10
    for row in cells:
        name, v = ORDERS[variant]
        program = make(name, int(row["p"]), int(row["m"]), v)
        timeline = timed(program, comm=float(row["comm"]))
        assert timeline.makespan == pytest.approx(float(row["makespan"])), row
        assert timeline.span == pytest.approx(float(row["span"])), row
        assert units(program) == pytest.approx([float(x) for x in row["peak_act_per_rank"].split()]), row
        sends = sum(op.kind.is_send for _, _, op in lower(program))
        assert sends == int(row["p2p_msgs_sent_total"]), row
