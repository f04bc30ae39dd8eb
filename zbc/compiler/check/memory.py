"""Checks that every rank's peak fits the job's limits.

`schedule.memory_limit` bounds activations; `hardware.memory_gib`, less its reserve, bounds everything a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.host import host_bytes
from zbc.compiler.memory.per_rank import RankMemory
from zbc.errors import ZbcError, raise_all
from zbc.ir import Program
from zbc.job.spec import Job, parse_limit
from zbc.text import GIB, at_least, short, size

EASIER = 'memory.activations = "auto", '  # the first remedy for E301, which compile_job tries


def check_memory(job: Job, memory: list[RankMemory], costs: Costs) -> None:
    """Raise E301 if a rank needs more than its device has, E302 if it holds more activations than the limit."""
    raise_all([*_over_device(job, memory, costs), *_over_limit(job, memory, costs)])


def check_host(job: Job, program: Program, costs: Costs) -> None:
    """Raise E305 if the offload copies of a rank take more of its host than hardware.host_gib."""
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
        raise ZbcError("E305", text, where=job.where("hardware", "host_gib"), details=[detail], hint=hint)


def excess(job: Job, memory: Sequence[RankMemory], costs: Costs) -> float:
    """The share by which the fullest rank exceeds its limit; 0 or less if all fit."""
    shares = [-1.0]
    if job.rooms is not None and costs.bytes is not None:
        shares.append(max(rank.bytes / room for rank, room in zip(memory, job.rooms, strict=True)) - 1)
    limit = parse_limit(job.schedule.memory_limit) if job.schedule.memory_limit else None
    if limit is not None and limit[1] == "x":
        shares.append(max(rank.units for rank in memory) / (limit[0] * job.parallel.pp) - 1)
    elif limit is not None and costs.bytes is not None:
        shares.append(max(rank.activations for rank in memory) / limit[0] - 1)
    return max(shares)


def _over_device(job: Job, memory: list[RankMemory], costs: Costs) -> Iterator[ZbcError]:
    rooms = job.rooms
    if rooms is None or costs.bytes is None:
        return
    rank = max(range(len(memory)), key=lambda r: memory[r].bytes / rooms[r])
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
    easier = EASIER if job.memory.chosen() == {"keep"} else ""
    easier += "parallel.ep, " if job.model.experts and job.parallel.dp > job.parallel.ep else ""
    stays, chunks = worst.bytes - worst.activations - worst.buffers, 4 * job.parallel.cp
    if stays <= rooms[rank] and job.model.builtin and (job.model.seq_len or 1) % chunks == 0:
        easier += f"parallel.cp = {2 * job.parallel.cp}, "
    smaller = "" if "parallel.cp" in easier else "a smaller microbatch_size, "
    hint = f"{easier}more ranks, {smaller}or memory_gib = {at_least(job.memory_for(worst.bytes))}"
    yield ZbcError("E301", text, where=where, details=parts, hint=hint)


def _over_limit(job: Job, memory: list[RankMemory], costs: Costs) -> Iterator[ZbcError]:
    limit = parse_limit(job.schedule.memory_limit) if job.schedule.memory_limit else None
    if limit is None:
        return
    amount, unit = limit
    where = job.where("schedule", "memory_limit")
    if unit == "x":
        rank = max(range(len(memory)), key=lambda r: memory[r].units)
        if memory[rank].units > amount * job.parallel.pp + 1e-6:
            needs, peak = memory[rank].units / job.parallel.pp, memory[rank].units
            text = (
                f"does not fit: rank {rank} holds {short(peak)} activation units, the limit is "
                f"{short(amount * job.parallel.pp)}"
            )
            yield ZbcError("E302", text, where=where, hint=f'this schedule needs memory_limit = "{at_least(needs)}x"')
    elif costs.bytes is None:
        text = "does not fit: a limit in bytes needs a model whose sizes are known before it is built"
        yield ZbcError("E302", text, where=where, hint='give a multiple, "1.0x", or plan with --profile')
    else:
        rank = max(range(len(memory)), key=lambda r: memory[r].activations)
        if memory[rank].activations > amount:
            held = memory[rank].activations / GIB
            text = f"does not fit: rank {rank} holds {size(held * GIB)} of activations, the limit is {size(amount)}"
            yield ZbcError("E302", text, where=where, hint=f'this schedule needs memory_limit = "{at_least(held)} GiB"')
