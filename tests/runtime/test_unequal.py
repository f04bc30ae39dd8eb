"""Replicas with unequal numbers of microbatches train like one process that runs each sample alone."""

from array import array
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional

from tests.refusals import refused
from tests.runtime import one_by_one
from tests.runtime.one_by_one import SGD, TEXTS, Texts, mean_over_tokens
from tests.runtime.small_plans import GPT, LLAMA, make_plan, make_program
from tests.runtime.test_freed_weights import freeing, weights
from tests.threads import run_threads
from tests.tiers import few
from zbc.compiler.check.orders import order_problems
from zbc.compiler.passes.reduce_grads import reduced_as
from zbc.errors import ZbcError
from zbc.plan.balancing import Shape
from zbc.plan.directory import StoredPlan
from zbc.plan.manifest import RampPlan, Unequal
from zbc.training.building.context import Settings
from zbc.training.data.corpus import Tokens, write_sidecar
from zbc.training.data.data import Pairs
from zbc.training.data.unequal import Dealer, PairDocuments, RandomDocuments, TokenDocuments

STEPS = 3
DATA = {"kind": "synthetic", "balance": "length"}


def unequal(
    schedule="1f1b",
    p=2,
    copies=2,
    most=8,
    mean=4,
    *,
    rows=1,
    zero1=False,
    resident=0,
    one_sided=False,
    model=GPT,
    data=DATA,
    sync="before-step",
    **how,
):
    """The plan of `mean` microbatches with the plans of all other numbers."""

    def one(m):
        program = make_program(schedule, p, m, copies=copies, sharded=zero1, sync=sync)
        program = replace(freeing(schedule, p, m, resident, 2), one_sided=one_sided) if resident else program
        return make_plan(program, model=model, data=data, optimizer=SGD, size=rows, **how)

    plans = {m: one(m) for m in range(1, most + 1)}
    assert not [*order_problems([plan.program for plan in plans.values()])]
    main = plans.pop(mean)
    parts = [RampPlan(folder=f"m{m}", microbatches=m, steps=0, sha256="") for m in plans]
    balance = Unequal(room=model["seq_len"], most=most, quadratic=0.001)
    manifest = main.manifest.model_copy(update={"ramp": parts, "balance": balance})
    return StoredPlan(manifest, main.program, tuple(plans.values()))


def train_alone(plan, steps, documents=None):
    """Losses, norms and weights of plain autograd in one process, a sample at a time."""
    settings = Settings.of(plan.manifest)
    documents = documents or RandomDocuments(settings.model.vocab, settings.model.seq_len, settings.train.seed)
    manifest = plan.manifest
    shape = Shape(manifest.copies, manifest.balance.room, manifest.microbatch_size, manifest.balance.most)
    dealer = Dealer(documents, shape, manifest.microbatches, settings.train.seed, "")  # which samples a step has

    def pairs_of(step):
        return [documents.pair(number) for number in dealer.step(step).samples]

    return one_by_one.train(plan, steps, pairs_of)


def as_one_process(plan, documents=None, *, gathered=False):
    """Asserts the results of one process; returns the workers of the run."""
    workers = run_threads(plan, STEPS)
    losses, norms, expected = train_alone(plan, STEPS, documents)
    found = [(r.loss, r.grad_norm) for r in workers[0].results]
    assert all([(r.loss, r.grad_norm) for r in w.results] == found for w in workers)
    assert [loss for loss, _ in found] == pytest.approx(losses, abs=1e-6)
    assert [norm for _, norm in found] == pytest.approx(norms, rel=1e-5)
    held = [stage.parameters for worker in workers for stage in worker.stages.values()]
    for weight in [weights(workers)] if gathered else held:
        for name, p in weight.items():
            torch.testing.assert_close(p.detach(), expected[name], rtol=0, atol=1e-6, msg=name)
    return workers


@pytest.fixture
def dealt(monkeypatch):
    """`dealt(counts)`: these numbers of microbatches of one row for the replicas, independent of the samples' costs."""

    def deal(counts, lengths, shape):
        rows = [[] for _ in range(sum(counts))]
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            min(rows, key=lambda row: sum(lengths[k] for k in row)).append(i)
        assert max(sum(lengths[k] for k in row) for row in rows) <= shape.room
        mbs = [(tuple(row),) if row else () for row in rows]
        return [mbs[: counts[0]], mbs[counts[0] :]]

    def dealt(counts):
        monkeypatch.setattr("zbc.training.data.unequal.deal", partial(deal, counts))
        monkeypatch.setattr("zbc.training.data.unequal.samples_of_step", lambda lengths, shape, m: sum(counts) + 1)

    return dealt


