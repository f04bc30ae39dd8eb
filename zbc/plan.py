"""Plan directories: what the compiler hands to the runtime, and the only thing the two share.

    plan/
      plan.json        the manifest: schedule, placement, layers and boundary tensors per stage, prediction, hashes
      rank-0000.json   the ops of rank 0, one per line, so `diff` between two plans shows the change and nothing else
      rank-0001.json   ...

Bytes are deterministic: no timestamps, no host names. A directory appears complete or not at all.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zbc.errors import ZbcError
from zbc.ir import COMPUTE, TRANSFER, Kind, Op, Placement, Program, parse_line
from zbc.seats import Seats

FORMAT = "zbc-plan"
VERSION = 1
MANIFEST = "plan.json"
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(pattern=r"^[\w-]+$")]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Boundary(_Strict):
    """The tensor between two neighbouring stages: its shape for one microbatch (one slice of it) and its dtype."""

    shape: list[Count]
    dtype: str


class Part(_Strict):
    """The first steps of a training, or the next ones, run another plan: with fewer microbatches."""

    folder: Name  # of that plan, inside of this one
    microbatches: Count
    steps: Count
    sha256: str  # of its manifest


class Manifest(_Strict):
    """`plan.json`."""

    format: str
    version: int
    id: str
    schedule: str
    parameters: dict[str, Any]
    passes: list[str]
    ranks: Count
    stages: Count
    microbatches: Count
    microbatch_size: Count
    slices: Count
    copies: Count = 1  # data-parallel copies of the pipeline; `ranks` are those of one
    tied: bool = False  # the first and the last stage share a weight
    sharded: bool = False  # the copies of a stage share out the optimizer's work
    placement: list[list[Index]]  # stage -> rank per pipe
    layers: list[list[str]]  # stage -> layer names
    boundaries: list[Boundary | None]  # behind each stage but the last; None: the runtime derives it
    capabilities: list[str]
    predicted: dict[str, Any]
    planning: dict[str, Any]
    training: dict[str, Any]
    files: dict[str, str]  # name -> sha256
    node: list[Count] = []  # neighbours of a pipeline, and copies of each, on one node; else copies follow each other
    ramp: list[Part] = []  # what a training begins with, before it runs this plan
    sha256: str = ""  # of this manifest without this field

    def digest(self) -> str:
        return _digest(self.model_dump(mode="json", exclude={"sha256"}))

    def dumps(self) -> str:
        return json.dumps({**self.model_dump(mode="json"), "sha256": self.digest()}, indent=1) + "\n"

    @property
    def world(self) -> int:
        """The ranks of a run: those of one pipeline times its copies."""
        return self.ranks * self.copies

    @property
    def seats(self) -> Seats:
        """Which of them is which rank of which copy."""
        return Seats(self.ranks, self.copies, (self.node[0], self.node[1]) if self.node else (self.ranks, 1))

    def name(self, rank: int) -> str:
        """A rank of a run for messages: `rank 5`, or with copies `rank 5 [dp 1, pp 1]`."""
        if self.copies == 1 or not 0 <= rank < self.world:
            return f"rank {rank}"
        copy, part = self.seats.of(rank)
        return f"rank {rank} [dp {copy}, pp {part}]"

    def to_placement(self) -> Placement:
        return Placement(tuple(zip(*self.placement, strict=True)))


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank needs: its ops in order, and the manifest."""

    rank: int
    ops: tuple[Op, ...]
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole plan directory in memory; `ramp` are the plans that a training begins with."""

    manifest: Manifest
    program: Program
    ramp: tuple[Plan, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """Read and verify a plan directory. Raises E401 to E406."""
        manifest = read_manifest(folder)
        ranks = tuple(read_rank(folder, rank, manifest).ops for rank in range(manifest.ranks))
        check_counts(manifest, ranks)
        ramp = tuple(cls.read(below) for below, _ in read_ramp(folder, manifest))
        return cls(manifest, program_of(manifest, ranks), ramp)


def judges(manifest: Manifest) -> tuple[int, ...]:
    """The last ranks of all copies of the pipeline: without a barrier, they add up what their copies have collected."""
    return tuple(sorted(manifest.seats.rank(copy, manifest.ranks - 1) for copy in range(manifest.copies)))


def check_counts(manifest: Manifest, ranks: tuple[tuple[Op, ...], ...]) -> None:
    """Raise E404 if the manifest counts more than there are ops for; what works on a plan makes tables of that size."""
    ops = sum(map(len, ranks))
    for what, counted in (("microbatches", manifest.microbatches * manifest.slices), ("stages", manifest.stages)):
        if counted > ops:
            text = f"plan: {MANIFEST} counts {counted} {what}, the rank files have {ops} ops in all"
            raise ZbcError("E404", text, hint=_REPLAN)


def program_of(manifest: Manifest, ranks: tuple[tuple[Op, ...], ...]) -> Program:
    """The ops of all ranks as a program."""
    history = (manifest.schedule, *manifest.passes)
    m, node = manifest, manifest.seats.node if manifest.node else None
    return Program(m.to_placement(), m.microbatches, ranks, history, m.slices, m.copies, m.tied, m.sharded, node)


def meeting(manifest: Manifest, op: Op) -> tuple[int, ...]:
    """The ranks of a run, over all copies of the pipeline, that take part in a collective."""
    members = program_of(manifest, ((),) * manifest.ranks).members(op)
    return tuple(sorted(manifest.seats.rank(copy, rank) for copy in range(manifest.copies) for rank in members))


def rank_file(rank: int) -> str:
    return f"rank-{rank:04d}.json"


# ---- writing -------------------------------------------------------------------------------------------------


def assemble(
    program: Program,
    *,
    parameters: Mapping[str, Any],
    layers: Sequence[Sequence[str]],
    boundaries: Sequence[Boundary | None],
    microbatch_size: int,
    predicted: Mapping[str, Any],
    planning: Mapping[str, Any],
    training: Mapping[str, Any],
    node: Sequence[int] = (),
    ramp: Sequence[Part] = (),
) -> tuple[Manifest, dict[str, str]]:
    """The manifest of a program and the text of every rank file."""
    lines = [_op_lines(program, rank) for rank in range(len(program.ranks))]
    seed = json.dumps([FORMAT, VERSION, planning, list(program.history)], sort_keys=True)
    identity = hashlib.sha256(seed.encode())
    for text in [*lines, *(part.sha256 for part in ramp)]:
        identity.update(_sha(text.encode()).encode())
    plan_id = identity.hexdigest()[:16]
    files = {rank_file(rank): _rank_text(program, rank, plan_id, text) for rank, text in enumerate(lines)}
    placement = program.placement
    manifest = Manifest(
        format=FORMAT,
        version=VERSION,
        id=plan_id,
        schedule=program.history[0],
        parameters=dict(parameters),
        passes=list(program.history[1:]),
        ranks=placement.ranks,
        stages=placement.stages,
        microbatches=program.microbatches,
        microbatch_size=microbatch_size,
        slices=program.slices,
        copies=program.copies,
        tied=program.tied,
        sharded=program.sharded,
        placement=[list(placement.holders(s)) for s in range(placement.stages)],
        layers=[list(names) for names in layers],
        boundaries=list(boundaries),
        capabilities=sorted({op.kind.value for ops in program.ranks for op in ops}),
        predicted=dict(predicted),
        planning=dict(planning),
        training=dict(training),
        files={name: _sha(text.encode()) for name, text in files.items()},
        node=list(node),
        ramp=list(ramp),
    )
    return manifest, files


def _op_lines(program: Program, rank: int) -> str:
    """The ops of a rank as JSON strings, one a line. Peers are looked up once per (kind, stage, pipe)."""
    suffix: dict[tuple[Kind, int, int], str] = {}
    lines = []
    for op in program.ranks[rank]:
        where = (op.kind, op.stage, op.pipe)
        if where not in suffix:
            suffix[where] = program.placement.text(op)[len(str(op)) :]
        lines.append(f'  "{op}{suffix[where]}"')
    return ",\n".join(lines)


def _rank_text(program: Program, rank: int, plan_id: str, lines: str) -> str:
    stages = json.dumps(program.placement.stages_of(rank))
    return (
        f'{{\n "format": "{FORMAT}",\n "version": {VERSION},\n "plan": "{plan_id}",\n "rank": {rank},\n'
        f' "stages": {stages},\n "ops": [\n{lines}\n ]\n}}\n'
    )


def write(folder: Path, manifest: Manifest, files: Mapping[str, str]) -> None:
    """Put a plan directory at `folder`, replacing an older plan there, in one rename.

    Raises E405 if something that is not a plan is in the way, E407 if the directory cannot be written.
    """
    if folder.exists() and not _replaceable(folder):
        text = f"plan: {folder} exists and is not a plan directory"
        raise ZbcError("E405", text, hint="choose another folder with -o")
    work = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        fresh = work / "new"
        fresh.mkdir()
        for name, text in {**files, MANIFEST: manifest.dumps()}.items():
            (fresh / name).parent.mkdir(exist_ok=True)
            (fresh / name).write_text(text, encoding="utf-8")
        if folder.exists():
            os.rename(folder, work / "old")
        os.rename(fresh, folder)
    except OSError as error:
        if work is not None and (work / "old").exists() and not folder.exists():
            os.rename(work / "old", folder)
        raise ZbcError("E407", f"plan: cannot write {folder}: {error.strerror}") from None
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)


def _replaceable(folder: Path) -> bool:
    """Whether `folder` is empty or holds nothing but a plan."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    entries = list(folder.iterdir())
    plain = [entry.name for entry in entries if not entry.is_dir()]
    below = [entry for entry in entries if entry.is_dir()]
    if not entries:
        return True
    fine = MANIFEST in plain and all(name == MANIFEST or name.startswith("rank-") for name in plain)
    return fine and all(is_plan(entry) and _replaceable(entry) for entry in below)


