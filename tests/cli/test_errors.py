"""Bad input: the right code and exit status, the place, a fix, one screen, and nothing half-written."""

import json
import re
import shlex
from functools import reduce
from operator import getitem
from pathlib import Path
from unittest import mock

import pytest

from tests.fuzzing_orders import sign
from tests.jobs import toml_text as edit
from tests.tiers import few
from zbc.compiler.schedules import SCHEDULES

LINES, COLUMNS = 24, 100
LONG = 300 * "x"  # no file system takes such a name
GOOD = edit()


def tree():
    """Path -> contents of every file below the current directory."""
    return {str(path): path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()}


def fits_one_screen(text):
    lines = text.rstrip("\n").split("\n")
    assert len(lines) <= LINES, text
    for line in lines:
        assert len(line) <= COLUMNS, line


def fails(ran, exit_code, code, where=None, hint=None, text=""):
    """Asserts the properties of every error message; paths do not count as its text."""
    assert ran.code == exit_code, ran.err
    assert ran.out == ""
    assert f"error[{code}]" in ran.err
    assert "Traceback" not in ran.err
    assert text in ran.err
    fits_one_screen(ran.err.replace(f"{Path.cwd()}/", ""))
    if where is not None:
        assert f"--> {where}" in ran.err, ran.err
    if hint is not None:
        assert hint in ran.err, ran.err
    assert re.search(r"^   = |-->.*   \S", ran.err, re.MULTILINE), f"no hint in:\n{ran.err}"


