"""Layers of users: each kind trains with the gradients of one process, or is refused by name before training starts."""

import pytest
import torch

from tests.refusals import refused
from tests.runtime.small_plans import GPT, LLAMA, make_plan, make_program, make_worker, parameters, plan_of, reference
from tests.runtime.test_gradients import VECTORS, check_gradients, check_training, without_step
from tests.threads import each_layer, losses_of, run_threads
from tests.tiers import dealt, few
from zbc.ir import Placement
from zbc.runtime.core.split import Patch
from zbc.training.checkpoint.folder import folder_of
from zbc.training.models import model as models

SCHEDULES = [("1f1b", 2), ("zb-h1", 4), ("zb-v", 2)]
WAYS = [(*way, "keep") for way in SCHEDULES] + [("1f1b", 2, "recompute"), ("zb-v", 2, "recompute")]
ALL_WAYS = [(*way, activations) for way in SCHEDULES for activations in ("keep", "recompute")]
CHANGING = ["batchnorm", "averages", "averages_quietly", "grows", "grows_new", "grows_table"]
EXACT = ["inline", "custom", "conv", "hooked", "overwrites", "aliases", "unused", "noise", "dropped", "frozen"]
EXACT += ["stops", "constant", "rules", "rules_again", "mapped", "imaginary", "normed", "beside_w", "beside_sent"]
EXACT += ["made_weights", "empty", "overwrites_quietly", "listens_to_each", "listens_to_sums"]


def zoo(kind, **how):
    return {"model": {"family": f"tests.runtime.zoo:{kind}", "layers": 4, "loss": "mse", **how}, **VECTORS}


def plan(kind, schedule="zb-h1", p=2, m=4, *, dtype="float32", how=None, **options):
    return make_plan(make_program(schedule, p, m, **(how or {})), **{**zoo(kind, dtype=dtype), **options})


# A weight used twice is summed in another order; sent tensors are contiguous, which changes kernels' order.
NEARLY = ("tied", "strided")
CASES = few(dealt(EXACT, WAYS, always=[("zb-h1", 4, "keep")]), lambda case: case[1:] == ("zb-h1", 4, "keep"))
CASES += dealt(NEARLY, ALL_WAYS, always=[("zb-h1", 4, "recompute")])


@pytest.mark.parametrize(("kind", "schedule", "p", "activations"), CASES)
def test_gradients_are_those_of_one_process_bit_by_bit_or_up_to_the_order_of_sums(kind, schedule, p, activations):
    made = plan(kind, schedule, p, keep=without_step, activations=activations)
    check_gradients(made, tolerance=1e-6 if kind in NEARLY else 0.0)


@pytest.mark.long("recompute")
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize(("schedule", "p"), few([("1f1b", 4), ("zb-h1", 4), ("zb-v", 2)], ("zb-h1",)))
def test_a_tensor_lies_behind_a_transfer_as_it_does_without_one(schedule, p, activations):
    """A view of a transposed tensor would fail if the transfer made it contiguous."""
    options = {"data": {**VECTORS["data"], "validation": 0.3}, "activations": activations}
    check_gradients(plan("turns", schedule, p, keep=without_step, **options))
    plans = (plan("turns", *way, train={"eval_every": 1}, **options) for way in ((schedule, p), ("gpipe", 1)))
    first, second = (run_threads(one, 2)[0].evaluation.results for one in plans)
    assert [r.loss for r in first] == [r.loss for r in second]


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize(("schedule", "p"), SCHEDULES)
def test_whole_numbers_between_layers_and_stages(schedule, p, activations):
    """They stop gradients: layers before get none, as in one process."""
    workers = check_gradients(plan("integers", schedule, p, keep=without_step, activations=activations))
    assert parameters(workers)["layers.0.linear.weight"].grad is None


def buffers_of_one_process(plan, steps):
    """The buffers after `steps` steps of one process, trained as in `reference`."""
    kept = {}
    build = models.LayerPlan.build

    def remember(self, seed):
        kept[self.name] = build(self, seed)
        return kept[self.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.LayerPlan, "build", remember)
        reference(plan, steps)
    return {f"{name}.{key}": buffer for name, module in kept.items() for key, buffer in module.named_buffers()}


