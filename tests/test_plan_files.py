"""Plan directories: deterministic, verified, and written completely or not at all."""

import hashlib
import json
import os

import pytest

from tests.compiler.grid import make
from tests.lowered import lower
from tests.refusals import refused
from zbc.commands.checking import check_plan
from zbc.compiler.schedules import SCHEDULES
from zbc.errors import ZbcError
from zbc.plan import directory as plans
from zbc.plan.directory import Boundary, StoredPlan
from zbc.plan.manifest import sha


def assembled(program, **changes):
    options = {
        "parameters": {"chunks": 2},
        "layers": [[f"layers.{s}"] for s in range(program.placement.stages)],
        "boundaries": [Boundary(shape=[2, 16, 32], dtype="float32")] * (program.placement.stages - 1),
        "microbatch_size": 2,
        "predicted": {"makespan_ms": 1.5},
        "planning": {"model": {"layers": 8}},
        "training": {"train": {"steps": 3}},
    }
    return plans.assemble(program, **{**options, **changes})


@pytest.fixture
def folder(tmp_path):
    target = tmp_path / "plan"
    plans.write(target, *assembled(lower(make("zb-v", 3, 5))))
    return target


def rewrite_manifest(folder, **changes):
    """Changes plan.json and corrects its hash."""
    data = json.loads((folder / "plan.json").read_text()) | changes
    (folder / "plan.json").write_text(plans.Manifest.model_validate(data).dumps())


def code_of(folder):
    with pytest.raises(ZbcError) as caught:
        StoredPlan.read(folder)
    return caught.value.code


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_program_reads_back_equal(tmp_path, name):
    program = lower(make(name, 3 * SCHEDULES[name].ranks_in, 5))
    manifest, files = assembled(program)
    plans.write(tmp_path / "plan", manifest, files)
    read = StoredPlan.read(tmp_path / "plan")
    assert read.program == program
    assert read.manifest.model_copy(update={"sha256": ""}) == manifest.model_copy(update={"sha256": ""})
    assert ('"OVERLAP"' in (tmp_path / "plan" / "rank-0001.json").read_text()) is (name == "braid-v")


def test_bytes_are_deterministic_and_one_op_stands_on_a_line(tmp_path, folder):
    again = tmp_path / "again"
    plans.write(again, *assembled(lower(make("zb-v", 3, 5))))
    names = sorted(os.listdir(folder))
    assert names == ["plan.json", "rank-0000.json", "rank-0001.json", "rank-0002.json"]
    assert all((folder / name).read_bytes() == (again / name).read_bytes() for name in names)
    lines = (folder / "rank-0001.json").read_text().splitlines()
    assert '  "RECV_F s1 m0 <r0",' in lines
    assert '  "F s1 m0",' in lines
    assert json.loads((folder / "plan.json").read_text())["placement"] == [[0], [1], [2], [2], [1], [0]]


def test_the_id_covers_ops_and_planning_but_not_training():
    program = lower(make("1f1b", 2, 4))
    base = assembled(program)[0].id
    assert assembled(program, training={"train": {"steps": 9}})[0].id == base
    assert assembled(program, planning={"model": {"layers": 9}})[0].id != base
    assert assembled(lower(make("gpipe", 2, 4)))[0].id != base


def added(text, **fields):
    return json.dumps({**json.loads(text), **fields})


DAMAGE = {
    "another version with a new field": ("plan.json", lambda text: added(text, version=2, new=True), "E403"),
    "an unknown field": ("plan.json", lambda text: added(text, surprise=1), "E404"),
    **{f"cut off at {at}": ("plan.json", lambda text, at=at: text[:at], "E404") for at in (0, 1, 100, -3)},
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_file_that_was_changed_is_noticed(folder, case):
    name, change, code = DAMAGE[case]
    (folder / name).write_text(change((folder / name).read_text()))
    assert code_of(folder) == code


@pytest.mark.parametrize(("missing", "added"), [(("node", "ramp"), {}), ((), {"later": 1}), (("node",), {"later": 1})])
def test_a_plan_that_is_as_another_version_wrote_it_is_not_called_edited(folder, missing, added):
    data = json.loads((folder / "plan.json").read_text())
    other = {key: value for key, value in data.items() if key not in (*missing, "sha256")} | added
    sha = hashlib.sha256(json.dumps(other, sort_keys=True).encode()).hexdigest()
    (folder / "plan.json").write_text(json.dumps({**other, "sha256": sha}))
    with refused("E403", match="made by another version of zbc") as caught:
        StoredPlan.read(folder)
    assert all(name in caught.value.message for name in (*missing, *added))
    with pytest.raises(ZbcError, match="made by another version of zbc"):
        check_plan(folder)
    (folder / "plan.json").write_text(json.dumps({**other, "sha256": sha, "microbatches": 1}))
    assert code_of(folder) in ("E402", "E404")


@pytest.mark.parametrize(
    "changes",
    [
        {"placement": [[0]]},
        {"placement": [[0], [1], [2], [2], [1], [7]]},
        {"layers": []},
        {"boundaries": []},
        {"files": {}},
        {"placement": [[0], [1], [2], [2, 1], [1], [0]]},
        *({size: 10**12} for size in ("microbatches", "slices", "ranks")),  # checks make tables of so many entries
    ],
)
def test_a_manifest_that_contradicts_itself_is_damaged(folder, changes):
    rewrite_manifest(folder, **changes)
    assert code_of(folder) == "E404"


def test_op_kinds_of_a_newer_zbc_are_refused_by_name(folder):
    rewrite_manifest(folder, capabilities=["F", "TELEPORT"])
    with refused("E406", match="TELEPORT"):
        StoredPlan.read(folder)


@pytest.mark.parametrize(
    ("old", "new"),
    [("F s1 m0", new) for new in ("F s1 m99", "F s9 m0", "G s1 m0", f"F s{'9' * 5000} m0", f"F s1 m{'0' * 5000}")]
    + [("RECV_F s1 m0 <r0", "RECV_F s1 m0 <r2"), ("RECV_F s1 m0 <r0", "RECV_F s1 m0"), ('"rank": 1', '"rank": 2')]
    + [('"F s1 m0"', "17")],
)
def test_a_rank_file_that_makes_no_sense_is_damaged_even_with_the_right_hash(folder, old, new):
    path = folder / "rank-0001.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    manifest = plans.read_manifest(folder)
    rewrite_manifest(folder, files=manifest.files | {path.name: sha(path.read_bytes())})
    assert code_of(folder) == "E404"


def test_a_new_plan_replaces_an_old_one_whole(folder):
    plans.write(folder, *assembled(lower(make("1f1b", 2, 4))))
    assert sorted(os.listdir(folder)) == ["plan.json", "rank-0000.json", "rank-0001.json"]
    assert StoredPlan.read(folder).manifest.schedule == "1f1b"
    assert os.listdir(folder.parent) == ["plan"]


def test_a_write_that_fails_half_way_leaves_the_old_plan_and_nothing_else(folder, monkeypatch):
    before = (folder / "plan.json").read_bytes()
    real = os.rename

    def fails_for_the_new_one(source, target):
        if str(source).endswith("new"):
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(plans.os, "rename", fails_for_the_new_one)
    with refused("E407", match="No space left on device"):
        plans.write(folder, *assembled(lower(make("1f1b", 2, 4))))
    assert (folder / "plan.json").read_bytes() == before
    assert os.listdir(folder.parent) == ["plan"]
