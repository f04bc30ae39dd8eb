"""A command plans for its remarks only within its time limit."""

import pytest

from tests.jobs import job, write_job
from zbc.compiler import compile as compiling
from zbc.compiler.compile import compile_job
from zbc.compiler.whatif.others import others, sharing
from zbc.compiler.whatif.why import what_ifs
from zbc.errors import ZbcError
from zbc.host import until
from zbc.host.until import Until

HEAVY = {"layers": 4, "vocab": 4096, "hidden": 16, "heads": 2}


@pytest.fixture
def no_time(monkeypatch):
    monkeypatch.setattr(until, "LEAST", -1.0)
    monkeypatch.setattr(compiling, "ASKING", -1.0)


def test_an_end_is_the_budget_from_now_but_some_seconds_at_least(monkeypatch):
    monkeypatch.setattr(until.time, "process_time", lambda: now)
    now = 100.0
    ends = {budget: Until(budget) for budget in (0.0, 10.0, None)}
    now = 102.0
    assert not any(end.over() for end in ends.values())
    assert ends[0.0].over(needs=1.5) and ends[0.0].cut and not ends[10.0].cut
    now = 111.0
    assert ends[10.0].over() and not ends[None].over()


def test_without_time_nothing_but_1f1b_is_planned_beside_a_plan(no_time):
    compiled = compile_job(job(model=HEAVY, kind="1f1b", pp=2), budget=0.0)
    over = Until(0.0)
    found = others(compiled, over)
    assert found.baseline is not None and found.faster is None and others(compiled).faster is not None
    assert sharing(compiled, over) is None and sharing(compiled) is not None
    assert not [*what_ifs(compiled, over)] and [*what_ifs(compiled)]
    assert over.cut


def test_plan_says_that_it_left_out_remarks(zbc, folder, monkeypatch):
    write_job(folder, model=HEAVY, pp=2)
    words = "remarks were left out for lack of time"
    assert words not in zbc("plan", "zbc.toml", "-o", "p", "--budget", "0").out
    monkeypatch.setattr(until, "LEAST", -1.0)
    said = zbc("plan", "zbc.toml", "-o", "p", "--budget", "0")
    assert words in said.out and "planned in" in said.out and "faster" not in said.out


def test_what_would_fit_is_asked_of_as_many_schedules_as_there_is_time_for(no_time):
    tight = job(kind="gpipe", schedule={"memory_limit": "0.75x"})
    with pytest.raises(ZbcError) as caught:
        compile_job(tight, budget=0.0)
    text = "\n".join(caught.value.details)
    assert "not asked for lack of time (a larger --budget): " in text and "no other schedule" not in text
