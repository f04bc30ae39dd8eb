"""`export`, `import`, `check` on torch CSV files, and jobs whose order comes from one."""

from pathlib import Path

import pytest
import tomli

from tests.jobs import toml_text
from tests.tiers import few

GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
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
    ran = zbc("check", csv(STUCK), "--suggest", "-o", "fixed.csv")
    assert ran.code == 4
    assert ran.out == ""
    assert "error[E201]" in ran.err
    assert "order.csv: row 1, column 2" in ran.err
    assert "suggested: fixed.csv" in ran.err
    assert zbc("check", "fixed.csv").code == 0


def test_without_a_file_the_suggestion_is_printed(zbc, csv):
    ran = zbc("check", csv(STUCK), "--suggest")
    assert ran.code == 4
    Path("printed.csv").write_text(ran.out)
    assert zbc("check", "printed.csv").code == 0


def test_an_order_that_works_needs_no_suggestion(zbc, csv):
    assert zbc("check", csv(GOOD), "--suggest", "-o", "fixed.csv").code == 0
    assert not Path("fixed.csv").exists()


def test_suggestions_are_for_csv_files(zbc, job):
    ran = zbc("check", job(), "--suggest")
    assert ran.code == 2
    assert "CSV" in ran.err


def test_cells_that_are_no_actions_stop_a_suggestion(zbc, csv):
    ran = zbc("check", csv(STUCK + "2F0garbage\n"), "--suggest", "-o", "fixed.csv")
    assert ran.code == 4
    assert "row 3, column 1   write 2F0" in ran.err
    assert not Path("fixed.csv").exists()


@pytest.mark.parametrize("kind", few(["1f1b", "zb-v", "interleaved-1f1b"], ("zb-v",)))
def test_export_import_and_plan_give_the_same_order(zbc, job, kind):
    """With a given partition: a CSV has none, and an automatic one is searched for a schedule only."""
    job(kind=kind, partition={"mode": "uniform"})
    assert zbc("plan", "zbc.toml", "-o", "first").code == 0
    ran = zbc("export", "first", "--to", "torch-csv", "-o", "order.csv")
    assert (ran.code, ran.out) == (0, "")
    assert zbc("export", "first", "--to", "torch-csv").out == Path("order.csv").read_text()
    ran = zbc("import", "order.csv", "--job", "zbc.toml", "-o", "again/zbc.toml")
    assert ran.code == 0, ran.err
    assert zbc("plan", "again/zbc.toml", "-o", "second").code == 0
    first, second = (tomli.loads(Path(name).read_text()) for name in ("zbc.toml", "again/zbc.toml"))
    assert second["schedule"]["file"] == "../order.csv"
    assert second["model"]["hidden"] == first["model"]["hidden"]
    for rank in range(4):
        lines = [Path(name, f"rank-000{rank}.json").read_text().split('"ops"')[1] for name in ("first", "second")]
        assert lines[0] == lines[1]
    before, after = (zbc("check", name, "--json").json() for name in ("first", "second"))
    assert after["makespan_ms"] == before["makespan_ms"]


def test_import_alone_writes_a_small_job_that_plans(zbc, csv):
    assert zbc("import", csv(GOOD)).code == 0
    report = zbc("plan", "zbc.toml", "--json").json()
    assert (report["schedule"], report["ranks"], report["microbatches"]) == ("order.csv", 2, 2)


def test_import_keeps_its_hands_off_a_job_that_is_there(zbc, csv, job):
    job()
    ran = zbc("import", csv(GOOD))
    assert (ran.code, "error[E111]" in ran.err) == (3, True)


@pytest.mark.parametrize("text", [STUCK, GOOD + "\n"])
def test_import_writes_nothing_for_an_order_that_does_not_work(zbc, csv, text):
    assert zbc("import", csv(text)).code == 4
    assert not Path("zbc.toml").exists()


def test_a_job_names_its_order_beside_itself(zbc, csv):
    Path("jobs").mkdir()
    csv(GOOD, "jobs/order.csv")
    text = toml_text(pp=2, m=2).replace('kind = "1f1b"', 'file = "order.csv"')
    Path("jobs/zbc.toml").write_text(text)
    assert zbc("plan", "jobs/zbc.toml").code == 0
    Path("base.toml").write_text('extends = "jobs/zbc.toml"\n')
    assert zbc("plan", "base.toml").code == 0
    assert zbc("plan", "jobs/zbc.toml", "--schedule", "jobs/order.csv").code == 0


@pytest.mark.parametrize(("changes", "hint"), [({"pp": 4}, "set parallel.pp = 2"), ({"pp": 2, "m": 3}, "= 2")])
def test_an_order_for_another_job_is_refused_where_it_is_named(zbc, csv, changes, hint):
    csv(GOOD)
    Path("zbc.toml").write_text(toml_text(**changes).replace('kind = "1f1b"', 'file = "order.csv"'))
    ran = zbc("plan", "zbc.toml")
    assert ran.code == 3
    assert "error[E122]" in ran.err
    assert "zbc.toml:12:8" in ran.err
    assert hint in ran.err


