"""Old spellings of keys: read as the key that says the same today, with one line that says what to write.

They are no keys of a job file: neither the schema nor the reference has them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from zbc.errors import ZbcError
from zbc.job.toml import Document, KeyPath

SAME: Mapping[Any, Any] = {}
_ROWS, ADAMW = "schedule.tokens_per_microbatch", "optimizer.adamw_lr"
# Old key -> the key of today, what to write, and the values that say it otherwise today; None: leave it out.
OLD: dict[str, tuple[str, str, Mapping[Any, Any]]] = {
    "optimizer.zero1": ("parallel.shard", 'parallel.shard = "optimizer"', {True: "optimizer", False: None}),
    "schedule.file": ("schedule.kind", 'schedule.kind = "FILE.csv"', SAME),
    "schedule.plugin": ("schedule.kind", 'schedule.kind = "package.module:function"', SAME),
    _ROWS: ("schedule.microbatch_size", "schedule.microbatch_size, of whole rows", SAME),
    "train.nonfinite": ("train.skip_limit", "train.skip_limit = 1 for stop", {"stop": 1, "skip": None}),
    ADAMW: ("optimizer.lr", "optimizer.lr = [0.02, 0.001]: of matrices, and of what adamw steps", SAME),
    "partition.layout": ("partition.layers_per_stage", 'partition.layers_per_stage = "Et|t|tL"', SAME),
}


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
        value = values.get(value, value) if isinstance(value, bool | str) else value
        model = document.values.get("model")
        length = model.get("seq_len") if isinstance(model, Mapping) else None
        if old == _ROWS and isinstance(value, int) and isinstance(length, int) and length > 0:
            value = value / length if value % length else value // length  # part of a row is no whole number
        if old == ADAMW:  # beside the rate of the matrices
            value = [section.get(key, 3e-4), value]
        above = document.level((table, name))
        tables = {**document.values, table: {part: of for part, of in section.items() if part != name}}
        place: dict[KeyPath, str] = {(other, key): where}
        places, keys = document.places, document.keys
        if value is not None and isinstance(tables.get(other, {}), Mapping):
            _told(f"config: {where}: {old} is an old spelling; write {write}")
            level = document.level((other, key)) if document.has((other, key)) else -1
            if level == above and tables[other][key] != value and old != ADAMW:
                text = f"config: {old} and {new} are two answers to one question"
                raise ZbcError("E110", text, where=where, hint=f"keep {new}")
            if level < above or old == ADAMW:
                tables[other] = {**tables.get(other, {}), key: value}
                places, keys = {**places, **place}, {**keys, **place}
        document = replace(document, values=tables, places=places, keys=keys)
    return document


@lru_cache(64)
def _told(line: str) -> None:
    """Once for each line: a command may read its job several times."""
    logging.getLogger("zbc").warning(line)
