"""A timeline as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

A process is a rank; its tracks are its lanes: compute, tensors in flight to each neighbour, sums of gradients, and for
a recorded run the waits, transfers and optimizer of the rank.
Arrows lead from the start of a transfer to the op that reads the tensor; counters show the memory of the rank. Slices
of one track never overlap: tensors in flight at the same time have separate tracks.

Format: "Trace Event Format" of the Chromium project. Times are whole nanoseconds, written in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from zbc.compiler.memory.ledger import over_time
from zbc.ir import Kind, Op
from zbc.ops import At, Lane
from zbc.text import MIB
from zbc.viz.look import look
from zbc.viz.strip import Drawn, DrawnOp

_NS = 1_000_000  # in a millisecond
_APART = 1000  # distance of the process ids of two plans
_COMPUTE, _RUNTIME, _SHARED, _SENDS = 1, 3, 6, 10  # track ids; from _SENDS on, each neighbour has _LANES tracks
_TRACKS = {  # lane -> (track, name), for the other lanes
    Lane.COLLECTIVE: (2, "collectives"),
    Lane.OUT: (4, "copies to the host"),
    Lane.BACK: (5, "copies from the host"),
}
_LANES = 1000


def draw(drawn: Sequence[Drawn], ranks: Sequence[int] | None = None) -> str:
    """The trace of one plan or of several; `ranks` leaves out all others."""
    lines: list[str] = []
    for k, plan in enumerate(drawn):
        lines += _plan(plan, k * _APART, ranks, f"{plan.name}: " if len(drawn) > 1 else "")
    names = json.dumps([plan.title for plan in drawn])
    return f'{{"displayTimeUnit":"ms","otherData":{{"plans":{names}}},"traceEvents":[\n' + ",\n".join(lines) + "\n]}\n"


def _plan(one: Drawn, base: int, ranks: Sequence[int] | None, prefix: str) -> Iterator[str]:
    shown = list(ranks) if ranks is not None else list(range(one.strip.ranks))
    rank_of: dict[int, int] = {}
    pieces: dict[int, DrawnOp] = {}
    for rank in shown:
        pid = base + rank + 1
        yield _named("process_name", pid, 0, f"{prefix}rank {rank}")
        yield f'{{"ph":"M","cat":"name","name":"process_sort_index","pid":{pid},"tid":0,"args":{{"sort_index":{pid}}}}}'
        yield _named("thread_name", pid, _COMPUTE, "compute")
        for piece in one.strip.pieces(rank):
            rank_of[piece.id], pieces[piece.id] = rank, piece
            yield _slice(pid, _COMPUTE, str(piece.op), _called(piece.op.kind), piece.start, piece.end, _about(piece.op))
        yield from _events(one, rank, pid)
        yield from _sums(one, rank, pid)
        yield from _runtime(one, rank, pid)
        yield from _counters(one, rank, pid)
    yield from _transfers(one, base, pieces, rank_of)


def _about(op: Op) -> str:
    about = f',"slice":{op.slice}' if op.slice else ""
    about += ',"pipe":"up"' if op.pipe else ""
    return f'{{"stage":{op.stage},"microbatch":{op.mb}{about}}}'


def _events(one: Drawn, rank: int, pid: int) -> Iterator[str]:
    """Collectives and copies next to compute, a track per lane."""
    pieces = [piece for piece in one.strip.sums(rank) if piece.end > piece.start]
    for lane, (track, name) in _TRACKS.items():
        in_lane = [piece for piece in pieces if piece.op.kind.row.lane is lane]
        if in_lane:
            yield _named("thread_name", pid, track, name)
        for piece in in_lane:
            yield _slice(pid, track, str(piece.op), _called(piece.op.kind), piece.start, piece.end, "{}")


def _sums(one: Drawn, rank: int, pid: int) -> Iterator[str]:
    """Sums of tensor-parallel ranks, on a track next to the ops that hide them."""
    if not one.braided:
        return
    yield _named("thread_name", pid, _SHARED, "sums and swaps inside of ops")
    for piece in one.strip.shared(rank, one.costs):
        name = f"sums of {piece.op}"
        yield _slice(pid, _SHARED, name, "hidden" if piece.hidden else "waited for", piece.start, piece.end, "{}")


def _called(kind: Kind) -> str:
    return kind.value if kind.row.look is None else look(kind).name


def _runtime(one: Drawn, rank: int, pid: int) -> Iterator[str]:
    """Waits, transfers and optimizer of a recorded rank, on a track of their own."""
    if one.recorded is None:
        return
    yield _named("thread_name", pid, _RUNTIME, "waits, transfers, optimizer")
    begin = one.strip.begin
    for span in one.recorded.beside(rank):
        if span.end > begin:  # time begins with the first op that computes
            start = max(begin, span.start) - begin
            yield _slice(pid, _RUNTIME, span.name, span.what, start, span.end - begin, "{}")


def _transfers(one: Drawn, base: int, pieces: dict[int, DrawnOp], rank_of: dict[int, int]) -> Iterator[str]:
    """Tensors between ranks, each a slice on a track of the sender and an arrow to the op that reads it."""
    lanes: dict[tuple[int, int], list[int]] = {}  # sender, receiver -> when each lane is free, ns
    sources = list(one.strip.sources())
    crossing = [(pieces[j], pieces[i]) for i, j in enumerate(sources) if i in pieces and j in pieces]
    crossing = [(a, b) for a, b in crossing if rank_of[a.id] != rank_of[b.id]]
    crossing.sort(key=lambda pair: pair[0].end)
    for number, (source, taker) in enumerate(crossing):
        sender, receiver = rank_of[source.id], rank_of[taker.id]
        ms = one.costs.link(source.op.pipe, source.op.stage, taker.op.stage, source.op.mb)
        start, stop = _ns(source.end), min(_ns(source.end + ms), _ns(taker.start))
        track, begin = _COMPUTE, _ns(source.start)
        if stop > start:
            free = lanes.setdefault((sender, receiver), [])
            lane = next((k for k, busy in enumerate(free) if busy <= start), len(free))
            track, begin = _SENDS + _LANES * receiver + lane, start
            if lane == len(free):
                free.append(0)
                name = f"to rank {receiver}" + (f" ({lane + 1})" if lane else "")
                yield _named("thread_name", base + sender + 1, track, name)
            free[lane] = stop
            what = "output" if source.op.kind.gives is At.SINKS else "gradient"
            text = f"{what} of {source.op}"
            yield _slice_ns(base + sender + 1, track, text, "transfer", start, stop, f'{{"for":"{taker.op}"}}')
        flow = f'"cat":"message","name":"message","id":{base * 10**7 + number}'
        yield f'{{"ph":"s",{flow},"pid":{base + sender + 1},"tid":{track},"ts":{_us(begin)}}}'
        at = _us(_ns(taker.start))
        yield f'{{"ph":"f","bp":"e",{flow},"pid":{base + receiver + 1},"tid":{_COMPUTE},"ts":{at}}}'


def _counters(one: Drawn, rank: int, pid: int) -> Iterator[str]:
    """Activation units over time, and bytes by category if they are known."""
    yield from _changes(pid, "activations (shares of a microbatch)", one.strip.memory(rank, one.costs), "units")
    begin = one.strip.begin
    if one.recorded is not None:
        for category in ("activations", "gradients", "buffers"):
            sizes = ((ms - begin, size / MIB) for ms, size in one.recorded.held(rank, category) if ms >= begin)
            yield from _changes(pid, f"{category}, measured (MiB)", sizes, "MiB")
        return
    if one.costs.bytes is None:
        return
    held = [
        (point.ms - begin, point.activations / MIB)
        for timeline in one.strip.steps
        for point in over_time(timeline, rank, one.costs)
    ]
    yield from _changes(pid, "activations (MiB)", iter(held), "MiB")


def _changes(pid: int, name: str, points: Iterator[tuple[float, float]], unit: str) -> Iterator[str]:
    """A counter; the last of several values at the same time counts."""
    last: dict[int, float] = {}
    for ms, value in points:
        last[_ns(ms)] = value
    for ns in sorted(last):
        value = round(max(0.0, last[ns]), 6)
        args = f'{{"{unit}":{value}}}'
        yield f'{{"ph":"C","cat":"memory","name":"{name}","pid":{pid},"tid":0,"ts":{_us(ns)},"args":{args}}}'


# ---- events --------------------------------------------------------------------------------------------------


def _named(what: str, pid: int, tid: int, name: str) -> str:
    return f'{{"ph":"M","cat":"name","name":"{what}","pid":{pid},"tid":{tid},"args":{{"name":{json.dumps(name)}}}}}'


def _slice(pid: int, tid: int, name: str, category: str, start: float, end: float, about: str) -> str:
    return _slice_ns(pid, tid, name, category, _ns(start), _ns(end), about)


def _slice_ns(pid: int, tid: int, name: str, category: str, start: int, end: int, about: str) -> str:
    times = f'"ts":{_us(start)},"dur":{_us(end - start)}'
    return f'{{"ph":"X","name":"{name}","cat":"{category}","pid":{pid},"tid":{tid},{times},"args":{about}}}'


def _ns(ms: float) -> int:
    return round(ms * _NS)


def _us(ns: int) -> str:
    """Nanoseconds as microseconds, exactly."""
    whole, part = divmod(ns, 1000)
    return f"{whole}.{part:03d}" if part else str(whole)
