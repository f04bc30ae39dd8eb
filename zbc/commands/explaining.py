"""`explain`: errors, words of the field, keys, schedules, jobs, limits, GPUs, and this machine."""

from __future__ import annotations

import json as jsonlib
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from os.path import isfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zbc import __version__, excludes
from zbc.commands.console import labelled, table
from zbc.commands.drawing import columns_here
from zbc.commands.jobs import toml_value
from zbc.commands.opening import Changes
from zbc.commands.options import Out, ProfileFile, ScheduleName, Settings, complete_schedule
from zbc.errors import ZbcError
from zbc.host.cores import cores
from zbc.host.torch_version import OLDEST, release
from zbc.text import size, wrap

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from zbc.compiler.schedules import ScheduleCard
    from zbc.explain import Explanation
    from zbc.explain.glossary import Word
    from zbc.job.gpu import Gpu
    from zbc.job.spec import Job


def _complete(incomplete: str) -> list[tuple[str, str]]:
    from zbc.explain import CATALOGUE

    codes = [(code, entry.title) for code, entry in CATALOGUE.items() if code.startswith(incomplete.upper())]
    return codes + complete_schedule(incomplete)


def explain(
    topic: Annotated[
        str | None,
        typer.Argument(
            metavar="TOPIC",
            help='An error code, a word of the field, a key, a schedule, a JOB.toml, or one of "schedules", "keys", '
            '"limits", "gpu" and "machine".',
            autocompletion=_complete,
        ),
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="...", help="More of the word; of limits, only those about this.", show_default=False),
    ] = None,
    schedule: ScheduleName = None,
    settings: Settings = None,
    profile: ProfileFile = None,
    *,
    out: Out,
) -> None:
    """Explain an error, a word, a key, a schedule, or a job.

    Without a topic, list all codes and words. Of a job, or the plan directory it went into: every value with its
    origin, as a job file. "machine" is what zbc can do here; "keys" with --json is the JSON Schema of job files.
    """
    changes = Changes(schedule, settings, profile)
    if topic is not None and (topic.endswith(".toml") or isfile(Path(topic, "plan.json"))):
        job = changes.job(Path(topic))
        answer: Answer = {"format": "zbc-config", "version": 1, "sections": _values(job)}, listing(job)
    else:
        changes.refuse(Path(topic or "nothing"))
        answer = _answer(topic, " ".join(more or ()))
    out.answer(lambda: answer[0], lambda: answer[1])


Answer = tuple[Mapping[str, Any], "Iterable[RenderableType]"]  # for --json, and for readers


def _answer(topic: str | None, rest: str) -> Answer:
    if topic is None:
        return _everything()
    if (known := _TOPICS.get(topic.lower())) is not None:
        return known(rest)
    if re.fullmatch(r"\[?[eE]\d+\]?", topic.strip()):
        return _code(topic)
    return _word(f"{topic} {rest}".strip())


def _everything() -> Answer:
    from zbc.explain import CATALOGUE, glossary

    codes = table(("code", "meaning"), ((key, entry.title) for key, entry in CATALOGUE.items()), left=2)
    names = ", ".join(entry.names[0] for entry in glossary.WORDS).split(" ")
    return _explained(CATALOGUE), [codes, "", *wrap(["and words of the field:", *names], 78, between=" ")]


def _code(text: str) -> Answer:
    """An error by its code. Raises E104 for an unknown one."""
    from zbc.explain import CATALOGUE, FAMILIES, GONE

    asked = text.strip().strip("[]").upper()
    wanted = GONE.get(asked, asked)
    if wanted not in CATALOGUE:
        family = [key for key in CATALOGUE if key[:2] == wanted[:2]]
        hint = f"known: {', '.join(family)}" if family else "`zbc explain` lists all codes"
        raise ZbcError("E104", f"explain: no error has the code {text!r}", hint=hint)
    entry = CATALOGUE[wanted]
    moved = f"{asked} is {wanted} now, {entry.title}: zbc explain {wanted}"
    own = (f"{wanted}: {entry.title}", f"{FAMILIES[wanted[1]]}", "", entry.text)
    return _explained({wanted: entry}), own if wanted == asked else [moved]


