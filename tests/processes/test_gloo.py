"""Four gloo processes compute the same as one process, and the transport keeps its promises."""

import itertools
import math
import threading
import weakref

import pytest
import torch

from tests.composed import apart, written
from tests.processes.gloo_ranks import every, exchanging, one_node, open_network, skewed, train, unpack, without_step
from tests.runtime import test_expert_parallel, test_given_steps, test_nonfinite, test_tensor_parallel, test_ties
from tests.runtime.small_plans import make_plan, make_program, parameters, reference
from tests.runtime.test_gradients import VECTORS, slack
from tests.runtime.test_shared_words import TIED
from tests.runtime.woven import shared_program
from tests.threads import losses_of, norms_of, run_threads
from tests.tiers import few
from zbc.compiler.cost import estimate, pricing
from zbc.compiler.schedules import SCHEDULES
from zbc.errors import ZbcError
from zbc.ir import Message, Op, Placement, Program
from zbc.ops import MAKER, experts_of
from zbc.plan.directory import assemble, meeting, program_of
from zbc.plan.groups import gatherings, swapping
from zbc.runtime.features.groups.units import Braids
from zbc.training.models.experts import Experts

pytestmark = pytest.mark.usefixtures("one_thread_per_kernel")


def same(found, expected, tolerance=0.0):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] is None) == (tensor is None), name
        if tolerance and tensor is not None:
            torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance, msg=name)
        else:
            assert tensor is None or torch.equal(found[name], tensor), name


@pytest.mark.long("1f1b", "chimera-zb")
@pytest.mark.parametrize("schedule", few(SCHEDULES, ("1f1b", "zb-v", "chimera-zb")))
def test_losses_and_gradients_are_those_of_one_process_bit_by_bit(pool, schedule):
    agrees(pool, make_plan(make_program(schedule, 4, 8), keep=without_step), slack(schedule))


def zoo(kind):
    return {"model": {"family": f"tests.runtime.zoo:{kind}", "layers": 4, "loss": "mse"}, **VECTORS}


SEVERAL = {"family": "tests.runtime.user_models:several", "layers": 8, "loss": "mse", "args": {"width": 8, "count": 8}}
STRUCTURED = {**SEVERAL, "family": "tests.runtime.user_models:structured"}
FEATURES = {
    "slices of unequal length": ("zb-v", {"slices": 3}, {"rows": (0, 7, 12, 16)}, 1e-6),
    "recompute": ("zb-v", {}, {"activations": "recompute"}, 0.0),
    "conjugated in name only": ("1f1b", {}, zoo("mirrored"), 0.0),
    "negated in name only": ("1f1b", {}, zoo("negated"), 0.0),
    "not contiguous": ("1f1b", {}, zoo("strided"), 1e-6),
    "several tensors between layers": ("zb-v", {}, {"model": SEVERAL, **VECTORS}, 0.0),
    "dicts and constants, and a backward in one": ("1f1b", {}, {"model": STRUCTURED, **VECTORS}, 0.0),
    "recompute, and a backward in one": ("gpipe", {}, {"activations": "recompute"}, 0.0),
}


@pytest.mark.parametrize("name", few(FEATURES, 6))
def test_what_else_is_sent_has_the_gradients_of_one_process(pool, name):
    schedule, how, options, tolerance = FEATURES[name]
    agrees(pool, make_plan(make_program(schedule, 4, 3 if how else 4, **how), keep=without_step, **options), tolerance)


def test_an_overflow_of_float16_skips_the_step_on_every_process(pool):
    plan = test_nonfinite.plan_of("zb-h1", 2, 2, how={"copies": 2})
    workers, found = run_threads(plan, 6), pool.run(train, plan, 6)
    results = workers[0].results
    assert {one.skipped for one in results} == {True, False}
    assert [losses for losses, *_ in found] == [[one.loss for one in results]] * 4
    assert [[math.isfinite(norm) for norm in norms] for _, norms, *_ in found] == [[not r.skipped for r in results]] * 4
    same(unpack([weights for *_, weights in found]), {n: p.detach() for n, p in parameters(workers).items()})


def test_steps_that_a_dataset_splits_are_weighed_alike_by_all_processes(pool):
    plan = test_given_steps.plan_of("1f1b", 2, 2, dp=2, section=test_given_steps.SUMMED, keep=without_step)
    wanted, found = test_given_steps.alone(plan), pool.run(train, plan, 1)
    assert [losses for losses, *_ in found] == [pytest.approx(wanted.losses, rel=1e-6)] * 4
    same(unpack([grads for _, _, grads, _ in found]), wanted.grads, 1e-6)


