"""`compare` of schedules and sweeps, and `diff` of two plans: tables that fit a terminal, orders of ops aligned."""

import csv
import io
import shutil
from pathlib import Path

import pytest

from tests.jobs import toml_text
from tests.profiles import profile_of
from zbc.compiler.compile import compile_job
from zbc.compiler.shapes import load_job
from zbc.ir import Kind, Op
from zbc.plan.directory import StoredPlan

UNIT = {"costs": {"f": 1.0, "b": 1.0, "w": 1.0}}
PAIR = ("--schedule", "1f1b,interleaved-1f1b,gpipe,chimera")


def test_bytes_of_messages_and_of_the_vocabulary_are_those_of_each_rank(zbc, job):
    # An inner rank of 1F1B sends m activations and m gradients of 2 x 16 x 32 float32 each.
    (entry,) = zbc("compare", job(), "--schedule", "1f1b", "--json").json()["schedules"]
    tensor = 2 * 16 * 32 * 4
    assert [rank["sent_bytes"] for rank in entry["per_rank"]] == [8 * tensor, 16 * tensor, 16 * tensor, 8 * tensor]
    (row,) = csv.DictReader(io.StringIO(zbc("compare", "zbc.toml", "--schedule", "1f1b", "--format", "csv").out))
    assert float(row["sent_gib"]) == pytest.approx(16 * tensor / 2**30, abs=1e-9)
    # float32 log-probabilities of one microbatch, for all words: 1F1B holds only one microbatch there.
    assert [rank["logit_bytes"] for rank in entry["per_rank"]] == [0, 0, 0, 4 * 256 * 2 * 16]
    recomputed = job(memory={"activations": "recompute"})
    (entry,) = zbc("compare", recomputed, "--schedule", "1f1b", "--json").json()["schedules"]
    assert not any(rank["logit_bytes"] for rank in entry["per_rank"])


@pytest.mark.long("sweep1", "sweep2")
@pytest.mark.parametrize(
    "sweep",
    [
        (),
        ("--sweep=costs.comm=0,1,10",),
        ("--sweep=costs.comm=0,10", "--sweep=schedule.microbatches=4,16", "--sweep=schedule.microbatch_size=1,2"),
    ],
)
def test_tables_fit_eighty_columns(zbc, job, monkeypatch, sweep):
    monkeypatch.setenv("COLUMNS", "80")
    lines = zbc("compare", job(**UNIT, m=16), *PAIR, *sweep).out.splitlines()
    table = lines[: lines.index("")]
    assert len(table) >= 5 and max(map(len, table)) <= 80
    assert table[0].split()[0] == "schedule" and table[0].split()[-1] == "MiB"
    assert ("vs 1F1B" in table[0]) is (len(sweep) < 2)
    assert any(line.startswith("-v: other columns") for line in lines)
    assert sweep or max(map(len, lines)) <= 80


@pytest.mark.long
def test_the_default_is_eight_rows_of_six_columns_and_all_else_under_v(zbc, job):
    """With 1F1B among them as the baseline, and the command for the first."""
    ran = zbc("compare", job(m=8), "--set", "schedule.memory_limit='1.2x'")
    lines = ran.out.splitlines()
    table = lines[1 : lines.index("")]
    assert lines[0].split() == ["schedule", "step", "vs", "1F1B", "tokens/s/rank", "idle", "MiB"]
    assert len(table) == 8 and len(lines) <= 24
    rows = {line.split()[0]: line.split() for line in table}
    entries = {
        one["schedule"]: one
        for one in zbc("compare", "zbc.toml", "--set", "schedule.memory_limit='1.2x'", "--json").json()["schedules"]
    }
    for name, row in rows.items():
        one = entries[name]
        assert row[2] == f"{one['speedup_over_1f1b']:.2f}x" and row[4] == f"{one['idle_rate']:.1%}"
        assert row[3] == f"{one['tokens_per_s_per_rank']:,.0f}"
        assert one["tokens_per_s"] == pytest.approx(4 * one["tokens_per_s_per_rank"])
    assert rows["1f1b"][2] == "1.00x"
    failed = [name for name, one in entries.items() if "error" in one]
    assert failed and f"{len(failed)} not planned, or too large" in ran.out and all(name in ran.out for name in failed)
    best = table[0].split()[0]
    assert lines[-1] == f"next: zbc plan zbc.toml --schedule {best} --set 'schedule.memory_limit='\"'\"'1.2x'\"'\"''"
    full = zbc("compare", "zbc.toml", "--set", "schedule.memory_limit='1.2x'", "-v").out
    assert all(f"\n{name}" in full for name in entries) and "bubble" in full and "of span" in full


