"""Plans of adapters: time and memory saved by frozen weights, and the costs of adapters."""

from dataclasses import replace

import pytest

from tests.jobs import job, write_job
from tests.profiles import layer, nbytes, profile_of
from tests.refusals import refused
from tests.runtime.test_measure import CASES, both, weighed
from tests.tiers import dealt, few
from zbc.commands.summary import adapter_lines
from zbc.compiler.compile import compile_job
from zbc.compiler.cost import estimate
from zbc.compiler.shapes import load_job
from zbc.ir import Kind
from zbc.plan.headline import headline

GPU = {"device": "cuda", "memory_gib": 24, "tflops": 400, "link_gbps": 1200, "link_us": 10}
LLAMA_8B = {"family": "llama", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336}
LLAMA_8B |= {"vocab": 128256, "seq_len": 4096, "dtype": "bfloat16", "parameters": "bfloat16"}
EIGHT = {"model": LLAMA_8B, "hardware": GPU, "memory": {"activations": "auto"}, "pp": 4, "m": 16, "layers": 32}


def llama_8b(**changes):
    return job(**{**EIGHT, "kind": "1f1b", **changes})


@pytest.mark.long
def test_llama_8b_at_rank_16_fits_where_all_weights_do_not():
    with refused("E301"):
        compile_job(llama_8b(), budget=0.0, suggest=False)
    found = compile_job(llama_8b(adapter={"rank": 16}), budget=0.0, suggest=False).report
    assert max(rank.peak_bytes for rank in found.per_rank) < 24 * 2**30
    adapter = found.adapter
    block = 16 * (4096 + 4096 + 4096 + 1024 + 4096 + 1024 + 4096 + 4096 + 2 * (4096 + 14336) + 14336 + 4096)
    assert adapter.trained == 32 * block == 41_943_040
    assert adapter.whole == 8_030_261_248  # as its card says
    assert adapter.whole_ms > found.makespan_ms
    assert adapter.whole_bytes > 24 * 2**30 > max(rank.peak_bytes for rank in found.per_rank)
    for rank in found.per_rank:  # two bytes per weight, and 4 + 4 + 8 per trained one
        trained = rank.gradient_bytes / 4
        assert (rank.master_bytes, rank.optimizer_bytes) == pytest.approx((4 * trained, 8 * trained))
        assert trained < 0.01 * rank.weight_bytes / 2
    assert sum(rank.gradient_bytes for rank in found.per_rank) == 4 * adapter.trained


@pytest.mark.long("one1-False")
@pytest.mark.parametrize(("one", "slower"), [(job(adapter={"rank": 4}), True), (llama_8b(adapter={"rank": 8}), False)])
def test_a_plan_says_where_adapters_make_a_step_slower(one, slower):
    report = compile_job(one, budget=0.0, suggest=False).report
    said = " ".join(adapter_lines(report.adapter, report.makespan_ms, report.per_rank))
    assert (report.makespan_ms > report.adapter.whole_ms) == slower == ("slower than that" in said)


@pytest.mark.long
def test_layers_before_the_first_adapter_have_no_backward():
    table = estimate.layers(llama_8b(adapter={"rank": 16, "targets": ["layers.20.self_attn.q_proj"]}))
    assert all(layer.b == layer.w == layer.size.act_w == layer.params == 0 for layer in table[:21])
    assert all(layer.b > 0 and layer.w == 0 for layer in table[22:])
    assert table[21].w > 0


def test_mfu_counts_no_weight_gradients(tmp_path):
    many = {"hardware": {**GPU, "gpu": "h100"}, "adapter": {"rank": 16}, "memory": {"activations": "recompute"}}
    made = compile_job(llama_8b(**many), budget=0.0, suggest=False)
    made.write(tmp_path / "plan")
    s, weights = 4096, 7_504_658_432  # of matrices that tokens meet, the head among them
    flops = s * (4 * weights + 6 * s * 32 * 4096)
    wanted = flops * made.rates(1000.0).samples_per_s / (4 * 989e12)
    assert made.rates(1000.0).mfu == pytest.approx(wanted, rel=1e-6)
    from zbc.plan.directory import read_manifest

    assert headline(read_manifest(tmp_path / "plan"))["mfu"] == pytest.approx(made.rates(made.settled_ms).mfu, rel=1e-6)