def _word(text: str) -> Answer:
    """A word of the field, a key or a schedule. Raises E104 for an unknown one."""
    from zbc.explain import glossary

    entry = glossary.find(text) or _described(text)
    if entry is None:
        with suppress(ZbcError):
            return _schedules(text)
        near = glossary.near(text)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "`zbc explain` lists all codes and words"
        raise ZbcError("E104", f"explain: neither an error nor a word is called {text!r}", hint=hint)
    own, *aliases = entry.names
    also = [labelled("also", *wrap([*aliases], 67, between=", "))] if aliases else []
    more = labelled("more", f"docs/{entry.page}" if entry.page else "`zbc explain keys` has all keys")
    document = {"format": "zbc-word", "version": 1, **entry._asdict()}
    return document, [own, *wrap(f"{entry.text}".split(" "), 78, between=" "), *also, more]


def _keys(_: str) -> Answer:
    """All keys of a job with their meaning, or the JSON Schema of job files."""
    from zbc.job.spec import SECTIONS, json_schema

    shown = list[str]()
    for name, kind in SECTIONS.items():
        for key, field in kind.model_fields.items():
            about = wrap((field.description or "").split(" "), 76, between=" ")
            shown += [f"{name}.{key}", *(f"    {line}" for line in about)]
    return json_schema(), shown


def _machine(_: str) -> Answer:
    report = _inspected()
    blocks = (labelled(label, *lines) for label, lines in report.items())
    return {"format": "zbc-doctor", "version": 1, **report}, blocks


def _described(text: str) -> Word | None:
    """The description of a job's key from its schema, or its successor; of all keys of a name without its table."""
    from zbc.explain.glossary import Word
    from zbc.job.spec import SECTIONS
    from zbc.job.wording import RETIRED

    table, _, key = text.strip("[]").rpartition(".")
    named = f".{text.strip('[]')}"
    keys = {gone: f"It is gone; write {instead}." for gone, instead in RETIRED.items() if f".{gone}".endswith(named)}
    for section, kind in SECTIONS.items():
        field = kind.model_fields.get(key) if table in ("", section) else None
        if field is not None and field.description:
            plain = field.is_required() or field.default is None
            default = "" if plain else f" Default: {jsonlib.dumps(field.default, default=str)}."
            keys[f"{section}.{key}"] = f"{field.description.rstrip('.')}.{default}"
    if len(keys) > 1:
        return Word((*keys,), " ".join(f"{name}: {about}" for name, about in keys.items()), "")
    return next((Word((name,), about, "") for name, about in keys.items()), None)


def _limits(word: str) -> Answer:
    pairs, shown = [*excludes.table(word)], list[str]()
    if not pairs:
        raise ZbcError("E104", f"explain: no limit is about {word!r}", hint="`zbc explain limits` lists all")
    limits = [{"one": trait, "other": excluded, "why": why} for trait, excluded, why in pairs]
    for trait, rows in groupby(pairs, lambda row: row[0]):
        shown += [f"{trait} does not go with", *(f"  {excluded}: {why}" for _, excluded, why in rows)]
    return {"format": "zbc-limits", "version": 1, "limits": limits}, shown


def _gpus(_: str) -> Answer:
    """The values of `hardware.gpu` with their data sheets."""
    from zbc.job import gpu

    rows = [{"name": name, **sheet._asdict(), "planned": _planned(sheet)} for name, sheet in gpu.GPUS.items()]
    heads = ("gpu", "TFLOPS", "GiB", "GB/s", "link", "between nodes")
    blocks: list[RenderableType] = [
        table(heads, ((name, *(f"{value:g}" for value in sheet[:5])) for name, sheet in gpu.GPUS.items())),
        "",
        "Peaks: bfloat16 without sparsity; links in Gbit/s, one way, between nodes per",
        f"GPU. Planned with {gpu.SUSTAINED}, links too,",
        "until `zbc profile` measures. Keys beside hardware.gpu count before it.",
        "",
        *(f"{name}: {sheet.link}; {sheet.source}" for name, sheet in gpu.GPUS.items()),
    ]
    return {"format": "zbc-gpus", "version": 1, "gpus": rows}, blocks


def _planned(sheet: Gpu) -> dict[str, float | str]:
    from zbc.job.gpu import values

    return {".".join(map(str, path)): value for path, value in values(sheet).items()}


def _explained(entries: Mapping[str, Explanation]) -> dict[str, Any]:
    errors = [{"code": code, "title": entry.title, "text": entry.text} for code, entry in entries.items()]
    return {"format": "zbc-explain", "version": 1, "errors": errors}


