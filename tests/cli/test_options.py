"""Options of all commands: changes of a job, --json, -q and -v, and help that fits a screen."""

import json
import re
import sys
import types
from pathlib import Path

import pytest

from tests.profiles import profile_of
from tests.test_surface import COMMANDS, GLOBAL
from zbc.compiler.shapes import load_job

JOBS = {
    "plan": ("-o", "made"),
    "check": (),
    "visualize": ("--by", "slot"),
    "report": (),
    "compare": ("zbc.toml",),
    "export": ("--format", "json"),
}


@pytest.mark.long
def test_help_is_grouped_and_every_help_fits_a_screen(zbc, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = zbc("--help").out
    places = [out.index(f"\n{head}:\n") for head in ("Plan", "Look", "Train", "Exchange")]
    assert places == sorted(places) and len(out.splitlines()) <= 40 and "--install-completion" in out
    lines = [line for line in out[places[0] :].splitlines() if line.startswith("  ")]
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)
    for command in COMMANDS:
        shown = zbc(*command, "--help").out
        assert len(shown.splitlines()) <= 40 and max(map(len, shown.splitlines())) <= 80, command
        assert not re.search(r"\[\[|\]\]|\.\.\.\}|<int", shown), shown
        assert all(re.search(rf"(^|[ ,]){option}[ ,]", shown, re.MULTILINE) for option in GLOBAL), command


@pytest.mark.long("plan", "check", "export", "compare")
@pytest.mark.parametrize("command", JOBS)
def test_a_job_is_changed_alike_by_every_command_that_takes_one(command, zbc, job, tmp_path):
    """A schedule, a value and a profile each change the output; a budget is accepted."""
    path, rest = job(), JOBS[command]
    (tmp_path / "measured.json").write_text(profile_of(load_job(Path(path))).dumps())
    plain = zbc(command, path, *rest, "--json").json()
    plain.pop("compile_seconds", None)
    measured = ("--profile", tmp_path / "measured.json")
    for change in (("--schedule", "gpipe"), ("--set", "schedule.microbatches=5"), measured):
        if (command, change[0]) in {("compare", "--schedule"), ("compare", "--profile")}:
            assert zbc(command, path, *rest, *change).code == 0
            continue
        ran = zbc(command, path, *rest, "--json", *change, "--budget", "0")
        assert ran.code == 0, ran.err
        changed = ran.json()
        changed.pop("compile_seconds", None)
        assert changed != plain, change
    assert zbc(command, path, *rest, "--set", "schedule.nonsense=1").code == 3


@pytest.mark.parametrize("command", ["check", "visualize", "report", "export"])
def test_what_changes_a_job_is_refused_for_what_is_none(command, zbc, job):
    zbc("plan", job(), "-q")
    ran = zbc(command, "plan", *JOBS[command], "--set", "schedule.microbatches=5")
    assert ran.code == 2 and "--set change a job" in ran.err.replace("\n", " ").replace("changes", "change")


def test_explain_of_a_job_takes_a_profile_and_says_where_values_come_from_in_json(zbc, job, tmp_path):
    path = job()
    (tmp_path / "measured.json").write_text(profile_of(load_job(Path(path))).dumps())
    found = zbc("explain", path, "--profile", tmp_path / "measured.json", "--json").json()["sections"]
    assert found["model"]["hidden"] == {"value": 32, "origin": "zbc.toml:5:10"}
    assert found["schedule"]["chunks"] == {"value": None, "origin": "default"}


@pytest.mark.long
def test_lists_are_there_for_programs_too(zbc):
    cards = zbc("explain", "schedules", "--json").json()["schedules"]
    assert {"1f1b", "zb-v"} <= {card["name"] for card in cards} and all(card["source"] for card in cards)
    (one,) = zbc("explain", "Schedule1F1B", "--json").json()["schedules"]
    assert one["name"] == "1f1b" and one["chunks"] == [1, 1]
    (error,) = zbc("explain", "E201", "--json").json()["errors"]
    assert error["code"] == "E201" and error["text"]
    assert len(zbc("explain", "--json").json()["errors"]) > 50
    assert zbc("explain", "schedules", "-q").out == zbc("explain", "E201", "-q").out == ""


@pytest.mark.long
def test_a_picture_is_told_of_in_json(zbc, job):
    found = zbc("visualize", job(), "--json").json()
    assert found["form"] == "term" and "1f1b: 4 ranks" in found["picture"]
    ran = zbc("visualize", "zbc.toml", "-o", "a.svg", "--json")
    assert ran.json() == {"format": "zbc-picture", "version": 1, "form": "svg", "file": "a.svg", "picture": None}
    assert ran.err == "" and Path("a.svg").is_file()


@pytest.mark.long
def test_a_png_is_made_by_cairosvg_or_refused_with_the_way_out(zbc, job, monkeypatch):
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    ran = zbc("visualize", job(), "-o", "a.png")
    assert ran.code == 6 and "E602" in ran.err and "pip install cairosvg, or name a.svg" in ran.err
    assert not Path("a.png").exists()
    made = types.ModuleType("cairosvg")
    made.svg2png = lambda bytestring, scale: b"\x89PNG" + bytestring
    monkeypatch.setitem(sys.modules, "cairosvg", made)
    assert zbc("visualize", "zbc.toml", "-o", "a.png").code == 0
    assert Path("a.png").read_bytes().startswith(b"\x89PNG<svg ")
    assert zbc("visualize", "zbc.toml", "-o", "a.jpg").code == 2
    assert "makes no .jpg files" in zbc("visualize", "zbc.toml", "-o", "a.jpg").err
    assert "needs a file" in zbc("visualize", "zbc.toml", "--format", "png").err


@pytest.mark.long
def test_export_as_json_has_the_texts_or_names_the_files(zbc, job):
    texts = zbc("export", job(), "--format", "torch-csv", "--json").json()["texts"]
    assert list(texts) == [".csv"] and texts[".csv"].startswith("0F0,")
    written = zbc("export", "zbc.toml", "--format", "torchtitan", "-o", "t.toml", "--json").json()
    assert written["files"] == ["t.toml", "t.csv"]
    assert json.loads(zbc("init", "again.toml", "--schedule", "t.csv", "--json").out)["job"] == "again.toml"


@pytest.mark.long
@pytest.mark.parametrize("command", [("plan",), pytest.param(("compare",), marks=pytest.mark.repeats)], ids=" ".join)
def test_a_job_for_eight_gpus_is_told_of_on_one_screen(command, zbc, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    zbc("init", "big", "--template", "llama-8b", "-q")
    ran = zbc(*command, "big/zbc.toml", "--budget", "0", "--set", "schedule.microbatches=8")
    lines = [line for line in ran.out.splitlines() if "lack of time" not in line]  # on a slow machine
    assert ran.code == 0 and len(lines) <= 30 and max(map(len, map(str.rstrip, lines))) <= 80
    assert "MFU " in ran.out or command == ("compare",)


def test_a_plan_says_which_data_are_not_there(zbc, job, folder):
    (folder / "here.txt").write_text("text")
    there = job(data={"path": ["here.txt", "there.txt"]})
    told = zbc("plan", there, "--budget", "0").out
    assert "data.path: there.txt is not there" in told and "here.txt is not there" not in told.replace("there.txt", "")
