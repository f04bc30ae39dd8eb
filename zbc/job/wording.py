"""Converts problems that pydantic finds in a job file: the expected and the found value, and a fix."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from datetime import date, time
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from zbc.errors import ZbcError
from zbc.job import toml


def convert(
    name: str, section: type[BaseModel], problem: Any, document: toml.Document
) -> tuple[ZbcError, tuple[Any, ...]]:
    """A pydantic problem of section `name` as ours, and the path it concerns."""
    path: toml.KeyPath = (name,)
    for part in problem["loc"]:  # loc also names union branches; keep what exists in the file
        if document.has((*path, part)) or (isinstance(part, int) and len(path) > 1):
            path = (*path, part)
    dotted = ".".join(str(part) for part in path)
    kind, value = problem["type"], problem["input"]
    field = section.model_fields.get(str(path[1])) if len(path) > 1 else None
    if field is not None and (kind == "too_long" or (kind == "missing" and isinstance(problem["loc"][-1], int))):
        options = [arg for one in (field.annotation, *get_args(field.annotation)) for arg in (one, *get_args(one))]
        count = next((len(get_args(option)) for option in options if get_origin(option) is tuple), 1)
        there = document.values[name][str(path[1])]
        text = f"config: {'.'.join(map(str, path[:2]))}: expected {count} numbers, found {_short(there)}"
        usual = field.default if isinstance(field.default, tuple) else ()
        hint = f"write {path[1]} = {_short([*usual])}" if usual else field.description
        return ZbcError("E103", text, where=document.where(path[:2]), hint=hint), path[:2]
    if kind == "missing":
        key = str(problem["loc"][-1])
        about = section.model_fields[key].description if key in section.model_fields else None
        hint = f"add {key} = ..." + (f" ({about})" if about else "")
        text = f"config: {dotted}.{key} is missing"
        return ZbcError("E105", text, where=document.where(path, key=True), hint=hint), (*path, key)
    if kind == "extra_forbidden":
        inner = section if len(path) == 2 else _table(section.model_fields[str(path[1])].annotation)
        return unknown(path, document, list(inner.model_fields if inner else ())), path
    if (instead := RETIRED_VALUES.get((dotted, str(value)))) is not None:
        text = f'config: {dotted} = "{value}" is gone; write {instead}'
        return ZbcError("E103", text, where=document.where(path)), path
    text = f"config: {dotted}: {_list_or_one(section, path, kind) or sentence(problem)}, found {_short(value)}"
    return ZbcError("E103", text, where=document.where(path), hint=_fix(section, path, problem)), path


def _table(annotation: Any) -> type[BaseModel] | None:
    """The model class of a field, also of an optional one; None for other fields."""
    options = [annotation, *get_args(annotation)]
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)


def _short(value: Any) -> str:
    """A value as in the file, shortened to 30 characters."""
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    if isinstance(value, date | time):
        text = value.isoformat()
    return text if len(text) <= 30 else f"{text[:27]}..."


_WANTED = {
    **dict.fromkeys(("int_type", "int_from_float", "int_parsing"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type"), "a table"),
    "string_type": "a string",
    "bool_type": "true or false",
    "finite_number": "a finite number",
}


_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def _limit(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def sentence(problem: Any) -> str:
    """The expected value of a pydantic problem, in words."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in _WANTED:
        return f"expected {_WANTED[kind]}"
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"must be {words} {_limit(context[key])}"
    if kind in ("literal_error", "enum"):
        return f"expected {context['expected']}"
    return str(problem["msg"]).removeprefix("Value error, ").removesuffix(".").lower()


def first_of(error: ValidationError, of: str = "") -> str:
    """The first problem of values: its place in them, and the expected value."""
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc']))}{of}: {sentence(problem)}"


def _list_or_one(section: type[BaseModel], path: toml.KeyPath, kind: str) -> str | None:
    """The expected value for a field that takes one value or a list; None for other fields."""
    field = section.model_fields.get(str(path[1])) if len(path) > 1 else None
    annotation = str(field.annotation) if field is not None else ""
    if len(path) != 2 or not kind.endswith("_type") or "list" not in annotation:
        return None
    if any(branch in annotation for branch in ("float", "NotNegative")):
        return "expected a number or a list of numbers"
    return "expected a string or a list of strings" if "str" in annotation else "expected a list"


def _fix(section: type[BaseModel], path: toml.KeyPath, problem: Any) -> str:
    """A hint that replaces the wrong value."""
    kind, value, context = problem["type"], problem["input"], problem.get("ctx", {})
    key = f"item {path[-1]}" if isinstance(path[-1], int) else path[-1]
    number = _number(value)
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        quoted = " or ".join(f'"{word}"' for word in choices)
        return (did_you_mean(value, choices) if isinstance(value, str) else None) or f"write {key} = {quoted}"
    if kind in ("int_type", "int_from_float", "float_type") and number is not None:
        return f"write {key} = {number if kind == 'float_type' else round(number)}"
    if kind == "greater_than_equal":
        return f"use {_limit(context['ge'])} or more"
    if kind == "less_than_equal" and str(path[1]).endswith("_gib"):
        return f"it is in GiB, not in bytes: {context['le'] if number is None else number / 2**30:.4g}"
    if kind == "less_than_equal":
        return f"use {_limit(context['le'])} or less"
    field = section.model_fields.get(str(path[1])) if len(path) > 1 else None
    if field is not None and field.description is not None:
        return f"{path[1]}: {field.description}"
    return "`zbc explain keys --json` has the type of every key"


