"""With a shared vocabulary training equals that of one process, and shared values are equal on all ranks."""

import gc
import math
import threading
import weakref
from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from tests.refusals import refused
from tests.runtime.small_plans import GPT, LLAMA, hold, make_plan, make_program, make_worker, parameters, reference
from tests.runtime.test_gradients import without_step
from tests.runtime.test_slices import check_gradients
from tests.runtime.woven import shared_program
from tests.threads import begun, losses_of, norms_of, run_threads, scaled, side_by_side
from tests.tiers import few
from zbc.compiler.check.forward import check_forward
from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Placement
from zbc.ops import WORDS
from zbc.plan.forward import forward_only
from zbc.runtime.core.ending import leftovers
from zbc.runtime.core.tensors import IGNORED
from zbc.runtime.features.words import vocabulary, words
from zbc.runtime.features.words.vocabulary import Embedding, Output
from zbc.runtime.features.words.vocabulary_state import Vocabulary
from zbc.runtime.transports.hub import Hub
from zbc.runtime.transports.transport import Then
from zbc.training.probing.checkup import check_up
from zbc.training.warm import warm

TIED = {**GPT, "ties": True}
QWEN = {**LLAMA, "variant": "qwen3", "head_size": 8, "ties": True}
ROWS = {1: (), 2: (0, 9, 16)}
TIGHT = {torch.float32: 1e-6, torch.float64: 1e-14}


def plan_of(schedule, p, m, sums, *, slices=1, how=None, **options):
    return make_plan(shared_program(schedule, p, m, sums, slices=slices, **(how or {})), rows=ROWS[slices], **options)


def far(found, wanted):
    """The difference of two tensors, as a share of the norm of one."""
    return ((found - wanted).norm() / (wanted.norm() or 1.0)).item()


# ---- a step --------------------------------------------------------------------------------------------------

WAYS = [("1f1b", 1, 3, 1, {}), ("1f1b", 2, 3, 1, {}), ("1f1b", 4, 5, 2, {}), ("zb-h1", 2, 4, 2, {"model": TIED})]
WAYS += [("zb-h1", 4, 5, 1, {"model": LLAMA, "words": (0, 1, 30, 31, 67)})]
WAYS += [("zb-v", 2, 3, 1, {"model": LLAMA}), ("zb-v", 4, 5, 2, {}), ("1f1b", 2, 3, 2, {"slices": 2})]
WAYS += [("zb-h1", 4, 3, 1, {"slices": 2, "model": {**LLAMA, "ties": True}})]
WAYS += [("zb-v", 2, 3, 1, {"slices": 2}), ("1f1b", 2, 3, 1, {"activations": "recompute"})]
WAYS += [("interleaved-1f1b", 2, 4, 1, {}), ("1f1b", 2, 2, 1, {"how": {"copies": 2}})]
WAYS += [("zb-v", 2, 3, 2, {"how": {"copies": 2}, "model": TIED}), ("1f1b", 8, 3, 1, {})]
WAYS += [("zb-h1", 8, 9, 2, {"model": TIED})]


@pytest.mark.parametrize(("schedule", "p", "m", "sums", "options"), few(WAYS, WAYS[1:7] + WAYS[9:10]))
@pytest.mark.parametrize("default", few(TIGHT, [torch.float64]), indirect=True)
def test_a_step_has_the_gradients_of_one_process(schedule, p, m, sums, options, default):
    check_gradients(plan_of(schedule, p, m, sums, keep=without_step, **options), TIGHT[default])


@pytest.mark.parametrize("model", [GPT, QWEN])
def test_float32_too(model):
    check_gradients(plan_of("zb-h1", 4, 5, 1, model=model, keep=without_step))


@pytest.mark.parametrize("sums", [1, 2])
def test_training_with_clipping_is_that_of_one_process(sums):
    options = {"kind": "sgd", "lr": 0.5, "clip_grad_norm": 0.5}
    plan = plan_of("zb-h1", 4, 5, sums, optimizer=options, model=TIED)
    workers, expected = run_threads(plan, 4), reference(plan, 4)
    hold(workers, expected, tolerance=1e-5, near=1e-6)
    assert any(r.grad_norm > 0.5 for r in workers[0].results), "it clips"


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
    assert far(grads, weight.grad) < 1e-14 and far(dh, h.grad) < 1e-14


