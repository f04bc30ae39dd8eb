"""Steps without a flush from the command line."""

import pytest

COSTS = {"f": 1.0, "b": 1.0, "w": 1.0}


@pytest.mark.long("asynchronous")
@pytest.mark.parametrize("sync", ["two-versions", "asynchronous"])
def test_a_plan_says_its_period_and_what_each_rank_leaves_of_it_idle(sync, job, zbc):
    job(kind="1f1b", pp=4, m=8, optimizer={"sync": sync}, costs=COSTS)
    for more in ((), ("-v",)):
        out = zbc("plan", "zbc.toml", "-o", f"plan{len(more)}", *more).out
        assert "this is another training" in out and "24 ms each; with one 33 ms (+37.5%)" in out and "idle 0.0%" in out
        lines = out.splitlines()
        head = next(i for i, line in enumerate(lines) if "rank  stages  busy ms" in line)
        assert "idle ms" in lines[head]
        assert [line.split()[2:4] for line in lines[head + 1 : head + 5]] == [["24.00", "0"]] * 4
    assert zbc("check", "plan0").code == 0
