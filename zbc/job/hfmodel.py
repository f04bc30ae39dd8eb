"""`[model]` of a job without a family: `pretrained = "FOLDER"`, or `config = "config.json"` for no weights.

A folder that zbc's own families compute gets their keys, unless `config` says that transformers is to build it. Any
other model is transformers' own, taken apart into layers (training/models/transformers.py): a factory whose argument is
the content of config.json, so that a plan knows the model without the folder.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zbc.errors import ZbcError
from zbc.job import hfconfig, userobject
from zbc.job.model_section import OWN_NORMS, TRANSFORMERS, Model
from zbc.job.toml import Document, KeyPath

_FOLLOWS = ("family", "layers", "vocab", "experts", "ties", "args")  # keys that follow from a configuration
_FACTS, _CALLED, _SHARED, WORDS = (
    f"zbc.training.models.transformers:{name}" for name in ("facts", "called", "shared", "words_of")
)


def filled(document: Document) -> Document:
    """A document with the keys of [model] that follow from a configuration, at the place that names it. Raises E110 for
    a configuration beside a family, E520 for a folder that does not hold such a model, E602 without transformers."""
    model = document.values.get("model")
    key = next(
        (key for key in ("config", "pretrained") if isinstance(model, dict) and isinstance(model.get(key), str)), None
    )
    if key is None or not isinstance(model, dict):
        return document
    where, named, weights = document.where(("model", key)), Path(model[key]), model.get("pretrained")
    if model.get("family") == TRANSFORMERS:  # they are there
        return document
    if key == "config" and "family" in model:
        text = "config: model.config is a model of transformers, and model.family stands beside it"
        raise ZbcError("E110", text, where=where, hint="keep one of them")
    if "family" in model or (weights is not None and not os.path.isdir(weights)):
        return document  # the folder's absence is told with the other problems
    folder, name = (named, hfconfig.CONFIG) if key == "pretrained" else (named.parent, named.name)
    try:
        config = hfconfig.read_config(folder, name)
        ours = _ours(config) if key == "pretrained" else None
        if ours is not None and "layers" in model:
            return document  # it gives the sizes itself
        if ours is None:
            config = {**config, OWN_NORMS: True} if model.get("variant") == OWN_NORMS else config
            ours = _theirs(config, weights, chunked=model.get("loss_chunk", "auto") != "auto")[0]
    except ZbcError as error:
        raise ZbcError(error.code, error.message, where=where, hint=error.hint, details=error.details) from error
    places: dict[KeyPath, str] = {("model", name): where for name in ours if name not in model}
    return replace(
        document, values={**document.values, "model": {**ours, **model}}, places={**places, **document.places}
    )


def described(path: Path, most: int) -> tuple[dict[str, Any], int]:
    """[model] of a config.json or the folder of one, for sequences of at most `most` tokens; and how many tokens the
    model takes. Raises E520, E521, E602."""
    folder, name = (path.parent, path.name) if path.name.endswith(".json") else (path, hfconfig.CONFIG)
    config = hfconfig.read_config(folder, name)
    named = {"pretrained": str(folder)} if any(folder.glob("*.safetensors")) else {}
    ours = _ours(config)
    if ours is not None:
        values, longest = ours, ours["seq_len"]
    else:
        values, longest = _theirs(config, named.get("pretrained"))
        named = named or {"config": str(folder / name)}
    return {**values, "seq_len": min(longest or most, most), **named}, longest or most


def written(model: dict[str, Any]) -> dict[str, Any]:
    """The keys of a [model] that a job file needs: of a model of transformers without those that follow."""
    return {k: v for k, v in model.items() if model.get("family") != TRANSFORMERS or k not in _FOLLOWS}


def _theirs(config: dict[str, Any], weights: str | None, *, chunked: bool = False) -> tuple[dict[str, Any], int | None]:
    """The keys of a model of transformers, and how many tokens of a sequence it takes, if it says so."""
    found, longest = _facts(json.dumps(config), weights, chunked)
    return {"family": TRANSFORMERS, **found, "args": {"config": config}}, longest


def _ours(config: dict[str, Any]) -> dict[str, Any] | None:
    """The keys of one of zbc's own families that computes a model; None if none does."""
    try:
        model = hfconfig.model_of(config, hfconfig.CONFIG)
    except ZbcError:
        return None
    return {"family": model.family, **model.model_dump(mode="json", exclude_defaults=True)}


def called(model: Model, linear: str) -> str:
    """What the folder of a model of transformers calls a linear layer, "" outside of blocks; others as they are."""
    if model.family != TRANSFORMERS:
        return linear
    found: str = userobject.load(_CALLED, "the reader of models")(model.args["config"], linear)
    return found


def outside(model: Model, module: str) -> str:
    """The name in its folder of a module of transformers outside of blocks, "" in one; others as they are."""
    return module.partition(".root.")[2] if model.family == TRANSFORMERS else module


@lru_cache(64)
def check_shared(config: str, ranks: int) -> None:
    """Raises E119 for a model of transformers, by its config.json, whose layers so many ranks cannot share."""
    userobject.load(_SHARED, "the reader of models")(json.loads(config), ranks)


def unshareable_words(model: Model) -> str:
    """Whose words ranks cannot share, and why, of a model of transformers; "" of others, or if they can."""
    if model.family != TRANSFORMERS:
        return ""
    found = userobject.load(WORDS, "the reader of models")(config := model.args["config"])
    return f"{config['model_type']}: {found}" if isinstance(found, str) else ""


@lru_cache(16)
def _facts(config: str, folder: str | None, chunked: bool) -> tuple[dict[str, Any], int | None]:
    have = version("transformers") if find_spec("transformers") else ""
    if not have or (*map(int, have.split(".")[:2]),) < (5, 8):  # whose experts ask for functions
        why = "which is not installed" if not have else f"whose version {have} is too old"
        text = f"model: {json.loads(config).get('model_type')} is a model of transformers, {why}"
        raise ZbcError("E602", text, hint="pip install -U 'zbc[hf]'")
    facts: Any = userobject.load(_FACTS, "the reader of models")
    return facts(json.loads(config), folder, chunked)  # type: ignore[no-any-return]
