"""Plan directories: deterministic, verified, and written completely or not at all."""

import hashlib
import json
import os

import pytest

from tests.compiler.grid import make
from tests.fuzzing_orders import sign
from tests.lowered import lower
from tests.refusals import error_of, refused
from zbc.commands.checking import check_plan
from zbc.compiler.schedules import SCHEDULES
from zbc.errors import ZbcError
from zbc.plan import directory as plans
from zbc.plan.directory import Boundary, StoredPlan


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
    assert error_of(StoredPlan.read, folder).code in ("E402", "E404")


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
    sign(folder)
    with refused("E404"):
        StoredPlan.read(folder)


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
