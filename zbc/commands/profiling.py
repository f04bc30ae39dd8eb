"""`profile`: measured costs of a job's layers, as a file that `plan --profile` reads."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zbc.commands.console import indented, labelled, progress, refuse_unwritable, table, write_text
from zbc.commands.opening import is_planned
from zbc.commands.options import Device, Out, ScheduleName, Settings
from zbc.commands.summary import not_to_be_trusted
from zbc.errors import ZbcError
from zbc.text import aligned, percent, short, size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zbc.job.profile import Profile


_ANY = 1e5  # GB/s; faster than any link


def profile(
    target: Annotated[
        Path | None,
        typer.Argument(metavar="JOB.toml|RUN", help="The job to measure, or a recorded run (RUN/trace/m4: a phase)."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The profile.")] = Path("profile.json"),
    device: Annotated[Device | None, typer.Option(help="Where to measure; default: hardware.device.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Threads per rank; default: as in `zbc run --local`.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, metavar="N", help="Repetitions; more make the medians steadier.")] = 20,
    links: Annotated[
        bool, typer.Option("--links", help="Under torchrun: measure the links between all ranks, into links.toml.")
    ] = False,
    dry: Annotated[
        bool, typer.Option("--dry", help="Run nothing: bytes exact, times as estimated. Needs no device.")
    ] = False,
    schedule: ScheduleName = None,
    settings: Settings = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of a run: the costs that it does not tell; default: those of its plan."),
    ] = None,
    *,
    out: Out,
) -> None:
    """Measure the costs of a job's layers on this machine.

    One layer of each kind runs as in training; times, memory and transfers are measured. `zbc plan JOB.toml --profile
    FILE` plans with the result. Of a recorded run nothing is measured: the costs of layers come from its steps. --dry
    computes nothing: layers run on tensors without numbers, for their bytes.
    """
    how = "links" if links else "run" if target is not None and not is_planned(target) else "dry" if dry else "job"
    for option, given, read in (
        ("JOB.toml", target is not None, how != "links"),
        ("--device", device, how in ("job", "links")),
        ("--threads", threads, how == "job"),
        ("--dry", dry, how == "dry"),
        ("--schedule", schedule, how in ("job", "dry")),
        ("--set", settings, how in ("job", "dry")),
        ("--profile", profile, how == "run"),
    ):
        if given and not read:
            of = {"links": "--links", "run": f"the run {target}", "dry": "--dry", "job": "a job"}[how]
            raise typer.BadParameter(f"{of} goes without it", param_hint=option)
    if how == "links":
        return _links(output, device, rounds, out)
    if target is None:
        raise typer.BadParameter("give JOB.toml to measure, or a recorded run")
    if how == "run":
        return _derive(target, profile, output, out)
    from zbc.compiler.shapes import load_job

    loaded = load_job(target, settings or (), schedule)
    made_of = [str(target), *(f"--set={setting}" for setting in settings or ())]
    if dry:
        from zbc.compiler.cost import cards, profiled
        from zbc.compiler.cost.machine import Machine

        refuse_unwritable(output)
        estimated = profiled.timed(cards.of(loaded)[0], Machine.of(loaded))
        return _write(estimated, made_of, output, out)
    from zbc.training.launch.forking import fork_server

    fork_server()  # loads torch while this process does
    from zbc.training.profiling.session import effort, measure

    refuse_unwritable(output)
    effort_of = effort(loaded, device=device, threads=threads, rounds=rounds)
    with progress("profiling", rounds + 1, quiet=out.quiet) as done:
        measured = measure(loaded, effort_of, done)
    _write(measured, made_of, output, out)


def _links(output: Path, device: Device | None, rounds: int, out: Out) -> None:
    """Measures the table of hardware.links, which rank 0 writes. Raises E604 outside of torchrun."""
    if "RANK" not in os.environ:
        hint = "torchrun --standalone --nproc-per-node 4 -m zbc profile --links"
        raise ZbcError("E604", "profile: --links measures between ranks, and no launcher has started any", hint=hint)
    from zbc.training.profiling import link as tables

    output = Path("links.toml") if output == Path("profile.json") else output
    if os.environ["RANK"] == "0":
        refuse_unwritable(output)
    hidden = out.quiet or os.environ["RANK"] != "0"
    bar = functools.partial(progress, "measuring links", quiet=hidden)
    table = tables.measure("cpu" if device is None else device.value, rounds, bar)
    if table is None:
        return
    write_text(output, table.dumps())

    def parts() -> Iterator[RenderableType]:
        pairs = [(table.gbps[a][b], table.us[a][b]) for a in range(table.size) for b in range(a)]
        for label, values, unit in (("speed", [x for x, _ in pairs], "GB/s"), ("latency", [y for _, y in pairs], "us")):
            if values:
                yield labelled(label, f"{short(min(values), 3)} to {short(max(values), 3)} {unit}")
        yield from (labelled("links", str(output)), labelled("next", f'[hardware] links = "{output}"'))

    out.answer(lambda: {**table.plain(), "file": str(output)}, parts)


def _derive(target: Path, base: Path | None, output: Path, out: Out) -> None:
    """Writes the profile of a recorded run. Raises E43x (the trace), E142 (the base)."""
    from zbc.compiler.recorded.derive import derive
    from zbc.compiler.recorded.replan import refuse_misfit
    from zbc.job import profile as profiles
    from zbc.trace import recording as trace

    run, phase = trace.located(target)
    recorded = trace.read(run, phase)
    prior = None if base is None else profiles.read(base)
    if prior is not None:
        refuse_misfit(recorded.plan.manifest, prior, str(base))
    derived = derive(recorded, prior)
    made_of = [str(run / trace.FOLDER / trace.PLAN)]
    _write(derived.profile, made_of, output, out, derived.notes)


def _write(found: Profile, job: Sequence[str], output: Path, out: Out, notes: Sequence[str] = ()) -> None:
    write_text(output, found.dumps())
    following = shlex.join(["zbc", "plan", *job, "--profile", str(output)])
    told = [labelled("not told", *notes)] if notes else []
    out.answer(
        lambda: {**found.plain(), "file": str(output), "notes": list(notes)},
        lambda: (*summary(found), *told, labelled("profile", str(output)), labelled("next", following)),
    )


def summary(found: Profile) -> Iterator[RenderableType]:
    on = found.on
    how = [f"{on.name or on.device}" + (f", torch {on.torch}" if on.torch else "")]
    if on.source == "trace":
        how.append(f"{on.rounds} recorded step{'s' if on.rounds > 1 else ''} of {on.together} ranks")
    elif not found.timed:
        how.append("a dry run: layers ran without numbers, for their bytes")
    elif on.device == "cpu":
        ranks = f"{on.together} rank{'s' if on.together > 1 else ''} at once"
        how.append(f"{on.threads} thread{'s' if on.threads > 1 else ''} per rank, {ranks}")
    yield labelled("on", *how)
    told = "medians; spread: the widest distance of quartiles" if found.timed else "estimated, as each plan does itself"
    yield labelled("layers", f"ms per microbatch, {told}")
    yield indented(_layers(found))
    if any(layer.bytes is not None for layer in found.layers.values()):
        yield labelled("memory", "per layer: what stays, and what is kept for one microbatch")
        yield indented(_memory(found, "weights", "gradients", "masters", "optimizer"))
        yield indented(_memory(found, "kept_b", "kept_w", "output"))
    if found.timed:
        yield from _of_ranks(found)


def _of_ranks(found: Profile) -> Iterator[RenderableType]:
    """Measurements beside those of layers."""
    yield labelled("link", _link(found))
    if found.sums is not None:
        speed = f"{short(found.sums.latency_us, 3)} us and {short(found.sums.gbps, 3)} GB/s"
        yield labelled("all-reduce", f"{speed} over {found.tp} ranks that share layers; the layers' times are without")
    if found.copies is not None:
        there, back = short(found.copies.to_device_gbps, 3), short(found.copies.to_host_gbps, 3)
        yield labelled("device", f"{there} GB/s to the device, {back} back")
    if found.reserve_bytes is not None:
        yield labelled("reserve", f"{size(found.reserve_bytes)} of the device in use beside what plans predict")
    host = found.host
    rest = f"{short(host.f_us, 3)} us on F, {short(host.b_us, 3)} on B, {short(host.w_us, 3)} on W, "
    rest += f"{short(host.transfer_us, 3)} for each transfer around it"
    if host.transfer_share:
        rest += f" and {percent(host.transfer_share)} of its time"
    yield labelled("each op", rest)
    doubts = list(not_to_be_trusted(found))
    if doubts:
        yield labelled("note", *doubts)


def _layers(found: Profile) -> RenderableType:
    names = ("f", "b", "w", "bw", "again", "step", "norm")
    columns = []
    for name in names:
        times = [getattr(layer, name) for layer in found.layers.values()]
        texts = iter(aligned([time.ms for time in times if time is not None], 3))
        columns.append(["" if time is None else next(texts) for time in times])
    spreads = [
        max((time.spread for n, time in z.times() if n in ("f", "b", "w")), default=0.0) for z in found.layers.values()
    ]
    heads = ("kind", "F", "B", "W", "BW", "recompute", "step", "norm", "spread")
    return table(heads, zip(found.layers, *columns, map(percent, spreads), strict=True))


_HEADS = {"kept_b": "F to B", "kept_w": "B to W"}


def _memory(found: Profile, *names: str) -> RenderableType:
    held = {kind: layer.bytes for kind, layer in found.layers.items()}
    rows = [
        (kind, str(found.layers[kind].parameters), *(size(getattr(sizes, name)) for name in names if sizes is not None))
        for kind, sizes in held.items()
    ]
    return table(["kind", "parameters", *(_HEADS.get(name, name) for name in names)], rows)


def _link(found: Profile) -> str:
    if found.link is None:
        return "not measured: taken from [hardware]"
    speed = f"{short(found.link.gbps, 3)} GB/s" if found.link.gbps < _ANY else "as fast for any size"
    return f"{short(found.link.latency_us, 3)} us and {speed} between two ranks"
