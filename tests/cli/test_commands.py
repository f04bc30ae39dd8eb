"""The output of each command, as text and as JSON."""

import csv
import io
import json
import re
from pathlib import Path

import pytest

from tests.compiler.grid import FIXED
from tests.jobs import write_job
from tests.tiers import few
from zbc.commands.jobs import Template, template_text
from zbc.commands.summary import layer_ranges, ranges
from zbc.compiler.compile import compile_job
from zbc.compiler.cost import estimate
from zbc.compiler.recall import costs_of
from zbc.compiler.schedules import SCHEDULES
from zbc.compiler.shapes import load_job
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Op
from zbc.job.spec import SECTIONS
from zbc.plan.directory import StoredPlan

OF_A_REPORT = """
format version schedule ranks stages microbatches ops makespan_ms span_ms bubble_rate_makespan
bubble_rate_span lower_bound_makespan_ms lower_bound_span_ms deadlock_free survives_blocking_sends
compile_seconds per_rank
"""
HAND = ["--schedule", ",".join(FIXED)]  # made by formula: no search, so these tests are fast
PLUGIN = """from zbc.compiler.schedules import SCHEDULES


def make(request):
    return SCHEDULES["gpipe"].make(request)
"""


def with_plugin(folder, name, code=PLUGIN, **schedule):
    """A job with the order of a plugin next to it."""
    (folder / f"{name}.py").write_text(code)
    write_job(folder, kind=f"{name}:make", schedule=schedule)


RANK_KEYS = ["rank", "busy_ms", "first_start_ms", "last_end_ms", "peak_activation_units", "peak_bytes", "weight_bytes"]


def is_report(document):
    assert (document["format"], document["version"]) == ("zbc-report", 1)
    assert {*OF_A_REPORT.split()} <= set(document)
    for rank, entry in enumerate(document["per_rank"]):
        assert set(RANK_KEYS) <= set(entry)
        assert entry["rank"] == rank


# ---- plan ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_plan_writes_a_directory_and_says_what_it_is(zbc, job):
    ran = zbc("plan", job(kind="zb-v", costs={"f": 1.0, "b": 1.0, "w": 1.0}))
    assert (ran.code, ran.err) == (0, "")
    plan = StoredPlan.read(Path("plan"))
    predicted = plan.manifest.predicted
    assert ran.out.startswith("zb-v: 4 ranks, 8 stages, 8 microbatches, ")
    idle = 1 - sum(rank["busy_ms"] for rank in predicted["per_rank"]) / 4 / predicted["makespan_ms"]
    assert f"idle {idle:.1%}, balance " in ran.out and "bubble" not in ran.out
    assert re.search(r"; \d\.\d\dx as fast as 1F1B \([\d.]+ ms\)\n +[\d,]+ tokens/s, [\d,]+ per", ran.out)
    for words in ("deadlock-free", "survives blocking sends: no", f"id {plan.manifest.id}", "zbc run plan --local 4"):
        assert words in ran.out
    full = zbc("plan", "zbc.toml", "-v").out
    for name in ("embed", "head", *(str(names[-1]).removeprefix("layers.") for names in plan.manifest.layers)):
        assert name in full
    for rate in ("bubble_rate_makespan", "bubble_rate_span"):
        assert f"{predicted[rate]:.1%} of it" in full


@pytest.mark.long
def test_memory_by_category_is_that_of_the_report(zbc, job):
    out = zbc("plan", job(kind="zb-v", hardware={"device": "cuda"}), "-v").out
    (entry,) = zbc("compare", "zbc.toml", "--schedule", "zb-v", "--json").json()["schedules"]
    lines = out.splitlines()
    at = lines.index(next(line for line in lines if line.startswith("memory")))
    heads = lines[at + 2].split()
    assert heads == ["rank", "MiB", "weights", "grads", "masters", "state", "kept", "logits", "buffers"]
    for rank, line in zip(entry["per_rank"], lines[at + 3 : at + 7], strict=True):
        cells = dict(zip(heads, map(float, line.split()), strict=True))
        assert cells["MiB"] == pytest.approx(rank["peak_bytes"] / 2**20, abs=0.01)
        parts = ("weights", "grads", "masters", "state", "kept", "buffers")
        whole = sum(cells[part] for part in parts)  # not all gradients are there when activations are most
        assert whole - cells["grads"] - 0.01 <= cells["MiB"] <= whole + 0.01
        assert cells["logits"] == pytest.approx(rank["logit_bytes"] / 2**20, abs=0.01)


