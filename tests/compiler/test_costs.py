"""Costs: given ones are unchanged, estimated ones follow from counted operations and bytes."""

from dataclasses import replace
from itertools import combinations, pairwise, permutations, product
from operator import add

import pytest

from tests.jobs import FREE, job, per_layer
from tests.refusals import refused
from tests.runtime.small_plans import LLAMA, make_plan, make_program, make_worker
from zbc.compiler import recall
from zbc.compiler.compile import compile_job
from zbc.compiler.cost import estimate, pricing
from zbc.compiler.cost.cost import Costs
from zbc.compiler.cost.machine import Link, Machine, assumed_link
from zbc.compiler.partition.initial import initial
from zbc.ir import Kind, Op, Placement
from zbc.job.flops import keys_seen
from zbc.ops import TIED
from zbc.plan.dealing import most
from zbc.topology import Topology

LINEAR, V = Placement.linear(4), Placement.vshape(4)


def costs(description, placement=LINEAR):
    return pricing.build(description, placement, initial(description, placement))


def comm(found):
    """ms from each stage of the first pipe to the next."""
    return tuple(found.links[0].values())


GIVEN = [  # of ranks, which their chunks share; of stages; of layers, with embedding and head; and of transfers
    ({"f": 8.0, "b": 6.0, "w": 4.0, "comm": 0.5}, V, {"f": (4.0,) * 8, "b": (3.0,) * 8, "w": (2.0,) * 8}),
    ({"f": [2.0, 4.0, 6.0, 8.0], "b": 1.0, "w": 1.0}, V, {"f": (1.0, 2.0, 3.0, 4.0, 4.0, 3.0, 2.0, 1.0)}),
    (
        {"per": "stage", "f": [1.0, 2.0, 3.0, 4.0], "b": 1.0, "w": 0.5},
        LINEAR,
        {"f": (1.0, 2.0, 3.0, 4.0), "b": (1.0,) * 4},
    ),
    (
        per_layer(8, (1.0, 2.0, 3.0), embed=(0.5, 0.0, 0.0), head=(0.0, 0.0, 9.0)),
        LINEAR,
        {"f": (2.5, 2.0, 2.0, 2.0), "w": (6.0, 6.0, 6.0, 15.0)},
    ),
]


@pytest.mark.parametrize(("given", "placement", "wanted"), GIVEN)
def test_given_times_are_those_of_stages_and_transfers_not_given_take_none(given, placement, wanted):
    found = costs(job(costs=given, partition={"layers_per_stage": "equal"}), placement)
    assert found.source == "given" and {name: found.column(name) for name in wanted} == wanted
    assert comm(found) == tuple(given.get("comm", 0.0) * (a != b) for a, b in pairwise(placement.pipes[0]))
    assert found.units("kept") == (1 / placement.chunks,) * placement.stages


def test_activation_units_are_shares_of_one_rank_whatever_unit_was_given():
    given = costs(job(costs={"f": 1.0, "b": 1.0, "w": 1.0, "act_b": 34.0, "act_w": 17.0}), V)
    assert given.units("kept") == pytest.approx((0.5,) * 8)
    assert given.units("left") == pytest.approx((0.25,) * 8)


@pytest.mark.long
def test_estimates_follow_from_flops_when_arithmetic_is_the_limit(no_launches):
    """24 h^2 + 4 h c per token forward, 24 h^2 + 10 h c backward, 24 h^2 for the weights; head 2 h V each."""
    big = job(
        model={"hidden": 1024, "heads": 16, "seq_len": 512, "vocab": 50000},
        schedule={"microbatch_size": 4},
        hardware={"device": "cuda", "tflops": 100.0, "memory_gbps": 1e9},
    )
    table = estimate.layers(big)
    h, keys, tokens = 1024, (512 + 128) / 2 / 0.7, 4 * 512  # attention at 0.7 of the rate of products
    per_ms = 100e12 / 1e3
    block, head = table[1], table[-1]
    assert block.f == pytest.approx((24 * h * h + 4 * keys * h) * tokens / per_ms, rel=1e-4)
    assert block.b == pytest.approx((24 * h * h + 10 * keys * h) * tokens / per_ms, rel=1e-4)
    assert block.w == pytest.approx(24 * h * h * tokens / per_ms, rel=1e-4)
    assert head.f == pytest.approx(2 * h * 50000 * tokens / per_ms, rel=1e-4)
    assert block.params == 12 * h * h + 13 * h
    assert [layer.name for layer in table] == ["embed", *(f"layers.{i}" for i in range(8)), "head"]


