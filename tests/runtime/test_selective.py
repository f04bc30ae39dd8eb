"""Recompute changes only the saved activations: of whole layers, and selective, where F keeps less."""

import pytest

from tests.composed import beside, compiled, trained
from tests.jobs import FREE, stored
from tests.runtime.small_plans import GPT, make_plan, make_program, make_worker
from tests.runtime.test_gradients import MODELS as KINDS
from tests.runtime.test_gradients import PLANNED, VECTORS, check_gradients, model_of, slack, user, without_step
from tests.threads import scaled
from tests.tiers import few
from zbc.compiler.schedules import SCHEDULES
from zbc.errors import ZbcError
from zbc.runtime.core import again
from zbc.runtime.core.execute import run_step

LLAMA = {"model__family": "llama", "model__kv_heads": 2}
QWEN = {**LLAMA, "model__variant": "qwen3"}
EXPERTS = {**LLAMA, "model__experts": 4, "model__top_k": 2, "model__expert_hidden": 128}
MODELS = {"gpt": {}, "llama": LLAMA, "qwen3": QWEN, "experts": EXPERTS}
ALONE = [(name, "", kind) for name in MODELS for kind in ("1f1b", "zb-h1")]
TRAITS = ("slices", "tp", "tp_sequence", "offload", "autocast", "shared vocabulary", "sharded weights", "freeze")
TRAITS += ("post-validate", "two versions", "average", "tied embeddings", "one-sided", "sharded gradients")
BOTH = [("llama", trait, "1f1b") for trait in TRAITS] + [("gpt", trait, "1f1b") for trait in TRAITS]
SOME = [ALONE[0], ALONE[3], BOTH[0], BOTH[3]]
EACH = [(*one, attention) for one in ALONE + BOTH for attention in ("again", "keep")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "trait", "kind", "attention"), few(EACH, [*((*one, "again") for one in SOME), (*BOTH[0], "keep")])
)
def test_a_stage_that_recomputes_selectively_trains_to_the_bit_as_one_that_keeps_all(
    model, trait, kind, attention, monkeypatch
):
    made = []
    monkeypatch.setattr(again.Remade, "release", lambda one: made.append(one) or release(one))
    traits = [trait] if trait else []
    jobs = [beside(*traits, schedule__kind=kind, **MODELS[model])[0] for _ in range(2)]
    jobs[0]["memory"] = {"activations": "offload" if trait == "offload" else "keep"}
    jobs[1]["memory"] = {"activations": "selective" + "+offload" * (trait == "offload"), "attention": attention}
    for one in jobs:  # what is frozen follows the bubbles of a plan: without the time of messages, and little of it
        one["costs"] = {**one.get("costs", {}), **FREE}
        one |= {"freeze": {"most": 0.25}} if trait == "freeze" else {}
    plain = trained(jobs[0])
    assert not made
    assert trained(jobs[1]) == plain
    assert made


release = again.Remade.release


WIDE = {f"model__{key}": value for key, value in {"layers": 4, "hidden": 128, "seq_len": 128}.items()}


USERS = """
import torch, zbc
from torch import nn

class Layer(nn.Module):
    def __init__(self, mark):
        super().__init__()
        self.norm, self.act, self.drop = nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.3)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        if mark:
            for module in (self.norm, self.act, self.drop):
                zbc.selective(module)

    def forward(self, x):
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))

def layers(mark=True):
    return [nn.Embedding(256, 32), *(Layer(mark) for _ in range(6)), nn.Linear(32, 256)]
"""