@pytest.mark.long
def test_a_long_plan_shows_the_ends_of_its_tables_unless_all_is_asked_for(zbc, job):
    short = zbc("plan", job(pp=20, layers=20, m=20)).out
    full = zbc("plan", "zbc.toml", "-v").out
    assert "11 more: -v" in short and len(short.splitlines()) <= 35
    assert "more: -v" not in full
    tables = [full[full.index(f"\n{label} ") :] for label in ("ranks", "memory", "stages")]
    rows = [len(re.findall(r"^           \d+ ", table.partition("\nplan ")[0], re.MULTILINE)) for table in tables]
    assert rows == [60, 40, 20], "every rank and every stage has its row"


def test_ranges_join_runs_of_numbers_and_of_layers():
    for numbers, text in (([], ""), ([3], "3"), ([0, 7], "0 7"), ([1, 2], "1 2"), ([4, 0, 1, 2], "0-2 4")):
        assert ranges(numbers) == text
    assert layer_ranges(["embed", "layers.0", "layers.1", "layers.2"]) == "embed, layers.0-2"
    assert layer_ranges(["layers.9", "head"]) == "layers.9, head"


@pytest.mark.long
def test_commands_to_go_on_with_fit_the_device_and_quote_names_of_folders(zbc, job, folder):
    assert zbc("check", job()).code == 0 and [path.name for path in folder.iterdir()] == ["zbc.toml"]
    out = zbc("plan", "zbc.toml", "-o", "a b").out
    assert "zbc visualize 'a b'" in out and "zbc run 'a b' --local 4" in out
    assert "zbc plan 'c d/zbc.toml'" in zbc("init", "c d").out
    out = zbc("plan", job(hardware={"device": "cuda"})).out
    assert "torchrun --standalone --nproc-per-node 4 -m zbc run plan" in out
    (folder / "zbc.toml").unlink()
    assert zbc("init", "-q").out == "" and (folder / "zbc.toml").is_file()


PASSES = {  # what a pass returns: what is said of it
    "1 / 0": "E121.*schedule.passes = passes:f0 failed.*ZeroDivisionError",
    "ranks": "E121.*pass passes:f1 returned tuple",
    "program.with_ranks([[*ops, 1] for ops in ranks], by='f')": "E121.*pass passes:f2 has 1 in the order",
    "replace(program, dp=2)": "E121.*pass passes:f3 returned .* other stages",
    "program.with_ranks([ops[:-1] for ops in ranks], by='f')": "E202.*pass passes:f4 .*never runs",
    "program.with_ranks([ops[::-1] for ops in ranks], by='f')": "E20[16].*pass passes:f5 made an order",
}


@pytest.mark.long
def test_a_pass_that_breaks_an_order_is_named(zbc, job, folder):
    lines = [
        f"def f{n}(program, context):\n    ranks = program.ranks\n    return {made}" for n, made in enumerate(PASSES)
    ]
    (folder / "passes.py").write_text("\n".join(["from dataclasses import replace", *lines]))
    for n, said in enumerate(PASSES.values()):
        named = f'schedule.passes=["passes:f{n}"]'
        ran = zbc("plan", job(layers=10, schedule={"kind": "auto"}), "-q", "--budget", "0", "--set", named)
        assert ran.code in (3, 4) and re.search(said, ran.err, re.DOTALL), ran.err
        assert not (folder / "plan").exists()


def test_a_plugin_is_told_what_the_job_asks_of_an_order(zbc, folder):
    asks = "(request.v, request.group, request.early, request.overlap) == (1, 3, 1, True)"
    code = PLUGIN.replace("return", f"return {asks} and")
    with_plugin(folder, "asking", code, chunks=1, group=3, early=1, overlap=True)
    assert zbc("plan", "zbc.toml", "-q").code == 0
    assert "returned bool" in zbc("plan", "zbc.toml", "-q", "--set", "schedule.early=2").err


