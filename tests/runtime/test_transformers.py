"""Models of transformers as themselves: losses and steps of transformers' own, under every feature that layers have."""

import json
import os
import sys
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import RMSNorm, functional

from tests.jobs import stored, write_job
from tests.refusals import refused
from tests.runtime.test_adapters import SMALL, tensors_of, with_lora
from tests.runtime.test_checkpoints import at
from tests.runtime.test_pretrained import in_files
from tests.runtime.test_tensor_parallel import numbers
from tests.runtime.test_unequal import as_one_process, unequal
from tests.threads import run_threads, scaled
from tests.tiers import few
from zbc.compiler.compile import compile_job
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.shapes import load_job
from zbc.job import hffolder, hfmodel, userobject
from zbc.job.hffolder import SINGLE
from zbc.training.building.context import Settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import transformers

from zbc.training.models import hfsharding, hfweights
from zbc.training.models.parts import _Fused, fused
from zbc.training.models.transformers import config_of, facts, layers, shared

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
TOKENS, RATE = 16, 0.5
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1}
MOE = {**SIZES, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_routed_experts": 4}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
CONFIGS = {
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.1},
    "bloom": {**SIZES, "n_layer": 4, "n_head": 4},
    "gpt2": {**SIZES, "n_inner": 48},
    "granite": {**SIZES, "logits_scaling": 0.3, "embedding_multiplier": 3.0},
    "qwen3": SIZES,
    "phi3": {**SIZES, "original_max_position_embeddings": 64},
    "olmo2": SIZES,
    "olmoe": {**MOE, "num_experts": 4},
    "gemma2": {**SIZES, "sliding_window": 5, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
    "gemma3_text": {**SIZES, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "qwen3_moe": {**MOE, **ROUTED, "num_experts": 4},
    "glm4_moe": {**MOE, **GROUPS},
    "deepseek_v3": {**MOE, **GROUPS, **LATENT, "num_key_value_heads": 4},
    "deepseek_v2": {**MOE, **GROUPS, **LATENT, "num_key_value_heads": 4, "topk_method": "greedy"},
    "gpt_oss": {**MOE, **ROUTED, "num_local_experts": 4, "sliding_window": 5},
    # Its linear attention is small at first: the usual eps would make rounding as large as what it normalizes.
    "qwen3_next": {**MOE, **LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 16, "rms_norm_eps": 0.01},
    "llama4_text": {**MOE, "intermediate_size_mlp": 48, "num_local_experts": 4},  # its prefix names no part of it
    "bamba": {**SIZES, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8},
    "mamba": {**SIZES, "state_size": 4},
    "lfm2": {**SIZES, "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
}


def config(kind):
    return {"model_type": kind, **CONFIGS[kind]}


def compiled(folder, kind, *, pp=2, schedule="zb-h1", weights=None, **changes):
    """A compiled job of a model: of its config.json, or of the folder with `weights`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(kind)))
    named = {"config": str(folder / "config.json")} if weights is None else {"pretrained": str(weights)}
    gone = dict.fromkeys(("family", "layers", "hidden", "heads", "vocab"))
    tables = {"model": {**gone, **named, "seq_len": TOKENS, **changes.pop("model", {})}}
    tables["optimizer"] = {"kind": "sgd", "lr": RATE, "weight_decay": 0.0} | changes.pop("optimizer", {})
    if "slices" in changes:
        changes["schedule"] = {"slices": changes.pop("slices")}
    path = write_job(folder, **tables, m=4, pp=pp, kind=schedule, data={"kind": "synthetic"}, **changes)
    return compile_job(load_job(path), budget=0.0, suggest=False)


def plan_of(folder, kind, **how):
    return stored(compiled(folder, kind, **how))


def trained(folder, kind, steps=1, **how):
    return run_threads(plan_of(folder, kind, **how), steps)


def written(workers, model, source=None):
    """The weights of all ranks as the tensors of a folder."""
    parts = (hfweights.tensors_of(model, in_files(worker), source) for worker in workers)
    return {name: tensor for part in parts for name, tensor in part.items()}


def peer(kind, folder=None):
    """transformers' own model, in training."""
    made = config_of(config(kind))
    how = {"attn_implementation": "eager", "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM
    torch.manual_seed(3)
    found = model.from_config(made, **how) if folder is None else model.from_pretrained(folder, **how)
    return found.train()


def one_step(model, worker, criterion=functional.cross_entropy, step=0):
    """The loss of a step of transformers' own model on the same microbatches."""
    losses, added, count = [], [], worker.plan.manifest.microbatches
    model.zero_grad()
    for mb in range(count):
        ids, targets = worker.batches.inputs(step, mb), worker.batches.targets(step, mb)
        out = model(ids, use_cache=False)
        losses.append(criterion(out.logits.flatten(0, 1), targets.flatten()))
        added.append(getattr(out, "aux_loss", None))
    loss, more = torch.stack(losses).mean(), None if added[0] is None else torch.stack(added).mean()
    (loss if more is None else loss + model.router_aux_loss_coef * more).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=RATE)
    return loss.item()


def tensors_in(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", few(CONFIGS, ("olmo2", "gemma3_text", "deepseek_v3", "gpt_oss", "qwen3_next", "mamba"))
)
def test_a_step_is_that_of_transformers_itself(kind, tmp_path):
    """From a folder that transformers wrote, and back into one."""
    theirs, source = peer(kind), tmp_path / "weights"
    theirs.save_pretrained(source)
    plan = plan_of(tmp_path, kind, weights=source, model={"config": str(source / "config.json")})
    workers = run_threads(plan, 1)
    loss = one_step(theirs, next(worker for worker in workers if 0 in worker.stages))
    assert workers[-1].results[0].loss == pytest.approx(loss, rel=1e-6)
    ours = written(workers, Settings.of(plan.manifest).model, source)
    theirs.save_pretrained(tmp_path / "after")
    wanted = tensors_in(tmp_path / "after")
    before = tensors_in(source)
    assert any((wanted[name] - before[name]).abs().max() > 1e-3 for name in wanted)
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("kind", few(("deepseek_v3", "qwen3", "opt", "gpt_oss", "qwen3_next"), 1))
def test_a_folder_that_four_ranks_trained_by_zb_v_is_loaded_by_transformers(kind, tmp_path):
    """Latent attention, dense, tied, experts in stacks, hybrid. A rank reads the tensors of its layers alone."""
    reads, made, source, out = [], hfweights.Weights.made, tmp_path / "weights", tmp_path / "out"
    deeper = mock.patch.dict(CONFIGS, {kind: {**CONFIGS[kind], "num_hidden_layers": 6}})
    with deeper, mock.patch.dict(globals(), {"RATE": 0.05}):
        (theirs := peer(kind)).save_pretrained(source)
        plan = plan_of(tmp_path, kind, weights=source, pp=4, schedule="zb-v")
        with mock.patch.object(hfweights.Weights, "made", lambda self, name: reads.append(name) or made(self, name)):
            workers = run_threads(plan, 3)
        first = next(worker for worker in workers if 0 in worker.stages)
        losses = [one_step(theirs, first, step=step) for step in range(3)]
    assert len({*reads}) + (kind == "opt") == len(reads)  # but for the tied one
    assert [result.loss for result in workers[-1].results] == pytest.approx(losses, rel=1e-4)
    out.mkdir()
    ours = written(workers, model := Settings.of(plan.manifest).model, source)
    hffolder.write_index(out, model, [hffolder.write_shard(out, 0, 1, ours)], source)
    again, ids = transformers.AutoModelForCausalLM.from_pretrained(out), torch.arange(32).view(2, 16)
    torch.testing.assert_close(again.train()(ids).logits, theirs(ids).logits, rtol=1e-3, atol=1e-3)
    assert (source / "config.json").read_text().split() == (out / "config.json").read_text().split()


HEADS = [("opt", {}), ("deepseek_v3", {}), ("mamba", {}), ("deepseek_v3", {"tp": 2})]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "parallel"), few(HEADS, lambda head: head in (HEADS[0], HEADS[3])))
@pytest.mark.parametrize("chunk", [None, 7])
def test_the_loss_of_a_head(kind, parallel, chunk, tmp_path):
    def criterion(logits, targets):
        return (
            functional.cross_entropy(logits, targets, label_smoothing=0.2) + 0.1 * logits.logsumexp(-1).square().mean()
        )

    theirs = peer(kind)
    theirs.save_pretrained(tmp_path / "weights")
    keys = {"z_loss": 0.1, "label_smoothing": 0.2, **({} if chunk is None else {"loss_chunk": chunk})}
    workers = trained(tmp_path, kind, weights=tmp_path / "weights", model=keys, parallel=parallel)
    loss = one_step(theirs, next(worker for worker in workers if 0 in worker.stages), criterion)
    norm = sum(p.grad.square().sum() for p in theirs.parameters() if p.grad is not None).sqrt().item()
    assert numbers(workers)[0] == pytest.approx((loss, norm), rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "norms"), [("qwen3", 4), ("gemma2", 4), ("bamba", 2), ("opt", 0)])
