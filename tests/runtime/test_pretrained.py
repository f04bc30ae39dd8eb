"""Hugging Face folders in and out: logits are compared with transformers itself. Nothing is downloaded."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.refusals import refused
from tests.tiers import few

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import transformers

from tests.runtime.small_plans import make_plan, make_program, make_worker
from tests.threads import run_threads
from zbc.errors import ZbcError
from zbc.job import hfconfig, hffolder
from zbc.job.hffolder import INDEX, SINGLE
from zbc.plan.directory import StoredPlan
from zbc.runtime.core.optimizer import primary
from zbc.training.building.context import Settings
from zbc.training.models import pretrained
from zbc.training.models.experts import stacks_of, unstacked

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
SEQ, VOCAB = 16, 61
IDS = {"bos_token_id": None, "eos_token_id": None}
LLAMA = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
LLAMA |= {"num_attention_heads": 4, "max_position_embeddings": SEQ, "initializer_range": 0.2, **IDS}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": SEQ, "initializer_range": 0.2}
GPT2 |= {**dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0), **IDS}
MET = {"num_experts": 6, "num_experts_per_tok": 3}


def model_for(kind, **changes):
    """A function that makes a model of transformers."""
    config, head = getattr(transformers, f"{kind}Config"), "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    return lambda: getattr(transformers, kind + head)(config(**(GPT2 if kind == "GPT2" else LLAMA), **changes))


MODELS = {
    "gpt2": model_for("GPT2"),
    "gpt2-gelu": model_for("GPT2", activation_function="gelu", n_inner=40),
    "gpt2-untied": model_for("GPT2", tie_word_embeddings=False, layer_norm_epsilon=1e-3),
    "llama": model_for("Llama"),
    "llama-grouped": model_for("Llama", num_key_value_heads=2, head_dim=12),
    "llama-tied": model_for("Llama", tie_word_embeddings=True, rms_norm_eps=1e-3),
    "mistral": model_for("Mistral", num_key_value_heads=2, head_dim=12, sliding_window=7),
    "mistral-whole": model_for("Mistral", num_key_value_heads=4, sliding_window=None),
    "qwen2": model_for("Qwen2", num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": model_for("Qwen3", num_key_value_heads=2, head_dim=10),
    "mixtral": model_for("Mixtral", num_key_value_heads=2, num_local_experts=4),
    "qwen2_moe": model_for(
        "Qwen2Moe", **MET, num_key_value_heads=4, moe_intermediate_size=24, shared_expert_intermediate_size=20
    ),
    "qwen3_moe": model_for("Qwen3Moe", **MET, head_dim=8, moe_intermediate_size=24, norm_topk_prob=True),
}
VARIANTS = ("mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """name -> a folder as transformers saves it, made once; biases and norms are not just zeros and ones."""
    made = {}

    def folder(name):
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            torch.manual_seed(len(made))
            model = MODELS[name]()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 1:
                        parameter.add_(0.1 * torch.randn_like(parameter))
            model.save_pretrained(path)
            made[name] = path, model.eval()
        return made[name]

    return folder


def model_in(folder):
    return hfconfig.model_of(hfconfig.read_config(folder), "config.json")


def in_files(*workers):
    """The weights of ranks by their names in files."""
    return {name: p for worker in workers for name, p in unstacked(primary(worker).items(), stacks_of(worker))}


def close(logits, peer, tokens):
    """Asserts closeness to the numbers of transformers."""
    with torch.no_grad():
        torch.testing.assert_close(logits, peer(tokens).logits, rtol=1e-5, atol=1e-5)


def of_folder(folder, program, *, section=None, **how) -> StoredPlan:
    """The plan of a program for the model of a folder, with its weights."""
    plan = make_plan(program, model={**model_in(folder).model_dump(mode="json"), **(section or {})}, **how)
    training = {**plan.manifest.training, "pretrained": str(folder)}
    return replace(plan, manifest=plan.manifest.model_copy(update={"training": training}))


def plan_of(folder, p=1, schedule="1f1b", m=2, **changes) -> StoredPlan:
    return of_folder(folder, make_program(schedule, p, m), section={"ties": False, **changes}, optimizer={"lr": 1e-2})


def logits_of(plan, steps=1):
    """The last step's (inputs, logits) by microbatch, from the last stage."""
    seen = []

    def watch(worker):
        loss = worker.loss
        worker.loss = lambda y, target: (seen.append((target.clone(), y.detach().clone())), loss(y, target))[1]

    workers = run_threads(plan, steps, setup=watch)
    batches = next(w.batches for w in workers if w.batches is not None)
    last = seen[-plan.manifest.microbatches :]
    found = []
    for mb in range(plan.manifest.microbatches):
        target = batches.targets(steps - 1, mb)
        (logits,) = [y for t, y in last if torch.equal(t, target)]
        found.append((batches.inputs(steps - 1, mb), logits))
    return found, workers


