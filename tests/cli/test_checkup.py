"""`zbc check --gradients`: gradients of a job's stages compared with plain autograd, as text and as JSON."""

import pytest

from tests.tiers import few

ZOO = {"data": {"kind": "tests.runtime.user_models:Vectors"}, "layers": 4, "pp": 2, "m": 4}


def zoo(which, loss="mse", **changes):
    return {**ZOO, "model": {"family": f"tests.runtime.zoo:{which}", "loss": loss}, **changes}


def own(factory, loss="mse", *, ties=None, **args):
    """Layers of tests/runtime/user_models.py."""
    model = {"family": f"tests.runtime.user_models:{factory}", "loss": loss, "args": args, "ties": ties}
    return {**ZOO, "model": {key: value for key, value in model.items() if value not in ({}, None)}}


NOISE = {"data": {"kind": "synthetic"}}
STEPS = {"kind": "tests.runtime.given_steps:Ragged", "items": "steps", "args": {"count": 4, "size": 2}}
TIES = {'"layers.3.up.weight"': "layers.0.up.weight"}
LLAMA = {"family": "tests.runtime.user_models:transformers_llama", "loss": "cross_entropy", "vocab": 32, "seq_len": 6}
JOBS = {
    "split": {**NOISE, "kind": "zb-v"},
    "recompute": {**NOISE, "kind": "zb-h1", "memory": {"activations": "recompute"}},
    "tied": {**NOISE, "kind": "zb-h1", "model": {"ties": True}},
    "bf16": {**NOISE, "kind": "zb-h1", "model": {"dtype": "bfloat16"}},
    "fp16": {**NOISE, "kind": "zb-h1", "model": {"dtype": "float16"}},
    "llama": {**NOISE, "model": {"family": "llama", "kv_heads": 2}},
    "two copies": {**NOISE, "parallel": {"dp": 2}},
    "no barrier": {**NOISE, "kind": "zb-v", "optimizer": {"sync": "post-validate"}},
    "noise": zoo("noise", kind="zb-h1"),
    "buffers": zoo("averages", kind="zb-h1"),
    "whole numbers": zoo("integers", kind="zb-h1"),
    "shared weights": own("sharing", ties=TIES, width=8, count=4, together=False),
    "several tensors": {**own("several", width=8, count=4), "kind": "zb-v"},
    "dicts": own("structured"),
    "outputs": own("two_heads", "tests.runtime.user_models:both_errors", named=True),
    "steps": {**own("residual", "tests.runtime.given_steps:summed"), "kind": "zb-h1", "data": STEPS},
    "transformers": {**NOISE, "layers": 5, "model": LLAMA},
}


@pytest.mark.long("no barrier")
@pytest.mark.parametrize(
    "name", few(JOBS, ("split", "recompute", "tied", "no barrier", "buffers", "shared weights", "dicts"))
)
def test_a_right_model_is_right_in_a_few_lines(zbc, job, name):
    ran = zbc("check", "--gradients", job(**JOBS[name]))
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert len(lines) <= 10 and all(len(line) <= 80 for line in lines), ran.out
    assert "all right" in ran.out and "loss" in ran.out


@pytest.mark.long
def test_what_ran_is_said_in_words_and_as_json(zbc, job):
    out = zbc("check", "--gradients", job(**{**JOBS["recompute"], "memory": {"activations": {"1": "recompute"}}})).out
    assert "zb-h1, 4 stages" in out
    assert "1: B and W apart, recomputed" in out and "bit by bit the same" in out
    found = zbc("check", "--gradients", job(**JOBS["split"]), "--json").json()
    assert (found["format"], found["version"], found["fine"]) == ("zbc-checkup", 1, True)
    assert found["loss"]["plan"] == found["loss"]["plain"]
    assert len(found["parameters"]) == 8 * 12 + 5 and {p["error"] for p in found["parameters"]} == {0.0}


@pytest.mark.parametrize(("loss", "found"), [("test_leaving:loss", "SystemExit: loss"), ("zoo:no_loss", "ValueError")])
def test_a_loss_that_fails_is_no_bug_of_zbc(zbc, job, loss, found):
    ran = zbc("check", "--gradients", job(**zoo("averages", f"tests.runtime.{loss}", kind="zb-h1")))
    assert (ran.code, ran.out) == (7, "") and f"error[E703] model: it fails in training: {found}" in ran.err
    assert "in model.loss, for an output float32 [2, 8] and a target float32 [2, 8]\n" in ran.err
    assert "F s1 m0" in ran.err and "Traceback" not in ran.err and "bug in zbc" not in ran.err


def test_a_layer_that_does_something_else_is_found_with_every_parameter_it_spoils(zbc, job):
    ran = zbc("check", "--gradients", job(**zoo("sneaky", kind="zb-h1")))
    assert ran.code == 6 and ran.out == ""
    assert "error[E510]" in ran.err and "of 8 parameters get another gradient" in ran.err
    assert "layers.1.linear.weight: off by" in ran.err and "docs/models.md" in ran.err
    assert all(len(line) <= 90 for line in ran.err.splitlines())
    assert zbc("check", "--gradients", "zbc.toml", "--json").json()["errors"][0]["code"] == "E510"


def test_a_layer_that_mixes_microbatches_only_in_training_is_found_where_the_plan_has_several_in_flight(zbc, job):
    ran = zbc("check", "--gradients", job(**zoo("reuses_in_secret", kind="zb-h1")))
    assert ran.code == 6 and "error[E510]" in ran.err and "layers.0.weight: off by" in ran.err
    assert zbc("check", "--gradients", job(**zoo("reuses_in_secret", kind="1f1b", pp=1))).code == 0


REFUSED = {
    "weights of no size yet": ("lazy", {}, "layer layers.0"),
    "buffers in two copies": ("batchnorm", {"parallel": {"dp": 2}}, "layers.0 changes its buffer"),
    "buffers in two pipes": ("averages", {"kind": "dualpipe"}, "changes its buffer"),
    "hooks in two copies": ("listens_to_sums", {"parallel": {"dp": 2}}, "hook on the accumulated gradient"),
    "memory of several microbatches": ("reuses_output", {"kind": "1f1b"}, "layer layers.1"),
    "attributes without a barrier": (
        "carries_count",
        {"kind": "zb-h1", "optimizer": {"sync": "post-validate"}},
        "without the barrier forwards may run again",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_ranks_of_a_run_would_refuse_is_refused(zbc, job, name):
    which, changes, text = REFUSED[name]
    ran = zbc("check", "--gradients", job(**zoo(which, **changes)))
    assert (ran.code, ran.out) == (6, "") and "error[E509]" in ran.err and text in ran.err


def test_gradients_and_losses_that_are_no_numbers_are_told_apart(zbc, job):
    ran = zbc("check", "--gradients", job(**zoo("roots", kind="zb-h1")))
    assert (ran.code, ran.out) == (7, "")
    assert "error[E704] model: the gradients of 6 of 8 parameters are not finite, by plain autograd as" in ran.err
    assert "\n   layers.0.weight\n" in ran.err and "set_detect_anomaly" in ran.err
    ran = zbc("check", "--gradients", job(**zoo("inline", "tests.runtime.losses:unknown")))
    assert (ran.code, ran.out) == (7, "") and "error[E704] model: the loss is nan" in ran.err
