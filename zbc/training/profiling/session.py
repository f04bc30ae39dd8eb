"""A whole profile: ranks that measure at the same time, then two that exchange tensors.

As many processes compute at once as a run would have on the processor, since cores share caches and memory: a layer
alone on the machine is faster than one with neighbours. They come from the fork server that starts local runs.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as ready
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zbc.errors import ZbcError
from zbc.host.cores import cores, threads_of
from zbc.job import profile
from zbc.job.profile import Copy, Host, LayerProfile, Measured, Origin, Profile, SliceTime, WordTimes
from zbc.job.spec import Job
from zbc.job.userobject import FAILURES
from zbc.runtime.core.private import workspaces
from zbc.runtime.transports.network import bind_loopback
from zbc.training import devices, frames
from zbc.training.launch.forking import Child, kill
from zbc.training.profiling.link import HostCopies, Pair, fit, share_of, sums_of
from zbc.training.profiling.link import Samples as LinkSamples
from zbc.training.profiling.rig import IDLE, build_rig
from zbc.training.profiling.times import (
    AGAIN,
    BLOCK,
    CLOSE,
    KEEP,
    WARM_UP,
    Samples,
    Stopwatch,
    Took,
    measured,
    quick,
    slice_times,
)
from zbc.training.profiling.weigh import parts
from zbc.training.profiling.words import word_times
from zbc.training.train import RankFailed

K = TypeVar("K")
_MOVES = 40  # tensors of each size
_LARGEST = 2**28  # bytes of a tensor that is sent


@dataclass(frozen=True)
class Sampling:
    """Settings of a profile. `together` processes compute at once, each with `threads` threads, for `rounds` rounds."""

    device: str
    threads: int
    together: int
    rounds: int


def effort(job: Job, *, device: str | None, threads: int | None, rounds: int) -> Sampling:
    """The settings of a profile; unset ones are those of a local run of the job. Raises E603 without a GPU."""
    device = device or job.hardware.device
    if device == "cuda" and not torch.cuda.is_available():
        hint = "use --device cpu, or a machine with a GPU"
        raise ZbcError("E603", "profile: torch finds no GPU", hint=hint)
    world = job.parallel.ranks
    threads = threads or (1 if device == "cuda" else threads_of(world))
    together = 1 if device == "cuda" else max(1, min(world, cores() // threads))
    return Sampling(device, threads, together, rounds)


@dataclass(frozen=True)
class Measurements:
    times: Samples
    bytes: dict[str, LayerProfile]  # without times
    order: tuple[str, ...]
    sizes: tuple[int, ...]  # of the tensors between layers, in bytes
    link: LinkSamples
    sums: LinkSamples
    copies: Copy | None
    name: str
    reserve: int | None = None  # bytes of the device in use in addition to torch's own
    slices: Took = field(default_factory=dict)  # of a block
    words: WordTimes | None = None  # of a rank's vocabulary shard


def measure(job: Job, how: Sampling, done: Callable[[], None] = lambda: None) -> Profile:
    """Profiles a job; `done` is called `rounds + 1` times on the way. Raises E110 for a graph of layers, E5xx if the
    model or its data do not work, E702 if a process dies."""
    if job.model.graph:
        text = "profile: layers are run one after the other, and model.graph is no chain"
        raise ZbcError("E110", text, where=job.where("model", "graph"), hint="give times in [costs], per layer")
    with tempfile.TemporaryDirectory() as folder:
        found = _layers(job, how, done)
        link, sums, tp = LinkSamples(), LinkSamples(), job.parallel.tp
        devices = max(2, tp) if how.device == "cpu" else torch.cuda.device_count()
        if devices > 1:
            link = _together(2, how, _around(found["sizes"]), f"{folder}/meet", pair=True)
        if 1 < tp <= devices:
            sums = _together(tp, how, _around(found["sizes"]), f"{folder}/share", pair=False)
        done()
    return assemble(job, how, Measurements(link=link, sums=sums, **found))


def assemble(job: Job, how: Sampling, found: Measurements) -> Profile:
    times = found.times
    host = {name: median(times[IDLE, name]) for name in ("f", "b", "w", "step", "norm")}
    moves = [quick(found.link.get(name, ())) for name in ("post", "send", "take")]
    return Profile(
        on=Origin(name=found.name, torch=torch.__version__, **asdict(how)),
        **profile.about(job),
        layers={kind: _layer(found, kind, host) for kind in dict.fromkeys(found.order)},
        order=profile.order_of(found.order),
        link=fit(found.link),
        sums=fit(found.sums),
        reserve_bytes=found.reserve,
        copies=found.copies,
        words=found.words,
        host=Host(
            f_us=1e3 * host["f"],
            b_us=1e3 * host["b"],
            w_us=1e3 * host["w"],
            transfer_us=sum(moves) / 2,
            transfer_share=share_of(found.link),
            agree_us=median(found.link["agree"]) if "agree" in found.link else 0.0,
            close_us=1e3 * median(times["", CLOSE]),
        ),
    )


def _layer(found: Measurements, kind: str, host: dict[str, float]) -> LayerProfile:
    """The profile of one kind of layer; `host` has the times of the layer that does nothing, which are subtracted."""
    times = found.times

    def of(name: str, less: str = "") -> Measured:
        return measured(times[kind, name], host.get(less, 0.0))

    more = median(times[kind, AGAIN]) - median(times[kind, KEEP])
    # F is torch's own if its backward is not split; the time that this saves is subtracted from the backward.
    saved = max(0.0, quick(times[kind, "f"]) - quick(times[kind, "f fused"]))
    all_times = {name: of(name, name) for name in ("f", "b", "w", "step", "norm")} | {
        "bw": measured(times[kind, "bw"], host["b"] + saved),
        "again": Measured(ms=max(0.0, more), spread=measured(times[kind, AGAIN]).spread),
        "tentative": of("tentative"),
    }
    slices = [
        SliceTime(rows=rows, past=past, **{name: max(0.0, ms - host[name]) for name, ms in took.items()})
        for (rows, past), took in (found.slices if kind == BLOCK else {}).items()
    ]
    return found.bytes[kind].model_copy(update={**all_times, "slices": slices})


# ---- the ranks that measure layers ---------------------------------------------------------------------------


def _layers(job: Job, how: Sampling, done: Callable[[], None]) -> dict[str, Any]:
    """Times of all ranks, and the other measurements of the first one."""
    counts, results = [0] * how.together, dict[int, Any]()
    with _ranks(how.together, _rank, job, how) as pipes:
        while len(results) < how.together:
            for rank, content in _heard(pipes):
                if isinstance(content, int):
                    before, counts[rank] = min(counts), content
                    if before < min(counts) <= how.rounds:
                        done()
                    if before < how.rounds <= min(counts):
                        for pipe in pipes:
                            pipe.send("enough")
                else:
                    results[rank] = content
    return {**results[0], "times": _pooled(results[rank]["times"] for rank in range(how.together))}


def _pooled(samples: Iterable[Mapping[K, Sequence[float]]]) -> dict[K, list[float]]:
    found: dict[K, list[float]] = {}
    for key, values in (item for of_rank in samples for item in of_rank.items()):
        found.setdefault(key, []).extend(values)
    return found


def _rank(rank: int, job: Job, how: Sampling, pipe: Connection) -> dict[str, Any]:
    """Measures until told to stop: each rank goes on until all have enough, so that none runs alone."""
    torch.set_num_threads(how.threads)
    device = torch.device(how.device, 0) if how.device == "cuda" else torch.device("cpu")
    rig = build_rig(job, device)
    watch, count = Stopwatch(rig, device), 0
    while not pipe.poll():
        began = time.perf_counter()
        watch.round()
        count += 1
        if count == WARM_UP:  # ranks of a pipeline are not at the same op at the same time
            time.sleep((time.perf_counter() - began) * rank / how.together)
        pipe.send(max(0, count - WARM_UP))
    pipe.recv()
    watch.close()
    slices = slice_times(rig, device)
    reserve = unpredicted(device) if device.type == "cuda" and how.together == 1 else None
    sizes = {torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in rig.inputs[1:]}
    return {
        "times": dict(watch.samples),
        "slices": slices,
        "words": word_times(rig, device),
        "bytes": parts(rig, device)[0] if rank == 0 else {},
        "order": rig.order,
        "sizes": tuple(sorted(sizes)),
        "copies": HostCopies(device).measure() if device.type == "cuda" else None,
        "reserve": reserve,
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
    }


def unpredicted(device: torch.device) -> int:
    """Bytes of a GPU in use that no plan predicts: those outside of torch's memory, and cuBLAS workspaces in it. They
    are this process's only if no other one uses the GPU."""
    free, total = torch.cuda.mem_get_info(device)
    beside = total - free - torch.cuda.memory_reserved(device)
    return max(0, beside) + workspaces(device)


