"""Several tensors between two layers: bitwise equal to one process, and no gradients for tensors without any."""

import pytest
import torch

from tests.jobs import job
from tests.refusals import refused
from tests.runtime.small_plans import make_plan, make_program, parameters
from tests.runtime.test_gradients import VECTORS, check_gradients, slack, user, without_step
from tests.runtime.user_models import both_errors, llama_config
from tests.threads import run_threads
from tests.tiers import few
from zbc.compiler.schedules import SCHEDULES
from zbc.errors import ZbcError
from zbc.runtime.core.bundle import Packing, taken_apart
from zbc.runtime.core.execute import run_step
from zbc.runtime.core.route import slice_loss
from zbc.runtime.transports import hub
from zbc.training.profiling.rig import IDLE, build_rig

SEVERAL = user("several", layers=8, count=8, width=8)


def plan_of(schedule="zb-v", p=2, m=4, *, model=SEVERAL, **how):
    return make_plan(make_program(schedule, p, m), model=model, data=VECTORS["data"], **how)


@pytest.mark.long("zb-v-recompute", "zb-h1-recompute", "interleaved-1f1b-recompute", "1f1b-keep")
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("schedule", few(SCHEDULES, ("1f1b", "zb-h1", "zb-v", "interleaved-1f1b")))
def test_gradients_are_those_of_one_process_bit_by_bit(schedule, activations):
    plan = plan_of(schedule, 4, 4, keep=without_step, activations=activations)
    check_gradients(plan, tolerance=slack(schedule))


TWO = 2 * (2 * 8 * 4)  # bytes of two tensors of 8 numbers per sample
SENT = [(SEVERAL, {TWO + 16, TWO + 16 + 16 + 64}), (user("structured"), {TWO, TWO + 16})]


@pytest.mark.parametrize(("model", "sizes"), SENT)
def test_messages_bring_all_of_them_and_gradients_of_those_alone_that_have_one(model, sizes, monkeypatch):
    """In addition 8 bytes of a mask and, of several, whole numbers, each at multiples of 16 bytes; but no constants."""
    sent, real = set(), hub.HubTransport.send

    def send(self, message, tensor, peer):
        sent.add(tensor.numel() * tensor.itemsize)
        return real(self, message, tensor, peer)

    monkeypatch.setattr(hub.HubTransport, "send", send)
    run_threads(plan_of("1f1b", 2, size=2, model=model), 1)
    assert sent == sizes


def test_a_tuple_is_packed_and_unpacked_without_a_change():
    tensors = (
        torch.randn(3, 5).t(),
        torch.tensor([True, False, True]),
        torch.randn(2, 2, dtype=torch.complex128),
        torch.tensor(7),
        torch.zeros(0, 4),
        torch.randn(5, dtype=torch.bfloat16),
        torch.tensor([float("nan"), -0.0, float("inf")]),
    )
    tensors = tuple(t.requires_grad_(t.dtype.is_floating_point) for t in tensors)
    layout = Packing.of(tensors, [tensor.requires_grad for tensor in tensors])
    found = layout.unpack(layout.pack(tensors, "x"))
    for one, other in zip(tensors, found, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and one.requires_grad == other.requires_grad
        bits, again = (t.detach().resolve_conj().contiguous().flatten().view(torch.uint8) for t in (one, other))
        assert bits.equal(again)
    assert found[0].stride() == tensors[0].stride()
    with pytest.raises(ZbcError, match="layer x returned"):
        layout.pack(tensors[::-1], "x")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"what": "dict"}, r"layers.2 cannot take the tensors \{'a': float32 \[2, 8\]\}"),
        ({"what": "none"}, r"layers.2 cannot take the tensors \(float32 \[2, 8\], None\)"),
        ({"what": "object"}, r"layers.1 returned object at \[1\]\['a'\]"),
        ({"what": "nothing"}, "layers.1 returned dict, in which there is no tensor"),
        ({"what": "sparse"}, "layers.1 returned a sparse_coo tensor"),
        ({"what": "pair"}, r"layers.2 cannot take the tensors \(float32 \[2, 8\], float32 \[2, 8\]\)"),
        ({"what": "pair", "last": True}, r"the last layer returns \(float32 .*\), and model.loss = mse takes one"),
    ],
)
def test_what_the_next_layer_cannot_be_given_is_refused_by_name(args, said):
    model = user("returning", **args)
    if args.get("last"):
        model = user("ends_in_two")
    with refused("E505", match=said):
        run_threads(plan_of("1f1b", 2, model=model), 1)


