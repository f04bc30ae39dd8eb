"""One rank of a run from its first connection to its last step, however its process was started."""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from zbc import excludes
from zbc.errors import EXIT_BUG, ZbcError
from zbc.job.userobject import IN_A_RANK
from zbc.plan.directory import Manifest, read_manifest, read_ramp, read_rank
from zbc.runtime.core import exhausted
from zbc.runtime.core.answers import primary
from zbc.runtime.core.execute import Step, StepResult, finish, run_step
from zbc.runtime.core.progress import EvaluationResult
from zbc.runtime.core.state import Worker
from zbc.runtime.features.units import Braids
from zbc.runtime.features.versions import OneVersion
from zbc.runtime.features.vocabulary_state import Vocabulary
from zbc.runtime.transports.transport import Transport
from zbc.training import devices, frames
from zbc.training.building.context import Settings
from zbc.training.checkpoint import resume
from zbc.training.checkpoint.loading import load
from zbc.training.checkpoint.saving import Checkpoints
from zbc.training.checkpoint.together import try_out
from zbc.training.data.data import KINDS
from zbc.training.data.unequal import Dealer
from zbc.training.evaluate import due, evaluate
from zbc.training.filling import install
from zbc.training.launch.board import Board, Connect
from zbc.training.launch.identity import identity
from zbc.training.launch.options import RunOptions
from zbc.training.launch.peers import SHARED, connected
from zbc.training.launch.reach import Doorstep, check_reach
from zbc.training.metrics.metrics import RunRecord, RunSettings
from zbc.training.models import hfexport
from zbc.training.models.model import TIED
from zbc.training.nonfinite import Skips
from zbc.training.probing.shapes import Shapes
from zbc.training.recording.tracing import Tracers, open_tracers
from zbc.training.warm import warm
from zbc.training.watchdog import Watchdog, in_time
from zbc.training.worker import build_worker

_SETTLE_S = 5.0  # for a rank that fails to write down what it has recorded


class RankFailed(Exception):
    """An exception that zbc did not foresee, with its traceback as text: it comes from another process."""

    exit_code = EXIT_BUG

    def render(self) -> str:
        return str(self)


Failure = ZbcError | RankFailed


def end(code: int) -> NoReturn:
    """End this process now: an orderly exit could wait for transfers that never end."""
    for stream in (sys.stdout, sys.stderr):  # what layers of the user printed
        with suppress(OSError, AttributeError):  # to a full disk, a terminal that is gone, nowhere (None)
            stream.flush()
    os._exit(code)


@dataclass
class StopFlag:
    """Why this process was asked to stop; the rank looks at it between steps, once it is `training`."""

    reason: str | None = None
    training: bool = False


@dataclass(frozen=True)
class Building:
    """Ranks as threads build their layers one after the other, and look at those of the model once for all."""

    turn: threading.Lock = field(default_factory=threading.Lock)
    looks: dict[int | None, Shapes] = field(default_factory=dict)


@dataclass(frozen=True)
class RankContext:
    """A rank's place in the run, made by what started its process."""

    rank: int
    ranks: int
    device: torch.device
    connect: Connect
    emit: Callable[[str], None]  # takes the lines rank 0 shows
    report: Callable[[Failure], NoReturn]  # shows why the run ends, and ends this process
    leave: Callable[[int], NoReturn]  # ends this process with that code, in silence: another rank reports
    stop: StopFlag = field(default_factory=StopFlag)
    doorstep: Doorstep | None = None  # where other machines find this rank; None if there are none, or nobody knows
    live: Callable[[str], None] | None = None  # takes how far the run is, after every step of rank 0
    transport: Transport | None = None  # to the other ranks; None: the network, which this rank is yet to join
    building: Building = field(default_factory=Building)  # one for all ranks of this process

    def board(self) -> Board:
        return Board(self.connect(), self.rank, self.ranks)


def run_rank(folder: Path, context: RankContext, options: RunOptions) -> str | None:
    """Train; returns why the run was stopped before its last step, None if it was not.

    What goes wrong ends the process through `context`, never with an exception.
    """
    watchdog: Watchdog | None = None
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__, all_threads=False)  # a crash in native code shows what called it
    exhausted.keep_room()
    try:
        manifest = read_manifest(folder)
        watchdog = Watchdog(
            context.board,
            rank=context.rank,
            ranks=context.ranks,
            name=manifest.topology.name,
            limit=float(manifest.training["train"]["watchdog_s"]),
            hung=context.report,
            orphaned=context.leave,
        )
        watchdog.start()
        return _run(folder, manifest, context, watchdog, options)
    except IN_A_RANK as error:
        _give_up(error, context, watchdog)
    finally:
        if watchdog is not None:
            watchdog.stop()


