"""Without a barrier, in processes over gloo: the same numbers as with one, also where forwards run again."""

import pytest

from tests.processes.plans import metrics, run_here, write_plan

SAME = ("step", "loss", "grad_norm", "skipped", "lr")


@pytest.mark.repeats
@pytest.mark.parametrize(("kind", "largest"), [("zb-v", 0.05), ("1f1b", 1e6)])
def test_a_run_without_the_barrier_says_what_a_run_with_it_says(tmp_path, kind, largest):
    """Every step clipped, and none."""
    rows = {}
    for sync in ("before-step", "post-validate"):
        optimizer = {"sync": sync, "clip_grad_norm": largest, "lr": 0.01}
        model = {"layers": 6} if kind == "zb-v" else {}
        plan = write_plan(tmp_path, sync, schedule={"kind": kind}, optimizer=optimizer, model=model)
        lines = run_here(plan, 4, tmp_path / f"run-{sync}", steps=4)
        rows[sync] = metrics(tmp_path / f"run-{sync}")
        assert len([line for line in lines if line.startswith("step ")]) == 4
    plain, ahead = rows["before-step"], rows["post-validate"]
    assert [[row[key] for key in SAME] for row in ahead] == [[row[key] for key in SAME] for row in plain]
    assert [row["redone"] for row in ahead] == [largest < 1] * 4
    assert not any(row["redone"] for row in plain)
    assert all(min(row["busy_ms"]) > 0 and min(row["peak_bytes"]) > 0 for row in ahead)
