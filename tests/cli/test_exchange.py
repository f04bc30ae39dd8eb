"""`export`, `check` on torch CSV files, and jobs whose order comes from one."""

from pathlib import Path

import pytest
import tomli

from tests.jobs import write_job
from tests.tiers import few

GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
NAMED = {"kind": None, "file": "order.csv"}
STUCK = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"


@pytest.fixture
def csv(folder):
    def write(text, name="order.csv"):
        Path(name).write_text(text)
        return name

    return write


def test_a_csv_is_checked_like_a_plan(zbc, csv):
    ran = zbc("check", csv(GOOD))
    assert ran.code == 0, ran.err
    assert "proven     complete, paired, FIFO, deadlock-free" in ran.out
    assert "F = B = W = 1" in ran.out
    report = zbc("check", "order.csv", "--json").json()
    assert (report["ranks"], report["stages"], report["microbatches"]) == (2, 2, 2)
    assert (report["makespan_ms"], report["deadlock_free"]) == (9.0, True)


def test_a_deadlocking_csv_is_refused_and_a_repaired_order_written(zbc, csv):
    ran = zbc("check", csv(STUCK), "--fix", "-o", "fixed.csv")
    assert ran.code == 4
    assert ran.out == ""
    assert "error[E201]" in ran.err
    assert "order.csv: row 1, column 2" in ran.err
    assert "suggested: fixed.csv" in ran.err
    Path("printed.csv").write_text(zbc("check", "order.csv", "--fix").out)
    assert zbc("check", "printed.csv").code == zbc("check", "fixed.csv", "--fix", "-o", "again.csv").code == 0
    assert not Path("again.csv").exists(), "an order that works needs no other"


def test_cells_that_are_no_actions_stop_a_suggestion(zbc, csv):
    ran = zbc("check", csv(STUCK + "2F0garbage\n"), "--fix", "-o", "fixed.csv")
    assert ran.code == 4
    assert "row 3, column 1   write 2F0" in ran.err
    assert not Path("fixed.csv").exists()


@pytest.mark.long
@pytest.mark.parametrize("kind", few(["1f1b", "zb-v", "interleaved-1f1b"], ("zb-v",)))
def test_an_exported_order_is_planned_the_same(zbc, job, kind):
    """With a given partition: a CSV has none, and an automatic one is searched for a schedule only."""
    job(kind=kind, partition={"layers_per_stage": "equal"})
    assert zbc("plan", "zbc.toml", "-o", "first").code == 0
    ran = zbc("export", "first", "--format", "torch-csv", "-o", "order.csv")
    assert (ran.code, ran.out) == (0, "")
    assert zbc("export", "first", "--format", "torch-csv").out == Path("order.csv").read_text()
    assert zbc("plan", "zbc.toml", "--schedule", "order.csv", "-o", "second").code == 0
    for rank in range(4):
        lines = [Path(name, f"rank-000{rank}.json").read_text().split('"ops"')[1] for name in ("first", "second")]
        assert lines[0] == lines[1]
    before, after = (zbc("check", name, "--json").json() for name in ("first", "second"))
    assert after["makespan_ms"] == before["makespan_ms"]


def test_init_writes_a_small_job_for_an_order_that_plans(zbc, csv, job):
    assert zbc("init", "--schedule", csv(GOOD)).code == 0
    report = zbc("plan", "zbc.toml", "--json").json()
    assert (report["schedule"], report["ranks"], report["microbatches"]) == ("order.csv", 2, 2)
    assert "error[E111]" in zbc("init", "--schedule", "order.csv").err


@pytest.mark.parametrize("text", [STUCK, GOOD + "\n"])
def test_init_writes_nothing_for_an_order_that_does_not_work(zbc, csv, text):
    assert zbc("init", "--schedule", csv(text)).code == 4
    assert not Path("zbc.toml").exists()


@pytest.mark.long
def test_a_job_names_its_order_beside_itself(zbc, csv):
    Path("jobs").mkdir()
    csv(GOOD, "jobs/order.csv")
    write_job(Path("jobs"), pp=2, m=2, schedule=NAMED)
    assert zbc("plan", "jobs/zbc.toml").code == 0
    assert zbc("plan", "jobs/zbc.toml", "--schedule", "jobs/order.csv").code == 0


ORDERS = [  # of a file, changes of the job that names it, what is said
    (GOOD, {"pp": 4}, "error[E110]", "zbc.toml:14:8   set parallel.pp = 2"),
    (GOOD, {"m": 3}, "error[E110]", "zbc.toml:14:8   set schedule.microbatches = 2"),
    (None, {}, "error[E411] csv: cannot read order.csv", ""),
    (STUCK, {}, "order.csv: row 1, column 2", ""),
    (GOOD, {"schedule": {"chunks": 2}}, "an order for schedule.chunks = 1, the job has 2", ""),
    (GOOD, {"schedule": {"early": 1}}, "bitpipe, hanayo, not for an order from a file", ""),
]


@pytest.mark.parametrize(("order", "changes", "said", "place"), ORDERS)
def test_an_order_that_is_not_the_jobs_or_missing_or_broken_is_refused(zbc, csv, job, order, changes, said, place):
    if order is not None:
        csv(order)
    tables = {"pp": 2, "m": 2, **changes, "schedule": {**NAMED, **changes.get("schedule", {})}}
    ran = zbc("plan", job(**tables))
    assert ran.code in (3, 4) and said in ran.err and place in ran.err, ran.err


@pytest.mark.long
def test_torchtitan_gets_settings_or_since_0_3_a_module_beside_the_csv(zbc, job):
    job()
    ran = zbc("export", "zbc.toml", "--format", "torchtitan", "-o", "titan.toml")
    assert ran.code == 0, ran.err
    settings = tomli.loads(Path("titan.toml").read_text())
    assert settings["parallelism"]["pipeline_parallel_schedule_csv"] == str(Path("titan.csv").absolute())
    assert zbc("check", "titan.csv").code == 0
    job(kind="zb-v")
    ran = zbc("export", "zbc.toml", "--format", "torchtitan", "--dialect", "0.3", "-o", "other.toml")
    assert ran.code == 2 and "choose other.py" in " ".join(ran.err.split()) and not Path("other.toml").exists()
    assert zbc("export", "zbc.toml", "--format", "torchtitan", "--dialect", "0.3", "-o", "titan.py").code == 0
    assert "def planned" in Path("titan.py").read_text() and zbc("check", "titan.csv").code == 0


def test_a_csv_is_drawn(zbc, csv):
    assert "0 |F0F1" in zbc("visualize", csv(GOOD), "--by", "slot").out
    assert "error[E201]" in zbc("visualize", csv(STUCK, "stuck.csv")).err


@pytest.mark.parametrize(
    ("name", "stages"),
    [("Schedule1F1B", 2), ("ScheduleInterleaved1F1B", 4), ("ScheduleZBVZeroBubble", 4), ("ScheduleDualPipeV", 4)],
)
def test_the_order_of_a_torch_class_is_proven_and_planned(zbc, job, name, stages):
    checked = zbc("check", job(pp=2, m=4, layers=4), "--schedule", f"torch:{name}", "--json").json()
    assert (checked["ranks"], checked["stages"], checked["microbatches"]) == (2, stages, 4)
    exported = zbc("export", "zbc.toml", "--schedule", f"torch:{name}", "--format", "torch-csv").out
    if name == "ScheduleZBVZeroBubble":
        assert exported.startswith("0F0,0F1,0F2,3F0,3I0,3W0,")
