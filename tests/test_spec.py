"""The job file: places of values, inheritance, defaults, every problem at once, the settings of the plan id."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.jobs import job, toml_text, write_job
from tests.limits import at_most
from tests.refusals import refused
from zbc.compiler.compile import compile_job
from zbc.errors import ZbcError
from zbc.job import spec, toml
from zbc.job.sections import Memory


def problems(tmp_path, text, overrides=()):
    path = tmp_path / "zbc.toml"
    path.write_text(text)
    with pytest.raises(ZbcError) as caught:
        spec.draft(path, overrides).finish()
    return [(error.code, error.where.replace(str(tmp_path) + "/", ""), error.message) for error in caught.value.errors]


PER_LAYER, GIVEN = {"per": "layer"}, {"f": 1, "b": 1, "w": 1}


def test_auto_that_decides_against_selective_recompute_drops_what_nothing_reads_then():
    """The plan's job is read again as a file."""
    asked = Memory(activations="auto", attention="keep")
    assert asked.decided((), 2).attention is None and asked.decided((0, 1), 2).attention is None
    assert asked.with_choice(["selective", "auto"]).attention == asked.with_choice(["keep", "auto"]).attention == "keep"


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"kind": "sgd", "betas": [0.9, 0.95], "eps": 1e-8}},
        {"optimizer": {"kind": "sgd", "momentum": 0.9}},
        {"train": {"eval_every": 0, "eval_batches": 3}, "data": {"validation": "a"}},
        {"partition": {"layers_per_stage": [2, 2, 2, 2]}},
        {"costs": {"per": "layer", "optimizer": 1.0}},
        {"costs": {**PER_LAYER, **GIVEN, "f": [1.0] * 10}},
    ],
)
def test_a_key_may_say_its_default_and_what_evaluates_may_be_turned_off(changes):
    assert job(**changes)


def test_a_name_that_says_how_much_memory_sets_the_limit():
    assert job(kind="ZB-1p").schedule.memory_limit == "1.0x"
    assert job(kind="zb-2p", schedule={"memory_limit": "2x"}).schedule.memory_limit == "2x"
    with refused("E110", match=r'zb-1p has memory_limit = "1\.0x"'):
        job(kind="zb-1p", schedule={"memory_limit": "3x"})
    assert max(rank.units for rank in compile_job(job(kind="zb-1p"), budget=0.0).memory) <= 4 + 1e-6


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1" + 400 * "0", "1e400"])
def test_numbers_that_are_none_are_refused_with_their_key(tmp_path, value):
    found = problems(tmp_path, toml_text(), [f"train.steps={value}", f"optimizer.lr={value}"])
    assert [code for code, _, _ in found] == ["E103", "E103"] or value[1:].isdigit()


def test_sizes_that_are_not_given_follow_from_others():
    gpt, llama = job().model, job(model={"family": "llama", "hidden": 4096, "heads": 32}).model
    assert (gpt.head_width, gpt.kv_width, gpt.mlp_width, gpt.rotary) == (8, 32, 128, False)
    assert (llama.head_width, llama.kv_width, llama.mlp_width, llama.rotary) == (128, 4096, 11008, True)


def test_overrides_win_each_with_one_value_and_are_named_as_the_place_of_their_problems(tmp_path):
    path = write_job(tmp_path)
    changed = spec.draft(path, ["schedule.microbatches=16", "optimizer.lr=0.1", "data.path=a.txt"]).finish()
    assert (changed.schedule.microbatches, changed.optimizer.lr, changed.data.path) == (16, 0.1, "a.txt")
    assert changed.where("schedule", "microbatches") == "--set schedule.microbatches=16"
    found = problems(tmp_path, toml_text(), ["train.steps=many"])
    assert found == [("E103", "--set train.steps=many", "config: train.steps: expected a whole number, found 'many'")]
    found = problems(tmp_path, toml_text(), ["train.steps=5\ntrain.seed=6"])
    assert [code for code, _, _ in found] == ["E103"]


@pytest.mark.parametrize("override", ["x", "schedule=1", "=3", "a..b=1"])
def test_a_malformed_override_is_refused(tmp_path, override):
    path = write_job(tmp_path)
    with refused("E109"):
        spec.draft(path, [override])


