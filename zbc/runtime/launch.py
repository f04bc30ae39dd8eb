"""`zbc run`: find out how this process was started, and take its part in the run.

Under torchrun this process is one rank, and the only place that reads the environment is here; with `--local N` it
starts the ranks itself. Modules that need torch are imported after it is known to be there.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from zbc.errors import ZbcError
from zbc.plan import Manifest, read_manifest

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

    from zbc.runtime.board import Connect
    from zbc.runtime.train import Failure, StopFlag

_TORCH = (2, 11)
_MOMENT_S = 3.0  # for the rank that shows an error which all ranks have


def to_stdout(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(
    folder: Path,
    *,
    steps: int | None = None,
    local: int | None = None,
    out: Path | None = None,
    emit: Callable[[str], None] = to_stdout,
) -> None:
    """Train with the plan in `folder`; `steps` overrides the plan's, `out` is the run directory.

    Raises ZbcError (E4xx plan, E5xx data and user code, E6xx environment, E7xx the run failed), and KeyboardInterrupt
    when SIGINT or SIGTERM ended it. Under torchrun an error after the start is written to stderr in one piece by the
    first rank that fails, and the processes end here: torchrun hides exit codes, and an orderly exit could wait for
    transfers that never end.
    """
    started = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if started and local is not None:
        text = "run: --local inside of torchrun, which starts the ranks already"
        raise ZbcError("E604", text, hint="leave out --local, or torchrun")
    try:
        _check_torch()
        manifest = read_manifest(folder)
        _check_world(folder, manifest, local)
    except ZbcError as error:
        if started and os.environ.get("LOCAL_RANK", os.environ["RANK"]) != "0":
            time.sleep(_MOMENT_S)
            raise SystemExit(error.exit_code) from None  # this machine's first rank shows it
        raise
    if started:
        _run_rank(folder, steps=steps, out=out, emit=emit)
    else:
        from zbc.runtime.forking import fork_server

        fork_server()  # loads torch while this process does
        from zbc.runtime.local import run_local

        run_local(folder, manifest, steps=steps, out=out, emit=emit)


def _check_torch() -> None:
    wanted = ".".join(map(str, _TORCH))
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise ZbcError("E602", "run: torch is not installed", hint=f"pip install 'torch>={wanted}'") from None
    match = re.match(r"(\d+)\.(\d+)", found)
    if match is not None and (int(match[1]), int(match[2])) < _TORCH:
        hint = f"pip install 'torch>={wanted}'"
        raise ZbcError("E602", f"run: torch {found} is too old, zbc needs {wanted} or newer", hint=hint)


def _check_world(folder: Path, manifest: Manifest, local: int | None) -> None:
    wanted, env = manifest.ranks, os.environ
    torchrun = f"torchrun --standalone --nproc-per-node {wanted} -m zbc run {folder}"
    if "WORLD_SIZE" in env and "RANK" in env:
        if int(env["WORLD_SIZE"]) != wanted:
            found = env["WORLD_SIZE"]
            text = f"run: plan wants {wanted} ranks, torchrun started {found} (WORLD_SIZE={found})"
            raise ZbcError("E601", text, hint=f"run: {torchrun}")
    elif local is None:
        text = "run: nothing has started the ranks of this plan"
        details = [
            f"= with torchrun:             {torchrun}",
            f"= on this machine's CPU:     zbc run {folder} --local {wanted}",
        ]
        raise ZbcError("E604", text, details=details)
    elif local != wanted:
        text = f"run: plan wants {wanted} ranks, --local asks for {local}"
        raise ZbcError("E601", text, hint=f"run: zbc run {folder} --local {wanted}")


# ---- one rank under torchrun ---------------------------------------------------------------------------------


def _run_rank(folder: Path, *, steps: int | None, out: Path | None, emit: Callable[[str], None]) -> None:
    from zbc.runtime.network import bind_loopback
    from zbc.runtime.signals import Signals
    from zbc.runtime.train import Seat, StopFlag, run_rank

    env, stop = os.environ, StopFlag()
    rank, ranks = int(env["RANK"]), int(env["WORLD_SIZE"])
    if env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]:
        bind_loopback()
    host, connect = _store(rank)
    device = _device(read_manifest(folder).planning["hardware"]["device"])
    seat = Seat(rank, ranks, device, connect, emit, report=_report(connect), leave=_leave, stop=stop)
    with Signals(_asked(stop), lambda name: os._exit(130)):
        stopped = run_rank(folder, seat, steps=steps, out=out)
    del host
    if stopped is not None:
        raise KeyboardInterrupt


def _store(rank: int) -> tuple[Store | None, Connect]:
    """The store of this run, if this process has to host it, and how to connect to it.

    torchrun's agent hosts one, which outlives every rank; other launchers leave that to rank 0.
    """
    import torch.distributed as dist

    from zbc.runtime.board import connector

    env = os.environ
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    hosted = None
    if rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        hosted = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    run_id, attempt = env.get("TORCHELASTIC_RUN_ID", ""), env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return hosted, connector(host, port, f"zbc/{run_id}/{attempt}")


def _device(kind: str) -> torch.device:
    import torch

    if kind != "cuda":
        return torch.device("cpu")
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count:
        have = f"this machine has {count}" if count else "torch finds none here"
        text = f"run: the plan runs on cuda and local rank {index} needs a device of its own, {have}"
        hint = '`zbc run PLAN --local N` runs it on the CPU; or plan again with hardware.device = "cpu"'
        raise ZbcError("E603", text, hint=hint)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _asked(stop: StopFlag) -> Callable[[str], None]:
    def asked(name: str) -> None:
        stop.reason = name

    return asked


def _report(connect: Connect) -> Callable[[Failure], NoReturn]:
    """Show a failure in one write, so that no other rank's output gets in between; let the others go; end."""

    def report(failure: Failure) -> NoReturn:
        from zbc.runtime.board import Board
        from zbc.runtime.watchdog import in_time

        sys.stdout.flush()
        os.write(2, (failure.render() + "\n").encode())
        _tell_torchrun(failure)
        in_time(lambda: Board(connect(), 0, 1).report(), 5.0)
        os._exit(failure.exit_code)

    return report


def _tell_torchrun(failure: Failure) -> None:
    """Leave the message where torchrun's own summary shows it, as `elastic.multiprocessing.errors.record` does."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        text = failure.render()
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")


def _leave(failure: Failure) -> NoReturn:
    os._exit(failure.exit_code)