def _number(found: Any) -> float | int | None:
    """The number that `found` is, or that it holds between quotes; None if it is none."""
    if isinstance(found, bool):
        return None
    try:
        value = float(found)
    except (TypeError, ValueError, OverflowError):
        return None
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else value


_ENDS = "lists of costs.f, b, w and act_b with two numbers more, the embedding first and the head last"
_FOLDER = 'model.pretrained = "FOLDER", or model.config = "FILE", without a family or sizes'
_FROM_CONFIG = (
    *("embedding_scale", "attention_scale", "residual_scale", "logits_scale", "scores_cap", "logits_cap"),
    *("whole_every", "window_theta", "unturned_every", "attention_bias", "padding_token", "rope_scaling", "stands_for"),
    "first_dense",
)
RETIRED = {  # key that is gone -> what to write now
    **dict.fromkeys(("costs.embed", "costs.head"), _ENDS),
    **dict.fromkeys(("costs.s", "costs.t", "costs.i", "costs.e"), "costs.vocabulary = [s, t, i, e]"),
    **{f"model.{key}": f"{_FOLDER}: it comes from there" for key in _FROM_CONFIG},
    "zbc": "nothing: a job file has no version",
    "parallel.node": "parallel.order, or nothing: the fewest bytes go between nodes of hardware.ranks_per_node ranks",
    "parallel.vocabulary_sums": 'parallel.vocabulary = "shared-2"',
    "hardware.reserve_gib": "hardware.memory_gib, less what else is to stay free",
    "hardware.kernel_us": "nothing, or measure what ops take: `zbc profile`",
    "hardware.inter_node_us": "hardware.links, a table of speeds and latencies",
    "hardware.transfer": "nothing: messages wait for a buffer, unless costs.f gives times",
    "hardware.message_us": "costs.message, in ms",
    "hardware.message_share": "costs.message, in ms, or measure it: `zbc profile`",
    "hardware.host_duplex": "nothing: a GPU copies both ways at once, at hardware.host_gbps each",
    "costs.occupies": "nothing: given messages take no turns on a link, estimated ones do",
    "costs.profile": "`--profile FILE` on the command line",
    "data.validation_path": 'data.validation = "FILE"',
    "checkpoint.asynchronous": "nothing: checkpoints are written while the next steps run",
    "filler.args": "a function of yours as filler.task, which calls the other with its arguments",
    "log.dir": "nothing: runs are below ./runs, or where `zbc run -o DIR` says",
    "log.peak_tflops": "hardware.gpu, whose peak MFU is a share of",
    "log.tensorboard": 'log.to = ["tensorboard"]',
    "log.wandb": 'log.to = ["wandb:PROJECT"]',
    "checkpoint.at_end": "nothing: where there are checkpoints, one is written in the end",
    "train.skip_total": "train.skip_limit, of steps in a row",
    "extends": "its values here, or change a job with --set",
    "optimizer.clip_stage_norm": "optimizer.clip_grad_norm, which is of each stage where there is no flush",
    "partition.mode": 'partition.layers_per_stage = "equal", or nothing for "auto"',
}
_GONE = ("gemma", "gemma2", "gemma3_text", "granite", "olmo2", "olmoe", "phi3", "smollm3")
RETIRED_VALUES = {("model.variant", variant): _FOLDER for variant in _GONE}
RETIRED_VALUES |= {("model.variant", variant): 'model.variant = "plain"' for variant in ("mistral", "mixtral")}
RETIRED_VALUES |= {("model.variant", f"{of}_moe"): f'model.variant = "{of}"' for of in ("qwen2", "qwen3")}
_OF_PEFT = {
    "r": "this is adapter.rank",
    "lora_alpha": "this is adapter.alpha",
    "lora_dropout": "this is adapter.dropout",
    "target_modules": "this is adapter.targets",
    "modules_to_save": 'name these among adapter.targets, as "whole lm_head"',
    "use_rslora": 'write alpha = "rslora 16"',
    "use_dora": "DoRA is not there: it needs the norms of all rows of W + B A in every forward",
}
RETIRED_VALUES["schedule.renumber", "steps"] = "schedule.renumber = true"


def unknown(path: toml.KeyPath, document: toml.Document, known: Sequence[str]) -> ZbcError:
    """E102 for a key or table, with the key that took its place or the nearest known name."""
    dotted = ".".join(str(part) for part in path)
    if (instead := RETIRED.get(dotted)) is not None:
        return ZbcError("E102", f"config: {dotted} is gone; write {instead}", where=document.where(path, key=True))
    hint = _OF_PEFT.get(dotted.removeprefix("adapter.")) if dotted != path[-1] else None
    hint = hint or did_you_mean(str(path[-1]), known) or f"known: {', '.join(known)}"
    what = "table" if len(path) == 1 and isinstance(document.values.get(str(path[0])), Mapping) else "key"
    return ZbcError("E102", f"config: unknown {what} {dotted}", where=document.where(path, key=True), hint=hint)


def did_you_mean(word: str, known: Sequence[str]) -> str | None:
    """A hint with the nearest of `known`, in any case of letters; None for devices that zbc does not support. GPUs that
    torch calls "cuda" are known by their other names."""
    lower = {name.lower(): name for name in known}
    if word.lower() in ("gpu", "nvidia", "amd", "rocm", "hip") and "cuda" in lower:
        return 'did you mean "cuda"?'
    if word.lower() in ("tpu", "mps", "xpu", "npu", "hpu"):
        return None
    close = difflib.get_close_matches(word.lower(), lower, n=1)
    return f'did you mean "{lower[close[0]]}"?' if close else None
