"""Combined features train as one rank with those that change a training; and plans know what their ranks hold."""

from collections import Counter
from functools import partial
from itertools import takewhile

import pytest

from tests.composed import apart, beside, settings, trained, written
from tests.drawn import drawn, in_turn, named, outcome
from tests.refusals import refused
from tests.threads import scaled
from tests.tiers import few
from zbc.compiler.memory.host import host_bytes
from zbc.compiler.memory.ledger import Gradients, ledger
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.sim.simulate import simulate
from zbc.interop import torch_csv
from zbc.ir import Kind
from zbc.ops import TIED
from zbc.training.models.experts import Experts

NEAR = 1e-6
# torch hides this warning while it compiles, which fails if several threads do.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

# By hand, each feature with those that it meets in the code; others are drawn below. * always runs.
TOGETHER = """\
zb-v: adapter, tp, slices, sharded optimizer
zb-h1: adapter, tp_sequence, post-validate, model.ties=true
dualpipe-v: adapter, overlap, adapter.targets=["*","whole lm_head","whole embed.tokens"]
chimera: adapter, sharded gradients, llama
1f1b: adapter, cp, offload, little room
zb-h1: adapter, compile
1f1b: adapter, shared vocabulary, tp, sharded optimizer
zb-h1: adapter, experts, adapter.targets=["q_proj","experts.*"], slices, cp
1f1b: adapter, ep, adapter.targets=["q_proj","experts.*"]
zb-v: experts, adapter.targets=["experts.*"], adapter.rank=4, parallel.tp=2, parallel.ep=2
zb-v: experts, shared vocabulary, model.router="sigmoid"
chimera: experts, recompute, model.family="gpt"
gis: ep, recompute+offload, memory limit, resume
zb-v: copies of experts, sharded gradients
* interleaved-1f1b: copies of experts, sharded all
dualpipe: ep, sharded all, parallel.dp=4
1f1b: folded over nodes, tp_sequence
zb-h1: node limit, recompute, resume
braid-v: ep, cp, parallel.tp=2, parallel.ep=4, parallel.expert_tp=2
dualpipe-v: overlap, ep, parallel.ep=4, parallel.dp=4, hardware.ranks_per_node=2, hardware.inter_node_gbps=0.01
zb-v: ep, tp, cp, shared vocabulary
replicated-1f1b 3: experts, parallel.ep=2, parallel.dp=2, parallel.replicas=[1,2]
1f1b: tp, sharded weights, fewer keys, shared vocabulary
zb-v: tp_sequence, recompute, llama, model.variant="qwen3"
interleaved-1f1b: tp_sequence, sharded optimizer, evaluation
zb-h1: tp_sequence, post-validate, autocast
zb-v 1: tp, windows, four slices, resume
* zb-h1: tp, slices, selective, fewer keys, resume
chimera: tp, dp, tied embeddings, evaluation
zb-v: tp, sharded optimizer, bfloat16 weights
* chimera: tp, sharded optimizer, resume
breadth-first: tp, sharded weights, clip
1f1b: tp, sharded gradients, model.loss="tests.runtime.losses:smoothed"
* replicated-1f1b 3: tp, parallel.replicas=[2,1]
gpipe: tp, parallel.tp=4, tied embeddings, resume
zb-h1: cp, parallel.cp=4, llama, recompute, resume
interleaved-1f1b: cp, tied embeddings, post-validate
chimera: cp, sharded gradients
braid-v: cp, dp, selective
* zb-v 1: cp, windows
* zb-h1: cp, tp_sequence, slices
1f1b: cp, sharded weights, one-sided
zb-v: cp, sharded optimizer, tied embeddings
1f1b: cp, two versions
zb-h1: cp, tp, shared vocabulary, slices, resume
zb-v: cp, slices, selective, llama
zb-h1: cp, balance loss, ramp
chimera: cp, ep, sharded all
zb-v: cp, expert bias, evaluation
zb-h1: cp, bfloat16 weights
1f1b: cp, balance
1f1b: cp, balance, shared vocabulary, llama
zb-v: balance, shared vocabulary, zero1
1f1b: slices, offload, schedule.memory_limit="0.5x"
zb-v: slices, offload, shared vocabulary, little room
interleaved-1f1b: shared vocabulary, offload, tp, little room
replicated-1f1b 4: replicas, slices, tp
v-auto: slices, offload, tp_sequence, shared vocabulary, little room
* zb-v: slices, offload, tp, shared vocabulary, sharded weights, little room, resume
zb-v: offload, compile
1f1b: two versions, compile
gis: two versions, slices, tp, sharded optimizer
interleaved-1f1b: two versions, tp_sequence, ramp
1f1b: two versions, ep, tp, sharded optimizer, parallel.tp=4
1f1b: feedback, tp, slices, sharded optimizer
* 1f1b: average, ramp
zb-v: optimizer.state="bfloat16", sharded optimizer, tp
1f1b: optimizer.state="bfloat16", sharded all
1f1b: moving average, tp, slices, sharded weights
zb-v: moving average, shared vocabulary, sharded optimizer
1f1b: groups by name, tp, sharded all
zb-v: shared vocabulary, sharded all, slices, tied embeddings, clip
zb-v: shared vocabulary, two sums, sharded weights, llama
zb-v: loss by chunks, tp, windows
zb-h1: loss by chunks, tp
zb-h1 4: model.z_loss=0.02, model.label_smoothing=0.1, shared vocabulary, two sums
1f1b: graph, sharded all
zb-h1: graph, compile
1f1b: fused gradients, slices, tp_sequence
zb-v: fused gradients, offload, shared vocabulary, sharded gradients
* 1f1b: two versions, adapter
1f1b: dp, adapter, tied embeddings
zb-h1: adapter, autocast
1f1b: cp, tp, llama, model.variant="qwen3", resume
* zb-h1: optimizer.state="bfloat16", shared vocabulary, zero1
breadth-first: sharded weights, recompute, resume
breadth-first: copies of experts, open activations, schedule.memory_limit="0.8x"
bitpipe: sharded weights, resume
zb-v: one-sided, bfloat16 weights
zb-v: one-sided, tied embeddings, recompute, evaluation, resume
interleaved-1f1b: sharded gradients, bfloat16 weights
1f1b: average, tied embeddings, shared vocabulary
1f1b: average, cp, resume
zb-v: average, adapter
interleaved-1f1b: average, adapter, partition.layers_per_stage=[0,2,2,0]
1f1b: ep, partition.layers_per_stage=[0,4], resume
zb-h1: graph, dp, offload
* zb-h1: dropout, dp
zb-v: slices, evaluation, recompute
* 1f1b: slices, autocast
zb-v: shared vocabulary, evaluation, tp
zb-h1: shared vocabulary, zero1, bfloat16 weights
* 1f1b: shared vocabulary, two sums, tp, resume
* zb-v 4: shared vocabulary, zero1, tied embeddings, resume
* interleaved-1f1b: offload, post-validate, clip, little room
* zb-h1: ramp, dropout, evaluation
* zb-h1: ramp, zero1, tied embeddings
zb-v: ramp, post-validate, clip
1f1b: balance, tp
zb-v: shared vocabulary, sharded gradients
braid-v 4: shared vocabulary, one-sided
hanayo 4: shared vocabulary, sharded all
1f1b-v: shared vocabulary, sharded weights, recompute
bitpipe-zb: sharded all
chimera-zb: one-sided
* dualpipe 4: sharded gradients, resume
gis 4: offload, sharded weights
zb-v: offload, one-sided, memory limit
interleaved-1f1b 4: offload, sharded all
chimera: momentum, resume
zb-h1: post-validate, momentum, resume
zb-v: ep, zero1, post-validate, clip
1f1b: average, ep, parallel.dp=4
* zb-h1: ramp, dp, evaluation
zb-h1: graph, zero1, momentum
zb-h1: balance, post-validate, clip
breadth-first: balance, sharded weights, recompute
zb-v: regather, slices
zb-h1: optimizer.qk_clip=0.01, tp, slices, recompute
zb-v: optimizer.qk_clip=0.01, cp, zero1
1f1b: optimizer.qk_clip=0.01, sharded all, llama
braid-v: optimizer.qk_clip=0.01, tp_sequence
1f1b: optimizer.qk_clip=0.01, ep, post-validate, clip
zb-v: zoo, model.family="tests.runtime.zoo:strided", sharded weights, clip, resume
* interleaved-1f1b: zoo, model.family="tests.runtime.zoo:frozen", sharded all, recompute
chimera: zoo, model.family="tests.runtime.zoo:tied", momentum, dp
zb-h1: zoo, model.family="tests.runtime.zoo:unused", one-sided, resume
* zb-v: zoo, model.family="tests.runtime.zoo:custom", post-validate, zero1, clip
zb-h1: zoo, model.family="tests.runtime.zoo:dropped", ramp, dp, evaluation
interleaved-1f1b: zoo, sharded gradients, momentum
* 1f1b: zoo, model.family="tests.runtime.zoo:averages", recompute, resume""".splitlines()


