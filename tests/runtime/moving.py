"""Inserts offload into any program, and copiers that reveal a missing wait every time."""

from __future__ import annotations

from zbc.compiler.check import check_all
from zbc.ir import Kind, Op, Program
from zbc.runtime.features.offload.copying import Copier, Slab, copy_back, copy_out


def moved(program: Program) -> Program:
    """Offloads and reloads the activations of every forward, except those before REDO, which runs them again."""
    found = program.with_ranks([_moved(ops) for ops in program.ranks], by="moved")
    check_all(found)
    return found


def _moved(ops: tuple[Op, ...]) -> list[Op]:
    redo = next((i for i, op in enumerate(ops) if op.kind is Kind.REDO), -1)
    work = [i for i, op in enumerate(ops) if op.kind.computes]
    back = {ops[i].key: k for k, i in enumerate(work) if ops[i].kind.row.family == "input"}
    before: dict[int, list[Op]] = {}
    behind: dict[int, list[Op]] = {}
    for k, i in enumerate(work):
        op = ops[i]
        if op.kind is not Kind.F or i < redo:
            continue
        end = back[op.key]
        done = i + 2 - _bound(ops, i) if _bound(ops, i) else i  # the end of the group of an F
        behind.setdefault(done, []).append(op._replace(kind=Kind.OFFLOAD))
        quit = done if end == k + 1 or _bound(ops, work[k + 1]) else work[k + 1]
        behind.setdefault(quit, []).append(op._replace(kind=Kind.RELEASE))
        fetch = end - 1 if end > k + 2 and not _bound(ops, work[end - 1]) else end
        place = work[fetch] - (_bound(ops, work[fetch]))
        before.setdefault(place, []).append(op._replace(kind=Kind.RELOAD))
    return [one for i, op in enumerate(ops) for one in (*before.get(i, ()), op, *behind.get(i, ()))]


def _bound(ops: tuple[Op, ...], i: int) -> int:
    """The position of an op in an overlap group: 1 or 2, 0 without a group."""
    return next((d for d in (1, 2) if i >= d and ops[i - d].kind is Kind.OVERLAP), 0)


class Done:
    """A copy that completes when it is waited for, or at once."""

    def __init__(self, copier: Poisoning) -> None:
        self.copier = copier

    def result(self) -> None:
        self.copier.run_up_to(self)

    def done(self) -> bool:
        return self not in [one for one, _ in self.copier.jobs]


class Poisoning(Copier):
    """Fills released and newly allocated memory with 0xFF. Copies run at once, or, if `late`, when waited for."""

    def __init__(self, *, late: bool) -> None:
        self.late, self.jobs, self.released = late, [], 0

    def take(self, size):
        found = super().take(size)
        found.fill_(0xFF)
        return found

    def release(self, storage):
        self.released += storage.nbytes()
        storage.fill_(0xFF)

    def out(self, slab: Slab, pieces):
        slab.memory.fill_(0xFF)
        return self._start(copy_out, slab, pieces)

    def back(self, slab: Slab, pieces, gone):
        return self._start(copy_back, slab, pieces)

    def _start(self, copy, slab, pieces):
        ticket = Done(self)
        self.jobs.append((ticket, lambda: copy(slab, pieces)))
        if not self.late:
            self.run_up_to(ticket)
        return ticket

    def run_up_to(self, ticket):
        while any(one is ticket for one, _ in self.jobs):
            _, job = self.jobs.pop(0)
            job()
