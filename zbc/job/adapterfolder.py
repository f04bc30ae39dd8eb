"""The files of a folder of adapters that peft loads: adapter_config.json, adapter_model.safetensors."""

from __future__ import annotations

import json
import re
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


def complete(folder: Path, adapter: Adapter, model: Model, shards: Iterable[str], source: str | None) -> list[str]:
    """Merges the shards of all ranks (`hffolder.write_shard`) into one file, and writes the config of peft. Returns the
    names of layers whose adapters peft drops."""
    library, tensors, paths = hffolder.safetensors(), dict[str, Any](), list[Path]()
    for text in filter(None, shards):
        paths.append(folder / json.loads(text)["file"])
        tensors |= library.torch.load_file(paths[-1])
    stacked = _stacked(tensors)
    library.torch.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    for path in paths:
        path.unlink()
    tensors = {name: tensor for name, tensor in tensors.items() if not _OF_STACK.search(name)}
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
        **({"target_parameters": stacked} if stacked else {}),
        "modules_to_save": sorted(whole) or None,
        "fan_in_fan_out": model.family == "gpt",
        "bias": "none",
        "lora_dropout": adapter.dropout,
        "inference_mode": True,
    }
    hffolder.write_json(folder, CONFIG, config)
    ends = {name.rpartition(".")[2] for name in adapted_ones}
    return sorted(ends & _OF_EXPERTS) if model.experts else []


_OF_EXPERTS = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}  # peft takes these for the stacked experts'
_EACH = re.compile(r"base_model\.model\.(.*\.experts)\.(\w+)\.(\d+)\.lora_A\.weight")  # of an expert
_OF_STACK = re.compile(r"\.experts(\.base_layer)?\.lora_")


def _stacked(tensors: dict[str, Any]) -> list[str]:
    """Puts the adapters of single experts together as peft has those of a stack, (rank of each expert, inputs) and
    (outputs, expert of each rank); the last of a module's stacks wraps those before. Returns the stacks' names."""
    experts = dict[tuple[str, str], dict[int, str]]()
    for name in tensors:
        if (found := _EACH.fullmatch(name)) is not None:
            experts.setdefault((found[1], found[2]), {})[int(found[3])] = name.removesuffix("lora_A.weight")
    for (module, stack), each in experts.items():
        wrapped = stack != "down_proj" and (module, "down_proj") in experts
        downs, ups = ([tensors.pop(f"{each[i]}lora_{side}.weight") for i in sorted(each)] for side in "AB")
        rank, outputs = len(downs[0]), len(ups[0])
        down, up = downs[0].new_empty(len(each), *downs[0].shape), ups[0].new_empty(outputs, rank, len(each))
        for i, (one, other) in enumerate(zip(downs, ups, strict=True)):
            down[i], up[..., i] = one, other
        stem = f"base_model.model.{module}{'.base_layer' * wrapped}"
        tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"] = down.flatten(0, 1), up.flatten(1)
    return sorted(f"{module}.{stack}" for module, stack in experts)


def _shortest(targets: Collection[str], model: Model) -> list[str]:
    """The last components of the names of adapted layers, if no other layer's name ends in one; otherwise the names."""
    ends = {name.rpartition(".")[2] for name in targets}
    all_of = {name for _, *names in called(model) for name in names}
    return sorted(ends if {name for name in all_of if name.rpartition(".")[2] in ends} == {*targets} else targets)
