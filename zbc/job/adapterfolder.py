"""The files of a folder of adapters that peft loads: adapter_config.json, adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from zbc.errors import ZbcError
from zbc.job import hffolder
from zbc.job.adapter import Adapter, called
from zbc.job.spec import Model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def check_target(folder: Path, adapter: Adapter) -> None:
    """Checks before training whether adapters can be written. Raises E524 (files exist), E604 (no adapters), E602."""
    if not adapter.rank:
        text = "run: --save-adapter writes adapters, and the plan has none"
        raise ZbcError("E604", text, hint="set adapter.rank and plan again, or use --save-hf")
    hffolder.make_folder(folder, (CONFIG, WEIGHTS))


def complete(folder: Path, adapter: Adapter, model: Model, shards: Iterable[str], source: str | None) -> None:
    """Merges the shards of all ranks (`hffolder.write_shard`) into one file, and writes the config of peft."""
    library, tensors, paths = hffolder.safetensors(), dict[str, Any](), list[Path]()
    for text in filter(None, shards):
        paths.append(folder / json.loads(text)["file"])
        tensors |= library.torch.load_file(paths[-1])
    library.torch.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    for path in paths:
        path.unlink()
    names = [name.removeprefix("base_model.model.").removesuffix(".weight") for name in tensors]
    adapted_ones = {name.rpartition(".lora_")[0] for name in names if ".lora_" in name}
    whole = {name.removesuffix(".bias") for name in names if ".lora_" not in name}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.causal else None,
        "base_model_name_or_path": source,
        "r": adapter.rank,
        "lora_alpha": adapter.given,
        "use_rslora": isinstance(adapter.alpha, str),
        "target_modules": _shortest(adapted_ones, model),
        "modules_to_save": sorted(whole) or None,
        "fan_in_fan_out": model.family == "gpt",
        "bias": "none",
        "lora_dropout": adapter.dropout,
        "inference_mode": True,
    }
    hffolder.write_json(folder, CONFIG, config)


def _shortest(targets: Collection[str], model: Model) -> list[str]:
    """The last components of the names of adapted layers, if no other layer's name ends in one; otherwise the names."""
    ends = {name.rpartition(".")[2] for name in targets}
    all_of = {name for _, *names in called(model) for name in names}
    return sorted(ends if {name for name in all_of if name.rpartition(".")[2] in ends} == {*targets} else targets)
