"""Adapters: losses equal LoRA in plain torch, peft, and one process under any partition; and files."""

import json
import re
import shutil
from functools import cache

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrize

from tests.refusals import refused
from tests.runtime.small_plans import LLAMA, hold, make_plan, make_program, make_worker, parameters, reference
from tests.runtime.test_checkpoints import at
from tests.runtime.test_gradients import VECTORS
from tests.runtime.test_pretrained import MODELS, in_files, of_folder
from tests.threads import losses_of, run_threads
from tests.tiers import few
from zbc.job import adapterfolder
from zbc.job.hffolder import write_shard
from zbc.job.spec import Adapter
from zbc.runtime.core.slot import Slot, using
from zbc.training.building.context import Settings
from zbc.training.models import adapters, pretrained

# torch hides this warning while it compiles, which fails if several threads do.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

SMALL = {"rank": 4, "alpha": "rslora 3"}
STEPS = 20


def plan_of(folder, targets, schedule="zb-h1", p=2, m=4, v=None, **more):
    """A plan that begins with the weights of a folder."""
    program = make_program(schedule, p, m, v)
    how = {"lr": 0.01, "eps": 1e-3}  # with less Adam turns the rounding of gradients near 0 into steps
    return of_folder(folder, program, optimizer=how, adapter={**SMALL, "targets": targets}, **more)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(kind):
        if kind not in made:
            torch.manual_seed(3)
            made[kind] = tmp_path_factory.mktemp(kind)
            MODELS[kind]().save_pretrained(made[kind])
        return made[kind]

    return folder


class Lora(nn.Module):
    """LoRA as its paper has it, on a weight (outputs, inputs) or a stack of them, maybe `turned`; peft's tensors."""

    def __init__(self, down, up, scale, turned):
        super().__init__()
        self.turned, self.scale = turned, scale
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)

    def forward(self, weights):
        count = len(weights) if weights.dim() == 3 else 1
        downs = self.down.unflatten(0, (count, -1))
        ups = self.up.unflatten(1, (-1, count)).permute(2, 0, 1)
        return weights + self.scale * ((ups @ downs).mT if self.turned else ups @ downs).view_as(weights)


def tensors_of(workers):
    """The adapters of a run as peft calls them."""
    settings = Settings.of(workers[0].plan.manifest)
    found = adapters.tensors_of(settings.adapter, settings.model, in_files(*workers))
    tensors = {name: tensor.clone() for name, tensor in found.items()}
    adapterfolder._stacked(tensors)
    return tensors


def with_lora(folder, tensors, saved=None):
    """The model of transformers with adapters by peft's names, and its trained parameters."""
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder)
    peer.requires_grad_(False)
    modules = {name.removeprefix("base_model.model.").removesuffix(".lora_A.weight") for name in tensors}
    whole = [n for n in modules if n.endswith("weight") and ".lora_" not in n]
    found = {f"base_model.model.{name}": peer.get_parameter(name).requires_grad_(True) for name in whole}
    for name, parameter in found.items():
        parameter.data.copy_(tensors[name])
    for name in sorted(n for n in modules if not n.endswith("weight")):
        down, up = (tensors[f"base_model.model.{name}.lora_{side}.weight"].clone() for side in "AB")
        leaf = name.rpartition(".")[2]
        module, weight = peer.get_submodule(name.removesuffix(".base_layer")), "weight"
        turned = isinstance(module, transformers.pytorch_utils.Conv1D)
        if leaf in ("experts", "base_layer"):  # peft's wrapper of gate_up_proj is inside of that of down_proj
            weight, turned = "down_proj" if leaf == "experts" else "gate_up_proj", module.is_transposed
        layer = Lora(down, up, 1.5, turned)  # 3 / sqrt(4)
        parametrize.register_parametrization(module, weight, layer)
        found |= {f"base_model.model.{name}.lora_{side}.weight": p for side, p in (("A", layer.down), ("B", layer.up))}
    return peer, found


def with_peft(folder, tensors, saved):
    """The same model with the adapters that peft loads from a folder."""
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder)
    peer = pytest.importorskip("peft").PeftModel.from_pretrained(peer, saved, is_trainable=True)
    named = {re.sub(r"\.(modules_to_save|default)\b", "", name): p for name, p in peer.named_parameters()}
    return peer, {name: p for name, p in named.items() if p.requires_grad}


