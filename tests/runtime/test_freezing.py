"""Frozen layers: equal to one process with requires_grad=False in the same microbatches."""

import pytest

from tests.refusals import refused
from tests.runtime.small_plans import GPT, LLAMA, hold, make_plan, make_program, make_worker, reference
from tests.runtime.test_freed_weights import freeing, same
from tests.runtime.test_gradients import VECTORS, user
from tests.runtime.test_tensor_parallel import numbers, plan_of
from tests.runtime.woven import shared_program
from tests.threads import run_threads, watch
from tests.tiers import few
from zbc.ir import WHOLE, Kind
from zbc.runtime.features.freezing import turns_of
from zbc.runtime.seeding import seed_of

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
SGD = {"kind": "sgd", "lr": 0.1}
DROPOUT = {"model": user("residual", dropout=0.3), **VECTORS}
SEED = 7


def shared_out(program, share):
    """The program with `share(stage, mb)` of each W and BW."""
    ranks = [
        [op._replace(share=share(op.stage, op.mb)) if op.kind.makes_part else op for op in ops] for ops in program.ranks
    ]
    return program.with_ranks(ranks, by="freeze")


def mixed(stage, mb):
    """Between a half and all of a stage, for stages of two layers and more."""
    return (50, WHOLE, 67)[(stage + mb) % 3]


def frozen_plan(schedule="1f1b", p=2, m=4, v=None, *, dp=1, share=mixed, **options):
    program = shared_out(make_program(schedule, p, m, v, copies=dp), share)
    return make_plan(program, optimizer=options.pop("optimizer", ADAMW), seed=SEED, **options)


def walked(plan, after=0):
    """(step, mb) -> the names of frozen layers, by going round the ring of each stage one layer after the other."""
    manifest, found = plan.manifest, {}
    shares = {(op.stage, op.mb): op.share for _, _, op in plan.program if op.kind.makes_part}
    for stage, names in enumerate(manifest.layers):
        at = seed_of(SEED, "freeze", stage) % len(names)
        for step in range(after, after + 12):
            for mb in range(manifest.copies * manifest.microbatches):
                share = shares[stage, mb % manifest.microbatches]
                for _ in range(round(len(names) * (1 - share / WHOLE))):
                    found.setdefault((step, mb), set()).add(names[at])
                    at = (at + 1) % len(names)
    return lambda step, mb: found.get((step, mb), set())


def check(plan, steps=3, *, after=0, tolerance=0.0, **options):
    wanted = reference(plan, steps, walked(plan, after))
    workers = run_threads(plan, steps, **options)
    hold(workers, wanted, tolerance=tolerance)
    return workers


@pytest.mark.parametrize(
    ("schedule", "p", "v"),
    few(
        [("gpipe", 2, None), ("1f1b", 2, None), ("zb-h1", 2, None), ("zb-h1", 4, None), ("zb-v", 2, None)]
        + [("interleaved-1f1b", 2, 2), ("looped-zb", 2, 2)],
        (("1f1b", 2, None), ("zb-h1", 2, None)),
    ),
)
def test_training_is_that_of_one_process_with_the_same_layers_frozen(schedule, p, v):
    check(frozen_plan(schedule, p, 4, v))


REST = {"embed": "embed.positions", "head": "head.norm"}  # without the words


@pytest.mark.long("zb-v-2-how1")
@pytest.mark.parametrize(("schedule", "sums", "how"), [("zb-h1", 1, {}), ("zb-v", 2, {}), ("1f1b", 1, {"copies": 2})])
def test_words_that_all_ranks_share_are_trained_in_every_microbatch(schedule, sums, how):
    program = shared_out(shared_program(schedule, 2, 4, sums, **how), mixed)
    plan = make_plan(program, optimizer={**SGD, "clip_grad_norm": 0.3}, seed=SEED)
    frozen = walked(plan)
    assert any(REST.keys() & frozen(0, mb) for mb in range(4))
    wanted = reference(plan, 3, lambda step, mb: {REST.get(name, name) for name in frozen(step, mb)})
    hold(run_threads(plan, 3), wanted, tolerance=1e-6)


def first_alone(stage, mb):
    return 0 if mb else WHOLE


