"""Modules that a command loads, its output on terminals, and readers that go away."""

import json
import os
import pty
import shlex
import subprocess
import sys

import pytest

from tests.jobs import write_job
from tests.limits import ended
from tests.tiers import few

COLOURED = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
ZBC = [sys.executable, "-m", "zbc"]
HEAVY = {"torch", "networkx", "numpy"}
PLANS = "init new, plan zbc.toml -o other, check plan, check zbc.toml, export plan --format json, visualize plan"
EXPLAINED = "report plan, visualize zbc.toml --by slot, explain zbc.toml, explain keys, explain E201, explain zb-v"
COMMANDS = [*f"{PLANS}, {EXPLAINED}".split(", "), "compare zbc.toml --schedule 1f1b,zb-h1", "explain schedules"]
# Runs commands one after the other in one process and prints the loaded modules after each.
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
    write_job(folder, kind="zb-h1")
    assert ended(*ZBC, "plan", "zbc.toml", "-q", cwd=folder).returncode == 0
    return folder


def loaded(workplace, *commands):
    """Command -> modules loaded at its end."""
    found = ended(sys.executable, "-c", PROBE, *commands, cwd=workplace)
    said = [json.loads(line) for line in found.stderr.strip().split("\n")]
    assert [(command, code) for command, code, _ in said] == [(command, 0) for command in commands]
    return {command: set(modules) for command, _, modules in said}


@pytest.mark.long
def test_only_run_and_doctor_load_torch_and_nothing_heavy_is_loaded_in_vain(workplace):
    heavy = {command: modules & HEAVY for command, modules in loaded(workplace, *COMMANDS).items()}
    assert heavy == {command: set() for command in COMMANDS}


def test_help_loads_nothing_that_plans_or_draws(workplace):
    light = ["--help", "plan --help", "--version"]
    for modules in loaded(workplace, *light).values():
        assert not modules & HEAVY and not modules & {"zbc.job.spec", "zbc.job.sections", "zbc.compiler"}
        assert not modules & {"zbc.plan.directory", "rich.console", "tree_sitter"}


def on_a_terminal(workplace, *arguments, **environment):
    """stdout and stderr of a command, both a pseudo-terminal."""
    near, far = pty.openpty()
    settings = {**COLOURED, "TERM": "xterm-256color", "COLUMNS": "90", **environment}
    child = subprocess.Popen([*ZBC, *arguments], cwd=workplace, env=settings, stdout=far, stderr=far)
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


@pytest.mark.long
def test_a_terminal_gets_colours_its_width_and_progress(workplace):
    assert "\x1b[" in on_a_terminal(workplace, "visualize", "plan")
    assert "\x1b[" in on_a_terminal(workplace, "plan", "nowhere.toml")
    assert "\x1b[" not in on_a_terminal(workplace, "visualize", "plan", NO_COLOR="1")
    assert "\x1b[" not in on_a_terminal(workplace, "plan", "nowhere.toml", NO_COLOR="1")
    said = on_a_terminal(workplace, "visualize", "plan", NO_COLOR="1")
    assert 60 < max(len(line) for line in said.replace("\r", "").split("\n")) <= 90
    assert "planning" in on_a_terminal(workplace, "compare", "zbc.toml", "--schedule", "1f1b,gpipe")
    assert "planning" not in on_a_terminal(workplace, "compare", "zbc.toml", "--schedule", "1f1b,gpipe", "-q")
    for words, code, told in (("compare zbc.toml --schedule 1f1b,gpipe", 0, ""), ("plan nowhere.toml", 3, "error")):
        found = ended(*ZBC, *words.split(), cwd=workplace, env=COLOURED)
        assert (found.returncode, "\x1b" in found.stdout + found.stderr) == (code, False)
        assert found.stderr.startswith(told) and bool(told) == bool(found.stderr), "progress is for terminals"


def test_completion_of_a_shell_knows_the_schedules(workplace):
    environment = {**os.environ, "_ZBC_COMPLETE": "complete_bash", "COMP_WORDS": "zbc explain zb-", "COMP_CWORD": "2"}
    found = ended(sys.executable, "-c", "from zbc.cli import main; main()", cwd=workplace, env=environment)
    assert {"zb-h1", "zb-h2", "zb-v"} <= set(found.stdout.split())


ANSWERS = ["explain schedules", "--version", "plan zbc.toml", "compare zbc.toml --schedule 1f1b", "explain E110"]
TALKING = ["--help", "explain keys", *ANSWERS]


def start(folder, command, out):
    return subprocess.Popen([*ZBC, *command.split()], cwd=folder, stdout=out, stderr=subprocess.PIPE, text=True)


@pytest.mark.long("plan zbc.toml")
@pytest.mark.parametrize("command", few(TALKING, ("--help", "plan zbc.toml")))
def test_nobody_reads_what_a_command_says(tmp_path, command):
    write_job(tmp_path)
    read, write = os.pipe()
    os.close(read)
    with start(tmp_path, command, write) as process:
        os.close(write)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (141, "")


def test_a_line_of_a_run_that_nobody_reads_ends_it():
    """And all its ranks: tests/processes/test_local.py."""
    read, write = os.pipe()
    os.close(read)
    code = "from zbc.host.closed_pipe import to_stdout; to_stdout('step 1')"
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
@pytest.mark.parametrize("command", few([*ANSWERS, "plan zbc.toml --json"], ("explain E110", "plan zbc.toml")))
def test_an_answer_that_a_full_disk_does_not_take_is_an_error_in_words(tmp_path, command):
    write_job(tmp_path)
    with open("/dev/full", "w") as full, start(tmp_path, command, full) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 6 and "Traceback" not in said
    assert said.startswith("error[E608] cannot write to standard output: No space left on device")


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
def test_the_exit_code_tells_what_cannot_be_said(tmp_path):
    with open("/dev/full", "w") as full:
        command = [*ZBC, "plan", "nowhere.toml", "--json"]
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=full, timeout=60)
    assert done.returncode == 3


@pytest.mark.long
@pytest.mark.parametrize("closed", few([">&-", "2>&-", "<&-", ">&- 2>&- <&-"], (">&- 2>&- <&-",)))
def test_streams_that_are_closed_from_the_beginning_are_nothing_to_complain_of(tmp_path, closed):
    write_job(tmp_path)
    command = f"{shlex.quote(sys.executable)} -m zbc plan zbc.toml -o made {closed}"
    done = ended("sh", "-c", command, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "made" / "plan.json").exists()
    assert bool(done.stdout) == (not closed.startswith(">&-"))


def test_lines_of_a_run_whose_terminal_is_gone_go_nowhere():
    """A closed terminal sends SIGHUP, and the run must end in order: tests/processes/test_signals.py."""
    terminal, side = pty.openpty()
    code = "from zbc.host.closed_pipe import to_stdout; input(); to_stdout('step 1'); to_stdout('step 2')"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=side, stderr=subprocess.PIPE, text=True) as process:
        os.close(side)
        os.close(terminal)
        _, said = process.communicate("go\n", timeout=60)
    assert (process.returncode, said) == (0, "")


def test_an_interrupt_while_commands_are_imported_ends_without_a_traceback(tmp_path):
    interrupted = "import sys\nclass Finder:\n    def find_spec(self, name, *rest):\n"
    interrupted += "        if name == 'zbc.commands':\n            raise KeyboardInterrupt\n"
    interrupted += "sys.meta_path.insert(0, Finder())\nfrom zbc.__main__ import main\nmain()\n"
    done = ended(sys.executable, "-c", interrupted)
    assert (done.returncode, done.stderr) == (130, "")
