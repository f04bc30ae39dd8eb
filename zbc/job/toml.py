"""TOML files with the place of every value: `Document.where(("schedule", "kind"))` is `zbc.toml:21:8`.

tomli reads the values; tree-sitter's TOML grammar, walked once, gives the place of each key and value.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from zbc.errors import ZbcError
from zbc.host.contents import contents

KeyPath = tuple[str | int, ...]
_DEEPEST = 64  # pydantic writes 255 levels, tomli reads 400
_LEAST, _LARGEST = -(2**63), 2**63 - 1


@dataclass(slots=True)
class Document:
    """Parsed values and, for each key path, the place of its key and of its value."""

    source: str
    values: dict[str, Any]
    keys: dict[KeyPath, str] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)
    profile: Path | None = None  # of --profile

    def where(self, path: KeyPath, *, key: bool = False) -> str:
        """`file:line:column` of the value at `path` (of its key with `key`), or of the nearest table around it. A table
        that is only implied by keys inside has the place of the first of these keys."""
        for end in range(len(path), 0, -1):
            for table in (self.keys, self.places) if key else (self.places, self.keys):
                if path[:end] in table:
                    return table[path[:end]]
        inside = (place for deeper, place in self.places.items() if path and deeper[: len(path)] == path)
        return next(inside, self.source)

    def level(self, path: KeyPath) -> int:
        """Precedence of a value: 2 if set on the command line, 1 in the file itself, 0 elsewhere, as in a plan."""
        where = self.where(path)
        return 2 if where.startswith("--") else 1 if where.startswith(f"{self.source}:") else 0

    def has(self, path: KeyPath) -> bool:
        node: Any = self.values
        for part in path:
            inside = part in node if isinstance(node, Mapping) else isinstance(node, list) and part in range(len(node))
            if not inside:
                return False
            node = node[part]
        return True


def load(path: Path) -> Document:
    """Reads a file. Raises E100 (syntax) or E101 (cannot be read)."""
    try:
        raw = contents(path, pipe=True)
        text = raw.decode("utf-8-sig")  # some editors begin a file with a mark of its encoding
    except OSError as error:
        hints: dict[type, str] = {
            FileNotFoundError: "`zbc init` writes a first job file",
            IsADirectoryError: "name a job file, or the directory of a plan",
        }
        hint = hints.get(type(error))
        inside = path / "zbc.toml"
        if os.path.isfile(inside):
            hint = f"it holds a job file: {inside}"
        raise ZbcError("E101", f"config: cannot read {path}: {error.strerror}", hint=hint) from None
    except UnicodeDecodeError as error:
        text = f"config: {path} is not UTF-8 text (byte {error.start})"
        raise ZbcError("E101", text, hint="save it as UTF-8") from None
    if path.suffix == ".json":
        hint = f"of a model it is for `zbc advise {shlex.quote(str(path))} --gpus 8 --gpu h100-sxm`, which writes a job"
        raise ZbcError("E101", f"config: {path} is JSON, no job file", hint=hint)
    return loads(text, source=str(path))


def loads(text: str, source: str) -> Document:
    """Parses TOML text; `source` names it in places. Raises E100."""
    try:
        values = parsed(text, source)
    except tomli.TOMLDecodeError as error:
        where = f"{source}:{error.lineno}:{error.colno}"
        hint = "one `key = value` a line; strings in quotes; tables as [name]"
        if "Cannot overwrite" in error.msg or "Cannot declare" in error.msg:
            hint = "this is there twice: keep one of them"
        raise ZbcError("E100", f"config: not valid TOML: {error.msg}", where=where, hint=hint) from None
    document = Document(source, values)
    for path, is_key, line, column in _positions(text):
        (document.keys if is_key else document.places).setdefault(path, f"{source}:{line}:{column}")
    return document


def parsed(text: str, where: str) -> dict[str, Any]:
    """The values of a TOML text. Raises tomli.TOMLDecodeError, or as `refuse_extreme`."""
    try:
        values = tomli.loads(text)
    except RecursionError:
        raise _too_deep(where) from None
    except tomli.TOMLDecodeError:
        raise
    except ValueError:  # a number with more digits than Python reads
        raise _too_large(where) from None
    refuse_extreme(values, where)
    return values


def refuse_extreme(value: Any, where: str) -> None:
    """Raises E100 if tables and lists in `value` are nested deeper than can be written again. And E103 for a whole
    number that does not fit into 64 bits: TOML has none."""
    level = [value]
    for _ in range(_DEEPEST):
        for item in level:
            if isinstance(item, int) and not _LEAST <= item <= _LARGEST:
                raise _too_large(where)
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise _too_deep(where)


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep(where: str) -> ZbcError:
    text = f"config: lists or tables inside of each other, more than {_DEEPEST} deep"
    return ZbcError("E100", text, where=where, hint="make them flat, or keep them in a file that the factory reads")


def _too_large(where: str) -> ZbcError:
    return ZbcError("E103", "config: a whole number of more than 64 bits", where=where, hint=f"use {_LARGEST} or less")


def merge(base: Document, over: Document) -> Document:
    """`over` on top of `base`, places included."""
    values = _merge_values(base.values, over.values)
    return Document(over.source, values, {**base.keys, **over.keys}, {**base.places, **over.places}, base.profile)


def _merge_values(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge_values(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _positions(text: str) -> Iterator[tuple[KeyPath, bool, int, int]]:
    """(path, is key, line, column) for every key and value; lines and columns count from 1."""
    import tree_sitter
    import tree_sitter_toml

    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_toml.language()))
    encoded = text.encode()
    lines = encoded.split(b"\n")
    root = parser.parse(encoded).root_node

    def place(node: Any) -> tuple[int, int]:
        row, byte = node.start_point
        return row + 1, len(lines[row][:byte].decode("utf-8", "replace")) + 1

    def key_parts(node: Any) -> KeyPath:
        if node.type == "dotted_key":
            return tuple(part for child in node.named_children for part in key_parts(child))
        raw = encoded[node.start_byte : node.end_byte].decode()
        return (tomli.loads(f"{raw} = 0").popitem()[0],) if node.type == "quoted_key" else (raw,)

    def value(node: Any, path: KeyPath) -> Iterator[tuple[KeyPath, bool, int, int]]:
        yield (path, False, *place(node))
        if node.type == "inline_table":
            yield from pairs(node, path)
        elif node.type == "array":
            items = [child for child in node.named_children if child.type != "comment"]
            for index, child in enumerate(items):
                yield from value(child, (*path, index))

    def pairs(node: Any, prefix: KeyPath) -> Iterator[tuple[KeyPath, bool, int, int]]:
        for pair in (child for child in node.named_children if child.type == "pair"):
            key, val = pair.named_children[0], pair.named_children[1]
            path = (*prefix, *key_parts(key))
            yield (path, True, *place(key))
            yield from value(val, path)

    yield from pairs(root, ())
    arrays: dict[KeyPath, int] = {}
    for table in root.named_children:
        if table.type in ("table", "table_array_element"):
            header = table.named_children[0]
            path = key_parts(header)
            if table.type == "table_array_element":
                arrays[path] = arrays.get(path, -1) + 1
                path = (*path, arrays[path])
            yield (path, True, *place(header))
            yield from pairs(table, path)