# Each: the job file, error code, place, and a piece of the hint or the message.
JOBS = {
    "toml syntax": ("# a job\n[model\nlayers = 8\n", "E100", "zbc.toml:2:7", None),
    "a string without quotes": (GOOD.replace('"1f1b"', "1f1b"), "E100", "zbc.toml:12:9", "quotes"),
    "unknown table": (GOOD.replace("[train]", "[trian]"), "E102", "zbc.toml:15:2", 'did you mean "train"?'),
    "unknown key": (GOOD.replace("hidden", "hiden"), "E102", "zbc.toml:5:1", 'did you mean "hidden"?'),
    "a number as a string": (edit(layers="8"), "E103", "zbc.toml:4:10", "expected a whole number, found '8'"),
    "half a microbatch": (edit(m=8.5), "E103", "zbc.toml:13:16", "whole number"),
    "yes for a number": (GOOD.replace("pp = 4", "pp = true"), "E103", "zbc.toml:10:6", "whole number, found true"),
    "a day for a number": (GOOD.replace("pp = 4", "pp = 2026-01-02"), "E103", "zbc.toml:10:6", "found 2026-01-02"),
    "no ranks": (edit(pp=0), "E103", "zbc.toml:10:6", "at least 1"),
    "memory in bytes": (edit(hardware={"memory_gib": 80 * 2**30}), "E103", "zbc.toml:19:14", "not in bytes: 80"),
    "a GPU by its memory": (edit(hardware={"gpu": "h100-80gb"}), "E103", None, "you mean h100-sxm or h100-pcie?"),
    "a missing section": (GOOD.replace("[parallel]\npp = 4\n", ""), "E105", "zbc.toml", "it needs pp"),
    "a missing key": (GOOD.replace("pp = 4", "dp = 1"), "E105", "zbc.toml:9:2", "parallel.pp is missing"),
    "a gpt without width": (GOOD.replace("hidden = 32\n", ""), "E105", "zbc.toml:2:2", "model.hidden"),
    "an unknown schedule": (edit(kind="zvb"), "E104", "zbc.toml:12:8", 'did you mean "zb-v"?'),
    "two schedules": (edit(schedule={"plugin": "a:b"}), "E110", "zbc.toml:15:10", "two answers to one question"),
    "impossible chunks": (edit(kind="zb-v", schedule={"chunks": 3}), "E110", "zbc.toml:15:10", "chunks = 2"),
    "heads that do not divide": (edit(model={"heads": 5}), "E110", "zbc.toml:6:9", "model.hidden = 32"),
    "an odd head for rotary": (edit(model={"heads": 32, "variant": "rotary"}), "E110", "zbc.toml:9:11", "even head"),
    "fewer layers than stages": (edit(kind="zb-v", layers=5), "E130", "zbc.toml:4:10", "8"),
    "costs of 3 ranks": (edit(costs={"f": [1, 2, 3], "b": 1, "w": 1}), "E141", "zbc.toml:19:5", "one number, or 4"),
    "partial costs": (edit(costs={"f": 1.0, "b": 1.0}), "E141", "zbc.toml:19:5", "all of f, b and w"),
    "an unreadable limit": (edit(schedule={"memory_limit": "4 bananas"}), "E103", "zbc.toml:15:16", 'write "1.0x" or'),
    "offload": (edit(memory={"activations": "offload"}), "E141", "zbc.toml:19:15", "hardware.host_gbps"),
    "an unknown word": (edit(memory={"activations": "forget"}), "E103", "zbc.toml:19:15", '"recompute"'),
    "peft's modules": (edit(adapter={"modules_to_save": []}), "E102", "zbc.toml:19:1", "whole lm_head"),
    "peft's": (edit(adapter={"use_dora": True}), "E102", "zbc.toml:19:1", "norms of all rows"),
    "layers": (edit(memory={"activations": {"recompute": "all"}}), "E103", "zbc.toml:19", "{ recompute = 6 }"),
    "a stage by name": (edit(memory={"activations": {"a": "keep"}}), "E103", "zbc.toml:19", '{ 0 = "recompute" }'),
    "a stage too many, left open": (edit(memory={"activations": {"4": "auto"}}), "E110", "zbc.toml:19", "from 0 to 3"),
    "more layers than anybody has": (edit(layers=99999999), "E114", "zbc.toml:4:10", "100000 or fewer"),
    "lists in lists": (f"{GOOD}[x]\ny = {70 * '['}{70 * ']'}\n", "E100", "zbc.toml", "more than 64 deep"),
    "an abyss": (f"{GOOD}[x]\ny = {9000 * '{a='}1{9000 * '}'}\n", "E100", "zbc.toml", "make them flat"),
    "a key that is there twice": (GOOD.replace("layers = 8", "layers = 8\nlayers = 9"), "E100", "zbc.toml:5:", "twice"),
    "capitals": (edit(optimizer={"kind": "adamW"}), "E103", "zbc.toml:19:8", 'did you mean "adamw"?'),
    "copies for a planet": (edit(parallel={"dp": 10**6}), "E114", "zbc.toml:11:6", "fewer replicas"),
    "the microbatches of a year": (edit(m=10**8), "E114", "zbc.toml:13:16", "15 minutes and 19 GiB"),
    "a stage too many": (edit(memory={"activations": {"4": "recompute"}}), "E110", "zbc.toml:19", "from 0 to 3"),
    "bytes that do not fit a vocabulary": (edit(model={"vocab": 100}), "E150", "zbc.toml:7:9", "256 or more"),
    "no such plugin": (GOOD.replace('kind = "1f1b"', 'plugin = "no.such:x"'), "E121", "zbc.toml:12:10", "path"),
    "too little memory": (edit(hardware={"memory_gib": 1e-6}), "E301", "zbc.toml:19:14", "no other schedule"),
    "over the limit": (edit(kind="gpipe", schedule={"memory_limit": "1.0x"}), "E302", "zbc.toml:15:16", "1f1b ("),
}


@pytest.mark.long("more layers than anybody has")
@pytest.mark.parametrize("name", few(JOBS, lambda name: name not in ("over the limit", "too little memory")))
def test_a_bad_job_is_refused_and_nothing_is_written(name, zbc, folder):
    text, code, where, expected = JOBS[name]
    (folder / "zbc.toml").write_text(text)
    before = tree()
    fails(zbc("plan", "zbc.toml"), 5 if code > "E3" else 3, code, where, text=expected or "")
    assert tree() == before
    assert [path.name for path in folder.iterdir()] == ["zbc.toml"]


