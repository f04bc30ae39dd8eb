"""`zbc profile`: processes that measure, a file for plans, and errors that are reported."""

import json

import pytest

from tests.jobs import toml_text
from tests.processes.plans import run_here
from zbc.cli import main
from zbc.job.profile import read


@pytest.fixture
def zbc(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        return ended.value.code, *capfd.readouterr()

    return call


@pytest.mark.repeats
def test_a_profile_is_made_planned_with_and_the_plan_trains(zbc, tmp_path):
    (tmp_path / "zbc.toml").write_text(toml_text(pp=2, m=4, data={"kind": "synthetic"}))
    code, out, err = zbc("profile", "zbc.toml", "-o", "p.json", "--rounds", "3", "--set", "model.hidden=16")
    assert code == 0, err
    assert err == ""  # a bar is for terminals
    assert "zbc plan zbc.toml --set=model.hidden=16 --profile p.json" in out
    found = read(tmp_path / "p.json")
    assert list(found.layers) == ["block", "embed", "head"] and found.on.rounds == 3
    assert found.link is not None and found.link.gbps > 0 and found.host.agree_us > 0
    assert all(layer.f.ms > 0 and layer.bytes is not None for layer in found.layers.values())
    code, out, err = zbc("plan", "zbc.toml", "--set=model.hidden=16", "--profile", "p.json", "--json")
    assert code == 0 and json.loads(out)["costs"] == "profiled"
    run_here(tmp_path / "plan", 2, tmp_path / "run", steps=1)


def test_a_dry_profile_is_made_without_a_device_and_planned_with(zbc, tmp_path):
    (tmp_path / "zbc.toml").write_text(toml_text(pp=2, m=4, hardware={"device": "cuda"}))
    code, out, err = zbc("profile", "zbc.toml", "--dry", "-o", "p.json")
    assert (code, err) == (0, "") and "a dry run" in out and "ms per microbatch, estimated" in out and "link" not in out
    assert read(tmp_path / "p.json").on.device == "cuda"
    code, out, err = zbc("plan", "zbc.toml", "--profile", "p.json", "--budget", "0")
    assert code == 0 and "estimated from [model]" in out and "bytes of layers: a dry run" in out, err


@pytest.mark.long
def test_a_recorded_run_leads_to_a_profile_and_to_the_plan_its_report_promised(zbc, tmp_path):
    (tmp_path / "zbc.toml").write_text(toml_text(pp=2, m=4, kind="zb-h1", data={"kind": "synthetic"}))
    assert zbc("plan", "zbc.toml", "-q")[0] == 0
    run_here(tmp_path / "plan", 2, tmp_path / "run", steps=4, trace=frozenset({1, 2, 3}))
    code, out, err = zbc("report", "run", "--json")
    assert code == 0, err
    told = json.loads(out)
    first, second = told["replan_command"].split(" && ")
    code, out, err = zbc(*first.split()[1:])
    assert code == 0 and "not told" in out, err
    assert read(tmp_path / "profile.json").on.source == "trace"
    code, out, err = zbc(*second.split()[1:], "--json")
    assert code == 0, err
    assert json.loads(out)["barrier_ms"] == pytest.approx(told["replan"]["planned_ms"], rel=1e-3)
    code, out, err = zbc("profile", "run", "--profile", "profile.json", "--json")
    assert code == 0 and json.loads(out)["on"]["together"] == 2


def test_what_a_users_layer_raises_reaches_the_console(zbc, tmp_path):
    model = {"family": "tests.processes.user_layers:layers", "loss": "mse", "args": {"how": "raise", "good": 20}}
    data = {"kind": "tests.processes.user_layers:Vectors"}
    (tmp_path / "zbc.toml").write_text(toml_text(pp=2, m=4, layers=4, model=model, data=data))
    code, out, err = zbc("profile", "zbc.toml", "--rounds", "3")
    assert out == "" and not (tmp_path / "profile.json").exists()
    assert "failed: ValueError: out of luck" in err and "and out of time" in err and code == 7
    assert "user_layers.py" in err and "bug in zbc" not in err
