"""With a shared vocabulary training equals that of one process, and shared values are equal on all ranks."""

import weakref
from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from tests.refusals import refused
from tests.runtime.small_plans import GPT, LLAMA, make_plan, make_program, make_worker, parameters
from tests.runtime.test_gradients import without_step
from tests.runtime.test_slices import check_gradients
from tests.runtime.woven import shared_program
from tests.threads import begun, losses_of, run_threads, side_by_side
from tests.tiers import few
from zbc.errors import ZbcError
from zbc.ir import Kind, Op
from zbc.ops import WORDS
from zbc.runtime.core.tensors import IGNORED
from zbc.runtime.features.words import words
from zbc.runtime.features.words.vocabulary import Output
from zbc.runtime.features.words.vocabulary_state import Vocabulary
from zbc.runtime.transports.hub import Hub
from zbc.training.probing.checkup import check_up
from zbc.training.warm import warm

TIED = {**GPT, "ties": True}
ROWS = {1: (), 2: (0, 9, 16)}
TIGHT = {torch.float32: 1e-6, torch.float64: 1e-14}


def plan_of(schedule, p, m, sums, *, slices=1, how=None, **options):
    return make_plan(shared_program(schedule, p, m, sums, slices=slices, **(how or {})), rows=ROWS[slices], **options)


WAYS = [("1f1b", 1, 3, 1, {}), ("1f1b", 2, 3, 1, {}), ("1f1b", 4, 5, 2, {}), ("zb-h1", 2, 4, 2, {"model": TIED})]
WAYS += [("zb-h1", 4, 5, 1, {"model": LLAMA, "words": (0, 1, 30, 31, 67)})]
WAYS += [("zb-v", 2, 3, 1, {"model": LLAMA}), ("zb-v", 4, 5, 2, {}), ("1f1b", 2, 3, 2, {"slices": 2})]
WAYS += [("zb-h1", 4, 3, 1, {"slices": 2, "model": {**LLAMA, "ties": True}})]
WAYS += [("zb-v", 2, 3, 1, {"slices": 2}), ("1f1b", 2, 3, 1, {"activations": "recompute"})]
WAYS += [("interleaved-1f1b", 2, 4, 1, {}), ("1f1b", 2, 2, 1, {"how": {"copies": 2}})]
WAYS += [("zb-v", 2, 3, 2, {"how": {"copies": 2}, "model": TIED}), ("1f1b", 8, 3, 1, {})]
WAYS += [("zb-h1", 8, 9, 2, {"model": TIED})]


@pytest.mark.long("1f1b-4-5-2-options2", "zb-v-4-5-2-options6", "zb-v-2-3-1-options9", "zb-h1-4-5-1-options4")
@pytest.mark.parametrize(("schedule", "p", "m", "sums", "options"), few(WAYS, WAYS[1:7] + WAYS[9:10]))
@pytest.mark.parametrize("default", few(TIGHT, [torch.float64]), indirect=True)
def test_a_step_has_the_gradients_of_one_process(schedule, p, m, sums, options, default):
    check_gradients(plan_of(schedule, p, m, sums, keep=without_step, **options), TIGHT[default])


@pytest.mark.long
@pytest.mark.parametrize("options", few([{"dtype": "bfloat16"}, {"parameters": "bfloat16"}], [{"dtype": "bfloat16"}]))
def test_in_bfloat16_sums_are_float32(options, monkeypatch):
    kinds = set[torch.dtype]()
    combine = words.combine
    monkeypatch.setattr(
        "zbc.runtime.features.words.vocabulary_state.combine", lambda told: kinds.add(told.dtype) or combine(told)
    )
    model = {**LLAMA, "dtype": "bfloat16", **options}
    how = {"model": model, "optimizer": {"lr": 1e-2}}
    plans = [*(plan_of("zb-h1", 2, 3, sums, **how) for sums in (1, 2)), make_plan(make_program("1f1b", 2, 3), **how)]
    one, two, ends = (losses_of(run_threads(plan, 4)) for plan in plans)
    assert kinds == {torch.float32}
    assert one == pytest.approx(ends, rel=2e-3) and two == pytest.approx(ends, rel=2e-3)


def together(ranks, hidden, table, targets, *, early, low=(0, 4, 5, 11)):
    """Loss, gradient of the table and of `hidden`, by ranks one after the other."""
    shares = [Output(torch.nn.Parameter(table[a:b].clone()), a) for a, b in pairwise(low)]
    weight = 1.0 / (targets != IGNORED).sum().double()
    told = [share.tell(hidden, targets, weight, 1.0, early=early) for share in shares]
    log, logit = words.combine(torch.stack([one.mine for one in told]))
    parts = [one.part(log) for one in told] if early else []
    more = [share.learn(one, log, part=not early) for share, one in zip(shares, told, strict=True)]
    return told[0].loss(log, logit).item(), torch.cat([s.weight.grad for s in shares]), sum(parts or more)


