"""The comparison of ranks before the first step."""

import sys
import types

import pytest

from tests.refusals import refused
from tests.runtime.small_plans import make_plan, make_program
from zbc.training.launch.board import _digest, identity


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A user's package: layers, and a module that they import."""
    folder = tmp_path / "ownmodel"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "layers.py").write_text("import json, torch, ownmodel.parts\ndef make():\n    return []\n")
    (folder / "parts.py").write_text("width = 8\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "ownmodel"]:
        del sys.modules[name]


def told(**model):
    manifest = make_plan(make_program("1f1b", 2, 2)).manifest
    planning = {**manifest.planning, "model": {**manifest.planning["model"], **model}}
    return identity(manifest.model_copy(update={"planning": planning}), 3)


@pytest.mark.long
def test_every_module_of_the_users_own_is_compared_and_none_that_is_installed(package):
    before = told(family="ownmodel.layers:make")
    assert {"plan id", "steps", "zbc version", "torch version", "Python version"} <= before.keys()
    code = {what for what in before if what.startswith("the code of ") and "tests." not in what}
    assert {f"the code of {name} (sha256)" for name in ("zbc", "ownmodel.layers", "ownmodel.parts")} <= code
    assert not [what for what in code if "json" in what or "torch" in what]
    (package / "parts.py").write_text("width = 9\n")
    after = told(family="ownmodel.layers:make")
    assert {what for what in before if before[what] != after[what]} == {"the code of ownmodel.parts (sha256)"}


def test_code_that_is_not_there_is_an_error_in_words():
    with refused("E502", "model.family = ownmodel.layers:make"):
        told(family="ownmodel.layers:make")


def test_a_file_of_other_content_or_another_name_has_another_digest(tmp_path):
    files = [tmp_path / name for name in ("a.py", "b.py", "c.py")]
    for file, text in zip(files, ("x", "x", "y"), strict=True):
        file.write_text(text)
    (tmp_path / "gone.py").touch()
    assert len({_digest([file]) for file in (*files, tmp_path / "never.py")}) == 4
    assert _digest(files[:2]) != _digest(files[:1])


def test_what_torch_compiles_into_its_cache_is_no_code_of_the_user(package, tmp_path, monkeypatch):
    file = tmp_path / "cache.py"
    file.write_text("")
    name = "torch._inductor.runtime.compile_tasks.cache"
    made = types.ModuleType(name)
    made.__file__ = str(file)
    monkeypatch.setitem(sys.modules, name, made)
    assert not [what for what in told(family="ownmodel.layers:make") if "compile_tasks" in what]
