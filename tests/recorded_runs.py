"""Synthetic recorded runs of a plan: ranks with given times, on clocks of their own."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from zbc.compiler.compiled import Compiled
from zbc.ir import Kind, Op
from zbc.plan.directory import StoredPlan
from zbc.trace import recording as trace
from zbc.trace.recording import Cause, ClockOffset, Head, MemorySamples, Timing, Writer

MS = 1_000_000


@dataclass
class World:
    """The times of a synthetic run, in ms; `skew`: rank 0's clock minus the rank's clock, in ms."""

    op: Callable[[Op, int, int], float]  # op, rank, step
    link: Callable[[int, int], float] = lambda sender, receiver: 0.0
    hiccup: float = 0.0  # least time of a wait, also if its message is there
    transfer: float = 0.0  # time of starting a send or posting a receive
    data: float = 0.0  # time of F before it computes, without waits
    optimizer: Callable[[int], float] = lambda rank: 0.0
    agree: float = 0.0  # the sum over all ranks, once all have come
    close: float = 0.0
    held: Callable[[Op], int] | None = None  # bytes of activations after an op
    late: Callable[[int], float] = lambda rank: 0.0  # how long after the others a rank begins a step
    skew: Callable[[int], float] = lambda rank: 0.0
    tokens: tuple[int, ...] = ()  # of the rows of each microbatch


@dataclass
class _Rank:
    ops: tuple[Op, ...]
    now: int
    at: int = 0
    took: list[int] = field(default_factory=list)
    lead: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)

    def spend(self, ns: int) -> None:
        self.took.append(ns)
        self.now += ns
        self.at += 1


def record(
    compiled: Compiled, folder: Path, world: World, steps: tuple[int, ...] = (4, 5, 6), phase: str = ""
) -> trace.Trace:
    """Writes the trace of a plan, or of a phase of its ramp, with the times of this world."""
    compiled.write(folder / "plan")
    plan = StoredPlan.read(folder / "plan" / phase)
    run = folder / "run"
    trace.start(run, folder / "plan")
    count, now = plan.manifest.topology.world, 10**12
    writers = []
    for rank in range(count):
        ops = plan.program.ranks[plan.manifest.topology.of(rank).pp]
        writer = Writer(run, Head(plan.manifest.id, rank, "cpu", f"host:{rank}", len(ops)), phase=phase)
        skew = round(world.skew(rank) * MS)
        writer.clock(ClockOffset(now - skew, skew, 0))
        writers.append((writer, skew))
    for step in steps:
        ranks = [_Rank(plan.program.ranks[plan.manifest.topology.of(r).pp], now) for r in range(count)]
        timings = _step(plan, ranks, world, step, now)
        for (writer, skew), timing in zip(writers, timings, strict=True):
            writer.step(replace(timing, begin_ns=timing.begin_ns - skew, tokens=world.tokens))
        now = max(rank.now for rank in ranks) + round(world.close * MS)
    for rank, (writer, skew) in enumerate(writers):
        writer.clock(ClockOffset(now - skew, skew, 0))
        if world.held is not None:
            ops = plan.program.ranks[plan.manifest.topology.of(rank).pp]
            writer.memory(MemorySamples(steps[-1] + 1, ("activations", "peak"), [[world.held(op)] * 2 for op in ops]))
        writer.close()
    return trace.read(run, phase)


def _step(plan: StoredPlan, ranks: list[_Rank], world: World, step: int, begin: int) -> list[Timing]:
    topology, placement = plan.manifest.topology, plan.program.placement
    sent: dict[tuple[int, object], int] = {}
    begins = [begin + round(world.late(r) * MS) for r in range(len(ranks))]
    for rank, at in zip(ranks, begins, strict=True):
        rank.now = at
    moved = True
    while moved:
        moved = False
        for r, rank in enumerate(ranks):
            while rank.at < len(rank.ops) and rank.ops[rank.at].kind is not Kind.VALIDATE:
                op = rank.ops[rank.at]
                if op.kind.computes:
                    message = _needed(plan, op)
                    if message is not None and (r, message) not in sent:
                        break
                    least = round(world.hiccup * MS)
                    wait = 0 if message is None else max(least, sent[r, message] - rank.now)
                    if wait:
                        rank.waits += (rank.at, Cause.MESSAGE, wait)
                    data = round(world.data * MS) if op.kind is Kind.F else 0
                    rank.lead.append(wait + data)
                    rank.spend(wait + data + round(world.op(op, r, step) * MS))
                else:
                    if op.kind.is_send:
                        peer = placement.peer(op)
                        to = topology.rank(topology.of(r).dp, 0 if peer is None else peer)
                        sent[to, placement.message(op)] = rank.now + round(world.link(r, to) * MS)
                    rank.spend(round(world.transfer * MS) if op.kind.is_transfer else 0)
                moved = True
    return _finish(ranks, world, step, begins)


def _finish(ranks: list[_Rank], world: World, step: int, begins: list[int]) -> list[Timing]:
    """VALIDATE, which ends on all ranks at the same time, then the optimizer."""
    arrived = max(rank.now for rank in ranks)
    timings = []
    for r, rank in enumerate(ranks):
        wait = arrived - rank.now + round(world.agree * MS)
        rank.waits += (rank.at, Cause.ALL, wait)
        rank.spend(wait)
        while rank.at < len(rank.ops):
            rank.spend(round(world.optimizer(r) * MS) if rank.ops[rank.at].kind is Kind.STEP else 0)
        timings.append(Timing(step, begins[r], rank.took, rank.lead, rank.waits, round(world.close * MS)))
    return timings


def _needed(plan: StoredPlan, op: Op) -> object | None:
    """The message an op waits for, None if there is none."""
    if op.kind is Kind.W or op.kind.unit_wide:
        return None
    message = plan.program.placement.message(Op(Kind.RECV_F if op.kind is Kind.F else Kind.RECV_B, *op[1:]))
    return message if message and plan.program.placement.crosses(*message.edge, op.pipe) else None
