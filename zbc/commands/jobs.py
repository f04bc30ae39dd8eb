"""`init`, `config` and `explain`: job files, and explanations of their settings and errors."""

from __future__ import annotations

import json as jsonlib
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import StrEnum
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zbc import excludes
from zbc.commands.console import labelled, show, show_json, table, write_text
from zbc.commands.options import AsJson, JobFile, ProfileFile, Quiet, ScheduleName, Settings, Verbose
from zbc.errors import ZbcError
from zbc.text import wrap

if TYPE_CHECKING:
    from zbc.explain import Explanation
    from zbc.explain.glossary import Word
    from zbc.job.gpu import Gpu
    from zbc.job.spec import Job

config = typer.Typer(no_args_is_help=True, help="Show all values of a job, or the schema of job files.")


class Template(StrEnum):
    """The jobs that `zbc init` can write."""

    TINY = "tiny"
    GPT = "gpt-1.5b"
    LLAMA = "llama-8b"
    MOE16 = "moe-16b"
    MOE30 = "moe-30b"


def template_text(name: str) -> str:
    """One of zbc/job/templates."""
    return (resources.files("zbc.job") / "templates" / f"{name}.toml").read_text(encoding="utf-8")


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to put it.")] = Path("."),
    template: Annotated[Template, typer.Option(help="What to start from.")] = Template.TINY,
    from_hf: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Start from a Hugging Face model instead.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, max=100_000, metavar="N", help="With --from-hf: how many GPUs there are.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="And which: h100-sxm (`zbc explain gpu`).")] = None,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a first, commented zbc.toml.

    For a Hugging Face model on GPUs it is the first row of `zbc advise`: seconds, or minutes for the largest.
    """
    path = folder if folder.suffix == ".toml" and not folder.is_dir() else folder / "zbc.toml"
    if os.path.exists(path):
        raise ZbcError("E111", f"init: {path} exists", hint="name another folder, or move the file away")
    if from_hf is None:
        if gpus is not None or gpu is not None:
            raise typer.BadParameter("--gpus and --gpu go with --from-hf; templates have GPUs of their own")
        text = template_text(template)
    else:
        from zbc.commands.fromhf import job_text

        text = job_text(from_hf, gpus, gpu, quiet=quiet or json)
    write_text(path, text)
    if json:
        show_json({"format": "zbc-init", "version": 1, "job": str(path)})
    elif not quiet:
        named = shlex.quote(str(path))
        show(f"wrote {path}", "", labelled("next", f"zbc plan {named}", f"zbc compare {named}"))


@config.command("show")
def config_show(
    job: JobFile,
    schedule: ScheduleName = None,
    settings: Settings = None,
    profile: ProfileFile = None,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Print every value of a job with its origin, as a job file."""
    from zbc.compiler.compile import load_job

    loaded = load_job(job, settings or (), schedule, profile)
    if json:
        show_json({"format": "zbc-config", "version": 1, "sections": _values(loaded)})
    elif not quiet:
        show("\n".join(listing(loaded)))


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
    from zbc.job.spec import SECTIONS, VERSION

    unused = {"model": foreign(job.model)}
    yield f"zbc = {VERSION}"
    for name, section in SECTIONS.items():
        yield f"\n[{name}]"
        values = getattr(job, name).model_dump(mode="json")
        for key in section.model_fields:
            written = job.document.has((name, key))
            origin = _origin(job, name, key)
            line = f"# {key} is not set" if values[key] is None else f"{key} = {toml_value(values[key])}"
            empty = isinstance(values[key], dict)  # a table that must be left out if empty
            if not written and values[key] is not None and (empty or key in unused.get(name, ())):
                line = f"# {line}"
            yield f"{line:<36}  # {origin}"


def toml_value(value: Any) -> str:
    """A plain value as TOML."""
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items() if item is not None)
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return jsonlib.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML wants it escaped


def _key(text: str) -> str:
    bare = text and all(c.isascii() and (c.isalnum() or c in "-_") for c in text)
    return text if bare else jsonlib.dumps(text, ensure_ascii=False)