def together(ranks, hidden, table, targets, *, early, low=(0, 4, 5, 11)):
    """Loss, gradient of the table and of `hidden`, by ranks one after the other."""
    shares = [Output(torch.nn.Parameter(table[a:b].clone()), a) for a, b in pairwise(low)]
    weight = 1.0 / (targets != IGNORED).sum().double()
    told = [share.tell(hidden, targets, weight, 1.0, early=early) for share in shares]
    log, logit = words.combine(torch.stack([one.mine for one in told]))
    parts = [one.part(log) for one in told] if early else []
    more = [share.learn(one, log, part=not early) for share, one in zip(shares, told, strict=True)]
    return told[0].loss(log, logit).item(), torch.cat([s.weight.grad for s in shares]), sum(parts or more)


@pytest.mark.parametrize("early", [True, False])
def test_logits_too_large_for_exp_are_no_trouble(early):
    """Ranks whose largest logits are far apart: each is scaled to the common one."""
    hidden, table = torch.full((2, 4), 10.0), torch.zeros(11, 4)
    table[2], table[9] = 50.0, -50.0
    targets = torch.tensor([2, 9])
    loss = functional.cross_entropy(hidden @ table.t(), targets).item()
    found, grads, dh = together(3, hidden, table, targets, early=early)
    assert found == pytest.approx(loss) and grads.isfinite().all() and dh.isfinite().all()


# ---- what ranks share ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sums", [1, 2])
def test_all_ranks_hold_the_same_bits_and_the_words_of_each_are_its_own(sums, monkeypatch):
    found, lock = dict[tuple, list[bytes]](), threading.Lock()

    def learn(self, told, log, *, part):
        with lock:
            found.setdefault((tuple(told.hidden[0, :3].tolist()),), []).append(log.numpy().tobytes())
        return plain(self, told, log, part=part)

    plain = Output.learn
    monkeypatch.setattr(Output, "learn", learn)
    workers = run_threads(plan_of("zb-v", 4, 3, sums), 2)
    assert len(found) == 6
    assert all(len(logs) == 4 and len(set(logs)) == 1 for logs in found.values())
    assert [len(w.features.find(Vocabulary).output.weight) for w in workers] == [15, 15, 15, 16]


def test_logits_are_gone_after_t():
    """No logits of a microbatch stay; logits of two microbatches never exist at once."""
    alive, most = [0], [0]
    tell = Output.tell

    def counted(self, *args, **how):
        told = tell(self, *args, **how)
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        weakref.finalize(told.soft, gone)
        return told

    def gone():
        alive[0] -= 1

    gc.disable()  # so that nothing waits for it
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Output, "tell", counted)
            (worker,) = run_threads(plan_of("1f1b", 1, 5, 1), 1)
    finally:
        gc.enable()
    assert alive == [0] and 1 <= most[0] <= 2
    assert not leftovers(worker)


# ---- evaluation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Placement.linear, Placement.vshape, lambda p: Placement.looped(p, 3)])
def test_the_forward_program_is_proven(make):
    for p, m, slices in ((1, 1, 1), (2, 5, 1), (4, 3, 2), (8, 2, 1)):
        check_forward(forward_only(make(p), m, slices, shared=True))


