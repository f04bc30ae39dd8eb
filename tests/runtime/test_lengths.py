"""Runs of plans with microbatches of unequal length: they have these lengths, and train what one process does."""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.composed import TOLERANCE, planned, settings
from tests.jobs import job
from tests.refusals import refused
from tests.runtime import one_by_one
from tests.runtime.one_by_one import SGD, Texts
from tests.runtime.small_plans import GPT, LLAMA, make_plan, make_program, reference
from tests.runtime.test_given_steps import check, plan_of
from tests.runtime.test_gradients import without_step
from tests.runtime.zoo import layer_of
from tests.threads import losses_of, norms_of, run_threads
from tests.tiers import few
from zbc.errors import ZbcError
from zbc.plan.balancing import Shape, deal_by_tokens
from zbc.plan.directory import StoredPlan
from zbc.runtime.core.stage import Stage
from zbc.runtime.seeding import seed_of
from zbc.training.building.context import Settings
from zbc.training.data.data import Permutation, build_dataset
from zbc.training.data.unequal import Fixed, RandomDocuments

TOKENS = [32, 4, 16, 2, 32, 8, 24, 4]
CASES = [(kind, ()) for kind in ("1f1b", "zb-auto", "chimera-zb", "zb-v")]
CASES += [("1f1b", (trait,)) for trait in ("shared vocabulary", "two versions", "average", "fused gradients")]
CASES += [("zb-h1", (trait,)) for trait in ("post-validate", "tp_sequence", "freeze", "cp")]
CASES += [("interleaved-1f1b", ("sharded weights",)), ("zb-v", ("offload",)), ("dualpipe-v", ("overlap",))]


def cut(batches, lengths):
    """Microbatches cut to their lengths, in one process."""

    def of(read):
        return lambda step, mb: read(step, mb)[:, : lengths[mb % len(lengths)]]

    return SimpleNamespace(inputs=of(batches.inputs), targets=of(batches.targets))


@pytest.fixture
def seen(monkeypatch):
    """The tokens of the rows that stages run, by microbatch."""
    found = defaultdict(set)
    inner = Stage.forward

    def forward(self, x, step, mb, *rest):
        found[step, mb].add(x.shape[1])
        return inner(self, x, step, mb, *rest)

    monkeypatch.setattr(Stage, "forward", forward)
    return found