@pytest.mark.long
def test_orders_of_ones_own_are_compared_with_schedules(zbc, job, folder):
    (folder / "my_order.py").write_text(PLUGIN)
    zbc("export", job(kind="zb-h1"), "--format", "torch-csv", "-o", "order.csv")
    zbc("plan", "zbc.toml", "--schedule", "my_order:make", "-q")
    assert StoredPlan.read(Path("plan")).manifest.schedule == "my_order:make"
    made = zbc("compare", "zbc.toml", "--schedule", "1f1b,zb-h1,my_order:make,order.csv", "--json").json()
    steps = {entry["schedule"]: entry["makespan_ms"] for entry in made["schedules"]}
    assert set(steps) == {"1f1b", "zb-h1", "my_order:make", "order.csv"}
    assert steps["my_order:make"] == StoredPlan.read(Path("plan")).manifest.predicted["makespan_ms"]
    everything = zbc("compare", "zbc.toml", "--schedule", "all,my_order:make", "--json").json()["schedules"]
    assert {"zb-v", "my_order:make"} <= {entry["schedule"] for entry in everything}


OTHER = f"""from zbc.ir import Kind, Op
{PLUGIN}

honest = make

def make(request):
    found = honest(request)
    return found.with_ranks(((ENTRY,), *found.ranks[1:]), by='me')
"""
SLICED = """
from zbc.ir import Kind, Op, Placement, Program


def make(request):
    halves = ((Kind.F, 0), (Kind.F, 1), (Kind.BW, 1), (Kind.BW, 0))
    ranks = [[Op(kind, r, i, slice=k) for i in range(request.m) for kind, k in halves] for r in range(request.p)]
    return Program(Placement.linear(request.p), request.m, tuple(map(tuple, ranks)), slices=2)
"""
WRONG = [  # code, number of chunks, the error, what is said
    ("def make(request):\n    return {}[request.p]\n", None, "E121", "KeyError: 4"),
    ("def make(:\n", None, "E121", "SyntaxError"),
    ("make = 3\n", None, "E121", "is int, not something to call"),
    ("import sys\ndef make(request):\n    sys.exit()\n", None, "E121", "SystemExit"),
    ("import sys\nsys.exit(0)\n", None, "E121", "SystemExit: 0"),
    (PLUGIN, 2, "E121", "1 stages per rank, schedule.chunks is 2"),
    (SLICED, None, "E110", "into 2 slices"),  # and not charged a whole microbatch for each
]
WRONG += [
    (OTHER.replace("ENTRY", entry), None, "E121", "in the order of rank 0, step 0")
    for entry in ('("F", 0, 0)', '"F"', "Op(Kind.F, 0.5)", 'Op("F", 0)')
]


@pytest.mark.parametrize("number", range(len(WRONG)), ids=lambda number: WRONG[number][-1])
def test_a_plugin_that_does_not_work_is_refused_by_every_command_and_is_no_bug_of_zbc(number, zbc, folder):
    code, chunks, error, said = WRONG[number]
    name = f"wrong_{number}"
    with_plugin(folder, name, code, **({} if chunks is None else {"chunks": chunks}))
    for command in (("plan", "zbc.toml"), ("check", "zbc.toml"), ("compare", "zbc.toml", "--schedule", f"{name}:make")):
        ran = zbc(*command)
        assert ran.code == 3 and f"{error}]" in ran.err and said in ran.err and "bug in zbc" not in ran.err, ran
        assert not (folder / "plan").exists() and ("slices = 1" in ran.err) == (code is SLICED)


@pytest.mark.long
def test_dump_ir_writes_the_program_after_the_schedule_and_after_each_pass(zbc, job):
    zbc("plan", job(kind="zb-v"), "--dump-ir", "ir", "-q")
    names = sorted(path.name for path in Path("ir").iterdir())
    assert names[0] == "00-zb-v.txt"
    assert names[1:] == ["01-insert-comm.txt", "02-fuse-backward.txt", "03-reduce-grads.txt", "04-optimizer-step.txt"]
    last = Path("ir", names[-1]).read_text().split("\n")
    assert last[0] == "rank 0"
    plan = StoredPlan.read(Path("plan"))
    first_rank = [Op.parse(line.strip()) for line in last[1 : last.index("rank 1")]]
    assert tuple(first_rank) == plan.program.ranks[0]
    assert not any("SEND" in line for line in Path("ir", names[0]).read_text().split("\n"))


