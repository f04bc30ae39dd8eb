"""plans/convnet.toml as a user would run it: planned from the file, trained on four ranks, and it learns."""

from pathlib import Path

import pytest
import torch

from plans.convnet import Quadrants, layers
from tests.threads import losses_of, run_threads
from zbc.compiler.compile import compile_job
from zbc.compiler.shapes import load_job
from zbc.plan.directory import StoredPlan

JOB = Path(__file__).parents[2] / "plans" / "convnet.toml"


@pytest.mark.repeats
def test_the_example_learns_to_find_the_bright_quarter(tmp_path, monkeypatch):
    monkeypatch.chdir(JOB.parents[1])
    compile_job(load_job(JOB)).write(tmp_path / "plan")
    workers = run_threads(StoredPlan.read(tmp_path / "plan"), 20)
    losses = losses_of(workers)
    assert len(workers) == 4 and losses[0] > 1.0 and sum(losses[-5:]) / 5 < 0.4


def test_the_dataset_has_a_class_per_quarter_and_the_same_images_every_time():
    data = Quadrants(count=8, size=16, contrast=100.0)
    for index in range(len(data)):
        image, label = data[index]
        assert torch.equal(image, data[index][0])
        quarters = [image[:, r : r + 8, c : c + 8].mean() for r in (0, 8) for c in (0, 8)]
        assert int(torch.stack(quarters).argmax()) == label


def test_the_factory_returns_a_layer_per_block_and_two_for_the_ends():
    net = torch.nn.Sequential(*(make() for make in layers(channels=8, blocks=3, classes=5)))
    assert len(net) == 5 and net(torch.zeros(2, 1, 16, 16)).shape == (2, 5)