def _values(job: Job) -> dict[str, dict[str, dict[str, Any]]]:
    """Section -> key -> its value and its origin."""
    from zbc.job.spec import SECTIONS

    shown: dict[str, dict[str, dict[str, Any]]] = {}
    for name in SECTIONS:
        values = getattr(job, name).model_dump(mode="json")
        shown[name] = {key: {"value": value, "origin": _origin(job, name, key)} for key, value in values.items()}
    return shown


def _origin(job: Job, section: str, key: str) -> str:
    path = (section, key)
    return job.document.where(path) if job.document.has(path) else "default"


def listing(job: Job) -> Iterator[str]:
    """Lines of TOML; keys that are not set are comments, since TOML has no null."""
    from zbc.job.model_section import foreign
    from zbc.job.spec import SECTIONS

    unused = {"model": foreign(job.model)}
    for i, (name, section) in enumerate(SECTIONS.items()):
        yield f"{chr(10) * (i > 0)}[{name}]"
        values = getattr(job, name).model_dump(mode="json")
        for key in section.model_fields:
            written = job.document.has((name, key))
            origin = _origin(job, name, key)
            line = f"# {key} is not set" if values[key] is None else f"{key} = {toml_value(values[key])}"
            empty = isinstance(values[key], dict)  # a table that must be left out if empty
            if not written and values[key] is not None and (empty or key in unused.get(name, ())):
                line = f"# {line}"
            yield f"{line:<36}  # {origin}"


# ---- this machine -----------------------------------------------------------------------------------------------


def _inspected() -> dict[str, list[str]]:
    """Label -> lines."""
    lines, torch = {"zbc": [__version__], "python": [f"{platform.python_version()} on {platform.system()}"]}, None
    try:
        import torch as module

        old = "" if release(module.__version__) >= OLDEST else f"; zbc run needs {'.'.join(map(str, OLDEST))} or newer"
        torch, lines["torch"] = module, [f"{module.__version__}{old}"]
    except (ImportError, OSError) as error:  # OSError: a library torch needs is missing or damaged
        lines["torch"] = [f"cannot be imported: {error}"]
    lines["cpu"] = [f"{cores()} cores"]
    lines["devices"] = _devices(torch)
    lines["transports"] = _transports(torch)
    lines["folder"] = [f"{Path.cwd()}: {'can' if _writable() else 'cannot'} be written"]
    lines["can"] = _abilities(torch)
    return lines


def _devices(torch: ModuleType | None) -> list[str]:
    if torch is None:
        return ["unknown without torch"]
    if not torch.cuda.is_available():
        seen = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
        known = f" that this torch can use, though the system has {', '.join(seen)}" if seen else ""
        return [f"no CUDA device{known}"]
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [f"cuda:{index} {device.name}, {size(device.total_memory)}" for index, device in enumerate(devices)]


def _transports(torch: ModuleType | None) -> list[str]:
    if torch is None:
        return ["unknown without torch"]
    import torch.distributed as dist

    if not dist.is_available():
        return ["this torch has no torch.distributed: one process only"]
    yes = {True: "yes", False: "no"}
    return [f"gloo (CPU): {yes[dist.is_gloo_available()]}; NCCL (CUDA): {yes[dist.is_nccl_available()]}"]


def _writable() -> bool:
    try:
        with tempfile.TemporaryFile(dir=Path.cwd()):
            return True
    except OSError:
        return False


def _abilities(torch: ModuleType | None) -> list[str]:
    """The possible uses of this machine, one line per command."""
    lines = ["plan, check, compare and draw any job"]
    if torch is None:
        return [*lines, "not run plans: install torch first"]
    lines.append("run plans on this machine's CPU: zbc run PLAN --local N --device cpu")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices > 1:
        lines.append(f"run plans of up to {devices} ranks on its GPUs: torchrun --nproc-per-node N -m zbc run PLAN")
    elif devices == 0:
        lines.append("not run plans on GPUs: there is none")
    return lines


# ---- schedules ----------------------------------------------------------------------------------------------------


_EVERYTHING = 1000  # columns of a list off a terminal
_CARD = (4, 6)  # ranks and microbatches of the picture on a schedule's card