def of_users(name, text, folder, monkeypatch, kind="zb-h1", ways=(("keep", True), ("selective", True))):
    """Yields jobs that keep all activations of these layers, and that recompute selectively those marked."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    for activations, mark in ways:
        job, _ = beside(schedule__kind=kind)
        sizes = {"layers": 8, "vocab": 256, "seq_len": 32}
        job["model"] = {"family": f"{name}:layers", "args": {"mark": mark}, **sizes}
        yield job | {"memory": {"activations": activations}}


@pytest.mark.long
@pytest.mark.parametrize("kind", few(["1f1b", "zb-h1"], 1))
def test_marked_modules_of_a_user_run_again_with_the_same_random_numbers(tmp_path, monkeypatch, kind):
    ways = [("keep", False), ("keep", True), ("selective", True)]
    one, *others = (trained(job) for job in of_users("users", USERS, tmp_path, monkeypatch, kind, ways))
    assert others == [one, one]


@pytest.mark.long
def test_what_marked_modules_save_is_planned_before_anything_ran(tmp_path, monkeypatch):
    most = []
    for job in of_users("planned_users", USERS, tmp_path, monkeypatch):
        made = compiled(job)
        most.append([rank.bytes for rank in made.memory])
        held = [scale.held.peak for scale in scaled(stored(made))[1]]
        assert max(most[-1]) == pytest.approx(max(held), rel=0.01)  # on others a late message is held longer
    assert sum(most[1]) < 0.9 * sum(most[0])


@pytest.mark.long
def test_where_no_gradient_goes_what_is_cheap_is_kept(tmp_path, monkeypatch):
    """A frozen table, followed by a frozen norm."""
    text = USERS.replace("*(Layer(mark) for _ in range(6))", "frozen(Layer(mark)), *(Layer(mark) for _ in range(5))")
    text = text.replace("[nn.Embedding(256, 32)", "[nn.Embedding(256, 32).requires_grad_(False)")
    text += "\ndef frozen(layer):\n    layer.norm.requires_grad_(False)\n    return layer\n"
    found = [trained(job) for job in of_users("partly", text, tmp_path, monkeypatch)]
    assert found[0] == found[1]


def test_auto_takes_nothing_that_the_job_excludes():
    """Compiled layers exclude selective recompute, but not offload."""
    job, _ = beside("compile", schedule__kind="1f1b", parallel__pp=2, **WIDE)
    job["memory"] = {"activations": "auto"}
    most = max(rank.bytes for rank in compiled(job).memory)
    job["hardware"] = {"memory_gib": 0.8 * most / 2**30, "host_gbps": 1000.0}
    made = compiled(job)
    assert made.found.activations is not None and made.found.activations.chosen() == {"offload"}


@pytest.mark.long
def test_with_selective_recompute_auto_is_no_slower_than_any_choice_by_name():
    job, _ = beside(schedule__kind="1f1b", parallel__pp=2, **LLAMA, **WIDE)
    kept, steps = {"activations": "selective", "attention": "keep"}, {}
    for activations in ("auto", "keep", "selective", "recompute", "attention kept"):
        for limit in (0.016, 0.02, 0.03):
            job["memory"] = kept if activations == "attention kept" else {"activations": activations}
            job["hardware"] = {"memory_gib": limit}
            try:
                made = compiled(job)
            except ZbcError:  # it does not fit
                continue
            steps[activations, limit] = made.step_ms
            if activations == "auto" and limit == 0.02:
                assert any(stage.selective for stage in made.report.cut.stages)
    for (activations, limit), step in steps.items():
        assert steps["auto", limit] <= step * (1 + 1e-9), activations


ALL = {"activations": "recompute"}


@pytest.mark.long
@pytest.mark.parametrize("p", few([2, 4], (4,)))
@pytest.mark.parametrize("schedule", few(SCHEDULES, ("1f1b", "zb-v", "chimera-zb")))
def test_gradients_keep_their_bits_in_every_schedule(schedule, p):
    plan = make_plan(make_program(schedule, p, 2 * p), keep=without_step, **ALL)
    check_gradients(plan, tolerance=slack(schedule))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_stages_choose_for_themselves_and_some_of_their_layers(schedule):
    how = {"model": {**GPT, "layers": 10}, "activations": {"1": "recompute", "0": "recompute 1"}}
    workers = check_gradients(make_plan(make_program(schedule, 2, 4), keep=without_step, **how))
    found = {stage.index: (stage.recompute, len(stage.layers)) for w in workers for stage in w.stages.values()}
    assert found[0][0] == 2 < found[0][1] and found[1][0] == found[1][1]
    assert not any(again for s, (again, _) in found.items() if s > 1)


@pytest.mark.long("dropout-zb-v-2")
@pytest.mark.parametrize(
    ("name", "schedule", "p"), few(PLANNED, lambda case: case[0] == "dropout" or case[1:] == KINDS[case[0]][0][0])
)
def test_each_model_keeps_its_gradients(name, schedule, p):
    """A second forward draws the same numbers, and norms over the batch see it twice."""
    check_gradients(make_plan(make_program(schedule, p, 4), **model_of(name), keep=without_step, **ALL))


def forwards(activations, schedule="zb-h1", frozen=0):
    """The number of forwards of each layer in one step of two microbatches on one stage."""
    plan = make_plan(make_program(schedule, 1, 2), model=user("residual"), **VECTORS, activations=activations)
    worker, counts = make_worker(plan), {}
    for layer in worker.stages[0].layers[:frozen]:
        layer.module.requires_grad_(False)
    for layer in worker.stages[0].layers:
        counts[layer.name] = 0

        def count(module, inputs, name=layer.name):
            counts[name] += 1

        layer.module.register_forward_pre_hook(count)
    run_step(worker, 0)
    return list(counts.values())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_each_layer_runs_twice_per_microbatch_with_split_backward_too(schedule):
    assert forwards("keep", schedule) == [2] * 4
    assert forwards("recompute", schedule) == [4] * 4
    assert forwards("recompute 3", schedule) == [4, 4, 4, 2]


def test_layers_before_the_first_that_trains_run_once():
    assert forwards("recompute", frozen=2) == [2, 2, 4, 4]
