"""Pipelines of stages that are no layers, in `zbc simulate`."""

import itertools

import pytest


def written(folder, tokens, stages, more=""):
    rows = ", ".join(f"{{ ms = {ms}, replicas = {count} }}" for ms, count in stages)
    (folder / "serial.toml").write_text(f"[pipeline]\ntokens = {tokens}\nstages = [{rows}]\n{more}")
    return "serial.toml"


def by_hand(tokens, stages):
    """When the last token leaves, token by token."""
    free = [[0.0] * count for _, count in stages]
    for token in range(tokens):
        now = 0.0
        for (ms, count), workers in zip(stages, free, strict=True):
            now = workers[token % count] = max(now, workers[token % count]) + ms
    return max(itertools.chain(*free))


@pytest.mark.parametrize(
    ("tokens", "stages"),
    [(20, [(2.0, 3), (1.0, 1)]), (7, [(1.0, 1), (4.0, 2), (0.5, 1)]), (1, [(3.0, 4)]), (5, [(1.0, 9), (2.0, 2)])],
)
def test_times_are_those_of_tokens_followed_by_hand(zbc, folder, tokens, stages):
    found = zbc("simulate", written(folder, tokens, stages), "--json").json()
    assert found["makespan_ms"] == pytest.approx(by_hand(tokens, stages))
    assert found["ms_per_token"] == max(ms / count for ms, count in stages)
    busy = [tokens * ms / count / found["makespan_ms"] for ms, count in stages]
    assert [stage["busy"] for stage in found["stages"]] == pytest.approx(busy)


def test_people_read_what_limits_it(zbc, folder):
    said = zbc("simulate", written(folder, 20, [(2.0, 3), (1.0, 1)]))
    assert said.code == 0 and "1.0 ms a token, as stage 1 has it" in said.out.replace("1.00", "1.0")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[pipeline]\ntokens = 0\nstages = [{ ms = 1.0 }]\n", "E103"),
        ("[pipeline]\ntokens = 3\nstages = []\n", "E103"),
        ("[pipeline]\ntokens = 3\nstages = [{ ms = 1.0, speed = 2 }]\n", "E102"),
        ("[pipeline]\nstages = [{ ms = 1.0 }]\n", "E105"),
        ("[pipeline]\ntokens = 100000000\nstages = [{ ms = 1.0 }]\n", "E114"),
        ("[pipeline]\ntokens = 3\nstages = [{ ms = 1.0 }]\n[train]\nsteps = 3\n", "E102"),
    ],
)
def test_what_is_wrong_is_said(zbc, folder, text, code):
    (folder / "serial.toml").write_text(text)
    found = zbc("simulate", "serial.toml")
    assert found.code != 0 and f"error[{code}]" in found.err


def test_other_commands_do_not_read_it(zbc, folder):
    assert "error[E102]" in zbc("plan", written(folder, 3, [(1.0, 1)])).err
