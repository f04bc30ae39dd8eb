"""Problems of the first ten minutes of a user, and the messages about them."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.jobs import toml_text
from zbc.commands import opening, summary
from zbc.compiler.search import engine
from zbc.host import until


@pytest.mark.long
@pytest.mark.parametrize("kind", ["1f1b", "zb-v"])
def test_the_ways_out_of_a_plan_that_does_not_fit_are_ways_out(kind, zbc, job):
    """Recompute is offered if and only if it saves enough memory."""
    path = job(kind=kind, layers=16)
    peak = max(rank["peak_bytes"] for rank in zbc("plan", path, "--json").json()["per_rank"]) / 2**30
    offered = []
    for share in (0.3, 0.6, 0.9):
        limit = ("--set", f"hardware.memory_gib={share * peak:.9f}")
        ran = zbc("plan", path, *limit)
        if ran.code == 0:
            continue
        easier = 'memory.activations = "auto"' in ran.err
        again = zbc("plan", path, *limit, "--set", 'memory.activations="auto"')
        offered.append(easier)
        assert easier is (again.code == 0), again.err
        enough = re.search(r"memory_gib = ([\d.]+)", ran.err)[1]
        assert zbc("plan", path, "--set", f"hardware.memory_gib={enough}", "-q").code == 0
    assert False in offered


@pytest.mark.long
def test_plan_names_the_schedule_that_compare_ranks_first_of_those_it_tries(zbc, folder, monkeypatch):
    """With uneven stages another schedule may be faster only with its own partition."""
    zbc("init", ".", "--template", "llama-8b")
    monkeypatch.setattr(until, "LEAST", 600.0)  # a busy machine has no time for remarks else
    faster = zbc("plan", "zbc.toml", "--schedule", "zb-auto", "--budget", "0", "--json").json()["faster"]
    rows = zbc("compare", "zbc.toml", "--schedule", "zb-auto,v-auto", "--budget", "0", "--json").json()["schedules"]
    assert [row["schedule"] for row in rows] == ["v-auto", "zb-auto"]
    assert faster == {"schedule": "v-auto", "barrier_ms": pytest.approx(rows[0]["barrier_ms"], rel=0.003)}


@pytest.mark.long
def test_very_many_problems_and_very_long_or_large_values_are_told_briefly(zbc, job, folder):
    text = toml_text().replace("[train]", "[train]\n" + "\n".join(f"k{n} = 1" for n in range(4000)))
    (folder / "zbc.toml").write_text(text)
    ran = zbc("plan", "zbc.toml")
    assert ran.code == 3 and ran.err.count("error[E102]") == 20 and "and 3980 more problems" in ran.err
    assert len(zbc("plan", "zbc.toml", "--json").json()["errors"]) == 4000
    for change in (f'schedule.kind="{"x" * 100_000}"', f'model.family="{"y" * 100_000}"'):
        ran = zbc("plan", job(), "--set", change)
        assert ran.code == 3 and len(ran.err) < 10_000 and " ... " in ran.err
    ran = zbc("plan", job(), "--set", "model.hidden=4000000000")
    assert ran.code == 3 and "E103" in ran.err and "at most 10000000" in ran.err


def test_weights_that_are_nowhere_are_missed_before_the_run(zbc, job):
    for command in ("plan", "check"):
        ran = zbc(command, job(model={"pretrained": "/nonexistent"}))
        assert ran.code == 6 and "E520" in ran.err and "zbc.toml:" in ran.err
    assert not Path("plan").exists()


@pytest.mark.long
def test_a_plan_for_more_cpu_ranks_than_cores_says_what_to_expect(zbc, job, monkeypatch):
    """On one core: the sum of the computation of all ranks."""
    monkeypatch.setattr(summary, "cores", lambda: 1)
    ran = zbc("plan", job(hardware={"link_us": 0}))
    busy = sum(rank["busy_ms"] for rank in zbc("plan", "zbc.toml", "--json").json()["per_rank"])
    told = re.search(r"4 ranks share one core: expect ([\d.]+) ms a step or more", ran.out)
    assert told and float(told[1]) == pytest.approx(busy, rel=0.05)
    monkeypatch.setattr(summary, "cores", lambda: 4)
    assert "ranks share" not in zbc("plan", "zbc.toml").out
    monkeypatch.setattr(summary, "cores", lambda: 1)
    assert "ranks share" not in zbc("plan", job(costs={"f": 1.0, "b": 1.0, "w": 1.0})).out, "given times are given"


@pytest.mark.long
def test_a_first_search_says_that_it_compiles(zbc, job, tmp_path, monkeypatch):
    said = "compiling the search, once"
    monkeypatch.setattr(engine, "compiles_first", lambda: True)
    assert zbc("plan", job(kind="zb-v")).err == "", "nobody watches"
    monkeypatch.setattr(opening, "sys", SimpleNamespace(stderr=SimpleNamespace(isatty=lambda: True)))
    assert said in zbc("plan", job(kind="zb-v")).err
    assert said not in zbc("plan", "zbc.toml", "-q").err
    assert said not in zbc("plan", job(kind="1f1b")).err
    monkeypatch.undo()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "none"))
    assert engine.compiles_first() is engine.available()