@pytest.mark.long
@pytest.mark.parametrize(("kind", "traits"), few(CASES, 4))
def test_microbatches_have_their_lengths_and_train_what_one_process_does(kind, traits, seen):
    tables = settings(*traits)
    tables["schedule"] |= {"kind": kind, "tokens": TOKENS[: tables["schedule"]["microbatches"]]}
    plan = planned(tables)
    seen.clear()  # of the layers' cards
    count, workers = plan.manifest.microbatches, run_threads(plan, 3)
    lengths = [workers[0].work.share(0, mb).length.tokens for mb in range(count)]
    wanted = reference(plan, 3, read=lambda batches: cut(batches, lengths), delayed=traits == ("two versions",))
    assert sorted(plan.manifest.tokens) == sorted(tables["schedule"]["tokens"])
    unit = 4 if traits == ("cp",) else 2 if traits == ("tp_sequence",) else 1
    assert lengths == [-(-tokens // unit) * unit for tokens in plan.manifest.tokens]
    if traits not in (("average",), ("freeze",)):  # which train something else
        assert losses_of(workers) == pytest.approx(wanted.losses, rel=TOLERANCE)
        assert norms_of(workers) == pytest.approx(wanted.norms, rel=TOLERANCE)
    parts = min(2, unit)
    assert {mb for _, mb in seen} == set(range(count * plan.manifest.copies))
    for (_, mb), sizes in seen.items():
        assert sizes <= {lengths[mb % count], lengths[mb % count] // parts}


@pytest.mark.long("traits0")
@pytest.mark.parametrize("traits", [("shared vocabulary",), ()])
def test_evaluations_have_whole_rows(traits):
    found = []
    for tokens in (TOKENS, None):
        tables = settings(*traits)
        tables["train"] |= {"eval_every": 1, "eval_batches": 1}
        tables["data"]["validation"], tables["optimizer"]["lr"] = 0.01, 0.0
        tables["schedule"] |= {} if tokens is None else {"tokens": tokens}
        (_, *_, last) = run_threads(planned(tables), 1)
        found.append(last.evaluation.results[0].loss)
    assert found[0] == found[1]


# ---- samples dealt by their length ----------------------------------------------------------------------------------

DEALT = {"kind": "synthetic", "balance": "tokens"}
TEXTS = {"kind": one_by_one.TEXTS, "args": {"count": 60}, "balance": "tokens"}
SLOTS = [5, 16, 2, 9]


def dealt(schedule="1f1b", copies=1, *, model=GPT, data=DEALT, tokens=SLOTS, sync="before-step", **options):
    tp, cp, still = (options.pop(key, default) for key, default in (("tp", 1), ("cp", 1), ("still", False)))
    program = make_program(schedule, 2, len(tokens), copies=copies, sync=sync, cp=cp)
    optimizer = {**SGD, "sync": sync, "lr": 0.0 if still else SGD["lr"]}
    if sync == "two-versions":
        del optimizer["clip_grad_norm"]
    plan = make_plan(program, model=model, data=data, optimizer=optimizer, tokens=tokens, **options)
    manifest = plan.manifest
    planning = {**manifest.planning, "parallel": {"tp_sequence": tp > 1}}
    return StoredPlan(manifest.model_copy(update={"tp": tp, "planning": planning}), plan.program)


def alone(plan, steps, documents=None):
    """Losses, norms and weights of one process that runs the samples of a step one by one."""
    settings, size = Settings.of(plan.manifest), plan.manifest.topology.batch * plan.manifest.microbatch_size
    seed = settings.train.seed
    documents = documents or RandomDocuments(settings.model.vocab, settings.model.seq_len, seed)
    numbers = partial(samples_of, size=size, count=len(documents), seed=seed)
    return one_by_one.train(plan, steps, lambda step: [documents.pair(number) for number in numbers(step)])


def samples_of(step, size, count, seed):
    for position in range(step * size, step * size + size):
        epoch, place = divmod(position, count)
        yield epoch * count + Permutation(count, seed_of(seed, "epoch", epoch))[place]


WAYS = [
    ("1f1b", {}),
    ("zb-h1", {"copies": 2, "model": LLAMA}),
    ("zb-h1", {"data": TEXTS, "activations": "recompute"}),
    ("chimera", {"model": {**GPT, "variant": "rotary"}}),
    ("1f1b", {"sync": "post-validate", "size": 3}),
    ("zb-v", {"tp": 2, "model": LLAMA}),
    ("1f1b", {"sync": "two-versions"}),
    ("zb-h1", {"cp": 2, "model": LLAMA}),
    ("1f1b", {"cp": 2, "tp": 2, "model": LLAMA}),
]


@pytest.mark.long("zb-h1-options1")
@pytest.mark.parametrize(("schedule", "options"), few(WAYS, 2))
def test_the_longest_samples_of_a_step_are_in_its_longest_microbatches_and_train_as_one_by_one(schedule, options, seen):
    plan, steps = dealt(schedule, **options), 4
    workers = run_threads(plan, steps)
    losses, norms, weights = alone(plan, steps, Texts(60) if options.get("data") is TEXTS else None)
    assert losses_of(workers) == pytest.approx(losses, abs=1e-6)
    assert norms_of(workers) == pytest.approx(norms, rel=1e-5)
    for stage in (stage for worker in workers for stage in worker.stages.values()):
        for name, p in stage.parameters.items() if plan.manifest.tp == 1 else ():
            torch.testing.assert_close(p.detach(), weights[name], rtol=0, atol=1e-6, msg=name)
    work, by_length, unit = workers[0].work, sorted(range(4), key=lambda mb: SLOTS[mb]), plan.manifest.unit
    parts = {1, plan.manifest.tp, plan.manifest.cp, plan.manifest.tp * plan.manifest.cp}
    for step in range(steps):
        for first in range(0, plan.manifest.topology.batch, 4):
            ran = [work.share(step, first + mb).length.tokens for mb in range(4)]
            assert [ran[mb] for mb in by_length] == sorted(ran)
            assert all(seen[step, first + mb] <= {ran[mb] // part for part in parts} for mb in range(4))
            held = [max(map(sum, work.share(step, first + mb).samples)) for mb in range(4)]
            assert all(0 <= tokens - longest < unit for tokens, longest in zip(ran, held, strict=True))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_kept_samples_are_evaluated_in_whole_rows_and_their_padding_does_not_count(schedule):
    data = {**TEXTS, "args": {"count": 64}, "validation": 0.25}
    plan = dealt(schedule, data=data, train={"eval_every": 1}, still=True)
    (*_, last), texts = run_threads(plan, 1), Texts(64)
    wanted = one_by_one.mean_over_tokens(plan, [texts[i] for i in range(48, 64)])
    assert [one.loss for one in last.evaluation.results] == pytest.approx([wanted], rel=1e-6)
    assert last.evaluation.results[0].samples == 16


def test_replicas_take_turns_with_the_longer_samples():
    shape = Shape(replicas=2, room=16, rows=2, most=3)
    dealt_to = deal_by_tokens([*range(1, 13)], shape, [5, 16, 9])
    assert dealt_to == [[((3,), (2,)), ((11,), (10,)), ((5,), (4,))], [((1,), (0,)), ((9,), (8,)), ((7,), (6,))]]


def test_tokens_and_means_of_a_step_are_those_of_its_own_microbatches():
    fixed = run_threads(dealt(data={"kind": "synthetic"}, copies=2, size=3), 1)[0].work
    assert fixed.tokens(0) == 2 * 3 * sum(SLOTS) and fixed.share(5, 6).length.tokens == 2
    work = run_threads(dealt(data=TEXTS), 1)[0].work
    assert work.tokens(0) == sum(Texts(60).lengths[i] for i in samples_of(0, 8, 60, 7))
    work = Fixed([5, 15, 2, 6], 16, rows=1, every=2)
    assert [work.share(0, mb).weight for mb in range(8)] == [0.5, 1.5, 0.5, 1.5] * 2


def test_too_few_samples_for_the_rows_of_a_step_are_refused():
    with refused("E504", match=r"60 samples, one step needs 64 \(8 microbatches of 8\)"):
        run_threads(dealt(data=TEXTS, copies=2, size=8), 1)


# ---- layers of users ------------------------------------------------------------------------------------------------


def user(family, **more):
    return {"family": f"{__name__}:{family}", "layers": 4, "seq_len": 16, "loss": "cross_entropy", **more}


def between(*inner):
    """A factory of layers between one of words and one of their logits."""
    return lambda: [nn.Embedding(61, 8), *(make() for make in inner), nn.Linear(8, 61)]


NOTHING = {"none": lambda: None}
Transposed = layer_of(lambda m, x: x.transpose(0, 1).contiguous(), **NOTHING)
Pair = layer_of(lambda m, x, y=None: (x, x) if y is None else x + y, **NOTHING)
per_token, by_time = between(partial(nn.Linear, 8, 8), nn.GELU), between(Transposed, Transposed)
mixing = between(layer_of(lambda m, x: x + x.mean(1, keepdim=True), **NOTHING), nn.GELU)
pairs = between(Pair, Pair)


def test_layers_of_a_user_run_on_rows_of_any_length(seen):
    plan = dealt(model=user("per_token"), data=TEXTS)
    losses, _, _ = alone(plan, 2, Texts(60))
    assert losses_of(run_threads(plan, 2)) == pytest.approx(losses, abs=1e-6)
    assert len({size for sizes in seen.values() for size in sizes}) > 3


@pytest.mark.parametrize(
    ("family", "code", "said"),
    [
        ("by_time", "E512", r"stage 1 is float32 \[16, 2, 8\] for 16 tokens, and float32 \[2, 2, 8\] for 2"),
        ("mixing", "E512", "in layer layers.1 tokens see what stands behind them"),
        ("pairs", "E110", r"several tensors between them, as at layers\.1, do not go together yet"),
    ],
)
def test_layers_that_cannot_are_refused_by_name(family, code, said):
    with refused(code, match=said):
        run_threads(dealt(model=user(family), data=TEXTS), 1)


# ---- steps that a dataset splits ------------------------------------------------------------------------------------


def split_plan(tokens, dp=1):
    how = {"section": {**GPT, "seq_len": 12, "vocab": 61}, "kind": "Sentences", "tokens": tokens, "keep": without_step}
    return plan_of(m=len(tokens), dp=dp, **how)


@pytest.mark.parametrize("dp", [1, 2])
def test_longer_microbatches_of_a_step_are_put_in_longer_places(dp, seen):
    tokens = (12, 8, 11, 12, 10)
    plan = split_plan(tokens, dp)
    settings = Settings.of(plan.manifest)
    item = build_dataset(settings.data, settings.model, 7)[Permutation(5, seed_of(7, "epoch", 0))[0]]
    assert len({x.shape[1] for x, _, _ in item}) > 3
    check(plan)
    assert {mb: sizes for (_, mb), sizes in seen.items()} == {mb: {tokens[mb % 5]} for mb in range(5 * dp)}


def test_a_step_without_room_for_its_longest_is_refused_with_the_tokens_that_have_it():
    tokens, asked = (12, 4, 4, 4, 4), 0
    while True:
        try:
            run_threads(split_plan(tokens), 5)
            break
        except ZbcError as error:
            assert "longer microbatches than schedule.tokens" in error.message and asked < 5
            asked, fits = asked + 1, error.hint.partition("[")[2].partition("]")[0].split(",")
            tokens = tuple(map(int, fits))
    assert 0 < asked < 5 and max(tokens) == 12 and min(tokens) < 10


def test_equal_tokens_stay_where_samples_are_dealt_by_them():
    made = job(data={"kind": "synthetic", "balance": "tokens"}, schedule={"tokens": [16] * 8}, model={"seq_len": 16})
    assert made.schedule.tokens == [16] * 8 and made.tokens == ()
