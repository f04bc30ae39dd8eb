"""Where plans get cards: profiles of layers that ran without numbers (training/profiling/dry.py).

Torch makes them, which the compiler never imports: the maker is named, and loaded when a card is made. Each is made
once, and then kept in memory and in a file of the user's cache, which is named by a digest of all that the card depends
on: the sections of the job that layers, data and optimizer read; every Python file beside users' code; the versions of
torch and of zbc's own code. A file that cannot be read is made again, one that cannot be written is not kept.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import zbc
from zbc.errors import ZbcError
from zbc.host.linefile import replace_text
from zbc.job import userobject
from zbc.job.profile import Profile, WordBytes, checked
from zbc.job.sections import Data
from zbc.job.spec import Job

MAKER = "zbc.training.profiling.dry:profiles"
# What a stage keeps from F to B: all; all but what norms and activations make, with or without attention; as KEEP, with
# the tokens that ranks gather.
KEEP, ATTENTION, CHEAP, GATHERED = "keep", "attention", "cheap", "gathered"
_WORDS, _ENDS = "words", "ends"  # a rank's share of a vocabulary; the first and the last layer
_READ = ("model", "adapter", "optimizer", "data", "schedule", "parallel", "train", "hardware")  # sections
_RUN = ("ir.py", "ops.py", "topology.py", "job", "plan", "runtime", "training")  # zbc's own code that makes cards
_LAYERS = 2  # of a model whose layers are alike, but for what comes before the first: its card is that of longer ones
_UNLIKE = {*"0123456789?["}  # by which names tell layers apart
_FILES = 2**22  # bytes of users' code that a digest covers
_MOST = 1024  # cards in memory
_by_section: dict[tuple[Any, ...], tuple[Any, Sequence[Profile]]] = {}
_by_name: dict[str, Sequence[Profile]] = {}


def of(job: Job, policy: str = KEEP, cuts: Sequence[int] = ()) -> Sequence[Profile]:
    """The card of a job's layers under a policy; of each slice of microbatches that are cut at `cuts`.

    Raises E5xx for layers that cannot run without numbers, or not here.
    """
    # Sections do not change: the same objects mean the same card. They are kept, so that no others get their ids.
    read = [getattr(job, name) for name in _READ]
    key = (*map(id, read), job.memory.attention, policy, tuple(cuts))
    if key not in _by_section:
        for full in (_by_section, _by_name):
            if len(full) >= _MOST:
                full.clear()
        kept = {_WORDS: _WORDS, ATTENTION: "selective", CHEAP: "selective"}.get(policy, "keep")
        _by_section[key] = read, _joined(_plain(_under(job, policy)), kept, cuts)
    return _by_section[key][1]


def words(job: Job) -> WordBytes:
    """The card of a rank's share of the vocabulary. Raises E5xx as `of`."""
    found = of(job, _WORDS)[0].shared
    assert found is not None
    return found


def with_card(job: Job) -> Job:
    """The job with the card of its layers, if a factory makes them and nothing says what they cost; with the reason if
    there is none."""
    if job.model.builtin or job.profile is not None or job.costs.f is not None:
        return job
    try:
        return replace(job, profile=of(job)[0], carded=True)
    except ZbcError as error:
        return replace(job, uncounted=error)


def _under(job: Job, policy: str) -> Job:
    """The job that keeps activations as the policy says."""
    if policy == GATHERED:
        return _with(job, "parallel", tp_sequence=True) if job.parallel.regathers else job
    return _with(job, "memory", attention={ATTENTION: "again", CHEAP: "keep"}.get(policy))


def _with(job: Job, section: str, **keys: object) -> Job:
    changed: Any = {section: getattr(job, section).model_copy(update=keys)}
    return replace(job, **changed)


def _plain(job: Job) -> Job:
    """A job with the same card: of a built-in model its data, weights and loss of data do not matter, nor the number of
    its layers if all are alike."""
    model = job.model
    if not model.builtin:
        return job
    named = (job.adapter.targets if job.adapter.rank else []) + [name for g in job.optimizer.groups for name in g.names]
    layers = model.layers if _UNLIKE & {*"".join(named)} else min(model.layers, _LAYERS)
    plain = replace(job, data=Data.model_validate({"kind": "synthetic"}))
    return _with(plain, "model", pretrained=None, loss="cross_entropy", layers=layers)