def losses_in_plain_torch(peer, named, workers, m=4):
    batches = next(w.batches for w in workers if w.batches is not None)
    options = Settings.of(workers[0].plan.manifest).optimizer
    optimizer = torch.optim.AdamW(
        list(named.values()), lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay
    )
    losses = []
    for step in range(STEPS):
        each = []
        for mb in range(m):
            logits, target = peer(batches.inputs(step, mb)).logits, batches.targets(step, mb)
            each.append(nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()))
            (each[-1] / m).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(one.item() for one in each) / m)
    return losses


WHOLE = ["whole lm_head", "whole embed.tokens"]
CASES = [
    ("llama-grouped", ["q_proj", "v_proj"]),
    ("llama", ["*"]),
    ("gpt2", ["c_attn", "mlp.c_proj"]),
    ("mistral", ["self_attn.*", "layers.1.gate_up"]),
    ("llama", ["q_proj", *WHOLE, "whole model.norm"]),
    ("qwen3_moe", ["q_proj", "experts.*"]),
]


@pytest.mark.long("with_lora")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("by", [with_lora, with_peft])
@pytest.mark.parametrize(("kind", "targets"), few(CASES, CASES[:5:4]), ids=str)
def test_losses_and_adapters_are_those_of_lora_in_plain_torch_and_of_peft(folders, tmp_path, by, kind, targets):
    plan = plan_of(folders(kind), targets)
    started = [make_worker(plan, rank) for rank in range(2)]
    begun = tensors_of(started)
    assert all((t == 0).all() == name.endswith("lora_B.weight") for name, t in begun.items())
    save(tmp_path, Settings.of(plan.manifest), started)
    peer, named = by(folders(kind), begun, tmp_path)
    workers = run_threads(plan, STEPS)
    assert losses_of(workers) == pytest.approx(losses_in_plain_torch(peer, named, workers), abs=1e-5)
    trained = tensors_of(workers)
    assert trained.keys() == named.keys()
    for name, tensor in trained.items():
        torch.testing.assert_close(tensor, named[name].detach(), rtol=1e-3, atol=1e-4, msg=name)
        assert not tensor.equal(begun[name])


# ---- however it is cut up ----------------------------------------------------------------------------------------

TARGETS = {**SMALL, "targets": ["q_proj", "v_proj", "down"]}
SCHEDULES = [("1f1b", 3, 4, None), ("zb-h1", 2, 4, None)]
SCHEDULES += [(kind, 2, 4, 2) for kind in ("zb-v", "interleaved-1f1b", "dualpipe-v")]


@pytest.mark.long("recompute 1-1f1b-3-4-None")
@pytest.mark.parametrize(("schedule", "p", "m", "v"), few(SCHEDULES, [SCHEDULES[0], SCHEDULES[2]]))
@pytest.mark.parametrize("activations", few(["keep", "recompute 1", "recompute", "selective"], ["keep", "recompute 1"]))
def test_any_schedule_has_the_bits_of_one_process(schedule, p, m, v, activations):
    program = make_program(schedule, p, m, v)
    kept = () if schedule == "1f1b" else ("embed.tokens", "head.logits")
    targets = [*TARGETS["targets"], *(f"whole {name}" for name in kept)]
    adapter = {**TARGETS, "dropout": 0.2 if kept else 0.0, "targets": targets}
    plan = make_plan(program, model=LLAMA, adapter=adapter, activations=activations, optimizer={"lr": 0.01})
    workers, wanted = run_threads(plan, 3), reference(plan, 3)
    hold(workers, wanted)
    before = reference(plan, 0).weights
    changed = {name for name, p in wanted.weights.items() if not p.equal(before[name])}
    assert changed == {name for name in before if ".lora." in name or name.removesuffix(".weight") in kept}


def test_initial_weights_of_the_base_do_not_depend_on_adapters_of_which_each_has_its_own():
    plans = [make_plan(make_program("1f1b", 1, 2), model=LLAMA, adapter=adapter) for adapter in (TARGETS, None)]
    one, plain = (parameters([make_worker(plan)]) for plan in plans)
    assert all(one[name].equal(plain[name]) for name in plain)
    downs = [one[f"layers.{i}.qkv.lora.{key}.down.weight"] for i in (0, 1) for key in ("q_proj", "v_proj")]
    assert all(not a.equal(b) for i, a in enumerate(downs) for b in downs[:i])