def test_targets_that_do_not_count():
    """The mean is over those that count, also if a slice has none."""
    torch.manual_seed(0)
    hidden, table = torch.randn(7, 8, dtype=torch.float64), torch.randn(11, 8, dtype=torch.float64)
    targets = torch.randint(0, 11, (7,))
    targets[:3] = IGNORED
    weight = torch.nn.Parameter(table.clone())
    h = hidden.clone().requires_grad_()
    loss = functional.cross_entropy(h @ weight.t(), targets)
    loss.backward()
    found, grads, dh = together(3, hidden, table, targets, early=True)
    assert found == pytest.approx(loss.item(), rel=1e-14)
    torch.testing.assert_close((grads, dh), (weight.grad, h.grad), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("early", [True, False])
def test_logits_too_large_for_exp_are_no_trouble(early):
    """Ranks whose largest logits are far apart: each is scaled to the common one."""
    hidden, table = torch.full((2, 4), 10.0), torch.zeros(11, 4)
    table[2], table[9] = 50.0, -50.0
    targets = torch.tensor([2, 9])
    loss = functional.cross_entropy(hidden @ table.t(), targets).item()
    found, grads, dh = together(3, hidden, table, targets, early=early)
    assert found == pytest.approx(loss) and grads.isfinite().all() and dh.isfinite().all()


def test_logits_are_gone_after_t(monkeypatch):
    """Logits of more than two microbatches are never there at once."""
    made, alive, tell = [], [], Output.tell

    def counted(self, *args, **how):
        told = tell(self, *args, **how)
        made.append(weakref.ref(told.soft.untyped_storage()))
        alive.append(sum(ref() is not None for ref in made))
        return told

    monkeypatch.setattr(Output, "tell", counted)
    run_threads(plan_of("1f1b", 1, 5, 1), 1)
    assert len(made) == 5 and max(alive) <= 2 and all(ref() is None for ref in made)


def test_copies_of_rows_are_compared_before_one_is_written(tmp_path):
    plan = plan_of("1f1b", 2, 3, 1, how={"copies": 2}, checkpoint={"every": 2})

    def spoil(worker):
        if worker.replica:
            with torch.no_grad():
                worker.features.find(Vocabulary).embedding.weight[3, 0] += 1.0

    with refused("E705", match=r"copies of model\.embed\.tokens\.weight"):
        run_threads(plan, 2, setup=spoil, folder=tmp_path / "spoiled")


@pytest.mark.parametrize("tp", [1, 2])
def test_whole_tables_are_put_together_for_others(tp):
    """For export: the rows of all ranks, however many each has."""
    plan = plan_of("zb-v", 4, 3, 1, words=(0, 5, 7, 50, 61), how={"tp": tp})
    hub = Hub(4 * tp, inside=plan.manifest.topology.inside)
    workers = [make_worker(plan, rank, hub) for rank in range(4 * tp)]

    def run(rank):
        mine = workers[rank].optimizers[WORDS].parameters["head.logits.weight"]
        return workers[rank].features.find(Vocabulary).whole(mine, workers[rank].transport)

    found = side_by_side(4 * tp, run)
    one = parameters([make_worker(make_plan(make_program("1f1b", 1, 3)))])["head.logits.weight"]
    assert all(torch.equal(table, one) for table in found)


def test_an_op_whose_collective_was_not_started_says_so():
    plan = plan_of("1f1b", 2, 3, 1, keep=lambda op: op != Op(Kind.SPREAD, 0, 1))
    with pytest.raises(ZbcError, match="run: SPREAD m1 has not been started"):
        run_threads(plan, 1)


@pytest.mark.parametrize(("kind", "text"), [(Kind.T, "met[m0.0]"), (Kind.E, "looked[m0.0]")])
def test_what_is_left_is_named(kind, text):
    with pytest.raises(ZbcError) as caught:
        run_threads(plan_of("1f1b", 2, 3, 1, keep=lambda op: op.kind is not kind), 1)
    assert text in str(caught.value)


def test_other_models_are_refused():
    program = shared_program("1f1b", 2, 3, 1)
    for model in ({**GPT, "loss": "tests.runtime.losses:mean"}, {**GPT, "vocab": 64}):
        with refused("E406"):
            make_worker(make_plan(program, model=model, words=(0, 30, 61)))


@pytest.mark.long("1")
@pytest.mark.parametrize("sums", [1, 2])
def test_kernels_and_groups_used_before_the_first_step_change_no_bit(sums):
    plan = plan_of("zb-h1", 2, 3, sums, optimizer={"lr": 1e-2})
    plain, warmed = run_threads(plan, 3), run_threads(plan, 3, step=begun(warm))
    assert losses_of(warmed) == losses_of(plain)


def test_the_doctor_looks_at_the_layers_of_such_a_plan():
    found = check_up(plan_of("zb-h1", 2, 3, 1, slices=2))
    assert found.fine and found.stages == ("B and W apart, in 2 slices",) * 2


def test_nothing_but_layers_draws_while_ranks_are_built():
    """Layers restore the generator; other draws would take numbers from layers of other threads."""
    plan = plan_of("zb-h1", 2, 3, 1)
    before = torch.random.get_rng_state()
    for rank in range(2):
        make_worker(plan, rank)
    assert torch.equal(torch.random.get_rng_state(), before)