def test_only_planning_sections_reach_the_plan_id():
    plain, longer = job(), job(train={"steps": 50}, optimizer={"lr": 1.0}, log={"every": 1}, data={"path": "x"})
    assert plain.planning() == longer.planning()
    assert plain.training() != longer.training()
    assert plain.planning() != job(m=9).planning()


def test_the_objective_follows_the_optimizer_unless_given():
    assert job().objective == "makespan"
    assert job(schedule={"objective": "span"}).objective == "span"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1.0x", (1.0, "x")), (" 2 x", (2.0, "x")), ("40 GiB", (40 * 2**30, "bytes")), ("512MiB", (2**29, "bytes"))]
    + [("0x", None), ("40", None), ("x", None), ("40 GB", None), ("-1x", None)],
)
def test_memory_limits_are_multiples_or_bytes(text, value):
    assert spec.parse_limit(text) == value


TEXT = """# a job
[model]  # comment
family = "gpt"
a.b = [1,
  2]
"quoted key" = "é"
[memory]
activations = {0 = "recompute", x.y = 2}
[[list]]
q = 1
[[list]]
  q = 2
"""


@pytest.mark.parametrize(
    ("path", "line", "column"),
    [
        (("model", "family"), 3, 10),
        (("model", "a", "b"), 4, 7),
        (("model", "a", "b", 1), 5, 3),
        (("model", "quoted key"), 6, 16),
        (("memory", "activations", "0"), 8, 20),
        (("memory", "activations", "x", "y"), 8, 39),
        (("list", 1, "q"), 12, 7),
    ],
)
def test_every_value_has_its_place(path, line, column):
    assert toml.loads(TEXT, "t.toml").where(path) == f"t.toml:{line}:{column}"


def test_keys_have_places_in_characters():
    document = toml.loads(TEXT, "t.toml")
    assert document.where(("model", "family"), key=True) == "t.toml:3:1"
    assert document.where(("model", "nothing")) == "t.toml:2:2"
    assert document.where(("nothing",)) == "t.toml"
    assert toml.loads('x = {"ü" = 1, y = 2}', "t").where(("x", "y")) == "t:1:19"
    with refused("E100") as caught:
        toml.loads("a = 1\nb = = 2\n", "t.toml")
    assert caught.value.where == "t.toml:2:5"


@pytest.mark.parametrize(
    "number", ["9223372036854775808", "-9223372036854775809", "9" * 5000, "[[1, 0x" + "f" * 5000 + "]]"]
)
def test_whole_numbers_beyond_64_bits_are_refused_in_words(number, tmp_path):
    with pytest.raises(ZbcError, match="more than 64 bits") as caught:
        toml.loads(f"a = {number}", "t.toml")
    assert (caught.value.code, caught.value.where) == ("E103", "t.toml")
    (tmp_path / "t.toml").write_text("")
    with pytest.raises(ZbcError, match="more than 64 bits"):
        spec.draft(tmp_path / "t.toml", [f"model.args.a={number}"])
    assert toml.loads("a = [9223372036854775807, -9223372036854775808]", "t").values["a"][0] == 2**63 - 1


@pytest.mark.long
def test_the_places_of_forty_thousand_keys_are_found_in_seconds():
    text = "\n".join(f"key{i} = {i}" for i in range(40_000))
    with at_most(20):
        assert toml.loads(text, "t.toml").where(("key39999",)) == "t.toml:40000:12"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(key=st.sampled_from(["lr", "eps", "weight_decay", "betas", "momentum"]), data=st.data())
def test_no_number_of_an_optimizer_that_is_accepted_is_refused_by_torch(key, data):
    """Next to bounds, far beyond them, and at infinities and nan."""
    number = st.one_of(st.sampled_from([0, 1, 1.5, -1, 1e-45, 1e-8, 0.9999, 1e30, 1e308]), st.floats(), st.integers())
    value = data.draw(st.tuples(number, number).map(list) if key == "betas" else number)
    kind = "sgd" if key == "momentum" else "adamw"
    try:
        asked = spec.Optimizer.model_validate({"kind": kind, key: value})
    except ValidationError:
        return
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([0.0, 1e-3])
    common = {"lr": asked.lr, "weight_decay": asked.weight_decay}
    if kind == "sgd":
        torch.optim.SGD([weight], momentum=asked.momentum, **common).step()
    else:
        torch.optim.AdamW([weight], betas=asked.betas, eps=asked.eps, **common).step()
    assert weight.isfinite().all()