# ---- check ---------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("target", few(["plan", "plan/plan.json", "zbc.toml"], ("plan", "zbc.toml")))
def test_check_says_what_it_proved(target, zbc, job):
    zbc("plan", job(kind="zb-h1"), "-q")
    ran = zbc("check", target)
    assert (ran.code, ran.err) == (0, "")
    proven = ("complete", "paired", "FIFO", "deadlock-free")
    for word in (*proven, "survives blocking sends: yes", "survives one hardware queue: yes"):
        assert word in ran.out
    assert zbc("check", target, "-q").out == ""
    assert len(zbc("check", target, "-v").out) > len(ran.out)


@pytest.mark.long
def test_both_limits_are_told(zbc, job):
    path = job(kind="zb-v", hardware={"memory_gib": 1.0}, schedule={"memory_limit": "3x"})
    assert "limits of a rank: 4 units, 1 GiB of everything" in zbc("plan", path).out
    limits = {"activation_units": 4.0, "activation_bytes": None, "device_bytes": 2.0**30}
    assert zbc("check", "plan", "--json").json()["limits"] == limits


@pytest.mark.long
def test_check_reports_the_same_of_a_job_and_of_its_plan(zbc, job):
    assert zbc("plan", job(kind="zb-v"), "-q").out == ""
    written = zbc("plan", "zbc.toml", "--json").json()
    assert (written["plan"], written["plan_id"]) == ("plan", StoredPlan.read(Path("plan")).manifest.id)
    of_plan, of_job = zbc("check", "plan", "--json").json(), zbc("check", "zbc.toml", "--json").json()
    for document in (of_plan, of_job):
        is_report(document)
        for key in set(written) - {"compile_seconds", "engine", "plan", "plan_id", "faster"}:
            assert document[key] == written[key], key
        assert document["rendezvous_makespan_ms"] == document["eager_makespan_ms"] == written["makespan_ms"]
    assert not Path("zbc.toml.plan").exists()
    assert of_plan["compile_seconds"] is None


# ---- compare -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_comparison_in_every_form_has_all_schedules_ranked_and_why_others_do_not_fit(zbc, job):
    job(schedule={"memory_limit": "1.2x"})
    document = zbc("compare", "zbc.toml", *HAND, "--json").json()
    assert (document["format"], document["version"]) == ("zbc-report", 1)
    entries = document["schedules"]
    assert {entry["schedule"] for entry in entries} == set(FIXED)
    planned, failed = ([entry for entry in entries if ("error" in entry) is wrong] for wrong in (False, True))
    assert entries == planned + failed and failed and planned
    assert {error["code"] for entry in failed for error in entry["error"]} == {"E302"}
    for entry in planned:
        is_report(entry)
    times = [entry["makespan_ms"] for entry in planned]
    assert times == sorted(times)
    rows = list(csv.DictReader(io.StringIO(zbc("compare", "zbc.toml", *HAND, "--format", "csv").out)))
    assert {row["schedule"] for row in rows} == set(FIXED)
    for row in rows:
        if row["error"]:
            assert row["error"].startswith("[E302]") and row["makespan_ms"] == ""
        else:
            assert 0 < float(row["bubble_rate_makespan"]) < 1 and float(row["gap_to_bound"]) >= 0
            assert float(row["makespan_ms"]) >= float(row["span_ms"]) > 0
    lines = zbc("compare", "zbc.toml", *HAND, "--format", "md", "-v").out.strip().split("\n")
    assert len({line.count("|") for line in lines}) == 1 and len(lines) == 2 + len(FIXED)
    assert "of makespan" in lines[0] and "of span" in lines[0]
    out = zbc("compare", "zbc.toml", *HAND).out
    assert all(len(re.findall(rf"^{name}[: ]", out, re.MULTILINE)) == 1 for name in FIXED)
    assert re.search(r"^gpipe: \[E302\] does not fit", out, re.MULTILINE)


def test_compare_finds_what_planning_one_by_one_finds(zbc, job):
    entries = zbc("compare", job(), "--schedule", "zb-v,1f1b", "--json").json()["schedules"]
    for entry in entries:
        alone = compile_job(load_job(Path("zbc.toml"), schedule=entry["schedule"]), budget=0.0).report.as_json()
        for key in set(alone) - {"compile_seconds", "speedup_over_1f1b"}:
            assert entry[key] == alone[key]
        gap = alone["makespan_ms"] / alone["lower_bound_makespan_ms"] - 1
        assert entry["gap_to_bound"] == pytest.approx(gap, abs=1e-8)


