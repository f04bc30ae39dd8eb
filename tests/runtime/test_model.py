"""Layers, their names and their initial weights do not depend on the partition; bad factories are explained."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.jobs import job
from tests.refusals import error_of, refused
from tests.runtime.small_plans import GPT, make_plan, make_program, make_worker, parameters
from zbc.compiler.cost import estimate
from zbc.job import spec, userobject
from zbc.job.flops import training_flops
from zbc.runtime.seeding import draws, seed_of, seeded
from zbc.training.models import model

HERE = "tests.runtime.user_models"


def layers(**changes):
    return model.layers(spec.Model.model_validate({**GPT, **changes}), 7)


def user(name, count=4, **args):
    return layers(family=f"{HERE}:{name}", layers=count, args=args)


def test_the_seed_changes_all_initial_weights_and_building_leaves_the_generator_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, second = (parameters([make_worker(make_plan(make_program("1f1b", 1, 1), seed=s))]) for s in (1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    drawn = [name for name, p in first.items() if "norm" not in name and not name.endswith("bias")]
    assert drawn and not any(torch.equal(first[name], second[name]) for name in drawn)


def test_residual_projections_start_smaller():
    block = layers(hidden=128, heads=4)[1].build(0)
    assert block.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.down.weight.std().item() == pytest.approx(0.02 / (2 * 6) ** 0.5, rel=0.05)
    assert not block.qkv.bias.any()


@pytest.mark.parametrize("model", [{}, {"variant": "rotary"}, {"family": "llama"}], ids=str)
def test_no_model_can_see_the_future(model):
    chain = torch.nn.Sequential(*(plan.build(0) for plan in layers(**model)))
    tokens = torch.randint(61, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 61
    a, b = chain(tokens), chain(changed)
    assert torch.equal(a[:, :9], b[:, :9]) and not torch.equal(a[:, 9:], b[:, 9:])


def test_layers_that_draw_random_numbers_are_recognised():
    assert draws(torch.nn.Sequential(torch.nn.Dropout(0.1))) and draws(torch.nn.MultiheadAttention(8, 2, dropout=0.1))
    assert draws(torch.nn.RReLU())
    assert not draws(torch.nn.Dropout(0.0)) and not draws(torch.nn.MultiheadAttention(8, 2))
    marked = torch.nn.ReLU()
    marked.zbc_random = True
    assert draws(marked)


def test_seeds_depend_on_every_part():
    seeds = {seed_of(*parts) for parts in [(1, 2, "a"), (1, 2, "b"), (12, "a"), (1, "2a"), (2, 1, "a")]}
    assert len(seeds) == 5 and all(0 <= seed < 2**63 for seed in seeds)
    with seeded(5):
        first = torch.randn(2)
    with seeded(5):
        assert torch.equal(first, torch.randn(2))


# ---- factories that do not work --------------------------------------------------------------------------------


UNFIT = {
    "another number of layers": (lambda: user("residual", count=5), "E505", "returned 4 layers, model.layers is 5"),
    "no module": (lambda: user("bad_builders")[2].build(0), "E502", "builder of layers.2 returned str"),
    "one parameter twice": (lambda: user("tied"), "E508", "layers.0 and layers.2 share a parameter"),
    "exchanges gradients itself": (lambda: user("wrapped")[1].build(0), "E509", "layers.1.0 uses FSDPModule"),
    "fails": (lambda: user("raises"), "E502", "raises failed"),
    "no layers": (lambda: user("three_numbers"), "E502", "layer 0 of"),
    "one module": (lambda: user("one_module"), "E502", "not a list of layers"),
    "not there": (lambda: user("missing"), "E502", "cannot import model.family"),
    "not callable": (lambda: user("NOT_CALLABLE"), "E502", "is int, not something to call"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_factory_that_does_not_work_is_refused_in_words(what):
    make, code, text = UNFIT[what]
    with refused(code, text) as caught:
        make()
    assert code != "E505" or caught.value.hint == "set model.layers = 4 and plan again"


def test_errors_of_a_factory_are_shown_with_their_place():
    error = error_of(user, "raises", text="wrong width")
    assert error.details[-1] == "ValueError: wrong width" and "user_models.py" in error.details[-2]
    assert "text='wrong width'" in error.message
    assert "ModuleNotFoundError" in error_of(layers, family="no.such.module:layers", layers=1).details[-1]


def test_factories_are_found_in_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "my_own_net.py").write_text("def layers(n):\n    return [n]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in __import__("sys").path if p not in ("", str(tmp_path))])
    assert userobject.load("my_own_net:layers", "model.family")(3) == [3]


# ---- losses ----------------------------------------------------------------------------------------------------


def test_losses_are_means_or_functions_of_the_user():
    logits, targets = torch.zeros(2, 3, 5), torch.randint(5, (2, 3))
    assert model.loss("cross_entropy")(logits, targets).item() == pytest.approx(torch.tensor(5.0).log().item())
    assert model.loss("cross_entropy")(logits[:, 0], targets[:, 0]).dim() == 0
    a, b = torch.ones(2, 2), torch.zeros(2, 2)
    assert model.loss("mse")(a, b).item() == 1.0
    assert model.loss(f"{HERE}:sum_of_errors")(a, b).item() == 4.0


@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [model.mse_kernel, None])
def test_mse_has_the_bits_of_torchs_own(of, kernel, monkeypatch):
    monkeypatch.setattr(model, "mse_kernel", kernel)
    with pytest.warns(UserWarning, match="target size"):  # other shapes are torch's to judge
        assert model.loss("mse")(torch.ones(2, 3), torch.zeros(3)).item() == 1.0
    targets = torch.randn(5, 7)
    found = []
    for function in (model.loss("mse"), functional.mse_loss):
        output = torch.linspace(-2, 3, 35).view(5, 7).to(of).requires_grad_()
        loss = function(output, targets)
        loss.backward()
        found.append((loss.dtype, loss.item(), output.grad.tolist()))
    assert found[0] == found[1]


def test_arguments_of_a_factory_may_have_any_name():
    given = {"name": "a", "what": "b", "code": "c", "function": "d"}
    assert userobject.call(dict, given, "builtins:dict", "model.family") == given


class Types(TorchDispatchMode):
    """The types that `log_softmax` is given."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._log_softmax.default:
            self.seen.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_loss_of_narrow_logits_is_wide_also_under_a_gpus_autocast(device):
    """On a GPU, autocast of cross entropy would round its statistics to bfloat16."""
    asked = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    try:
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, torch.bfloat16)
        with FakeTensorMode(), Types() as types:  # needs no GPU
            logits = torch.empty(4, 8, 16, device=device, dtype=torch.bfloat16)
            loss = model.cross_entropy(logits, torch.empty(4, 8, device=device, dtype=torch.long))
    finally:
        torch.set_autocast_enabled(device, asked[0])
        torch.set_autocast_dtype(device, asked[1])
    assert types.seen == [torch.float32]
    assert loss.dtype is torch.float32


