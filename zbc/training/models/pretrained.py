"""Initial weights from a Hugging Face folder (config.json and *.safetensors), read lazily.

A rank opens the files with its own layers and reads those tensors only. safetensors is a plain format: a JSON header
and raw numbers. Nothing is unpickled: folders with only pytorch_model.bin are refused.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.job import hfconfig
from zbc.job.hfnames import HEAD, TensorRows, parts
from zbc.job.spec import Model
from zbc.training.models.model import LayerPlan
from zbc.training.models.stacks import stacks_in, unstacked

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_IGNORED = re.compile(r"(.*\.)?(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)")  # buffers that old versions saved


def fill(plans: Sequence[LayerPlan], model: Model, folder: Path) -> list[LayerPlan]:
    """The layers with the weights of `folder`, which are read when they are built.

    Raises E520 (no such folder), E521 (its model is not one of zbc's), E522 (the job has another model), E523 (a tensor
    is missing or is not one of the model's); when a layer is built E523 (a tensor has another shape, or is damaged).
    """
    source = str(folder / hfconfig.CONFIG)
    theirs = hfconfig.check_fits(model, hfconfig.read_config(folder), source)
    weights = Weights(folder, model, tied=theirs.tie_embeddings)
    named = [(plan.name, layer, stacks_in([("", layer)])) for plan in plans if (layer := plan.on_meta())]
    wanted = [f"{name}.{local}" for name, layer, of in named for local, _ in unstacked(layer.named_parameters(), of)]
    weights.check(wanted)
    return [replace(plan, fill=functools.partial(weights.fill, plan.name)) for plan in plans]


class Weights:
    """The tensors of a folder, by name; `tied`: its head is the embedding."""

    def __init__(self, folder: Path, model: Model, *, tied: bool) -> None:
        self._folder, self._model, self._tied = folder, model, tied
        self._files = tensor_files(folder)
        # The files of the first GPT-2 have names without the model's own prefix.
        prefix = "model." if model.family == "llama" else "transformer."
        self._prefix = prefix if not any(name.startswith(prefix) for name in self._files) else ""

    def check(self, wanted: Sequence[str]) -> None:
        """Raises E523 unless the folder has exactly the tensors of these parameters."""
        needed = {part.name for parameter in wanted for part in self._parts(parameter)}
        missing = sorted(needed - self._files.keys())
        extra = sorted(name for name in self._files.keys() - needed if not _IGNORED.fullmatch(name) and name != HEAD)
        for names, what in ((missing, "lacks"), (extra, "has tensors that the model does not have:")):
            if names:
                shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                hint = "is it the folder of this model, complete, and of the same architecture?"
                raise ZbcError("E523", f"model: {self._folder} {what} {shown}", hint=hint)

    def beyond(self, parameter: str, rows: int) -> Tensor:
        """The rows from `rows` on of a parameter's tensor in the folder, which a shorter table leaves out."""
        (part,) = self._parts(parameter)
        return self._read(part)[rows:]

    @torch.no_grad()
    def fill(self, layer: str, module: nn.Module) -> None:
        """Overwrites the parameters of a layer, on the CPU, in their own type."""
        for local, parameter in unstacked(module.named_parameters(), stacks_in([("", module)])):
            found = [(part, self._read(part)) for part in self._parts(f"{layer}.{local}")]
            start = 0
            for part, tensor in found:
                rows = len(parameter) if part.rows is None else part.rows
                if local.startswith("positions."):
                    tensor = tensor[:rows]  # of a longer table; hfconfig has refused shorter ones
                self._copy(parameter[start : start + rows], tensor.T if part.transposed else tensor, part.name)
                start += rows

    def _copy(self, target: Tensor, tensor: Tensor, name: str) -> None:
        if target.shape != tensor.shape or not tensor.is_floating_point():
            raise misfit(name, self._files[name], shown(tensor), target)
        target.copy_(tensor)

    def _parts(self, parameter: str) -> list[TensorRows]:
        found = parts(self._model, parameter)
        if self._tied and found[0].name == HEAD:
            found = parts(self._model, "embed.tokens.weight")
        return [part._replace(name=part.name.removeprefix(self._prefix)) for part in found]

    def _read(self, part: TensorRows) -> Tensor:
        path = self._files[part.name]
        try:
            with safetensors().safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(part.name)
                return tensor
        except Exception as error:  # safetensors raises types of its own, and OSError
            raise damaged(path, error) from error


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of every tensor in a folder. Raises E520 (no weights) or E523 (an index or a file is damaged)."""
    index, single = folder / INDEX, folder / SINGLE
    if os.path.isfile(index):
        return _indexed(index)
    if os.path.isfile(single):
        try:
            with safetensors().safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
        except ZbcError:
            raise
        except Exception as error:
            raise damaged(single, error) from error
    pickled = sorted(folder.glob("*.bin"))
    hint = "name a folder with model.safetensors, or with model.safetensors.index.json and what it lists"
    if pickled:
        hint = f"{pickled[0].name} is a pickle, which zbc never loads: convert it with transformers' save_pretrained"
    raise ZbcError("E520", f"model: {folder} has no {SINGLE} and no {INDEX}", hint=hint)


def _indexed(index: Path) -> dict[str, Path]:
    try:
        places = json.loads(index.read_bytes())["weight_map"]
        files = {str(name): str(file) for name, file in places.items()}
    except OSError as error:
        raise ZbcError("E520", f"model: cannot read {index}: {error.strerror}") from None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise damaged(index, error) from None
    for file in sorted(set(files.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            text = f"model: {index} names {file!r}, which is no .safetensors file of its folder"
            raise ZbcError("E523", text, hint="take the index that came with the weights")
        if not os.path.isfile(index.parent / file):
            raise ZbcError("E523", f"model: {index} names {file}, which is missing", hint="complete the folder")
    return {name: index.parent / file for name, file in files.items()}


def shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def misfit(name: str, file: Path, found: str, target: Tensor) -> ZbcError:
    """E523 for a tensor, `found`, of another shape than the model's."""
    text = f"model: {name} in {file} is {found}, the model needs {list(target.shape)}"
    return ZbcError("E523", text, hint="config.json and the weights belong to different models")


def damaged(path: Path, error: BaseException) -> ZbcError:
    details = [f"{type(error).__name__}: {error}"[:200]]
    return ZbcError("E523", f"model: {path} is damaged or cut off", details=details, hint="fetch it again")


def safetensors() -> Any:
    """The optional library safetensors. Raises E610 if it is not installed."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise ZbcError("E610", "run: safetensors is not installed", hint="pip install 'zbc[hf]'") from None
    return safetensors