@pytest.mark.long
def test_a_comparison_by_span_ranks_by_it_and_measures_its_gap(zbc, job):
    changes = {"objective": "span"}
    costs = {"f": 1.0, "b": 1.0, "w": 1.0}
    entries = zbc("compare", job(m=16, schedule=changes, costs=costs), *HAND, "--json").json()["schedules"]
    spans = [entry["span_ms"] for entry in entries]
    assert spans == sorted(spans)
    for entry in entries:
        gap = entry["span_ms"] / entry["lower_bound_span_ms"] - 1
        assert entry["gap_to_bound"] == pytest.approx(gap, abs=1e-8)


@pytest.mark.long
def test_compare_counts_the_messages_a_rank_sends(zbc, job):
    """1F1B on p ranks sends 2(p-1)m messages, zb-v (2(2p-1) - 2)m: at the turn of its V there is no transfer."""
    entries = zbc("compare", job(), "--schedule", "zb-v,1f1b", "--json").json()["schedules"]
    sends = {entry["schedule"]: entry["sends_per_rank"] for entry in entries}
    assert sends == {"1f1b": 2 * 3 * 8 / 4, "zb-v": (2 * 7 - 2) * 8 / 4}


def test_compare_shows_what_two_replicas_cost_in_parameters_and_traffic(zbc, job):
    """Chimera holds every stage twice and sums every gradient over both: in a ring of two, each sends all of it."""
    text = zbc("compare", job(layers=10), "--schedule", "1f1b,chimera,bitpipe,hanayo", "--format", "csv").out
    rows = {row["schedule"]: row for row in csv.DictReader(io.StringIO(text))}
    params = {name: float(row["parameter_gib"]) for name, row in rows.items()}
    sums = {name: float(row["gradient_traffic_gib"]) for name, row in rows.items()}
    assert 1.6 < params["chimera"] / params["1f1b"] <= 2.0
    assert sums["1f1b"] == sums["hanayo"] == 0
    assert sums["chimera"] == pytest.approx(params["chimera"] / 4, rel=1e-4), "of four numbers per parameter, one"
    heads = zbc("compare", "zbc.toml", "--schedule", "1f1b,chimera", "-v").out.splitlines()[0].split()
    assert {"params", "reduced"} <= set(heads)


def test_a_sweep_is_a_cross_product_ranked_by_the_time_per_sequence(zbc, job):
    sweeps = ["--sweep", "schedule.microbatches=4,8,16", "--sweep", "schedule.microbatch_size=1,2"]
    entries = zbc("compare", job(), "--schedule", "zb-h1,gpipe", *sweeps, "--json").json()["schedules"]
    assert len(entries) == 2 * 3 * 2
    per_sequence = []
    for entry in entries:
        settings = entry["settings"]
        assert entry["microbatches"] == int(settings["schedule.microbatches"])
        sequences = int(settings["schedule.microbatches"]) * int(settings["schedule.microbatch_size"])
        per_sequence.append(entry["makespan_ms"] / sequences)
    assert per_sequence == sorted(per_sequence)


def test_a_swept_list_keeps_its_commas(zbc, job):
    sweep = "partition.layers_per_stage=[2,2,2,2],[3,2,2,1]"
    entries = zbc("compare", job(), "--schedule", "1f1b", "--sweep", sweep, "--json").json()["schedules"]
    assert {entry["settings"]["partition.layers_per_stage"] for entry in entries} == {"[2,2,2,2]", "[3,2,2,1]"}
    assert not any("error" in entry for entry in entries)


