"""One rank of a run from its first connection to its last step, under any launcher."""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import shlex
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbc import excludes
from zbc.errors import EXIT_BUG, ZbcError
from zbc.job import adapterfolder, hffolder
from zbc.job.userobject import IN_A_RANK
from zbc.ops import WORDS
from zbc.plan.directory import Manifest, RankPlan, read_manifest, read_ramp, read_rank
from zbc.runtime.core import exhausted
from zbc.runtime.core.execute import Step, StepResult, finish, run_step
from zbc.runtime.core.feature import Pause
from zbc.runtime.core.optimizer import primary
from zbc.runtime.core.state import Worker
from zbc.runtime.features.filler import Filling, install
from zbc.runtime.features.groups.units import Braids
from zbc.runtime.features.tensor_parallel import SharedLayers
from zbc.runtime.features.unflushed.versions import OneVersion
from zbc.runtime.features.words.vocabulary_state import Vocabulary
from zbc.runtime.transports.transport import Transport
from zbc.training import devices, frames, hook
from zbc.training.building.context import Settings
from zbc.training.checkpoint import resume
from zbc.training.checkpoint.folder import folder_of, is_complete, read_index
from zbc.training.checkpoint.saving import Checkpoints
from zbc.training.checkpoint.state import load
from zbc.training.checkpoint.together import try_out
from zbc.training.data.data import KINDS
from zbc.training.data.unequal import Dealer
from zbc.training.evaluate import Evaluations, total
from zbc.training.forward import forward
from zbc.training.guest import Guest, Skips
from zbc.training.launch.board import Place, host_of, hosts_of, identity
from zbc.training.launch.launch import Ended, RunOptions, check_forward
from zbc.training.launch.reach import SHARED, Doorstep, check_reach, connected
from zbc.training.metrics.metrics import RunRecord
from zbc.training.models import adapters, pretrained
from zbc.training.models.experts import stacks_of, unstacked
from zbc.training.probing.shapes import Shapes
from zbc.training.recording.tracing import Tracers, open_tracers
from zbc.training.warm import warm
from zbc.training.watchdog import Watchdog, in_time, watch_siblings
from zbc.training.worker import build_worker

_SETTLE_S = 10.0  # for a failed rank to write its recorded steps, and to complete the checkpoint that is being written


class RankFailed(Exception):
    """An unexpected exception, with its traceback as text, since it is from another process."""

    exit_code = EXIT_BUG

    def render(self) -> str:
        return str(self)


Failure = ZbcError | RankFailed


def end(code: int) -> NoReturn:
    """Ends this process now: an orderly exit could wait for transfers that never end."""
    for stream in (sys.stdout, sys.stderr):  # for output of user code
        with suppress(OSError, AttributeError):  # a full disk, a closed terminal, no stream (None)
            stream.flush()
    os._exit(code)


@dataclass
class StopFlag:
    """The reason why this process was asked to stop; the rank checks it between steps, once it is `training`."""

    reason: str | None = None
    training: bool = False


@dataclass(frozen=True)
class Building:
    """State shared by ranks as threads, which build their layers one after the other, and derive shapes only once."""

    turn: threading.Lock = field(default_factory=threading.Lock)
    looks: dict[int | None, Shapes] = field(default_factory=dict)


@dataclass(frozen=True)
class RankContext:
    """The context of a rank in its process, made by the launcher."""

    place: Place
    options: RunOptions
    device: torch.device
    emit: Callable[[str], None]  # receives the lines that rank 0 shows
    report: Callable[[Failure], NoReturn]  # shows why the run ends, and ends this process
    leave: Callable[[int], NoReturn]  # ends this process with that code, silently: another rank reports
    live: Callable[[str], None] = lambda text: None  # receives the progress, after every step of rank 0
    stop: StopFlag = field(default_factory=StopFlag)
    doorstep: Doorstep | None = None  # for other machines to reach this rank; None if there are none, or it is unknown
    transport: Transport | None = None  # to the other ranks; None: the network, to be connected
    building: Building = field(default_factory=Building)  # one for all ranks of this process