@pytest.mark.long
@pytest.mark.always(*(line for line in TOGETHER if line.startswith("*")))
@pytest.mark.parametrize("line", TOGETHER)
def test_features_train_together_as_one_rank_does(line):
    """`resume`: from a checkpoint of one rank, and one rank from theirs."""
    found = outcome(named(line.removeprefix("* ")))
    assert found.how == "right", found.why


# ---- memory ----------------------------------------------------------------------------------------------------------

WIDE = {f"model__{key}": value for key, value in {"layers": 4, "hidden": 128, "seq_len": 256, "vocab": 512}.items()}
LLAMA, KINDS = {"model__family": "llama", "model__kv_heads": 2}, ("1f1b", "zb-v", "interleaved-1f1b")
EXPERTS = {**LLAMA, "model__experts": 4, "model__top_k": 2, "model__ffn_hidden": 128}
AGAIN, KEPT = {"memory__activations": "selective"}, {"memory__attention": "keep"}
WEIGHED = [("slices x offload", kind, {}) for kind in KINDS]
WEIGHED += [("slices x offload", "1f1b", {"memory__activations": "selective+offload"})]
WEIGHED += [("slices x offload", "1f1b", LLAMA)]
OPEN = [{"parallel__vocabulary": "shared-2"}, {"model__dtype": "bfloat16", "model__seq_len": 512}, LLAMA]
OPEN += [{"model__ties": True}]
WITH_WORDS = [f"shared vocabulary{more}" for more in ("", " x offload", " x slices", " x slices x offload")]
WEIGHED += [(words, kind, {}) for words in WITH_WORDS for kind in KINDS]
WEIGHED += [(WITH_WORDS[-1], "1f1b", changes) for changes in OPEN]
WEIGHED += [(f"slices x {more}tp_sequence", "1f1b", {"model__hidden": 256}) for more in ("", "offload x ")]
WEIGHED += [(f"{words} x tp", "1f1b", {"model__hidden": 256}) for words in WITH_WORDS]
ADAPTED = [("1f1b", {}), ("zb-v", {}), ("zb-h1", {"parallel__vocabulary": "shared-2"}), ("1f1b", LLAMA)]
WEIGHED += [("shared vocabulary", kind, {"adapter__rank": 4, **how}) for kind, how in ADAPTED]
WEIGHED += [
    (f"offload x sharded {what}", kind, {}) for what, kind in (("weights", "1f1b"), ("weights", "gis"), ("all", "1f1b"))
]
WEIGHED += [("", kind, {**model, **AGAIN}) for model in ({}, LLAMA, EXPERTS) for kind in ("1f1b", "zb-v")]
WEIGHED += [(trait, "1f1b", {**LLAMA, **AGAIN, **KEPT}) for trait in ("", "slices", "tp", "tp_sequence", "autocast")]
WEIGHED += [("offload", "zb-v", {**LLAMA, **KEPT, "memory__activations": "selective+offload"})]
WEIGHED += [(trait, "1f1b", {"optimizer__kind": "muon"}) for trait in ("", "sharded optimizer", "tp")]
WEIGHED += [
    ("fused gradients", kind, {"schedule__microbatch_size": 1, "model__seq_len": 8}) for kind in ("1f1b", "zb-h1")
]
HEADS = [{}, {"model__dtype": "bfloat16"}, LLAMA, {"adapter__rank": 4}, {"memory__activations": "recompute"}]
WEIGHED += [("loss by chunks", "zb-h1", {"model__vocab": 2048, "model__loss_chunk": 32, **how}) for how in HEADS]
WEIGHED += [("", kind, {**EXPERTS, "adapter__rank": 4}) for kind in ("1f1b", "zb-h1")]
WEIGHED += [(trait, kind, LLAMA) for trait, kind in (("cp", "zb-h1"), ("cp x slices", "zb-v"), ("cp", "1f1b"))]
WEIGHED += [("cp", "1f1b", {**LLAMA, **AGAIN}), ("slices", "zb-h1", {"memory__activations": "recompute"})]
UNLIKE = {"schedule__tokens": [256, 96, 160, 32] * 2}
WEIGHED += [(trait, kind, UNLIKE) for trait, kind in (("cp", "1f1b"), ("", "zb-h1"), ("", "zb-v"))]
SPREAD = {**EXPERTS, "parallel__ep": 2, "schedule__microbatches": 4}
WEIGHED += [(f"sharded {what}", kind, SPREAD) for what, kind in (("all", "1f1b"), ("optimizer", "zb-v"))]
WEIGHED += [("", kind, {**SPREAD, "parallel__dp": 2, **AGAIN}) for kind in ("1f1b", "zb-h1")]
NARROW = {"model__dtype": "bfloat16", "model__parameters": "bfloat16", "model__ffn_hidden": [128, 64]}
WEIGHED += [(trait, "zb-h1", {**SPREAD, **AGAIN, **NARROW}) for trait in ("tp", "tp_sequence")]
WEIGHED += [("tp", "1f1b", SPREAD), ("tp_sequence", "zb-h1", {**SPREAD, "model__dtype": "bfloat16"})]
WEIGHED += [(trait, "interleaved-1f1b", {}) for trait in ("one-sided", "sharded gradients", "sharded all")]
LOW = {"model__vocab": 2048, "model__seq_len": 32, "model__dtype": "bfloat16"}
SHORT = ("tied embeddings x sharded weights", "1f1b", LOW)
WEIGHED += [SHORT, ("sharded weights", "chimera", {})]
WEIGHED += [("sharded weights", "interleaved-1f1b", {"memory__resident": 2}), ("sharded all", "bitpipe", {})]
WEIGHED += [("sharded optimizer", "breadth-first", {}), ("sharded all", "chimera", AGAIN)]  # parts of two holders
WEIGHED += [("sharded optimizer x post-validate", "breadth-first", {})]
QUICK = [*(6, 24, 26, 31, 33, 35, 43, 49, 50, 53, 66, 67), WEIGHED.index(SHORT)]