def test_every_problem_of_a_file_is_reported_at_once_as_text_and_as_json(zbc, folder):
    text = edit(layers="8", kind="zvb", costs={"f": 1.0}, memory={"activations": "forget"}, hardware={"devise": "cpu"})
    (folder / "zbc.toml").write_text(text)
    ran = zbc("plan", "zbc.toml", "--json")
    assert ran.code == 3 and set(re.findall(r"E\d{3}", ran.err)) == {"E103", "E104", "E141", "E102"}
    fits_one_screen(ran.err)
    document = ran.json()
    assert (document["format"], document["version"]) == ("zbc-error", 1)
    found = {error["code"]: (error["where"], error["hint"]) for error in document["errors"]}
    assert found["E104"] == ("zbc.toml:12:8", 'did you mean "zb-v"?') and ("E103", "zbc.toml:4:10") in [
        (error["code"], error["where"]) for error in document["errors"]
    ]


def test_a_hint_that_several_problems_share_is_shown_once(zbc, folder):
    (folder / "zbc.toml").write_text(f"one = 1\ntwo = 2\n{GOOD}")
    ran = zbc("plan", "zbc.toml", "--json")
    assert [error["hint"].split(",")[0] for error in ran.json()["errors"]] == 2 * ["known: model"]
    assert ran.err.count("known: model") == 1 and "unknown key two\n  --> zbc.toml:2:1\n   = known: model" in ran.err


