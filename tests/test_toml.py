"""Places of values in TOML files, inheritance and overrides."""

import pytest

from tests.limits import at_most
from tests.refusals import refused
from zbc.errors import ZbcError
from zbc.job import spec, toml

TEXT = """zbc = 1
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
        (("zbc",), 1, 7),
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


def test_keys_have_their_own_place_and_missing_ones_that_of_their_table():
    document = toml.loads(TEXT, "t.toml")
    assert document.where(("model", "family"), key=True) == "t.toml:3:1"
    assert document.where(("model", "nothing")) == "t.toml:2:2"
    assert document.where(("nothing",)) == "t.toml"


def test_columns_count_characters_not_bytes():
    assert toml.loads('x = {"ü" = 1, y = 2}', "t").where(("x", "y")) == "t:1:19"


def test_broken_toml_is_reported_with_its_place():
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
    (tmp_path / "t.toml").write_text("zbc = 1")
    with pytest.raises(ZbcError, match="more than 64 bits"):
        spec.draft(tmp_path / "t.toml", [f"model.args.a={number}"])
    assert toml.loads("a = [9223372036854775807, -9223372036854775808]", "t").values["a"][0] == 2**63 - 1


def test_the_places_of_forty_thousand_keys_are_found_in_seconds():
    text = "\n".join(f"key{i} = {i}" for i in range(40_000))
    with at_most(20):
        assert toml.loads(text, "t.toml").where(("key39999",)) == "t.toml:40000:12"


def test_extends_inherits_key_by_key_and_remembers_where_each_value_stands(tmp_path):
    (tmp_path / "base.toml").write_text("[model]\nlayers = 4\nhidden = 8\n[train]\nsteps = 1\n")
    (tmp_path / "job.toml").write_text('extends = "base.toml"\n[model]\nlayers = 6\n')
    document = toml.load(tmp_path / "job.toml")
    assert document.values == {"model": {"layers": 6, "hidden": 8}, "train": {"steps": 1}}
    assert document.where(("model", "layers")).endswith("job.toml:3:10")
    assert document.where(("model", "hidden")).endswith("base.toml:3:10")


def test_extending_in_a_circle_or_nothing_is_refused(tmp_path):
    (tmp_path / "a.toml").write_text('extends = "b.toml"\n')
    (tmp_path / "b.toml").write_text('extends = "a.toml"\n')
    (tmp_path / "c.toml").write_text('extends = "missing.toml"\n')
    for name in ("a.toml", "c.toml"):
        with refused("E108"):
            toml.load(tmp_path / name)


def test_a_folder_with_a_job_in_it_is_answered_with_the_job(tmp_path):
    (tmp_path / "zbc.toml").write_text("zbc = 1\n")
    with refused("E101") as caught:
        toml.load(tmp_path)
    assert caught.value.hint == f"it holds a job file: {tmp_path / 'zbc.toml'}"