# ---- reading -------------------------------------------------------------------------------------------------


def is_plan(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path, *, verify: bool = True) -> Manifest:
    """Read `plan.json`.

    Raises E401 (missing), E402 (edited), E403 (other version), E404 (damaged) or E406 (unknown op kinds).
    """
    path = folder / MANIFEST
    data = _load_json(path)
    if data.get("format") != FORMAT:
        raise ZbcError("E404", f"plan: {path} is not a zbc plan (format {data.get('format')!r})", hint=_REPLAN)
    if data.get("version") != VERSION:
        text = f"plan: {path} has plan version {data.get('version')!r}, this zbc reads {VERSION}"
        raise ZbcError("E403", text, hint=_REPLAN)
    if verify or data.keys() - Manifest.model_fields.keys():
        _refuse_other_fields(path, data)
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ZbcError("E404", f"plan: {path}: {place}: {first['msg'].lower()}", hint=_REPLAN) from None
    _check_shape(path, manifest)
    unknown = [kind for kind in manifest.capabilities if kind not in Kind.__members__]
    if unknown:
        text = f"plan: {path} needs op kinds this zbc does not have: {', '.join(unknown)}"
        raise ZbcError("E406", text, hint="use the zbc that made the plan, or plan again with this one")
    if verify and manifest.sha256 != manifest.digest():
        raise ZbcError("E402", f"plan: {path} was edited after planning (sha256 differs)", hint=_REPLAN)
    return manifest