def run_rank(context: RankContext) -> Ended:
    """Trains. Errors end the process through `context`, never with an exception."""
    watchdog: Watchdog | None = None
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__, all_threads=False)  # a crash in native code shows its Python stack
    exhausted.keep_room()
    try:
        manifest = read_manifest(context.options.plan)
        watchdog = Watchdog(
            context.place.board,
            rank=context.place.rank,
            ranks=context.place.ranks,
            name=manifest.topology.name,
            limit=float(manifest.training["train"]["watchdog_s"]),
            hung=context.report,
            orphaned=context.leave,
        )
        watchdog.start()
        run = _Run(context, manifest, watchdog)
        forwards = context.options.forward is not None
        with ExitStack() as run.training:
            for step in (_meet, _connect, _build, _begin):
                step(run)
            for step in (_forward,) if forwards else (_record, _trace, _invite, _train):
                step(run)
        for step in (_end,) if forwards else (_tell_filled, _tell_late, _save, _end):
            step(run)
        return Ended(None if run.log is None else run.log.folder, run.first < run.total, run.stopped)
    except IN_A_RANK as error:
        _give_up(error, context, watchdog)
    finally:
        if watchdog is not None:
            watchdog.stop()


class _Run:
    """The state of one rank's run: each phase reads here the results of earlier ones."""

    plans: list[RankPlan]  # by phase
    process: str  # host:pid
    transport: Transport
    worker: Worker
    filling: Filling | None
    training: ExitStack  # contexts that end with the training
    start: resume.Start
    log: RunRecord | None = None  # on rank 0
    first = 0  # steps trained before, by the run that this one resumes
    evaluations: Evaluations
    saves: Path | None = None  # the folder of its checkpoints
    stopped: str | None = None  # a message, if it was stopped before its last step

    def __init__(self, context: RankContext, manifest: Manifest, watchdog: Watchdog) -> None:
        self.context, self.manifest, self.watchdog = context, manifest, watchdog
        self.options, self.board, self.rank = context.options, context.place.board(), context.place.rank
        # The watchdog reports hangs; this limit only ends a rank whose watchdog is dead.
        self.limit = timedelta(seconds=600 + 4 * watchdog.limit)
        self.name, self.total = manifest.topology.name, self.options.steps or int(manifest.training["train"]["steps"])
        self.step: Step = run_step
        self.guests = list[Guest]()

    def show(self, text: str) -> None:
        """Shows a line on the console, if this is rank 0."""
        if self.rank == 0:
            self.context.emit(text)


def _meet(run: _Run) -> None:
    """Waits until all ranks have started, and checks that they run the same."""
    manifest, trace = run.manifest, run.options.trace
    if trace and manifest.balance is not None:
        raise excludes.refused("balance", "trace", "run")
    if trace and manifest.flushless:
        raise excludes.refused(excludes.FLUSHLESS[manifest.training["optimizer"]["sync"]], "trace", "run")
    run.watchdog.phase("waiting for all ranks to start", waiting=True)
    run.board.agree(identity(manifest, run.total, trace), run.limit, run.name)
    run.process = f"{socket.gethostname()}:{os.getpid()}"
    first = run.board.meet(
        "process", run.limit, run.process, lambda told: told[0] if len({*hosts_of(told)}) > 1 else ""
    )
    processes = run.board.said_near("process")
    if first:  # there are several hosts
        known = zip([0, *processes], hosts_of([first, *processes.values()]), strict=True)
        host = host_of(dict(known), lambda: hosts_of(run.context.place.board().said("process")))
        manifest.on(host)
        run.name = manifest.topology.name
        run.watchdog.placed(host, run.name, run.context.emit)
    if run.context.doorstep is not None:
        watch_siblings(processes, run.rank, run.context.place.board)
    parts = [*read_ramp(run.options.plan, manifest), (run.options.plan, manifest)]
    run.plans = [read_rank(folder, manifest.topology.of(run.rank).pp, its) for folder, its in parts]