@pytest.mark.parametrize("p", few([1, 2, 4], (2,)))
@pytest.mark.parametrize("name", few(MODELS, ("gpt2-gelu", "llama-grouped", "llama-tied", *VARIANTS)))
def test_logits_are_those_of_transformers(folders, name, p):
    folder, peer = folders(name)
    found, _ = logits_of(plan_of(folder, p, "zb-v" if p == 2 else "1f1b"))
    for tokens, logits in found:
        assert logits.std() > 0.1
        close(logits, peer, tokens)


def test_a_folder_in_several_files_old_names_and_half_precision(folders, tmp_path):
    """The first GPT-2 on the hub has no prefix and its masks as buffers; weights may be 16 bits wide."""
    folder, peer = folders("gpt2")
    tensors = {name.removeprefix("transformer."): t.half() for name, t in load_file(folder / SINGLE).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, SEQ, SEQ)
    names = sorted(tensors)
    places = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, tmp_path / file)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    ((tokens, logits), *_), workers = logits_of(plan_of(tmp_path, 2))
    with torch.no_grad():
        expected = peer.half().float()(tokens).logits
    peer.load_state_dict(transformers.GPT2LMHeadModel.from_pretrained(folder).state_dict())
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert all(p.dtype == torch.float32 for w in workers for s in w.stages.values() for p in s.parameters.values())


def test_a_rank_reads_only_its_own_layers(folders, monkeypatch):
    folder, _ = folders("llama")
    read, plain = [], pretrained.Weights._read
    monkeypatch.setattr(pretrained.Weights, "_read", lambda self, part: (read.append(part.name), plain(self, part))[1])
    worker = make_worker(plan_of(folder, 4), rank=1)
    mine = {layer.name.split(".")[1] for layer in worker.stages[1].layers}
    assert {name.split(".")[2] for name in read} == mine
    assert len(read) == len(set(read)) == 9 * len(mine)


# ---- out -------------------------------------------------------------------------------------------------------


OUT = [*((name, 4) for name in MODELS), ("gpt2", 1), ("llama", 1)]


@pytest.mark.long("mistral-4")
@pytest.mark.parametrize(("name", "p"), few(OUT, [("gpt2", 4), ("llama-grouped", 4), ("llama", 1), ("mistral", 4)]))
def test_what_was_trained_comes_out_as_transformers_loads_it(folders, tmp_path, name, p):
    source, _ = folders(name)
    workers = run_threads(plan_of(source, p, "zb-v" if p == 4 else "1f1b"), 2)
    model = model_in(source).model_copy(update={"ties": False})
    target = tmp_path / "out"
    hffolder.check_target(target, model)
    parts = enumerate(pretrained.tensors_of(model, in_files(worker)) for worker in workers)
    hffolder.write_index(target, model, [hffolder.write_shard(target, number, p, part) for number, part in parts])
    assert sorted(f.name for f in target.iterdir()) == sorted(
        ["config.json", INDEX, *(f"model-{i + 1:05d}-of-{p:05d}.safetensors" for i in range(p))]
    )
    peer, report = type(MODELS[name]()).from_pretrained(target, output_loading_info=True)
    named = type(peer).__name__.replace("Mistral", "Mistral" if model.window else "Llama")
    assert hfconfig.read_config(target)["architectures"] == [named]
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    original = transformers.AutoModelForCausalLM.from_pretrained(source)
    tokens = torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(1))
    found = tokens
    for stage in (stage for _, stage in sorted((i, stage) for worker in workers for i, stage in worker.stages.items())):
        for layer in stage.layers:
            found = layer.module(found)
    close(found, peer.eval(), tokens)
    assert (original.eval()(tokens).logits - found).abs().max() > 1e-2, "two steps at 1e-2 change something"
    again = plan_of(target, 2, ties=False)
    ((inputs, logits), *_), _ = logits_of(again)
    close(logits, peer, inputs)


CHANGED = {"architectures", "tie_word_embeddings", "dtype", "max_position_embeddings"}  # keys that training may change