def test_a_job_file_is_text_and_may_begin_with_the_mark_of_its_encoding(zbc, folder):
    (folder / "zbc.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert zbc("plan", "zbc.toml", "-q").code == 0
    (folder / "zbc.toml").write_bytes(b"# a job\n\xff\xfe")
    ran = zbc("plan", "zbc.toml")
    assert (ran.code, "E101" in ran.err, "UTF-8" in ran.err) == (3, True, True)


ADVISE = "advise --set model.layers=4 --gpu h100"
# Commands with a good job, and what lies in the way, beside them => exit status, error code and place, what is said.
BEFORE = """\
plan nowhere.toml => 3 E101 => zbc init
check nowhere.toml => 3 E101 => zbc init
check nowhere.toml --gradients => 3 E101 => zbc init
compare nowhere.toml => 3 E101 => zbc init
visualize nowhere.toml => 3 E101 => zbc init
plan empty => 3 E101 => a job file, or the directory of a plan
plan . => 3 E101 => it holds a job file: zbc.toml
plan config.json => 3 E101 => zbc advise config.json
compare config.json => 3 E101 => zbc advise config.json
check config.json => 3 E101 => zbc advise config.json
plan zbc.toml --set microbatches => 3 E109 => --set schedule.microbatches=16
plan zbc.toml --set=model.args.x=DEEP => 3 E100 --set model.args.x => make them flat
plan zbc.toml --set=model.args.x=DEEPER => 3 E100 --set model.args.x => make them flat
plan zbc.toml --set modle.layers=4 => 3 E102 --set modle.layers=4 => did you mean "model"?
compare zbc.toml --sweep schedule.microbatchs=4 => 3 E102 --sweep schedule.microbatchs=4 => "microbatches"?
plan zbc.toml --schedule zvb => 3 E104 --schedule zvb => did you mean "zb-v"?
compare zbc.toml --schedule 1f1b,gpipe --sweep model.layers=4,x => 3 E103 --sweep model.layers=x => number
compare zbc.toml --set model.layers="'8'" => 3 E103 --set model.layers='8' => whole number
init => 3 E111 => zbc.toml exists
explain E299 => 3 E104 => E201
explain "tensor paralel" => 3 E104 => did you mean 'tensor parallel'
explain nonsense => 3 E104 => lists all codes and words
check plan => 4 E401 => plan/plan.json
visualize plan => 4 E401 => plan/plan.json
run --local 2 plan => 4 E401 => plan/plan.json
run order.csv => 4 E401 => first: zbc plan JOB.toml   then: zbc run plan; or: zbc run JOB.toml
check mine.csv => 4 E202 mine.csv: row 1 => no rank runs 0B0
visualize zbc.toml -o file/picture.txt => 6 E608 => cannot write file/picture.txt
init file/new => 6 E608 => cannot write file/new/zbc.toml: file is a file
export zbc.toml --format json -o . => 6 E608 => Is a directory
plan zbc.toml -o file/plan => 4 E407 => file is a file
plan zbc.toml --dump-ir file/ir => 6 E608 => cannot write
profile zbc.toml -o . => 6 E608
report nowhere => 4 E430 => as `zbc run` makes them
report file => 4 E430 => zbc reads its own runs""".splitlines()
AFTER = f"""\
plan zbc.toml -o new/a/plan --dump-ir new/b/LONG => 6 E608
plan zbc.toml -o new/a/LONG --dump-ir new/b => 4 E407
plan zbc.toml -o new/a/plan --set hardware.memory_gib=1e-6 => 5 E301
profile zbc.toml -o new/../new/p.json --set data.path=nothing.txt => 6 E501
export zbc.toml --format json -o new/a/LONG => 6 E608
export gone --format json -o new/a/order.json => 4 E401
visualize zbc.toml --format svg -o new/LONG => 6 E608
init new/LONG => 6 E608
tokenize zbc.toml -o new/LONG => 6 E608
plan zbc.toml --set schedule.microbatches=7 --schedule torch:ScheduleMine => 3 E121 => is not one of Schedule1F1B
plan zbc.toml --set schedule.microbatches=7 --schedule torch:ScheduleDualPipeV => 3 E121 => at least as many
{ADVISE} nowhere => 6 E520 => nowhere is not there
{ADVISE} empty => 6 E520 => cannot read empty/config.json
{ADVISE} bad.json => 6 E520 => bad.json is not JSON
{ADVISE} bert.json => 6 E521 => bert of transformers cannot be taken apart
{ADVISE}x zbc.toml => 3 E103 => no GPU is known as 'h100x'
{ADVISE} zbc.toml --row 5 --gpus 1 -o x.toml => 3 E109 => there are
{ADVISE} zbc.toml -o empty => 6 E608 => cannot write empty""".splitlines()
BESIDE = {"file": "in the way", "order.csv": "", "mine.csv": "0F0,1F0\n", "config.json": "{}", "bad.json": "{"}
BESIDE |= {"bert.json": '{"model_type": "bert"}'}


@pytest.mark.long("advise --set model.layers=4 --gpu h100 zbc.toml --row 5 --gpus 1 -o x.toml => 3 E109 => there are")
@pytest.mark.parametrize("line", [*BEFORE, *few(AFTER, lambda line: "E301" not in line)], ids=str)
def test_a_wrong_command_is_refused_before_long_work_and_nothing_is_written(line, zbc, job, folder, monkeypatch):
    """No folder is left behind either."""
    command, told, said = f"{line} => ".split(" => ")[:3]
    (status, code, *where) = told.split(" ", 2)
    for word, text in {"DEEPER": 9000 * "[" + 9000 * "]", "DEEP": 70 * "[" + 70 * "]", "LONG": LONG}.items():
        command = command.replace(word, text)
    job()
    (folder / "empty").mkdir()
    for name, text in BESIDE.items():
        (folder / name).write_text(text)
    if command.startswith(("plan", "profile")) and line in BEFORE:
        for began in ("compiler.compile.compile_job", "training.profiling.session.measure"):
            monkeypatch.setattr(f"zbc.{began}", lambda *_, **__: pytest.fail("began"))
        monkeypatch.setattr("zbc.training.launch.forking.fork_server", lambda: None)
    before = tree()
    ran = zbc(*shlex.split(command))
    if line in BEFORE:
        fails(ran, int(status), code, *where, text=said)
    assert (str(ran.code), "Traceback" in ran.err) == (status, False) and f"error[{code}]" in ran.err
    assert line in BEFORE or said in " ".join(ran.err.split())
    assert ran.out == "" or command.startswith("advise")
    assert tree() == before and not Path("new").exists() and (ran.err.count("error[") == 1 or status == "4")


# ---- paths ---------------------------------------------------------------------------------------------------

ANYWHERE = (
    "plan {} | plan {}.toml | check {} | check {}.csv | compare {} | report {}.csv | visualize {}",
    "compare {} plan | report {} | explain {}.toml | check {} --gradients | profile {}",
    "profile zbc.toml -o {} | run {} --local 2 | run plan --local 2 --save-hf {}",
    "run plan --local 2 --resume {} | run text --local 2 | advise {} --gpus 8 | init {}",
    "init new --from-hf {} | init new --schedule {}.csv | plan zbc.toml -o {} | plan zbc.toml --dump-ir {}",
    "plan zbc.toml --profile {} | plan zbc.toml --schedule {}.csv",
    "visualize plan -o {}/a.svg | tokenize {} -o o.bin | tokenize zbc.toml -o {}.bin",
    "tokenize zbc.toml -o o.bin --tokenizer {} | export plan --format torch-csv -o {} | run tokens --local 2",
    "plan zbc.toml -q --set=model.pretrained={}",
)


@pytest.mark.long
def test_a_path_that_cannot_even_be_looked_at_is_refused_by_every_command(zbc, job):
    """With too long a name, since tests may run as a user with access to every folder."""
    job(pp=2, m=3)
    data, tokens = f"data.path={LONG}", 'data.kind="tokens"'
    text = ('data.kind="text"', data, "model.vocab=256")
    for name, values in {"plan": (), "text": text, "tokens": (tokens, data)}.items():
        assert zbc("plan", "zbc.toml", "-q", "-o", name, *(f"--set={value}" for value in values)).code == 0
    before = tree()
    for command in [command for line in ANYWHERE for command in line.split(" | ")]:
        ran = zbc(*command.format(LONG).split())
        assert (ran.code in (3, 4, 6), "error[E" in ran.err) == (True, True), command + ran.err
        assert "Traceback" not in ran.err and tree() == before, command + ran.err


# ---- options -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_what_would_fit_is_listed_with_its_need_and_its_time_the_fastest_first(zbc, job):
    limit = 1.3
    ran = zbc("plan", job(kind="gpipe", hardware={"memory_gib": limit / 1024}, costs={"f": 1, "b": 1, "w": 1}))
    fails(ran, 5, "E301", where="zbc.toml:19:14", text="does not fit: rank 3 needs 1.78 MiB")
    assert "weights" in ran.err
    listed = re.findall(r"([\w-]+) \(([\d.]+) MiB, step ([+-][\d.]+)%\)", ran.err)
    assert {"zb-v", "zb-h1", "1f1b"} <= {name for name, _, _ in listed}
    changes = [float(change) for _, _, change in listed]
    assert changes == sorted(changes)
    failed = zbc("plan", "zbc.toml", "--set", "hardware.memory_gib=9", "--json").json()
    for name, need, change in listed:
        if SCHEDULES[name].searched:
            continue
        report = zbc("plan", "zbc.toml", "--schedule", name, "--json").json()
        assert max(rank["peak_bytes"] for rank in report["per_rank"]) / 2**20 == pytest.approx(float(need), rel=5e-3)
        assert report["makespan_ms"] / failed["makespan_ms"] - 1 == pytest.approx(float(change) / 100, abs=6e-4)
    for name in {"zb-h1", "zb-h2", "1f1b", "interleaved-1f1b", "breadth-first"} - {name for name, _, _ in listed}:
        assert zbc("plan", "zbc.toml", "--schedule", name).code == 5


@pytest.mark.long
@pytest.mark.parametrize(("kind", "limit", "code"), [("zb-h1", "1 KiB", "E302"), ("zb-v", "0.01x", "E303")])
def test_a_limit_named_in_a_hint_is_enough(kind, limit, code, zbc, job):
    """Of zb-v only partitions that do not fit have an order."""
    tables = {"model": {"hidden": 128, "seq_len": 128}, "schedule": {"microbatch_size": 4, "memory_limit": limit}}
    refused = zbc("plan", job(kind=kind, **tables))
    fails(refused, 5, code)
    needed = re.search(r'memory_limit = "([^"]+)"', refused.err)[1]
    assert zbc("plan", "zbc.toml", "--set", f"schedule.memory_limit={needed}").code == 0


def test_a_limit_in_bytes_of_a_model_that_nobody_has_weighed_is_refused_without_asking_other_schedules(zbc, job):
    ran = zbc("plan", job(model={"family": "a.b:c"}, schedule={"memory_limit": "1 GiB"}))
    fails(ran, 5, "E302", hint="--profile")
    assert "would fit" not in ran.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["plan"], "Missing argument"),
        (["run", "plan", "--again"], "No such option"),
        (["run", "plan", "--trace", "3-"], "cannot read '3-'"),
        (["visualize", "zbc.toml", "--format", "gif"], "'gif' is not"),
        (["visualize", "zbc.toml", "--ranks", "0-x"], "--ranks 0-3,5"),
        (["visualize", "zbc.toml", "--zoom", "7"], "--zoom 0-120"),
        (["visualize", "zbc.toml", "--steps", "0"], "--steps 3, or 10-12 of a recorded run"),
        (["visualize", "zbc.toml", "--by", "slot", "--format", "html"], "--by slot: works with term, not with html"),
        (["visualize", "zbc.toml", "--zoom", "0-1", "--format", "html"], "--zoom: works with term and svg"),
        (["visualize", "zbc.toml", "--steps", "3-4"], "--steps: works with a recorded run"),
        (["explain", "machine", "--set", "model.layers=3"], "--set change a job"),
        (["compare", "zbc.toml", "-o", "a.gif"], "ends in none of csv, md"),
        (["report", ".", "--jitter", "5%"], "--jitter: works with a plan, a job or a CSV"),
        *((["report", "zbc.toml", f"--jitter={share}"], "5% or 0.05") for share in ("5", "five", "-5%", "5%%", "nan")),
        (["check", "zbc.toml", "--fix"], "works on torch CSV"),
        (["run", "plan", "--local", "0"], "--local"),
        (["fly"], "fly"),
        (["advise", "config.json", "--gpus", "0"], "must be at least 1, found 0"),
        (["run", "plan", "--local", "2", "--device", "tpu"], "'tpu' is not one of 'cpu', 'cuda'"),
        (["run", "plan", "--steps", "1.5"], "expected a whole number, found 1.5"),
        (["compare", "zbc.toml", "--schedule", ","], "--schedule names none"),
        (["profile"], "give JOB.toml to measure"),
        (["profile", "zbc.toml", "--links"], "JOB.toml: --links goes without it"),
        (["profile", "run", "--threads", "2"], "--threads: the run run goes without it"),
        (["profile", "zbc.toml", "--profile", "p.json"], "--profile: a job goes without it"),
        (["profile", "zbc.toml", "--rounds", "1"], "--rounds"),
        (["profile", "zbc.toml", "--device", "tpu"], "tpu"),
        (["profile", "zbc.toml", "--dry", "--device=cpu"], "--device: --dry goes without it"),
        (["profile", "zbc.toml", "--dry", "--threads=1"], "--threads: --dry goes without it"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments, text, zbc, job):
    job()
    before = tree()
    ran = zbc(*arguments)
    assert (ran.code, "Usage" in ran.err) == (2, True)
    assert text in ran.err and "nput should" not in ran.err and "Value error" not in ran.err
    assert tree() == before