NODES = {"device": "cuda", "link_gbps": 800.0, "link_us": 0.0, "inter_node_gbps": 80.0}


@pytest.mark.long
def test_a_message_is_a_part_of_the_ops_that_send_and_take_it_at_both_of_its_ends():
    times = {"f": 1.0, "b": 2.0, "w": 3.0, "comm": 0.5}
    plain, timed = (costs(job(costs={**times, **more})) for more in ({}, {"message": 0.25}))
    assert comm(timed) == comm(plain) == (0.5,) * 3
    assert timed.column("f") == (1.25, 1.5, 1.5, 1.25) and timed.column("b") == (2.25, 2.5, 2.5, 2.25)
    assert timed.column("w") == plain.column("w") and timed.column("bw") == (5.25, 5.5, 5.5, 5.25)
    folded = costs(job(costs={**times, "message": 0.25}), V)  # stages 3 and 4 are on one rank
    around = [2 * (ms - 0.5) for ms in folded.column("f")]
    assert around == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 0.5])
    sliced = costs(job(costs={**times, "message": 0.25}, schedule={"slices": 4}))
    assert sliced.column("f") == pytest.approx((2.0, 3.0, 3.0, 2.0)), "each of the four slices has messages of its own"


def test_a_message_costs_a_constant_of_the_host_and_a_share_of_the_time_its_link_is_busy():
    """Not of the latency, in which nothing is moved. Of the busy time each end takes its share, and not the link."""
    size = 2 * 16 * 32 * 4
    for device, us, share in (("cuda", 15.0, 0.06), ("cpu", 15.0, 0.7)):
        hardware = {"device": device, "link_gbps": 0.08, "link_us": 5000.0}
        busy = size / 1e4
        free, timed = (costs(job(hardware=hardware, costs=each)) for each in (FREE, {}))
        added = [a - b for a, b in zip(timed.column("f"), free.column("f"), strict=True)]
        one = us / 1e3 + share * busy
        assert added == pytest.approx([one, 2 * one, 2 * one, one]), device
        assert comm(timed) == pytest.approx((max(0.0, 5.0 + (1 - 2 * share) * busy),) * 3)


def test_given_times_cost_what_a_trainer_takes_for_a_message_only_if_that_is_said():
    times = {"f": 1.0, "b": 2.0, "w": 3.0, "comm": 0.5}
    assert "messages" not in costs(job(costs=times)).ms
    assert "messages" not in costs(job(model={"family": "my.net:layers"}, data={"kind": "my.net:data"})).ms


def test_unless_it_is_said_what_the_ranks_are_linked_by_a_plan_says_what_it_takes_them_to_be():
    assert assumed_link(job(hardware={"device": "cuda"})).startswith("200 Gbit/s and 10 us, a network's; inside a node")
    assert assumed_link(job()).startswith("20 Gbit/s and 700 us, gloo's")
    known = [{"gpu": "h100"}, {"device": "cuda", "link_gbps": 300.0}]
    assert [assumed_link(job(hardware=each)) for each in known] == [None, None]
    assert assumed_link(job(pp=1)) is assumed_link(job(costs={"comm": 1.0})) is None


def test_only_boundaries_that_leave_a_node_pay_for_the_link_between_nodes():
    size = 2 * 16 * 32 * 4
    near, far = size / 1e8, size / 1e7
    for node, expected in ((2, (near, far, near)), (3, (near, near, far)), (1, (far,) * 3), (4, (near,) * 3)):
        estimated = costs(job(hardware={**NODES, "ranks_per_node": node}, costs=FREE))
        assert comm(estimated) == pytest.approx(expected), node
    folded = costs(job(hardware={**NODES, "ranks_per_node": 2}, costs=FREE), V)  # ranks 0 1 2 3 3 2 1 0
    assert comm(folded) == pytest.approx((near, far, near, 0.0, near, far, near))
    same = {key: value for key, value in NODES.items() if not key.startswith("inter")}
    assert comm(costs(job(hardware={**same, "ranks_per_node": 2}, costs=FREE))) == pytest.approx((near,) * 3)