def agrees(pool, plan, tolerance=0.0, loss=1e-6):
    expected, found = reference(plan), pool.run(train, plan, 1)
    wanted = [pytest.approx(one, rel=loss) for one in expected.losses] if tolerance else expected.losses
    assert [losses for losses, *_ in found] == [wanted] * 4
    same(unpack([grads for _, _, grads, _ in found]), expected.grads, tolerance)


@pytest.mark.long
@pytest.mark.parametrize("schedule", few(["1f1b", "zb-v"], ("1f1b",)))
def test_weights_that_layers_share_are_summed_over_all_that_hold_them(pool, schedule):
    agrees(pool, test_ties.plan_of(schedule, 4, keep=without_step), 1e-6)


FAST, SLOW = 8.0, 0.01  # Gbit/s inside a node and between nodes


@pytest.mark.long
@pytest.mark.parametrize("choose", few([every, skewed, one_node], 2))
def test_rows_of_experts_cross_to_each_node_once_as_priced(pool, tmp_path, monkeypatch, choose):
    """Two nodes of two processes: forwards have the bits of threads, and weights are those after one step of exchange;
    counts are exchanged once per step of a block. With even loads rows are as many over each link as the price says."""
    monkeypatch.setattr(Experts, "_chosen", choose)
    model = {"experts": 8, "top_k": 3, "seq_len": 56, "balance_loss": 0.0, "router_z_loss": 0.0}
    way = {"schedule": {"kind": "1f1b"}, "model": model, "optimizer": {"kind": "sgd", "lr": 0.1}}
    made, plans = [], []
    for steps, between in ((1, FAST), (2, SLOW)):
        way["hardware"] = {"ranks_per_node": 2, "link_gbps": FAST, "link_us": 0.0, "inter_node_gbps": between}
        both = written(test_expert_parallel.asked(way, pp=1, dp=4, ep=4), tmp_path / str(steps))
        made, plans = [*made, both[0]], [*plans, both[1]]
    assert [plan.manifest.near for plan in plans] == [0, 2]
    (one, two), workers = (pool.run(exchanging, plan, 2, choose) for plan in plans), run_threads(plans[1], 2)
    assert two == pool.run(exchanging, plans[1], 2, choose), "bit by bit"
    assert {own[0][0] for own, *_ in two} == {workers[0].results[0].loss}
    for (numbers, weights, *_), (others, own, sent, counts) in zip(one, two, strict=True):
        assert apart(numbers, others) <= 1e-6 and {*counts.values()} == {2 * 4}  # steps, blocks
        same(unpack([own]), unpack([weights]), 1e-5)
        ms = 32 * 4 * 8 / 1e6 * (sent[True] / SLOW + sent[False] / FAST)
        assert choose is not every or priced(plans[1], made[1].job) == pytest.approx(ms, 1e-3)


def priced(plan, job):
    """ms of two steps."""
    stages = [estimate.layers(job)]
    (one,) = pricing.exchanges(pricing._seated(job, plan.manifest.to_placement(), stages), stages)
    return 2 * plan.manifest.microbatches * (one.forward[0] + one.backward[0])


SHARING = [
    ("1f1b", 1, {"tp": 4}, {}),
    ("zb-v", 2, {"tp": 2}, {}),
    ("zb-v", 2, {"tp": 2, "tp_sequence": True}, {}),
    ("1f1b", 1, {"tp": 2, "dp": 2, "tp_sequence": True, "shard": "optimizer"}, {}),
    ("1f1b", 1, {"cp": 4}, {}),
    ("zb-v", 2, {"cp": 2}, {}),
    ("zb-h1", 2, {"cp": 2}, {"slices": 2}),
    ("interleaved-1f1b", 2, {"cp": 2, "shard": "all"}, {}),
    ("zb-h1", 1, {"cp": 2, "dp": 2}, {"memory": {"activations": "selective"}}),
    ("zb-h1", 1, {"cp": 2, "tp": 2}, {}),
    ("braid-v", 2, {"cp": 2}, {"m": 6}),
]


@pytest.mark.long("zb-v-2-more1-how1", "zb-h1-2-more6-how6")
@pytest.mark.parametrize(("kind", "pp", "more", "how"), few(SHARING, [SHARING[1], *SHARING[5:7]]))
def test_ranks_that_share_layers_or_tokens_find_the_numbers_of_one_process(pool, kind, pp, more, how, tmp_path):
    model = {"model_more": {"layers": 4}}
    plan = test_tensor_parallel.plan_of(tmp_path / "all", kind, pp=pp, more=more, **model, **how)
    m = how.get("m", 4) * more.get("dp", 1)
    (alone,) = run_threads(test_tensor_parallel.plan_of(tmp_path / "one", pp=1, **{**model, **how, "m": m}), 3)
    found = pool.run(train, plan, 3)
    for losses, norms, *_ in found:
        assert losses == pytest.approx(losses_of([alone]), rel=1e-6 if "cp" in more else 1e-5)
        assert norms == pytest.approx(norms_of([alone]), rel=1e-5)
    assert [losses for losses, *_ in found] == [losses for losses, *_ in pool.run(train, plan, 3)], "bit by bit"