def _run(folder: Path, manifest: Manifest, context: RankContext, watchdog: Watchdog, options: RunOptions) -> str | None:
    steps = int(manifest.training["train"]["steps"]) if options.steps is None else options.steps
    if options.trace and manifest.balance is not None:
        raise excludes.refused("balance", "trace", "run")
    if options.trace and manifest.flushless:
        raise excludes.refused(excludes.FLUSHLESS[manifest.training["optimizer"]["sync"]], "trace", "run")
    # The watchdog is to find what hangs; these limits only keep a rank whose watchdog is dead from staying forever.
    limit = timedelta(seconds=600 + 4 * watchdog.limit)
    board = context.board()
    watchdog.phase("waiting for all ranks to start", waiting=True)
    board.agree(identity(manifest, steps, options.trace), limit, manifest.topology.name)
    processes = board.meet("process", limit, f"{socket.gethostname()}:{os.getpid()}")
    plan = read_rank(folder, manifest.topology.of(context.rank).pp, manifest)
    ramp = [read_rank(below, plan.rank, its) for below, its in read_ramp(folder, manifest)]
    watchdog.phase("connecting to its peers", waiting=True)
    if context.doorstep is not None:
        check_reach(board, context.doorstep, limit, manifest.topology.name)
    transport = context.transport
    if transport is None:
        transport, shared = connected(manifest, context.device, board, context.connect, limit)
        if shared and context.rank == 0:
            context.emit(SHARED)
    watchdog.phase("waiting to build its stages", waiting=True)
    with context.building.turn:
        watchdog.phase("building its stages")
        looks = context.building.looks
        worker = build_worker(plan, transport, context.device, ramp, tell=watchdog.phase, looks=looks)
    watchdog.phase("waiting for all ranks to build their stages", waiting=True)
    board.meet("built", limit)
    for text in worker.warnings if worker.replica == worker.share == 0 else ():
        context.emit(text)
    if context.device.type == "cuda":
        watchdog.phase("using every kernel and group once", waiting=True)
        warm(worker)
    filling = install(worker, context.emit)
    context.stop.training = True
    who = f"{processes[0]}, plan {manifest.id}, in {Path.cwd()}"
    with resume.begun(board, options, manifest, folder, who) as start:
        first = _load(worker, board, context, start, watchdog)
        resumed = None if start.checkpoint is None else str(start.checkpoint)
        phases, launch = worker.phases, options.launch
        tokens = worker.work.tokens if isinstance(worker.work, Dealer) else None
        settings = RunSettings(folder, steps, context.device.type, processes, phases, launch, first, resumed, tokens)
        with RunRecord(manifest, settings, options.out, go_on=start.run) if context.rank == 0 else nullcontext() as log:
            tracer = None
            if options.trace:
                watchdog.phase("opening its trace", waiting=True)
                run = None if log is None else log.folder
                tracer = open_tracers(worker, board, options.trace, range(first, steps), limit, run, folder)
            checkpoints = _checkpoints(worker, board, context, log, limit, first)
            watchdog.watch(worker.progress)
            with nullcontext() if tracer is None else _recorded(tracer):
                stopped = _train(worker, board, context, range(first, steps), log, tracer, checkpoints, limit)
    if filling is not None:
        worker.transport = filling.inner
    if worker.plan.manifest.training.get("filler", {}).get("task"):
        told = board.meet(
            "filled", limit, "" if filling is None else f"{manifest.topology.name(context.rank)}: {filling.found}"
        )
        if context.rank == 0:
            context.emit("filler  " + "\n        ".join(filter(None, told)))
    if worker.phase_run.ending.every:
        _tell_late(worker, board, context, limit)
    if options.save_hf is not None:
        watchdog.phase("writing its weights")
        _save(worker, board, context, options.save_hf, limit)
    watchdog.phase("ending")
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)  # groups end only when nothing is on its way in them
        memory = board.meet("memory", limit, devices.in_use(context.device))
        if context.rank == 0:
            context.emit(devices.fullest(memory, manifest.topology.name))
    board.meet("ended", limit)
    watchdog.nearly_done()
    worker.close()
    if context.transport is None:
        dist.destroy_process_group()
    return stopped


@contextmanager
def _recorded(tracer: Tracers) -> Iterator[None]:
    """What was recorded is written down when this block is over, whether it fails or not; a disk may refuse to."""
    try:
        yield
        tracer.end()
    except BaseException:
        in_time(tracer.settle, _SETTLE_S)
        raise


def _load(worker: Worker, board: Board, context: RankContext, start: resume.Start, watchdog: Watchdog) -> int:
    """Load the checkpoint to go on from, if there is one: the steps it has."""
    if start.checkpoint is None:
        return 0
    # As long as something is read this is no stand-still, however long it takes.
    alive = functools.partial(watchdog.phase, "loading the checkpoint")
    return load(worker, board, start.checkpoint, alive=alive, tell=context.emit)