@pytest.mark.parametrize("inner", [(1, 1), (1, 2), (3, 1)])
@pytest.mark.parametrize("node", [1, 2, 3, 4, 24])
@pytest.mark.parametrize("order", [(), (3, 0, 7, 1, 6, 2, 5, 4)])
def test_the_slowest_link_among_ranks_is_that_of_all_their_pairs(inner, node, order):
    run = Topology(4, 2, inner=inner, order=order)
    machine = replace(Machine.of(job()), near=Link(9.0, 9.0), far=Link(1.0, 1.0), node=node, topology=run)
    for ranks in (some for n in range(1, 5) for some in combinations(range(4), n)):
        seats = product(range(2), run.every, permutations(ranks, 2))
        each = {machine.between(run.rank(dp, a, at), run.rank(dp, b, at)) for dp, at, (a, b) in seats} or {machine.near}
        assert machine.link(ranks) == (max(each).latency, min(each).speed)


def test_sums_over_copies_take_the_slowest_link_of_their_ring():
    """Copies of two ranks: on nodes of four two of them share a node, and all four do not."""
    made = (job(parallel={"pp": 2, "dp": dp}, hardware={**NODES, "ranks_per_node": 4}) for dp in (2, 4))
    inside, outside = (costs(replace(one, node=(2, 2)), Placement.linear(2)) for one in made)
    gradients = inside.bytes[1].gradients
    assert inside.of("reduce", 1) == pytest.approx(gradients / 1e8)
    assert outside.of("reduce", 1) == pytest.approx(2 * 3 / 4 * gradients / 1e7)


@pytest.mark.long
def test_kernels_run_one_after_another_and_each_meets_its_own_limit(no_launches):
    """A memory-bound norm is not hidden by a compute-bound product: halving arithmetic leaves its time."""
    sizes = {"model": {"hidden": 1024, "heads": 16, "seq_len": 512, "vocab": 1000}}
    exact = {"device": "cuda"}
    slow, fast, free = (
        estimate.layers(job(**sizes, hardware={**exact, "tflops": tflops, "memory_gbps": memory}))[1]
        for tflops, memory in ((100.0, 1000.0), (1e6, 1000.0), (100.0, 1e9))
    )
    tokens = 2 * 512
    # 10 h of norms and residual sums and 2 f of GELU; weights and two numbers a token of two norms: in four bytes
    touched = 4 * (18 * 1024 * tokens + 2 * (2 * 1024 + 2 * tokens)) / 1e9
    assert slow.f == pytest.approx(free.f + touched, rel=1e-5)
    assert touched < fast.f < slow.f < free.f + fast.f  # products are memory-bound, too, if arithmetic is free


def test_kernels_have_a_start_and_attention_whole_tiles():
    found = estimate.layers(job(hardware={"tflops": 1e6, "memory_gbps": 1e9}))[1]
    assert found.f == pytest.approx(10 * 0.005, rel=0.01)  # 4 products, attention, 2 norms, 2 sums and GELU
    # torch's CPU kernel, measured with and without is_causal: 1.00 at 256, 0.75 at 1024, 0.62 at 2048 tokens.
    shares = [keys_seen(length, 512) / length for length in (256, 1024, 2048)]
    assert shares == [1.0, 0.75, 0.625]
    assert keys_seen(10**12, 128) == pytest.approx(10**12 / 2)  # without a look at each tile
    assert keys_seen(700, 512) == pytest.approx((512 * 512 + 188 * 700) / 700)


def test_an_optimizer_step_takes_the_memory_traffic_of_every_built_in_family():
    for family in ("gpt", "llama"):
        estimated = costs(job(model={"family": family}, hardware={"memory_gbps": 1.0}))
        params = [s.gradients / 4 for s in estimated.bytes]
        assert estimated.column("step") == pytest.approx([28 * count / 1e6 for count in params])


