"""Profiles of layers that ran on fake tensors: the bytes of a measured profile, and plans made with them."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

from tests.drawn import in_turn
from tests.jobs import job
from tests.refusals import refused
from tests.runtime.zoo import layer, layer_of
from tests.tiers import few
from zbc.compiler.compile import compile_job
from zbc.compiler.cost import estimate
from zbc.job.profile import read
from zbc.runtime.core.grouped import Loads
from zbc.runtime.core.private import FakeTensor, fake_mode
from zbc.runtime.core.tensors import constant
from zbc.training.models.experts import Experts
from zbc.training.profiling import dry, words
from zbc.training.profiling.kernels import Kernels
from zbc.training.profiling.rig import build_rig
from zbc.training.profiling.weigh import parts

CPU = torch.device("cpu")
HERE = "tests.runtime.test_dry"
GPT = {"layers": 2, "vocab": 40, "seq_len": 16}
LLAMA = {**GPT, "family": "llama", "kv_heads": 2}
MOE = {**LLAMA, "experts": 8, "top_k": 2, "ffn_hidden": 16}


def of(model=GPT, *, pp=1, data=None, **changes):
    return job(model=model, pp=pp, m=4, data=data or {"kind": "synthetic"}, **changes)


def factory(name, data="Noise", **changes):
    model = {"family": f"{HERE}:{name}", "layers": 3, "loss": "cross_entropy", "seq_len": None, "vocab": None}
    return of(model, data={"kind": f"{HERE}:{data}"}, **changes)


# Fields that differ, with the reason: none so far.
KINDS = {
    "gpt": lambda: of(),
    "llama": lambda: of(LLAMA),
    "qwen": lambda: of({**LLAMA, "variant": "qwen3"}),
    "windows": lambda: of({**LLAMA, "window": 8}),
    "rotary, long": lambda: of({**GPT, "variant": "rotary", "seq_len": 128}),
    "short": lambda: of({**LLAMA, "hidden": 96, "seq_len": 8, "vocab": 2000, "dtype": "bfloat16"}),
    "tied": lambda: of({**GPT, "ties": True}),
    "bfloat16": lambda: of({**LLAMA, "dtype": "bfloat16"}),
    "parameters": lambda: of({**LLAMA, "dtype": "bfloat16", "parameters": "bfloat16"}),
    "fused gradients": lambda: of(train={"fused_gradients": True}),
    "chunks": lambda: of({**GPT, "loss_chunk": 8}),
    "tp": lambda: of(parallel={"tp": 2}),
    "tokens": lambda: of(LLAMA, parallel={"tp": 2, "tp_sequence": True}),
    "regather": lambda: of(LLAMA, parallel={"tp": 2, "tp_sequence": "regather"}),
    "cp": lambda: of(parallel={"cp": 2}),
    "slices": lambda: of(pp=2, kind="zb-h1", schedule={"slices": 2}),
    "vocabulary": lambda: of(pp=2, parallel={"vocabulary": "shared"}),
    "selective": lambda: of(LLAMA, memory={"activations": "selective"}),
    "recompute": lambda: of(memory={"activations": "recompute"}),
    "adapter": lambda: of(adapter={"rank": 4}),
    "experts": lambda: of(MOE),
    "experts of a gpt": lambda: of({**GPT, "experts": 4, "top_k": 2}),
    "experts in bfloat16": lambda: of({**MOE, "dtype": "bfloat16"}),
    "a shared expert": lambda: of({**MOE, "shared_hidden": 16, "balance_loss": 0.01}),
    "cut experts": lambda: of(MOE, parallel={"tp": 2, "expert_tp": 2}),
    "whole experts": lambda: of(MOE, parallel={"tp": 2, "ep": 2}),
    "experts over replicas": lambda: of(MOE, parallel={"dp": 4, "ep": 2}),
    "experts by muon": lambda: of(MOE, parallel={"dp": 2, "ep": 2}, optimizer={"kind": "muon"}),
    "muon": lambda: of(optimizer={"kind": "muon"}),
    "sgd": lambda: of(optimizer={"kind": "sgd"}),
    "tentative": lambda: of(pp=2, kind="zb-h1", optimizer={"sync": "post-validate"}),
    "factory": lambda: factory("layers"),
    "data that look at numbers": lambda: factory("layers", "Looks"),
}
OFTEN = ("llama", "parameters", "windows", "tokens", "adapter", "whole experts", "data that look at numbers")


NOISE = {"kind": f"{HERE}:Noise"}


def layers():
    return [nn.Conv1d(1, 4, 3, padding=1), Norm(), nn.Sequential(nn.Flatten(), nn.Linear(32, 3))]


OWN = {"forward": staticmethod(lambda ctx, x: x * 2), "backward": staticmethod(lambda ctx, grad: grad * 2)}
Doubled = type("Doubled", (torch.autograd.Function,), OWN)  # of a user


@layer(norm=lambda: nn.BatchNorm1d(4))
def Norm(self, x):
    return x + Doubled.apply(self.norm(x).relu())


class Noise:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.randn(1, 8), torch.tensor(index % 3)


class Looks(Noise):
    def __getitem__(self, index):
        x, label = super().__getitem__(index)
        return torch.from_numpy(x.numpy()), torch.tensor(int(label) % 3)


Reads = layer_of(
    lambda m, x: m.linear(x.transpose(1, 2)).transpose(1, 2) * (1.0 if x.sum().item() else 2.0),
    linear=lambda: nn.Linear(4, 4),
)


def readers(middle=Reads):
    return [nn.Conv1d(1, 4, 3, padding=1), middle(), layers()[-1]]


def lstms():
    return readers(layer_of(lambda m, x: m.cells(x)[0], cells=lambda: nn.LSTM(8, 8)))


@pytest.mark.long("llama", "tokens", "windows", "adapter", "parameters", "whole experts")
@pytest.mark.parametrize("name", few(KINDS, OFTEN))
def test_the_bytes_are_those_of_layers_that_compute(name):
    made = KINDS[name]()
    with mock.patch.object(Experts, "_chosen", in_turn):
        [measured] = parts(build_rig(made, CPU, apart=bool(made.vocabulary)), CPU)
    rig, [found] = dry.weighed(made)
    assert {*found} == {*measured} == {*rig.plain().kinds} >= {*rig.order}
    for kind in measured:
        assert found[kind].bytes.model_dump() == measured[kind].bytes.model_dump(), kind
        assert found[kind].model_copy(update={"bytes": measured[kind].bytes}) == measured[kind]
        assert found[kind].bytes.optimizer > 0 or name == "sgd" or not sum(found[kind].parts)


SHARED = {
    "one sum": {},
    "two sums": {"parallel": {"vocabulary": "shared-2"}},
    "bfloat16": {"model": {**GPT, "ties": True, "dtype": "bfloat16"}},
    "frozen": {"adapter": {"rank": 4}},
    "tp": {"model": LLAMA, "parallel": {"tp": 2, "tp_sequence": True}},
}


@pytest.mark.parametrize("name", few(SHARED, ("bfloat16", "tp")))
def test_what_shared_words_take_is_what_their_ops_take_that_compute(name):
    how = {"model": GPT, **SHARED[name]}
    made = of(pp=3, **{**how, "parallel": {"vocabulary": "shared", **how.get("parallel", {})}})
    found = dry.profiles(made, "words")[0].shared
    measured = words.weighed(build_rig(made, CPU, apart=True), Kernels("cpu", {}))
    assert found == measured and found.rows == -(-40 // (3 * made.parallel.tp))
    assert found.values["top"] == found.values["words"] == 2 * 16 * made.model.hidden * 4  # of all tokens
    assert len(found.parts) == 2 - made.model.tie_embeddings and {*found.kernels} == {*"site"}


PLANS = {
    "vshape": lambda: of({**GPT, "layers": 6}, pp=2, kind="zb-v"),
    "selective": lambda: of({**LLAMA, "layers": 4}, pp=2, kind="zb-h1", memory={"activations": "selective"}),
    "tp": lambda: of({**GPT, "layers": 4}, pp=2, parallel={"tp": 2}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", few(PLANS, ("vshape",)))
def test_a_plan_with_its_file_is_the_plan_without(name, tmp_path):
    plain = PLANS[name]()
    profile = dry.profile(plain)
    (tmp_path / "p.json").write_text(profile.dumps())
    assert read(tmp_path / "p.json").dumps() == profile.dumps()
    a, b = (compile_job(one).report for one in (plain, replace(plain, profile=read(tmp_path / "p.json"))))
    assert b.costs == "estimated" and b.barrier_ms == pytest.approx(a.barrier_ms)
    assert [rank.peak_bytes for rank in a.per_rank] == pytest.approx([rank.peak_bytes for rank in b.per_rank], rel=1e-3)


def test_given_times_of_layers_stay():
    costs = {"per": "layer", "f": 1.0, "b": 2.0, "w": 3.0}
    found = estimate.layers(replace(of(costs=costs), profile=dry.profile(of())))
    assert (found[1].f, found[1].b, found[1].bw) == (1.0, 2.0, 5.0)


@pytest.mark.long
@pytest.mark.parametrize("low", few([{}, {"dtype": "bfloat16"}], 1))
def test_on_a_gpu_a_norm_saves_one_number_per_row(low):
    """A CPU's norms keep the normalized input as well."""
    found = [dry.profile(of({**LLAMA, **low}, hardware={"device": device})) for device in ("cpu", "cuda")]
    kept = [profile.layers["block"].bytes.kept_b for profile in found]
    rows = 2 * 16 * 32
    assert kept[0] - kept[1] == 2 * 4 * rows