def test_norms_that_are_those_of_torch_use_it(kind, norms, tmp_path):
    """With the same bits; not those with a gate, nor for numbers of another type than their weights, nor if asked."""
    assert type(fused(RMSNorm(8, elementwise_affine=False))) is RMSNorm, "has no weight"
    own = compiled(tmp_path, kind, model={"variant": "own norms"}).job.model
    found, asked = (
        [one for one in layers(of)[1]().modules() if isinstance(one, _Fused)]
        for of in (config(kind), own.args["config"])
    )
    assert len(found) == norms and not asked and hffolder._config_of(own) == config(kind)
    for one in found:
        x, theirs = torch.randn(2, 3, len(one.weight)), super(_Fused, one).forward
        assert torch.equal(one(x), theirs(x)) and one(x.bfloat16()).dtype == theirs(x.bfloat16()).dtype


MEASURED = [("qwen3", 1, {}), ("gpt_oss", 1, {}), ("deepseek_v3", 1, {}), ("deepseek_v3", 2, {}), ("opt", 2, {})]
MEASURED += [(kind, 1, {"parallel": {"tp": 2}}) for kind in ("phi3", "deepseek_v3")]
MEASURED += [(kind, 1, {"parallel": {"vocabulary": "shared"}}) for kind in ("qwen3", "gemma2", "deepseek_v3", "gpt2")]
MEASURED += [("gemma2", 1, {"schedule": "zb-v", "optimizer": {"kind": "adamw"}})]  # tied on one rank


