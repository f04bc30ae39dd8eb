"""Values at which schedules change places, compared with a scan of many values; and the Pareto front."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest

from tests.jobs import write_job
from zbc.compiler.whatif.compare import Asked, ComparedPlan, combinations, compare
from zbc.compiler.whatif.crossings import changed, crossings

UNIT = {"costs": {"f": 1.0, "b": 1.0, "w": 1.0}}


def made_up(name, value, ms, held=1):
    """A row without a plan."""
    report = SimpleNamespace(bytes_known=True, peak_bytes=held, peak_activation_units=float(held))
    return ComparedPlan(name, (("costs.comm", f"{value:.12g}"),), report, step_ms=ms)


def curves(functions, *values, every=True, plans=None):
    """Crossings of schedules whose times are functions of the transfer time; `plans` collects the planned values."""

    def plan(name, settings):
        value = float(dict(settings)["costs.comm"])
        if plans is not None:
            plans.append((name, value))
        return made_up(name, value, functions[name](value))

    rows = [made_up(name, value, functions[name](value)) for value in values for name in functions]
    found = crossings(plan, rows, every=every)
    return [(one.before[0], one.after[0], one.at, one.leading) for one in found]


@pytest.mark.parametrize(
    ("rising", "level"),
    [
        (lambda x: 1 + 2 * x, 1.5),
        (lambda x: 1 + x * x, 3**0.5),
        (lambda x: 2 + max(0.0, 8 * (x - 3)), 3.25),  # level ground, then steep
        (lambda x: 5 - 3 / (x + 0.1), 2.9),
        (lambda x: 3 if x < 6.25 else 5, 6.25),  # a jump
    ],
)
def test_functions_cross_where_they_are_level_within_a_fifth_of_a_percent(rising, level):
    ((before, after, at, leading),) = curves({"rising": rising, "flat": lambda x: 4.0}, 0.0, 10.0)
    assert (before, after, leading) == ("rising", "flat", True) and at == pytest.approx(level, rel=2.5e-3)


def test_a_value_at_which_two_are_level_does_not_hide_that_they_change_places():
    falling = {"a": lambda x: x, "b": lambda x: 4 - x, "far": lambda x: 100.0}
    ((before, after, at, _),) = curves(falling, 1.0, 2.0, 3.0)
    assert (before, after) == ("a", "b") and at == pytest.approx(2.0)
    assert curves({"a": lambda x: 1 + abs(x - 2), "b": lambda x: 1.0}, 1.0, 2.0, 3.0) == []


def test_every_leader_between_two_values_is_found():
    lines = {f"{slope}": (lambda x, slope=slope: slope * x + (4 - slope) ** 2) for slope in range(5)}
    found = [one for one in curves(lines, 0.0, 9.0, every=False) if one[3]]
    assert [(before, after) for before, after, _, _ in found] == [("4", "3"), ("3", "2"), ("2", "1"), ("1", "0")]
    assert [at for _, _, at, _ in found] == pytest.approx([1.0, 3.0, 5.0, 7.0], rel=2.5e-3)


def test_two_that_change_places_twice_between_two_values_are_seen():
    knee = {"line": lambda x: 4 + x, "knee": lambda x: 5 + max(0.0, 2 * (x - 5)), "far": lambda x: 90.0 + x}
    twice = [("line", "knee"), ("knee", "line")]
    plans = []
    found = curves(knee, 0.0, 10.0, every=False, plans=plans)
    assert [(before, after, leading) for before, after, _, leading in found] == [(*one, True) for one in twice]
    assert [at for _, _, at, _ in found] == pytest.approx([1.0, 9.0], rel=2.5e-3)
    assert not any(name == "far" and value == 5.0 for name, value in plans)
    behind = {"best": lambda x: 1.0, **knee}
    found = curves(behind, 0.0, 10.0)
    assert [(before, after, leading) for before, after, _, leading in found] == [(*one, False) for one in twice]
    assert curves(behind, 0.0, 10.0, every=False) == []


def test_nothing_is_planned_between_where_the_one_behind_cannot_be_ahead():
    plans = []
    rising = {"a": lambda x: 1 + x, "b": lambda x: 4 + x, "c": lambda x: 3.0, "none": lambda x: float("inf")}
    assert curves(rising, 0.0, 1.9, plans=plans) == [] and plans == []


def test_the_front_prefers_less_memory_at_the_same_time_and_less_time_at_the_same_memory():
    rows = {"a": (1.0, 9), "b": (1.0, 7), "c": (2.0, 7), "d": (2.0, 5), "e": (3.0, 6), "f": (2.0, 5)}
    ranked = compare(lambda name, _: made_up(name, 1, *rows[name]), [(name, ()) for name in rows])
    assert "".join(one.schedule for one in ranked) == "badfce"
    assert [one.schedule for one in ranked if one.front] == ["b", "d", "f"]


@pytest.fixture
def path(tmp_path):
    return partial(write_job, tmp_path)


def swept(path, schedules, *sweeps, every=True):
    asked = Asked(path, budget=0.0)
    rows = compare(asked, combinations(schedules, sweeps))
    return rows, crossings(asked, rows, every=every)


def ms(path, schedule, key, value):
    return Asked(path, budget=0.0)(schedule, ((key, repr(value)),)).sequence_ms


@pytest.mark.repeats
def test_crossings_lie_where_a_scan_finds_them(path):
    """Every change of order among five schedules, at 50 values of the transfer time."""
    job = path(**UNIT, m=8)
    names = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "chimera"]
    rows, found = swept(job, names, "costs.comm=0.001,0.5,3")
    values = [0.001 + (3 - 0.001) * i / 50 for i in range(51)]
    times = {name: [ms(job, name, "costs.comm", value) for value in values] for name in names}
    changes = []
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            pairs = zip(times[one], times[other], values, strict=True)
            ahead = [(a < b, value) for a, b, value in pairs if abs(a - b) > 1e-9 * a]
            changes += [
                ({one, other}, low, high) for (first, low), (second, high) in pairwise(ahead) if first != second
            ]
    assert len(changes) >= 4
    assert len(found) == len(changes) and changed(rows) == {one.pair for one in found}
    for pair, low, high in changes:
        (match,) = [one for one in found if {one.before[0], one.after[0]} == pair]
        assert low - 0.01 <= match.at <= high + 0.01
        assert times[match.before[0]][0] < times[match.after[0]][0]


@pytest.mark.long
def test_both_take_the_same_time_where_they_cross(path):
    job = path(**UNIT, m=16)
    _, found = swept(job, ["1f1b", "interleaved-1f1b"], "costs.comm=0,2")
    (one,) = found
    assert (one.before[0], one.after[0], one.leading) == ("interleaved-1f1b", "1f1b", True)
    pair = [ms(job, name, "costs.comm", one.at) for name in ("1f1b", "interleaved-1f1b")]
    assert pair[0] == pytest.approx(pair[1], rel=1e-6)
    assert one.ms == pytest.approx(pair[0], rel=1e-6)


@pytest.mark.long
def test_link_speeds_latencies_and_other_choices_are_swept_together(path):
    job = path(hardware={"link_us": 0.0}, model={"hidden": 64})
    sweeps = ("hardware.link_gbps=0.01,10", "schedule.microbatches=4,8", "hardware.link_us=0,2000")
    rows, found = swept(job, ["1f1b", "interleaved-1f1b"], *sweeps, every=False)
    assert len(rows) == 2 * 2 * 2 * 2
    assert {one.key for one in found} == {"hardware.link_gbps", "hardware.link_us"}
    for one in found:
        (other,) = {"hardware.link_gbps", "hardware.link_us"} - {one.key}
        assert [key for key, _ in one.world] == [other]
        assert [key for key, _ in one.before[1]] == ["schedule.microbatches"]
        assert 0 < one.at < 2000


def test_what_is_level_or_cannot_be_planned_does_not_cross(path):
    job = path(**UNIT, m=8)
    _, found = swept(job, ["1f1b", "gpipe"], "costs.f=1,2")  # equal makespans at any speed, without transfers
    assert found == []
    limited = path(**UNIT, m=8, schedule={"memory_limit": "0.5x"})
    rows, found = swept(limited, ["1f1b", "v-half"], "costs.comm=0,5")
    assert [one.schedule for one in rows if one.error is not None] == ["1f1b", "1f1b"] and found == []


@pytest.mark.long
def test_rows_compete_within_a_world_and_worlds_keep_their_order(path):
    rows, _ = swept(path(**UNIT), ["zb-v", "1f1b", "gpipe"], "costs.comm=2,0", "schedule.microbatches=4,8", every=False)
    assert [dict(one.settings)["costs.comm"] for one in rows] == ["2"] * 6 + ["0"] * 6
    for value in ("2", "0"):
        times = [one.sequence_ms for one in rows if dict(one.settings)["costs.comm"] == value]
        assert times == sorted(times)
        assert sum(one.front for one in rows if dict(one.settings)["costs.comm"] == value) >= 1
