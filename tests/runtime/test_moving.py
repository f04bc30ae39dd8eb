"""A moving average of the weights: evaluated and saved, for any partition of weights; the training is unchanged."""

import pytest
from torch import nn
from torch.testing import assert_close

from tests.composed import planned, settings, written
from tests.processes.plans import run_here
from tests.processes.test_save_hf import all_tensors
from tests.runtime.small_plans import make_worker
from tests.runtime.test_checkpoints import at, tensors
from tests.threads import losses_of, run_threads
from tests.tiers import few
from zbc.job.spec import Model
from zbc.training.models import pretrained

pytestmark = pytest.mark.long

DECAY = 0.5


def tables(*traits, ema=DECAY, **more):
    given = {"train__steps": 4, "train__eval_every": 2, "train__eval_batches": 1, "data__validation": 0.2}
    given |= {"parallel__pp": 2, "model__layers": 4, **({} if ema is None else {"optimizer__ema": ema})}
    return settings(*traits, **given | more)


def ran(asked, **options):
    workers = run_threads(planned(asked), asked["train"]["steps"], **options)
    return losses_of(workers), [one.loss for one in workers[0].evaluation.results], workers


def test_a_training_stays_what_it_is_and_evaluations_use_the_average(tmp_path):
    """By hand: the weights of an evaluation are those of a run that loads the average."""
    checkpoint = {"checkpoint__every": 2, "checkpoint__keep": 9}
    losses, found, _ = ran(tables(**checkpoint), folder=tmp_path / "a")
    plain, own, _ = ran(tables(ema=None, **checkpoint), folder=tmp_path / "b")
    assert losses == plain
    assert all(abs(a - b) > 1e-5 for a, b in zip(found, own, strict=True))
    kept, before = tensors(at(tmp_path / "a", 2)), tensors(at(tmp_path / "b", 2))
    names = [name.removeprefix("model.") for name in kept if name.startswith("model.")]
    assert all(kept[f"model.{name}"].equal(before[f"model.{name}"]) for name in names)
    one = tables(ema=None, **{**checkpoint, "checkpoint__every": 1})
    ran(one, folder=tmp_path / "c")
    mean = None  # the average of the weights before the first step and after each
    start = make_worker(planned({**one, "parallel": {"pp": 1}}))
    begun = {name: p.detach().clone() for name, p in start.stages[0].parameters.items()}
    for name in names:
        mean = begun[name]
        for step in (1, 2):
            mean = mean.lerp(tensors(at(tmp_path / "c", step))[f"model.{name}"], 1 - DECAY)
        assert_close(kept[f"optim.{name}.ema"], mean, rtol=1e-6, atol=1e-7)


LOW = {"model__dtype": "bfloat16"}
MASTERS = {**LOW, "model__parameters": "bfloat16"}


@pytest.mark.parametrize(("trait", "more"), [("", LOW), ("", MASTERS), ("two versions", {})], ids=str)
def test_the_average_of_masters_is_evaluated_and_both_versions_come_back(trait, more):
    traits = [*filter(None, (trait,)), "sharded optimizer"]
    (losses, found, _), (plain, own, _) = (ran(tables(*traits, **how, **more)) for how in ({}, {"ema": None}))
    assert losses == plain
    assert found != own


@pytest.mark.parametrize("clip", [{}, {"optimizer__clip_grad_norm": 0.01}], ids=["stands", "made again"])
@pytest.mark.parametrize("traits", few([[], ["sharded optimizer"]], 1), ids=str)
def test_steps_that_are_final_later_move_it_once_each(traits, clip):
    """For steps that are accepted, and for steps that are made again."""
    found = ran(tables("post-validate", *traits, **clip))[:2]
    assert found == ran(tables(*traits, **clip))[:2]
    assert found[1] != ran(tables("post-validate", *traits, ema=None, **clip))[1]


SAVED = [["shared vocabulary"], ["sharded all"], ["tp"]]


@pytest.mark.parametrize("traits", few(SAVED, [SAVED[0]]), ids=" x ".join)
@pytest.mark.parametrize("raw", few([False, True], [False]))
def test_saved_folders_have_the_averages_or_the_weights_if_asked(tmp_path, traits, raw):
    """The checkpoint of the last step has both."""
    asked = tables(*traits, checkpoint__every=2)
    asked["train"]["steps"] = 2
    written(asked, tmp_path)
    folder, ranks = tmp_path / "hf", 2 * asked["parallel"].get("dp", 1) * asked["parallel"].get("tp", 1)
    lines = run_here(tmp_path / "plan", ranks, tmp_path / "run", threads=True, save_hf=folder, save_raw=raw)
    assert lines[-1] == f"wrote the {'' if raw else 'averages of the '}weights to {folder}"
    kept, model = tensors(at(tmp_path / "run" / "checkpoints", 2)), Model.model_validate(asked["model"])
    names = [name.removeprefix("model.") for name in kept if name.startswith("model.")]
    wanted = {name: nn.Parameter(kept[f"model.{name}" if raw else f"optim.{name}.ema"]) for name in names}
    assert_close(all_tensors(folder), pretrained.tensors_of(model, wanted), rtol=0, atol=0)