def _checkpoints(
    worker: Worker, board: Board, context: RankContext, log: RunRecord | None, limit: timedelta, first: int
) -> Checkpoints:
    """This rank's part in the checkpoints of the run, which begins with step `first`."""
    manifest = worker.plan.manifest
    options = Settings.of(manifest).checkpoint
    if not options.every:
        return Checkpoints(worker, board, options, Path(), last=first)
    run = Path(board.meet("run directory", limit, "" if log is None else str(log.folder.absolute()))[0])
    folder = resume.save_folder(manifest, run)
    try_out(board, folder)
    return Checkpoints(worker, context.board(), options, folder, str(run), context.emit, first)


def _train(
    worker: Worker,
    board: Board,
    context: RankContext,
    steps: range,
    log: RunRecord | None,
    tracer: Tracers | None,
    checkpoints: Checkpoints,
    limit: timedelta,
) -> str | None:
    if log is not None:
        context.emit(log.headline())
        if in_turn := worker.features.of(Braids).in_turn:
            context.emit(f"groups (OVERLAP) run one op after the other: {'; '.join(in_turn)}")
        if not steps:
            context.emit(f"nothing is left to train: the checkpoint has {steps.start} steps, the run {steps.stop}")
    run = run_step if tracer is None else tracer.step
    told, skips = False, Skips(worker.plan.manifest)

    def show(result: StepResult | None) -> None:
        _show(result, context, log)
        try:
            skips.look(result)
        except ZbcError:
            try:
                checkpoints.wait()  # all ranks end here, so what is being written may become whole
            finally:
                progress = worker.progress
                progress.op, progress.waiting, progress.since = "waiting for all ranks to end", True, time.monotonic()
                board.meet("refused", limit)  # the first that fails ends all, and rank 0 has this step to write down
            raise

    def asked() -> bool:
        nonlocal told
        if context.stop.reason is not None and not told:
            board.ask_stop(context.stop.reason)
            told = True
        return told

    def evaluated(found: EvaluationResult) -> None:
        if log is not None:
            context.emit(log.record_evaluation(found))

    stopped = train_steps(worker, steps, checkpoints, run=run, show=show, evaluated=evaluated, asked=asked)
    if stopped is None:
        return None
    reason = board.stop_reason() or "another rank"
    if log is not None:
        context.emit(f"stopped after step {stopped} (asked by {reason})")
    return reason


def train_steps(
    worker: Worker,
    steps: range,
    checkpoints: Checkpoints,
    *,
    run: Step,
    show: Callable[[StepResult | None], None],
    evaluated: Callable[[EvaluationResult], None] = lambda found: None,
    asked: Callable[[], bool] = lambda: False,
) -> int | None:
    """Train, evaluate and save as the plan says; after which step the run was stopped, None if that was the last.

    `show` takes each result as it comes, `evaluated` each evaluation; `asked` says whether this rank wants to stop.
    """
    stopped, stopping = None, False
    agree_on_samples(worker)
    for feature in worker.features:
        feature.begins(worker)
    for step in steps:
        last = step + 1 == steps.stop
        worker.ends = last or stopping or due(worker, step, last=last) or checkpoints.due(step, last=last)
        result = run(worker, step, stop=True) if asked() else run(worker, step)
        show(result)
        stopping = (stopping or (result is not None and result.stop)) and not last
        if stopping and worker.phase_run.ending.follows(worker):
            continue  # forwards of the next step have run, so it is the last one
        evaluating, saving = due(worker, step, last=last), checkpoints.due(step, last=last, stopping=stopping)
        if evaluating or saving or stopping:
            show(finish(worker))
        if evaluating:
            evaluated(evaluate(worker, step))
        if saving:
            for feature in worker.features:
                feature.saves(worker)
            checkpoints.save(step)
        if stopping:
            stopped = step + 1
            break
        checkpoints.check()
    show(finish(worker))
    checkpoints.wait()
    return stopped


def agree_on_samples(worker: Worker) -> None:
    """Raise E117 where ranks that deal samples to replicas do not know the same, E516 where those that read do not."""
    dealt, source = isinstance(worker.work, Dealer), worker.batches
    if not dealt and worker.plan.manifest.training["data"]["kind"] in KINDS:
        return
    own = worker.work.digest if isinstance(worker.work, Dealer) else None if source is None else source.digest()
    told = torch.tensor([float(own or 0), own is not None], dtype=torch.float64, device=worker.device)
    worker.all_reduce(told, worker.everyone)
    total, readers = told.tolist()
    if own is not None and total != own * readers:
        text = f"data: rank {worker.rank} finds other samples than other ranks, or of other lengths"
        raise ZbcError("E117" if dealt else "E516", text, hint="let all ranks read the same data")