# ---- plan directories ----------------------------------------------------------------------------------------


READERS = [["check", "plan"], ["visualize", "plan"], ["run", "plan", "--local", "2"]]
readers = pytest.mark.parametrize("command", READERS, ids=lambda command: command[0])


WRONG_PLANS = {
    "cut off": ("plan.json", lambda text: text[:200], "E404", "cut off"),
    "cut off near its end": ("plan.json", lambda text: text[:-3], "E404", "cut off"),
    "cut off at its first byte": ("plan.json", lambda text: text[:1], "E404", "cut off"),
    "empty": ("plan.json", lambda text: "", "E404", "cut off"),
    "an abyss": ("plan.json", lambda text: 100_000 * "[", "E404", "cut off"),
    "no plan": ("plan.json", lambda text: '{"format": "shopping-list"}', "E404", "shopping-list"),
    "an unknown field": ("plan.json", lambda text: text.replace("{", '{"surprise": 1, ', 1), "E404", "surprise"),
    "another version": ("plan.json", lambda text: text.replace('version": 1', 'version": 7, "new": 1'), "E403", "n 7"),
    "an edited manifest": ("plan.json", lambda text: text.replace("0.0003", "0.3"), "E402", "plan.json was edited"),
    "an edited rank": ("rank-0001.json", lambda text: f"{text}\n", "E402", "rank-0001.json"),
    "a lost rank": ("rank-0001.json", None, "E401", "rank-0001.json"),
}


