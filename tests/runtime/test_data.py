"""The samples of a step, their sources, and errors of other sources."""

import numpy
import pytest
import torch

from tests.refusals import error_of
from zbc.job import spec
from zbc.training.data import corpus
from zbc.training.data.data import Batches, Pairs, RandomTokens, Windows, build_samples, input_spec, place
from zbc.training.data.pairs import UnfitError, pair_of

HERE = "tests.runtime.user_models"
MODEL = spec.Model(layers=1, hidden=8, heads=1, vocab=300, seq_len=4)


def samples(model=MODEL, seed=1, **data):
    return build_samples(spec.Data.model_validate(data), model, seed)


def batches(count, m, b, seed=1):
    return Batches(Windows(torch.arange(4 * count + 1), 4), seed=seed, microbatches=m, size=b)


@pytest.mark.parametrize(("count", "m", "b"), [(12, 3, 2), (13, 3, 2), (7, 2, 3), (6, 3, 2)])
def test_an_epoch_shows_every_sample_once_in_an_order_of_its_own(count, m, b):
    data = batches(count, m, b)
    seen = [i for step in range(3 * count) for mb in range(m) for i in data.numbers(step, mb)]
    epochs = [seen[e * count : (e + 1) * count] for e in range(len(seen) // count)]
    assert all(sorted(epoch) == [*range(e * count, (e + 1) * count)] for e, epoch in enumerate(epochs))
    assert len({tuple(i % count for i in epoch) for epoch in epochs}) > 1 and epochs[0] != list(range(count))
    assert data._order.cache_info().currsize <= 4, "orders of epochs long gone are not kept"


def test_any_microbatch_can_be_looked_up_in_any_order():
    there, back = batches(50, 4, 3), batches(50, 4, 3)
    places = [(step, mb) for step in range(20) for mb in range(4)]
    forwards = {place: there.numbers(*place) for place in places}
    assert {place: back.numbers(*place) for place in reversed(places)} == forwards
    assert batches(50, 4, 3, seed=2).numbers(0, 0) != forwards[0, 0]
    error = error_of(batches, 5, 3, 2)
    assert error.code == "E504" and "5 samples, one step needs 6 (3 microbatches of 2)" in error.message


PLACES = [
    ({"path": "a.txt"}, None, "data.path = a.txt, in samples of 4 tokens"),
    ({"path": list("abcd")}, None, "data.path = a, b, c, ..., in samples of 4 tokens"),
    ({}, None, "data.kind = text, in samples of 4 tokens"),
    ({"kind": "my.data:make"}, None, "data.kind = my.data:make"),
    ({"path": "a", "validation": 0.5}, "", "data.path = a, in samples of 4 tokens, of which data.validation = 0.5"),
    ({"path": "a", "validation": "b"}, "", "data.validation = b, in samples of 4 tokens"),
    ({"path": "a", "validation": "b"}, None, "data.path = a, in samples of 4 tokens"),
]


def test_the_place_of_data_is_what_the_job_calls_them():
    for data, kept, where in PLACES:
        assert place(spec.Data.model_validate(data), MODEL, kept=kept).removesuffix(" keeps") == where


def test_text_is_bytes_of_files_and_folders_in_sorted_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    contents = {"folder/b.txt": "bb", "folder/a.txt": "aé", "folder/deep/c.txt": "c", "folder/.x": "x"}
    for name, content in contents.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert bytes(corpus.read("folder")).decode() == "aébbc"
    assert bytes(corpus.read(["folder/b.txt", "folder/deep"])).decode() == "bbc"
    (tmp_path / "one.txt").write_text("abcdefghi")
    found = samples(kind="text", path="one.txt")
    assert len(found) == 2 and found.inputs([1, 0]).tolist() == [[101, 102, 103, 104], [97, 98, 99, 100]]
    assert found.targets([1]).tolist() == [[102, 103, 104, 105]] and found.inputs([0]).dtype == torch.int64


def test_without_a_path_the_standard_library_is_read(monkeypatch):
    text = corpus.standard_library(limit=200_000)
    assert len(text) == 200_000 and text == corpus.standard_library(limit=200_000)
    assert b"import" in text and 0 not in text
    monkeypatch.setattr(corpus, "standard_library", lambda: text)
    assert len(samples(kind="text")) == 199_999 // 4


def test_data_that_are_missing_or_empty_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = error_of(samples, kind="text", path="nothing.txt")
    assert error.code == "E501" and "nothing.txt" in error.message and str(tmp_path) in error.hint
    (tmp_path / "empty").mkdir()
    assert error_of(samples, kind="text", path="empty").code == "E501"
    (tmp_path / "empty.txt").touch()
    found = samples(kind="text", path=str(tmp_path / "empty.txt"))
    assert len(found) == 0
    assert error_of(Batches, found, seed=1, microbatches=1, size=1).code == "E504"


@pytest.mark.parametrize(
    ("raw", "byte"), [(b"abc\xff\xfe", 3), (b"ab\x00c", 2), (b"\x00\xff", 0), ("é".encode("latin-1") + b"a", 0)]
)
def test_what_is_not_text_is_e503_with_file_and_byte(tmp_path, raw, byte):
    file = tmp_path / "data.bin"
    file.write_bytes(raw)
    error = error_of(samples, kind="text", path=str(file))
    assert error.code == "E501" and str(file) in error.message and f"byte {byte} is 0x{raw[byte]:02x}" in error.message


def test_noise_is_the_same_everywhere_and_different_everywhere_else():
    noise = RandomTokens(300, 4, seed=1)
    assert torch.equal(noise.inputs([5, 6]), RandomTokens(300, 4, seed=1).inputs([5, 6]))
    assert not torch.equal(noise.inputs([5]), noise.inputs([6]))
    assert not torch.equal(noise.inputs([5]), RandomTokens(300, 4, seed=2).inputs([5]))
    assert torch.equal(noise.inputs([5])[:, 1:], noise.targets([5])[:, :-1])
    assert int(noise.inputs(range(100)).max()) < 300 and int(noise.inputs(range(100)).max()) > 256


def test_a_dataset_of_the_user_is_drawn_alike_on_every_rank():
    first, second = (samples(kind=f"{HERE}:Vectors", args={"width": 3}) for _ in range(2))
    assert torch.equal(first.inputs([1, 2]), second.inputs([1, 2])) and first.targets([1, 2]).shape == (2, 3)
    assert not torch.equal(first.inputs([1]), samples(kind=f"{HERE}:Vectors", args={"width": 3}, seed=2).inputs([1]))
    assert input_spec(spec.Data(kind="x:y"), MODEL, first, 5) == ((5, 3), torch.float32)
    assert input_spec(spec.Data(), MODEL, None, 5) == ((5, 4), torch.int64)


@pytest.mark.parametrize(("name", "code"), [("NoLength", "E502"), ("raises", "E502"), ("missing", "E502")])
def test_a_dataset_factory_that_does_not_work(name, code):
    assert error_of(samples, kind=f"{HERE}:{name}").code == code


def test_samples_of_several_shapes_and_none_that_are_pairs_are_named():
    error = error_of(samples(kind="tests.runtime.sliced_models:Uneven").targets, [7, 8, 9])
    assert error.code == "E505"
    assert "the target of sample 9 of" in error.message and "[20, 8], that of sample 7 [16, 8]" in error.message
    error = error_of(samples(kind=f"{HERE}:Singles").inputs, [3])
    assert error.code == "E505" and "sample 3" in error.message


# ---- samples as others write them ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sample",
    [
        (torch.tensor([1.0, 2.0]), torch.tensor(3)),
        [numpy.array([1.0, 2.0], dtype=numpy.float32), 3],
        ([1.0, 2.0], numpy.int64(3)),
        {"input": [1.0, 2.0], "target": 3},
        {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor(3)},
    ],
)
def test_a_pair_may_be_of_tensors_arrays_or_numbers_by_place_or_by_name(sample):
    x, target = pair_of(sample)
    assert torch.equal(x, torch.tensor([1.0, 2.0])) and x.dtype == torch.float32
    assert torch.equal(target, torch.tensor(3)) and target.dtype == torch.int64


def test_labels_are_those_of_the_next_token_as_in_transformers():
    tokens, labels = [5, 6, 7, 0, 0], [5, 6, 7, -100, -100]
    x, target = pair_of({"input_ids": tokens, "labels": labels, "attention_mask": [1, 1, 1, 0, 0]})
    assert x.tolist() == [5, 6, 7, 0] and target.tolist() == [6, 7, -100, -100]


@pytest.mark.parametrize(
    ("sample", "why"),
    [
        (torch.zeros(3), "is not a pair"),
        ((1, 2, 3), "is not a pair"),
        ({"a": 1}, "is a mapping of a"),
        (("text", 1), "has an input of type str"),
        ((None, 1), "has an input of type NoneType"),
        ({"input_ids": [1, 2]}, "no labels"),
        ({"input_ids": [1, 2], "labels": [1, 2], "position_ids": [0, 1]}, "position_ids"),
        ({"input_ids": [1, 2], "labels": [1, 2, 3]}, "not one row of each"),
        ({"input_ids": [1, 2], "labels": [-100, 2], "attention_mask": [0, 1]}, "not of padding behind"),
        ({"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 0]}, "not of padding behind"),
    ],
)
def test_what_is_no_pair_is_refused_with_the_reason(sample, why):
    with pytest.raises(UnfitError, match=why):
        pair_of(sample)
    error = error_of(Pairs([sample], "mine", 0).inputs, [0])
    assert error.code == "E505" and "sample 0 of mine " in error.message and why in error.message