@pytest.mark.long
def test_experts_multiply_parameters_and_only_those_a_token_meets_its_operations(no_launches):
    """Mixtral 8x7B: 46.7 billion parameters, 12.9 billion active per token (arXiv 2401.04088)."""
    sizes = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336, "vocab": 32000}
    model = {"family": "llama", "seq_len": 4096, **sizes, "dtype": "bfloat16"}
    exact = {"device": "cuda", "tflops": 1.0, "memory_gbps": 1e9}
    table = estimate.layers(job(model={**model, "experts": 8, "top_k": 2}, hardware=exact))
    assert sum(layer.params for layer in table) == pytest.approx(46.7e9, rel=0.001)
    tokens = 2 * 4096
    met = (32 * table[1].w + table[-1].w) / (2 * tokens / 1e9)  # two operations per weight that a token meets
    assert met + 32000 * 4096 == pytest.approx(12.9e9, rel=0.005)  # and its row of the embedding
    eight = estimate.layers(job(model={**model, "experts": 8, "top_k": 8}, hardware=exact))[1]
    assert eight.w == pytest.approx(table[1].w + 6 * 3 * 2 * 4096 * 14336 * tokens / 1e9, rel=1e-3)


@pytest.mark.long("{'adapter': {'rank': 4}}", "{'schedule': {'slices': 2}}")
@pytest.mark.parametrize("more", [{}, {"adapter": {"rank": 4}}, {"schedule": {"slices": 2}}], ids=str)
def test_a_stage_that_runs_again_gathers_no_tokens_a_third_time(more):
    """Its second forward keeps all that a plain one would; so do the stages named, and no others."""
    model = {"family": "llama", "hidden": 64, "heads": 4, "dtype": "bfloat16", "parameters": "bfloat16"}

    def sizes(again, part):
        how = {"model": model, "memory": {"activations": again}, "parallel": {"tp": 2, "tp_sequence": part, "pp": 2}}
        how["partition"] = {"layers_per_stage": "equal"}
        return compile_job(job(kind="1f1b", layers=4, data={"kind": "synthetic"}, **how, **more)).costs.bytes

    assert sizes("recompute", "regather") == sizes("recompute", True)
    kept, second, plain = sizes({"1": "recompute"}, "regather"), sizes("recompute", True), sizes("keep", True)
    assert kept[1].needs["bw"] == second[1].needs["bw"] and kept[0].share < plain[0].share


@pytest.mark.long
def test_the_loss_passes_over_the_logits_as_often_as_docs_costs_says(no_launches):
    slow = {"device": "cuda", "tflops": 1e9, "memory_gbps": 1.0}
    tokens, h, vocab = 2 * 16, 32, 25600
    for low, n, cast in (({}, 4, 0), ({"dtype": "bfloat16", "parameters": "bfloat16"}, 2, 6)):
        head = estimate.layers(job(model={**low, "vocab": vocab}, hardware=slow))[-1]
        product = n * (tokens * (h + vocab) + h * vocab)
        norm = h * tokens * (2 * 4 + 2 * cast), h * tokens * (5 * 4 + 2 * cast)
        assert 1e6 * head.f == pytest.approx(product + norm[0] + (12 + cast) * vocab * tokens, rel=1e-3)
        assert 1e6 * head.b == pytest.approx(product + norm[1] + (20 + cast) * vocab * tokens, rel=1e-3)
        assert 1e6 * head.w == pytest.approx(product + (12 + cast) * h * vocab)


