"""Jobs whose activations may move to the host: what planning says, refuses and writes."""

import json
from pathlib import Path

import pytest

from tests.jobs import toml_text
from zbc.compiler.compile import compile_job, load_job
from zbc.errors import ZbcError

COSTS = {"f": 1.0, "b": 1.0, "w": 1.0, "offload": 1.0}


def planned(tmp_path, kind="1f1b", limit="0.5x", *, costs=COSTS, **more):
    path = tmp_path / "zbc.toml"
    changes = {"costs": costs, "schedule": {"memory_limit": limit}, "memory": {"activations": "offload"}, **more}
    path.write_text(toml_text(kind=kind, pp=4, m=8, layers=16, **changes))
    return compile_job(load_job(path), suggest=False, budget=0.0)


@pytest.mark.parametrize("kind", ["1f1b", "gis", "zb-v", "zb-auto", "auto"])
def test_a_limit_is_kept_that_the_order_alone_does_not(tmp_path, kind):
    compiled = planned(tmp_path, kind)
    assert max(rank.units for rank in compiled.memory) <= 2.0 + 1e-6
    assert compiled.report.copied is not None and 0 < compiled.report.copied.moved < 1
    assert compiled.report.copied.k == pytest.approx(1 / 3)


def test_the_manifest_says_what_the_host_needs(tmp_path):
    planned(tmp_path).write(tmp_path / "plan")
    manifest = json.loads((tmp_path / "plan/plan.json").read_text())
    assert {"OFFLOAD", "RELEASE", "RELOAD"} <= set(manifest["capabilities"])
    found = manifest["predicted"]["host"]["rank 0"]
    assert found["slabs"]["s0"] >= 2 and found["bytes"] > 0
    assert "rank 3" not in manifest["predicted"]["host"], "its order keeps to the limit"


def code(tmp_path, **changes):
    with pytest.raises(ZbcError) as caught:
        planned(tmp_path, **changes)
    return caught.value.errors[0].code


def test_what_cannot_be_planned_is_refused(tmp_path):
    assert code(tmp_path, costs={"f": 1.0, "b": 1.0, "w": 1.0}) == "E144"
    assert code(tmp_path, limit="0.1x") == "E303"
    assert code(tmp_path, hardware={"host_gib": 1e-6}) == "E305"


def test_speed_in_bytes_is_that_of_the_bytes_that_move(tmp_path):
    slow, fast = (
        planned(tmp_path, costs={"f": 1.0, "b": 1.0, "w": 1.0}, hardware={"host_gbps": gbps}).costs
        for gbps in (1.0, 2.0)
    )
    sizes = [size.bytes for size in slow.size["host"]]
    assert all(0 < size <= kept.bytes for size, kept in zip(sizes, slow.size["kept"], strict=True))
    assert slow.column("out") == pytest.approx([size / 1e6 for size in sizes])
    assert fast.column("back") == pytest.approx([size / 2e6 for size in sizes])


def test_the_lane_of_copies_is_drawn(tmp_path, zbc):
    planned(tmp_path).write(Path("plan"))
    shown = zbc("visualize", "plan").out
    assert "O copy to the host" in shown and "L copy back" in shown
    zbc("visualize", "plan", "-o", "plan.svg")
    assert "OFFLOAD s0 m0" in Path("plan.svg").read_text()