# ---- the compiler's counts are those of the built models ----------------------------------------------------------


SIZES = {"layers": 3, "hidden": 64, "heads": 4, "vocab": 300, "seq_len": 32}
FAMILIES = [{}, {"variant": "rotary", "ffn_hidden": 80}, {"family": "llama"}]
FAMILIES += [{"family": "llama", "kv_heads": 2, "ffn_hidden": 96}]
FAMILIES += [{"family": "llama", "kv_heads": 1, "head_size": 24, "ffn_hidden": 72}]
FAMILIES += [{"family": "llama", "variant": "qwen2", "kv_heads": 2}]
FAMILIES += [{"family": "llama", "variant": "qwen3", "kv_heads": 2, "head_size": 24, "window": 12}]
EXPERTS = [
    {"family": "llama", "experts": 4, "ffn_hidden": 40},
    {"family": "llama", "experts": 6, "top_k": 3, "ffn_hidden": [24, 48], "variant": "qwen2"},
    {"family": "llama", "experts": 4, "variant": "qwen3", "kv_heads": 2, "head_size": 24, "ffn_hidden": 48},
    {"experts": 4, "top_k": 1, "ffn_hidden": [64, 32]},
]


def plans_of(description):
    return model.layers(description.model, 7)


@pytest.mark.parametrize("changes", FAMILIES + EXPERTS)
def test_parameters_are_counted_as_they_are(changes):
    described = job(model={**SIZES, **changes})
    counted = {layer.name: layer.params for layer in estimate.layers(described)}
    assert counted == {plan.name: sum(p.numel() for p in plan.on_meta().parameters()) for plan in plans_of(described)}
    each = {layer.name: sorted(layer.parts) for layer in estimate.layers(described)}
    assert each == {plan.name: sorted(p.numel() for p in plan.on_meta().parameters()) for plan in plans_of(described)}


@pytest.mark.parametrize("changes", FAMILIES + EXPERTS)
def test_what_a_block_keeps_for_its_backward_is_what_is_counted(changes):
    """Plain autograd keeps the same as F; storage that is no parameter or buffer counts, once."""
    size, described = 2, job(model={**SIZES, **changes})
    block = plans_of(described)[1].build(0)
    x = torch.randn(size, 32, 64, requires_grad=True)
    kept, own = {}, {t.untyped_storage().data_ptr() for t in [*block.parameters(), *block.buffers()]}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.is_floating_point():
            kept[storage.data_ptr()] = (storage.nbytes(), storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = block(x)
    assert y.shape == x.shape
    assert sum(nbytes for nbytes, _ in kept.values()) == pytest.approx(
        estimate.layers(described)[1].size.act_b, rel=0.06
    )


@pytest.mark.long
def test_mfu_counts_three_forwards_of_what_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    for changes in FAMILIES:
        described, x = job(model={**SIZES, **changes}).model, torch.zeros(1, 32, dtype=torch.long, device="meta")
        with FlopCounterMode(display=False) as counter:
            for plan in model.layers(described, 7):
                x = plan.on_meta()(x)
        # torch counts attention's whole square, but a token sees only earlier tokens within its window.
        w = described.window or 32
        unseen = 3 * 4 * 4 * described.head_width * (32 * 32 - 32 * w + w * w / 2)
        assert training_flops(described) == pytest.approx(3 * (counter.get_total_flops() - unseen))


def test_mfu_counts_the_experts_a_token_meets_and_the_router():
    plain = job(model=SIZES).model
    wide = {**SIZES, "experts": 4, "ffn_hidden": 256}
    met = [training_flops(job(model={**wide, "top_k": top}).model) for top in (1, 2)]
    mlp, router = 6 * 32 * 3 * 2 * 64 * 256, 6 * 32 * 3 * 64 * 4  # 6 per weight and token, in three blocks
    assert met[0] == pytest.approx(training_flops(plain) + router)
    assert met[1] == pytest.approx(met[0] + mlp)