def test_what_an_order_from_a_file_does_not_do_is_refused(zbc, csv):
    csv(GOOD)
    named = toml_text(pp=2, m=2, schedule={"chunks": 2}).replace('kind = "1f1b"', 'file = "order.csv"')
    Path("zbc.toml").write_text(named)
    assert "an order for schedule.chunks = 1, the job has 2" in zbc("plan", "zbc.toml").err
    Path("zbc.toml").write_text(named.replace("chunks = 2", "early = 1"))
    assert "bitpipe, hanayo, not for an order from a file" in zbc("plan", "zbc.toml").err


def test_a_job_with_a_missing_or_broken_order_says_so(zbc, csv):
    Path("zbc.toml").write_text(toml_text(pp=2, m=2).replace('kind = "1f1b"', 'file = "order.csv"'))
    assert "error[E410] csv: cannot read order.csv" in zbc("plan", "zbc.toml").err
    csv(STUCK)
    assert "order.csv: row 1, column 2" in zbc("plan", "zbc.toml").err


def test_torchtitan_settings_name_the_csv_written_beside_them(zbc, job):
    job()
    ran = zbc("export", "zbc.toml", "--to", "torchtitan", "-o", "titan.toml")
    assert ran.code == 0, ran.err
    settings = tomli.loads(Path("titan.toml").read_text())
    assert settings["parallelism"]["pipeline_parallel_schedule_csv"] == str(Path("titan.csv").absolute())
    assert zbc("check", "titan.csv").code == 0


def test_torchtitan_0_3_is_told_in_python_which_must_be_named_so(zbc, job):
    job(kind="zb-v")
    ran = zbc("export", "zbc.toml", "--to", "torchtitan", "--dialect", "0.3", "-o", "titan.toml")
    assert ran.code == 2 and "choose titan.py" in " ".join(ran.err.split()) and not Path("titan.toml").exists()
    assert zbc("export", "zbc.toml", "--to", "torchtitan", "--dialect", "0.3", "-o", "titan.py").code == 0
    assert "def planned" in Path("titan.py").read_text() and zbc("check", "titan.csv").code == 0


def test_a_refused_export_writes_nothing(zbc, job):
    job(kind="zb-v")
    ran = zbc("export", "zbc.toml", "--to", "megatron", "-o", "x.args")
    assert (ran.code, "error[E413]" in ran.err) == (4, True)
    assert not Path("x.args").exists()


def test_a_csv_is_drawn(zbc, csv):
    assert "0 |F0F1" in zbc("visualize", csv(GOOD), "--by", "slot").out
    assert "error[E201]" in zbc("visualize", csv(STUCK, "stuck.csv")).err


def test_the_order_of_a_torch_class_is_imported(zbc, folder):
    ran = zbc("import", "ScheduleZBVZeroBubble", "--ranks", "2", "--microbatches", "4", "-o", "mine.toml")
    assert ran.code == 0 and "2 ranks, 4 stages, 4 microbatches" in ran.out, ran.err
    assert Path("mine.csv").read_text().startswith("0F0,0F1,0F2,3F0,3I0,3W0,")
    assert zbc("check", "mine.toml").code == 0
    again = zbc("import", "ScheduleGPipe", "--ranks", "2", "--microbatches", "4", "-o", "mine.toml")
    assert "error[E111] import: mine.toml exists" in again.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ScheduleGPipe"], "ScheduleGPipe needs both"),
        (["ScheduleMine", "--ranks", "2", "--microbatches", "4"], "is not one of Schedule1F1B, ScheduleGPipe, "),
        (["ScheduleDualPipeV", "--ranks", "4", "--microbatches", "7"], "at least as many microbatches as stages"),
        (["ScheduleGPipe", "--ranks", "2", "--microbatches", "4", "--job", "none.toml"], "none.toml"),
    ],
)
def test_a_torch_class_that_gives_no_order_leaves_no_file(zbc, folder, arguments, said):
    ran = zbc("import", *arguments, "-o", "mine.toml")
    assert ran.code in (2, 3) and said in " ".join(ran.err.split()), ran.err
    assert not Path("mine.toml").exists() and not Path("mine.csv").exists()


@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleDualPipeV"])
def test_what_torch_classes_run_is_proven(zbc, folder, name):
    assert zbc("import", name, "--ranks", "3", "--microbatches", "6", "-o", "mine.toml").code == 0
    assert zbc("check", "mine.csv").code == 0


def test_a_file_by_another_name_is_not_read_as_an_order(zbc, folder):
    (folder / "picture.svg").write_text("<svg>\n<title>1f1b, 4 ranks</title>\n")
    ran = zbc("import", "picture.svg")
    assert (ran.code, ran.out) == (2, "") and "does not end in .csv" in ran.err.replace("\n", " ")
    assert "E411" not in ran.err and not (folder / "zbc.toml").exists()
