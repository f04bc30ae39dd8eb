"""A loss is one mean over all targets of a step that count, whatever shares them out; losses of layers count once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zbc
from tests.runtime import one_by_one
from tests.runtime.padded_data import LENGTH, WORDS, Padded, own, silent, total, zeros
from tests.runtime.small_plans import GPT, Reference, descend, hold, make_plan, make_program, make_worker
from tests.runtime.woven import shared_program
from tests.threads import losses_of, run_threads
from tests.tiers import few
from zbc.errors import ZbcError
from zbc.runtime.seeding import seed_of, seeded
from zbc.training.data.counted import no_mean
from zbc.training.models import model
from zbc.training.probing.checkup import check_up

WIDTH, ROWS, SAMPLES = 6, 4, 16


class Balanced(nn.Module):
    """A linear layer with a loss of its own per microbatch, which keeps outputs small."""

    def __init__(self, how, weight=0.3):
        super().__init__()
        self.linear, self.router, self.how, self.weight = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), how, weight

    def value(self, x):
        return self.weight * self.router(x).softmax(-1).square().mean()

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        if self.how == "none":
            return y
        value = self.value(x)
        if self.how == "add":
            return zbc.add_loss(y, value)
        if self.how == "hook" and y.requires_grad:
            y.register_hook(lambda grad: grad + self.weight)
        if self.how == "inside" and value.requires_grad:
            value.backward(retain_graph=True)
        if self.how in ("hook", "inside"):
            return y
        return _Own.apply(y, value, zbc.loss_scale() if self.how == "scaled" else 1.0)


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, value, scale):
        ctx.scale = scale
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.tensor(ctx.scale, dtype=grad.dtype), None


def layers(how="add", places=(0, 2, 3), count=4):
    return [lambda i=i: Balanced(how if i in places else "none").double() for i in range(count)]


def mixed(hows):
    return [lambda how=how: Balanced(how).double() for how in hows]


class Rows:
    """Sequences of vectors; none repeats."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x = torch.sin(torch.arange(ROWS * WIDTH, dtype=torch.float64) * (1 + 0.1 * index)).view(ROWS, WIDTH)
        return x, torch.cos(x + 0.05 * index)


WAYS = [("1f1b", 4, 1, "before-step"), ("zb-v", 2, 2, "before-step"), ("dualpipe", 2, 1, "before-step"),
        ("zb-h1", 2, 2, "post-validate"), ("1f1b", 1, 2, "before-step"), ("1f1b", 2, 2, "two-versions"),
        ("interleaved-1f1b", 2, 1, "before-step")]  # fmt: skip


def planned(way, model, data, samples, *, m=4, slices=1, clip=None, kept=0.0, **options):
    """A plan whose steps have all samples that are not kept for evaluation."""
    schedule, p, copies, sync = way
    program = make_program(schedule, p, m, copies=copies, slices=slices, sync=sync)
    optimizer = {"kind": "sgd", "lr": 0.3, "weight_decay": 0.0, "clip_grad_norm": clip}
    options |= {"rows": (0, 2, 4)} if slices == 2 else {}
    size, data = int(samples * (1 - kept)) // (m * copies), data | ({"validation": kept} if kept else {})
    return make_plan(program, model=model, data=data, size=size, optimizer=optimizer, **options)


def plan_of(way, how="add", places=(0, 2, 3), *, model=None, **options):
    args = {"how": how, "places": list(places)}
    chosen = {"family": f"{__name__}:layers", "layers": 4, "loss": "mse", "seq_len": 4, "args": args, **(model or {})}
    return planned(way, chosen, {"kind": f"{__name__}:Rows"}, SAMPLES, **options)


def one_process(places, steps, *, delayed=False):
    """All samples in one batch; values of layers are means over it, so no counting is needed."""
    made = {}
    for i, build in enumerate(layers("none", ())):
        with seeded(seed_of(7, f"layers.{i}")):
            made[f"layers.{i}"] = build()
    weights = {f"{name}.{local}": p for name, layer in made.items() for local, p in layer.named_parameters()}
    data = [Rows()[i] for i in range(SAMPLES)]
    xs, targets = torch.stack([x for x, _ in data]), torch.stack([y for _, y in data])

    def told():
        x, added = xs, torch.zeros((), dtype=torch.float64)
        for i, layer in enumerate(made.values()):
            added, x = added + (layer.value(x) if i in places else 0.0), layer(x)
        loss = torch.nn.functional.mse_loss(x, targets)
        return loss, added, loss + added

    return [told[:2] for told in descend(weights, steps, told, delayed=delayed)], weights


