"""Steps that a dataset has split into microbatches of unequal sizes: gradients are those of one process on them as they
are, without padding, weighed as the dataset says."""

import pytest

from tests.composed import apart, settings, trained, written
from tests.refusals import refused
from tests.runtime.small_plans import GPT, Reference, make_plan, make_program, make_worker
from tests.runtime.test_checkpoints import at, same
from tests.runtime.test_checkpoints import train as run_of
from tests.runtime.test_gradients import check_gradients, user, without_step
from tests.threads import losses_of, run_threads
from tests.tiers import few
from zbc.runtime.core.bundle import call
from zbc.runtime.seeding import seed_of
from zbc.training.building.context import Settings, split_batches, steps_of
from zbc.training.data.data import Permutation, build_dataset
from zbc.training.models import model

HERE = "tests.runtime.given_steps"
VECTORS = user("residual")
TOKENS = {**GPT, "seq_len": 12, "vocab": 61}
SUMMED = {**VECTORS, "loss": f"{HERE}:summed"}
HEADS = user("two_heads", named=True, loss="tests.runtime.user_models:both_errors")


def data_of(kind="Ragged", **args):
    return {"kind": f"{HERE}:{kind}", "items": "steps", "args": args}


def plan_of(schedule="1f1b", p=2, m=4, *, section=VECTORS, kind="Ragged", dp=1, how=None, args=None, **options):
    program = make_program(schedule, p, m, copies=dp, **(how or {}))
    return make_plan(program, model=section, data=data_of(kind, **{"count": m * dp, **(args or {})}), size=3, **options)


def alone(plan, step=0):
    """Loss and gradients of a step in one process, of the dataset's microbatches as they are."""
    settings = Settings.of(plan.manifest)
    seed, dataset = settings.train.seed, build_dataset(settings.data, settings.model, settings.train.seed)
    modules = {one.name: one.build(seed) for one in model.layers(settings.model, seed)}
    loss, modules[[*modules][-1]].chunk = model.loss(settings.model.loss), None
    epoch, place = divmod(step, len(dataset))
    item = dataset[Permutation(len(dataset), seed_of(seed, "epoch", epoch))[place]]
    counts = settings.model.loss == "cross_entropy"
    weights = [one[2] if not counts or (one[1] != -100).any() else 0.0 for one in item]
    total = 0.0
    for (x, target, _), weight in zip(item, weights, strict=True):
        for module in modules.values():
            x = call(module, x)
        if weight:
            value = loss(x, target) * weight / sum(weights)
            value.backward()
            total += value.item()
    return Reference(
        [total], grads={f"{n}.{k}": p.grad for n, one in modules.items() for k, p in one.named_parameters()}
    )


def check(plan):
    check_gradients(plan, tolerance=1e-6, loss=1e-6, expected=alone(plan))


WAYS = [
    ("1f1b", {"section": VECTORS}),
    ("zb-v", {"section": SUMMED, "activations": "recompute"}),
    ("zb-h1", {"section": TOKENS, "kind": "Sentences", "m": 5}),
    ("1f1b", {"section": HEADS}),
    ("1f1b", {"section": {**TOKENS, "loss": f"{HERE}:logits_too"}, "kind": "Sentences", "args": {"count": 4}}),
    ("1f1b", {"section": {**TOKENS, "loss_chunk": 5}, "kind": "Sentences", "m": 5}),
    ("zb-h1", {"section": SUMMED, "dp": 2, "m": 2}),
    ("chimera", {"section": VECTORS}),
]


@pytest.mark.parametrize(("schedule", "options"), few(WAYS, 7))
def test_gradients_are_those_of_one_process_without_padding(schedule, options):
    check(plan_of(schedule, keep=without_step, **options))


def test_steps_of_an_epoch_come_in_another_order_and_a_training_goes_on_with_them(tmp_path):
    every = {"checkpoint": {"every": 3}, "optimizer": {"kind": "sgd", "lr": 0.1}}
    plan = plan_of("zb-h1", **every)
    whole = run_of(plan, 9, tmp_path / "whole")
    begun = run_of(plan, 6, tmp_path / "begun")
    assert begun + run_of(plan, 9, tmp_path / "went", at(tmp_path / "begun", 6)) == whole
    same(at(tmp_path / "went", 9), at(tmp_path / "whole", 9))
    settings = Settings.of(plan.manifest)
    source = split_batches(settings, steps_of(settings, plan.manifest))
    epochs = [[tuple(source.inputs(5 * e + k, 0)[0].tolist()) for k in range(5)] for e in range(2)]
    assert {*epochs[0]} == {*epochs[1]} and epochs[0] != epochs[1] and len({*epochs[0]}) == 5


