"""A feature of the runtime is one file: an average of the weights, added to a copy of zbc."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

import zbc
from tests.jobs import write_job
from tests.limits import ended

FEATURE = '''
"""A moving average of the weights, which evaluations use."""

from zbc.ir import Kind
from zbc.runtime.core.feature import Feature


class Moving(Feature):
    def __init__(self, stages):
        self.kept = {
            s: {name: p.detach().clone() for name, p in stage.parameters.items()} for s, stage in stages.items()
        }

    def completes(self, worker, run):
        def around(step, worker, op):
            step(worker, op)
            for name, p in worker.stages[op.stage].parameters.items():
                self.kept[op.stage][name].lerp_(p.detach(), 0.25)

        run.wrap([Kind.STEP], around)

    def pauses(self, worker, pause):
        if pause.means:
            self.resumes(worker)

    def resumes(self, worker):
        for s, stage in worker.stages.items():
            for name, p in stage.parameters.items():
                own = p.detach().clone()
                p.data.copy_(self.kept[s][name])
                self.kept[s][name].copy_(own)


def build(context):
    return Moving(context.stages)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """This zbc and a copy of it, each with a plan of the same job."""
    folder = tmp_path_factory.mktemp("feature")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(zbc.__file__).parent, folder / "more" / "zbc", ignore=ignored)
    (folder / "more/zbc/runtime/features/trailing.py").write_text(FEATURE)
    train = {"steps": 4, "eval_every": 2, "eval_batches": 2}
    more = {"data": {"validation": 0.3}, "optimizer": {"lr": 1e-2}, "checkpoint": {"every": 2}}
    write_job(folder, model={"layers": 2, "ties": False}, pp=2, m=2, kind="zb-h1", train=train, **more)
    run(folder, Path(zbc.__file__).parent.parent, "plan", "zbc.toml", "-o", "plan")
    return folder


def run(folder: Path, path: Path, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(path), "NO_COLOR": "1"}
    done = ended(sys.executable, "-m", "zbc", *arguments, seconds=120, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def rows(folder: Path, name: str, key: str) -> list[float]:
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [row[key] for row in map(json.loads, lines) if row.get(key) is not None]


@pytest.mark.long
def test_a_feature_with_state_is_one_file_and_trains_evaluates_saves_and_resumes(folder):
    here, more = Path(zbc.__file__).parent.parent, folder / "more"
    for path, name in ((here, "plain"), (more, "whole")):
        run(folder, path, "run", "plan", "--local", "2", "--threads", "-o", name)
    run(folder, more, "run", "plan", "--local", "2", "--threads", "-o", "half", "--steps", "2")
    run(folder, more, "run", "plan", "--local", "2", "--threads", "-o", "rest", "--resume", "half")
    assert rows(folder, "whole", "loss") == rows(folder, "plain", "loss")
    evaluated = rows(folder, "whole", "eval_loss")
    assert len(evaluated) == 2 and evaluated != rows(folder, "plain", "eval_loss")
    assert rows(folder, "rest", "eval_loss") == evaluated[1:]
