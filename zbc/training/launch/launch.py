"""`zbc run`: determines how this process was started, and runs its part of the run.

Under torchrun this process is one rank, and only this module reads the environment; with `--local N` it starts the
ranks itself. Modules that need torch are imported after a check that it is installed.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zbc.errors import ZbcError
from zbc.host.closed_pipe import to_stdout
from zbc.host.torch_version import OLDEST, release
from zbc.job.model_section import BUILTIN
from zbc.plan.directory import Manifest, read_manifest, read_ramp
from zbc.plan.reading import job_of
from zbc.training.launch.forking import start_fork_server
from zbc.training.metrics import sinks
from zbc.training.metrics.live import Screen

if TYPE_CHECKING:
    from zbc.training.launch.board import Place


@dataclass(frozen=True)
class RunOptions:
    """Options from the command line, or from a Python caller; None: as in the plan.

    The last three are the launcher's: an id of the launch, the same for its restarts; whether ranks of this launch were
    started before; whether rank 0 shows the progress after every step.
    """

    plan: Path  # its folder
    steps: int | None = None  # instead of the plan's
    out: Path | None = None  # the run directory
    save_hf: Path | None = None  # a Hugging Face folder for the weights after training
    save_adapter: Path | None = None  # a folder of peft for its adapters
    save_raw: bool = False  # both get the weights themselves, not their averages
    resume: str | None = None  # "auto", "none", or the path of a checkpoint or of a run: see checkpoint/resume.py
    forward: Path | None = None  # instead of a training: the file for rows of a forward run
    trace: frozenset[int] = frozenset()  # the steps to record, from 0
    local: int | None = None  # the number of ranks to start here
    device: str | None = None  # of --local: the ranks' device, "cpu" or "cuda"
    threads: bool = False  # of --local: ranks are threads of one process, on one device
    max_restarts: int = 0  # of --local: maximum number of restarts of the ranks
    launch: str = ""
    restarted: bool = False
    live: bool = False


class Ended(NamedTuple):
    """The end of a run: its directory, None on other ranks than 0 and without training; `trained`: whether steps were
    left to train; `stopped`: a message, if it ended before its last step."""

    folder: Path | None
    trained: bool
    stopped: str | None


# A launcher's variables that are numbers, and the ends of their ranges; 0: the number of ranks.
_NUMBERS = {"WORLD_SIZE": 10**9, "RANK": 0, "LOCAL_RANK": 0, "MASTER_PORT": 2**16}
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"  # of the streams of a GPU; the driver reads it when a process first uses one
_MOST_QUEUES = "32"  # the maximum; without the variable it is 8, less than a rank may have streams
_MOMENT_S = 15.0  # for the rank that shows an error which all ranks have; it may start seconds after the others


def run(options: RunOptions, emit: Callable[[str], None] = to_stdout) -> Ended:
    """Trains with `options`; `emit` receives the lines of the console. Returns how it ended, with its folder.

    Raises ZbcError (E4xx plan, E5xx data and user code, E6xx environment, E7xx the run failed), and KeyboardInterrupt
    if SIGINT or SIGTERM ended it. Under torchrun the first rank that fails writes its error to stderr in one piece, and
    the processes end here: torchrun hides exit codes, and an orderly exit could wait for transfers that never end.
    """
    started = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    _check_start(options, started=started)
    try:
        os.getcwd()
    except FileNotFoundError:
        text = "run: the current folder was removed, and its processes would start in it"
        raise ZbcError("E604", text, hint="cd to a folder that is there") from None
    try:
        _check_torch()
        manifest = read_manifest(options.plan)
        _check_world(options, manifest)
        _check_plan(options, manifest)
        device = options.device or str(manifest.planning["hardware"]["device"])
        if device == "cuda":
            _set_queues(options.plan, manifest)  # before the first call of the driver
            _check_cuda(options, manifest)
    except ZbcError as error:
        if started and os.environ.get("LOCAL_RANK", os.environ["RANK"]) != "0":
            time.sleep(_MOMENT_S)
            raise SystemExit(error.exit_code) from None  # this machine's first rank shows it
        raise
    options = replace(
        options,
        save_hf=None if options.save_hf is None else options.save_hf.absolute(),
        save_adapter=None if options.save_adapter is None else options.save_adapter.absolute(),
        launch=os.environ.get("TORCHELASTIC_RUN_ID", "") if started else "",
        restarted=started and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0",
        live=sys.stderr.isatty(),
        device=device,
    )
    screen = Screen(emit, sys.stderr)
    _flight_recorder(manifest)
    try:
        if started:
            from zbc.training.launch.torchrun import run_place

            ended = run_place(_place(), manifest, options, screen)
        elif options.threads:
            from zbc.training.launch.local import run_threads

            ended = run_threads(manifest, options, screen)
        else:
            start_fork_server()  # it loads torch while this process does
            from zbc.training.launch.local import run_local

            ended = run_local(manifest, options, screen)
    finally:
        screen.clear()
    if ended.stopped is not None:
        raise KeyboardInterrupt
    return ended


def _set_queues(folder: Path, manifest: Manifest) -> None:
    """Sets a queue for every stream, unless the user set it otherwise. Raises E603 if that is one, and the plan may
    deadlock with it; see zbc/compiler/check/device.py."""
    if os.environ.setdefault(_QUEUES, _MOST_QUEUES) != "1":
        return
    phases = [manifest, *(its for _, its in read_ramp(folder, manifest))]
    if not all(phase.predicted.get("survives_one_queue", False) for phase in phases):
        text = f"run: {_QUEUES} is 1: all streams of a GPU then share one queue"
        hint = f"unset {_QUEUES}, or set it to {_MOST_QUEUES}"
        raise ZbcError("E603", f"{text}, and ranks of this plan may wait forever", hint=hint)


def _check_cuda(options: RunOptions, manifest: Manifest) -> None:
    """Raises E603 if torch finds no CUDA device, before any rank trains; ranks may share one."""
    from torch.cuda import device_count

    if device_count():
        return
    text = "run: ranks are to compute on cuda, torch finds no CUDA device on this machine"
    instead = f"zbc run PLAN --local {manifest.topology.world} --device cpu" + " --threads" * options.threads
    raise ZbcError("E603", text, hint=f"train on the CPU: {instead}")


def _check_start(options: RunOptions, *, started: bool) -> None:
    """Raises E604 if --local or --max-restarts is used under torchrun, for options that need --local without it, and
    for restarts of threads."""
    if started and options.local is not None:
        text = "run: --local inside of torchrun, which starts the ranks already"
        raise ZbcError("E604", text, hint="leave out --local, or torchrun")
    for name, end in _NUMBERS.items() if started else ():
        end, value = end or int(os.environ["WORLD_SIZE"]), os.environ.get(name, "0")
        if not (value.isascii() and value.isdecimal() and len(value) < 10 and int(value) < end):
            text = f"run: {name} is {value!r}, not a number from 0 to {end - 1}"
            raise ZbcError("E604", text, hint="torchrun sets it; other launchers have to set it for each rank")
    if options.max_restarts and options.local is None:
        text = "run: --max-restarts is for runs with --local; torchrun restarts the ranks it has started"
        named = shlex.quote(str(options.plan))
        raise ZbcError("E604", text, hint=f"torchrun --max-restarts {options.max_restarts} ... -m zbc run {named}")
    given = ["--device"] * (options.device is not None) + ["--threads"] * options.threads
    if given and options.local is None:
        text = f"run: {' and '.join(given)} {'is' if len(given) == 1 else 'are'} for runs with --local"
        raise ZbcError("E604", text, hint="add --local N; torchrun's ranks compute where the plan says")
    if options.threads and options.max_restarts:
        hint = "leave out --threads: then each rank is a process"
        raise ZbcError("E604", "run: ranks that are threads cannot be started again", hint=hint)


def _check_plan(options: RunOptions, manifest: Manifest) -> None:
    """Raises errors that can be detected before a rank is started: of the plan, or of options."""
    job_of(manifest)
    sinks.check(manifest.training["log"])
    if options.forward is not None:
        check_forward(options, manifest)
    if options.save_hf is not None or options.save_adapter is not None:
        from zbc.job import adapterfolder, hffolder
        from zbc.training.building.context import Settings

        settings = Settings.of(manifest)
        if options.save_hf is not None:
            hffolder.check_target(options.save_hf, settings.model, manifest.ep)
        if options.save_adapter is not None:
            adapterfolder.check_target(options.save_adapter, settings.adapter)
    total = int(manifest.training["train"]["steps"]) if options.steps is None else options.steps
    if options.trace and max(options.trace) >= total:
        text = f"run: --trace asks for step {max(options.trace) + 1}, the run has {total}"
        raise ZbcError("E109", text, hint=f"name steps of 1-{total}, or train for longer with --steps N")


def check_forward(options: RunOptions, manifest: Manifest, *, begun: bool = False) -> None:
    """Raises E604 for options incompatible with --forward, and if no weights are given; `begun`: no checkpoint was
    found. Layers of a factory may have their own weights."""
    asked = {"--trace": options.trace or None, "--save-hf": options.save_hf, "-o": options.out}
    asked["--save-adapter"] = options.save_adapter
    if given := [name for name, value in asked.items() if value is not None]:
        found = f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} of a training"
        raise ZbcError("E604", f"run: --forward trains nothing, {found}", hint="leave out one of them")
    model = manifest.planning["model"]
    if (begun or options.resume in (None, "none")) and not model.get("pretrained") and model["family"] in BUILTIN:
        text = "run: --forward, and no weights are given" + (": no checkpoint was found" if begun else "")
        raise ZbcError("E604", text, hint="--resume RUN takes those of a run, model.pretrained those of a folder")


def _flight_recorder(manifest: Manifest) -> None:
    """Makes NCCL record its last operations, and write them when one of them hangs, unless the user sets it otherwise.

    `torchfrtrace` reads the files; they are /tmp/nccl_trace_rank_N unless TORCH_NCCL_DEBUG_INFO_TEMP_FILE names others.
    """
    if manifest.planning["hardware"]["device"] != "cuda":
        return
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # its former name
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def _recorder_file(rank: int) -> str:
    """The file into which torch would write NCCL's flight record."""
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    return next((os.environ[name] for name in names if name in os.environ), "/tmp/nccl_trace_rank_") + str(rank)