def _connect(run: _Run) -> None:
    context = run.context
    run.watchdog.phase("connecting to its peers", waiting=True)
    if context.doorstep is not None:
        check_reach(run.board, context.doorstep, run.limit, run.name)
    if context.transport is not None:
        run.transport = context.transport
        return
    run.transport, shared = connected(run.manifest, context.device, run.board, context.place.connect, run.limit)
    if shared:
        run.show(SHARED)


def _build(run: _Run) -> None:
    context, watchdog, (*ramp, plan) = run.context, run.watchdog, run.plans
    watchdog.phase("waiting to build its stages", waiting=True)
    with context.building.turn:
        watchdog.phase("building its stages")
        looks = context.building.looks
        worker = run.worker = build_worker(plan, run.transport, context.device, ramp, tell=watchdog.phase, looks=looks)
    watchdog.phase("waiting for all ranks to build their stages", waiting=True)
    run.board.meet("built", run.limit)
    for text in worker.warnings if worker.copy == worker.share == 0 else ():
        context.emit(text)
    if context.device.type == "cuda":
        watchdog.phase("using every kernel and group once", waiting=True)
        warm(worker)
    run.filling = install(worker, context.emit)


def _begin(run: _Run) -> None:
    """Loads the checkpoint to resume from, if there is one."""
    run.context.stop.training = True
    who = f"{run.process}, plan {run.manifest.id}, in {Path.cwd()}"
    run.start = run.training.enter_context(resume.begun(run.board, run.options, run.manifest, who))
    if run.start.checkpoint is not None:
        # Each read counts as progress for the watchdog, however long the load takes.
        alive = functools.partial(run.watchdog.phase, "loading the checkpoint")
        run.first = load(run.worker, run.board, run.start.checkpoint, alive=alive, tell=run.context.emit)


def _forward(run: _Run) -> None:
    """Runs the dataset forward, in place of a training."""
    options, out = run.options, run.options.forward
    assert out is not None
    if run.start.checkpoint is None:
        check_forward(options, run.manifest, begun=True)
    run.watchdog.watch(run.worker.progress)
    name, count = forward(run.worker, out, options.steps)
    run.show(f"wrote {name} of {count} samples to {out}")


def _record(run: _Run) -> None:
    """Makes rank 0 write the metrics of the run."""
    if run.rank == 0:
        tokens, phases = run.worker.work.tokens, run.worker.phases
        about = (run.options, run.total, run.board.said("process"), phases, run.first, run.start, tokens)
        run.log = run.training.enter_context(RunRecord(run.manifest, *about))


def _trace(run: _Run) -> None:
    if run.options.trace:
        run.watchdog.phase("opening its trace", waiting=True)
        steps, folder = range(run.first, run.total), None if run.log is None else run.log.folder
        tracer = open_tracers(run.worker, run.board, run.options, steps, run.limit, folder)
        run.training.enter_context(_recorded(tracer))
        run.step = tracer.step


@contextmanager
def _recorded(tracer: Tracers) -> Iterator[None]:
    """Writes recorded steps at the end of its block, also if that fails; errors of the disk are ignored then."""
    try:
        yield
        tracer.end()
    except BaseException:
        in_time(tracer.settle, _SETTLE_S)
        raise


def _invite(run: _Run) -> None:
    """Registers the guests of the run: console, evaluations, hook, checkpoints."""
    worker, context, log = run.worker, run.context, run.log
    evaluated = None if log is None else lambda found: context.emit(log.record_evaluation(found))
    settings, begun_at = Settings.of(run.manifest), run.start.checkpoint
    found = None if begun_at is None else read_index(begun_at).best
    best = found if found is not None and found.by == settings.checkpoint.metric else None  # or by another number
    evaluations = run.evaluations = Evaluations(worker, evaluated, best, settings.train.patience, run.board.ask_stop)
    run.guests += [_Outside(run), evaluations]
    if settings.train.hook is not None:
        run.guests.append(hook.Hook(settings.train.hook, worker, run.board))
    options = settings.checkpoint
    if options.every:
        place = Path(run.board.meet("run directory", run.limit, "" if log is None else str(log.folder.absolute())))
        folder = run.saves = resume.save_folder(run.manifest, place)
        try_out(run.board, folder)
        board = context.place.board()
        how = (worker, board, options, folder, str(place), context.emit, run.first)
        run.guests.append(saves := Checkpoints(*how, lambda: evaluations.best))

        def complete(_: object, error: BaseException | None, __: object) -> None:
            if error is not None and getattr(error, "code", None) != "E702":  # no rank is lost, which a save waits for
                in_time(saves.wait, _SETTLE_S)

        run.training.push(complete)


