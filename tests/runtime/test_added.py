"""Losses added by layers count once per step, for any microbatches, slices and replicas."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zbc
from tests.runtime.small_plans import descend, make_plan, make_program, make_worker, parameters
from tests.threads import losses_of, run_threads
from tests.tiers import few
from zbc.runtime.seeding import seed_of, seeded
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


def plan_of(way, how="add", places=(0, 2, 3), *, m=4, slices=1, clip=None, model=None, kept=0.0, **options):
    schedule, p, copies, sync = way
    program = make_program(schedule, p, m, copies=copies, slices=slices, sync=sync)
    args = {"how": how, "places": list(places)}
    model = {"family": f"{__name__}:layers", "layers": 4, "loss": "mse", "args": args, **(model or {})}
    optimizer = {"kind": "sgd", "lr": 0.3, "sync": sync, "weight_decay": 0.0, "clip_grad_norm": clip}
    data = {"kind": f"{__name__}:Rows", **({"validation": kept} if kept else {})}
    rows = {"rows": (0, 2, 4), "model": {**model, "seq_len": 4}} if slices == 2 else {"model": model}
    return make_plan(
        program, data=data, size=int(SAMPLES * (1 - kept)) // (m * copies), optimizer=optimizer, **rows, **options
    )


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
    assert losses_of(workers) == pytest.approx([loss for loss, _ in found], rel=1e-12)
    values = [value if told else 0.0 for _, value in found]
    for worker in workers:
        assert [r.added for r in worker.results] == pytest.approx(values, rel=1e-6)
    mine = parameters(workers)
    for name, weight in weights.items():
        torch.testing.assert_close(mine[name].detach(), weight.detach(), rtol=1e-11, atol=1e-13, msg=name)


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