@pytest.mark.parametrize("name", few(MODELS, ("gpt2", "mistral", "llama-tied")))
def test_what_training_leaves_alone_stays_as_it_was_in_the_folder_it_began_with(folders, tmp_path, name):
    """Planned with shorter sequences; no step is taken, so `generate` gives what it gave."""
    original, _ = folders(name)
    source, target = tmp_path / "source", tmp_path / "out"
    shutil.copytree(original, source)
    config = {**hfconfig.read_config(source), "bos_token_id": 3, "eos_token_id": 5, "of": {"a": [1]}}
    config |= {"dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(config))
    beside = {"generation_config.json": json.dumps({"eos_token_id": 5, "max_new_tokens": SEQ - 4})}
    beside |= {"tokenizer.json": "{}", "merges.txt": "a b", "chat_template.jinja": "{{ x }}", "LICENSE": "mine"}
    for file, text in {**beside, "notes.md": "no", "old.bin": "no"}.items():
        (source / file).write_text(text)
    plan = plan_of(source, 1, seq_len=SEQ // 2, ties=hfconfig.model_of(config, "").tie_embeddings)
    model = Settings.of(plan.manifest).model
    tensors = pretrained.tensors_of(model, in_files(make_worker(plan)), source)
    hffolder.check_target(target, model)
    said = hffolder.write_index(target, model, [hffolder.write_shard(target, 0, 1, tensors)], source)
    found = hfconfig.read_config(target)
    assert {key: found[key] for key in config.keys() - CHANGED} == {key: config[key] for key in config.keys() - CHANGED}
    assert found["dtype"] == "float32" and 'dtype = "float32"' in said[0] and str(source) in said[0]
    assert {path.name for path in target.iterdir() if path.name in {*beside, "notes.md", "old.bin"}} == beside.keys()
    assert said[1] == f"copied from there: {', '.join(sorted(beside))}"
    tokens = torch.randint(VOCAB, (1, 3), generator=torch.Generator().manual_seed(1))
    given = [
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").generate(tokens, do_sample=False)
        for folder in (source, target)
    ]
    assert given[0].tolist() == given[1].tolist() and given[0].shape[1] > 4
    long = torch.randint(VOCAB, (1, SEQ), generator=torch.Generator().manual_seed(2))
    one, other = (type(MODELS[name]()).from_pretrained(f, dtype="float32").eval() for f in (source, target))
    assert torch.equal(one(long).logits, other(long).logits)


def test_a_folder_that_went_away_while_it_trained_is_done_without(tmp_path):
    assert hffolder.begun_with(None) is None and hffolder.begun_with(str(tmp_path)) is None
    (tmp_path / "config.json").touch()
    assert hffolder.begun_with(str(tmp_path)) == tmp_path


def test_longer_sequences_than_before_are_said_in_the_configuration():
    source = {**SIZED, "max_position_embeddings": 16, "torch_dtype": "float16"}
    model = hfconfig.model_of(source, "config.json").model_copy(update={"seq_len": 64})
    found = hfconfig.config_from(source, model, "float32")
    assert (found["max_position_embeddings"], found["torch_dtype"]) == (64, "float32")


GROUPS = {"family": "llama", "variant": "plain", "experts": 4, "expert_groups": [2, 1]}


@pytest.mark.parametrize("change", [{"family": "a:b"}, {"variant": "rotary"}, {"kv_heads": 1}, GROUPS])
def test_what_transformers_has_no_class_for_is_refused_before_training(tmp_path, change):
    model = hfconfig.model_of({"model_type": "gpt2", **GPT2}, "config.json").model_copy(update=change)
    with pytest.raises(ZbcError) as caught:
        hffolder.check_target(tmp_path / "out", model)
    assert caught.value.code == "E524" and not (tmp_path / "out").exists()
    assert ("experts of a llama with groups of experts" in caught.value.message) == (change is GROUPS)


# ---- refusals --------------------------------------------------------------------------------------------------

SIZED = {"model_type": "llama", "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e4, **LLAMA}
MIXED = {**SIZED, "model_type": "qwen3_moe", **MET, "head_dim": 8, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**SIZED, "model_type": "gemma"}, 'model_type = "gemma"'),
        ({**SIZED, "model_type": None}, "model_type = null"),
        ({"model_type": "gpt2", **GPT2, "activation_function": "relu"}, 'activation_function = "relu"'),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true"),
        ({**SIZED, "mlp_bias": True}, "mlp_bias = true"),
        ({**SIZED, "attention_bias": True}, "attention_bias = true"),
        ({**SIZED, "pad_token_id": 0}, "pad_token_id = 0"),
        ({**SIZED, "hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        ({**SIZED, "quantization_config": {"bits": 4}}, "quantization_config"),
        ({**SIZED, "rope_scaling": {"rope_type": "yarn", "factor": 4}}, 'rope_scaling = {"rope_type": "yarn"'),
        ({**SIZED, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({**SIZED, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta = 500000.0"),
        ({**SIZED, "rope_parameters": {"full_attention": {}}}, "rope_parameters = "),
        ({**SIZED, "rope_theta": None}, "rope_theta = null"),
        ({**SIZED, "num_key_value_heads": None}, "num_key_value_heads = null"),
        ({**SIZED, "model_type": "mistral"}, "sliding_window = null"),
        ({**SIZED, "model_type": "qwen3"}, "head_dim = null"),
        ({**SIZED, "model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window = true"),
        ({**SIZED, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types = "),
        ({**SIZED, "layer_types": 3}, "layer_types = 3"),
        ({**MIXED, "decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({**MIXED, "num_local_experts": 5}, "num_experts = 6"),
        ({**MIXED, "output_router_logits": True}, "output_router_logits = true"),
        ({**SIZED, "hidden_size": "big"}, "hidden"),
        ({**SIZED, "rope_theta": 10**400}, "no valid model: rope_theta"),
        ({"model_type": "gpt2", **GPT2, "n_layer": -1}, "layers"),
    ],
)
def test_what_zbc_does_not_compute_is_refused_by_name(config, words):
    with refused("E521", words):
        hfconfig.model_of(config, "config.json")


def test_a_variant_is_another_model(folders):
    error = error_of(folders("mistral")[0], variant="qwen2")
    assert error.code == "E521" and "variant" in error.details[0]


def test_old_and_new_configurations_say_the_same():
    """transformers 5 moved rope_theta into rope_parameters."""
    bare = {key: value for key, value in SIZED.items() if key != "rope_theta"}
    new = hfconfig.model_of({**bare, "rope_parameters": {"rope_type": "default", "rope_theta": 10000}}, "config.json")
    assert hfconfig.model_of({**SIZED, "rope_scaling": None}, "config.json") == new
    written = hfconfig.config_of(new)
    assert hfconfig.config_of(hfconfig.model_of(written, "config.json")) == written


def error_of(folder, **changes):
    with pytest.raises(ZbcError) as caught:
        run_threads(plan_of(folder, **changes), 1)
    return caught.value


@pytest.fixture
def copy(folders, tmp_path):
    """A Llama folder to damage."""
    return copied(folders("llama")[0], tmp_path)


def copied(source, target):
    for file in ("config.json", SINGLE):
        (target / file).write_bytes((source / file).read_bytes())
    return target


def test_a_job_of_another_size_is_told_every_difference(copy, folders):
    config = json.loads((copy / "config.json").read_text())
    plan = plan_of(copy)
    (copy / "config.json").write_text(json.dumps({**config, "vocab_size": 62, "rms_norm_eps": 1e-5}))
    with refused("E521") as caught:
        run_threads(plan, 1)
    assert [line.split(":")[0] for line in caught.value.details] == ["vocab", "norm_eps"]
    assert error_of(folders("gpt2")[0], seq_len=SEQ + 1).code == "E521"


NAME = "model.layers.0.self_attn.k_proj.weight"
WRONG = [(NAME, None, f"lacks {NAME}"), ("score.weight", torch.zeros(2), "score.weight")]
WRONG += [(NAME, torch.zeros(32, 16), "needs [32, 32]"), (NAME, torch.zeros(32, 32, dtype=torch.int64), "needs [32")]


@pytest.mark.parametrize(("name", "tensor", "words"), WRONG)
def test_missing_and_surplus_tensors_and_those_of_another_shape_or_type_are_named(copy, name, tensor, words):
    tensors = {**load_file(copy / SINGLE), name: tensor}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, copy / SINGLE)
    error = error_of(copy)
    assert error.code == "E520" and name in error.message and words in error.message


def test_files_that_are_cut_off_missing_or_elsewhere_are_refused(copy, tmp_path):
    raw = (copy / SINGLE).read_bytes()
    for cut in (0, 4, 100, len(raw) - 8):
        (copy / SINGLE).write_bytes(raw[:cut])
        assert error_of(copy).code == "E520"
    for places in ({"a": "../model.safetensors"}, {"a": "/etc/passwd"}, {"a": "gone.safetensors"}, {"a": 3}, [1]):
        (copy / INDEX).write_text(json.dumps({"weight_map": places}))
        assert error_of(copy).code == "E520", places
    (copy / INDEX).write_text("{")
    assert error_of(copy).code == "E520"


def test_what_is_no_folder_of_weights_is_e520_and_pickles_are_never_loaded(copy, tmp_path):
    (copy / SINGLE).unlink()
    (copy / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    error = error_of(copy)
    assert error.code == "E520" and "pickle" in error.hint
    (empty := tmp_path / "empty").mkdir()
    for text in (None, "[1]", "{", ""):
        if text is not None:
            (empty / "config.json").write_text(text)
        with refused("E520"):
            hfconfig.read_config(empty)