def _refuse_other_fields(path: Path, data: Mapping[str, Any]) -> None:
    """Raise E403 for a manifest that is as it was written, by a zbc whose manifests have other fields."""
    written, mine = data.keys() - {"sha256"}, Manifest.model_fields.keys() - {"sha256"}
    if written == mine or data.get("sha256") != _digest({key: data[key] for key in written}):
        return
    differ = [
        f"{word} {', '.join(sorted(names))}"
        for word, names in (("without", mine - written), ("with", written - mine))
        if names
    ]
    text = f"plan: {path} was made by another version of zbc, {' and '.join(differ)}"
    raise ZbcError("E403", text, hint=_REPLAN)


def _check_shape(path: Path, manifest: Manifest) -> None:
    """The lists of the manifest agree with its counts."""
    stages, ranks = manifest.stages, manifest.ranks
    problems = [
        (len(manifest.placement) == stages, f"placement has {len(manifest.placement)} stages, not {stages}"),
        (len(manifest.layers) == stages, f"layers has {len(manifest.layers)} stages, not {stages}"),
        (len(manifest.boundaries) == stages - 1, f"boundaries has {len(manifest.boundaries)}, not {stages - 1}"),
        (len({len(holders) for holders in manifest.placement}) == 1, "placement lists differ in length"),
        (all(r < ranks for holders in manifest.placement for r in holders), f"placement names a rank beyond {ranks}"),
        (all(holders for holders in manifest.placement), "a stage has no rank"),
        (_tiles(manifest), f"node {manifest.node} does not divide {ranks} ranks and {manifest.copies} copies"),
        (
            len(manifest.files) == ranks and sorted(manifest.files) == [rank_file(r) for r in range(ranks)],
            f"files lists {len(manifest.files)} rank files, not {ranks}",
        ),
    ]
    for fine, text in problems:
        if not fine:
            raise ZbcError("E404", f"plan: {path}: {text}", hint=_REPLAN)


def _tiles(manifest: Manifest) -> bool:
    node = manifest.node
    return not node or (len(node) == 2 and manifest.ranks % node[0] == 0 and manifest.copies % node[1] == 0)


