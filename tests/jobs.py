"""Small jobs for tests, written as TOML like those of users."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

from zbc.compiler.compiled import Compiled
from zbc.compiler.cost import profiled
from zbc.compiler.shapes import load_job
from zbc.job.spec import Job
from zbc.plan.directory import StoredPlan

BASE = {
    "model": {"family": "gpt", "layers": 8, "hidden": 32, "heads": 4, "vocab": 256, "seq_len": 16},
    "parallel": {"pp": 4},
    "schedule": {"kind": "1f1b", "microbatches": 8, "microbatch_size": 2},
    "train": {"steps": 3, "seed": 7},
}


FREE = {"message": 0.0}  # [costs]: messages that keep no rank from computing


@contextmanager
def tiny_tensors_move() -> Iterator[None]:
    """Plans and runs offload tensors of any size, since models of tests are small."""
    from zbc.runtime.features.offload import parcels

    with ExitStack() as stack:
        for module in (profiled, parcels):
            stack.enter_context(mock.patch.object(module, "SMALL", 1))
        yield


def toml_text(**changes: object) -> str:
    """A job file: BASE with tables merged over it; `layers`, `pp`, `m` and `kind` are shorthands for usual changes.

    A factory's job has only those sizes of BASE that its data need; values of None are left out.
    """
    tables = {name: dict(table) for name, table in BASE.items()}
    if ":" in (changes.get("model", {}).get("family") or ""):  # type: ignore[attr-defined]
        del tables["model"]["hidden"], tables["model"]["heads"]
    short = {"layers": ("model", "layers"), "pp": ("parallel", "pp")}
    short |= {"m": ("schedule", "microbatches"), "kind": ("schedule", "kind")}
    for key, value in changes.items():
        if key in short:
            table, field = short[key]
            tables[table][field] = value
        else:
            tables.setdefault(key, {}).update(value)  # type: ignore[call-overload]
    return text_of(tables)


def text_of(tables: Mapping[str, Mapping[str, object]]) -> str:
    """The job file of these tables."""
    lines = ["# a job of a test"]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in table.items() if value is not None)]
    return "\n".join(lines) + "\n"


def write_job(folder: Path, **changes: object) -> Path:
    """Writes the job file with these changes into a folder; returns its path."""
    path = folder / "zbc.toml"
    path.write_text(toml_text(**changes))
    return path


def toml_value(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps(value)


def job(**changes: object) -> Job:
    with tempfile.TemporaryDirectory() as folder:
        return load_job(write_job(Path(folder), **changes))


def stored(made: Compiled) -> StoredPlan:
    """The plan of a job without a ramp, as ranks read it."""
    return StoredPlan(made.assemble()[0], made.program)


def per_layer(layers, blocks=(1.0,) * 3, embed=(0.0,) * 3, head=(0.0,) * 3):
    """`[costs]` with F, B and W of each block, of the embedding and of the head."""
    rows = zip("fbw", embed, blocks, head, strict=True)
    return {"per": "layer"} | {key: [first, *[block] * layers, last] for key, first, block, last in rows}