BROKEN = {
    "missing": (lambda ops: [op for op in ops if op != Op(Kind.S, 0, 1)], "E202"),
    "twice": (lambda ops: [*ops, Op(Kind.I, 0, 0)], "E202"),
    "in another order": (
        lambda ops: [op._replace(mb=1 - op.mb) if op.kind is Kind.SPREAD else op for op in ops],
        "E201",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_wrong_forward_program_is_refused(fault):
    program = forward_only(Placement.linear(2), 2, shared=True)
    change, code = BROKEN[fault]
    ranks = [change([*program.ranks[0]]), program.ranks[1]]
    with pytest.raises(ZbcError) as caught:
        check_forward(program.with_ranks(ranks, by="broken"))
    assert caught.value.errors[0].code == code


def test_evaluation_is_that_of_one_process():
    same = {"train": {"eval_every": 2}, "data": {"kind": "synthetic", "validation": 0.00001}}
    one = run_threads(make_plan(make_program("1f1b", 1, 3), **same), 4)
    for schedule, sums, slices, tp in (("zb-v", 1, 1, 1), ("1f1b", 2, 2, 1), ("1f1b", 1, 1, 2)):
        workers = run_threads(plan_of(schedule, 2, 3, sums, slices=slices, how={"tp": tp}, **same), 4)
        losses, wanted = ([e.loss for e in ranks[0].evaluation.results] for ranks in (workers, one))
        assert len(losses) == 2 and losses == pytest.approx(wanted, rel=1e-6)


# ---- checkpoints ---------------------------------------------------------------------------------------------

ZERO1 = {"lr": 1e-2, "zero1": True}
OPTIONS = {"optimizer": {"lr": 1e-2}, "checkpoint": {"every": 2}}
PLANS = {
    "ends": lambda model: make_plan(make_program("1f1b", 2, 3, tied=model is TIED), model=model, **OPTIONS),
    "two ranks": lambda model: plan_of("zb-h1", 2, 3, 1, model=model, **OPTIONS),
    "four ranks": lambda model: plan_of("zb-v", 4, 3, 2, model=model, words=(0, 5, 6, 50, 61), **OPTIONS),
    "slices": lambda model: plan_of("1f1b", 2, 3, 1, slices=2, model=model, **OPTIONS),
    "replicas": lambda model: plan_of("1f1b", 2, 3, 1, how={"copies": 2}, model=model, **OPTIONS),
    "dealt": lambda model: plan_of(
        "1f1b", 2, 3, 1, how={"copies": 2, "sharded": True}, model=model, **{**OPTIONS, "optimizer": ZERO1}
    ),
    "tensor parallel": lambda model: plan_of("zb-h1", 2, 3, 1, how={"tp": 2}, model=model, **OPTIONS),
}
TURNS = [("ends", "two ranks"), ("two ranks", "ends"), ("two ranks", "four ranks"), ("slices", "four ranks")]
TURNS += [("replicas", "dealt"), ("dealt", "replicas")]
TURNS += [("tensor parallel", "two ranks"), ("four ranks", "tensor parallel"), ("tensor parallel", "ends")]


@pytest.mark.parametrize("model", [GPT, TIED], ids=["apart", "tied"])
@pytest.mark.parametrize(("before", "after"), few(TURNS, [*TURNS[:2], *TURNS[5:8]]))
def test_a_run_goes_on_with_the_vocabulary_elsewhere(tmp_path, before, after, model):
    copies = 2 if {before, after} == {"replicas", "dealt"} else 1
    whole = run_threads(make_plan(make_program("1f1b", 1, 3 * copies), model=model, **OPTIONS), 4)
    run_threads(PLANS[before](model), 2, folder=tmp_path)
    workers = run_threads(PLANS[after](model), 4, resume=tmp_path / "step-00000002", folder=tmp_path / "later")
    assert losses_of(workers) == pytest.approx(losses_of(whole)[2:], rel=1e-6)


def state_of(workers):
    """Weights and their optimizer states, whole, by name."""
    found = {}
    for worker in workers:
        for optimizer in worker.optimizers.values():
            for held in optimizer.held():
                kept = {"": held.tensor, **optimizer.optimizer.state.get(held.tensor, {})}
                for key, value in kept.items():
                    found.setdefault(f"{held.name} {key}", {})[held.start] = value.detach().reshape(-1)
    return {
        name: parts[0] if name.endswith(" step") else torch.cat([parts[k] for k in sorted(parts)])
        for name, parts in found.items()
    }


@pytest.mark.parametrize("model", [GPT, TIED], ids=["apart", "tied"])
def test_what_is_loaded_has_the_bits_of_what_was_written(tmp_path, model):
    """Parameters and the state of AdamW, through plans with the vocabulary on two ranks, at the ends, on four."""
    wanted = state_of(run_threads(PLANS["two ranks"](model), 2, folder=tmp_path))
    for name in ("ends", "four ranks"):
        after = run_threads(PLANS[name](model), 2, resume=tmp_path / "step-00000002", folder=tmp_path / name)
        found = state_of(after)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], value) for key, value in wanted.items())