def test_a_number_beside_tensors_that_changes_is_refused_with_its_place():
    with refused("E505", match=r"layers.1 returned 1 at \['count'\], where 0 was before", hint="torch.tensor"):
        run_threads(plan_of("1f1b", 2, model=user("wavers")), 1)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"a": torch.zeros(2), "n": True}, r"True at \['n'\], where 1 was"),
        ({"a": torch.zeros(2), "n": torch.zeros(1)}, r"float32 \[1\] at \['n'\], where 1 was"),
        ({"a": torch.zeros(2), "b": 1}, r"returned \{'a': float32 \[2\], 'b': 1\}, it must be "),
        (torch.zeros(2), r"returned float32 \[2\], it must be"),
    ],
)
def test_another_structure_than_the_first_is_told(found, said):
    tensors, form = taken_apart({"a": torch.zeros(2), "n": 1})
    layout = Packing.of(tensors, [False], form)
    assert taken_apart({"a": torch.ones(2), "n": 1})[1] == form and taken_apart(found)[1] != form
    with pytest.raises(ZbcError, match=said):
        raise layout.unlike("x", found)


def test_decoder_layers_of_transformers_train_as_their_model_does_without_a_wrapper():
    transformers = pytest.importorskip("transformers")
    section = {**user("transformers_llama", layers=5, loss="cross_entropy"), "vocab": 32, "seq_len": 6}
    plan = make_plan(make_program("zb-h1", 2, 4), model=section, data={"kind": "synthetic"}, keep=without_step)
    workers = run_threads(plan, 1)
    mine = parameters(workers)
    whole = transformers.LlamaForCausalLM(llama_config())
    names = {"layers.0.tokens": "model.embed_tokens", "layers.1": "model.layers.0", "layers.2": "model.layers.1"}
    names |= {"layers.3": "model.norm", "layers.4": "lm_head"}
    theirs = {n: whole.get_parameter(names[at] + n[len(at) :]) for at in names for n in mine if n.startswith(f"{at}.")}
    assert theirs.keys() == mine.keys() and len(theirs) == len([*whole.parameters()])
    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(mine[name])
    batches = next(worker.batches for worker in workers if worker.batches is not None)
    total = 0.0
    for mb in range(4):
        logits = whole(input_ids=batches.inputs(0, mb), use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batches.targets(0, mb).flatten())
        (loss / 4).backward()
        total += loss.item() / 4
    assert workers[0].results[0].loss == pytest.approx(total, rel=1e-6)
    for name, parameter in theirs.items():
        torch.testing.assert_close(mine[name].grad, parameter.grad, rtol=1e-5, atol=1e-7, msg=name)


def test_microbatches_without_a_target_that_counts_add_nothing_to_a_loss_of_several_outputs():
    outputs = {"one": torch.ones(2, requires_grad=True), "n": None, "whole": torch.ones(1, dtype=torch.int64)}
    loss = slice_loss(both_errors, torch.zeros(2), 0.0, outputs)
    loss.backward()
    assert loss.item() == 0.0 and torch.equal(outputs["one"].grad, torch.zeros(2))


@pytest.mark.long
def test_layers_with_several_tensors_between_them_are_profiled():
    """Including a layer that does nothing and passes all of them on."""
    made = job(layers=8, pp=2, m=4, model=SEVERAL, data=VECTORS["data"])
    rig = build_rig(made, torch.device("cpu"))
    worker = rig.worker(torch.device("cpu"))
    assert IDLE in rig.kinds and run_step(worker, 0).loss > 0
    worker.close()
