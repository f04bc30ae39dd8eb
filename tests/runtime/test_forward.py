"""`--forward`: rows of a data set by the ranks of a pipeline equal those of one process, in the order of samples."""

import pytest
import torch
from safetensors.torch import load_file

from tests.composed import beside, written
from tests.refusals import error_of
from tests.runtime import one_by_one
from tests.runtime.given_steps import Ragged, Sentences
from tests.runtime.one_by_one import TEXTS, Texts
from tests.runtime.small_plans import GPT, LLAMA, make_plan, make_program
from tests.runtime.test_given_steps import TOKENS
from tests.runtime.test_given_steps import plan_of as given_plan
from tests.runtime.test_gradients import VECTORS, user
from tests.runtime.test_tensor_parallel import plan_of as parted_plan
from tests.runtime.test_unequal import unequal
from tests.threads import begun, run_threads
from tests.tiers import few
from zbc.training.building.context import Settings
from zbc.training.data.data import all_samples
from zbc.training.forward import forward

VOCAB = 256


def text_of(folder, samples, seq_len=16):
    """A text file of `count` windows."""
    path = folder / "data.txt"
    path.write_bytes(bytes(32 + (7 * i + i // 5) % 90 for i in range(samples * seq_len + 1)))
    return {"kind": "text", "path": str(path)}


def rows_of(plan, folder, most=None):
    out = folder / "rows.safetensors"
    run_threads(plan, 1, step=begun(lambda worker: forward(worker, out, most)))
    assert [path.name for path in folder.glob("rows*")] == ["rows.safetensors"]
    return load_file(out)


def each_alone(plan, samples):
    """Log-probabilities of a plan's model, of one sample after the other; 0 behind it."""
    layers, rows = one_by_one.built(plan), torch.zeros(len(samples), Settings.of(plan.manifest).model.seq_len)
    layers[[*layers][-1]].chunk = None
    with torch.no_grad():
        for row, (x, target) in zip(rows, samples, strict=True):
            row[: len(target)] = -one_by_one.losses(layers, x, target)
    return rows


def alone(plan):
    settings = Settings.of(plan.manifest)
    samples = all_samples(settings.data, settings.model, settings.train.seed)
    return each_alone(plan, [(samples.inputs([i])[0], samples.targets([i])[0]) for i in range(len(samples))])


KINDS = [("1f1b", 4, {}), ("interleaved-1f1b", 2, {}), ("zb-v", 2, {}), ("chimera", 2, {}), ("gpipe", 1, {})]
KINDS += [("1f1b", 2, {"copies": 2})]


@pytest.mark.parametrize(("kind", "p", "how"), KINDS)
@pytest.mark.parametrize("samples", few([8, 16, 19], [19]))
def test_rows_are_those_of_one_process_whatever_the_placement(kind, p, how, samples, tmp_path):
    program, samples = make_program(kind, p, 4, **how), max(samples, 8 * how.get("copies", 1))  # one step at least
    plan = make_plan(program, model={**GPT, "vocab": VOCAB}, data=text_of(tmp_path, samples))
    found = rows_of(plan, tmp_path)["log_probs"]
    assert found.shape == (samples, 16)
    torch.testing.assert_close(found, alone(plan), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("more", [{}, {"loss_chunk": 5, "label_smoothing": 0.2, "z_loss": 0.1}])
def test_chunks_and_terms_of_the_loss_change_no_row(more, tmp_path):
    plan = make_plan(make_program("1f1b", 2, 3), model={**LLAMA, "vocab": VOCAB, **more}, data=text_of(tmp_path, 7))
    torch.testing.assert_close(rows_of(plan, tmp_path)["log_probs"], alone(plan), rtol=1e-6, atol=1e-6)


APART = [{"more": {"cp": 2}}, {"more": {"cp": 2}, "slices": 2}, {"more": {"vocabulary": "shared"}}]
APART += [{"more": {"vocabulary": "shared-2", "cp": 2, "dp": 2}, "slices": 2, "tp": 2}]
APART += [{"pp": 2, "tp": 2, "dp": 2}, {"pp": 2, "slices": 2}]
EXPERTS = {"experts": 4, "top_k": 2, "ffn_hidden": 16}
APART += [{"more": {"ep": 2, "dp": 2}, "model": "llama", "model_more": EXPERTS}]
APART += [{**APART[-1], **how} for how in ({"more": {"ep": 4, "dp": 2}, "tp": 2}, {"more": {"ep": 2}, "tp": 4})]
TERMS = {"label_smoothing": 0.2, "z_loss": 0.1}


@pytest.mark.long
@pytest.mark.parametrize("how", few(APART, [APART[n] for n in (1, 2, 4, 5)]))
def test_ranks_that_share_layers_tokens_or_words_and_replicas_write_rows_of_whole_sequences(how, tmp_path):
    data = text_of(tmp_path, 21, seq_len=8)
    same = {key: how[key] for key in ("model", "model_more") if key in how}
    one, shared = {"pp": 1, "data": data, **same}, {"model_more": TERMS, "data": data, **how}
    whole, found = (rows_of(parted_plan(tmp_path / str(i), **each), tmp_path) for i, each in enumerate((one, shared)))
    torch.testing.assert_close(found["log_probs"], whole["log_probs"], rtol=1e-6, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("how", few([{}, {"rows": 2, "schedule": "zb-v"}, {"rows": 2, "model": LLAMA}], 1))
def test_samples_of_unequal_length_have_their_rows_in_order_whatever_shares_a_row(how, tmp_path):
    plan = unequal(**{"data": {"kind": TEXTS, "args": {"count": 61}, "balance": "length"}, **how})
    texts, found = Texts(61), rows_of(plan, tmp_path)
    assert found["lengths"].tolist() == texts.lengths
    expected = each_alone(plan, [texts[i] for i in range(61)])
    torch.testing.assert_close(found["log_probs"], expected, rtol=2e-6, atol=2e-6)
    short = {"count": 3, "longest": 4}  # of a batch that is filled up with the first ones
    short_plan = unequal(**{"data": {"kind": TEXTS, "args": {**short, "count": 30}, "balance": "length"}, **how})
    assert rows_of(short_plan, tmp_path)["lengths"].tolist() == Texts(**{**short, "count": 30}).lengths


@pytest.mark.long
def test_packed_rows_that_ranks_share_give_those_of_whole_samples(tmp_path):
    tables = beside("cp", model__vocab=61, model__seq_len=16)[0]
    tables["data"] = {"kind": TEXTS, "args": {"count": 61}, "balance": "length"}
    tables["parallel"]["pp"] = 2
    plan = written(tables, tmp_path / "job")[1]
    texts, found = Texts(61), rows_of(plan, tmp_path)
    expected = each_alone(plan, [texts[i] for i in range(61)])
    torch.testing.assert_close(found["log_probs"], expected, rtol=2e-6, atol=2e-6)


def test_steps_that_a_dataset_splits_have_a_row_for_each_of_their_rows_without_padding(tmp_path):
    plan = given_plan(section=TOKENS, kind="Sentences", m=5, schedule="1f1b")
    steps, found = Sentences(count=5, size=3), rows_of(plan, tmp_path)
    samples = [(x[i], y[i]) for step in range(len(steps)) for x, y, _ in steps[step] for i in range(len(x))]
    assert found["lengths"].tolist() == [len(x) for x, _ in samples]
    torch.testing.assert_close(found["log_probs"], each_alone(plan, samples), rtol=2e-6, atol=2e-6)
    (other := tmp_path / "other").mkdir()
    plan = given_plan(dp=2, m=2)
    steps, found = Ragged(count=4, size=3), rows_of(plan, other, most=4)
    assert found.keys() == {"outputs"}
    assert len(found["outputs"]) == sum(len(x) for step in range(4) for x, _, _ in steps[step])


def test_a_model_with_another_loss_gives_its_outputs_and_batches_may_be_fewer(tmp_path):
    model = {**GPT, "vocab": VOCAB, "loss": "tests.runtime.losses:smoothed"}
    plan = make_plan(make_program("1f1b", 2, 2), model=model, data=text_of(tmp_path, 9), size=2)
    found = rows_of(plan, tmp_path, most=2)
    assert found["outputs"].shape == (8, 16, VOCAB)


def test_a_training_goes_on_as_if_nothing_had_been_written(tmp_path):
    plan = make_plan(make_program("zb-h1", 2, 3), model={**GPT, "vocab": VOCAB}, data=text_of(tmp_path, 40))
    plain = run_threads(plan, 2)
    other = run_threads(plan, 2, step=begun(lambda worker: forward(worker, tmp_path / "rows.safetensors")))
    assert [r.loss for r in plain[0].results] == [r.loss for r in other[0].results]


def test_a_model_with_several_outputs_has_no_rows(tmp_path):
    section = user("two_heads", loss="tests.runtime.user_models:both_errors")
    plan = make_plan(make_program("1f1b", 1, 2), model=section, **VECTORS)
    error = error_of(rows_of, plan, tmp_path)
    assert error.code == "E505" and "returns (float32 [2, 8], float32 [2, 4])" in error.message


def test_missing_data_and_no_place_are_refused_by_name(tmp_path):
    plan = make_plan(make_program("1f1b", 1, 2), model={**GPT, "vocab": VOCAB}, data=text_of(tmp_path, 9))
    (tmp_path / "file").write_text("")
    error = error_of(rows_of, plan, tmp_path / "file")
    assert error.code == "E608" and "--forward" in error.hint
    (tmp_path / "data.txt").unlink()
    error = error_of(rows_of, plan, tmp_path)
    assert error.code == "E501" and "data.txt" in error.message