def _show(result: StepResult | None, context: RankContext, log: RunRecord | None) -> None:
    """Write a step down and on the console, once it is known."""
    if log is None or result is None:
        return
    line = log.record(result)
    if line is not None:
        context.emit(line)
    elif context.live is not None:
        context.live(log.live(result))


def _tell_late(worker: Worker, board: Board, context: RankContext, limit: timedelta) -> None:
    """Say how many steps of its own each stage made between a forward and its backward, as it was counted."""
    found = {s: one.stalest for s, one in worker.optimizers.items() if isinstance(one, OneVersion)}
    told = board.meet("late", limit, json.dumps(found))
    late = {int(s): count for words in told for s, count in json.loads(words).items()}
    if context.rank == 0:
        context.emit("steps late, by stage: " + " ".join(str(late[s]) for s in sorted(late)))


def _save(worker: Worker, board: Board, context: RankContext, folder: Path, limit: timedelta) -> None:
    """Every rank writes the weights it answers for; the first completes the folder when all have."""
    settings = Settings.of(worker.plan.manifest)
    model, source = settings.model, hfexport.begun_with(settings.pretrained)
    holders, replicas = worker.placement, range(worker.plan.manifest.ep or 1)
    writers = sorted({worker.topology.rank(r, holders.rank_of(s)) for s in range(holders.stages) for r in replicas})
    for feature in worker.features:
        feature.gathers(worker)
    parameters = _uncut(worker)
    said = ""
    if parameters:
        tensors = hfexport.tensors_of(model, parameters, source)
        said = hfexport.write_shard(folder, writers.index(context.rank), len(writers), tensors)
    shards = board.meet("saved", limit, said)
    if context.rank == 0:
        for line in hfexport.write_index(folder, model, shards, source):
            context.emit(line)
        if settings.pretrained is not None and source is None:
            context.emit(f"{settings.pretrained} is not there any more: config.json is made from the plan")
        context.emit(f"wrote the weights to {folder}")


def _uncut(worker: Worker) -> dict[str, nn.Parameter]:
    """The weights that are written down from this rank, whole: of ranks that share layers from the first of them, of a
    vocabulary that all share from those that would have it else."""
    found = primary(worker)
    shared = worker.features.find(Vocabulary)
    if shared is not None and worker.replica == 0:
        for name in sorted(shared.optimizer.parameters):
            table = shared.whole(name, worker.transport)
            if worker.rank == (shared.first if name == TIED else shared.last):
                found[name] = nn.Parameter(table)
    if worker.group is None:
        return found
    cuts, group = worker.cuts, worker.group
    whole = {
        name: nn.Parameter(cuts[name].collect(p.data, group), p.requires_grad) if name in cuts else p
        for name, p in found.items()
    }
    return {} if worker.share else whole


# ---- when it fails -------------------------------------------------------------------------------------------


def _give_up(error: BaseException, context: RankContext, watchdog: Watchdog | None) -> NoReturn:
    """End the process: the first rank that fails reports why, all others follow in silence."""
    if watchdog is not None:
        watchdog.stand_down()
    failure = explain(error, context.rank)
    claimed = in_time(lambda: context.board().claim(), 5.0)
    if claimed is False:
        reported = None if watchdog is None else watchdog.await_report()
        context.leave(failure.exit_code if reported is None else reported)
    if isinstance(failure, ZbcError) and failure.code == "E702" and watchdog is not None:
        gone = watchdog.await_silence()
        rows, _ = watchdog.rows()
        failure = _with_details(failure, [rows[rank] for rank in gone])
    context.report(failure)


def explain(error: BaseException, rank: int) -> Failure:
    """The error as a user sees it; an op's exception names rank, op and step, and shows the user's own frames."""
    notes = [*reversed(getattr(error, "__notes__", []))]  # the op, then where in it
    if isinstance(error, ZbcError):
        return _with_details(error, notes)
    if not any(note.startswith("while rank") for note in notes):
        return RankFailed(f"rank {rank} failed\n" + "".join(traceback.format_exception(error)))
    shown = f"{type(error).__name__}: {error}".removesuffix(": ").splitlines()
    if exhausted.ran_out(error):
        wanted = exhausted.asked(error)
        text = f"run: rank {rank} is out of memory" + (f": it asked for {wanted}" if wanted else "")
        hint = "a smaller microbatch_size, or a schedule that keeps fewer activations: `zbc compare` lists their peaks"
        details = [*notes, *shown, *frames.of_error(error)]
        return ZbcError("E703", text, hint=hint, details=details)
    details = [*shown[1:], *notes, *frames.of_error(error)]
    return ZbcError("E703", f"run: rank {rank} failed: {shown[0]}", details=details)


def _with_details(error: ZbcError, more: list[str]) -> ZbcError:
    if not more:
        return error
    return ZbcError(error.code, error.message, where=error.where, hint=error.hint, details=[*error.details, *more])
