"""From a Hugging Face folder to a job, a plan, a run in processes and back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.processes.plans import metrics, run_here, write_plan
from tests.processes.test_checkpoints import weights
from tests.refusals import refused
from tests.tiers import few
from zbc.cli import main
from zbc.compiler.compile import compile_job
from zbc.compiler.shapes import load_job
from zbc.job import hfconfig, hffolder
from zbc.job.hffolder import INDEX
from zbc.job.spec import Model
from zbc.plan.directory import read_manifest
from zbc.training.models import pretrained
from zbc.training.models.model import layers

ADAPTERS = "adapter_model.safetensors"
SIZES = {"layers": 4, "hidden": 16, "heads": 2, "vocab": 256, "seq_len": 8}


@pytest.fixture(params=few(["gpt", "gpt tied", "llama"], ("llama",)))
def folder(request, tmp_path):
    """A folder of each family with the untrained layers of a job, written without transformers."""
    section = {**SIZES, "family": request.param.split()[0], "ties": "tied" in request.param}
    section |= {"kv_heads": 1} if request.param == "llama" else {}
    model = Model.model_validate(section)
    parameters = {f"{x.name}.{n}": p for x in layers(model, 99) for n, p in x.build(99).named_parameters()}
    target = tmp_path / "hf"
    target.mkdir()
    shard = hffolder.write_shard(target, 0, 1, pretrained.tensors_of(model, parameters))
    hffolder.write_index(target, model, [shard])
    return target


def all_tensors(folder):
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    found = weights(folder)
    assert found.keys() == places.keys()
    return found


@pytest.mark.long
def test_a_model_goes_in_is_trained_and_comes_out(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["init", "job", "--from-hf", "hf"])
    assert not ended.value.code
    job = load_job(Path("job/zbc.toml"), ["data.kind=synthetic", "optimizer.lr=0.0", "train.steps=1"])
    assert (job.model.hidden, job.model.pretrained, job.parallel.pp) == (16, "hf", 2)
    compile_job(job).write(Path("still"))
    lines = run_here(Path("still"), 2, tmp_path / "run", save_hf=Path("same"))
    assert lines[-1] == f"wrote the weights to {tmp_path / 'same'}"
    before, after = all_tensors(folder), all_tensors(tmp_path / "same")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert hfconfig.read_config(tmp_path / "same") == hfconfig.read_config(folder)


def test_the_plan_does_not_depend_on_the_folder(folder, tmp_path):
    plain = write_plan(tmp_path, "plain", model=SIZES)
    with_weights = write_plan(tmp_path, "with", model={**SIZES, "pretrained": str(folder)})
    assert read_manifest(plain).id == read_manifest(with_weights).id
    assert read_manifest(with_weights).training["pretrained"] == str(folder)


@pytest.mark.long
def test_a_target_in_the_way_is_found_before_any_step(folder, tmp_path):
    plan = write_plan(tmp_path)
    with refused("E524"):
        run_here(plan, 4, tmp_path / "run", save_hf=folder)
    assert not (tmp_path / "run").exists()
    run_here(plan, 4, tmp_path / "run", steps=1, save_hf=tmp_path / "new")
    assert len(metrics(tmp_path / "run")) == 1 and len(list((tmp_path / "new").glob("*.safetensors"))) == 4


def test_a_training_goes_on_under_another_plan_and_becomes_a_folder_for_transformers(tmp_path):
    """Stopped at step 20 under 1F1B on two ranks, resumed under zb-v on four: losses of a run that never stopped."""
    train = {"model": {**SIZES, "layers": 8, "family": "llama"}, "train": {"steps": 24}}
    saving = {"checkpoint": {"every": 20}}
    two = write_plan(tmp_path, "two", parallel={"pp": 2}, schedule={"kind": "1f1b"}, **train, **saving)
    four = write_plan(tmp_path, "four", parallel={"pp": 4}, schedule={"kind": "zb-v"}, **train)
    run_here(two, 2, tmp_path / "whole")
    run_here(two, 2, tmp_path / "begun", steps=20)
    run_here(four, 4, tmp_path / "ended", resume=str(tmp_path / "begun"), save_hf=tmp_path / "hf")
    whole, ended = metrics(tmp_path / "whole"), metrics(tmp_path / "ended")
    assert [row["step"] for row in ended] == [21, 22, 23, 24]
    assert [row["loss"] for row in ended] == pytest.approx([row["loss"] for row in whole[20:]], abs=1e-6)
    weights = all_tensors(tmp_path / "hf")
    assert hfconfig.read_config(tmp_path / "hf")["num_hidden_layers"] == 8
    assert "model.layers.7.mlp.down_proj.weight" in weights and not any(w.isnan().any() for w in weights.values())


@pytest.mark.long
def test_adapters_that_were_trained_come_out_beside_the_base_and_merged_into_it(folder, tmp_path):
    section = hfconfig.model_of(hfconfig.read_config(folder), "x").model_dump(mode="json", exclude_defaults=True)
    adapter = {"adapter": {"rank": 2, "alpha": 4.0}, "optimizer": {"lr": 0.05}, "train": {"steps": 3}}
    plan = write_plan(tmp_path, model={**section, "pretrained": str(folder)}, parallel={"pp": 2}, **adapter)
    lines = run_here(plan, 2, tmp_path / "run", save_hf=tmp_path / "merged", save_adapter=tmp_path / "adapter")
    assert f"wrote the adapters to {tmp_path / 'adapter'}" in lines
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {"adapter_config.json", ADAPTERS}
    before, after = all_tensors(folder), all_tensors(tmp_path / "merged")
    found, turned = load_file(tmp_path / "adapter" / ADAPTERS), section.get("family", "gpt") == "gpt"
    changed = {name for name in before if not before[name].equal(after[name])}
    assert len(changed) == len(found) // 2 and all("layers" in name or ".h." in name for name in changed)
    for name in changed:
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        added = 2.0 * found[f"{stem}.lora_B.weight"] @ found[f"{stem}.lora_A.weight"]
        torch.testing.assert_close(after[name], before[name] + (added.T if turned else added))