COUNTS = [(5, 3), (6, 2), (7, 1), (1, 3)]


ORDERS = [("1f1b", True), ("zb-h1", False), ("zb-v", True), ("breadth-first", False), ("chimera", True)]


@pytest.mark.always("1f1b-True-counts0")
@pytest.mark.long("counts2", "counts3")
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("schedule", "zero1"), few(ORDERS, [("1f1b", True)]))
def test_replicas_with_unequal_counts_train_as_one_process(schedule, zero1, counts, dealt):
    """Also replicas whose samples do not fill their microbatches."""
    dealt(counts)
    for worker in as_one_process(unequal(schedule, zero1=zero1)):
        assert worker.plan.manifest.microbatches == counts[worker.replica]


@pytest.mark.long("counts1")
@pytest.mark.parametrize("counts", [(5, 3), (1, 3)])
def test_steps_that_are_made_again_have_their_own_counts(counts, dealt):
    """All steps are clipped, so that each runs its first forwards twice."""
    dealt(counts)
    workers = run_threads(unequal(sync="post-validate"), STEPS)
    losses, norms, _ = train_alone(unequal(), STEPS)
    found = [(one.loss, one.grad_norm) for one in workers[0].results]
    assert found == [pytest.approx(pair, rel=1e-6) for pair in zip(losses, norms, strict=True)]
    assert all(norm > SGD["clip_grad_norm"] for norm in norms)


@pytest.mark.long
@pytest.mark.parametrize("resident", few([1, 2], (1,)))
@pytest.mark.parametrize(("here", "there"), few(COUNTS, 1))
@pytest.mark.parametrize("schedule", few(["interleaved-1f1b", "looped-zb", "zb-v"], 1))
def test_weights_that_are_taken_come_in_any_order(schedule, here, there, resident, dealt):
    """Interleaved: a rank gathers once for each run of microbatches, so replicas gather in different orders."""
    counts = here, there
    dealt(counts)
    if schedule == "interleaved-1f1b" and resident == 1:
        with pytest.raises(AssertionError, match="in another order"):
            unequal(schedule, resident=resident, zero1=True)
    as_one_process(unequal(schedule, resident=resident, zero1=True, one_sided=True), gathered=True)


MODELS = {"learned positions": GPT, "rotary positions": {**GPT, "variant": "rotary"}, "llama": LLAMA}
MODELS["window"] = {**LLAMA, "variant": "qwen3", "window": 3}


@pytest.mark.long
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_samples_of_a_row_do_not_see_each_other(name, rows):
    """Balanced with different counts in every step; one process runs each sample alone."""
    as_one_process(unequal("1f1b", rows=rows, model=MODELS[name]))


def test_a_dataset_of_a_user_with_lengths_is_dealt_and_packed():
    plan = unequal(data={"kind": TEXTS, "balance": "length"})
    as_one_process(plan, documents=PairDocuments(Pairs(Texts(), "texts", 0), Texts(), "texts", 16))


@pytest.mark.parametrize("balance", ["length", "tokens"])
def test_padding_has_a_target_that_the_loss_of_a_user_leaves_out(balance):
    """As in docs/training.md: this one takes no -100."""
    model, data = {"loss": "tests.runtime.padded_data:zeros"}, {"kind": TEXTS, "args": {"vocab": 4}, "balance": balance}
    plan = (
        unequal(model=GPT | model, data=data)
        if balance == "length"
        else make_plan(make_program("1f1b", 2, 2), model=GPT | model, data=data, tokens=(16, 9))
    )
    workers, texts = run_threads(plan, 1), Texts(vocab=4)
    pairs = [texts.pair(number) for number in workers[0].work.step(0).samples]
    assert workers[0].results[0].loss == pytest.approx(mean_over_tokens(plan, pairs, ignored=0), rel=1e-6)


def test_a_loss_that_fails_on_padding_is_refused_in_words():
    model, data = {"loss": "tests.runtime.padded_data:silent"}, {"kind": TEXTS, "balance": "length"}
    with refused("E513", match="fails on rows with targets of -100"):
        run_threads(unequal(model=GPT | model, data=data), 1)