def test_groups_in_turns_have_the_bits_of_one_process_per_rank(pool, tmp_path):
    """Over gloo as over a hub, on which the same plan runs one op after the other."""
    how = {"model_more": {"layers": 4}, "m": 6, "schedule_more": {"overlap": True}}
    plan = test_tensor_parallel.plan_of(tmp_path, "dualpipe-v", pp=2, tp=2, **how)
    assert any(op.kind.is_mark for op in plan.program.ranks[0])

    def one_by_one(worker):
        worker.features.of(Braids).one_by_one = True

    alone = run_threads(plan, 2, setup=one_by_one)
    for losses, norms, *_ in pool.run(train, plan, 2):
        assert losses == losses_of(alone)
        assert norms == norms_of(alone)


WORDS = [("1f1b", 2, 1, {}), ("zb-v", 2, 2, {"slices": 2}), ("zb-h1", 4, 1, {}), ("zb-v", 4, 2, {})]


@pytest.mark.parametrize(("schedule", "p", "sums", "how"), few(WORDS, WORDS[:1]))
@pytest.mark.parametrize("staged", few([False, True], [False]))
def test_a_vocabulary_that_all_ranks_share_has_the_gradients_of_one_process(pool, schedule, p, sums, how, staged):
    program = shared_program(schedule, p, 5, sums, copies=4 // p, **how)
    plan = make_plan(program, model=TIED, rows=(0, 9, 16) if how else (), keep=without_step)
    expected, found = reference(plan), pool.run(train, plan, 1, False, staged)
    assert [losses for losses, *_ in found] == [[pytest.approx(expected.losses[0], rel=1e-6)]] * 4
    assert all(norms == found[0][1] for _, norms, *_ in found)
    grads = unpack([grads for _, _, grads, _ in found])
    rows = sorted(name for name in grads if " " in name)
    assert len(rows) == p
    table = torch.cat([grads.pop(name) for name in rows])
    same({**grads, "embed.tokens.weight": table}, expected.grads, 1e-6)
    assert [losses for losses, *_ in pool.run(train, plan, 1, False, staged)] == [losses for losses, *_ in found]


# ---- the transport -------------------------------------------------------------------------------------------


def message(mb, source=0, sink=1):
    return Message(source, sink, mb, 0, 0)


def two_ways(rank, plan):
    """Rank 1 sends to 2, which is late, and then to 0, which receives: whether the tensor sent to 0 was freed."""
    network, left, found = open_network(plan), threading.Event(), None
    if rank == 0:
        network.post(message(0, 1, 0), torch.empty(3), 1)
        network.wait(message(0, 1, 0))
    if rank == 1:
        network.send(message(0, 1, 2), torch.zeros(3), 2)
        tensor = torch.zeros(3)
        weakref.finalize(tensor.untyped_storage(), left.set)
        network.send(message(0, 1, 0), tensor, 0)
        del tensor
        found = left.wait(10)
    network.all_reduce(torch.zeros(1), (0, 1, 2, 3))
    if rank == 2:
        network.post(message(0, 1, 2), torch.empty(3), 1)
        network.wait(message(0, 1, 2))
    network.finish_step()
    return found


def test_what_one_rank_has_taken_does_not_stay_for_another_that_is_late(pool):
    assert pool.run(two_ways, make_plan(make_program("1f1b", 4, 4)))[1]


def broken_protocol(rank, plan):
    """The error message of every misuse, tried on rank 1 without a peer that answers."""
    network = open_network(plan)
    tries = []
    if rank == 1:
        network.post(message(0), torch.empty(1), 0)
        uses = (
            lambda: network.post(message(0), torch.empty(1), 0),
            lambda: network.wait(message(1)),
            lambda: network.send(message(0), torch.empty(1), 3),
            lambda: network.all_reduce(torch.zeros(1), (1, 2)),
            network.finish_step,
        )
        for use in uses:
            with pytest.raises(ZbcError) as raised:
                use()
            tries.append((raised.value.code, raised.value.message))
        network.all_reduce(torch.zeros(1), (1,))  # alone: nothing to do
    if rank == 0:
        network.send(message(0), torch.zeros(1), 1)
    if rank == 1:
        network.wait(message(0))
    network.finish_step()
    return tries


def test_a_broken_protocol_is_refused_in_words(pool):
    found = pool.run(broken_protocol, make_plan(make_program("1f1b", 4, 4)))[1]
    assert found == [
        ("E703", "run: RECV_F s1 m0 was posted twice"),
        ("E703", "run: RECV_F s1 m1 is needed but was not posted"),
        ("E703", "run: the placement has no way from rank 1 to rank 3"),
        ("E703", "run: no group for a sum over ranks (1, 2)"),
        ("E703", "run: received but never used: RECV_F s1 m0"),
    ]


def tags(rank, plan):
    network = open_network(plan)
    m = plan.manifest
    every = [
        Message(*ends, mb, pipe, part)
        for edge in m.to_placement().edges
        for ends in (edge, edge[::-1])
        for mb in range(2 * m.microbatches)  # without a flush those of two steps are in flight
        for pipe in range(len(m.placement[0]))
        for part in range(m.slices)
    ]
    found = [network._tag(one) for one in every]
    return len(every), len(set(found)), min(found), max(found)


def test_every_message_in_flight_has_a_tag_of_its_own(pool):
    plan = make_plan(make_program("1f1b", 4, 4))
    update = {"slices": 3, "microbatches": 5, "placement": [[0, 3], [1, 2], [2, 1], [3, 0]]}
    plan = type(plan)(plan.manifest.model_copy(update=update), plan.program)
    count = 2 * 3 * 2 * 5 * 2 * 3
    assert pool.run(tags, plan) == [(count, count, 0, 2 * count - 2)] * 4  # odd: forwards that run again


def groups(placement, **how):
    return gatherings(bare(placement, **how))


def bare(placement, **how):
    """The manifest of a plan without ops."""
    empty = Program(placement, 1, ((),) * placement.ranks, ("none",), **how)
    layers = [["x"]] * placement.stages
    none = {key: {} for key in ("parameters", "predicted", "planning", "training")}
    ends = [None] * (placement.stages - 1)
    return assemble(empty, layers=layers, boundaries=ends, microbatch_size=1, **none)[0]


def test_only_ranks_that_hold_copies_of_something_get_a_group_to_sum_in():
    assert groups(Placement.vshape(4)) == []
    assert groups(Placement.bidirectional([0, 1, 2, 3])) == [(0, 3), (1, 2)]
    assert groups(Placement.bidirectional([0, 1])) == []  # all ranks have one already
    assert groups(Placement.linear(2), dp=3) == [(0, 2, 4), (1, 3, 5)]
    assert groups(Placement.linear(3), tied=True) == [(0, 2)]
    assert groups(Placement.vshape(2), tied=True, dp=2) == [(0, 2), (1, 3)]
    assert groups(Placement.linear(3), tied=True, dp=2) == [(0, 2, 3, 5), (0, 3), (1, 4), (2, 5)]
    assert groups(Placement.bidirectional([0, 1, 2, 3]), dp=2) == [(0, 3, 4, 7), (1, 2, 5, 6)]
    stages, experts = [(0, 2, 4, 6), (1, 3, 5, 7)], [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert groups(Placement.linear(2), dp=4, ep=2) == sorted(stages + experts)
    assert groups(Placement.linear(2), dp=4, ep=2, dense=(0,)) == sorted(stages + experts[1::2])


@pytest.mark.parametrize(
    "how",
    [
        {"tp": 2, "cp": 2, "dp": 2, "tied": True},
        {"dp": 4, "ep": 2, "averages": 1, "flushless": True, "node": (1, 2)},
        {"dp": 2, "tp": 2, "cp": 2, "ep": 4, "near": 4, "order": (3, 1, 0, 2)},
        {"dp": 2, "tp": 2, "ep": 4, "folded": True, "flushless": True},
    ],
)
def test_ranks_meet_those_with_the_same_layers_or_experts_and_gradients(how):
    """Group by group, from the coordinates of each rank alone."""
    manifest = bare(Placement.linear(2), **how)
    run, together = manifest.topology, program_of(manifest, ((), ())).together // manifest.cp

    def held(rank, experts):
        place, part = run.of(rank), run.part(run.of(rank).at)
        of = (run.sharing(rank).index(rank), part * (not manifest.folded)) if experts else part
        return place.pp, place.dp // together, of

    for rank, experts in itertools.product(range(run.world), (False, True) if manifest.ep else (False,)):
        wanted = tuple(other for other in range(run.world) if held(other, experts) == held(rank, experts))
        stage = run.of(rank).pp
        op = Op(MAKER["total"], experts_of(stage) if experts else stage)
        assert meeting(manifest, op, rank) == wanted
        assert wanted in gatherings(manifest) or len(wanted) in (1, run.world)
        assert {*run.steps(rank)} <= {*swapping(manifest)} or not manifest.ep


@pytest.mark.parametrize("how", [{"dp": 128, "tp": 8}, {"dp": 1024, "ep": 8, "near": 8, "averages": 1}])
def test_the_groups_of_16384_ranks_are_found_in_a_moment(how):
    manifest = bare(Placement.looped(16, 2), **how)
    assert len(gatherings(manifest)) + len(swapping(manifest)) > 1000