def test_a_stage_that_recomputes_takes_its_forward_once_more_in_b_and_keeps_inputs_only():
    plain, every = (costs(job(costs=FREE, memory={"activations": how})) for how in ("keep", "recompute"))
    # But for the look-up of a microbatch's tokens and of its targets: three kernels that move few bytes.
    forward = [ms - (stage in (0, 3)) * (3 * 5e-3 + 784 / 20e6) for stage, ms in enumerate(plain.column("f"))]
    assert every.column("b") == pytest.approx(tuple(map(add, plain.column("b"), forward)))
    assert [every.column(name) for name in ("f", "w")] == [plain.column(name) for name in ("f", "w")]
    assert every.units("left") == plain.units("left")
    kept, left = every.bytes_of("kept"), every.bytes_of("left")
    tokens = 16 * 2
    inputs = 4 * 32 * tokens  # of a block: float32, hidden
    assert kept[3] == 3 * inputs + 8 * tokens  # of the head, and the targets
    assert kept[1] == 2 * inputs and kept[0] == 8 * tokens + 2 * inputs
    for s in range(4):
        share = kept[s] / plain.bytes_of("kept")[s]  # units stay those of all activations
        assert every.units("kept")[s] == pytest.approx(share * plain.units("kept")[s])
    assert left[1] == plain.bytes_of("left")[1] > kept[1]


WITH_SUMS = [  # sums of layers hide behind the W of a BW, gathers do not; both run again with what is made again
    ({"tp": 0.5}, {"tp": 2}, "keep", [8.5, 6.5, 2.0, 8.0]),
    ({"tp": 3.0}, {"tp": 2}, "keep", [11.0, 9.0, 2.0, 9.0]),
    ({"tp": 0.5}, {"tp": 2}, "recompute", [8.5, 6 + 8 + 1, 2.0, 16.5]),
    ({"tp": 3.0}, {"tp": 2}, "recompute", [11.0, 6 + 8 + 6, 2.0, (8 + 3) + max(6 + 3, 6 + 2)]),
    ({"tp": 0.5, "cp": 1.0}, {}, "keep", [8.0, 6.0, 2.0, 8.0]),
    ({}, {"tp": 2}, "keep", [8.0, 6.0, 2.0, 8.0]),
    ({"tp": 0.5, "cp": 1.0}, {"tp": 2, "cp": 2}, "keep", [9.5, 7.5, 2.0, 8.0]),
    ({"tp": 0.5, "cp": 1.0}, {"cp": 2}, "recompute", [9.0, 6 + 8 + 2.0, 2.0, 8 + 1 + 6 + 2]),
]


@pytest.mark.long("times6-parallel6-keep-wanted6")
@pytest.mark.parametrize(("times", "parallel", "activations", "wanted"), WITH_SUMS)
def test_sums_and_gathers_lengthen_ops(times, parallel, activations, wanted):
    times = {"f": 8.0, "b": 6.0, "w": 2.0, **times}
    found = costs(job(parallel=parallel, costs=times, memory={"activations": activations}))
    assert [found.of(column) for column in ("f", "b", "w", "bw")] == wanted


@pytest.mark.long
def test_attention_that_runs_again_gathers_once_more_and_sums():
    given, how = (
        {"f": 8.0, "b": 6.0, "w": 2.0, "tp": 0.5},
        {"parallel": {"cp": 2}, "memory": {"activations": "selective"}},
    )
    spared, free = (costs(job(costs={**given, "cp": ms}, **how)) for ms in (1, 0))
    assert spared.of("b") == pytest.approx(free.of("b") + 2.0)


@pytest.mark.long
def test_the_first_all_to_all_of_a_bw_waits_unless_a_w_is_there_by_then():
    """F = 8, B = 6, W = 4, and all-to-alls of 2 in each; the last of four stages has the head."""
    model = {"family": "llama", "layers": 8, "experts": 4, "top_k": 2}
    how = {"parallel": {"dp": 2, "ep": 2}, "costs": {"f": 8.0, "b": 6.0, "w": 4.0, "ep": 2.0}}
    plain, shared = (costs(job(model=model | more, **how)) for more in ({}, {"ffn_hidden": [256, 32]}))
    counts = [sum(bool(layer.apart) for layer in estimate.layers(job(model=model, **how)))]
    assert counts == [8]
    bw = [plain.of("bw", stage) for stage in range(4)]
    assert bw[1] == bw[2] == 10 + 2 / 2 / 2 and bw[3] == 10  # of two blocks
    assert [shared.of("bw", stage) for stage in range(4)] == [10.0] * 4
    assert [plain.of(column, 1) for column in ("f", "b", "w", "bw_waits")] == [10.0, 8.0, 4.0, 0.5]