@pytest.mark.long
@pytest.mark.parametrize(("kind", "slices", "how"), MEASURED)
def test_memory(kind, slices, how, tmp_path):
    made = compiled(tmp_path, kind, slices=slices, **how)
    predicted = [rank.bytes for rank in peaks(made.program, made.costs) for _ in range(made.job.parallel.tp)]
    for scale, most in zip(scaled(stored(made))[1], predicted, strict=True):  # a message may leave later than simulated
        assert scale.held.peak == pytest.approx(most, abs=0.005 * most + made.costs.bytes[0].behind)


@pytest.mark.parametrize(
    ("change", "code", "words", "hint"),
    [
        ({"model_type": "qwen33_moe"}, "E521", "no causal language model of model_type 'qwen33_moe'", "qwen3_moe"),
        ({"model_type": None}, "E521", "no causal language model of model_type 'None'", ""),
        ({"model_type": "own", "auto_map": {"AutoModel": "own.Model"}}, "E521", "model_type 'own'", "never runs"),
        ({"num_attention_heads": "four"}, "E521", "transformers refuses the config.json of this opt", "compare"),
        ({"model_type": "biogpt"}, "E521", "biogpt of transformers cannot be taken apart", "a factory"),
        ({"model_type": "doge", "is_moe": True, **ROUTED}, "E521", "its routers is another", "router_logits = false"),
        ({"quantization_config": {"quant_method": "fp8"}}, "E521", "are quantized", "bfloat16"),
    ],
)
def test_a_configuration_that_is_not_one_is_refused(change, code, words, hint, tmp_path):
    weights = copied(tmp_path)
    known = json.loads((weights / "config.json").read_text())
    (weights / "config.json").write_text(json.dumps({**known, **change}))
    with refused(code, words, hint=hint):
        compiled(tmp_path, "opt", weights=weights)


def test_another_loss_of_routers_is_refused():
    usual = "transformers.models.qwen3_moe.modeling_qwen3_moe.load_balancing_loss_func"
    with mock.patch(usual, lambda *_: torch.tensor(2.0)), refused("E521", "its routers is another", hint="false in"):
        facts({**config("qwen3_moe"), "vocab_size": 65}, None, False)


def test_a_folder_without_all_its_weights_is_refused_before_a_run(tmp_path):
    weights = copied(tmp_path)
    tensors = load_file(weights / SINGLE)
    tensors.pop("model.decoder.layers.2.fc1.weight")
    save_file(tensors, weights / SINGLE)
    with refused("E520", "lacks model.decoder.layers.2.fc1.weight"):
        compiled(tmp_path, "opt", weights=weights)


def copied(folder):
    """A small folder of weights, to damage."""
    peer("opt").save_pretrained(folder / "weights")
    return folder / "weights"