def _schedules(name: str) -> Answer:
    """All schedules, or the card of one. Raises E104 for an unknown one."""
    from zbc.compiler.schedules import AUTO, SCHEDULES, find

    cards = [*SCHEDULES.values()] if not name else [] if name.lower() == AUTO else [find(name)]
    document = {"format": "zbc-schedules", "version": 1, "schedules": [_card(card) for card in cards]}
    if not name:
        return document, _list(cards, AUTO)
    return document, card_parts(cards[0], columns_here()) if cards else _AUTO


def _card(card: ScheduleCard) -> dict[str, Any]:
    low, high = card.chunks
    texts = ("name", "summary", "source", "makespan", "span", "memory", "needs")
    return {
        **{key: getattr(card, key) for key in texts},
        "aliases": list(card.aliases),
        "placement": card.placement_name,
        "chunks": [low, high],
        "splits_backward": card.splits_backward,
        "searched": card.searched,
    }


_AUTO = (
    "auto: the best of all schedules, for the job's costs and memory",
    "",
    "Never worse than any of them by name with the same --budget. looped-zb is tried",
    "with two to four stages per rank, or with those of schedule.chunks.",
)
_UNITS = (
    "p ranks, m microbatches, v chunks (stages per rank); one rank's F, B and W of",
    "a microbatch take 1 each, transfers nothing; memory is the peak of activations,",
    "1 = one rank's share of one microbatch. The bubble is what a makespan or span",
    "has beyond 3m. `zbc explain NAME` shows one of them.",
)


def _list(cards: Sequence[ScheduleCard], auto: str) -> Iterator[RenderableType]:
    """All schedules, with the columns that fit the terminal."""
    rows = [("name", "placement", "chunks", "makespan", "span", "memory", "B, W")]
    for card in cards:
        split = "apart" if card.splits_backward else "as one"
        rows.append((card.name, card.placement_name, _chunks(card), card.makespan, card.span, card.memory, split))
    rows.append((auto, "any", "1+", "the best", "the best", "the limit", "apart"))
    columns, left_out = list(zip(*rows, strict=True)), list[str]()
    room = shutil.get_terminal_size((_EVERYTHING, 24)).columns
    for name in ("chunks", "span"):
        if sum(max(map(len, column)) + 2 for column in columns) - 2 > room:
            columns = [column for column in columns if column[0] != name]
            left_out.append(name)
    heads, *cells = zip(*columns, strict=True)
    yield table(heads, cells, left=len(heads))
    yield ""
    yield from _UNITS
    if left_out:
        yield f"No room for: {', '.join(left_out)}."


def _chunks(card: ScheduleCard) -> str:
    low, high = card.chunks
    return f"{low}" if low == high else f"{low}+" if high is None else f"{low}-{high}"


def card_parts(card: ScheduleCard, width: int) -> Iterator[str | Text]:
    """The facts about one schedule, and a picture of its order."""
    from zbc.compiler.lowering import Lowering
    from zbc.compiler.schedules import Request
    from zbc.compiler.sim.context import Context
    from zbc.viz.strip import Drawn, once
    from zbc.viz.terminal import View, draw

    p, m = _CARD
    shown = Lowering().lower(Context.of(card.make(Request(p, m, card.default_chunks))))
    yield from wrap(f"{card.name}: {card.summary}".split(" "), 80, between=" ")
    yield ""
    yield labelled("source", *wrap(card.source.split(" "), 69, between=" "))
    if card.aliases:
        yield labelled("also", ", ".join(card.aliases))
    yield labelled("placement", f"{card.placement_name}; stages per rank: {_chunks(card)}")
    yield labelled("backward", "B and W are ops of their own" if card.splits_backward else "B and W are one op")
    yield labelled("makespan", card.makespan)
    yield labelled("span", card.span)
    yield labelled("memory", f"{card.memory}; in activation units, on the fullest rank")
    if card.sliced:
        yield labelled("slices", f"in k slices, up to p: the bubble over k, memory {card.sliced}")
    yield labelled("needs", *wrap(card.needs.split(" "), 69, between=" "))
    yield ""
    picture = Drawn(card.name, shown.program, once(shown.timeline), shown.costs)
    yield draw([picture], View(width=width, by="slot", unicode=False))


_TOPICS: dict[str, Callable[[str], Answer]] = dict.fromkeys(("gpu", "gpus", "hardware.gpu"), _gpus)
_TOPICS |= {"schedules": _schedules, "keys": _keys, "limits": _limits, "machine": _machine}