@pytest.mark.long
def test_chunks_of_the_file_are_for_schedules_that_leave_them_open(zbc, job):
    """Swept chunks apply to all: a schedule that cannot have them stays in the table with the reason."""
    entries = zbc("compare", job(schedule={"chunks": 1}, kind="gpipe"), *HAND, "--json").json()["schedules"]
    assert not any("error" in entry for entry in entries)
    stages = {entry["schedule"]: entry["stages"] for entry in entries}
    assert (stages["interleaved-1f1b"], stages["zb-v"], stages["1f1b"]) == (4, 8, 4)
    sweep = ["--schedule", "zb-v,interleaved-1f1b", "--sweep", "schedule.chunks=1,2"]
    entries = zbc("compare", "zbc.toml", *sweep, "--json").json()["schedules"]
    failed = [(e["schedule"], e["settings"], e["error"][0]["code"]) for e in entries if "error" in e]
    assert failed == [("zb-v", {"schedule.chunks": "1"}, "E110")]


@pytest.mark.long
def test_bytes_that_are_not_known_are_not_made_up(zbc, job):
    """The layers of a factory are unknown before it is called."""
    job(model={"family": "somewhere:layers"}, data={"kind": "somewhere:data"})
    (row,) = csv.DictReader(io.StringIO(zbc("compare", "zbc.toml", "--schedule", "1f1b", "--format", "csv").out))
    assert (row["peak_gib"], float(row["peak_activation_units"]), row["sends_per_rank"]) == ("", 4.0, "12.0")
    assert re.search(r" 4\.00 +\? +\? +\? +12 +\? ", zbc("compare", "zbc.toml", "--schedule", "1f1b", "-v").out)
    assert "GiB" not in zbc("compare", "zbc.toml", "--schedule", "1f1b").out.splitlines()[0]
    out = zbc("plan", "zbc.toml").out
    assert "bytes are not known before the model is built" in out
    for words in ("assumed equal for all layers", "`zbc profile JOB.toml` measures them", "E502"):
        assert words in out
    assert "could not be run without numbers" in out and "`zbc check JOB.toml --gradients`" in out
    assert "MiB" not in out and "memory_gib" not in out
    assert "whether they fit hardware.memory_gib" in zbc("plan", "zbc.toml", "--set", "hardware.memory_gib=1").out


@pytest.mark.long
def test_compare_fails_if_nothing_can_be_planned(zbc, job):
    """By default it tries all schedules; with such a limit none needs a search."""
    ran = zbc("compare", job(schedule={"memory_limit": "0.01x"}))
    assert ran.code == 5
    assert re.findall(r"^([\w-]+): \[E30[23]\]", ran.out, re.MULTILINE) == list(SCHEDULES)


# ---- visualize -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("name", few(FIXED, ("1f1b", "interleaved-1f1b")))
def test_a_plan_is_drawn_from_its_directory_as_from_its_job(name, zbc, job):
    zbc("plan", job(kind=name), "-q")
    drawn = zbc("visualize", "plan")
    assert drawn.code == 0
    assert drawn.out == zbc("visualize", "zbc.toml").out


@pytest.mark.long("{'schedule': {'slices': 4}}", "{'schedule': {'tokens': [16, 8, 4, 16, 8, 4, 16, 2]}}")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"costs": {"f": 3.0, "b": 2.5, "w": 1.5, "comm": 0.25}},
        {"costs": {"per": "layer", "f": [0, 1, 2, 3, 4, 5, 6, 7, 8, 2.0], "b": 2, "w": 1}},
        {"model": {"family": "somewhere:layers"}, "data": {"kind": "somewhere:data"}},
        {"optimizer": {"kind": "sgd", "momentum": 0.9}, "hardware": {"device": "cuda", "tflops": 3}},
        {"memory": {"activations": "recompute"}},
        {"schedule": {"slices": 4}},
        {"schedule": {"tokens": [16, 8, 4, 16, 8, 4, 16, 2]}},
        {"freeze": {"most": [0.4, 3]}, "costs": {"f": 1.0, "b": 1.0, "w": 1.0}},
    ],
    ids=str,
)
def test_a_plan_directory_holds_all_that_its_prediction_needs(changes, zbc, job):
    assert zbc("plan", job(kind="zb-v", **changes), "-q").code == 0
    plan = StoredPlan.read(Path("plan"))
    timeline = simulate(plan.program, costs_of(plan.manifest))
    predicted = plan.manifest.predicted
    assert load_job(Path("plan")).freeze == load_job(Path("zbc.toml")).freeze
    assert timeline.makespan == pytest.approx(predicted["makespan_ms"], abs=1e-8)
    assert timeline.span == pytest.approx(predicted["span_ms"], abs=1e-8)
    assert timeline.bubble_rate_span == pytest.approx(predicted["bubble_rate_span"], abs=1e-8)


