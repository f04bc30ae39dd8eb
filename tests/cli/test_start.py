"""What a command loads before it answers, and how it speaks to terminals."""

import json
import os
import pty
import subprocess
import sys

import pytest

from tests.jobs import toml_text

HEAVY = {"torch", "networkx", "numpy"}
COMMANDS = [
    "init new",
    "schedules",
    "schedules zb-v",
    "plan zbc.toml -o other",
    "check plan",
    "check zbc.toml",
    "compare zbc.toml --schedules 1f1b,zb-h1",
    "export plan --to json",
    "visualize plan",
    "bubbles plan",
    "visualize zbc.toml --by slot",
    "config show zbc.toml",
    "config schema",
    "explain E201",
]
# Runs commands one after the other in one process and says after each what is loaded by then.
PROBE = """
import json, sys
from zbc.cli import main
for command in sys.argv[1:]:
    try:
        main(command.split())
    except SystemExit as left:
        code = left.code or 0
    print(json.dumps([command, code, sorted(sys.modules)]), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with a job and its plan."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "zbc.toml").write_text(toml_text(kind="zb-h1"))
    subprocess.run([sys.executable, "-m", "zbc", "plan", "zbc.toml", "-q"], cwd=folder, check=True, timeout=60)
    return folder


def loaded(workplace, *commands):
    """For each command, the modules that are loaded when it has ended."""
    found = subprocess.run(
        [sys.executable, "-c", PROBE, *commands], cwd=workplace, capture_output=True, text=True, timeout=60, check=True
    )
    said = [json.loads(line) for line in found.stderr.strip().split("\n")]
    assert [(command, code) for command, code, _ in said] == [(command, 0) for command in commands]
    return {command: set(modules) for command, _, modules in said}


def test_only_run_and_doctor_load_torch_and_nothing_heavy_is_loaded_in_vain(workplace):
    heavy = {command: modules & HEAVY for command, modules in loaded(workplace, *COMMANDS).items()}
    assert heavy == {command: set() for command in COMMANDS}


def test_help_loads_nothing_that_plans_or_draws(workplace):
    light = ["--help", "plan --help", "--version"]
    for modules in loaded(workplace, *light).values():
        assert not modules & {
            "zbc.job.spec",
            "zbc.compiler",
            "zbc.plan.directory",
            "rich.console",
            "tree_sitter",
            *HEAVY,
        }


def on_a_terminal(workplace, *arguments, **environment):
    """stdout and stderr of a command, both a pseudo-terminal."""
    near, far = pty.openpty()
    settings = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    settings |= {"TERM": "xterm-256color", "COLUMNS": "90", **environment}
    child = subprocess.Popen(
        [sys.executable, "-m", "zbc", *arguments], cwd=workplace, env=settings, stdout=far, stderr=far
    )
    os.close(far)
    said = b""
    while True:
        try:
            part = os.read(near, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not part:
            break
        said += part
    os.close(near)
    child.wait(timeout=60)
    return said.decode()


def test_a_terminal_gets_colours_unless_it_asks_for_none(workplace):
    assert "\x1b[" in on_a_terminal(workplace, "visualize", "plan")
    assert "\x1b[" in on_a_terminal(workplace, "plan", "nowhere.toml")
    assert "\x1b[" not in on_a_terminal(workplace, "visualize", "plan", NO_COLOR="1")
    assert "\x1b[" not in on_a_terminal(workplace, "plan", "nowhere.toml", NO_COLOR="1")


def test_a_picture_takes_the_width_of_its_terminal(workplace):
    said = on_a_terminal(workplace, "visualize", "plan", NO_COLOR="1")
    assert 60 < max(len(line) for line in said.replace("\r", "").split("\n")) <= 90


def test_progress_is_seen_on_a_terminal_only_and_not_in_quiet(workplace):
    assert "planning" in on_a_terminal(workplace, "compare", "zbc.toml", "--schedules", "1f1b,gpipe")
    assert "planning" not in on_a_terminal(workplace, "compare", "zbc.toml", "--schedules", "1f1b,gpipe", "-q")
    command = [sys.executable, "-m", "zbc", "compare", "zbc.toml", "--schedules", "1f1b,gpipe"]
    found = subprocess.run(command, cwd=workplace, capture_output=True, text=True, timeout=60, check=True)
    assert found.stderr == ""


def test_completion_of_a_shell_knows_the_schedules(workplace):
    environment = {**os.environ, "_ZBC_COMPLETE": "complete_bash", "COMP_WORDS": "zbc schedules zb-", "COMP_CWORD": "2"}
    command = [sys.executable, "-c", "from zbc.cli import main; main()"]
    found = subprocess.run(
        command, cwd=workplace, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert {"zb-h1", "zb-h2", "zb-v"} <= set(found.stdout.split())
