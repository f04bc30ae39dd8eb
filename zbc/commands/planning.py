"""`plan`: compiles a job into a plan directory."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zbc.commands.console import labelled, progress, show, show_json, write_text
from zbc.commands.console import refuse_unwritable as refuse_unwritable_file
from zbc.commands.opening import Changes, say_if_compiling
from zbc.commands.options import Exact, JobFile, Out
from zbc.errors import ZbcError
from zbc.text import short

if TYPE_CHECKING:
    from zbc.compiler.compiled import Compiled
    from zbc.job.spec import Job
    from zbc.plan.directory import Manifest


_LONG = 100  # columns of a command that is named


def plan(
    job: JobFile,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The plan directory.")] = Path("plan"),
    *,
    changes: Changes,
    exact: Exact = None,
    dump_ir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write the program as each compiler pass leaves it.")
    ] = None,
    out: Out,
) -> None:
    """Compile a job into a plan directory.

    All checks run before anything is written. The directory appears complete or not at all.
    """
    from zbc.commands import summary
    from zbc.commands.options import again
    from zbc.commands.summary import of_world
    from zbc.compiler.compile import compile_job
    from zbc.compiler.whatif.others import Others, kept, others, sharing, speedup
    from zbc.exact.solve import solver
    from zbc.host.until import Until
    from zbc.plan.directory import refuse_unwritable
    from zbc.viz.words import title

    began, until, silent = time.perf_counter(), Until(changes.budget), out.silent
    with progress("choosing pp and dp", None, quiet=silent or not os.path.isfile(job)):
        loaded = changes.job(job)
    refuse_unwritable(output)  # before a search that may take long
    if dump_ir is not None:
        refuse_unwritable_file(dump_ir / "00.txt")
    if exact is not None:
        solver()
    say_if_compiling(loaded, quiet=silent)
    with progress(_activity(loaded), None, quiet=silent):
        compiled = compile_job(loaded, budget=changes.budget, exact=exact)
    told = out.json or not out.quiet
    with progress("comparing with other schedules", None, quiet=silent):
        beside = others(compiled, until) if told else Others(None, None)
        words = sharing(compiled, until) if told else None
        plain = kept(compiled, until) if told else None
    if dump_ir is not None:
        _dump(compiled, dump_ir)
    manifest = compiled.write(output)
    if out.json:
        starts = [{"steps": start.steps, **start.compiled.report.as_json()} for start in compiled.ramp]
        ramp: dict[str, Any] = {"ramp": starts} if starts else {}
        if loaded.balances:
            ramp = {"counts": [start.compiled.report.as_json() for start in compiled.ramp], "balance": _gain(manifest)}
        elif loaded.data.balance == "tokens":
            ramp = {"balance": _gain(manifest)}
        factor = speedup(beside.baseline, compiled.settled_ms)
        faster = beside.faster and {"schedule": beside.faster.schedule, "barrier_ms": beside.faster.ms}
        report = {**compiled.report.as_json(), "speedup_over_1f1b": factor, "faster": faster}
        weighed: dict[str, Any] = {"world": [row.as_json() for row in loaded.weighed]} if loaded.weighed else {}
        if compiled.job.links is not None:
            weighed["order"] = manifest.order or list(range(manifest.topology.world))
        if plain is not None:
            weighed["keep"] = {"barrier_ms": plain.ms, "peak_bytes": plain.bytes}
        if words is not None:
            weighed["vocabulary"] = {"head_blocks": words.blocks, "other": words.other, "barrier_ms": words.ms}
        show_json({**report, **ramp, **weighed, "plan": str(output), "plan_id": manifest.id})
    elif not out.quiet:
        show(f"{title(compiled.program)}, {compiled.report.ops} ops", "")
        quicker = beside.faster and again("plan", job, beside.faster.schedule, changes.settings, changes.profile)
        if quicker and len(quicker) > _LONG and beside.faster is not None:
            quicker = f"plan again with --schedule {beside.faster.schedule}"
        if loaded.weighed:
            show(*of_world(loaded.weighed))
        show(*summary.of_plan(compiled, beside, words, quicker, until, verbose=out.verbose))
        if plain is not None:
            show(labelled("recompute", *summary.recompute_lines(compiled, plain)))
        if loaded.balances:
            show(labelled("balance", *summary.balance_lines(compiled, _gain(manifest))))
        elif loaded.data.balance == "tokens" and (dealt := _gain(manifest)):
            show(labelled("balance", *summary.dealt_lines(dealt)))
        if missing := _missing(loaded):
            show(labelled("data", *missing))
        took = f"planned in {short(time.perf_counter() - began, 2)} s, engine {compiled.report.engine}"
        show(labelled("plan", f"{output}: id {manifest.id}, {took}"))
        left = ["remarks were left out for lack of time: --budget 60s"] if until.cut else []
        hint = [] if out.verbose else ["more: -v; of other schedules: " + shlex.join(["zbc", "compare", str(job)])]
        show(labelled("next", shlex.join(["zbc", "visualize", str(output)]), run_command(loaded, output), *hint, *left))


def _missing(job: Job) -> list[str]:
    """A line for each path of data that is not on this machine, which a run elsewhere may have."""
    paths = [("path", job.data.path), *(("validation", path) for path in job.data.sets.values())]
    each = [(key, path) for key, value in paths for path in ([value] if isinstance(value, str) else value or [])]
    return [f"data.{key}: {path} is not there, and a run needs it" for key, path in each if not os.path.exists(path)]


def _activity(job: Job) -> str:
    """The activity of planning, for a terminal that waits."""
    from zbc.compiler.schedules import AUTO

    kind = job.schedule.kind.lower()
    return "planning every schedule that the job allows" if kind == AUTO else f"planning {kind}".rstrip()


def _gain(manifest: Manifest) -> dict[str, Any]:
    """The gain of unequal over equal counts in the first steps, or the microbatches of them, from the lengths of the
    samples; {} if the data cannot be read here."""
    from zbc.training.data.unequal import dealt

    try:
        return dealt(manifest)
    except ZbcError as error:
        if error.code in ("E110", "E504"):
            raise
        return {}


def run_command(job: Job, output: Path) -> str:
    ranks, named = job.parallel.ranks, shlex.quote(str(output))
    if job.hardware.device == "cuda":
        return f"torchrun --standalone --nproc-per-node {ranks} -m zbc run {named}"
    return f"zbc run {named} --local {ranks}"


def _dump(compiled: Compiled, folder: Path) -> None:
    """One file per state of the program: `00-zb-v.txt`, `01-insert-comm.txt`, ..."""
    for number, (name, program) in enumerate(compiled.found.lowering.states(compiled.found.compute)):
        lines = []
        for rank, ops in enumerate(program.ranks):
            lines += [f"rank {rank}", *(f"  {program.placement.text(op)}" for op in ops)]
        safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)
        write_text(folder / f"{number:02d}-{safe}.txt", "\n".join(lines) + "\n")