@config.command("schema")
def config_schema(
    job: Annotated[Path | None, typer.Argument(metavar="JOB.toml", help="Not needed: there is one schema.")] = None,
    json: Annotated[bool, typer.Option("--json", help="The schema is JSON either way.")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Print the JSON Schema of job files, for editors."""
    from zbc.job.spec import json_schema

    if not quiet:
        show_json(json_schema())


def _complete_code(incomplete: str) -> list[tuple[str, str]]:
    from zbc.explain import CATALOGUE

    return [(code, entry.title) for code, entry in CATALOGUE.items() if code.startswith(incomplete.upper())]


def explain(
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="CODE|WORD",
            help='An error code, such as E201; a word of the field, such as ZeRO-3; "limits" or "gpu".',
            autocompletion=_complete_code,
        ),
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="...", help="More of the word; of limits, only those about this.", show_default=False),
    ] = None,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Explain an error code or a word, or list limits or GPUs.

    Without one, list all codes and words.
    """
    from zbc.explain import CATALOGUE, FAMILIES, glossary

    if code is not None and code.lower() == "limits":
        _limits(" ".join(more or ()), json=json, quiet=quiet)
        return
    if code is not None and code.lower() in ("gpu", "gpus", "hardware.gpu"):
        _gpus(json=json, quiet=quiet)
        return
    if code is None:
        if json:
            show_json(_explained(CATALOGUE))
        elif not quiet:
            show(table(("code", "meaning"), ((key, entry.title) for key, entry in CATALOGUE.items()), left=2))
            names = ", ".join(entry.names[0] for entry in glossary.WORDS).split(" ")
            show("", *wrap(["and words of the field:", *names], 78, between=" "))
        return
    if not re.fullmatch(r"\[?[eE]\d+\]?", code.strip()):
        _word(" ".join([code, *(more or ())]), json=json, quiet=quiet)
        return
    wanted = code.strip().strip("[]").upper()
    if wanted not in CATALOGUE:
        family = [key for key in CATALOGUE if key[:2] == wanted[:2]]
        hint = f"known: {', '.join(family)}" if family else "`zbc explain` lists all codes"
        raise ZbcError("E112", f"explain: no error has the code {code!r}", hint=hint)
    entry = CATALOGUE[wanted]
    if json:
        show_json(_explained({wanted: entry}))
    elif not quiet:
        show(f"{wanted}: {entry.title}", f"{FAMILIES[wanted[1]]}", "", entry.text)


def _word(text: str, *, json: bool, quiet: bool) -> None:
    """Explains a word of the field. Raises E112 for an unknown one."""
    from zbc.compiler.schedules import SCHEDULES, find
    from zbc.explain import glossary

    entry = glossary.find(text) or _described(text)
    if entry is None:
        with suppress(ZbcError):
            card = find(text)
            if card.name in SCHEDULES:
                entry = glossary.Word(
                    (card.name, *card.aliases), f"A schedule: {card.summary}.", f"schedules/{card.name}.md"
                )
    if entry is None:
        near = glossary.near(text)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "`zbc explain` lists all codes and words"
        raise ZbcError("E112", f"explain: neither an error nor a word is called {text!r}", hint=hint)
    if json:
        show_json({"format": "zbc-word", "version": 1, **entry._asdict()})
    elif not quiet:
        own, *aliases = entry.names
        show(own, *wrap(f"{entry.text}".split(" "), 78, between=" "))
        show(*([labelled("also", *wrap([*aliases], 67, between=", "))] if aliases else []))
        show(labelled("more", f"docs/{entry.page}" if entry.page else "`zbc config schema` has all keys"))


def _described(text: str) -> Word | None:
    """The description of a job's key from its schema; of all keys of a name without its table."""
    from zbc.explain.glossary import Word
    from zbc.job.spec import SECTIONS

    table, _, key = text.strip("[]").rpartition(".")
    keys = {}
    for section, kind in SECTIONS.items():
        field = kind.model_fields.get(key) if table in ("", section) else None
        if field is not None and field.description:
            plain = field.is_required() or field.default is None
            default = "" if plain else f" Default: {jsonlib.dumps(field.default, default=str)}."
            keys[f"{section}.{key}"] = f"{field.description.rstrip('.')}.{default}"
    if len(keys) > 1:
        return Word((*keys,), " ".join(f"{name}: {about}" for name, about in keys.items()), "")
    return next((Word((name,), about, "") for name, about in keys.items()), None)


def _limits(word: str, *, json: bool, quiet: bool) -> None:
    pairs = [*excludes.table(word)]
    if not pairs:
        raise ZbcError("E112", f"explain: no limit is about {word!r}", hint="`zbc explain limits` lists all")
    if json:
        limits = [{"one": trait, "other": excluded, "why": why} for trait, excluded, why in pairs]
        show_json({"format": "zbc-limits", "version": 1, "limits": limits})
    elif not quiet:
        for trait, rows in groupby(pairs, lambda row: row[0]):
            show(f"{trait} does not go with")
            show(*(f"  {excluded}: {why}" for _, excluded, why in rows))


def _gpus(*, json: bool, quiet: bool) -> None:
    """Prints the values of `hardware.gpu` with their data sheets."""
    from zbc.job import gpu

    if json:
        rows = [{"name": name, **sheet._asdict(), "planned": _planned(sheet)} for name, sheet in gpu.GPUS.items()]
        show_json({"format": "zbc-gpus", "version": 1, "gpus": rows})
    elif not quiet:
        heads = ("gpu", "TFLOPS", "GiB", "GB/s", "link", "between nodes")
        show(
            table(heads, ((name, *(f"{value:g}" for value in sheet[:5])) for name, sheet in gpu.GPUS.items())),
            "",
            "Peaks: bfloat16 without sparsity; links in Gbit/s, one way, between nodes per",
            f"GPU. Planned with {gpu.SUSTAINED}, links too,",
            "until `zbc profile` measures. Keys beside hardware.gpu count before it.",
        )
        show("", *(f"{name}: {sheet.link}; {sheet.source}" for name, sheet in gpu.GPUS.items()))


def _planned(sheet: Gpu) -> dict[str, float | str]:
    from zbc.job.gpu import values

    return {".".join(map(str, path)): value for path, value in values(sheet).items()}


def _explained(entries: Mapping[str, Explanation]) -> dict[str, Any]:
    errors = [{"code": code, "title": entry.title, "text": entry.text} for code, entry in entries.items()]
    return {"format": "zbc-explain", "version": 1, "errors": errors}