def check(plan, places, *, told=True):
    workers = run_threads(plan, 3)
    found, weights = one_process(places, 3, delayed=plan.manifest.flushless)
    values = [value if told else 0.0 for _, value in found]
    for worker in workers:
        assert [r.added for r in worker.results] == pytest.approx(values, rel=1e-6)
    hold(workers, Reference([loss for loss, _ in found], weights=weights), tolerance=1e-11, near=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("examples", few([8, 500], (8,)))
def test_drawn_layers_train_as_one_batch_in_one_process(examples):
    places = st.sets(st.integers(0, 3), min_size=1).map(lambda found: tuple(sorted(found)))

    @settings(max_examples=examples, deadline=None)
    @given(st.sampled_from(WAYS), places, st.sampled_from(["add", "scaled"]), st.sampled_from(["keep", "recompute"]))
    def run(way, places, how, activations):
        check(plan_of(way, how, places, activations=activations), places, told=how == "add")

    run()


@pytest.mark.parametrize("how", ["add", "scaled"])
def test_added_losses_in_slices_are_those_of_one_process(how):
    check(plan_of(("1f1b", 2, 1, "before-step"), how, slices=2), (0, 2, 3), told=how == "add")


def test_forwards_that_run_twice_add_once():
    """With clipping, a step without a barrier is redone."""
    plans = [plan_of(("zb-h1", 2, 1, sync), clip=1e-3) for sync in ("post-validate", "before-step")]
    twice, once = (run_threads(plan, 3) for plan in plans)
    assert any(result.redone for result in twice[0].results)
    values = [[result.added for result in workers[0].results] for workers in (twice, once)]
    assert values[0] == pytest.approx(values[1], rel=1e-9) and values[0][0] > 0


def test_evaluation_adds_nothing():
    worker = run_threads(plan_of(WAYS[0], kept=0.5, train={"eval_every": 1}), 1)[0]
    assert len(worker.evaluation.results) == 1 and worker.results[0].added > 0 and not worker.entries()


@pytest.mark.long
@pytest.mark.parametrize("examples", few([12, 60], (12,)))
def test_layers_that_add_gradients_of_their_own_are_named_before_training(examples):
    """Those which would count once per microbatch, if there are several."""
    hows = st.lists(st.sampled_from(["add", "scaled", "own", "none", "hook", "inside"]), min_size=4, max_size=4)

    @settings(max_examples=examples, deadline=None)
    @given(hows, st.sampled_from([1, 2, 4]))
    def run(hows, m):
        model = {"family": f"{__name__}:mixed", "layers": 4, "loss": "mse", "args": {"hows": hows}}
        plan = make_plan(make_program("1f1b", 2, m), model=model, data={"kind": f"{__name__}:Rows"})
        names = [f"layers.{n}" for n, how in enumerate(hows) if how in ("own", "hook", "inside")]
        first, last = (make_worker(plan, rank).warnings for rank in (0, 1))
        assert not first and len(last) == (m > 1 and bool(names))
        assert all(f"gradients of {', '.join(names)} do not" in text and "zbc.add_loss" in text for text in last)

    run()


def test_doctor_names_the_layers_that_count_once_per_microbatch():
    checked = check_up(plan_of(("zb-h1", 2, 1, "before-step"), "own", (0, 2)))
    assert checked.unscaled == ("layers.0", "layers.2") and checked.fine


def test_outside_of_a_training_they_are_plain_torch():
    x, weight = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    assert zbc.loss_scale() == 1.0
    zbc.add_loss(x, 3.0 * weight).sum().backward()
    assert weight.grad == 3.0 and torch.equal(x.grad, torch.ones(3))
    with torch.no_grad():
        assert torch.equal(zbc.add_loss(x, weight), x)


@pytest.mark.parametrize("value", [torch.ones(2), torch.tensor(1)])
def test_what_is_not_one_number_is_refused(value):
    with pytest.raises(ValueError, match=r"one floating-point number as its value, not (float32 \[2\]|int64 \[\])"):
        zbc.add_loss(torch.ones(3), value)


HERE = "tests.runtime.padded_data"
LOSSES = {"cross_entropy": (model.cross_entropy, -100), f"{HERE}:own": (own, -100), f"{HERE}:zeros": (zeros, 0)}
OUT = torch.randn((4, LENGTH, WORDS), dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def padded(counts, way=WAYS[0], loss="cross_entropy", **options):
    args = {"counts": counts, "ignored": LOSSES.get(loss, (None, -100))[1]}
    chosen = {"family": f"{HERE}:layers", "layers": 4, "loss": loss}
    return planned(way, chosen, {"kind": f"{HERE}:Padded", "args": args}, len(counts), **options)


def whole_batch(plan, loss, steps):
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
    return Reference([value for (value,) in found], weights=weights)


def hold_padded(plan, loss="cross_entropy", steps=2):
    hold(run_threads(plan, steps), whole_batch(plan, loss, steps), tolerance=1e-12, near=1e-12)


COUNTS = st.lists(st.one_of(st.just(0), st.integers(0, LENGTH)), min_size=8, max_size=8)


@pytest.mark.long
@pytest.mark.parametrize("examples", few([10, 300], (10,)))
def test_drawn_padding_trains_as_one_batch_in_one_process(examples):
    @settings(max_examples=examples, deadline=None)
    @given(COUNTS, st.sampled_from(WAYS), st.sampled_from(sorted(LOSSES)))
    def run(counts, way, loss):
        hold_padded(padded(counts, way, loss), loss)

    run()


@pytest.mark.parametrize("loss", ["cross_entropy", f"{HERE}:own"])
def test_targets_that_do_not_count_weigh_nothing_in_slices(loss):
    hold_padded(padded([1, 0, 4, 2, 0, 0, 3, 0], ("1f1b", 2, 1, "before-step"), loss, slices=2), loss)


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("loss", ["cross_entropy", f"{HERE}:own"])
def test_evaluation_is_one_mean_over_all_that_count(loss, slices):
    counts = [1, 0, 4, 2, 0, 0, 3, 0] * 2
    how = {"slices": slices, "kept": 0.5, "train": {"eval_every": 1}}
    workers = run_threads(padded(counts, ("1f1b", 2, 1, "before-step"), loss, **how), 1)
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
    source = make_worker(padded([1, 2, 3, 4] * 2, ("1f1b", 2, 2, "before-step")), 1).batches
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
        run_threads(padded([1] * 8, loss=f"{HERE}:zeros"), 1)


@pytest.mark.parametrize(("output", "target"), [((2, 5, 5, 5), (2, 5, 5)), ((2, 3, 5, 5), (2, 5, 5)), ((2, 5), (2, 1))])
def test_cross_entropy_does_not_guess_which_dimension_has_the_classes(output, target):
    with pytest.raises(ZbcError, match="E505"):
        model.cross_entropy(torch.zeros(output), torch.zeros(target, dtype=torch.int64))
