"""Checks that every rank's peak fits the job's limits.

`schedule.memory_limit` bounds activations; `hardware.memory_gib`, less its reserve, bounds everything a rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.host import host_bytes
from zbc.compiler.memory.per_rank import RankMemory
from zbc.errors import ZbcError, raise_all
from zbc.ir import Program
from zbc.job.spec import Job, parse_limit
from zbc.text import GIB, at_least, short, size

_LINE = 90  # characters of a hint
RECOMPUTE = 'memory.activations = "auto"'


def check_memory(job: Job, memory: list[RankMemory], costs: Costs) -> None:
    """Raise E301 if a rank needs more than its device has, E302 if it holds more activations than the limit."""
    raise_all([*_over_device(job, memory, costs), *_over_limit(job, memory, costs)])


def check_host(job: Job, program: Program, costs: Costs) -> None:
    """Raise E301 if the offload copies of a rank take more of its host than hardware.host_gib."""
    room = job.hardware.host_gib
    if room is None:
        return
    sizes = [host_bytes(program, rank, costs) for rank in range(len(program.ranks))]
    rank = max(range(len(sizes)), key=lambda r: sizes[r])
    if sizes[rank] > room * GIB:
        text = f"does not fit: rank {rank} copies {size(sizes[rank])} to its host, hardware.host_gib is {room:g}"
        node = sum(sizes[: job.hardware.ranks_per_node])
        detail = f"{size(node)} on a node of {min(len(sizes), job.hardware.ranks_per_node)} ranks, pinned"
        hint = f'a larger memory_limit, "recompute+offload", or host_gib = {at_least(sizes[rank] / GIB)}'
        raise ZbcError("E301", text, where=job.where("hardware", "host_gib"), details=[detail], hint=hint)


def excess(job: Job, memory: Sequence[RankMemory], costs: Costs) -> float:
    """The share by which the fullest rank exceeds its limit; 0 or less if all fit."""
    return max(shares(job, memory, costs)) - 1


def fullest(job: Job, memory: Sequence[RankMemory], costs: Costs) -> int:
    """The rank that exceeds its limit most."""
    full = shares(job, memory, costs)
    return full.index(max(full))


def shares(job: Job, memory: Sequence[RankMemory], costs: Costs) -> list[float]:
    """How full each rank is, as a share of its tightest limit; 0 without one."""
    shares = [0.0] * len(memory)
    if job.rooms is not None and costs.bytes is not None:
        shares = [rank.bytes / room for rank, room in zip(memory, job.rooms, strict=True)]
    units, size = asked_of(job)
    if units is not None:
        shares = [max(a, rank.units / units) for a, rank in zip(shares, memory, strict=True)]
    elif size is not None and costs.bytes is not None:
        shares = [max(a, rank.activations / size) for a, rank in zip(shares, memory, strict=True)]
    return shares


def asked_of(job: Job) -> tuple[float | None, float | None]:
    """`schedule.memory_limit` of each rank, in activation units or in bytes of activations; None: no such limit."""
    amount, unit = parse_limit(job.schedule.memory_limit or "") or (None, "bytes")
    return (None, amount) if amount is None or unit == "bytes" else (amount * job.parallel.pp, None)


def _over_device(job: Job, memory: list[RankMemory], costs: Costs) -> Iterator[ZbcError]:
    rooms = job.rooms
    if rooms is None or costs.bytes is None:
        return
    rank = fullest_device(rooms, memory)
    worst, limit = memory[rank], job.hardware.of(rank).least_gib or 0.0
    if worst.bytes <= rooms[rank]:
        return
    there = "" if limit >= 1 else f" ({size(limit * GIB)})"
    there += f" less a reserve of {short(job.reserve_gib)}" if job.reserve_gib else ""
    text = f"does not fit: rank {rank} needs {size(worst.bytes)}, hardware.memory_gib is {limit:g}{there}"
    flight = f"{worst.in_flight} microbatch{'es' if worst.in_flight != 1 else ''}"
    parts = [
        f"weights {size(worst.weights)} + gradients {size(worst.gradients)}"
        + (f" + masters {size(worst.masters)}" if worst.masters else "")
        + f" + optimizer {size(worst.optimizer)}",
        f"+ activations {size(worst.activations)} ({flight} in flight, peak at {worst.peak_op})"
        f" + buffers {size(worst.buffers)}",
        f"of gradients, activations and buffers {size(worst.together)} at a time",
    ]
    where = job.where("hardware", "memory_gib")
    yield ZbcError("E301", text, where=where, details=parts, hint=hint_of(job, worst, ways(job, worst)))


def fullest_device(rooms: Sequence[float], memory: Sequence[RankMemory]) -> int:
    """The rank that needs most of its device, whatever other limit it has."""
    return max(range(len(memory)), key=lambda r: memory[r].bytes / rooms[r])


def hint_of(job: Job, worst: RankMemory, some: Sequence[str]) -> str:
    """The hint of an E301 with the first of these ways to need less, as many as a line has room for."""
    shown, rest = list[str](), f"more ranks, or memory_gib = {at_least(job.memory_for(worst.bytes))}"
    for way in (one.replace("schedule.", "") for one in some):
        if len(", ".join([*shown, way, rest])) <= _LINE:
            shown.append(way)
    return ", ".join([*shown, rest])


def ways(job: Job, worst: RankMemory) -> list[str]:
    """Settings with which the fullest rank needs less, those that may remove most first."""
    parallel, model, schedule = job.parallel, job.model, job.schedule
    moving, resident = worst.activations + worst.buffers, worst.weights + worst.gradients + worst.masters
    found = list[tuple[float, str]]()
    if job.memory.chosen() == {"keep"}:
        found.append((worst.activations, RECOMPUTE))
    tokens = schedule.microbatch_size * (model.seq_len or 1)
    if model.builtin and model.vocab and not (model.loss_chunk or job.vocabulary) and tokens > 1:
        logits = min(moving, 8 * model.vocab / parallel.tp * tokens / parallel.cp)  # and their gradients
        found.append((logits, f"model.loss_chunk = {min(1024, tokens // 2)}"))
    if schedule.microbatch_size > 1 and not job.tokens:
        fewer = next(n for n in range(schedule.microbatch_size // 2, 0, -1) if schedule.microbatch_size % n == 0)
        count = schedule.microbatches * schedule.microbatch_size // fewer
        part = 1 - fewer / schedule.microbatch_size
        found.append((part * moving, f"schedule.microbatch_size = {fewer} with schedule.microbatches = {count}"))
    if model.builtin and (model.seq_len or 1) % (4 * parallel.cp) == 0:
        found.append((moving / 2, f"parallel.cp = {2 * parallel.cp}"))
    folds = model.builtin and parallel.expert_tp in (None, 1)
    most, parts = math.gcd(parallel.copies * (parallel.tp if folds else 1), model.experts or 1), parallel.ep
    parts *= parallel.tp if folds and not parallel.folded else 1  # of all experts, of which a rank has one
    if (more := next((n for n in range(parts + 1, most + 1) if most % n == 0), None)) is not None:
        found.append(((1 - parts / more) * (resident + worst.optimizer), f"parallel.ep = {more}"))
    if parallel.copies > 1 and parallel.shard == "none":
        found.append(((1 - 1 / parallel.copies) * worst.optimizer, 'parallel.shard = "optimizer"'))
    # These change the training: they are named where nothing else takes as much.
    largest = max(worst.weights, worst.gradients, worst.masters, worst.optimizer, worst.activations)
    if worst.optimizer == largest and job.optimizer.state == "float32":
        found.append((worst.optimizer / 2, 'optimizer.state = "bfloat16"'))
    if 0 < worst.masters == largest and model.master and model.lowered:
        found.append((worst.masters, 'model.parameters = "bfloat16 alone"'))
    return [way for _, way in sorted(found, key=lambda entry: -entry[0])]


def _over_limit(job: Job, memory: list[RankMemory], costs: Costs) -> Iterator[ZbcError]:
    units, most = asked_of(job)
    where = job.where("schedule", "memory_limit")
    if most is not None and costs.bytes is None:
        text = "does not fit: a limit in bytes needs a model whose sizes are known before it is built"
        yield ZbcError("E302", text, where=where, hint='give a multiple, "1.0x", or plan with --profile')
    elif most is not None or units is not None:
        held, rank = max((row.units if most is None else row.activations, -r) for r, row in enumerate(memory))
        limit, has, enough = most or 0.0, f"{size(held)} of activations", f"{at_least(held / GIB)} GiB"
        given = size(limit)
        if units is not None:
            limit, has, enough = units + 1e-6, f"{short(held)} activation units", f"{at_least(held / job.parallel.pp)}x"
            given = short(units)
        if held > limit:
            text = f"does not fit: rank {-rank} holds {has}, the limit is {given}"
            yield ZbcError("E302", text, where=where, hint=f'this schedule needs memory_limit = "{enough}"')
