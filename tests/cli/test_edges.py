"""Inputs made to harm, and mistakes of launchers: an error in words, in little time and memory, and no foreign code."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cli.test_errors import edited
from tests.jobs import toml_text

NAME = "\x1b<!--<script>{{data}}\u202e\udc9b"


def test_names_are_harmless_in_pictures(zbc, plan):
    edited(plan, {"schedule": NAME})
    shown = zbc("visualize", "plan")
    assert shown.code == 0 and not re.search("[\x1b\u202e\udc9b]", re.sub("\x1b\\[[0-9;]*m", "", shown.out))
    for name in ("page.html", "picture.svg"):
        assert zbc("visualize", "plan", "-o", name).code == 0
    ElementTree.parse("picture.svg")
    parts = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: parts.append((tag, dict(attributes).get("id")))
    text = Path("page.html").read_text()
    parser.feed(text)
    data = re.search(r"<script[^>]*application/json[^>]*>(.*?)</script>", text, re.DOTALL)[1]
    assert "<" not in data and json.loads(data)
    assert sum(tag == "script" for tag, _ in parts) == 2
    assert "{{data}}" in text  # the name's own, as text


@pytest.mark.parametrize("file", ["plan/rank-0001.json", "plan/plan.json", "order.csv", "job.toml"])
@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_files_that_are_none_are_refused_at_once(zbc, plan, file, kind):
    Path(file).unlink(missing_ok=True)
    os.mkfifo(file) if kind == "pipe" else os.symlink("/dev/zero", file)
    if "/" not in file and kind == "pipe":
        return  # an order and a job may be piped
    found = zbc("check", "plan" if "/" in file else file)
    assert (found.code in (3, 4) and "no regular file" in found.err + found.out) or "what is no file" in found.err


def test_a_job_may_be_piped(zbc):
    os.mkfifo("pipe")
    with subprocess.Popen([sys.executable, "-c", "import sys; open('pipe', 'w').write(sys.argv[1])", toml_text()]):
        assert zbc("check", "pipe").code == 0


NUMBERS = [("WORLD_SIZE", "two"), ("RANK", "x"), ("RANK", "7"), ("LOCAL_RANK", "z"), ("LOCAL_RANK", "-1")]
NUMBERS += [("MASTER_PORT", "abc"), ("MASTER_PORT", "99999"), ("WORLD_SIZE", 5000 * "1")]


@pytest.mark.parametrize(("name", "value"), NUMBERS)
def test_a_launchers_variables_are_checked(zbc, plan, monkeypatch, name, value):
    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    for key, text in {**given, name: value}.items():
        monkeypatch.setenv(key, text)
    found = zbc("run", "plan")
    assert found.code == 6 and f"{name} is {value!r}"[:60] in found.err


def test_a_run_from_a_folder_that_was_removed_says_so(zbc, plan):
    whole = plan.absolute()
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")
    found = zbc("run", str(whole), "--local", "2")
    os.chdir(whole)
    assert found.code == 6 and "the current folder was removed" in found.err


def test_a_job_named_as_a_file_is_written_there(zbc):
    assert zbc("init", "tiny.toml").code == 0 and Path("tiny.toml").is_file()
    assert zbc("init", "folder").code == 0 and Path("folder/zbc.toml").is_file()


@pytest.mark.limit(120)
@pytest.mark.repeats
def test_files_beside_a_run_are_not_executed(zbc, plan):
    """torch imports dill where it finds it."""
    Path("dill.py").write_text("open('executed', 'w').write('')\nraise ImportError\n")
    command = [sys.executable, "-P", "-m", "zbc", "run", "plan", "--local", "2", "--steps", "1", "-q"]
    subprocess.run(command, capture_output=True, timeout=100, check=False)
    assert not Path("executed").exists()