@pytest.mark.parametrize(("name", "why"), [("readers", "x.sum().item()"), ("lstms", "mkldnn_rnn_layer")])
def test_a_layer_that_needs_numbers_is_told(name, why):
    """Of what a kernel for an LSTM keeps, torch's rule of shapes says nothing."""
    with refused("E505", "cannot run without numbers", hint="zbc profile JOB.toml") as caught:
        dry.profile(factory(name))
    assert any("layers.1" in line for line in caught.value.details)
    assert any(why in line for line in caught.value.details)


def grouped():
    return {"a": [nn.Conv1d(1, 4, 3, padding=1), Norm(), Norm()], "b": [nn.Conv1d(1, 4, 3, padding=1)], "c": [Joined()]}


@layer(linear=lambda: nn.Linear(32, 3))
def Joined(self, a, b):
    return self.linear((a * b).flatten(1))


@pytest.mark.long
def test_layers_of_a_graph_have_cards_of_their_kinds():
    groups = {"graph": {"a": [], "b": [], "c": ["a", "b"]}, "groups": {"a": 3, "b": 1, "c": 1}}
    chain = factory("layers").model.model_dump(exclude_unset=True)
    found = dry.profile(job(model={**chain, "family": f"{HERE}:grouped", "layers": 5, **groups}, data=NOISE))
    assert found.order == ["Conv1d+data", "Norm", "Norm", "Conv1d+data", "Joined+loss"]
    norm, joined = found.layers["Norm"].bytes, found.layers["Joined+loss"].bytes
    assert joined.input == 2 * norm.output == 2 * norm.input


def test_loads_are_even_times_the_imbalance_of_a_rank():
    with dry.fakes(of({**MOE, "imbalance": 1.5})):
        assert Loads.of(8, [torch.zeros(2), torch.zeros(2), torch.zeros(5)]) == [[4, 4], [6, 6], [3, 3, 2, 2, 2]]
    assert Loads.of(3, [torch.tensor([1, 2])]) == [[1, 2]]


def test_nothing_of_it_stays():
    made = (1, 2, 7)
    for _ in range(2):
        with dry.fakes(of()):
            assert isinstance(constant(made, torch.float32, CPU), FakeTensor)
        assert fake_mode() is None and constant(made, torch.float32, CPU).tolist() == [*made]