class _Outside(Guest):
    """The console, the files of the run, and requests to stop."""

    def __init__(self, run: _Run) -> None:
        self._run, self._asked, self._skips = run, False, Skips(run.manifest)

    def asks(self) -> bool:
        reason = self._run.context.stop.reason
        if reason is not None and not self._asked:
            self._run.board.ask_stop(reason)
            self._asked = True
        return self._asked

    def told(self, result: StepResult) -> None:
        run = self._run
        if run.log is not None:
            if (line := run.log.record(result)) is not None:
                run.context.emit(line)
            elif run.options.live:
                run.context.live(run.log.live(result))
        try:
            self._skips.told(result)
        except ZbcError:
            try:
                for guest in run.guests:
                    guest.wait()  # all ranks end here, so a checkpoint being written can be completed
            finally:
                progress = run.worker.progress
                progress.op, progress.waiting, progress.since = "waiting for all ranks to end", True, time.monotonic()
                run.board.meet("refused", run.limit)  # a failure ends all ranks; rank 0 has to write this step first
            raise


def _train(run: _Run) -> None:
    worker = run.worker
    run.watchdog.watch(worker.progress)
    if run.log is not None:
        run.show(run.log.headline())
        if in_turn := worker.features.of(Braids).in_turn:
            run.show(f"groups (OVERLAP) run one op after the other: {'; '.join(in_turn)}")
        if run.first >= run.total:
            run.show(f"nothing is left to train: the checkpoint has {run.first} steps, the run {run.total}")
    stopped = train_steps(worker, range(run.first, run.total), run.guests, run.step)
    best, settings = run.evaluations.best, Settings.of(run.manifest)
    if best is not None and (settings.train.patience or settings.checkpoint.keep_best):
        folder = None if run.saves is None else folder_of(run.saves, best.step)
        where = "" if folder is None or not is_complete(folder) else f": {folder}"
        what = "least evaluation loss" if best.by is None else f"best {best.by}"
        run.show(f"{what} {best.loss:.4f}, after step {best.step}{where}")
    if stopped is not None:
        reason = run.board.stop_reason() or "another rank"
        if reason.startswith("train."):  # by the job itself
            return run.show(f"ended after step {stopped} (asked by {reason})")
        text = f"stopped after step {stopped} (asked by {reason})"
        how = "it has no checkpoints to resume with: set checkpoint.every"
        run.stopped = f"{text}; {how if run.saves is None else f'resume with --resume {shlex.quote(str(run.saves))}'}"


def train_steps(worker: Worker, steps: range, guests: Sequence[Guest], run: Step = run_step) -> int | None:
    """Trains by the plan; returns the number of steps after which the run was stopped, None if all were trained."""

    def tell(result: StepResult | None) -> None:
        if result is not None:
            for guest in guests:
                guest.told(result)

    stopped, stopping = None, False
    agree_on_samples(worker)
    for step in steps:
        last = step + 1 == steps.stop
        turns = worker.run_of(step + 1) is not worker.run_of(step)
        worker.ends = last or stopping or turns or any(guest.due(step, last=last) for guest in guests)
        asked = any(guest.asks() for guest in guests)
        result = run(worker, step, stop=True) if asked else run(worker, step)
        tell(result)
        stopping = (stopping or (result is not None and result.stop)) and not last
        if stopping and worker.phase_run.ending.follows(worker):
            continue  # forwards of the next step have run, so it is the last one
        if stopping or any(guest.due(step, last=last) for guest in guests):
            tell(finish(worker))
            for guest in guests:
                if guest.due(step, last=last, stopping=stopping):  # an evaluation may make a checkpoint due
                    guest.after(step)
        if stopping:
            stopped = step + 1
            break
        for guest in guests:
            guest.check()
    tell(finish(worker))
    for guest in guests:
        guest.wait()
    return stopped