def test_settings_that_a_model_does_not_go_with_are_refused(tmp_path):
    with refused("E130", "8 stages need 8 layers, the model has 6"):
        compiled(tmp_path, "opt", pp=8)
    with refused("E521", "not products of a linear layer without a bias", hint="drop model.loss_chunk"):
        facts({"model_type": "phi", **SIZES}, None, True)
    with refused("E110", "model.family stands beside it"):
        compiled(tmp_path, "opt", model={"family": "llama"})
    with refused("E110", "a model of transformers exclude each other: its layers do not say what is cheap"):
        compiled(tmp_path, "opt", memory={"activations": "selective"})


def test_without_transformers_the_command_is_told(tmp_path):
    for name, found, words in (("find_spec", None, "not installed"), ("version", "4.57.6", "4.57.6 is too old")):
        hfmodel._facts.cache_clear()
        with mock.patch.object(hfmodel, name, return_value=found), refused("E602", "opt", words, hint="-U 'zbc[hf]'"):
            compiled(tmp_path, "opt")
    del (there := dict(sys.modules))["zbc.training.models.transformers"]
    there |= {name: None for name in there if name.startswith("transformers.")}
    with mock.patch.dict(sys.modules, there, clear=True), refused("E602", "transformers.models", "too old"):
        userobject.load("zbc.training.models.transformers:layers", "model.family")


WAYS = {
    "1f1b": {"schedule": "1f1b"},
    "zb-v": {"schedule": "zb-v"},
    "recompute": {"memory": {"activations": "recompute"}},
    "offload": {"schedule": "1f1b", "memory": {"activations": "offload"}, "costs": {"offload": 0.1}},
    "shards": {"parallel": {"dp": 2, "shard": "all"}},
    "slices": {"slices": 2},
    "ep": {"parallel": {"dp": 2, "ep": 2}},
    "tp": {"parallel": {"tp": 2}},
    "tp of experts": {"parallel": {"tp": 2, "dp": 2, "ep": 2, "expert_tp": 2}, "schedule": "zb-v"},
    "tp of adapters": {"parallel": {"tp": 2}, "slices": 2, "adapter": {"rank": 2, "targets": ["*"]}},
    "words": {"parallel": {"vocabulary": "shared"}},
    "words of slices": {"parallel": {"vocabulary": "shared-2", "tp": 2}, "slices": 2},
    "tp of experts' adapters": {"parallel": {"tp": 2}, "adapter": {"rank": 2, "targets": ["experts.*"]}},
    "ep of adapters": {"parallel": {"dp": 2, "ep": 2}, "adapter": {"rank": 2, "targets": ["o_proj", "experts.*"]}},
    "cp": {"parallel": {"cp": 2}},
    "cp of slices": {"parallel": {"cp": 2}, "slices": 2},
}
KINDS = {"slices": ("qwen3", "gemma2", "gemma3_text", "deepseek_v3"), "words of slices": ("qwen3", "olmo2")}
KINDS |= {"ep": tuple(k for k, of in CONFIGS.items() if "num_experts_per_tok" in of), "tp of adapters": ("phi3",)}
KINDS |= {"tp": ("qwen3", "phi3", "olmo2", "gemma2", "llama4_text", "deepseek_v2"), "tp of experts": ("qwen3_moe",)}
KINDS |= {"cp": ("deepseek_v3", "gemma3_text", "opt", "qwen3_moe"), "cp of slices": ("qwen3",)}
KINDS |= {"words": ("deepseek_v3", "qwen3", "gemma2", "gemma3_text", "gpt2", "granite", "opt", "qwen3_moe")}
CASES = [(way, kind) for way in WAYS for kind in KINDS.get(way, ("deepseek_v3",))]
QUICK = ("zb-v", "recompute", "slices", ("ep", "deepseek_v3"), ("cp", "deepseek_v3"), "tp of adapters")


@pytest.mark.long
@pytest.mark.parametrize(("way", "kind"), few(CASES, QUICK))
def test_other_plans_train_the_same(way, kind, tmp_path):
    """Ranks that share experts do as replicas without."""
    alone = {"parallel": {"dp": 2}} if "dp" in WAYS[way].get("parallel", {}) else {}
    ways = {"a": {**alone, **{key: WAYS[way][key] for key in ("adapter",) if key in WAYS[way]}}, "b": WAYS[way]}
    one, other = (numbers(trained(tmp_path / name, kind, 2, **of)) for name, of in ways.items())
    assert [n for pair in one for n in pair] == pytest.approx([n for pair in other for n in pair], rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "tp"), [("deepseek_v3", 1), ("qwen3_moe", 2)])