def test_1f1b_is_what_others_are_held_against_where_nobody_asked_for_it(zbc, job):
    (entry,) = zbc("compare", job(**UNIT), "--schedule", "zb-h1", "--json").json()["schedules"]
    both = zbc("compare", "zbc.toml", "--schedule", "1f1b,zb-h1", "--json").json()["schedules"]
    assert [one["speedup_over_1f1b"] for one in both] == [entry["speedup_over_1f1b"], 1.0]
    assert entry["speedup_over_1f1b"] == pytest.approx(33 / 27)


@pytest.mark.long
def test_a_row_whose_partition_memory_has_shifted_says_so(zbc, job):
    """The even partition of 1F1B needs most memory on rank 0, which holds four microbatches."""
    few = ("--schedule", "1f1b,zb-h1")
    uneven = zbc("plan", job(layers=24, costs={"comm": 0.0}), "--json").json()
    assert "*" not in zbc("compare", "zbc.toml", *few).out
    tight = f"hardware.memory_gib={0.9 * max(r['peak_bytes'] for r in uneven['per_rank']) / 2**30:.9f}"
    ran = zbc("compare", "zbc.toml", *few, "--set", tight)
    assert ran.code == 0, ran.out
    assert "*: memory rules out the partition that is most even in time" in ran.out
    assert [line for line in ran.out.splitlines() if line.endswith("*")]
    assert "and memory rules out the partition" in zbc("plan", "zbc.toml", "--set", tight).out


@pytest.mark.long
def test_crossings_are_named_in_the_table_and_in_json(zbc, job):
    sweep = ("--sweep", "costs.comm=0,2")
    few = ("--schedule", "1f1b,interleaved-1f1b,gpipe")
    out = zbc("compare", job(**UNIT, m=16), *few, *sweep).out
    document = zbc("compare", "zbc.toml", *few, *sweep, "--json").json()
    first = next(one for one in document["crossings"] if one["fastest"])
    assert (first["key"], first["before"]["schedule"]) == ("costs.comm", "interleaved-1f1b")
    assert "as costs.comm grows, the fastest is" in out
    assert f"interleaved-1f1b up to {first['at']:.4g}"[:24] in out
    others = [one for one in document["crossings"] if not one["fastest"]]
    assert bool(others) == ("after the fastest: -v says where" in out)
    verbose = zbc("compare", "zbc.toml", *few, *sweep, "-v").out
    assert all(
        f"{one['after']['schedule']} passes {one['before']['schedule']} at costs.comm" in verbose for one in others
    )


def test_values_that_were_swept_in_quotes_are_shown_without_them(zbc, job):
    sweep = ("--schedule", "1f1b,gpipe", "--sweep", """schedule.memory_limit="1x",'3x'""")
    for form in ((), ("--format", "csv"), ("--format", "md")):
        out = zbc("compare", job(**UNIT), *sweep, *form).out.partition("\nnext:")[0]
        assert "1x" in out and "3x" in out and '"1x' not in out and "'3x" not in out


def test_a_sweep_without_effect_says_so(zbc, job):
    sweep = ("--schedule", "1f1b,zb-h1", "--sweep", "hardware.link_gbps=1,100")
    given = zbc("compare", job(**UNIT), *sweep).out
    assert "hardware.link_gbps changes nothing here: the times of this job are not estimated" in given
    assert "changes nothing" not in zbc("compare", "zbc.toml", *sweep[:3], "costs.comm=0,1").out
    assert (
        "changes nothing" not in zbc("compare", job(costs={"comm": 1.0}), *sweep[:3], "hardware.tflops=0.001,0.01").out
    )
    assert "changes nothing" in zbc("compare", "zbc.toml", *sweep).out, "a transfer takes what was given"
    job(hardware={"link_us": 0})
    assert "changes nothing" not in zbc("compare", "zbc.toml", *sweep).out


