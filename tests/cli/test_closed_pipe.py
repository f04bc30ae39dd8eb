"""A command whose reader goes away ends quietly, with the code a shell gives a closed pipe; a full disk is an error in
words, and streams that are closed are nothing to complain of."""

import os
import pty
import shlex
import subprocess
import sys

import pytest

from tests.jobs import toml_text
from tests.tiers import few

ANSWERS = ["schedules", "--version", "plan zbc.toml", "compare zbc.toml --schedules 1f1b", "explain E110"]
COMMANDS = ["--help", *ANSWERS]


def start(folder, command, out):
    return subprocess.Popen(
        [sys.executable, "-m", "zbc", *command.split()], cwd=folder, stdout=out, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("command", few(COMMANDS, ("--help", "plan zbc.toml")))
def test_nobody_reads_what_a_command_says(tmp_path, command):
    (tmp_path / "zbc.toml").write_text(toml_text())
    read, write = os.pipe()
    os.close(read)
    with start(tmp_path, command, write) as process:
        os.close(write)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (141, "")


def test_a_line_of_a_run_that_nobody_reads_ends_it():
    """And with it all ranks: tests/processes/test_local.py."""
    read, write = os.pipe()
    os.close(read)
    code = "from zbc.host.closed_pipe import to_stdout; to_stdout('step 1')"
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
@pytest.mark.parametrize("command", few([*ANSWERS, "plan zbc.toml --json"], ("explain E110", "plan zbc.toml")))
def test_an_answer_that_a_full_disk_does_not_take_is_an_error_in_words(tmp_path, command):
    (tmp_path / "zbc.toml").write_text(toml_text())
    with open("/dev/full", "w") as full, start(tmp_path, command, full) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 6 and "Traceback" not in said
    assert said.startswith("error[E608] cannot write to standard output: No space left on device")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
def test_the_exit_code_tells_what_cannot_be_said(tmp_path):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "zbc", "plan", "nowhere.toml", "--json"]
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=full, timeout=60)
    assert done.returncode == 3


@pytest.mark.parametrize("closed", few([">&-", "2>&-", "<&-", ">&- 2>&- <&-"], (">&- 2>&- <&-",)))
def test_streams_that_are_closed_from_the_beginning_are_nothing_to_complain_of(tmp_path, closed):
    (tmp_path / "zbc.toml").write_text(toml_text())
    command = f"{shlex.quote(sys.executable)} -m zbc plan zbc.toml -o made {closed}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "made" / "plan.json").exists()
    assert bool(done.stdout) == (not closed.startswith(">&-"))


def test_lines_of_a_run_whose_terminal_is_gone_go_nowhere():
    """It has sent SIGHUP, and the run is to end in order: tests/processes/test_hangup.py."""
    terminal, side = pty.openpty()
    code = "from zbc.host.closed_pipe import to_stdout; input(); to_stdout('step 1'); to_stdout('step 2')"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=side, stderr=subprocess.PIPE, text=True) as process:
        os.close(side)
        os.close(terminal)
        _, said = process.communicate("go\n", timeout=60)
    assert (process.returncode, said) == (0, "")