@pytest.mark.long
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_bw_of_a_slice_hides_its_own_sums(activations):
    """F = 8, B = 6, W = 2 and sums of 1.5 of a microbatch; the slice's share of F and B differs from that of W and of
    the sums, which is that of its tokens."""
    given = {"schedule": {"slices": 3}, "model": {"seq_len": 999}, "memory": {"activations": activations}}
    found = costs(job(parallel={"tp": 2}, costs={"f": 8.0, "b": 6.0, "w": 2.0, "tp": 1.5}, **given))
    waits = 0.0
    for part in range(3):
        f, b, w, bw = (found.of(column, 1, part) for column in ("f", "b", "w", "bw"))
        sums, again = 1.5 * w / 2, f if activations == "recompute" else 0.0
        share = (f - sums) / 8
        assert b == pytest.approx(again + 6 * share + sums)
        assert bw == pytest.approx(again + 6 * share + max(sums, w))
        repeated = sums if again else 0.0
        assert found.of("bw_waits", 1, part) == pytest.approx(repeated + max(0.0, sums - w))
        waits += max(0.0, 1.5 * share - w)
    assert sum(found.of("f", 1, part) for part in range(3)) == pytest.approx(9.5) and waits > 0


@pytest.mark.parametrize(("tp", "percent", "ms"), [(0.5, 50, 7.0), (0.5, 20, 6.5), (0.5, 75, 7.5), (3.0, 50, 9.0)])
def test_a_frozen_bw_waits_for_the_sums_that_its_w_hid(tp, percent, ms):
    """B = 6 and W = 2: B + a, or B + the remaining part of W."""
    given = costs(job(parallel={"tp": 2}, costs={"f": 8.0, "b": 6.0, "w": 2.0, "tp": tp}))
    assert given.duration(Op(Kind.BW, 0, share=percent)) == max(6 + tp, 6 + 2 * percent / 100) == ms
    assert given.duration(Op(Kind.W, 0, share=percent)) == pytest.approx(2 * percent / 100)


@pytest.mark.long
def test_parts_of_layers_take_their_part_of_time_and_memory(no_launches):
    wide = {"layers": 8, "hidden": 512, "heads": 8, "vocab": 4096, "seq_len": 256}
    fast = {"link_gbps": 1e6, "link_us": 0.0}
    whole, half = (costs(job(model=wide, parallel={"tp": tp}, hardware=fast)) for tp in (1, 2))
    for stage in range(4):
        assert half.of("w", stage) == pytest.approx(whole.of("w", stage) / 2, rel=0.05)
        assert half.bytes[stage].weights == pytest.approx(whole.bytes[stage].weights / 2, rel=0.05)
        assert half.bytes[stage].optimizer == pytest.approx(whole.bytes[stage].optimizer / 2, rel=0.05)
        assert 0.5 < half.bytes_of("kept")[stage] / whole.bytes_of("kept")[stage] < 0.9
    slow = costs(job(model=wide, parallel={"tp": 2}, hardware={**fast, "link_us": 1000.0}))
    more = [slow.of("f", s) - half.of("f", s) for s in range(4)], [slow.of("b", s) - half.of("b", s) for s in range(4)]
    # Of two blocks each, of the look-up, and of the output layer: its numbers of the loss, the gradient of its input.
    assert more == ([pytest.approx(ms) for ms in (5, 4, 4, 5)], [pytest.approx(ms) for ms in (4, 4, 4, 5)])