def test_a_plan_of_a_plugin_is_drawn_without_the_plugin(zbc, folder):
    with_plugin(folder, "gone")
    assert zbc("plan", "zbc.toml", "-q").code == 0
    (folder / "gone.py").unlink()
    assert "gone:make: 4 ranks" in zbc("visualize", "plan").out


@pytest.mark.long("a.txt-1f1b: ", 'a.json-{"display')
@pytest.mark.parametrize(
    ("name", "begins"),
    [("a.svg", "<svg "), ("a.HTML", "<!doctype html>"), ("a.json", '{"display'), ("a.txt", "1f1b: ")],
)
def test_a_picture_is_what_the_end_of_its_name_says_unless_it_is_asked_for_otherwise(zbc, job, folder, name, begins):
    assert zbc("visualize", job(), "-o", name).code == 0
    assert (folder / name).read_text().startswith(begins)
    assert zbc("visualize", "zbc.toml", "-o", name, "--format", "term").code == 0
    assert (folder / name).read_text().startswith("1f1b: ")


def test_a_picture_can_be_written_to_a_file(zbc, job):
    ran = zbc("visualize", job(), "--output", "out/picture.txt", "--by", "slot", "--ranks", "0,2-3")
    assert (ran.code, ran.out) == (0, "")
    text = Path("out/picture.txt").read_text()
    assert [line.split("|")[0].strip() for line in text.split("\n") if line.count("|") == 2] == ["0", "2", "3"]


# ---- the others ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_each_schedule_has_a_card_with_a_picture(zbc):
    for name, card in SCHEDULES.items():
        shown = zbc("explain", "schedules", card.aliases[0] if card.aliases else name.upper()).out
        assert " ".join(shown.split()).startswith(f"{name}: {card.summary}")
        for text in (card.source, card.makespan, card.span, card.memory, f"{name}: 4 ranks"):
            assert text in " ".join(shown.split())
        assert max(len(line) for line in shown.split("\n")) <= 100


@pytest.mark.parametrize("template", few(Template, (Template.TINY,)))
def test_a_template_is_written_and_plans_without_an_error(template, zbc, folder):
    ran = zbc("init", "new", "--template", template.value)
    assert ran.code == 0
    assert "zbc plan new/zbc.toml" in ran.out
    assert Path("new/zbc.toml").read_text() == template_text(template)
    assert zbc("plan", "new/zbc.toml", "-q").code == 0
    assert not any(
        "error" in e for e in zbc("compare", "new/zbc.toml", "--schedule", "1f1b", "--json").json()["schedules"]
    )


def test_the_llama_template_has_the_parameters_of_llama_3_8b(tmp_path):
    """8,030,261,248 in its model card's safetensors index."""
    (tmp_path / "zbc.toml").write_text(template_text(Template.LLAMA))
    assert sum(layer.params for layer in estimate.layers(load_job(tmp_path / "zbc.toml"))) == 8_030_261_248


def test_explain_of_a_job_is_a_job_file_of_the_same_job_with_the_origin_of_each_value(zbc, job):
    changes = ["--set", "train.steps=7", "--schedule", "zb-h1"]
    tables = {"optimizer": {"schedule": {"kind": "cosine"}}, "schedule": {"ramp": [{"microbatches": 1, "steps": 1}]}}
    out = zbc("explain", job(data={"args": {"a-b": [1, "x"], "c": True}, "kind": "m:f"}, **tables), *changes).out
    for line, origin in [
        ("hidden = 32", "zbc.toml:5:10"),
        ("steps = 7", "--set train.steps=7"),
        ('kind = "zb-h1"', "--schedule zb-h1"),
        ("weight_decay = 0.1", "default"),
        ("# chunks is not set", "default"),
    ]:
        assert re.search(rf"^{re.escape(line)} +# {re.escape(origin)}$", out, re.MULTILINE), line
    Path("again.toml").write_text(out)
    first, second = load_job(Path("zbc.toml"), ["train.steps=7"], "zb-h1"), load_job(Path("again.toml"))
    assert first.planning() == second.planning()
    assert first.training() == second.training()