@readers
@pytest.mark.parametrize("how", WRONG_PLANS)
def test_a_plan_directory_that_is_damaged_is_refused(command, how, zbc, plan):
    name, change, code, text = WRONG_PLANS[how]
    before = (plan / name).read_text()
    (plan / name).unlink()
    if change is not None:
        assert change(before) != before
        (plan / name).write_text(change(before))
    fails(zbc(*command), 4, code, hint="zbc plan", text=text)


def test_check_goes_on_past_an_edit_and_says_what_it_did(zbc, plan):
    """A line more is a legal order; an op is missing; rank 0 sends what rank 1 waits for only after its answer."""
    path, first = plan / "rank-0001.json", plan / "rank-0000.json"
    text = path.read_text()
    path.write_text(text + "\n")
    assert "complete, paired and free of deadlock all the same" in zbc("check", "plan").err
    path.write_text(text.replace('"BW s1 m1"', '"BW s1 m2"'))
    ran = zbc("check", "plan")
    fails(ran, 4, "E402", text="BW s1 m1")
    assert "error[E202]" in ran.err
    path.write_text(text)
    text = first.read_text()
    for a, b in (("RECV_B s0 m0 <r1", "F s0 m2"), ("SEND_F s0 m2 >r1", "BW s0 m1")):
        text = text.replace(f'"{a}"', "?").replace(f'"{b}"', f'"{a}"').replace("?", f'"{b}"')
    first.write_text(text)
    ran = zbc("check", "plan")
    assert ran.code == 4 and "error[E402]" in ran.err and re.search(r"error\[E20[1-6]\]", ran.err)
    fits_one_screen(ran.err)


