"""Initial weights from a Hugging Face folder (config.json and *.safetensors), read lazily.

A rank opens the files with its own layers and reads those tensors only. safetensors is a plain format: a JSON header
and raw numbers. Nothing is unpickled: folders with only pytorch_model.bin are refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.job import hfconfig, userobject
from zbc.job.hffolder import opened, refuse, tensor_files
from zbc.job.hfnames import HEAD, TensorRows, parts
from zbc.job.model_section import TRANSFORMERS
from zbc.job.spec import Model
from zbc.runtime.core.tensors import TensorSpec
from zbc.training.models.experts import stacks_in, unstacked
from zbc.training.models.model import LayerPlan

_POSITIONS, _WRITE = "embed.positions.weight", "zbc.training.models.hfweights:tensors_of"  # which imports transformers
_IGNORED = re.compile(r"(.*\.)?(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)")  # buffers that old versions saved


def fill(plans: Sequence[LayerPlan], model: Model, folder: Path) -> list[LayerPlan]:
    """The layers with the weights of `folder`, which are read when they are built.

    Raises E520 (no such folder; a tensor is missing, or not one of the model's), E521 (its model is none of zbc's, or
    not that of the job); when a layer is built E520 (a tensor has another shape, or is damaged).
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
        """Raises E520 unless the folder has exactly the tensors of these parameters."""
        needed = {part.name for parameter in wanted for part in self._parts(parameter)}
        missing = sorted(needed - self._files.keys())
        extra = sorted(name for name in self._files.keys() - needed if not _IGNORED.fullmatch(name) and name != HEAD)
        refuse(self._folder, "lacks", missing)
        refuse(self._folder, "has tensors that the model does not have:", extra)

    def beyond(self, parameter: str, rows: int) -> Tensor:
        """The rows from `rows` on of a parameter's tensor in the folder, which a shorter table leaves out."""
        (part,) = self._parts(parameter)
        return self._read(part)[rows:]

    @torch.no_grad()
    def fill(self, layer: str, module: nn.Module) -> None:
        """Overwrites the parameters of a layer, on the CPU, in their own type."""
        for local, parameter in unstacked(module.named_parameters(), stacks_in([("", module)])):
            start = 0
            for part in self._parts(f"{layer}.{local}"):
                rows, tensor = len(parameter) if part.rows is None else part.rows, self._read(part)
                if local.startswith("positions."):
                    tensor = tensor[:rows]  # of a longer table; hfconfig has refused shorter ones
                tensor, target = tensor.T if part.transposed else tensor, parameter[start : start + rows]
                if target.shape != tensor.shape or not tensor.is_floating_point():
                    raise misfit(part.name, self._files[part.name], tensor, target)
                target.copy_(tensor)
                start += rows

    def _parts(self, parameter: str) -> list[TensorRows]:
        found = parts(self._model, parameter)
        if self._tied and found[0].name == HEAD:
            found = parts(self._model, "embed.tokens.weight")
        return [part._replace(name=part.name.removeprefix(self._prefix)) for part in found]

    def _read(self, part: TensorRows) -> Tensor:
        with opened(self._files[part.name]) as file:
            tensor: Tensor = file.get_tensor(part.name)
            return tensor


def misfit(name: str, file: Path, found: Tensor | str, target: Tensor) -> ZbcError:
    """E520 for a tensor, `found`, of another shape than the model's."""
    shown = found if isinstance(found, str) else TensorSpec.of(found)
    text = f"model: {name} in {file} is {shown}, the model needs {list(target.shape)}"
    return ZbcError("E520", text, hint="config.json and the weights belong to different models")


def tensors_of(model: Model, parameters: Mapping[str, Tensor], source: Path | None = None) -> dict[str, Tensor]:
    """Parameters as the tensors of a folder, by their names there, on the CPU. A tied head is left out. `source`: the
    folder of the initial weights, from whose longer table of positions the remaining rows are taken."""
    if model.family == TRANSFORMERS:
        written: dict[str, Tensor] = userobject.load(_WRITE, "the writer of weights")(model, parameters, source)
        return written
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if name == _POSITIONS and source is not None:
            more = Weights(source, model, tied=False).beyond(name, len(parameter))
            parameter = torch.cat([parameter.detach().cpu(), more.to(parameter.dtype)])
        start = 0
        for part in parts(model, name):
            if part.name == HEAD and model.tie_embeddings:
                continue
            rows = len(parameter) if part.rows is None else part.rows
            piece = parameter.detach()[start : start + rows].cpu()
            found[part.name] = (piece.T if part.transposed else piece).contiguous()
            start += rows
    return found