BESIDE = {"all": ["*"], "down": ["down", "layers.2.*", "whole tokens"], "qkv": ["qkv", "layers.1.proj", "whole head"]}
SOME = dealt(
    [("fp32", "all"), ("bf16", "down"), ("masters", "qkv"), ("llama", "all"), ("qwen3", "qkv"), ("rotary", "down")],
    [("zb-v", "keep"), ("1f1b", "selective"), ("1f1b", "recompute")],
)


@pytest.mark.parametrize(("case", "beside", "kind", "activations"), few(SOME, [("bf16", "down", "zb-v", "keep")]))
def test_what_ranks_hold_is_predicted_within_a_percent(case, beside, kind, activations):
    adapter = {"rank": 4, "alpha": 8.0, "targets": BESIDE[beside]}
    how = {"kind": kind, "m": 4, "layers": 4, "memory": {"activations": activations}, **CASES[case], "pp": 2}
    for predicted, measured in both(adapter=adapter, **how):
        for name in ("weights", "gradients", "masters", "optimizer", "activations"):
            assert getattr(predicted, name) == pytest.approx(getattr(measured, name), rel=0.01), name
        assert measured.peak <= predicted.bytes * 1.1  # of tensors on their way several may be there at once
        assert predicted.bytes <= measured.peak * 1.09


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "kept"), few([("zb-h1", "keep"), ("zb-h1", "selective"), ("1f1b", "keep"), ("1f1b", "recompute")], 1)
)
def test_a_backward_holds_both_gradients_that_it_adds(kind, kept):
    """Those of the input of the MLP's last product, of the frozen layer and of its adapter; a B that input as well."""
    model = {"hidden": 48, "heads": 3, "seq_len": 40}
    how = {"kind": kind, "pp": 2, "m": 3, "layers": 4, "model": model, "memory": {"activations": kept}}
    for predicted, measured in both(adapter={"rank": 4, "targets": ["*"]}, **how):
        assert predicted.bytes == pytest.approx(measured.peak, rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize(("kept", "rank"), [("keep", 4), ("selective", 0)])
def test_norms_of_a_narrow_stream_copy_their_inputs_unless_they_run_again(kept, rank):
    """Frozen ones keep that float32 copy alone, those that run again the input itself, once."""
    how = {"kind": "1f1b", "pp": 2, "m": 2, "layers": 2, "memory": {"activations": kept}, **CASES["llama masters"]}
    for predicted, measured in both(adapter={"rank": rank} if rank else {}, **how):
        assert predicted.activations == pytest.approx(measured.activations, rel=0.01)


ADDED = [
    ("*", "keep", "float32"),
    ("qkv", "keep", "bfloat16"),
    ("*", "selective", "bfloat16"),
    ("*", "keep", "bfloat16"),
    ("*", "recompute", "float32"),
]


@pytest.mark.long
@pytest.mark.parametrize(("targets", "kept", "dtype"), few(ADDED, 3))
def test_what_a_forward_holds_as_it_adds_outputs_of_adapters_is_predicted(targets, kept, dtype):
    """Those of a frozen layer, of its adapters, these joined, and the sum; a backward that runs it again as well."""
    model = {"family": "llama", "hidden": 48, "heads": 4, "vocab": 16, "seq_len": 48, "ffn_hidden": 136, "dtype": dtype}
    how = {"kind": "1f1b", "pp": 2, "m": 2, "layers": 2, "model": model, "memory": {"activations": kept}}
    compiled, _, (scale, _) = weighed(adapter={"rank": 4, "targets": [targets]}, **how)
    (size, _), ops = compiled.costs.bytes, scale.readings
    assert size.needs["f"] == pytest.approx(max(one.extra for one in ops if one.op.kind is Kind.F), rel=0.02)
    if kept == "recompute":
        assert size.needs["bw"] == pytest.approx(max(one.rise for one in ops if one.op.kind is Kind.BW), rel=0.02)


PARTS = [
    ("qkv", "keep", "float32", "1f1b"),
    ("down", "keep", "bfloat16", "1f1b"),
    ("gate_up", "selective", "float32", "1f1b"),
    ("*", "selective", "bfloat16", "zb-h1"),
    ("down", "keep", "bfloat16", "zb-h1"),
    ("layers.1.*", "keep", "float32", "1f1b"),
]


@pytest.mark.long
@pytest.mark.parametrize(("targets", "kept", "dtype", "kind"), few(PARTS, [PARTS[0], PARTS[3]]))
def test_what_a_backward_holds_depends_on_the_layers_with_adapters(targets, kept, dtype, kind):
    """Without one at the MLP's last product neither its input nor its output's gradient is there, nor run again."""
    model = {"family": "llama", "hidden": 48, "heads": 4, "vocab": 128, "seq_len": 48, "ffn_hidden": 136}
    how = {"kind": kind, "pp": 2, "m": 3, "layers": 4, "model": model | {"dtype": dtype}}
    how |= {"memory": {"activations": kept}, "adapter": {"rank": 4, "targets": [targets]}}
    compiled, _, (scale, _) = weighed(**how)
    (size, _), (held, _) = compiled.costs.bytes, compiled.memory
    assert held.activations == pytest.approx(scale.held.activations, rel=0.01)
    back = Kind.B if kind == "zb-h1" else Kind.BW
    found = [one.rise for one in scale.readings if one.op.kind is back]
    assert size.needs[back.value.lower()] == pytest.approx(found[-1], rel=0.01)
    assert size.needs[f"first {back.value.lower()}"] == pytest.approx(found[0], rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("targets", ["layers.3.*", "layers.0.down", "layers.0.up"])
def test_what_nothing_trained_precedes_is_held_for_a_forward_alone(targets):
    """Whole layers, the first part of a block, and the input of its MLP while that runs."""
    model = {"hidden": 48, "heads": 4, "vocab": 128, "seq_len": 48}
    how = {"kind": "1f1b", "pp": 2, "m": 3, "layers": 4, "model": model, "partition": {"layers_per_stage": [1, 3]}}
    compiled, _, (scale, _) = weighed(adapter={"rank": 4, "targets": [targets]}, **how)
    (size, _), ops = compiled.costs.bytes, scale.readings
    assert size.needs["f"] == pytest.approx(max(one.extra for one in ops if one.op.kind is Kind.F), rel=0.01)


SHARED = [{"tp": 2}, {"tp": 2, "tp_sequence": True}, {"dp": 2, "shard": "optimizer"}]


@pytest.mark.long
@pytest.mark.parametrize("parallel", few(SHARED, 1), ids=str)
def test_what_ranks_that_share_layers_hold_is_predicted(parallel):
    how = {"kind": "1f1b", "pp": 2, "m": 3, "layers": 2, "model": CASES["llama"]["model"], "parallel": parallel}
    for predicted, measured in both(adapter={"rank": 4}, **how):
        for name in ("weights", "gradients", "optimizer", "activations"):
            assert getattr(predicted, name) == pytest.approx(getattr(measured, name), rel=0.01), name


@pytest.mark.long
def test_tied_embeddings_that_are_frozen_are_held_once_and_summed_by_nobody():
    model = {**CASES["llama"]["model"], "ties": True}
    how = {"kind": "zb-v", "pp": 2, "m": 4, "layers": 4, "model": model, "adapter": {"rank": 4}}
    compiled, *_ = weighed(1, **how)
    assert not any(op.kind is Kind.REDUCE for _, _, op in compiled.program)
    for predicted, measured in both(**how):
        assert predicted.weights == pytest.approx(measured.weights, rel=0.01)


def test_what_a_profile_saw_frozen_has_no_gradients_sums_or_state():
    """Layers with half of their numbers trained, and ends with none."""
    rests = nbytes(gradients=0, optimizer=0)
    half = layer(1.0, 2.0, 0.1, bytes=nbytes(gradients=200, optimizer=400)).model_copy(update={"parts": [30, 20]})
    kinds = {name: layer(0.5, 0.5, 0.0, bytes=rests) for name in ("embed", "head")} | {"block": half}
    one = job(adapter={"rank": 4})
    table = estimate.layers(replace(one, profile=profile_of(one, layers=kinds)))
    counts = [(at.params, at.frozen, at.parts) for at in (*table[:2], table[-1])]
    assert counts == [(0, 100, ()), (50, 50, (30, 20)), (0, 100, ())]


def test_a_profile_without_these_adapters_is_refused(tmp_path):
    one, asked = job(adapter={"rank": 4}), {"rank": 4, "targets": ["qkv"]}
    for known, found in ((one.adapter.timed, {"rank": 8}), ({}, {"rank": 4}), (one.adapter.timed, asked)):
        (tmp_path / "p.json").write_text(profile_of(one, adapter=known).dumps())
        with refused("E142") as caught:
            load_job(write_job(tmp_path, adapter=found), profile=tmp_path / "p.json")
        assert any("adapter." in line for line in caught.value.details)
    (tmp_path / "p.json").write_text(profile_of(one, adapter=one.adapter.timed).dumps())
    load_job(write_job(tmp_path, adapter={"rank": 4, "alpha": 2.0}), profile=tmp_path / "p.json")