def test_running_needs_the_ranks_of_the_plan_and_a_launcher(zbc, plan, monkeypatch):
    said = "plan wants 2 ranks, --local asks for 3"
    fails(zbc("run", "plan", "--local", "3"), 6, "E601", hint="run: zbc run plan --local 2", text=said)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    both = "torchrun --standalone --nproc-per-node 2 -m zbc run plan", "zbc run plan --local 2"
    fails(zbc("run", "plan"), 6, "E604", hint=both[0], text=both[1])


def edited(plan, values):
    """Puts values at paths of a manifest, and signs it again."""
    data = json.loads((plan / "plan.json").read_text())
    for path, value in values.items():
        *above, last = path.split(".")
        reduce(getitem, above, data)[last] = value
    (plan / "plan.json").write_text(json.dumps(data))
    sign(plan)


SIGNED = [
    ({"training": {}}, "optimizer: expected a table"),
    ({"training.train.steps": "many"}, "train.steps: expected a whole number"),
    ({"planning.hardware": None}, "hardware: expected a table"),
    ({"layers": [["embed", "layers.0"], ["attic", "layers.2", "layers.3", "head"]]}, "places the layer 'attic'"),
    ({"layers": [["embed", "layers.0", "layers.1"], ["layers.3", "layers.2", "head"]]}, "places other layers"),
    ({"layers": [["embed"], [f"layers.{'9' * 5000}"]]}, "places the layer 'layers.999"),
    ({"order": [0], "copies": 10**10}, "ranks, zbc plans for 100000"),
    ({"order": [0]}, "does not name each rank of the run once"),
    ({"node": [3]}, "does not divide"),
    ({"copies": 2}, "E202] program: rank 0 never runs REDUCE"),
    ({"tied": True, "ties": [10**12]}, "name a stage beyond"),
    ({"planning.model.layers": 2**53}, "more than zbc plans"),
    ({"planning.parallel.dp": 2}, "its job has parallel.dp = 2"),
    ({"planning.costs.f": 1}, "costs give f but not"),
    ({"planning.optimizer": []}, "planning.optimizer: expected a table"),
    ({"planning.hardware.memory_gbps": [1]}, "memory_gbps has 1 numbers"),
    ({"planning.parallel.average": {}}, "parallel.average"),
    ({"placement": [[0]]}, "placement has 1 stages, not 2"),
    ({"placement": [[0], [7]]}, "placement names a rank beyond 2"),
    ({"placement": [[0], [1, 0]]}, "placement lists differ in length"),
    ({"layers": []}, "layers has 0 stages"),
    ({"boundaries": []}, "boundaries has 0, not 1"),
    ({"files": {}}, "files lists 0 rank files"),
    *(({size: 10**12}, "00 microbatches, the rank files") for size in ("microbatches", "slices")),
    ({"ranks": 10**12}, "ranks, zbc plans for 100000"),  # checks make tables of so many entries
    ({"capabilities": ["F", "TELEPORT"]}, "E406] plan: plan/plan.json needs op kinds this zbc does not have: TELEPORT"),
]