@pytest.mark.long("grows_table-zb-v-2-recompute")
@pytest.mark.parametrize(
    ("kind", "schedule", "p", "activations"), few(dealt(CHANGING, ALL_WAYS), ("batchnorm", "averages", "grows_table"))
)
def test_buffers_that_a_forward_changes_come_out_as_in_one_process(kind, schedule, p, activations):
    check_gradients(plan(kind, schedule, p, keep=without_step, activations=activations))
    training = plan(kind, schedule, p, activations=activations)
    check_training(training, 3)
    layers = each_layer(run_threads(training, 3))
    found = {f"{layer.name}.{key}": buffer for layer in layers for key, buffer in layer.module.named_buffers()}
    expected = buffers_of_one_process(training, 3)
    assert found.keys() == expected.keys() and found
    assert all(torch.equal(found[name], buffer) for name, buffer in expected.items())


@pytest.mark.long
@pytest.mark.parametrize("kind", ["grows", "grows_new"])
def test_buffers_made_by_the_first_forward_survive_a_checkpoint_and_forwards_that_run_again(tmp_path, kind):
    """Each step is clipped, so forwards run again without the barrier."""
    optimizer = {"lr": 1e-2, "clip_grad_norm": 0.01}
    ahead = plan(kind, how={"sync": "post-validate"}, optimizer=optimizer, checkpoint={"every": 2})
    run_threads(ahead, 2, folder=tmp_path)
    found = run_threads(ahead, 4, resume=folder_of(tmp_path, 2))
    expected = run_threads(plan(kind, "gpipe", 1, optimizer=optimizer), 4)
    assert losses_of(found) == [r.loss for r in expected[0].results[2:]]
    assert all(r.redone for r in found[0].results)
    before, after = ({n: p.detach() for n, p in parameters(run).items()} for run in (expected, found))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("schedule", "copies"), [("1f1b", 2), ("chimera", 1)])
def test_buffers_made_by_the_first_forward_are_refused_with_copies_unless_they_are_tables(schedule, copies):
    made = {kind: plan(kind, schedule, how={"copies": copies}) for kind in ("grows", "grows_new", "grows_table")}
    for kind in ("grows", "grows_new"):
        with refused("E509", "layer layers.0 changes its buffer mean"):
            make_worker(made[kind])
    check_training(made["grows_table"], tolerance=1e-6)


REFUSED = {
    "gambles": ("E509", "layer layers.1 draws from Python's random module"),
    "lazy": ("E509", "layer layers.0 is lazy"),
    "sparse": ("E509", "layer layers.1 has sparse gradients"),
    "numpys": ("E509", "layer layers.1 draws from numpy.random"),
    "own_generator": ("E509", "layer layers.1 draws from a generator of its own"),
    "with_history": ("E509", "keeps a tensor with a history of autograd"),
    "branches": ("E505", "layer layers.2 cannot take the tensors {'a': float32"),
    "handed_out_twice": ("E508", "layers.0 and layers.2 share a parameter"),
    "writes_weights": ("E509", "layer layers.1 writes to its parameter linear.weight"),
    "writes_weights_quietly": ("E509", "layer layers.1 writes to its parameter linear.weight"),
    "renormed": ("E509", "layer layers.1 writes to its parameter 0.weight"),
    "sparse_inside": ("E509", "layer layers.1 has sparse gradients"),
    "sparse_between": ("E505", "layer layers.1 returned a sparse_coo tensor"),
    "locked": ("E509", "Locked cannot be copied"),
    "scripted": ("E509", "layer layers.1 is TorchScript"),
}


def test_what_stands_before_a_layer_that_passes_no_gradient_on_gets_none():
    """None, not zeros, with which an optimizer would decay weights that one process leaves unchanged."""
    for kind, first in (("stops", 4), ("constant", 1)):
        workers = check_gradients(plan(kind, "zb-v", keep=without_step))
        for name, parameter in parameters(workers).items():
            assert (parameter.grad is None) == (int(name.split(".")[1]) < first), name
    check_training(plan("constant", "zb-v", optimizer={"lr": 1e-2, "weight_decay": 0.5}))


@pytest.mark.parametrize("zero1", [False, True])
def test_complex_parameters_train_in_copies_and_without_a_barrier(zero1):
    """Their sums, norms, masters and shares include both parts."""
    how = {"sync": "post-validate", "copies": 2, "sharded": zero1}
    optimizer = {"lr": 1e-2, "clip_grad_norm": 0.05}
    check_training(plan("imaginary", "zb-v", 2, 2, how=how, optimizer=optimizer), tolerance=1e-6)


@pytest.mark.parametrize(
    ("kind", "activations"), [("made_weights", "keep"), ("made_weights", "recompute"), ("wide", "keep")]
)
def test_under_autocast_weights_made_of_the_data_are_cast_anew_and_double_precision_stays(kind, activations):
    check_gradients(plan(kind, dtype="bfloat16", keep=without_step, activations=activations))