@pytest.mark.long
def test_kept_samples_are_evaluated_alone_in_their_rows():
    data = {"kind": TEXTS, "balance": "length", "validation": 0.25}
    plan = unequal(data=data, train={"eval_every": 1, "eval_batches": 1000})

    def still(worker):
        worker.rate = lambda phases, step: 0.0

    (*_, last), texts = run_threads(plan, 1, setup=still), Texts()
    found, wanted = last.evaluation.results[0], mean_over_tokens(plan, [texts[i] for i in range(300, 400)])
    assert found.samples == 100 and found.loss == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [("none", "has no lengths"), (17, "sample 7 of .* has 17 tokens, a row has room for 16"), (0, "has 0 tokens")],
)
def test_samples_without_a_length_or_room_are_refused(wrong, text):
    plan = unequal(data={"kind": TEXTS, "args": {"wrong": wrong}, "balance": "length"})
    with refused("E110", match=text):
        run_threads(plan, 1)


@pytest.mark.long
def test_a_length_that_is_not_that_of_its_sample_is_refused():
    plan = unequal(data={"kind": TEXTS, "args": {"wrong": 1, "longest": 3}, "balance": "length"})
    with pytest.raises(ZbcError, match=r"E110.* its length is 1"):
        run_threads(plan, 20)


def test_a_step_with_more_than_there_is_room_for_says_how_much_there_should_be(monkeypatch):
    monkeypatch.setattr("zbc.training.data.unequal.samples_of_step", lambda lengths, shape, m: 200)
    with refused("E110", hint="max_microbatches = ") as caught:
        run_threads(unequal(), 1)
    assert "16 microbatches" not in caught.value.message


def test_ranks_that_know_other_lengths_do_not_begin(monkeypatch):
    plan = unequal()

    def other(worker):
        if worker.rank == 2:
            worker.work.documents.lengths = worker.work.documents.lengths + 0
            worker.work.documents.lengths[5] += 1

    with pytest.raises(ZbcError, match=r"E110.*other lengths"):
        run_threads(plan, 1, setup=other)


def test_documents_of_token_files_end_where_their_end_token_stands(tmp_path):
    tokens = [5, 6, 7, 0, 8, 0, 0, *range(10, 15), 0, 9, 9]  # documents of 3, 1, 0, 5 and 2 tokens; the last has no end
    path = tmp_path / "a.bin"
    path.write_bytes(array("H", tokens).tobytes())
    write_sidecar(path, Tokens("uint16", len(tokens), 61, end=0))
    documents = TokenDocuments([str(path)], None, 4, 61)
    found = [(x.tolist(), y.tolist()) for x, y in map(documents.pair, range(len(documents)))]
    assert found == [([5, 6, 7], [6, 7, 0]), ([8], [0]), ([10, 11, 12, 13], [11, 12, 13, 14]), ([14], [0]), ([9], [9])]
    assert documents.lengths.tolist() == [3, 1, 4, 1, 1]
    write_sidecar(path, Tokens("uint16", len(tokens), 61))
    with pytest.raises(ZbcError, match=r"E110.*which token ends a document"):
        TokenDocuments([str(path)], None, 4, 61)


def test_plans_that_meet_in_another_order_are_found():
    plan = unequal("breadth-first", zero1=True)
    program = plan.ramp[0].program
    ops = list(program.ranks[1])
    sums = [i for i, op in enumerate(ops) if op.kind.sums]
    ops[sums[0]], ops[sums[1]] = ops[sums[1]], ops[sums[0]]
    wrong = program.with_ranks([program.ranks[0], ops], by="test")
    assert reduced_as(wrong, plan.program).ranks == program.ranks
    (found,) = order_problems([plan.program, wrong])
    assert found.code == "E209" and "rank 1" in found.message and "REDUCE" in found.details[0]
    (found,) = order_problems([replace(plan.program, scatters=True), wrong])
    assert found.hint == 'use breadth-first, or shard = "optimizer"'  # one-sided goes with weights that come and go


def padded_mean(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.clamp(min=0).flatten())


USERS = {"family": "tests.runtime.sliced_models:tokens", "layers": 4, "vocab": 61, "seq_len": 16}


@pytest.mark.long
def test_layers_and_losses_of_users_keep_samples_and_padding_apart_or_are_refused():
    as_one_process(unequal(most=4, mean=2, model=USERS))
    with refused("E512", "samples of one row see each other"):
        run_threads(unequal(most=2, mean=1, model={**USERS, "args": {"mixes": True}}), 1)
    with refused("E513", "with padding behind the samples"):
        run_threads(unequal(most=2, mean=1, model={**USERS, "loss": f"{__name__}:padded_mean"}), 1)