@pytest.mark.long
def test_ranks_that_share_tokens_take_their_part_and_gather_keys_and_values(no_launches):
    """Half of linear layers and attention each; weights stay whole, and keys and values of all tokens are kept."""
    wide = {"family": "llama", "layers": 8, "hidden": 512, "heads": 8, "kv_heads": 2, "vocab": 4096, "seq_len": 2048}
    fast = {"link_gbps": 1e6, "link_us": 0.0}
    whole, half = (costs(job(model=wide, parallel={"cp": cp}, hardware=fast, costs=FREE)) for cp in (1, 2))
    for stage in range(4):
        for column in "fbw":
            assert half.of(column, stage) == pytest.approx(whole.of(column, stage) / 2, rel=0.02)
        assert half.bytes[stage].optimizer == whole.bytes[stage].optimizer
        assert half.bytes[stage].behind == whole.bytes[stage].behind / 2
        assert 0.45 < half.bytes_of("kept")[stage] / whole.bytes_of("kept")[stage] < 0.55
    size, gbps = 2 * 2 * 2048 * 128 * 4, 8.0  # keys and values of 2 sequences, of all tokens
    near = {**fast, "link_gbps": gbps, "link_us": 100.0}
    slow = costs(job(model=wide, parallel={"cp": 2}, hardware=near, costs=FREE))
    each = 0.1 + size / 2 / (gbps * 1e6 / 8)
    for column in "fb":
        assert [slow.of(column, s) - half.of(column, s) for s in range(4)] == [pytest.approx(2 * each, rel=1e-3)] * 4
    assert slow.of("w") == half.of("w")


def test_given_times_and_activations_follow_the_same_rule():
    given = {"costs": {"f": 3.0, "b": 2.0, "w": 1.0, "act_b": 10.0}}
    kept, again = costs(job(**given)), costs(job(**given, memory={"activations": "recompute"}))
    assert again.column("b") == (5.0,) * 4
    assert [again.column(name) for name in ("f", "w")] == [kept.column(name) for name in ("f", "w")]
    estimated, less = costs(job()), costs(job(memory={"activations": "recompute"}))
    for s in range(4):
        share = less.bytes_of("kept")[s] / estimated.bytes_of("kept")[s]
        assert again.units("kept")[s] / kept.units("kept")[s] == pytest.approx(share)
    factory = {"model": {"family": "a:b", "layers": 8}, "data": {"kind": "c:d"}}
    unknown = costs(job(**factory, **given, memory={"activations": "recompute"}))
    assert unknown.units("kept") == (1.0,) * 4 and unknown.column("b") == (5.0,) * 4


def bytes_of(placement=None, **changes):
    return costs(job(**{"parallel": {"pp": 2}, **changes}), placement or Placement.linear(2))


def test_zero1_shares_out_the_optimizer_state_and_nothing_else():
    whole, parts = (bytes_of(parallel={"pp": 2, "dp": 4}, optimizer={"zero1": zero1}) for zero1 in (False, True))
    table = estimate.layers(job())
    cut = initial(job(parallel={"pp": 2}), Placement.linear(2))
    for one, part, layers in zip(whole.bytes, parts.bytes, cut, strict=True):
        dealt, _ = most((count for i in layers for count in table[i].parts), 4)
        assert part.optimizer == pytest.approx(8 * dealt) == pytest.approx(one.optimizer / 4, rel=0.01)
        assert (part.weights, part.gradients) == (one.weights, one.gradients)
    assert parts.column("gather") == parts.column("reduce") and not any(whole.column("gather"))
    assert parts.of("reduce") < whole.of("reduce")


def test_sums_of_zero1_take_as_long_as_if_each_copy_were_dealt_as_much_as_the_one_that_gets_most():
    changes = {"model": {"vocab": 3000}, "layers": 2, "hardware": {"link_us": 0}, "parallel": {"pp": 1, "dp": 3}}
    whole, parts = (bytes_of(Placement.linear(1), optimizer={"zero1": zero1}, **changes) for zero1 in (False, True))
    counts = [count for one in estimate.layers(job(**changes)) for count in one.parts]
    row, _ = most(counts, 3)
    assert row == 3000 * 32 > 1.1 * sum(counts) / 3  # the embedding alone is more than a third
    assert parts.of("reduce") / whole.of("reduce") == pytest.approx(3 * row / sum(counts) / 2)
    assert parts.column("gather") == parts.column("reduce")