@pytest.mark.long("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_layers_that_need_it_keep_their_backward_in_one_piece(dtype):
    def apart(**options):
        worker = make_worker(make_plan(make_program("zb-h1", 2, 4), **options))
        modules = [module for layer in each_layer([worker]) for module in layer.module.modules()]
        return sum(isinstance(vars(m).get("forward"), Patch) for m in modules)

    assert apart(model={**GPT, "dtype": dtype}) == 2 + 3 * 4
    assert apart(model={**LLAMA, "dtype": dtype}) == 1 + 3 * 4
    for kind, count in (("dropped", 2), ("custom", 4), ("mapped", 4), ("rules_again", 0)):
        assert apart(**zoo(kind, dtype=dtype)) == count, kind


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name_on_every_rank_before_training_starts(kind):
    code, text = REFUSED[kind]
    for rank in (0, 1):
        with refused(code, text) as caught:
            make_worker(plan(kind), rank)
        assert caught.value.hint


def refusal(made):
    with refused("E509", "layer layers.0 changes its buffer") as caught:
        make_worker(made)
    return caught.value.message


def test_running_statistics_are_refused_where_they_have_no_order():
    turned = "F s0 m1, F s0 m0, BW s0 m1, BW s0 m0, VALIDATE"
    assert "order of the microbatches" in refusal(plan_of([turned], Placement.linear(1), 2, **zoo("batchnorm")))
    assert "several ranks hold a copy" in refusal(plan("averages", "chimera"))


@pytest.mark.parametrize("sync", ["before-step", "post-validate"])
@pytest.mark.parametrize(("kind", "copies"), [("listens_to_each", 1), ("listens_to_each", 2), ("listens_to_sums", 1)])
def test_hooks_on_gradients_do_what_they_do_in_one_process(kind, copies, sync):
    training = plan(kind, how={"sync": sync, "copies": copies})
    check_training(training, tolerance=0.0 if copies == 1 else 1e-6)


@pytest.mark.parametrize(("schedule", "copies"), [("1f1b", 2), ("zb-h1", 2), ("chimera", 1)])
def test_hooks_on_accumulated_gradients_are_refused_where_each_copy_has_its_own(schedule, copies):
    for rank in (0, 1):
        with refused("E509", "accumulated gradient of b.weight"):
            make_worker(plan("listens_to_sums", schedule, how={"copies": copies}), rank)


@pytest.mark.parametrize(
    ("kind", "name"), [("carries_last", "seen"), ("carries_graph", "seen"), ("carries_count", "count")]
)
def test_what_is_carried_in_attributes_is_refused_where_forwards_run_again(kind, name):
    ways = {
        "recompute": plan(kind, activations="recompute"),
        "the barrier": plan(kind, optimizer={"sync": "post-validate"}),
        "the order of the microbatches": plan(kind, schedule="chimera"),
        "microbatches on one rank": plan(kind, m=2, how={"copies": 2}),
        "checkpoints": plan(kind, checkpoint={"every": 2}),
    }
    for why, made in ways.items():
        with refused("E509", why, name, "the output of layer layers.1 depends on attributes"):
            make_worker(made)
    assert make_worker(plan(kind)) and make_worker(plan("carries_nothing", activations="recompute"))


@pytest.mark.parametrize("kind", ["reuses_output", "reuses_factor", "reuses_in_a_hook"])
def test_what_waits_in_an_attribute_for_its_backward_is_refused_where_another_microbatch_comes_between(kind):
    for schedule, p in [*SCHEDULES, ("gpipe", 1)]:
        with refused("E509", "(kept)", "layer layers.1 keeps what its output or its backward needs in attr") as caught:
            run_threads(plan(kind, schedule, p), 1)
        assert caught.value.hint
    check_training(plan(kind, "1f1b", 1))
    check_training(plan(kind, "zb-v", 2, m=1))


@pytest.mark.parametrize("kind", ["reuses_aside", "carries_last", "carries_count", "carries_nothing", "averages"])
def test_attributes_that_no_backward_needs_are_left_alone(kind):
    check_training(plan(kind, "zb-h1", 2))


@pytest.mark.long("1f1b-keep")
@pytest.mark.parametrize(("schedule", "activations"), [("1f1b", "keep"), ("zb-h1", "keep"), ("zb-h1", "recompute")])
def test_layers_compiled_by_their_user_have_their_whole_backward_in_b(schedule, activations):
    made = plan("compiled", schedule, m=2, keep=without_step, activations=activations)
    workers = check_gradients(made, tolerance=1e-6)
    names = {name for worker in workers for stage in worker.stages.values() for name in stage.parameters}
    assert "layers.0._orig_mod.0.weight" in names