# ---- cards by name -------------------------------------------------------------------------------------------


def _joined(job: Job, policy: str, cuts: Sequence[int]) -> Sequence[Profile]:
    """The card. If the loss makes some logits at a time, only its head differs from that of a loss that makes all; no
    policy, and no sharing of experts, changes what a head does."""
    if not job.model.builtin or policy == _WORDS or job.model.loss_chunk is None:
        return _named(job, policy, cuts)
    rest = _named(_with(job, "model", loss_chunk=None), policy, cuts)
    ends = _named(_under(_with(job, "parallel", ep=1), KEEP), _ENDS, cuts)
    pairs = zip(rest, ends, strict=True)
    return [a.model_copy(update={"model": b.model, "layers": {**a.layers, "head": b.layers["head"]}}) for a, b in pairs]


def _named(job: Job, policy: str, cuts: Sequence[int]) -> Sequence[Profile]:
    if (name := _digest(job, policy, cuts)) is None:
        return _made(None, job, policy, cuts)
    if name not in _by_name:
        file = None if (place := folder()) is None else place / f"{name}.json"
        _by_name[name] = _of_file(file) or _made(file, job, policy, cuts)
    return _by_name[name]


def folder() -> Path | None:
    """The folder of cards: in $XDG_CACHE_HOME, or ~/.cache; None if there is no such place."""
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(user) / "zbc" / "cards" if os.path.isabs(user) else None


def _of_file(file: Path | None) -> Sequence[Profile] | None:
    with suppress(OSError, ValueError, RecursionError, TypeError, ZbcError):
        return None if file is None else _read(file.read_text())
    return None


def _made(file: Path | None, job: Job, policy: str, cuts: Sequence[int]) -> Sequence[Profile]:
    found = userobject.load(MAKER, "the maker of cards")(job, policy, cuts)
    text = json.dumps([one.plain() for one in found], sort_keys=True)
    with suppress(OSError):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(file, text)
    return _read(text)


def _read(text: str) -> Sequence[Profile]:
    """The cards of a file with this text: numbers in files are rounded."""
    return [checked(one, "a card", None, "") for one in json.loads(text)]


def _digest(job: Job, policy: str, cuts: Sequence[int]) -> str | None:
    """The name of a card; None if nobody knows which files make its layers."""
    sections = {"model": job.model, "adapter": job.adapter, "optimizer": job.optimizer.still(), "data": job.data}
    said = {name: one.model_dump(mode="json") for name, one in sections.items()}
    parallel = {key: getattr(job.parallel, key) for key in ("tp", "cp", "ep", "expert_tp", "tp_sequence")}
    how = (job.schedule.microbatch_size, job.train.fused_gradients, job.hardware.device, parallel)
    shared = (job.vocabulary, job.parallel.pp) if policy == _WORDS else bool(job.vocabulary)
    kept = (policy, job.memory.attention, list(cuts), shared)
    users = [name for name in (job.model.family, job.model.loss, job.data.kind) if ":" in name]
    code = [_beside(name.partition(":")[0]) for name in users]
    if None in code:
        return None
    told = json.dumps([said, how, kept, code, os.getcwd() if users else "", _own()], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def _beside(module: str) -> str | None:
    """A digest of the Python files in the folder of a module; None if they are not found, or too many."""
    with suppress(Exception):  # of finders, and of packages that it is in
        userobject.look_here()
        spec = find_spec(module)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            files = sorted(Path(spec.origin).parent.glob("*.py"))
            if sum(file.stat().st_size for file in files) <= _FILES:
                return _of_files(files)
    return None


@cache
def _own() -> str:
    """A digest of the versions of torch, of transformers and of the code that makes cards."""
    root, torch, models = Path(zbc.__file__).parent, find_spec("torch"), find_spec("transformers")
    files = [file for name in _RUN for file in (sorted((root / name).rglob("*.py")) or [root / name])]
    files += [Path(torch.origin).parent / "version.py"] if torch is not None and torch.origin else []
    files += [Path(models.origin)] if models is not None and models.origin else []
    return _of_files(files)


def _of_files(files: Sequence[Path]) -> str:
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.name}\0".encode() + file.read_bytes())
    return found.hexdigest()