def test_a_run_goes_on_from_its_checkpoint(kind, tp, tmp_path):
    plan = plan_of(tmp_path, kind, checkpoint={"every": 1}, parallel={"tp": tp})
    whole = numbers(run_threads(plan, 2, folder=tmp_path / "run"))
    resumed = run_threads(plan, 2, folder=tmp_path / "again", resume=at(tmp_path / "run", 1))
    assert numbers(resumed) == whole[1:]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "targets"),
    [("deepseek_v3", ["q_b_proj", "mlp.down_proj", "whole lm_head"]), ("opt", ["*"])]
    + [("deepseek_v3", ["o_proj", "experts.*"]), ("gpt_oss", ["experts.*"])],
)
def test_adapters_are_those_of_lora_by_the_names_of_peft(kind, targets, tmp_path):
    """After one step; at first B is 0."""
    (own := peer(kind)).save_pretrained(tmp_path / "weights")
    workers = trained(tmp_path, kind, weights=tmp_path / "weights", adapter={**SMALL, "targets": targets})
    ours, before = tensors_of(workers), {f"base_model.model.{name}": p for name, p in own.named_parameters()}
    assert ours and sum("lm_head" in name for name in ours) == sum("lm_head" in name for name in targets)
    start = {n: before.get(n, t if "lora_A" in n else 0 * t) for n, t in ours.items()}
    model, named = with_lora(tmp_path / "weights", start)
    loss = one_step(model.train(), next(worker for worker in workers if 0 in worker.stages))
    assert workers[-1].results[0].loss == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(ours, {name: p.detach() for name, p in named.items()}, rtol=1e-6, atol=1e-6)


NOT_SHARED = [("opt", 2, "opt of transformers has no plan of tensor"), ("apertus", 2, "no plan of tensor parallelism")]


@pytest.mark.parametrize(("kind", "tp", "words"), [*NOT_SHARED, ("qwen3", 4, "k_proj of qwen3 has 2 parts")])
def test_layers_that_ranks_cannot_share_are_refused(kind, tp, words):
    with refused("E119", words, hint="set parallel.tp = 1"):
        shared({"model_type": kind, **CONFIGS.get(kind, SIZES)}, tp)


def test_a_style_of_sharing_that_is_not_known_is_named():
    some = {key: style for key, style in hfsharding.STYLES.items() if key != "rowwise"}
    with mock.patch.object(hfsharding, "STYLES", some), refused("E119", "o_proj of qwen3 is 'rowwise'"):
        shared(config("qwen3"), 2)


@pytest.mark.long
@pytest.mark.parametrize("kind", few(("deepseek_v3", "qwen3"), 1))
def test_samples_of_one_row_train_as_alone(kind, tmp_path):
    model = Settings.of(plan_of(tmp_path, kind).manifest).model.model_dump(mode="json")
    as_one_process(unequal(model=model, copies=1))


OTHERWISE = [("bloom", "slices", "E512"), ("mamba", "slices", "E512"), ("lfm2", "cp", "E512"), ("bloom", "cp", "E119")]


@pytest.mark.long("lfm2-cp-E512", "mamba-slices-E512")
@pytest.mark.parametrize(("kind", "way", "code"), OTHERWISE)
def test_layers_that_mix_tokens_otherwise_do_not_share_or_cut_them(kind, way, code, tmp_path):
    with refused(code, "layers.1" if code == "E512" else "attention of its own"):
        trained(tmp_path, kind, **WAYS[way])


@pytest.mark.long
@pytest.mark.parametrize("kind", few(("deepseek_v3", "gpt_oss"), 1))
def test_ranks_that_share_out_experts_write_the_same_weights(kind, tmp_path):
    """Experts that a folder has one by one; those that it has as a stack are refused before a run."""
    both = []
    for ep in (1, 2):
        plan = plan_of(tmp_path / str(ep), kind, parallel={"dp": 2, "ep": ep})
        model = Settings.of(plan.manifest).model
        if kind == "gpt_oss" and ep > 1:
            with refused("E524", "has all experts"):
                hffolder.check_target(tmp_path / "out", model, ep=plan.manifest.ep)
            return
        hffolder.check_target(tmp_path / f"out{ep}", model, ep=plan.manifest.ep)
        both.append(written(run_threads(plan, 1), model))
    torch.testing.assert_close(*both, rtol=1e-6, atol=1e-6)