def test_a_step_that_is_clipped_without_a_barrier_is_that_with_one():
    """Weights of the next step's microbatches are asked for before the verdict on this one."""
    optimizer = {"kind": "sgd", "lr": 0.3, "clip_grad_norm": 0.2}
    barrier = run_threads(plan_of("zb-h1", optimizer=optimizer), 4)
    ahead = {"optimizer": {**optimizer, "sync": "post-validate"}, "how": {"sync": "post-validate"}}
    found = run_threads(plan_of("zb-h1", **ahead), 4)
    assert losses_of(found) == losses_of(barrier) and any(result.redone for result in found[0].results)


def job_of(pp, m, **more):
    """The tables of a job whose steps have m microbatches in each replica."""
    found = settings()
    found["model"] |= {"layers": 4, "vocab": 61, "seq_len": 12}
    found["parallel"] = {"pp": pp, **more.get("parallel", {})}
    found["schedule"] |= {"microbatches": m, "microbatch_size": 3}
    found["optimizer"] |= more.get("optimizer", {})
    return found | {"data": data_of("Sentences", count=m * found["parallel"].get("dp", 1), size=3)}


LATE, MEANS = {"sync": "two-versions"}, {"average": {"every": 1, "share": 1.0}, "dp": 2}
SIDE = [
    (job_of(2, 3, parallel={"tp": 2}), job_of(1, 3)),
    (job_of(2, 3, parallel={"vocabulary": "shared"}), job_of(1, 3)),
    (job_of(2, 3, parallel={"vocabulary": "shared-2"}), job_of(1, 3)),
    (job_of(2, 3, parallel={"cp": 2, "dp": 2}), job_of(1, 6)),
    (job_of(2, 3, parallel={"dp": 2}, optimizer=LATE), job_of(1, 6, optimizer=LATE)),
    (job_of(2, 3, parallel={"cp": 2, **MEANS}), job_of(1, 3, parallel=MEANS)),
]


@pytest.mark.long
@pytest.mark.parametrize(("both", "plain"), few(SIDE, 2))
def test_they_train_as_one_process_where_ranks_share_tokens_or_step_without_a_flush(both, plain):
    assert apart(trained(both), trained(plain)) <= 2e-6


EACH = {"sync": "asynchronous", "every": 2}


@pytest.mark.parametrize(
    ("how", "group"), [({"optimizer": EACH}, [2, 3]), ({"parallel": MEANS}, [4, 5, 6, 7]), ({}, [0, 1, 2, 3])]
)
def test_a_mean_is_over_the_microbatches_that_a_step_of_a_stage_or_replica_has(how, group, tmp_path):
    _, plan = written(job_of(1, 4, **how), tmp_path)
    source = make_worker(plan, int(4 in group)).batches
    given = source._steps.step(*source._order.taken(0, 1))
    weights = [given[number].weight for number in group]
    expected = [weight * len(group) / sum(weights) for weight in weights]
    assert [source.weight(0, number) for number in group] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"args": {"count": 3}}, r"has 3 microbatches, a step of the plan has 4"),
        ({"kind": "NoList"}, r"microbatch 0, is not \(input, target, weight\)"),
        ({"args": {"size": 4}}, r"has inputs and targets of 4 rows"),
        ({"args": {"targets": 1}}, r"has inputs and targets of 1 and [23] rows"),
        ({"args": {"weight": -1.0}}, r"has the weight -1"),
        ({"args": {"weight": "much"}}, r"could not convert string"),
        ({"section": {**TOKENS, "seq_len": 8}, "kind": "Sentences"}, r"has rows of \d+ tokens, model.seq_len is 8"),
    ],
)
def test_what_is_no_step_of_the_plan_is_refused_with_its_place(options, said):
    with refused("E505", match=rf"data: step \d of {HERE}:\w+.* {said}"):
        run_threads(plan_of(**options), 5)


@pytest.mark.parametrize(
    ("family", "said"), [("batch_norms", "mixes the rows of a microbatch"), ("running", "keeps a buffer of all rows")]
)
def test_layers_in_which_padding_would_count_are_refused(family, said):
    section = {"family": f"{HERE}:{family}", "layers": 4, "loss": "mse"}
    with refused("E512", match=f"layer layers.0 {said}, some of which are padding"):
        run_threads(plan_of(section=section), 1)
