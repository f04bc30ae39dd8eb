"""Plan directories: the only interface between the compiler and the runtime.

    plan/
      plan.json        the manifest: schedule, placement, layers and boundary tensors per stage, prediction, hashes
      rank-0000.json   the ops of rank 0, one per line, so that `diff` between two plans shows only the changes
      rank-0001.json   ...

Bytes are deterministic: no timestamps, no host names. A directory appears complete or not at all. The manifest is in
manifest.py, reading in reading.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zbc.errors import ZbcError, unwritten
from zbc.host.folders import folders_for
from zbc.ir import NEXT, TRAITS, Kind, Op, Program
from zbc.ops import EXPERTS, MAKER, UNIT_SCOPES, WORDS
from zbc.plan.manifest import FORMAT, SLICES, STEPS, VERSION, Words, rank_file, sha
from zbc.plan.manifest import FROZEN as FROZEN
from zbc.plan.manifest import MANIFEST as MANIFEST
from zbc.plan.manifest import Boundary as Boundary
from zbc.plan.manifest import Manifest as Manifest
from zbc.plan.manifest import RampPlan as RampPlan
from zbc.plan.manifest import RankPlan as RankPlan
from zbc.plan.manifest import Unequal as Unequal
from zbc.plan.reading import REPLAN
from zbc.plan.reading import is_plan as is_plan
from zbc.plan.reading import read_manifest as read_manifest
from zbc.plan.reading import read_ramp as read_ramp
from zbc.plan.reading import read_rank as read_rank


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A whole plan directory in memory; `ramp`: the plans of a training's first steps."""

    manifest: Manifest
    program: Program
    ramp: tuple[StoredPlan, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> StoredPlan:
        """Reads and verifies a plan directory. Raises E401 to E406."""
        manifest = read_manifest(folder)
        ranks = tuple(read_rank(folder, rank, manifest).ops for rank in range(manifest.ranks))
        check_counts(manifest, ranks)
        ramp = tuple(cls.read(below) for below, _ in read_ramp(folder, manifest))
        return cls(manifest, program_of(manifest, ranks), ramp)


def judges(manifest: Manifest) -> tuple[int, ...]:
    """The last ranks of all replicas: without a barrier, they sum the norms that their replicas have collected."""
    return manifest.topology.held(manifest.ranks - 1)


def check_counts(manifest: Manifest, ranks: tuple[tuple[Op, ...], ...]) -> None:
    """Raises E404 if the manifest has larger counts than there are ops: tables of that size would be allocated."""
    ops = sum(map(len, ranks))
    for what, counted in (("microbatches", manifest.microbatches * manifest.slices), ("stages", manifest.stages)):
        if counted > ops:
            text = f"plan: {MANIFEST} counts {counted} {what}, the rank files have {ops} ops in all"
            raise ZbcError("E404", text, hint=REPLAN)


def program_of(manifest: Manifest, ranks: tuple[tuple[Op, ...], ...]) -> Program:
    m, run, history = manifest, manifest.topology, (manifest.schedule, *manifest.passes)
    return Program(m.to_placement(), run.microbatches, ranks, history, run.slices, **m.traits)


def meeting(manifest: Manifest, op: Op, rank: int) -> tuple[int, ...]:
    """The ranks of a run in the same collective as `rank`, see `meetings`; () if it has no part in this op."""
    return next((ranks for ranks in meetings(manifest, (op,)) if rank in ranks), ())


def meetings(manifest: Manifest, ops: Iterable[Op]) -> set[tuple[int, ...]]:
    """The sets of ranks of a run in the same collective, over all copies of the pipeline: with the same part of layers
    or of experts, and if replicas sum their own gradients, of the same replica. The union for several `ops`."""
    program, run = program_of(manifest, ((),) * manifest.ranks), manifest.topology
    together = program.together // program.cp  # neighbouring replicas
    sets = set[tuple[int, ...]]()
    for of, apart, experts in {(program.members(op), program.apart(op), op.stage <= EXPERTS) for op in ops}:
        shares = run.shares if experts else {}
        sets |= _by(
            (rank, (at.dp // together, apart and at.pp, shares[rank] if experts else run.part(at.at)))
            for rank, at in run.places(of)
        )
    return sets


def averaging(manifest: Manifest, rank: int) -> tuple[int, ...]:
    """The ranks of a run that average weights with `rank`."""
    return next(ranks for ranks in averagings(manifest) if rank in ranks)


def averagings(manifest: Manifest) -> set[tuple[int, ...]]:
    """The sets of ranks of a run that average weights: with the same part of the layers, and the same experts."""
    run = manifest.topology
    shares = run.shares
    return _by((rank, (at.pp, run.part(at.at), shares[rank])) for rank, at in run.places(range(run.pp)))


def _by(keyed: Iterable[tuple[int, Hashable]]) -> set[tuple[int, ...]]:
    """The ranks with the same key, ascending, for each key."""
    found = dict[Hashable, list[int]]()
    for rank, key in keyed:
        found.setdefault(key, []).append(rank)
    return {tuple(sorted(ranks)) for ranks in found.values()}


def holding(manifest: Manifest, owner: int, rank: int) -> tuple[int, ...]:
    """The ranks of a run with the same weights of an owner as `rank`, once averaged weights are made equal."""
    program = program_of(manifest, ((),) * manifest.ranks)
    run, seat, op = manifest.topology, manifest.topology.of(rank), Op(MAKER["total"], owner)
    at = seat.at if owner == WORDS else ()  # other parts of layers are put together, or taken from the first rank
    of = (seat.pp,) if program.apart(op) else program.members(op)
    return run.alike(of, rank) if owner <= EXPERTS else run.ranks(of, at)


# ---- writing -------------------------------------------------------------------------------------------------


def assemble(
    program: Program,
    *,
    layers: Sequence[Sequence[str]],
    microbatch_size: int,
    planning: Mapping[str, Any],
    training: Mapping[str, Any],
    parameters: Mapping[str, Any] | None = None,
    boundaries: Sequence[Boundary | None] | None = None,
    predicted: Mapping[str, Any] | None = None,
    ramp: Sequence[RampPlan] = (),
    cuts: Sequence[int] = (),
    words: Sequence[int] = (),
    balance: Unequal | None = None,
) -> tuple[Manifest, dict[str, str]]:
    """The manifest of a program and the text of every rank file; `boundaries`: None: the layers decide; `words`: the
    first row of each rank in a shared vocabulary, and its end."""
    lines = [_op_lines(program, rank) for rank in range(len(program.ranks))]
    seed = json.dumps([FORMAT, VERSION, planning, list(program.history)], sort_keys=True)
    identity = hashlib.sha256(seed.encode())
    for text in [*lines, *(part.sha256 for part in ramp)]:
        identity.update(sha(text.encode()).encode())
    plan_id = identity.hexdigest()[:16]
    files = {rank_file(rank): _rank_text(program, rank, plan_id, text) for rank, text in enumerate(lines)}
    placement = program.placement
    traits: dict[str, Any] = dict(zip(TRAITS, program.traits, strict=True))
    traits = {name: list(value) if isinstance(value, tuple) else value for name, value in traits.items()}
    copies, sums, node = (traits.pop(name) for name in ("dp", "vocabulary", "node"))
    features = [SLICES] * (program.slices > 1) + [FROZEN] * program.freezes + [STEPS] * program.flushless
    manifest = Manifest(
        **traits,
        copies=copies,
        vocabulary=Words(sums=sums, rows=list(words)) if sums else None,
        node=node or [],
        format=FORMAT,
        version=VERSION,
        id=plan_id,
        schedule=program.history[0],
        parameters=dict(parameters or {}),
        passes=list(program.history[1:]),
        ranks=placement.ranks,
        stages=placement.stages,
        microbatches=program.microbatches,
        microbatch_size=microbatch_size,
        slices=program.slices,
        placement=[list(placement.holders(s)) for s in range(placement.stages)],
        edges=[list(edge) for edge in placement.edges] if placement.branches else [],
        layers=[list(names) for names in layers],
        boundaries=list(boundaries or [None] * (len(layers) - 1)),
        capabilities=sorted(map(str, program.kinds)) + features,
        predicted=dict(predicted or {}),
        planning=dict(planning),
        training=dict(training),
        files={name: sha(text.encode()) for name, text in files.items()},
        ramp=list(ramp),
        cuts=list(cuts),
        balance=balance,
    )
    return manifest, files


_OF_UNITS = frozenset(kind for kind in Kind if kind.row.scope in UNIT_SCOPES)


def _op_lines(program: Program, rank: int) -> str:
    """The ops of a rank as JSON strings, one per line; those that differ in their microbatch are printed once."""
    around = dict[tuple[object, ...], list[str]]()  # the text before and after the microbatch
    lines = []
    for op in program.ranks[rank]:
        number = f" m{op[2]}"
        alike = (op[:2], op[3:]) if op[0] in _OF_UNITS and op[2] < NEXT else op
        if alike not in around:
            around[alike] = f'  "{program.placement.text(op)}"'.split(number, 1)
        lines.append(number.join(around[alike]))
    return ",\n".join(lines)


def _rank_text(program: Program, rank: int, plan_id: str, lines: str) -> str:
    stages = json.dumps(program.placement.stages_of(rank))
    return (
        f'{{\n "format": "{FORMAT}",\n "version": {VERSION},\n "plan": "{plan_id}",\n "rank": {rank},\n'
        f' "stages": {stages},\n "ops": [\n{lines}\n ]\n}}\n'
    )


def write(folder: Path, manifest: Manifest, files: Mapping[str, str]) -> None:
    """Puts a plan directory at `folder`, replacing an older plan there, in one rename. Raises E407 if something that is
    not a plan is in the way, or the directory cannot be written."""
    refuse_in_the_way(folder)
    try:
        with folders_for(folder), _beside(folder) as work:
            fresh = work / "new"
            fresh.mkdir()
            for name, text in {**files, MANIFEST: manifest.dumps()}.items():
                (fresh / name).parent.mkdir(exist_ok=True)
                (fresh / name).write_text(text, encoding="utf-8")
            if folder.exists():
                os.rename(folder, work / "old")
            os.rename(fresh, folder)
    except OSError as error:
        raise _unwritable(folder, error) from None


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A temporary folder next to `folder`; if writing fails, its `old` is moved back to `folder`."""
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield work
    finally:
        if (work / "old").exists() and not folder.exists():
            os.rename(work / "old", folder)
        shutil.rmtree(work, ignore_errors=True)


def refuse_unwritable(folder: Path) -> None:
    """Raises E407 if no plan can be written at `folder`. Leaves no files."""
    try:
        refuse_in_the_way(folder)
        with folders_for(folder, keep=False), _beside(folder) as work:
            (work / "new").mkdir()
    except OSError as error:
        raise _unwritable(folder, error) from None


def _unwritable(folder: Path, error: OSError) -> ZbcError:
    text = f"plan: cannot write {folder}: {unwritten(folder, error)}"
    return ZbcError("E407", text, hint="choose a folder that can be written with -o")


def refuse_in_the_way(folder: Path) -> None:
    """Raises E407 if `folder` exists and is not a plan."""
    if os.path.exists(folder) and not _replaceable(folder):
        text = f"plan: {folder} exists and is not a plan directory"
        raise ZbcError("E407", text, hint="choose another folder with -o")


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