def test_frozen_weights_have_neither_gradients_nor_w_nor_state():
    plan = make_plan(make_program("zb-h1", 2, 4), model=LLAMA, adapter=TARGETS, cuts=[0, 7, 8])
    worker = run_threads(plan, 1)[0]
    stage = worker.stages[0]
    assert len(worker.optimizers[0].optimizer.state) == LLAMA["layers"] * 3 * 2
    x, slot = torch.randn(2, 16, 32, requires_grad=True), Slot()
    with using(slot):
        y = stage.layers[1].module(x)
    slot.split = True
    y.sum().backward()
    assert len(slot) == 3 * 2  # deferred to W: down and up of three
    assert all(p.grad is None for p in stage.layers[1].module.parameters())
    slot.run()
    given = {name for name, p in stage.layers[1].module.named_parameters() if p.grad is not None}
    assert given == {name for name, p in stage.layers[1].module.named_parameters() if p.requires_grad}


# ---- layers of users ---------------------------------------------------------------------------------------------


def mixed():
    """Layers with linear layers inside of them, one that is used as it is, and frozen buffers."""
    torch.manual_seed(1)
    inner = [nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Linear(12, 8)) for _ in range(3)]
    return [nn.Linear(8, 8), *inner]


USERS = {"family": f"{__name__}:mixed", "layers": 4, "loss": "mse"}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_linear_layers_of_users_get_adapters_by_name(schedule):
    adapter = {"rank": 2, "targets": ["layers.0", "layers.2.*", "whole layers.2.0", "whole 3.*"]}
    plan = make_plan(make_program(schedule, 2, 4), model=USERS, **VECTORS, adapter=adapter)
    workers = run_threads(plan, 3)
    names = {name for name, p in parameters(workers).items() if p.requires_grad}
    lora = {f"layers.{n}.lora.{n[-1]}.{side}.weight" for n in ("0", "2.3") for side in ("down", "up")}
    whole = {f"layers.{n}.{leaf}" for n in ("2.0", "3.0", "3.1", "3.3") for leaf in ("weight", "bias")}
    assert names == lora | whole and {n[17:] for n in tensors_of(workers) if ".lora_" not in n} == whole
    hold(workers, reference(plan, 3))


@cache
def handed_out_again():
    return mixed()


def test_linear_layers_that_are_handed_out_again_get_one_adapter_each():
    users = {**USERS, "family": f"{__name__}:handed_out_again"}
    plan = make_plan(make_program("1f1b", 1, 4), model=users, **VECTORS, adapter={"rank": 2})
    linears = ("0", *(f"{i}.{j}" for i in (1, 2, 3) for j in (0, 3)))
    wanted = {f"layers.{n}.lora.{n[-1]}.{side}.weight" for n in linears for side in ("down", "up")}
    for _ in range(2):
        assert {name for name, p in parameters([make_worker(plan)]).items() if p.requires_grad} == wanted
    with refused("E110", match=r"\*\.1"):
        make_worker(make_plan(plan.program, model=users, **VECTORS, adapter={"rank": 2, "targets": ["*.1"]}))


# ---- checkpoints and files ---------------------------------------------------------------------------------------


def checkpointed(folder, p, schedule, tmp_path, **how):
    plan = plan_of(folder, ["q_proj", "up_proj", *WHOLE], schedule, p, checkpoint={"every": 2, "keep": 9})
    return run_threads(plan, 4, folder=tmp_path, **how)


@pytest.mark.long
def test_checkpoints_hold_adapters_alone_and_go_on_under_another_cut(folders, tmp_path):
    whole = checkpointed(folders("llama"), 2, "zb-h1", tmp_path / "a")
    kept = json.loads((at(tmp_path / "a", 2) / "index.json").read_text())["tensors"]
    names = {name.split(".", 1)[1] for name in kept if name.startswith("model.")}
    assert names == {name for name, p in parameters(whole).items() if p.requires_grad}
    rest = checkpointed(folders("llama"), 3, "1f1b", tmp_path / "b", resume=at(tmp_path / "a", 2))
    assert losses_of(rest) == losses_of(whole)[2:]
    torch.manual_seed(4)
    MODELS["llama"]().save_pretrained(tmp_path / "other")
    with refused("E613", match="frozen"):
        checkpointed(tmp_path / "other", 2, "1f1b", tmp_path / "c", resume=at(tmp_path / "a", 2))