planned = partial(written, tiny=False)


@pytest.mark.parametrize("shard", few(["gradients", "all", "optimizer"], ["gradients"]))
@pytest.mark.parametrize("kind", few(["interleaved-1f1b", "zb-h1", "zb-v", "chimera"], ["interleaved-1f1b", "zb-v"]))
def test_a_plan_knows_after_each_op_what_gradients_there_are(tmp_path, kind, shard):
    """No sum of a stage takes those of a weight that it shares with another stage."""
    both, _ = beside("tied embeddings", f"sharded {shard}", schedule__kind=kind, parallel__pp=2)
    made, plan = planned(both, tmp_path)
    for number, scale in enumerate(scaled(plan)[1]):
        mine = made.program.placement.stages_of(plan.manifest.topology.of(number).pp)
        found = Gradients([s for s in mine if s in made.program.tying], made.costs.run_by(made.program))
        for one in takewhile(lambda one: one.op.stage != TIED, scale.readings):  # until a message holds them
            found.after(one.op, taken=True)
            assert one.held.gradients == pytest.approx(found.bytes, abs=8), one.op


@pytest.mark.long("zb-v-changes1")
@pytest.mark.parametrize(("kind", "changes"), [("interleaved-1f1b", {}), ("zb-v", {**SPREAD, "parallel__dp": 4})])
def test_a_plan_knows_what_messages_and_parts_hold_at_the_end_of_a_step_without_a_barrier(tmp_path, kind, changes):
    both, _ = beside("sharded optimizer", "post-validate", schedule__kind=kind, parallel__pp=2, **changes)
    made, plan = planned(both, tmp_path)
    timeline, scales = simulate(made.program, made.costs), scaled(plan)[1]
    for rank, entries in enumerate(ledger(timeline, made.costs.run_by(made.program))):
        changes = Counter()
        for entry in entries:
            lasting = [delta.bytes for delta in (*entry.begin, *entry.end) if delta.category != "transit"]
            changes[timeline.graph.ops[entry.op]] += sum(lasting)
        replicas, told = plan.manifest.topology.ranks([rank]), made.memory[rank]
        dealt_most = max((scales[replica] for replica in replicas), key=lambda scale: scale.held.optimizer)
        there = told.weights + told.masters + told.optimizer
        for one in dealt_most.readings:
            there += changes[one.op]
            if one.op.kind in (Kind.TENTATIVE, Kind.GATHER):
                held = one.held.weights + one.held.gradients + one.held.masters + one.held.optimizer
                assert held + one.held.activations == pytest.approx(there, abs=1024), one.op  # with its messages