def test_keys_are_a_json_schema_and_a_list_with_their_meaning(zbc):
    schema = zbc("explain", "keys", "--json").json()
    assert set(schema["properties"]) == {*SECTIONS} and schema["required"] == ["model", "parallel", "schedule"]
    assert schema["$defs"]["model"]["properties"]["layers"]["description"]
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert "\nschedule.microbatches\n    " in zbc("explain", "keys").out


def test_explain_says_what_this_machine_can_do_also_without_torch(zbc, monkeypatch):
    ran, found = zbc("explain", "machine"), zbc("explain", "machine", "--json").json()
    assert ran.code == 0 and found["format"] == "zbc-doctor" and found["torch"]
    for label in ("zbc", "python", "torch", "cpu", "devices", "transports", "folder", "can"):
        assert re.search(rf"^{label} ", ran.out, re.MULTILINE)
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    ran = zbc("explain", "machine")
    assert ran.code == 0
    assert "cannot be imported" in ran.out
    assert "not run plans: install torch first" in ran.out


def test_the_list_of_schedules_fits_eighty_columns_and_has_more_where_there_is_room(zbc, monkeypatch):
    heads = {}
    for width in (80, 95, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = zbc("explain", "schedules").out.splitlines()
        heads[width] = lines[0].split()
        assert max(len(line.rstrip()) for line in lines) <= width
        assert sum(line.startswith((*SCHEDULES, "auto")) for line in lines) == len(SCHEDULES) + 1
        assert ("No room for" in lines[-1]) is (width < 160)
    assert len(heads[80]) < len(heads[95]) < len(heads[160])
    assert "best of all schedules" in zbc("explain", "auto").out


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "limit", "expected"), [("zb-auto", "1.0x", "met"), ("v-auto", "0.5x", "loose"), ("gpipe", None, "close")]
)
def test_a_plan_says_whose_the_gap_to_its_bound_is(zbc, job, kind, limit, expected):
    asked = [] if limit is None else ["--set", f"schedule.memory_limit={limit}"]
    words = ("plan", job(pp=4, layers=8, m=8), "--schedule", kind, *asked)
    costs = ["--set", "costs.f=1", "--set", "costs.b=1", "--set", "costs.w=1"]
    assert zbc(*words, *costs, "--json").json()["bound_is"] == expected
    said = zbc(*words, *costs).out
    assert ("a loose lower bound" in said) == (expected == "loose")
    assert ("proven optimal" in said) == (expected == "met")


@pytest.mark.long("zb-h1-True")
@pytest.mark.parametrize(("kind", "says"), [("zb-h1", True), ("1f1b", False)])
def test_a_plan_says_where_recompute_costs_time_and_saves_nothing(zbc, job, kind, says):
    """If B and W are apart, B leaves W the same activations that F would have kept."""
    sizes = {"layers": 8, "hidden": 64, "heads": 4, "vocab": 256, "seq_len": 32}
    path = job(kind=kind, model=sizes, memory={"activations": "recompute"}, schedule={"microbatches": 8})
    assert ("recompute makes a step" in " ".join(zbc("plan", path, "-o", "plan").out.split())) == says
    if says:
        kept = json.loads(zbc("plan", path, "-o", "again", "--json").out)["keep"]
        plain = json.loads(zbc("plan", path, "-o", "plain", "--json", "--set", 'memory.activations="keep"').out)
        assert kept["barrier_ms"] == pytest.approx(plain["barrier_ms"], rel=1e-2), "by the fast search"


@pytest.mark.parametrize(("gbps", "said"), [(10, "in two steps, between nodes and inside"), (800, "in one step")])
def test_a_plan_says_how_rows_of_experts_are_exchanged(zbc, job, gbps, said):
    model = {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "vocab": 256, "seq_len": 256}
    model |= {"experts": 8, "top_k": 4, "ffn_hidden": 32}
    hardware = {"device": "cuda", "ranks_per_node": 2, "link_gbps": 800, "inter_node_gbps": gbps}
    parallel, schedule = {"pp": 1, "dp": 4, "ep": 4}, {"kind": "1f1b", "microbatches": 2}
    path = job(model=model, parallel=parallel, schedule=schedule, hardware=hardware)
    out = zbc("plan", path, "--budget", "0").out
    assert said in out[out.index("all-to-all ") :].partition("\nlimited by")[0]