def _check_torch() -> None:
    wanted = ".".join(map(str, OLDEST))
    hint = f"pip install 'torch>={wanted}'"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise ZbcError("E602", "run: torch is not installed", hint=hint) from None
    if release(version) < OLDEST:
        raise ZbcError("E602", f"run: torch {version} is too old, zbc needs {wanted} or newer", hint=hint)


def _check_world(options: RunOptions, manifest: Manifest) -> None:
    wanted, env, local = manifest.topology.world, os.environ, options.local
    plan_wants, named = f"plan wants {wanted} ranks{manifest.topology.axes}", shlex.quote(str(options.plan))
    torchrun = f"torchrun --standalone --nproc-per-node {wanted} -m zbc run {named}"
    if "WORLD_SIZE" in env and "RANK" in env:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            text = f"run: RANK and WORLD_SIZE are set, {' and '.join(missing)} not"
            raise ZbcError("E604", text, hint=f"let torchrun set them: {torchrun}")
        if int(env["WORLD_SIZE"]) != wanted:
            count = env["WORLD_SIZE"]
            text = f"run: {plan_wants}, torchrun started {count} (WORLD_SIZE={count})"
            raise ZbcError("E601", text, hint=f"run: {torchrun}")
    elif local is None:
        text = "run: nothing has started the ranks of this plan"
        details = [
            f"= with torchrun:             {torchrun}",
            f"= on this machine alone:     zbc run {named} --local {wanted}",
        ]
        raise ZbcError("E604", text, details=details)
    elif local != wanted:
        text = f"run: {plan_wants}, --local asks for {local}"
        raise ZbcError("E601", text, hint=f"run: zbc run {named} --local {wanted}")


def _place() -> Place:
    from zbc.training.launch.board import Place

    env = os.environ
    rank = int(env["RANK"])
    return Place(
        rank=rank,
        ranks=int(env["WORLD_SIZE"]),
        host=env["MASTER_ADDR"],
        port=int(env["MASTER_PORT"]),
        keys=f"zbc/{env.get('TORCHELASTIC_RUN_ID', '')}",
        local_rank=int(env.get("LOCAL_RANK", "0")),
        one_machine=env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"],
        hosts_store=rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        error_file=env.get("TORCHELASTIC_ERROR_FILE"),
        recorder_file=_recorder_file(rank) if env.get("TORCH_NCCL_DUMP_ON_TIMEOUT") != "0" else None,
    )