def agree_on_samples(worker: Worker) -> None:
    """Raises E110 if ranks that deal samples to replicas have different ones, E505 if ranks that read data do."""
    dealt, source = worker.work.documents if isinstance(worker.work, Dealer) else None, worker.batches
    if dealt is None and worker.plan.manifest.training["data"]["kind"] in KINDS:
        return
    read = source if dealt is None else dealt
    own = None if read is None else read.digest()
    together, readers = total(worker, own or 0, own is not None)
    if own is not None and together != own * readers:
        text = f"data: rank {worker.rank} finds other samples than other ranks, or of other lengths"
        raise ZbcError("E505" if dealt is None else "E110", text, hint="let all ranks read the same data")


# ---- after training ------------------------------------------------------------------------------------------


def _tell_filled(run: _Run) -> None:
    """Shows the work done by the filler on each rank."""
    if run.filling is not None:
        run.worker.transport = run.filling.inner
    if run.worker.plan.manifest.training.get("filler", {}).get("task"):
        found = "" if run.filling is None else f"{run.name(run.rank)}: {run.filling.found}"
        every = run.board.meet("filled", run.limit, found, lambda told: "\n        ".join(filter(None, told)))
        run.show(f"filler  {every}")


def _tell_late(run: _Run) -> None:
    """Shows the largest delay of gradients of each stage, in its own steps, as counted."""
    if run.worker.phase_run.ending.every:
        found = {s: opt.stalest for s, opt in run.worker.optimizers.items() if isinstance(opt, OneVersion)}

        def line(told: list[str]) -> str:
            late = {int(s): count for words in told for s, count in json.loads(words).items()}
            return " ".join(str(late[s]) for s in sorted(late))

        run.show(f"steps late, by stage: {run.board.meet('late', run.limit, json.dumps(found), line)}")


def _save(run: _Run) -> None:
    """Every rank writes its part of the weights; rank 0 completes the folder when all have."""
    worker, folder, beside = run.worker, run.options.save_hf, run.options.save_adapter
    if folder is None and beside is None:
        return
    run.watchdog.phase("writing its weights")
    settings = Settings.of(worker.plan.manifest)
    model, source = settings.model, hffolder.begun_with(settings.pretrained)
    first = [worker.topology.rank(0, worker.placement.rank_of(s)) for s in range(worker.placement.stages)]
    writers = sorted({rank for one in first for rank in worker.topology.sharing(one)})
    averaged = settings.optimizer.ema is not None and not run.options.save_raw
    for feature in worker.features:
        feature.pauses(worker, Pause(means=averaged, whole=True))
    what = "averages of the " if averaged else ""
    parameters, asked = _uncut(worker), settings.adapter
    place, count = writers.index(run.rank) if run.rank in writers else 0, len(writers)

    def written(what: str, where: Path, tensors: Mapping[str, Tensor]) -> list[str]:
        """Returns the texts about the files of all ranks, on rank 0."""
        run.board.leave(what, hffolder.write_shard(where, place, count, tensors) if tensors else "")
        run.board.meet(f"saved {what}", run.limit)
        return run.board.collect(what) if run.rank == 0 else []

    if beside is not None:
        shards = written("adapters", beside, adapters.tensors_of(asked, model, parameters))
        if run.rank == 0:
            dropped = adapterfolder.complete(beside, asked, model, shards, settings.pretrained)
            run.show(f"wrote the {what}adapters to {beside}")
            if dropped:
                lost = f"beside experts peft drops the adapters of {', '.join(dropped)} without an error"
                run.show(f"{lost}: use --save-hf, or targets of attention and of experts alone")
    if folder is None:
        return
    if asked.rank:
        parameters = adapters.merged(asked, model, parameters)
    tensors = pretrained.tensors_of(model, parameters, source) if parameters else {}
    shards = written("shards", folder, tensors)
    if run.rank == 0:
        for line in hffolder.write_index(folder, model, shards, source):
            run.show(line)
        if settings.pretrained is not None and source is None:
            run.show(f"{settings.pretrained} is not there any more: config.json is made from the plan")
        run.show(f"wrote the {what}weights to {folder}")