SOME = {"mixed": mixed, "a microbatch": first_alone, "a stage": lambda stage, mb: 0 if stage == 1 else WHOLE}
CASES = {
    "recompute": ("zb-h1", {"activations": "recompute"}, 0.0),
    "another family": ("zb-h1", {"model": LLAMA}, 0.0),
    "dropout": ("zb-h1", DROPOUT, 0.0),
    "clipped, after they are means": ("zb-h1", {"optimizer": {**ADAMW, "clip_grad_norm": 0.3}}, 1e-6),
    "replicas share the turns": ("1f1b", {"m": 3, "dp": 2, "optimizer": SGD}, 1e-6),
    # of two microbatches one is frozen altogether: a mean over the others of both replicas
    "a replica never trains a layer": ("1f1b", {"m": 2, "dp": 2, "optimizer": SGD, "share": first_alone}, 1e-6),
    "no gradients for a stage, momentum and decay included": ("1f1b", {"share": SOME["a stage"]}, 0.0),
    "no gradients for a stage, B and W apart": ("zb-h1", {"share": SOME["a stage"]}, 0.0),
    "autocast": ("zb-h1", {"model": {**GPT, "dtype": "bfloat16"}}, 0.0),
    "lower precision": ("zb-h1", {"model": {**GPT, "dtype": "bfloat16", "parameters": "bfloat16"}}, 2e-2),
    "layers that defer without asking": ("1f1b", {"model": user("scales"), "optimizer": SGD, **VECTORS}, 1e-6),
    "such layers, B and W apart": ("zb-h1", {"model": user("scales"), "optimizer": SGD, **VECTORS}, 1e-6),
}


@pytest.mark.parametrize("name", CASES)
def test_what_freezing_goes_with_trains_as_in_one_process(name):
    schedule, how, tolerance = CASES[name]
    check(frozen_plan(schedule, **how), tolerance=tolerance)


@pytest.mark.long("mixed", "a stage")
@pytest.mark.parametrize("share", SOME)
@pytest.mark.parametrize(
    ("resident", "dtype"), few([(0, "float32"), (1, "float32"), (0, "bfloat16")], ((1, "float32"),))
)
def test_an_optimizer_that_replicas_share_out_has_the_same_bits(share, resident, dtype):
    """`resident`: the weights are resharded as well."""
    plain = make_program("breadth-first", 2, 2, 2, copies=2)
    sharded = make_program("breadth-first", 2, 2, 2, copies=2, sharded=True)
    other = freeing("breadth-first", 2, 2, resident, 2) if resident else sharded
    model = {**GPT, "parameters": dtype, "dtype": dtype}
    plans = [make_plan(shared_out(one, SOME[share]), optimizer=ADAMW, seed=SEED, model=model) for one in (plain, other)]
    same(*(run_threads(one, 3) for one in plans))


@pytest.mark.long("zb-h1")
@pytest.mark.parametrize("kind", ["1f1b", "zb-h1"])
def test_ranks_that_share_layers_freeze_the_same(kind, tmp_path):
    chosen = {"freeze": {"most": 0.6}, "model_more": {"layers": 6}, "costs": {"f": 1.0, "b": 1.0, "w": 1.0, "tp": 0.0}}
    plans = [plan_of(tmp_path / f"{tp}", kind, pp=2, tp=tp, **chosen) for tp in (1, 2)]
    assert plans[0].program.ranks == plans[1].program.ranks and plans[1].program.freezes
    for found, meant in zip(*(numbers(run_threads(one, 3)) for one in plans), strict=True):
        assert found == pytest.approx(meant, rel=1e-5)


@pytest.mark.parametrize(("how", "alike"), [({"averages": True}, True), ({"ep": 2}, True), ({}, False)])
def test_replicas_freeze_alike_where_they_average_or_exchange_rows(how, alike):
    worker = make_worker(frozen_plan("1f1b", m=4, dp=2))
    turns = turns_of(worker.plan.ops, worker.stages[0], worker.plan.manifest.model_copy(update=how), 0)
    pairs = [(turns.resting(step, n), turns.resting(step, 4 + n)) for step in range(6) for n in range(4)]
    assert any(one for one, _ in pairs) and alike == all(one == other for one, other in pairs)


def test_nothing_is_frozen_at_first():
    plan = frozen_plan("zb-h1", freeze={"most": [0.5, 2]})
    check(plan, 4, after=2)


def test_what_a_frozen_layer_defers_is_nothing():
    """A W with all layers frozen has no work, and B has deferred none."""
    plan = frozen_plan("zb-h1", share=lambda stage, mb: 0)
    left = []

    def setup(worker):
        count = lambda worker, op: left.append(len(worker.slots[worker.routes[op].key]))  # noqa: E731
        watch(worker, before=count, of=lambda op: op.kind is Kind.W)

    run_threads(plan, 1, setup=setup)
    assert left and set(left) == {0}


@pytest.mark.parametrize(
    ("change", "word"),
    [({"tied": True}, "model.ties = true"), ({"sync": "post-validate"}, "post-validate"), ({"slices": 2}, "slices")],
)
def test_plans_that_freeze_beside_something_else_are_refused(change, word):
    rows = [0, 8, 16] if "slices" in change else ()
    model, sync = {**GPT, "ties": "tied" in change}, {"sync": change.get("sync", "before-step")}
    plan = make_plan(shared_out(make_program("1f1b", 2, 4, **change), mixed), model=model, optimizer=sync, rows=rows)
    with refused("E406", match=word):
        make_worker(plan)
