"""`--forward`: rows of a data set by the ranks of a pipeline equal those of one process, in the order of samples."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from tests.refusals import error_of
from tests.runtime.small_plans import GPT, LLAMA, make_plan, make_program
from tests.runtime.test_gradients import VECTORS, user
from tests.runtime.test_tensor_parallel import plan_of as parted_plan
from tests.threads import begun, run_threads
from tests.tiers import few
from zbc.training.building.context import Settings
from zbc.training.data.data import all_samples
from zbc.training.forward import forward
from zbc.training.models import model as models

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


def alone(plan):
    """Log-probabilities by one process, sample by sample."""
    settings = Settings.of(plan.manifest)
    layers = [layer.build(settings.train.seed).eval() for layer in models.layers(settings.model, settings.train.seed)]
    layers[-1].chunk = None
    samples = all_samples(settings.data, settings.model, settings.train.seed)
    rows = []
    for i in range(len(samples)):
        x = samples.inputs([i])
        with torch.no_grad():
            for layer in layers:
                x = layer(x)
        rows.append(-functional.cross_entropy(x[0], samples.targets([i])[0], reduction="none"))
    return torch.stack(rows)


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


def test_ranks_that_share_layers_and_replicas_write_the_same_rows(tmp_path):
    data = text_of(tmp_path, 21, seq_len=8)
    shapes = ({"tp": 2, "dp": 2}, {"slices": 2}, {})
    plans = (parted_plan(tmp_path / str(i), pp=2, data=data, **shape) for i, shape in enumerate(shapes))
    shared, sliced, whole = (rows_of(plan, tmp_path)["log_probs"] for plan in plans)
    assert shared.shape == (21, 8)
    torch.testing.assert_close(sliced, whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(shared, whole, rtol=1e-6, atol=1e-6)


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
    assert error.code == "E606" and "--forward" in error.hint
    (tmp_path / "data.txt").unlink()
    error = error_of(rows_of, plan, tmp_path)
    assert error.code == "E501" and "data.txt" in error.message