def _uncut(worker: Worker) -> dict[str, Tensor]:
    """The weights that this rank writes, unsharded, by their names in files: tensor parallel ones on the first rank of
    the group, a parallel vocabulary on the ranks with the first and the last stage."""
    found: dict[str, Tensor] = dict(primary(worker))
    shared = worker.features.find(Vocabulary)
    if shared is not None and worker.copy == 0:
        for at, (name, rows) in enumerate(worker.optimizers[WORDS].parameters.items()):
            table = shared.whole(rows, worker.transport)
            if worker.rank == (shared.last if at else shared.first):
                found[name] = nn.Parameter(table)
    layers = worker.features.of(SharedLayers)
    cuts, group = layers.cuts, layers.group
    if group is not None:
        whole = {
            name: nn.Parameter(cuts[name].collect(p.data, group), p.requires_grad) if name in cuts else p
            for name, p in found.items()
        }
        found = {name: p for name, p in whole.items() if not worker.share or name.startswith(layers.own)}
    return dict(unstacked(found.items(), stacks_of(worker)))


def _end(run: _Run) -> None:
    device = run.context.device
    run.watchdog.phase("ending")
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # groups can end only without operations in flight
        fullest = functools.partial(devices.fullest, name=run.name)
        run.show(run.board.meet("memory", run.limit, devices.in_use(device), fullest))
    run.board.meet("ended", run.limit)
    run.watchdog.nearly_done = True
    if run.stopped is not None:
        run.show(run.stopped)
    run.worker.close()
    if run.context.transport is None:
        dist.destroy_process_group()


# ---- failures ------------------------------------------------------------------------------------------------


def _give_up(error: BaseException, context: RankContext, watchdog: Watchdog | None) -> NoReturn:
    """Ends the process: the first rank that fails reports why, all others end silently."""
    if watchdog is not None:
        watchdog.standing_down = True
    failure = explain(error, context.place.rank)
    claimed = in_time(lambda: context.place.board().claim(), 5.0)
    if claimed is False:
        reported = None if watchdog is None else watchdog.await_report()
        context.leave(failure.exit_code if reported is None else reported)
    if isinstance(failure, ZbcError) and failure.code == "E702" and watchdog is not None:
        failure = _who_is_gone(failure, context, watchdog)
    context.report(failure)


def _who_is_gone(failure: ZbcError, context: RankContext, watchdog: Watchdog) -> ZbcError:
    """A lost connection's error with its cause: the ranks that are silent, and those that a signal killed."""
    gone, (rows, _) = watchdog.await_silence(), watchdog.rows()
    killed = in_time(lambda: context.place.board().killed(), 5.0) or {}
    shown = watchdog.lines(rows, gone, of=gone)
    if not killed:
        return _with_details(failure, shown)
    texts = [f"{watchdog.name(rank)} was killed by {signal}" for rank, signal in killed.items()]
    hint = "if nobody killed it, the kernel did for want of memory: see its log (dmesg)"
    details = [failure.message.removeprefix("run: "), *failure.details, *shown]
    return ZbcError(
        "E702", f"run: {', '.join(texts)}", hint=hint if "SIGKILL" in killed.values() else None, details=details
    )


def explain(error: BaseException, rank: int) -> Failure:
    """The error to show to the user; an op's exception names rank, op and step, and shows the user's own frames."""
    notes = [*reversed(getattr(error, "__notes__", []))]  # the op, then the place in it
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
    return ZbcError(error.code, error.message, where=error.where, hint=error.hint, details=[*error.details, *more])