def read_ramp(folder: Path, manifest: Manifest) -> list[tuple[Path, Manifest]]:
    """The plans that a training begins with: their folders and manifests. Raises E401 to E406."""
    found = [(folder / part.folder, read_manifest(folder / part.folder)) for part in manifest.ramp]
    for part, (below, its) in zip(manifest.ramp, found, strict=True):
        if its.sha256 != part.sha256:
            raise ZbcError("E402", f"plan: {below} is not the plan that {folder} was made with", hint=_REPLAN)
        for key in ("placement", "layers", "boundaries", "microbatch_size", "copies", "tied", "sharded", "node"):
            if getattr(its, key) != getattr(manifest, key) or its.microbatches != part.microbatches or its.ramp:
                raise ZbcError("E404", f"plan: {below} does not go with {folder / MANIFEST}", hint=_REPLAN)
    return found


def read_rank(folder: Path, rank: int, manifest: Manifest, *, verify: bool = True) -> RankPlan:
    """Read the ops of one rank. Raises E401 (missing), E402 (edited), E404 (damaged)."""
    path = folder / rank_file(rank)
    raw = _read_bytes(path)
    if verify and _sha(raw) != manifest.files[path.name]:
        raise ZbcError("E402", f"plan: {path} was edited after planning (sha256 differs)", hint=_REPLAN)
    data = _load_json(path, raw)
    wanted = {"format": FORMAT, "version": VERSION, "plan": manifest.id, "rank": rank}
    wanted["stages"] = list(manifest.to_placement().stages_of(rank))
    for key, value in wanted.items():
        if data.get(key) != value:
            text = f"plan: {path}: {key} is {data.get(key)!r}, plan.json says {value!r}"
            raise ZbcError("E404", text, hint=_REPLAN)
    lines = data.get("ops")
    if not isinstance(lines, list) or data.keys() - {*wanted, "ops"}:
        raise ZbcError("E404", f"plan: {path}: not a rank file", hint=_REPLAN)
    return RankPlan(rank, tuple(_parse_ops(lines, path, manifest)), manifest)


def _parse_ops(lines: Iterable[Any], path: Path, manifest: Manifest) -> list[Op]:
    placement = manifest.to_placement()
    peers: dict[tuple[Kind, int, int], int | None] = {}
    ops = []
    for step, line in enumerate(lines):
        where = f"{path} op {step}"
        if not isinstance(line, str):
            raise ZbcError("E404", f"plan: not an op: {line!r}", where=where, hint=_REPLAN)
        try:
            op, peer = parse_line(line)
        except ZbcError as error:
            raise ZbcError("E404", error.message, where=where, hint=error.hint) from None
        if _out_of_range(op, manifest):
            raise ZbcError("E404", f"plan: {line} is outside this plan's stages or microbatches", where=where)
        edge = (op.kind, op.stage, op.pipe)
        if edge not in peers:
            peers[edge] = placement.peer(op)
        if peer != peers[edge]:
            text = f"plan: {line} names another peer than the placement (rank {peers[edge]})"
            raise ZbcError("E404", text, where=where, hint=_REPLAN)
        ops.append(op)
    return ops


def _out_of_range(op: Op, manifest: Manifest) -> bool:
    if op.kind in COMPUTE or op.kind in TRANSFER:
        return (
            op.stage >= manifest.stages
            or op.mb >= manifest.microbatches
            or op.pipe >= len(manifest.placement[0])
            or op.slice >= manifest.slices
        )
    return op.stage >= manifest.stages


_REPLAN = "make it again with `zbc plan JOB.toml`"


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        hint = "`zbc plan JOB.toml -o DIR` writes a plan directory"
        raise ZbcError("E401", f"plan: cannot read {path}: {error.strerror}", hint=hint) from None


def _load_json(path: Path, raw: bytes | None = None) -> dict[str, Any]:
    try:
        data = json.loads(_read_bytes(path) if raw is None else raw)
    except ValueError as error:
        raise ZbcError("E404", f"plan: {path} is damaged or cut off", details=[str(error)], hint=_REPLAN) from None
    if not isinstance(data, dict):
        raise ZbcError("E404", f"plan: {path} is not a JSON object", hint=_REPLAN)
    return data


def _digest(manifest: Mapping[str, Any]) -> str:
    return _sha(json.dumps(manifest, sort_keys=True).encode())


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---- zbc.plan(job) -------------------------------------------------------------------------------------------


class _Callable(ModuleType):
    """`zbc.plan(job)` is part of the Python API and `zbc.plan` is this module, so the module can be called."""

    def __call__(self, job: Any, **options: Any) -> Any:
        return importlib.import_module("zbc.api").plan(job, **options)


sys.modules[__name__].__class__ = _Callable