def processor() -> str:
    """The model of the processor, if the system provides it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


# ---- the ranks that exchange tensors, and those that sum them ------------------------------------------------


def _around(sizes: tuple[int, ...]) -> list[int]:
    """A few sizes around those of the model."""
    most = max(sizes, default=2**16)
    wanted = sorted({64, *(size for size in (sizes[0] if sizes else most, most // 4, most, 4 * most) if size > 64)})
    return [size for size in wanted if size <= max(_LARGEST, most)]


def _together(count: int, how: Sampling, sizes: list[int], meeting: str, *, pair: bool) -> LinkSamples:
    """The measurements of `count` processes that sum tensors, or of a `pair` that sends them."""
    with _ranks(count, _exchanges, count, how, sizes, meeting, pair) as pipes:
        found: dict[int, Any] = {}
        while len(found) < count:
            found.update(_heard(pipes))
    return _pooled(found[rank] for rank in range(count))


def _exchanges(
    rank: int, count: int, how: Sampling, sizes: list[int], meeting: str, pair: bool, pipe: Connection
) -> LinkSamples:
    """Joins a process group of `count` ranks, and measures in it."""
    torch.set_num_threads(how.threads)
    cuda = how.device == "cuda"
    bind_loopback()
    where, limit = f"file://{meeting}", timedelta(seconds=300)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=where, rank=rank, world_size=count, timeout=limit)
    device = devices.place(rank) if cuda else torch.device("cpu")
    found = Pair(rank, device, _MOVES).measure(sizes) if pair else sums_of(rank, count, device, sizes, _MOVES)
    dist.destroy_process_group()
    return found


# ---- processes -----------------------------------------------------------------------------------------------


@contextmanager
def _ranks(count: int, target: Callable[..., Any], *arguments: object) -> Iterator[list[Connection]]:
    """Processes that run `target(rank, *arguments, pipe)`; none outlives the block."""
    children = list[Child]()
    try:
        children += (Child.start(f"profile {rank}", _run, target, rank, arguments) for rank in range(count))
        yield [child.pipe for child in children]
    finally:
        kill(children)
        for child in children:
            child.pipe.close()


def _heard(pipes: list[Connection]) -> list[tuple[int, Any]]:
    """Waits for messages of processes and returns them. Raises an error that one of them raised, E702 if one died."""
    heard = []
    for pipe in ready(pipes):
        rank = pipes.index(pipe)  # type: ignore[arg-type]
        try:
            content = pipes[rank].recv()
        except EOFError:
            text = f"profile: process {rank} of {len(pipes)} died"
            hint = "if nobody killed it, the kernel did for want of memory: see its log (dmesg)"
            raise ZbcError("E702", text, hint=hint) from None
        if isinstance(content, ZbcError | RankFailed):
            raise content
        heard.append((rank, content))
    return heard


def _run(target: Callable[..., Any], rank: int, arguments: tuple[Any, ...], pipe: Connection) -> None:
    try:
        result: Any = target(rank, *arguments, pipe)
    except ZbcError as error:
        result = error
    except FAILURES as error:
        result = RankFailed(traceback.format_exc())
        if frames.of_users(error):  # layers and data are the user's, as they are in training
            result = frames.failure(error, "profile: a layer, the loss or the data of the job failed")
    try:
        pipe.send(result)
        pipe.recv()  # until the parent is done with all
    except (EOFError, OSError):
        pass
    os._exit(0)
