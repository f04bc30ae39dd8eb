"""The files of a Hugging Face folder that transformers loads: config.json, *.safetensors and their index.

A training that began with the weights of such a folder keeps the rest of it: the keys of its config.json, the tokenizer
and generation config, and the rows of positions beyond the sequence length of this training.

Every rank writes the tensors of its own stages into a file of its own. The index is written last, in one rename, so a
folder with an index is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zbc.errors import ZbcError, unwritten
from zbc.host.folders import folders_for
from zbc.host.linefile import replace_text
from zbc.job import hfconfig, userobject
from zbc.job.model_section import OWN_NORMS, TRANSFORMERS, Model
from zbc.text import listed

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_PARTS = "zbc.training.models.hfweights:refuse_parts"  # which imports transformers
_BESIDE = (".json", ".jinja", ".model", ".tiktoken", ".txt")  # tokenizers, templates, generation config


def check_target(folder: Path, model: Model, ep: int = 0) -> None:
    """Checks before training that `write_shard` will work. Raises E524 (no counterpart, or files exist), E602."""
    _config_of(model)
    if ep > 1 and model.family == TRANSFORMERS:
        userobject.load(_PARTS, "the writer of weights")(model)
    make_folder(folder, (hfconfig.CONFIG, INDEX, SINGLE))


def _config_of(model: Model) -> dict[str, Any]:
    if model.family == TRANSFORMERS:
        return {key: value for key, value in model.args["config"].items() if key != OWN_NORMS}
    return hfconfig.config_of(model)


def make_folder(folder: Path, names: Iterable[str]) -> None:
    """Makes a folder that has none of these files. Raises E524, E602."""
    safetensors()
    for name in names:
        if os.path.exists(folder / name):
            text = f"run: {folder} holds a model already ({name})"
            raise ZbcError("E524", text, hint="choose another folder, or remove this one")
    try:
        with folders_for(folder):
            folder.mkdir(exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from None


def begun_with(pretrained: str | None) -> Path | None:
    """The folder that a training began with; None if it no longer exists, which must not lose the trained weights."""
    folder = None if pretrained is None else Path(pretrained)
    return None if folder is None or not os.path.isfile(folder / hfconfig.CONFIG) else folder


def write_shard(folder: Path, number: int, count: int, tensors: Mapping[str, Any]) -> str:
    """Writes file `number` (from 0) of `count`; returns its description for `write_index`, as text."""
    name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
    part = folder / f".{name}.part"
    try:
        safetensors().torch.save_file(dict(tensors), part, metadata={"format": "pt"})
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, folder / name)
    except OSError as error:
        raise _unwritable(folder / name, error) from None
    except Exception as error:  # safetensors has a type of its own for a full disk
        raise _unwritable(folder / name, OSError(0, str(error))) from error
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    types = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    return json.dumps({"file": name, "bytes": size, "tensors": sorted(tensors), "types": types})


def write_index(folder: Path, model: Model, shards: Iterable[str], source: Path | None = None) -> list[str]:
    """Completes a folder once all shards are written; `shards` are the results of `write_shard`, "" for none. `source`:
    the folder of the initial weights. Returns messages about it."""
    known = [json.loads(text) for text in shards if text]
    places = {name: shard["file"] for shard in known for name in shard["tensors"]}
    total = sum(shard["bytes"] for shard in known)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    config, said = _config_of(model), list[str]()
    types = {name for shard in known for name in shard["types"]}
    dtype = types.pop() if len(types) == 1 else "float32"
    if model.family == TRANSFORMERS:
        config = {**config, ("torch_dtype" if "torch_dtype" in config else "dtype"): dtype}
    if source is not None:
        before = hfconfig.read_config(source)
        config = config if model.family == TRANSFORMERS else hfconfig.config_from(before, model, dtype)
        new = ", ".join(f"{key} = {json.dumps(config[key])}" for key in config if before.get(key) != config[key])
        said = [f"{hfconfig.CONFIG} is that of {source}" + f" but for {new}" * bool(new), *_copy_beside(source, folder)]
    for name, content in ((hfconfig.CONFIG, config), (INDEX, index)):
        write_json(folder, name, content)
    return said


def write_json(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    """Writes a file atomically. Raises E524."""
    try:
        replace_text(folder / name, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise _unwritable(folder / name, error) from None


def _copy_beside(source: Path, folder: Path) -> Iterator[str]:
    """Copies the other files of a model's folder; existing files in `folder` are not overwritten."""
    copied = []
    for path in sorted(source.iterdir()):
        weights = path.name in (hfconfig.CONFIG, INDEX) or path.name.endswith(".index.json")
        beside = path.suffix in _BESIDE or path.name.startswith("LICENSE")
        if beside and not weights and path.is_file() and not os.path.exists(folder / path.name):
            try:
                shutil.copyfile(path, folder / path.name)
            except OSError as error:
                raise _unwritable(folder / path.name, error) from None
            copied.append(path.name)
    if copied:
        yield f"copied from there: {', '.join(copied)}"


def _unwritable(path: Path, error: OSError) -> ZbcError:
    text = f"run: cannot write {path}: {unwritten(path, error)}"
    return ZbcError("E524", text, hint="choose a place that can be written and has room")


# ---- files of weights ----------------------------------------------------------------------------------------


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of every tensor in a folder. Raises E520 (no weights, or an index or a file is damaged)."""
    index, single = folder / INDEX, folder / SINGLE
    if os.path.isfile(index):
        return _indexed(index)
    if os.path.isfile(single):
        with opened(single) as file:
            return dict.fromkeys(file.keys(), single)
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
            raise ZbcError("E520", text, hint="take the index that came with the weights")
        if not os.path.isfile(index.parent / file):
            raise ZbcError("E520", f"model: {index} names {file}, which is missing", hint="complete the folder")
    return {name: index.parent / file for name, file in files.items()}


def refuse(folder: Path, what: str, names: Sequence[str]) -> None:
    """Raises E520 for a folder with wrong tensors, if there are names."""
    if names:
        hint = "is it the folder of this model, complete, and of the same architecture?"
        raise ZbcError("E520", f"model: {folder} {what} {listed(names, 3)}", hint=hint)


def damaged(path: Path, error: BaseException) -> ZbcError:
    details = [f"{type(error).__name__}: {error}"[:200]]
    return ZbcError("E520", f"model: {path} is damaged or cut off", details=details, hint="fetch it again")


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A file of tensors, open. Raises E520, E602."""
    try:
        with safetensors().safe_open(path, framework="pt") as file:
            yield file
    except ZbcError:
        raise
    except Exception as error:  # safetensors raises types of its own, and OSError
        raise damaged(path, error) from error


def safetensors() -> Any:
    """The optional library safetensors. Raises E602 if it is not installed."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise ZbcError("E602", "run: safetensors is not installed", hint="pip install 'zbc[hf]'") from None
    return safetensors
