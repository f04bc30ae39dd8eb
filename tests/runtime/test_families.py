"""The built-in families: the compiler's counts match the built models, and outputs are correct."""

import pytest
import torch

from tests.jobs import job
from tests.runtime.small_plans import LLAMA
from zbc.compiler.cost import estimate
from zbc.job.flops import training_flops
from zbc.training.models import model

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


def layers(description):
    return model.layers(description.model, 7)


@pytest.mark.parametrize("changes", FAMILIES + EXPERTS)
def test_parameters_are_counted_as_they_are(changes):
    described = job(model={**SIZES, **changes})
    counted = {layer.name: layer.params for layer in estimate.layers(described)}
    assert counted == {plan.name: sum(p.numel() for p in plan.on_meta().parameters()) for plan in layers(described)}
    each = {layer.name: sorted(layer.parts) for layer in estimate.layers(described)}
    assert each == {plan.name: sorted(p.numel() for p in plan.on_meta().parameters()) for plan in layers(described)}


@pytest.mark.parametrize("changes", FAMILIES + EXPERTS)
def test_what_a_block_keeps_for_its_backward_is_what_is_counted(changes):
    """Plain autograd keeps the same as F; storage that is no parameter or buffer counts, once."""
    size, described = 2, job(model={**SIZES, **changes})
    block = layers(described)[1].build(0)
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


def test_queries_of_one_group_share_keys_and_values():
    """With the queries of two heads alike, heads of one group agree and heads of different groups do not."""
    block = model.layers(job(model={**LLAMA, "vocab": 256, "heads": 4}).model, 7)[1].build(0)
    torch.nn.init.normal_(block.qkv.weight)
    q = block.qkv.weight.data[: 4 * 8].view(4, 8, 32)
    q[:] = q[:1]
    heads = block._mix(block.qkv(torch.randn(1, 16, 32))).view(16, 4, 8)
    assert torch.equal(heads[:, 0], heads[:, 1]) and torch.equal(heads[:, 2], heads[:, 3])
    assert not torch.allclose(heads[1:, 1], heads[1:, 2])


def test_mfu_counts_the_experts_a_token_meets_and_the_router():
    plain = job(model=SIZES).model
    wide = {**SIZES, "experts": 4, "ffn_hidden": 256}
    met = [training_flops(job(model={**wide, "top_k": top}).model) for top in (1, 2)]
    mlp, router = 6 * 32 * 3 * 2 * 64 * 256, 6 * 32 * 3 * 64 * 4  # 6 per weight and token, in three blocks
    assert met[0] == pytest.approx(training_flops(plain) + router)
    assert met[1] == pytest.approx(met[0] + mlp)