def test_replicas_write_each_row_once_and_are_compared(tmp_path):
    plan = PLANS["replicas"](GPT)
    whole = run_threads(plan, 4, folder=tmp_path)
    later = run_threads(plan, 4, resume=tmp_path / "step-00000002", folder=tmp_path / "later")
    assert losses_of(later) == losses_of(whole)[2:]

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


# ---- planted faults ------------------------------------------------------------------------------------------


def foreign_words(patch):
    look_up = Embedding.look_up

    def unmasked(self, tokens):
        found, _ = look_up(self, tokens)
        return found, functional.embedding(found.row, self.weight.detach())

    patch.setattr(Embedding, "look_up", unmasked)


def unscaled(patch):
    patch.setattr(vocabulary.Told, "scale", lambda self, log: (self.mine[0] - self.mine[0]).exp() / log.exp())


def foreign_targets(patch):
    own = words.own
    patch.setattr(words, "own", lambda *args: own(*args)._replace(mine=torch.ones_like(own(*args).mine)))


def another_order(patch):
    """A planted bug: ranks exchange the results of their words."""
    assert plan_of("zb-h1", 2, 3, 1).manifest.vocabulary.rows == [0, 30, 61]
    tell = Output.tell

    def shifted(self, *args, **how):
        self.first = 30 - self.first if self.first in (0, 30) else self.first
        try:
            return tell(self, *args, **how)
        finally:
            self.first = 30 - self.first

    patch.setattr(Output, "tell", shifted)


def lost_weight(patch):
    """A planted bug: slices count as if each were a microbatch."""
    tell = Output.tell
    patch.setattr(Output, "tell", lambda self, h, y, w, step, **how: tell(self, h, y, 2 * w, step, **how))


FAULTS = [foreign_words, unscaled, foreign_targets, another_order, lost_weight]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_gradients(plan_of("zb-h1", 2, 3, 1, keep=without_step))


# ---- transports ----------------------------------------------------------------------------------------------


def run_ranks(count, job):
    """Runs `job(end, rank)` on a thread for each rank of a hub; returns the results."""
    hub = Hub(count)

    def run(rank):
        try:
            return job(hub.end(rank), rank)
        except BaseException as error:
            hub.poison(rank, str(error))
            raise
        finally:
            hub.leave(rank)

    return side_by_side(count, run)


def test_a_hub_sends_to_all_and_sums_to_one():
    def job(end, rank):
        sent, summed = torch.full((2,), float(rank)), torch.full((2,), 1.0 + rank)
        one, two = end.start_broadcast(sent, 1, (0, 1, 2)), end.start_reduce(summed, 2, (0, 1, 2))
        one.wait()
        two.wait()
        return sent.tolist(), summed.tolist()

    found = run_ranks(3, job)
    assert [sent for sent, _ in found] == [[1.0, 1.0]] * 3
    assert found[2][1] == [6.0, 6.0] and all(math.isnan(x) for _, row in found[:2] for x in row), "nobody else has it"


def test_what_follows_a_gather_is_summed_into_one():
    def job(end, rank):
        parts = torch.zeros(3, 2)
        made = []

        def make():
            made.append(parts.sum(0) * (rank + 1.0))
            return made[0]

        end.start_gather(torch.full((2,), float(rank)), parts, (0, 1, 2), Then(make, 1)).wait()
        return parts.tolist(), made[0].tolist()

    found = run_ranks(3, job)
    assert all(parts == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]] for parts, _ in found)
    assert found[1][1] == [18.0, 18.0]


def test_ranks_that_ask_for_another_root_are_told():
    with pytest.raises(ZbcError, match="of different shapes"):
        run_ranks(2, lambda end, rank: end.start_reduce(torch.ones(1), rank, (0, 1)).wait())