def save(folder, settings, workers):
    """Saves as every rank of a run does; the first rank completes it."""
    said = []
    for number, worker in enumerate(workers):
        found = adapters.tensors_of(settings.adapter, settings.model, in_files(worker))
        said.append(write_shard(folder, number, len(workers), found) if found else "")
    adapterfolder.complete(folder, settings.adapter, settings.model, said, settings.pretrained)


PUBLISHED = {
    "llama": ("model.layers.{}.self_attn.q_proj", "model.layers.{}.mlp.down_proj"),
    "gpt2": ("transformer.h.{}.attn.c_attn", "transformer.h.{}.attn.c_proj"),
}


@pytest.mark.parametrize(
    ("kind", "targets", "said"),
    [("llama", ["q_proj", "down", "whole head"], ["down_proj", "q_proj"]), ("gpt2", ["c_attn", "attn.c_proj"], None)],
)
def test_files_have_the_names_that_peft_publishes(folders, tmp_path, kind, targets, said):
    plan = plan_of(folders(kind), targets)
    save(tmp_path, Settings.of(plan.manifest), [make_worker(plan, rank) for rank in range(2)])
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    names = {one.format(i) for one in PUBLISHED[kind] for i in range(4)}
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    whole = {tensors.pop(name) is None or name[17:-7] for name in sorted(tensors) if ".lora_" not in name}
    assert tensors.keys() == {f"base_model.model.{name}.lora_{side}.weight" for name in names for side in "AB"}
    assert all(t.shape[0 if "lora_A" in name else 1] == 4 for name, t in tensors.items())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"], config["use_rslora"]) == ("LORA", 4, 3.0, True)
    assert config["target_modules"] == (said or sorted(names))  # c_proj alone would be that of the MLP, too
    assert config["modules_to_save"] == (["lm_head", "model.norm"] if kind == "llama" else None)
    assert whole == {*(config["modules_to_save"] or [])}
    assert config["fan_in_fan_out"] is (kind == "gpt2")


@pytest.mark.long("qwen3_moe-targets1")
@pytest.mark.parametrize(("kind", "targets"), [("llama-grouped", ["*", *WHOLE]), ("qwen3_moe", ["experts.*"])])
def test_merged_weights_compute_what_adapters_beside_them_do(folders, tmp_path, kind, targets):
    plan = plan_of(folders(kind), targets)
    workers, settings = run_threads(plan, 3), Settings.of(plan.manifest)
    found = in_files(*workers)
    merged = adapters.merged(settings.adapter, settings.model, found)
    assert merged.keys() == {name for name in found if ".lora." not in name}
    files = {name: t.detach().contiguous() for name, t in pretrained.tensors_of(settings.model, merged).items()}
    save_file(files, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(folders(kind) / "config.json", tmp_path)
    peers = [with_lora(folders(kind), tensors_of(workers))[0]]
    peers += [transformers.AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path, folders(kind))]
    tokens = torch.randint(61, (2, 16))
    adapted, plain, before = (peer(tokens).logits for peer in peers)
    torch.testing.assert_close(plain, adapted, rtol=1e-4, atol=1e-4)
    assert (plain - before).abs().max() > 1e-2


def test_alpha_counts_over_rank_and_dropout_in_training_alone():
    assert [Adapter(rank=8, alpha=alpha).scale for alpha in (16.0, None)] == [2.0, 1.0]
    assert Adapter(rank=16, alpha="rslora 8").scale == 2.0
    one, x = adapters.Lora(nn.Linear(8, 8), 8, 4, 0.5), torch.ones(2, 8)
    nn.init.ones_(one.up.weight)
    assert not one(x, 1.0).equal(one(x, 1.0)) and one.eval()(x, 1.0).equal(one(x, 1.0))