@pytest.mark.long
@pytest.mark.always(*(f"changes{n}" for n in QUICK))
@pytest.mark.parametrize(("traits", "kind", "changes"), WEIGHED)
def test_a_plan_knows_what_ranks_hold(tmp_path, monkeypatch, traits, kind, changes):
    """In one of five runs at least, within 2.5% on the fullest rank: a late message is held longer."""
    monkeypatch.setattr(Experts, "_chosen", in_turn)
    both, _ = beside(*filter(None, traits.split(" x ")), schedule__kind=kind, parallel__pp=2, **(WIDE | changes))
    if "offload" in traits:
        both["schedule"]["memory_limit"] = "0.7x"
    made, plan = planned(both, tmp_path)
    predicted, topology = [rank.bytes for rank in peaks(made.program, made.costs)], plan.manifest.topology
    nearest = [0.0] * len(predicted)
    for _ in range(5):
        scales = scaled(plan)[1]
        for number, scale in enumerate(scales):
            rank = topology.of(number).pp
            nearest[rank] = min(nearest[rank], scale.held.peak, key=lambda size, rank=rank: abs(size - predicted[rank]))
        alike = nearest == pytest.approx(predicted, rel=0.03)
        if alike and max(nearest) == pytest.approx(max(predicted), rel=0.025):
            break
    else:
        pytest.fail(f"ranks hold {nearest}, predicted {predicted}")
    slabs = [host_bytes(made.program, rank, made.costs) for rank in range(len(predicted))]
    first = [scales[topology.ranks([rank])[0]] for rank in range(len(predicted))]
    assert [scale.held.host for scale in first] == pytest.approx(slabs, rel=0.02)
    assert any(slabs) == ("offload" in traits)