# ---- refusals ------------------------------------------------------------------------------------------------


def test_an_op_whose_collective_was_not_started_says_so():
    plan = plan_of("1f1b", 2, 3, 1, keep=lambda op: op != Op(Kind.SPREAD, 0, 1))
    with pytest.raises(ZbcError, match="run: SPREAD m1 has not been started"):
        run_threads(plan, 1)


@pytest.mark.parametrize(("kind", "text"), [(Kind.T, "MEET m0 has no T"), (Kind.E, "I m0 looked up have no E")])
def test_what_is_left_is_named(kind, text):
    with pytest.raises(ZbcError) as caught:
        run_threads(plan_of("1f1b", 2, 3, 1, keep=lambda op: op.kind is not kind), 1)
    assert text in str(caught.value)


def test_other_models_are_refused():
    program = shared_program("1f1b", 2, 3, 1)
    for model in ({**GPT, "loss": "tests.runtime.losses:mean"}, {**GPT, "vocab": 64}):
        with refused("E406"):
            make_worker(make_plan(program, model=model, words=(0, 30, 61)))


# ---- beside the steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sums", [1, 2])
def test_kernels_and_groups_used_before_the_first_step_change_no_bit(sums):
    plan = plan_of("zb-h1", 2, 3, sums, optimizer={"lr": 1e-2})
    plain, warmed = run_threads(plan, 3), run_threads(plan, 3, step=begun(warm))
    assert losses_of(warmed) == losses_of(plain)


@pytest.mark.parametrize("model", [{}, {"ties": True}, {"parameters": "bfloat16", "dtype": "bfloat16"}])
def test_replicas_share_out_the_optimizer_of_their_rows(model):
    """With two replicas and ZeRO-1 each steps a part of its rows, and has all of them after STEP: bitwise equal to
    training without."""
    model = {**GPT, **model}
    same = {"optimizer": {"lr": 1e-2, "zero1": True, "clip_grad_norm": 0.5}, "model": model}
    dealt = run_threads(plan_of("1f1b", 2, 2, 1, how={"copies": 2, "sharded": True}, **same), 3)
    plain = run_threads(plan_of("1f1b", 2, 2, 1, how={"copies": 2}, **same), 3)
    assert losses_of(dealt) == losses_of(plain)
    assert norms_of(dealt) == pytest.approx(norms_of(plain), rel=1e-6)
    for one, other in zip(dealt, plain, strict=True):
        for name, p in one.optimizers[WORDS].parameters.items():
            assert torch.equal(p, other.optimizers[WORDS].parameters[name])
    for rank in (0, 1):
        mine, others = (list(map(place_of, dealt[r].optimizers[WORDS].held())) for r in (rank, rank + 2))
        assert sorted({*mine} | {*others}) == sorted(
            map(place_of, plain[rank].features.find(Vocabulary).optimizer.held())
        )
        assert not {*mine} & {*others}, "no piece is stepped twice"


def place_of(held):
    return held.name, held.start, held.tensor.numel()


def test_the_doctor_looks_at_the_layers_of_such_a_plan():
    found = check_up(plan_of("zb-h1", 2, 3, 1, slices=2))
    assert found.fine and found.stages == ("B and W apart, in 2 slices",) * 2


def test_what_a_rank_holds_is_weighed_with_its_rows():
    workers, scales = scaled(plan_of("1f1b", 2, 3, 1), 3)
    for scale, worker in zip(scales, workers, strict=True):
        trained = sum(p.nbytes for one in worker.optimizers.values() for p in one.parameters.values())
        assert scale.held.gradients == trained and scale.held.optimizer >= 2 * trained


def test_nothing_but_layers_draws_while_ranks_are_built():
    """Layers restore the generator; other draws would take numbers from layers of other threads."""
    plan = plan_of("zb-h1", 2, 3, 1)
    before = torch.random.get_rng_state()
    for rank in range(2):
        make_worker(plan, rank)
    assert torch.equal(torch.random.get_rng_state(), before)
