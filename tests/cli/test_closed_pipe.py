"""A command whose reader goes away ends quietly, with the code a shell gives a closed pipe."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.jobs import toml_text

COMMANDS = ["schedules", "--help", "--version", "plan zbc.toml", "compare zbc.toml --schedules 1f1b", "explain E110"]


def start(folder, command, out):
    return subprocess.Popen(
        [sys.executable, "-m", "zbc", *command.split()], cwd=folder, stdout=out, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("command", COMMANDS)
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
    code = "from zbc.runtime.launch import to_stdout; to_stdout('step 1')"
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
