"""Old spellings of keys: read as the key that says the same today, with one line that says what to write.

They are no keys of a job file: neither the schema nor the reference has them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from zbc.errors import ZbcError
from zbc.job.toml import Document, KeyPath

SAME: Mapping[Any, Any] = {}
Joined = Callable[[Any, Any], Any]  # of an old value and the one that the key of today has, or None


def _second(first: Any = None) -> Joined:
    """The second of two numbers, `first` where there is none."""
    return lambda value, beside: [x for x in (first if beside is None else beside,) if x is not None] + [value]


def _joined(groups: Any, graph: Any) -> Any:
    if not isinstance(groups, Mapping) or not isinstance(graph, Mapping | None):
        return groups
    reads, made = graph or {}, dict[Any, Any]()
    for name in {**reads, **groups}:
        of = reads.get(name, [])
        made[name] = [groups[name]] * (name in groups) + (of if isinstance(of, list) else [of])
    return made


_ROWS = "schedule.tokens_per_microbatch"
# Old key -> the key of today, what to write, and the values that say it otherwise today; None: leave it out.
OLD: dict[str, tuple[str, str, Mapping[Any, Any] | Joined]] = {
    "model.positions": ("model.variant", 'model.variant = "rotary"', {"rotary": "rotary", "learned": None}),
    "model.activation": ("model.variant", 'model.variant = "gpt2"', {"gelu_tanh": "gpt2", "gelu": None}),
    "model.tie_embeddings": ("model.ties", "model.ties = true", {True: True, False: None}),
    "model.norm_top_k": ("model.router", 'model.router = "softmax of all"', {False: "softmax of all", True: None}),
    "model.expert_hidden": ("model.ffn_hidden", "model.ffn_hidden", SAME),
    "model.shared_hidden": ("model.ffn_hidden", "model.ffn_hidden = [of each, of the shared one]", _second()),
    "model.node_limit": ("model.expert_groups", "model.expert_groups = [groups, those of a token]", _second()),
    "model.balance_rate": ("model.balance_loss", "model.balance_loss = [coefficient, rate]", _second(0.0)),
    "model.router_z_loss": ("model.z_loss", "model.z_loss = [of the head, of routers]", _second(0.0)),
    "model.loss_scale_steps": ("model.loss_scale", "model.loss_scale = [scale, steps]", _second(65536.0)),
    "model.master": (
        "model.parameters",
        'model.parameters = "bfloat16 alone"',
        lambda value, beside: beside if value is True else "bfloat16 alone",
    ),
    "model.matmul": ("model.dtype", 'model.dtype = "fp8"', lambda value, beside: beside if value == "dtype" else value),
    "model.groups": ("model.graph", 'model.graph = { text = [2], decoder = [4, "text"] }', _joined),
    "optimizer.zero1": ("parallel.shard", 'parallel.shard = "optimizer"', {True: "optimizer", False: None}),
    "schedule.file": ("schedule.kind", 'schedule.kind = "FILE.csv"', SAME),
    "schedule.plugin": ("schedule.kind", 'schedule.kind = "package.module:function"', SAME),
    _ROWS: ("schedule.microbatch_size", "schedule.microbatch_size, of whole rows", SAME),
    "train.nonfinite": ("train.skip_limit", "train.skip_limit = 1 for stop", {"stop": 1, "skip": None}),
    "optimizer.adamw_lr": (
        "optimizer.lr",
        "optimizer.lr = [0.02, 0.001]: of matrices, and of what adamw steps",
        _second(3e-4),
    ),
    "freeze.after": (
        "freeze.most",
        "freeze.most = [share, steps]",
        lambda value, beside: beside if value == 0 else _second(0.0)(value, beside),
    ),
    "partition.layout": ("partition.layers_per_stage", 'partition.layers_per_stage = "Et|t|tL"', SAME),
}


def of_plan(table: str, values: Any) -> Any:
    """The keys of a table of an older plan or checkpoint as those of today."""
    for old, (new, _, how) in OLD.items() if isinstance(values, Mapping) else ():
        (section, name), key = old.split("."), new.partition(".")[2]
        if section == table == new.partition(".")[0] and name in values:
            value = values[name]
            if callable(how):
                value = how(value, values.get(key))
            elif isinstance(value, bool | str):
                value = how.get(value, value)
            rest = {k: v for k, v in values.items() if k != name}
            values = rest if value is None else {**rest, key: value}
    return values


def renamed(document: Document) -> Document:
    """A document with the keys of today in place of old ones. Raises E110 for both at one level; a value that is set on
    the command line stands above one of the file."""
    if document.values.get("zbc") == 1:  # the version that files once had
        document = replace(document, values={name: table for name, table in document.values.items() if name != "zbc"})
    for old, (new, write, values) in OLD.items():
        (table, name), (other, key) = old.split("."), new.split(".")
        section = document.values.get(table)
        if not isinstance(section, Mapping) or name not in section:
            continue
        where, value = document.where((table, name)), section[name]
        beside = document.values.get(other)
        if callable(values):
            value = values(value, beside.get(key) if isinstance(beside, Mapping) else None)
        elif isinstance(value, bool | str):
            value = values.get(value, value)
        model = document.values.get("model")
        length = model.get("seq_len") if isinstance(model, Mapping) else None
        if old == _ROWS and isinstance(value, int) and isinstance(length, int) and length > 0:
            value = value / length if value % length else value // length  # part of a row is no whole number
        above = document.level((table, name))
        tables = {**document.values, table: {part: of for part, of in section.items() if part != name}}
        place: dict[KeyPath, str] = {(other, key): where}
        places, keys = document.places, document.keys
        if value is not None and isinstance(tables.get(other, {}), Mapping):
            _told(f"config: {where}: {old} is an old spelling; write {write}")
            level = document.level((other, key)) if document.has((other, key)) else -1
            if level == above and tables[other][key] != value and not callable(values):
                text = f"config: {old} and {new} are two answers to one question"
                raise ZbcError("E110", text, where=where, hint=f"keep {new}")
            if level < above or callable(values):
                tables[other] = {**tables.get(other, {}), key: value}
                places, keys = {**places, **place}, {**keys, **place}
        document = replace(document, values=tables, places=places, keys=keys)
    return document


@lru_cache(64)
def _told(line: str) -> None:
    """Once for each line: a command may read its job several times."""
    logging.getLogger("zbc").warning(line)