def test_a_profile_takes_the_place_of_what_a_plan_was_made_with_and_is_named_as_it_was_given(zbc, job, tmp_path):
    path, measured = job(costs={"f": 1.0, "b": 1.0, "w": 1.0}), tmp_path / "measured.json"
    measured.write_text(profile_of(load_job(Path(path))).dumps())
    zbc("plan", path, "--schedule", "1f1b", "-o", tmp_path / "p", "-q")
    (row,) = zbc("compare", tmp_path / "p", "--schedule", "1f1b", "--profile", measured, "--json").json()["schedules"]
    again = zbc("plan", tmp_path / "p", "--profile", measured, "-o", tmp_path / "q", "--json").json()
    assert (row["costs"], row["makespan_ms"]) == ("profiled", again["makespan_ms"])
    refused = zbc("compare", path, "--schedule", "1f1b,gpipe", "--profile", tmp_path / "none.json")
    assert refused.code == 3 and f"--> --profile {tmp_path / 'none.json'}" in refused.err and "--set" not in refused.err


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A folder with a job and three plans of it."""
    made = tmp_path_factory.mktemp("planned")
    (made / "zbc.toml").write_text(toml_text())
    for kind in ("1f1b", "eager-1f1b", "zb-v"):
        compile_job(load_job(made / "zbc.toml", [f"schedule.kind={kind}"])).write(made / kind)
    return made


@pytest.fixture
def plans(planned, folder):
    """Copies these plans into the current folder."""
    shutil.copytree(planned, folder, dirs_exist_ok=True)


def test_a_plan_does_not_differ_from_itself(zbc, plans):
    ran = zbc("compare", "1f1b", "1f1b")
    assert ran.code == 0
    assert "the same ops in the same order on every rank" in ran.out
    changes = [line.split()[-1] for line in ran.out.split("\n") if line.startswith(("makespan", "peak", "span"))]
    assert set(changes) == {"="}
    assert zbc("compare", "1f1b", "1f1b", "--format", "json").json()["same_order"] is True
    ran = zbc("compare", "1f1b", "zb-v", "--sweep", "costs.comm=0,1")
    assert ran.code == 2 and "--sweep: works with one job" in " ".join(ran.err.split())


def test_two_orders_are_aligned_op_by_op(zbc, plans):
    out = zbc("compare", "1f1b", "eager-1f1b").out
    assert "15 ops moved" in out
    assert "only in" not in out
    lines = out.split("\n")
    first = lines.index("rank 0")
    assert lines[first + 1].split() == ["3", "F", "s0", "m3", "3", "F", "s0", "m3"]
    assert lines[first + 2].split() == [">", "4", "F", "s0", "m4"]
    marks = {line.index(mark) for line in lines[first + 1 :] for mark in "<>" if mark in line}
    assert len(marks) == 1
    assert max(map(len, lines)) <= 80


def test_the_numbers_of_both_plans_and_their_change_are_there(zbc, plans):
    document = zbc("compare", "1f1b", "zb-v", "--json").json()
    assert (document["format"], document["version"]) == ("zbc-diff", 1)
    for side, name in (("first", "1f1b"), ("second", "zb-v")):
        report = zbc("check", name, "--json").json()
        metrics = document["metrics"]
        assert metrics["makespan_ms"][side] == pytest.approx(report["makespan_ms"])
        assert metrics["bubble_of_span"][side] == pytest.approx(report["bubble_rate_span"])
        most = max(rank["peak_bytes"] for rank in report["per_rank"])
        assert metrics["peak_memory_bytes"][side] == pytest.approx(most, rel=1e-6)
    assert document["same_placement"] is False
    changed = document["ranks"][0]
    assert changed["only_second"] > 0
    order = [op for op in StoredPlan.read(Path("zb-v")).program.ranks[0] if op.kind.computes]
    step = order.index(Op(Kind.F, 7, 0))
    assert {"op": "F s7 m0", "first_step": None, "second_step": step} in changed["changes"]
    assert "placement  4 stages -> 8" in zbc("compare", "1f1b", "zb-v").out


def test_long_listings_are_cut_unless_asked_for(zbc, plans):
    short, long = (zbc("compare", "1f1b", "zb-v", *more).out for more in ((), ("-v",)))
    assert "more lines: -v" in short
    assert "more lines" not in long
    assert len(long) > len(short) + 1000


def test_a_csv_and_a_job_are_compared_too(zbc, plans):
    assert zbc("export", "1f1b", "--format", "torch-csv", "-o", "order.csv").code == 0
    assert "the same ops" in zbc("compare", "1f1b", "order.csv").out
    assert "the same ops" in zbc("compare", "order.csv", "zbc.toml").out
    assert "error[E401]" in zbc("compare", "order.csv", "nothing").err
    assert Path("order.csv").exists()


@pytest.mark.parametrize("more", [(), ("-v",)], ids=["brief", "all"])
def test_a_latex_table_has_as_many_cells_in_every_line(zbc, job, more):
    ran = zbc("compare", job(**UNIT), "--schedule", "1f1b,zb-v", "--sweep", "costs.comm=0,1", "--format", "tex", *more)
    begin, top, *lines, bottom, end = ran.out.strip().splitlines()
    assert (top, bottom, end) == ("\\toprule", "\\bottomrule", "\\end{tabular}")
    spec = begin.removeprefix("\\begin{tabular}{").removesuffix("}")
    rows = [line for line in lines if line != "\\midrule"]
    assert [line.replace("\\%", "").count(" & ") + 1 for line in rows] == [len(spec)] * 5
    assert all(line.endswith(" \\\\") for line in rows) and "%" not in ran.out.replace("\\%", "")


@pytest.mark.long
def test_a_latex_table_has_a_dash_for_what_is_not_known_and_a_comment_for_what_cannot_be_planned(zbc, job):
    limit = ("--set", "schedule.memory_limit=0.3x", "--schedule", "1f1b,v-min")
    lines = zbc("compare", job(pp=8, layers=16, m=8), *limit, "--format", "tex").out.splitlines()
    assert any(" & -- & " in line for line in lines) and not any("?" in line for line in lines if line[0] != "%")
    ran = zbc(
        "compare", job(), "--schedule", "1f1b,chimera", "--set", "optimizer.sync=two-versions", "--format", "tex", "-v"
    )
    (line,) = [line for line in ran.out.splitlines() if line.startswith("% ")]
    assert line.startswith("% chimera: [E1")


@pytest.mark.long
def test_steps_are_drawn_against_the_numbers_of_any_key_that_is_swept(zbc, job):
    sweep = ("--sweep", "hardware.link_gbps=1,10,100", "--sweep", "schedule.microbatches=8,16")
    zbc("compare", job(), "--schedule", "1f1b,zb-v", *sweep, "-o", "a.svg")
    picture = Path("a.svg").read_text()
    assert "<title>Steps by hardware.link_gbps</title>" in picture
    assert picture.count("<polyline") == 4 and picture.count("<circle") == 12  # a curve for each number of microbatches
    assert "zb-v microbatches=16, 10: " in picture and "hardware.link_gbps; ms per sequence" in picture
    ran = zbc("compare", job(), "--schedule", "1f1b,zb-v", "-o", "b.svg")
    assert ran.code == 3 and "E109" in ran.err and "two or more values of a key" in ran.err
    assert not Path("b.svg").exists()


def test_jitter_is_a_column_where_it_is_asked_for(zbc, job):
    """Schedules differ in sensitivity; without jitter every step is as predicted."""
    rows = zbc("compare", job(**UNIT), "--schedule", "1f1b,zb-h2", "--jitter", "10%", "--json").json()["schedules"]
    assert all(0 < row["jitter"] < 0.2 for row in rows) and rows[0]["jitter"] != rows[1]["jitter"]
    assert "jitter" in zbc("compare", "zbc.toml", "--schedule", "1f1b", "--jitter", "10%").out.splitlines()[0].split()
    (row,) = zbc("compare", "zbc.toml", "--schedule", "1f1b", "--json").json()["schedules"]
    assert "jitter" not in row
