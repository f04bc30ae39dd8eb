"""Expands the number of ranks of a job and its batch size into the possible pp, dp and microbatches.

`parallel.world` stands for every pp x dp x cp x tp = world, with the given cp and tp, or with every one that fits on a
node if it is "auto"; parallel.ep = "auto" for every ep of these ranks. `schedule.batch` stands for
batch / (dp x microbatch_size) microbatches.
If a key and the keys it stands for are both given, the command line takes precedence; within one file it is E110.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zbc.errors import ZbcError
from zbc.host.cores import cores
from zbc.host.gpus import gpus
from zbc.job.sections import Hardware
from zbc.job.toml import Document

WORLD, BATCH, MICROBATCHES = ("parallel", "world"), ("schedule", "batch"), ("schedule", "microbatches")
GIVEN = {"pp": ("parallel", "pp"), "dp": ("parallel", "dp")}
TP, EP, CP = ("parallel", "tp"), ("parallel", "ep"), ("parallel", "cp")
# Keys without effect in a shape without replicas, or without ranks that share layers.
OF_REPLICAS = (("parallel", "shard"), ("parallel", "exchange"), ("memory", "resident"))
OF_SHARED_LAYERS = (("parallel", "tp_sequence"),)
OF_EXPERTS = (("parallel", "expert_tp"),)


class Shape(NamedTuple):
    """Ranks of a pipeline, replicas, and microbatches of each; `why`: reason that it cannot be planned; `tp`, `cp`:
    ranks that share layers or tokens, `ep`: ranks that share out experts."""

    pp: int
    dp: int
    microbatches: int
    why: str | None = None
    tp: int = 1
    ep: int = 1
    cp: int = 1

    def __str__(self) -> str:
        axes = ("ep", self.ep), ("cp", self.cp), ("tp", self.tp)
        rest = [f", {axis} {count}" for axis, count in axes if count > 1]
        return f"pp {self.pp}, dp {self.dp}{''.join(rest)}"

    @property
    def ranks(self) -> int:
        return self.pp * self.copies * self.tp

    @property
    def copies(self) -> int:
        """The number of ranks with the same part of a stage."""
        return self.dp * self.cp


@dataclass(frozen=True, slots=True)
class Weighed:
    """A shape with the result of the fast search, or the reason that there is none."""

    shape: Shape
    schedule: str | None = None
    step_ms: float | None = None  # with the optimizer, in steady state; None if it was not planned
    sample_ms: float | None = None
    peak_bytes: int | None = None  # of the fullest rank, if bytes are known
    at_least: bool = False  # the times are lower bounds of a step, already slower than another shape
    error: ZbcError | None = None

    def as_json(self) -> dict[str, Any]:
        shape = self.shape
        reason = shape.why if self.error is None else f"[{self.error.code}] {self.error.message}"
        return {
            **{axis: getattr(shape, axis) for axis in ("pp", "dp", "tp", "ep", "cp")},
            "microbatches": shape.microbatches or None,
            "schedule": self.schedule,
            "step_ms": self.step_ms,
            "ms_per_sample": self.sample_ms,
            "at_least": self.at_least,
            "peak_bytes": self.peak_bytes,
            "reason": reason,
        }


@dataclass(frozen=True, slots=True)
class World:
    """An open choice: the possible shapes, and the document without the keys that stand for them."""

    document: Document
    shapes: tuple[Shape, ...]
    replicated: bool = False  # whether the schedule itself has replicas of each stage

    def of(self, shape: Shape) -> Document:
        """The job with one of the shapes, at the places of the keys that it comes from, and without settings of
        replicas or of ranks that share layers if the shape has none."""
        document = _applying(self.document, shape.copies, shape.tp, shape.ep, replicated=self.replicated)
        document = _without(document, *(() if shape.ep > 1 and shape.tp > 1 else OF_EXPERTS))
        for path, number in zip((*GIVEN.values(), MICROBATCHES), shape[:3], strict=True):
            document = _with(document, path, number)
        for path, number in ((TP, shape.tp), (EP, shape.ep), (CP, shape.cp)):
            document = _with(document, path, number) if number > 1 or document.has(path) else document
        return document


def read(document: Document, *, replicated: bool = False) -> World | Document:
    """The open choice of a job, or the job if nothing is open; `replicated`: see `World`. Raises E110, and E105 for a
    world without a batch."""
    parallel, schedule = (document.values.get(name) for name in ("parallel", "schedule"))
    if not isinstance(parallel, Mapping) or not isinstance(schedule, Mapping):
        return document
    world, batch, counts = parallel.get("world"), schedule.get("batch"), parallel.get("replicas")
    whole = isinstance(counts, list) and counts and all(type(count) is int and count > 0 for count in counts)
    if whole and not {"pp", "world"} & parallel.keys():
        document = _with(document, GIVEN["pp"], sum(counts or ()))
        parallel = document.values["parallel"]
    for key, path in (("tp", TP), ("ep", EP), ("cp", CP)):
        if parallel.get(key) == "auto" and (world is None or not GIVEN.keys() - parallel.keys()):
            text = f'config: parallel.{key} = "auto" is chosen together with pp and dp, and parallel.world is missing'
            raise ZbcError("E110", text, where=document.where(path), hint=f"set parallel.world, or {key} = 1")
    if (world is None and batch is None) or not _sound(parallel, schedule):
        return _shown(document)
    document, samples = _batch(document, batch)
    document, fixed = _fixed(document)
    bare = _without(document, WORLD, BATCH)
    if world is not None and len(fixed) == 2:  # the command line sets pp and dp of a world
        copies, tp, ep = fixed["dp"] * parallel.get("cp", 1), parallel.get("tp", 1), parallel.get("ep", 1)
        bare = _applying(bare, copies, tp, ep, replicated=replicated)
    if document.values["parallel"].get("world") is None:
        if samples is None:
            return bare
        shape = _shape(document, fixed.get("pp", 1), fixed.get("dp", 1), samples)
        if shape.why is not None and not shape.microbatches:
            raise ZbcError("E110", f"config: {shape.why}", where=document.where(BATCH), hint=_NEAREST)
        return _with(bare, MICROBATCHES, shape.microbatches)
    document, count = _count(document)
    bare = _without(document, WORLD, BATCH)
    inner = ((cp, tp) for tp in _shared(document, count) for cp in _contexts(document, count, tp))
    some = (shape for cp, tp in inner for shape in _shapes(document, count, fixed, samples, cp, tp))
    shapes = tuple(shape._replace(ep=ep) for shape in some for ep in _experts(document, shape))
    opened = World(bare, shapes, replicated)
    only = opened.shapes[0]
    return opened.of(only) if len(opened.shapes) == 1 and only.microbatches else opened


def _applying(document: Document, copies: int, tp: int, ep: int, *, replicated: bool) -> Document:
    """Without settings of replicas or of ranks that share layers, if there are none."""
    folded = ep > 1 and document.values["parallel"].get("expert_tp", 1) == 1  # of whose experts others may have copies
    alone = copies == 1 and not (folded and tp > ep)
    idle = (*(() if not alone or replicated else OF_REPLICAS), *(() if tp > 1 else OF_SHARED_LAYERS))
    return _without(document, *idle)


_NODE = Hardware.model_fields["ranks_per_node"].default
_NEAREST = "a batch is dp x microbatch_size samples, or a multiple of it"


def _sound(parallel: Mapping[str, Any], schedule: Mapping[str, Any]) -> bool:
    """Whether the numbers are positive whole numbers; if not, the checks of their tables report it."""
    numbers = [parallel.get("pp", 1), parallel.get("dp", 1), schedule.get("microbatches", 1)]
    numbers += [schedule.get("microbatch_size", 1), schedule.get("batch", 1)]
    numbers += [count for count in (parallel.get(key, 1) for key in ("world", "tp", "ep", "cp")) if count != "auto"]
    return all(type(number) is int and number > 0 for number in numbers)


def _shown(document: Document) -> Document:
    """With placeholders for the keys that a wrong key would stand for, so that the wrong key is the only problem."""
    values = document.values
    if "world" in values["parallel"] and "pp" not in values["parallel"]:
        document = _with(document, GIVEN["pp"], 1)
    if ("batch" in values["schedule"] or "world" in values["parallel"]) and "microbatches" not in values["schedule"]:
        document = _with(document, MICROBATCHES, 1)
    return document


def _fixed(document: Document) -> tuple[Document, dict[str, int]]:
    """The job without overridden keys, and the given ones of pp and dp."""
    parallel, fixed = document.values["parallel"], dict[str, int]()
    for key, path in GIVEN.items():
        if key not in parallel:
            continue
        if "world" not in parallel or document.level(path) > document.level(WORLD):
            fixed[key] = parallel[key]
        elif document.level(path) == document.level(WORLD):
            text = f"config: parallel.world and parallel.{key} are two answers to one question"
            hint = "drop pp and dp, and the fastest of all are taken; or drop world"
            raise ZbcError("E110", text, where=document.where(WORLD), hint=hint)
        else:
            document = _without(document, path)
    return _without(document, *((WORLD,) if len(fixed) == 2 else ())), fixed


def _batch(document: Document, batch: int | None) -> tuple[Document, int | None]:
    """The job with either batch or microbatches, and the samples of a step; None if microbatches are given."""
    parallel, schedule = document.values["parallel"], document.values["schedule"]
    given = schedule.get("microbatches")
    opened = "world" in parallel and not all(
        key in parallel and document.level(path) > document.level(WORLD) for key, path in GIVEN.items()
    )
    if batch is not None and given is not None and document.level(BATCH) == document.level(MICROBATCHES):
        text = "config: schedule.batch and schedule.microbatches are two answers to one question"
        hint = "drop microbatches: they are batch / (dp x microbatch_size)"
        raise ZbcError("E110", text, where=document.where(BATCH), hint=hint)
    if batch is not None and (given is None or document.level(BATCH) > document.level(MICROBATCHES)):
        return _without(document, MICROBATCHES), batch
    if not opened:
        return _without(document, BATCH), None
    if given is not None and batch is None and document.level(MICROBATCHES) < document.level(WORLD):
        samples = given * schedule.get("microbatch_size", 1) * parallel.get("dp", 1)
        return _without(document, MICROBATCHES), samples  # the batch that the job had
    code, place = ("E105", WORLD) if given is None else ("E110", MICROBATCHES)
    text = "schedule.batch is missing, and parallel.world leaves open what share each rank has"
    if given is not None:
        text = "schedule.microbatches are those of one pipeline, and parallel.world leaves open how many there are"
    raise ZbcError(
        code, f"config: {text}", where=document.where(place), hint="set schedule.batch, the samples of a step"
    )


def _count(document: Document) -> tuple[Document, int]:
    """The job, with the memory of the GPUs that "auto" found, and the number of ranks of the run."""
    world = document.values["parallel"]["world"]
    if world != "auto":
        return document, int(world)
    hardware = document.values.get("hardware")
    device = hardware.get("device", "cpu") if isinstance(hardware, Mapping) else "cpu"
    sizes, launched = gpus() if device == "cuda" else [], os.environ.get("WORLD_SIZE", "")  # which torchrun sets
    if sizes and isinstance(hardware, Mapping) and "memory_gib" not in hardware:
        document = _with(document, ("hardware", "memory_gib"), min(sizes))
    count = int(launched if launched.isdecimal() else 0) or (len(sizes) if device == "cuda" else cores())
    if not count:
        text = 'config: parallel.world = "auto" counts the GPUs of this machine, and nvidia-smi finds none'
        raise ZbcError("E110", text, where=document.where(WORLD), hint="write how many there will be: world = 8")
    return document, count


def _shared(document: Document, world: int) -> list[int]:
    """Possible tp: the given number, or all divisors of heads, widths and world within a node."""
    asked = document.values["parallel"].get("tp", 1)
    if asked != "auto":
        if world % asked:
            text = f"config: parallel.tp = {asked} does not divide parallel.world = {world}"
            near = max(d for d in range(1, asked) if world % d == 0)
            raise ZbcError("E110", text, where=document.where(TP), hint=f"set tp = {near}, or another world")
        return [asked]
    model, hardware = document.values.get("model"), document.values.get("hardware")
    counts = [model.get(key) for key in ("heads", "kv_heads", "ffn")] if isinstance(model, Mapping) else []
    node = hardware.get("ranks_per_node") if isinstance(hardware, Mapping) else None
    most = math.gcd(world, *(count for count in (*counts, node or _NODE) if type(count) is int and count > 0))
    return [tp for tp in range(1, most + 1) if most % tp == 0]


def _contexts(document: Document, world: int, tp: int) -> list[int]:
    """Possible cp with this `tp`: the given number, or all within a node whose chunks divide a sequence."""
    asked, model = document.values["parallel"].get("cp", 1), document.values.get("model")
    if asked != "auto":
        if world % (asked * tp):
            ranks = f"parallel.cp = {asked}" if tp == 1 else f"parallel.cp x parallel.tp = {asked * tp}"
            text = f"config: {ranks} does not divide parallel.world = {world}"
            near = max(d for d in range(1, asked + 1) if world % (d * tp) == 0)
            raise ZbcError("E110", text, where=document.where(CP), hint=f"set cp = {near}, or another world")
        return [asked]
    hardware = document.values.get("hardware")
    node = hardware.get("ranks_per_node") if isinstance(hardware, Mapping) else None
    length = model.get("seq_len") if isinstance(model, Mapping) else None
    room = math.gcd(world, node if type(node) is int and node > 0 else _NODE or world) // tp
    chunks = length if type(length) is int and length > 0 else 2
    return [cp for cp in range(1, room + 1) if room % cp == 0 and (cp == 1 or chunks % (2 * cp) == 0)]


def _experts(document: Document, shape: Shape) -> list[int]:
    """Possible ep: the common divisor of the given number and the ranks that may share out experts, or all divisors of
    these and of the experts."""
    asked, model = document.values["parallel"].get("ep", 1), document.values.get("model")
    ranks = shape.copies * (shape.tp if document.values["parallel"].get("expert_tp", 1) == 1 else 1)
    if asked != "auto":
        return [math.gcd(asked, ranks)]
    count = model.get("experts") if isinstance(model, Mapping) else None
    most = math.gcd(ranks, count) if type(count) is int and count > 0 else 1
    return [ep for ep in range(1, most + 1) if most % ep == 0]


def _shapes(
    document: Document, ranks: int, fixed: Mapping[str, int], batch: int | None, cp: int, tp: int
) -> list[Shape]:
    """Every pp x dp x cp x tp = ranks with the given ones fixed, short pipelines first."""
    world, inner = ranks // (cp * tp), {"cp": cp, "tp": tp}
    for key, number in fixed.items():
        if world % number:
            if any(document.values["parallel"].get(axis) == "auto" and count > 1 for axis, count in inner.items()):
                return []
            axes = "".join(f" / {axis}" for axis, count in inner.items() if count > 1)
            share = f"{ranks}{axes} = {world}" if axes else f"{ranks}"
            text = f"config: parallel.{key} = {number} does not divide parallel.world = {share}"
            near = max(d for d in range(1, number) if world % d == 0)
            raise ZbcError("E110", text, where=document.where(GIVEN[key]), hint=f"set {key} = {near}, or another world")
    small = [d for d in range(1, int(world**0.5) + 1) if world % d == 0] if world <= 10**9 else [1]
    every = sorted({*small, *(world // d for d in small)})
    pairs = [(pp, world // pp) for pp in every]
    pairs = [pair for pair in pairs if fixed.get("pp", pair[0]) == pair[0] and fixed.get("dp", pair[1]) == pair[1]]
    return [_shape(document, pp, dp, batch)._replace(tp=tp, cp=cp) for pp, dp in pairs]


def _shape(document: Document, pp: int, dp: int, batch: int | None) -> Shape:
    schedule, model = document.values["schedule"], document.values.get("model")
    layers = model.get("layers") if isinstance(model, Mapping) else None
    if batch is None:
        return Shape(pp, dp, schedule["microbatches"])
    per_microbatch = dp * schedule.get("microbatch_size", 1)
    if batch % per_microbatch:
        why = f"a batch of {batch} samples does not divide into {per_microbatch}, one microbatch of each replica"
        return Shape(pp, dp, 0, why)
    few = f"more ranks than the {layers} layers" if type(layers) is int and pp > layers else None
    return Shape(pp, dp, batch // per_microbatch, few)


def _with(document: Document, path: tuple[str, str], number: float) -> Document:
    """With one more number, at the place of the key that it comes from."""
    name, key = path
    counted = WORLD not in document.places and document.has(("parallel", "replicas"))
    come = BATCH if path == MICROBATCHES else ("parallel", "replicas") if counted else WORLD
    places = {**document.places, path: document.where(path if document.has(path) else come)}
    tables = {**document.values, name: {**document.values.get(name, {}), key: number}}
    return replace(document, values=tables, places=places)


def _without(document: Document, *paths: tuple[str, str]) -> Document:
    for name, key in filter(document.has, paths):
        table = {field: value for field, value in document.values[name].items() if field != key}
        document = replace(document, values={**document.values, name: table})
    return document