def test_an_entry_of_a_column_may_say_what_each_slice_costs():
    """Attention reads all tokens before: a later slice takes longer."""
    sliced = Costs.uniform(Placement.linear(2)).with_ms(f=((1.0, 2.0), 5.0), b=((1.5, 2.5), 4.0), w=(0.5, (1.0, 2.0)))
    assert [sliced.of("f", stage, part) for stage in (0, 1) for part in (0, 1)] == [1.0, 2.0, 5.0, 5.0]
    assert sliced.duration(Op(Kind.F, 0, 3, slice=1)) == 2.0 and sliced.duration(Op(Kind.W, 1, 0, slice=1)) == 2.0
    assert [sliced.duration(Op(Kind.BW, 0, 0, slice=part)) for part in (0, 1)] == [2.0, 3.0]
    assert [sliced.duration(Op(Kind.BW, 1, 0, slice=part)) for part in (0, 1)] == [5.0, 6.0]
    assert sliced.column("f") == (3.0, 5.0) and sliced.column("bw") == (5.0, 11.0)
    whole = sliced.joined()
    assert whole.column("b") == (5.0, 11.0) and whole.of("b", 0, 1) == 3.0 and not any(whole.column("w"))
    fused = sliced.with_ms(bw=((1.75, 3.0), 4.5)).least()
    assert [fused.of("w", stage, part) for stage in (0, 1) for part in (0, 1)] == [0.25, 0.5, 0.5, 0.5]


def test_what_a_plan_of_slices_costs_is_not_guessed():
    manifest = compile_job(job()).assemble()[0]
    assert recall.costs_of(manifest).stages == 4
    with refused("E110", match="into 2 slices"):
        recall.costs_of(manifest.model_copy(update={"slices": 2}))


def test_a_tied_weight_is_held_by_both_ends_and_once_where_they_share_a_rank():
    """256 x 32 numbers; every holder steps its whole copy."""
    size = 4 * 256 * 32
    tied = {"ties": True}
    apart, alike = bytes_of(), bytes_of(model=tied)
    assert [s.weights for s in apart.bytes] == [s.weights for s in alike.bytes]
    assert [one.bytes_owned(TIED).summed for one in (alike, apart)] == [size, 0.0]
    assert alike.of("reduce", TIED) > 0.0 == apart.of("reduce", TIED)
    v = Placement.vshape(2)
    apart, alike = bytes_of(v), bytes_of(v, model=tied)
    saved = [one.weights - both.weights for one, both in zip(apart.bytes, alike.bytes, strict=True)]
    assert saved == [0.0, 0.0, 0.0, size] and alike.of("reduce", TIED) == 0.0
    copies = {"parallel": {"pp": 2, "dp": 2}, "optimizer": {"zero1": True}}
    shared = bytes_of(model=tied, **copies).bytes[0]
    assert shared.optimizer == pytest.approx((2 * shared.weights - 8 * 32 - 2 * size) / 2 + 2 * size, rel=0.01)
    single = bytes_of(Placement.linear(1), model=tied, parallel={"pp": 1}).bytes[0]
    assert bytes_of(Placement.linear(1), parallel={"pp": 1}).bytes[0].weights - single.weights == size


@pytest.mark.long
def test_linear_layers_in_fp8_take_half_of_what_arithmetic_takes_and_runs_refuse_it(no_launches):
    """On a GPU with free memory traffic, a block each on four ranks: attention and the head are unchanged."""
    model = {"family": "llama", "hidden": 512, "heads": 8, "seq_len": 512, "dtype": "bfloat16"}
    free = {"device": "cuda", "tflops": 1.0, "memory_gbps": 1e6}
    plain, fp8 = (costs(job(layers=4, model={**model, "dtype": how}, hardware=free)) for how in ("bfloat16", "fp8"))
    half = plain.column("w")[1] / 2
    assert fp8.column("w")[1] == pytest.approx(half, rel=1e-2)
    for name in ("f", "b", "w"):
        saved = [a - b for a, b in zip(plain.column(name), fp8.column(name), strict=True)]
        assert saved == pytest.approx([half] * 4, rel=1e-2)
    with refused("E110", "for plans alone"):
        make_worker(make_plan(make_program("1f1b", 2, 2), model={**LLAMA, "dtype": "fp8"}))
