"""A loss is one mean over all targets of a step that count, for any distribution to microbatches and replicas."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime import one_by_one
from tests.runtime.padded_data import LENGTH, WORDS, Padded, own, silent, total, zeros
from tests.runtime.small_plans import GPT, descend, make_plan, make_program, make_worker, parameters
from tests.runtime.woven import shared_program
from tests.threads import losses_of, run_threads
from tests.tiers import few
from zbc.errors import ZbcError
from zbc.training.data.counted import no_mean
from zbc.training.models import model

HERE = "tests.runtime.padded_data"
LOSSES = {"cross_entropy": (model.cross_entropy, -100), f"{HERE}:own": (own, -100), f"{HERE}:zeros": (zeros, 0)}
OUT = torch.randn((4, LENGTH, WORDS), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
WAYS = [("1f1b", 4, 1, "before-step"), ("zb-v", 2, 2, "before-step"), ("dualpipe", 2, 1, "before-step"),
        ("zb-h1", 2, 2, "post-validate"), ("1f1b", 1, 2, "before-step"), ("1f1b", 2, 2, "two-versions")]  # fmt: skip


def plan_of(counts, way=WAYS[0], loss="cross_entropy", *, slices=1, m=4, kept=0.0, **options):
    schedule, p, copies, sync = way
    chosen = {"family": f"{HERE}:layers", "layers": 4, "loss": loss}
    program = make_program(schedule, p, m, copies=copies, slices=slices, sync=sync)
    optimizer = {"kind": "sgd", "lr": 0.3, "sync": sync, "weight_decay": 0.0}
    args = {"counts": counts, "ignored": LOSSES.get(loss, (None, -100))[1]}
    data = {"kind": f"{HERE}:Padded", "args": args, **({"validation": kept} if kept else {})}
    size = int(len(counts) * (1 - kept)) // (m * copies)
    return make_plan(program, model=chosen, data=data, size=size, optimizer=optimizer, **options)


def one_process(plan, loss, steps):
    """All samples in one batch: every step has all of them, so their order does not matter."""
    args = plan.manifest.training["data"]["args"]
    data, made = Padded(**args), one_by_one.built(plan)
    weights = {f"{name}.{local}": p for name, layer in made.items() for local, p in layer.named_parameters()}

    def told():
        x = data.x
        for layer in made.values():
            x = layer(x)
        return (LOSSES[loss][0](x, data.y) if sum(args["counts"]) else 0.0 * x.sum(),)

    found = descend(weights, steps, told, delayed=plan.manifest.flushless)
    return [value for (value,) in found], weights


def check(plan, loss="cross_entropy", steps=2):
    workers = run_threads(plan, steps)
    losses, weights = one_process(plan, loss, steps)
    assert losses_of(workers) == pytest.approx(losses, rel=1e-12, abs=1e-15)
    found = parameters(workers)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name].detach(), weight.detach(), rtol=1e-12, atol=1e-14, msg=name)


COUNTS = st.lists(st.one_of(st.just(0), st.integers(0, LENGTH)), min_size=8, max_size=8)


@pytest.mark.parametrize("examples", few([10, 300], (10,)))
def test_drawn_padding_trains_as_one_batch_in_one_process(examples):
    @settings(max_examples=examples, deadline=None)
    @given(COUNTS, st.sampled_from(WAYS), st.sampled_from(sorted(LOSSES)))
    def run(counts, way, loss):
        check(plan_of(counts, way, loss), loss)

    run()


@pytest.mark.parametrize("loss", ["cross_entropy", f"{HERE}:own"])
def test_targets_that_do_not_count_weigh_nothing_in_slices(loss):
    check(plan_of([1, 0, 4, 2, 0, 0, 3, 0], ("1f1b", 2, 1, "before-step"), loss, slices=2, rows=(0, 2, 4)), loss)


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("loss", ["cross_entropy", f"{HERE}:own"])
def test_evaluation_is_one_mean_over_all_that_count(loss, slices):
    counts = [1, 0, 4, 2, 0, 0, 3, 0] * 2
    rows = (0, 2, 4) if slices == 2 else ()
    how = {"slices": slices, "rows": rows, "kept": 0.5, "train": {"eval_every": 1}}
    workers = run_threads(plan_of(counts, ("1f1b", 2, 1, "before-step"), loss, **how), 1)
    found = workers[0].evaluation.results[0]
    x = Padded(counts).x[8:]
    for index in range(4):
        x = workers[index // 2].stages[index // 2].layers[index % 2].module(x)
    assert found.samples == 8
    assert found.loss == pytest.approx(model.cross_entropy(x, Padded(counts).y[8:]).item(), rel=1e-12)


@pytest.mark.parametrize(("sums", "slices"), [(1, 1), (2, 1), (2, 2)])
def test_ranks_that_share_the_vocabulary_count_alike(sums, slices):
    """Four microbatches of two samples; the reference is one batch of all."""
    chosen = {**GPT, "vocab": WORDS, "seq_len": LENGTH, "layers": 2}
    data = {"kind": f"{HERE}:Padded", "args": {"counts": [1, 0, 4, 2, 0, 0, 3, 0]}}
    program = shared_program("zb-h1", 2, 4, sums, slices=slices)
    how, rows = {"model": chosen, "data": data, "optimizer": {"kind": "sgd"}}, (0, 2, 4) if slices == 2 else ()
    found = run_threads(make_plan(program, rows=rows, **how, size=2), 1)[0].results[0]
    whole = run_threads(make_plan(make_program("1f1b", 1, 1), **how, size=8), 1)[0].results[0]
    assert (found.loss, found.grad_norm) == pytest.approx((whole.loss, whole.grad_norm), rel=1e-6)


def test_a_loss_that_is_no_mean_is_told_of():
    targets = torch.stack([Padded([4, 1, 0, 2], 0)[i][1] for i in range(4)])
    assert no_mean("own", own, OUT, torch.full((4, LENGTH), 3)) is None
    assert no_mean("zeros", zeros, OUT, targets) is None
    assert "schedule.microbatches" in no_mean("total", total, OUT, targets)
    assert "attribute count" in no_mean("silent", silent, OUT, targets), "it does not say that zeros do not count"


@pytest.mark.parametrize("what", ["tensor", "tuple", "list", "dict", "nested", "registered"])
def test_it_is_told_of_whatever_the_last_layer_returns(what):
    for loss, told in (("mean_of", 0), ("sum_of", 1)):
        model = {"family": f"{HERE}:several", "layers": 2, "loss": f"{HERE}:{loss}", "args": {"what": what}}
        data = {"kind": f"{HERE}:Padded", "args": {"counts": [4] * 8}}
        plan = make_plan(make_program("1f1b", 2, 2), model=model, data=data, size=2)
        assert [len(make_worker(plan, rank).warnings) for rank in (0, 1)] == [0, told]
        assert losses_of(run_threads(plan, 1))


def test_each_rank_keeps_the_targets_of_its_own_replica_and_no_longer_than_they_wait():
    source = make_worker(plan_of([1, 2, 3, 4] * 2, ("1f1b", 2, 2, "before-step")), 1).batches
    assert source.weight(0, 7) == pytest.approx(8 * {0: 1, 1: 2, 2: 3, 3: 4}[int(source.numbers(0, 7)[0]) % 4] / 20)
    assert sorted(source._kept[0]) == [0, 1, 2, 3]
    for step in range(6):
        for mb in range(3):
            source.targets(step, mb)
    assert sum(map(len, source._kept.values())) <= 3 + 1 and source.weights.of.cache_info().currsize <= 3


@pytest.mark.parametrize("number", [-1.0, float("nan")])
def test_a_count_that_is_none_is_refused(number, monkeypatch):
    monkeypatch.setattr(zeros, "count", lambda target: number)
    with pytest.raises(ZbcError, match=r"E513.*zeros.count gave"):
        run_threads(plan_of([1] * 8, loss=f"{HERE}:zeros"), 1)


@pytest.mark.parametrize(("output", "target"), [((2, 5, 5, 5), (2, 5, 5)), ((2, 3, 5, 5), (2, 5, 5)), ((2, 5), (2, 1))])
def test_cross_entropy_does_not_guess_which_dimension_has_the_classes(output, target):
    with pytest.raises(ZbcError, match="E505"):
        model.cross_entropy(torch.zeros(output), torch.zeros(target, dtype=torch.int64))