@pytest.mark.always
def test_copies_of_a_slice_take_its_share_of_those_of_its_microbatch(tmp_path):
    both, _ = beside("slices", "offload", schedule__slices=4, schedule__memory_limit="0.5x", **WIDE)
    both["schedule"]["cuts"] = "even"
    made, _ = planned(both, tmp_path)
    both["schedule"]["slices"] = 1
    both["schedule"].pop("cuts")
    whole, _ = planned(both, tmp_path)
    for stage in range(4):
        each = [made.costs.of("out", stage, part) for part in range(4)]
        assert each[:3] == pytest.approx([each[0]] * 3, rel=1e-6)
        targets = 8 * both["schedule"]["microbatch_size"] * both["model"]["seq_len"]  # of all, which go with the last
        assert 0 <= each[0] - each[3] <= targets / (1e6 * both["hardware"]["host_gbps"])
        kv = made.costs.bytes_of("kv")[stage]  # which stay, for all slices
        moves = whole.costs.bytes_of("host")[stage]
        assert sum(each) == pytest.approx(whole.costs.of("out", stage) * (moves - kv) / moves, rel=0.02)


@pytest.mark.always
@pytest.mark.parametrize(("trait", "unit"), [("tp_sequence", 2), ("cp", 4)])
def test_slices_are_shared_out_evenly_where_ranks_share_tokens(tmp_path, trait, unit):
    both, _ = beside("slices", trait, schedule__slices=3)
    cuts = planned(both, tmp_path)[1].manifest.cuts
    assert cuts == [0, 12, 22, 32] or (trait == "cp" and cuts[-1] == 32 and not any(cut % unit for cut in cuts))
    both["schedule"]["cuts"] = [11, 11, 10]
    with refused("E103", match=f"no multiples of {unit}", hint="set schedule.cuts = ["):
        planned(both, tmp_path)


@pytest.mark.always
def test_auto_moves_activations_of_slices_where_memory_is_short(tmp_path):
    both, _ = beside("slices", "offload", memory__activations="auto", schedule__memory_limit="0.5x", **WIDE)
    both["hardware"] |= {"host_gbps": 1000.0, "tflops": 0.1}
    made, _ = planned(both, tmp_path)
    assert made.program.slices == 2 and any(op.kind is Kind.OFFLOAD for op in made.program.ranks[0])


@pytest.mark.long
@pytest.mark.parametrize("kind", few(["1f1b", "interleaved-1f1b", "zb-v"], 1))
def test_an_order_from_a_file_makes_room_for_words_that_all_ranks_share(tmp_path, kind):
    plain = settings()
    plain["schedule"]["kind"] = kind
    made, _ = planned(plain, tmp_path)
    (tmp_path / "order.csv").write_text(torch_csv.dumps(made.program))
    both = settings("shared vocabulary")
    both["schedule"] |= {"kind": str(tmp_path / "order.csv")}
    assert apart(trained(both), trained(settings())) <= NEAR


# By the table, a rule of one key with another, a limit; where replicas would meet in other orders, and where two
# versions of the weights are too few.
REFUSED = ("E1", "E3", "E209", "E210")


@pytest.mark.long
@pytest.mark.always("1", "9", "33", "43", "51", "53", "59", "95", "107", "129", "143")
@pytest.mark.parametrize("seed", range(150))
def test_drawn_features_train_alike_or_are_refused(seed):
    one = drawn(seed)
    how, why, *_ = outcome(one)
    assert how == "right" or (how == "refused" and why.startswith(REFUSED)), f"{one.name}: {how}, {why}"
