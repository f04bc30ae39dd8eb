"""A moving average of the weights: evaluated and saved, for any partition of weights; the training is unchanged."""

import pytest
from torch import nn
from torch.testing import assert_close

from tests.composed import settings
from tests.processes.plans import run_here
from tests.processes.test_save_hf import all_tensors
from tests.runtime.test_checkpoints import at, tensors
from tests.runtime.test_flushless_with import planned
from tests.threads import losses_of, run_threads
from tests.tiers import few
from zbc.job.spec import Model
from zbc.training.models import pretrained

DECAY = 0.5


def tables(*traits, ema=DECAY, **more):
    given = {"train__steps": 4, "train__eval_every": 2, "train__eval_batches": 1, "data__validation": 0.2}
    given |= {"parallel__pp": 2, "model__layers": 4, **({} if ema is None else {"optimizer__ema": ema})}
    return settings(*traits, **given | more)


def ran(place, asked, **options):
    place.mkdir(exist_ok=True)
    workers = run_threads(planned(place, asked), asked["train"]["steps"], **options)
    return losses_of(workers), [one.loss for one in workers[0].evaluation.results], workers


def test_a_training_stays_what_it_is_and_evaluations_use_the_average(tmp_path):
    """By hand: the weights of an evaluation are those of a run that loads the average."""
    checkpoint = {"checkpoint__every": 2, "checkpoint__keep": 9}
    losses, found, _ = ran(tmp_path / "mean", tables(**checkpoint), folder=tmp_path / "a")
    plain, own, _ = ran(tmp_path / "plain", tables(ema=None, **checkpoint), folder=tmp_path / "b")
    assert losses == plain
    assert all(abs(a - b) > 1e-5 for a, b in zip(found, own, strict=True))
    kept, before = tensors(at(tmp_path / "a", 2)), tensors(at(tmp_path / "b", 2))
    names = [name.removeprefix("model.") for name in kept if name.startswith("model.")]
    assert all(kept[f"model.{name}"].equal(before[f"model.{name}"]) for name in names)
    one = tables(ema=None, **{**checkpoint, "checkpoint__every": 1})
    ran(tmp_path / "each", one, folder=tmp_path / "c")
    mean = None  # the average of the weights before the first step and after each
    from tests.runtime.small_plans import make_worker

    start = make_worker(planned(tmp_path / "each", {**one, "parallel": {"pp": 1}}))
    begun = {name: p.detach().clone() for name, p in start.stages[0].parameters.items()}
    for name in names:
        mean = begun[name]
        for step in (1, 2):
            mean = mean.lerp(tensors(at(tmp_path / "c", step))[f"model.{name}"], 1 - DECAY)
        assert_close(kept[f"optim.{name}.ema"], mean, rtol=1e-6, atol=1e-7)


CUT = [["tp"], ["slices"], ["sharded optimizer"], ["sharded all"], ["shared vocabulary"], ["one-sided"]]
CUT += [["tp", "sharded optimizer"], ["tp", "sharded weights", "slices"]]


@pytest.mark.parametrize("traits", few(CUT, [CUT[-1]]), ids=" x ".join)
def test_however_weights_are_cut_up_evaluations_find_the_same(tmp_path, traits):
    losses, found, _ = ran(tmp_path / "cut", tables(*traits))
    plain, wanted, _ = ran(tmp_path / "plain", tables(schedule__microbatches=8))
    assert losses == pytest.approx(plain, rel=1e-5)
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    "model", few([{"dtype": "bfloat16"}, {"dtype": "bfloat16", "parameters": "bfloat16"}], 1), ids=str
)
def test_in_bfloat16_what_masters_average_is_evaluated(tmp_path, model):
    more = {f"model__{key}": value for key, value in model.items()}
    losses, found, _ = ran(tmp_path / "mean", tables("sharded optimizer", **more))
    plain, own, _ = ran(tmp_path / "plain", tables("sharded optimizer", ema=None, **more))
    assert losses == plain
    assert found != own


def test_without_a_flush_both_versions_come_back_after_an_evaluation(tmp_path):
    losses, found, _ = ran(tmp_path / "mean", tables("two versions", "sharded optimizer"))
    plain, own, _ = ran(tmp_path / "plain", tables("two versions", "sharded optimizer", ema=None))
    assert losses == plain
    assert found != own


@pytest.mark.parametrize("traits", [["tp", "sharded optimizer"], ["two versions", "tp", "sharded optimizer"]], ids=str)
def test_a_run_goes_on_with_the_same_bits(tmp_path, traits):
    asked = tables(*traits, checkpoint__every=2, checkpoint__keep=9)
    losses, found, _ = ran(tmp_path / "one", asked, folder=tmp_path / "a")
    rest, again, _ = ran(tmp_path / "one", asked, folder=tmp_path / "b", resume=at(tmp_path / "a", 2))
    assert (rest, again) == (losses[2:], found[1:])
    kept = tensors(at(tmp_path / "b", 4))
    shapes = {name.removeprefix("model."): value.shape for name, value in kept.items() if name.startswith("model.")}
    means = {name: value for name, value in kept.items() if name.endswith(".ema")}
    assert len(means) == len(shapes)
    assert all(value.shape == shapes[name[len("optim.") : -len(".ema")]] for name, value in means.items())
    same = tensors(at(tmp_path / "a", 4))
    assert all(value.equal(same[name]) for name, value in kept.items())


@pytest.mark.parametrize("clip", [{}, {"optimizer__clip_grad_norm": 0.01}], ids=["stands", "made again"])
@pytest.mark.parametrize("traits", few([[], ["sharded optimizer"]], 1), ids=str)
def test_steps_that_are_final_later_move_it_once_each(tmp_path, traits, clip):
    """For steps that are accepted, and for steps that are made again."""
    found = ran(tmp_path / "ahead", tables("post-validate", *traits, **clip))[:2]
    assert found == ran(tmp_path / "barrier", tables(*traits, **clip))[:2]
    assert found[1] != ran(tmp_path / "plain", tables("post-validate", *traits, ema=None, **clip))[1]


SAVED = [["shared vocabulary"], ["sharded all"], ["tp"]]


@pytest.mark.parametrize("traits", few(SAVED, [SAVED[0]]), ids=" x ".join)
@pytest.mark.parametrize("raw", few([False, True], [False]))
def test_saved_folders_have_the_averages_or_the_weights_if_asked(tmp_path, traits, raw):
    """The checkpoint of the last step has both."""
    asked = tables(*traits, checkpoint__every=2)
    asked["train"]["steps"] = 2
    planned(tmp_path, asked)
    folder, ranks = tmp_path / "hf", 2 * asked["parallel"].get("dp", 1) * asked["parallel"].get("tp", 1)
    lines = run_here(tmp_path / "plan", ranks, tmp_path / "run", threads=True, save_hf=folder, save_raw=raw)
    assert lines[-1] == f"wrote the {'' if raw else 'averages of the '}weights to {folder}"
    kept, model = tensors(at(tmp_path / "run" / "checkpoints", 2)), Model.model_validate(asked["model"])
    names = [name.removeprefix("model.") for name in kept if name.startswith("model.")]
    wanted = {name: nn.Parameter(kept[f"model.{name}" if raw else f"optim.{name}.ema"]) for name in names}
    assert_close(all_tensors(folder), pretrained.tensors_of(model, wanted), rtol=0, atol=0)