@pytest.mark.parametrize(("changes", "said"), SIGNED)
def test_a_plan_that_was_changed_and_signed_again_is_still_looked_at(changes, said, zbc, plan):
    edited(plan, changes)
    code = said[:4] if said.startswith("E") else "E404"
    commands = [("check", "plan"), ("run", "plan", "--local", "2")][: 1 if "layers" in changes or code != "E404" else 2]
    for ran in (zbc(*command) for command in commands):  # ranks look at their layers and ops
        assert (ran.code, ran.out, "Traceback" in ran.err) == (4, "", False)
        assert f"error[{code}]" in ran.err and said in ran.err and ("zbc plan" in ran.err or code != "E404"), ran.err


@pytest.mark.long
def test_names_that_would_steer_a_terminal_are_shown_as_text(zbc, plan):
    edited(plan, {"schedule": "\x1b[31m1f1b\x9b2J", "passes": ["\x1b]0;title\x07"]})
    for ran in (zbc("check", "plan"), zbc("check", "plan", "--json"), zbc("visualize", "plan")):
        assert (ran.code, "\x1b" in ran.out, "\x9b" in ran.out) == (0, False, False)
        assert r"\u001b[31m1f1b\u009b2J" in ran.out
    assert zbc("check", "plan", "--json").json()["schedule"] == "\x1b[31m1f1b\x9b2J"
    ran = zbc("plan", "zbc.toml", "--set", "model.\x1b[2J=1")
    assert ran.code == 3 and "\x1b" not in ran.err and r"\u001b[2J" in ran.err


@pytest.mark.long
def test_strict_fails_where_sends_that_block_would_hang(zbc, job):
    assert zbc("plan", job(kind="zb-v", costs={"f": 1.0, "b": 1.0, "w": 1.0}), "-q").code == 0
    assert zbc("check", "plan").code == 0
    fails(zbc("check", "plan", "--strict"), 4, "E207", hint="drop --strict", text="wait for each other")
    fails(zbc("check", "zbc.toml", "--strict"), 4, "E207")
    assert zbc("check", job(kind="1f1b"), "--strict").code == 0


@pytest.mark.parametrize("obstacle", ["file", "folder", "folder with a plan.json"])
def test_what_is_in_the_way_of_a_plan_is_left_alone(obstacle, zbc, job, folder):
    if obstacle == "file":
        (folder / "plan").write_text("my notes")
    else:
        (folder / "plan").mkdir()
        (folder / "plan" / "thesis.tex").write_text("my thesis")
        if "plan.json" in obstacle:
            (folder / "plan" / "plan.json").write_text("{}")
    job()
    before = tree()
    fails(zbc("plan", "zbc.toml"), 4, "E407", hint="-o", text="not a plan directory")
    assert tree() == before


def test_what_is_written_halfway_is_taken_back(zbc, job, monkeypatch):
    job()
    real = Path.write_bytes

    def full(path, content):
        real(path, content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    fails(zbc("export", "zbc.toml", "--format", "json", "-o", "new/order.json"), 6, "E608", text="No space left")
    assert not Path("new").exists()


def test_a_failed_plan_leaves_the_plan_before_it_alone(zbc, plan):
    before = tree()
    assert zbc("plan", "zbc.toml", "--set", "parallel.pp=100").code == 3
    assert tree() == before


# ---- the process ---------------------------------------------------------------------------------------------


A_BUG = (RuntimeError("a planted bug"), 1, ("a planted bug", "Traceback", "please report it"))


@pytest.mark.parametrize(("broken", "code", "said"), [A_BUG, (KeyboardInterrupt, 130, ())])
def test_a_bug_shows_its_traceback_and_an_interrupt_none(zbc, job, monkeypatch, broken, code, said):
    monkeypatch.setattr("zbc.compiler.shapes.load_job", mock.Mock(side_effect=broken))
    ran = zbc("plan", job())
    assert ran.code == code and all(words in ran.err for words in said)
    assert ("Traceback" in ran.err) is ("Traceback" in said)
