"""`advise`: the best ways to train a model on a number of GPUs; and the first job of a Hugging Face folder, `init`."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zbc.commands.advice import count
from zbc.commands.console import labelled, progress, refuse_unwritable, show, table, tell, write_text
from zbc.commands.jobs import template_text, toml_value
from zbc.commands.options import Out
from zbc.commands.summary import throughput_lines
from zbc.errors import ZbcError
from zbc.job import gpu as gpus_known
from zbc.job import hfconfig, hfmodel, spec, toml
from zbc.job.model_section import TRANSFORMERS
from zbc.text import GIB, aligned, percent, size, unit_of, wrap

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zbc.compiler.whatif.advise import Advice, Row, State


TOKENS = 4 * 2**20  # of a step, by default
LONGEST = 8192  # tokens of a sequence, by default, if the model takes more
_KEPT = ("model", "hardware", "optimizer", "train", "data", "checkpoint", "log")  # tables taken from a job
_ORDER = ("model", "parallel", "partition", "schedule", "hardware", "memory", "optimizer", "train", "data")


def _samples(text: str, length: Any) -> int:
    """The number of sequences in `512`, or in `4M` tokens."""
    if text.isdecimal():
        return max(1, int(text))
    return max(1, count(text) // (length if isinstance(length, int) else LONGEST))


def advised(
    model: Path,
    gpus: int | None,
    gpu: str | None,
    batch: str | None,
    seq_len: int | None,
    settings: Sequence[str],
    output: Path | None,
    row: int,
    out: Out,
) -> None:
    from zbc.compiler.whatif import advise as core

    source = _document(model, gpus, gpu, batch, seq_len, settings or ())
    if output is not None:
        refuse_unwritable(output)
    state = core.state_of(source)
    if not out.silent:
        show(*_fits(source, state))
    with progress("planning", 100, quiet=out.silent) as advance:
        advice = core.advise(source, _counter(advance), (lambda row: None) if out.silent else _so_far)
    if output is not None and row > len(advice.rows):
        raise ZbcError(
            "E109", f"advise: there are {len(advice.rows)} rows, not {row}", hint="choose one of them: --row 1"
        )
    written: dict[str, Any] = {} if output is None else {"job": str(output), "row": row}
    out.answer(lambda: {**as_json(advice), **written}, lambda: ("", *of_advice(advice, verbose=out.verbose), ""))
    if output is None:
        named = shlex.join(["zbc", "advise", str(model), *_again(gpus, gpu, batch, seq_len, settings or ())])
        if not out.silent:
            show(labelled("next", f"{named} -o job.toml", "writes the job of row 1; --row 2 that of another"))
    else:
        write_text(output, job_text(advice, row, model))
        if not out.silent:
            job = shlex.quote(str(output))
            show(f"wrote {output}, row {row}", labelled("next", f"zbc plan {job}", f"zbc compare {job}"))


def _so_far(row: Row) -> None:
    tell(f"so far: {row.shape}, {row.compiled.schedule}, {'; '.join(throughput_lines(row.compiled.report.rates))}")


def parameters_of(folder: Path) -> int:
    """The number of parameters of a Hugging Face model. Raises E520, E521."""
    from zbc.compiler.whatif.advise import state_of

    return state_of(opened(of_folder(folder), toml.Document(str(folder), {}), 1, None)).parameters


def _again(
    gpus: int | None, gpu: str | None, batch: str | None, seq_len: int | None, more: Sequence[str]
) -> Iterator[str]:
    given = (("--gpus", gpus), ("--gpu", gpu), ("--batch", batch), ("--seq-len", seq_len))
    for name, value in given:
        yield from () if value is None else (name, str(value))
    for setting in more:
        yield from ("--set", setting)


def _counter(more: Callable[..., None]) -> Callable[[str, float], None]:
    """A callback that shows the stages of `advise` as one bar: estimates, then plans, then whole plans."""
    from zbc.compiler.whatif.advise import COMPARING, FINISHING, LOOKING, PLANNING

    parts = {LOOKING: (0.0, 0.3), PLANNING: (0.3, 0.3), FINISHING: (0.6, 0.1), COMPARING: (0.7, 0.3)}
    at = 0.0

    def done(text: str, share: float) -> None:
        nonlocal at
        start, length = parts[text]
        now = 100 * (start + length * min(1.0, share))
        more(max(0.0, now - at))
        at = max(at, now)

    return done


# ---- the request -----------------------------------------------------------------------------------------------------


def _document(
    path: Path, gpus: int | None, name: str | None, batch: str | None, seq_len: int | None, settings: Sequence[str]
) -> toml.Document:
    """A job of this model, with all choices of `advise` left open. Raises E1xx and E52x."""
    if name is not None:
        gpus_known.named(name, key="--gpu")
    path = path / "zbc.toml" if not isfile(path / hfconfig.CONFIG) and isfile(path / "zbc.toml") else path
    if path.suffix == ".toml":
        given = spec.gathered(path, settings)
        tables = {key: value for key, value in given.values.items() if key in _KEPT}
        ranks, samples = _size_of(given)
        places = given
    else:
        tables, ranks, samples = of_folder(path), None, None
        places = toml.Document(str(path), {})
    gpus, hardware = gpus or ranks, {**tables.get("hardware", {})}
    if gpus is None or (name is None and hardware.get("device", "cpu") == "cpu" and "gpu" not in hardware):
        missing = " and ".join(key for key, there in (("--gpus", gpus), ("--gpu", name)) if there is None)
        hint = "write --gpus 64 --gpu h100-sxm; `zbc explain gpu` lists those there are"
        raise ZbcError("E105", f"advise: {missing} missing: how many GPUs there are, and which", hint=hint)
    if name is not None:
        hardware = {"gpu": name, **{key: hardware[key] for key in ("ranks_per_node",) if key in hardware}}
    model = {**tables.get("model", {}), **({} if seq_len is None else {"seq_len": seq_len})}
    samples = samples if batch is None else _samples(batch, model.get("seq_len"))
    document = opened({**tables, "model": model, "hardware": hardware}, places, gpus, samples)
    for setting in settings if path.suffix != ".toml" else ():
        document = toml.merge(document, spec.override(setting, document.source))
    return document


def opened(tables: Mapping[str, Any], places: toml.Document, gpus: int, batch: int | None) -> toml.Document:
    """A job of these tables on `gpus` GPUs, with steps of `batch` sequences or about TOKENS, and all else left open."""
    model = tables.get("model", {})
    length = model.get("seq_len") if isinstance(model.get("seq_len"), int) else LONGEST
    size = max(1, LONGEST // 2 // (length or 1))
    batch = batch or max(1, round(TOKENS / (length or 1) / size / gpus)) * gpus * size
    parallel = {"world": gpus, "tp": "auto", "tp_sequence": model.get("family") != TRANSFORMERS}
    parallel |= {"ep": "auto"} if model.get("experts") else {}
    parallel |= {"cp": "auto"} if (length or 1) > LONGEST else {}
    schedule = {"batch": batch, "microbatch_size": math.gcd(min(size, max(1, batch // gpus)), batch)}
    values = {**tables, "parallel": parallel, "schedule": schedule, "memory": {"activations": "auto"}}
    return toml.Document(places.source, values, {}, places.places)


def _size_of(given: toml.Document) -> tuple[int | None, int | None]:
    """The ranks and the samples of a step, if a job gives them as numbers."""
    parallel, schedule = (given.values.get(name, {}) for name in ("parallel", "schedule"))
    if not isinstance(parallel, Mapping) or not isinstance(schedule, Mapping):
        return None, None

    def number(of: Mapping[str, Any], key: str, default: int = 1) -> int:
        value = of.get(key, default)
        return value if type(value) is int and value > 0 else default

    ranks = number(parallel, "world", math.prod(number(parallel, axis) for axis in ("pp", "dp", "cp", "tp")))
    samples = number(schedule, "microbatches") * number(schedule, "microbatch_size") * number(parallel, "dp")
    return ranks, number(schedule, "batch", samples if "microbatches" in schedule else 0) or None


def of_folder(path: Path) -> dict[str, Any]:
    """The tables of a job for a Hugging Face model. Raises E520, E521, E602."""
    if not os.path.lexists(path):  # False also without the right to look
        hint = "name a JOB.toml or a folder with a config.json: hf download NAME config.json --local-dir DIR"
        raise ZbcError("E520", f"model: {path} is not there", hint=hint)
    values = {**hfmodel.described(path, LONGEST)[0], "dtype": "bfloat16", "parameters": "bfloat16"}
    optimizer = {"kind": "adamw", "lr": 2e-5 if "pretrained" in values else 3e-4, "clip_grad_norm": 1.0}
    return {"model": values, "optimizer": optimizer, "train": {"steps": 1000}, "data": {"kind": data_for(values)}}


# ---- the answer ------------------------------------------------------------------------------------------------------


def _fits(document: toml.Document, state: State) -> Iterator[RenderableType]:
    values = document.values
    mean = state.bytes / (state.parameters or 1)
    named = values["hardware"].get("gpu") or "GPUs"
    room = "" if state.room is None else f", of {size(state.room)}"
    text = f"{state.size} parameters, {mean:.3g} bytes each: {size(state.bytes)} of weights, gradients and optimizer; "
    text += f"{size(state.share)} on each of {state.gpus} {named} if all is shared out{room}"
    lines = wrap(text.split(" "), 68, between=" ")
    yield labelled("fits", *lines)
    planned, length = values["schedule"], values["model"].get("seq_len")
    work = f"{planned['batch']} sequences of {length} tokens, {planned['microbatch_size']} in a microbatch"
    yield labelled("step", f"{work}; --batch, --seq-len")


def of_advice(found: Advice, *, verbose: bool) -> Iterator[RenderableType]:
    """The table, the deciding factors, and the meaning of the columns."""
    from zbc.compiler.whatif.advise import decides

    rows = found.rows
    axes = [axis for axis in ("pp", "dp", "cp", "tp", "ep") if any(getattr(row.shape, axis) > 1 for row in rows)]
    unit, scale = unit_of(max(row.compiled.report.peak_bytes for row in rows))
    heads = ["", *axes, "schedule", "shards", "recompute", "tokens/s", "MFU", unit, "idle"]
    memory = aligned([row.compiled.report.peak_bytes / scale for row in rows], 3)
    cells = []
    for number, (row, most) in enumerate(zip(rows, memory, strict=True), 1):
        rates = row.compiled.report.rates
        tokens = "?" if rates.tokens_per_s is None else f"{rates.tokens_per_s:,.0f}"
        mfu = "?" if rates.mfu is None else percent(rates.mfu)
        idle = percent(row.compiled.report.idle_rate)
        shape = [str(getattr(row.shape, axis)) for axis in axes]
        shard = {"optimizer": "ZeRO-1", "all": "FSDP"}.get(row.job.parallel.shard, "-")
        cells.append([str(number), *shape, row.compiled.schedule, shard, _again_of(row), tokens, mfu, most, idle])
    yield table(heads, cells, left=len(axes) + 4)
    yield ""
    yield labelled("decides", *wrap(decides(rows).split(" "), 68, between=" "))
    yield ""
    yield from wrap("; ".join(_LEGEND).split(" "), 78, between=" ")
    yield f"of {found.shapes} shapes the best {found.planned} were planned; predictions, not measurements"
    if verbose:
        for number, row in enumerate(rows, 1):
            planned, blocks = row.job.schedule, row.blocks
            work = f"{planned.microbatches} microbatches of {planned.microbatch_size}"
            yield f"{number}: step {row.compiled.settled_ms:,.0f} ms, {work}, blocks of the stages {blocks}"


_LEGEND = [
    "shards: what replicas share out, optimizer (ZeRO-1) or weights and gradients too (FSDP)",
    "recompute: stages that run forward twice, or of it what is cheap (selective)",
    "memory: of the fullest GPU",
    "idle: of the step, mean over GPUs",
]


def _again_of(row: Row) -> str:
    some, stages = row.recompute
    if row.selective:
        return "selective" if not some else f"{some}, sel. {row.selective}"
    return "none" if not some else "all" if some == stages else f"{some} of {stages}"


def as_json(found: Advice) -> dict[str, Any]:
    from zbc.compiler.whatif.advise import decides, spent

    rows = []
    for row in found.rows:
        report = row.compiled.report
        shape = {axis: getattr(row.shape, axis) for axis in ("pp", "dp", "cp", "tp", "ep", "microbatches")}
        some, stages = row.recompute
        rows.append(
            {
                **shape,
                "schedule": row.compiled.schedule,
                "shard": row.job.parallel.shard,
                "recompute": some,
                "selective": row.selective,
                "stages": stages,
                "layers_per_stage": row.blocks,
                "step_ms": row.compiled.settled_ms,
                **report.rates._asdict(),
                "peak_bytes": report.peak_bytes,
                "idle_rate": report.idle_rate,
                "gpu_ms_per_sample": spent(row),
            }
        )
    state = found.state
    return {
        "format": "zbc-advice",
        "version": 1,
        "parameters": state.parameters,
        "state_bytes": state.bytes,
        "room_bytes": state.room,
        "gpus": state.gpus,
        "rows": rows,
        "decides": decides(found.rows),
        "shapes": found.shapes,
        "planned": found.planned,
    }


def job_text(found: Advice, number: int, source: Path) -> str:
    """The text of the job of a row; its plan decides the layers of stages and their recompute."""
    row = found.rows[number - 1]
    rates, gib = row.compiled.report.rates, row.compiled.report.peak_bytes / GIB
    took = f"{row.compiled.settled_ms:,.0f} ms a step" + (f", MFU {percent(rates.mfu)}" if rates.mfu else "")
    lines = [
        f"# Made by zbc advise from {source}, row {number}: {row.shape}.",
        f"# Predicted: {took}, {gib:.1f} GiB on the fullest GPU.",
    ]
    values = row.document.values
    for name in (*_ORDER, *(name for name in values if name not in (*_ORDER, "zbc"))):
        if values.get(name):
            keys = [*spec.SECTIONS[name].model_fields]
            given = hfmodel.written(values[name]) if name == "model" else values[name]
            table = sorted(given.items(), key=lambda entry: keys.index(entry[0]))
            lines += ["", f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in table)]
    return "\n".join(lines) + "\n"


# ---- `zbc init --from-hf` -----------------------------------------------------------------------------------------


_SMALL = 2e9  # most parameters of a model that is tried on a CPU
_LONGEST = 2048  # tokens per sequence to begin with; the longest of a model can be far more than fits


def text_for(folder: Path) -> str:
    """The text of a zbc.toml that starts from the weights of `folder`, on this machine's CPU. Raises E520, E521, and
    E105 for a model too large for a CPU."""
    if (size := parameters_of(folder)) > _SMALL:
        text = f"init: a model of {size / 1e9:.3g}B parameters is for GPUs, and init writes jobs for this machine"
        raise ZbcError("E105", text, hint=f"zbc advise {folder} --gpus 64 --gpu h100-sxm -o zbc.toml")
    values, longest = hfmodel.described(folder, _LONGEST)
    values = {**values, "pretrained": str(folder)} if "config" not in values else values
    lines = [
        f"# Made from {folder / hfconfig.CONFIG}; weights are read when the plan runs.",
        "#   zbc plan zbc.toml  &&  zbc run plan --local 2 --save-hf trained",
        "",
        "[model]                       # what is split into stages",
        *_model_lines(hfmodel.written(values), longest),
    ]
    rest = template_text("from-hf").replace("FOLDER", str(folder))
    if data_for(values) == "synthetic":
        synthetic = 'kind = "synthetic"            # shows that all works. To train, take your own tokens:'
        rest = re.sub('kind = "text" .*', synthetic, rest)
    if values["layers"] < 4:
        rest = rest.replace("pp = 2 ", "pp = 1 ").replace("microbatches = 8 ", "microbatches = 4 ")
    return "\n".join([*lines, "", rest])


def data_for(model: Mapping[str, Any]) -> str:
    """The kind of data that any machine has: text, or for fewer words than bytes synthetic tokens."""
    return "text" if model["vocab"] >= 256 else "synthetic"


def _model_lines(values: dict[str, Any], longest: int) -> Iterator[str]:
    for key, value in values.items():
        line = f"{key} = {json.dumps(value, ensure_ascii=False)}"
        yield f"{line:<29} # to train with; the model takes {longest}" if key == "seq_len" else line
