"""The forward-only program that evaluates a model on the ranks of its stages; made from the placement alone.

The runtime runs it, `zbc plan` and `zbc check` prove it.
"""

from __future__ import annotations

from zbc.ir import Kind, Message, Op, Placement, Program, forward


def forward_only(placement: Placement, microbatches: int, slices: int = 1, *, shared: bool = False) -> Program:
    """Every microbatch, slice by slice, once through all stages (of pipe 0), in waves: F of stage s, unit i in wave
    s + i.

    Within a wave later stages come first. All ranks follow this order, and so do the messages of each direction. The
    buffer of a transfer is posted one F ahead.

        rank 1 of 2      RECV_F s1 m0, RECV_F s1 m1, F s1 m0, F s1 m1

    With a `shared` vocabulary each rank looks a unit's words up one wave before its first F, and computes the logits of
    its own words one wave after its last F: no rank waits for a wave that others have begun.

        rank 1 of 2      I m0, GIVE m0, RECV_F s1 m0, I m1, GIVE m1, RECV_F s1 m1, F s1 m0, SPREAD m0, F s1 m1, ..
    """
    stages = range(placement.stages)
    into = [[(a, s) for a in placement.sources(s) if placement.crosses(a, s)] for s in stages]
    out = [[(s, b) for b in placement.sinks(s) if placement.crosses(s, b)] for s in stages]
    waves = sorted((stage + unit, -stage, unit) for stage in stages for unit in range(microbatches * slices))
    ranks: list[list[Op]] = []
    for rank in range(placement.ranks):
        here = [(wave, -back, unit) for wave, back, unit in waves if placement.rank_of(-back) == rank]
        forwards = [(wave, forward(stage, unit // slices, 0, unit % slices)) for wave, stage, unit in here]
        posts = [[placement.recv(Message(*edge, op.mb, 0, op.slice)) for edge in into[op.stage]] for _, op in forwards]
        now, *later = *posts, list[Op]()
        blocks: list[tuple[float, list[Op]]] = [(-1.0, list(now))]
        for (wave, op), ahead in zip(forwards, later, strict=True):
            sends = [placement.send(Message(*edge, op.mb, 0, op.slice)) for edge in out[op.stage]]
            blocks.append((wave, [*ahead, op, *sends]))
        blocks += _words(placement.ends[-1], microbatches, slices) if shared else []
        ranks.append([op for _, ops in sorted(blocks, key=lambda block: block[0]) for op in ops])
    sums = 2 if shared else 0  # MEET has no gradient to sum: there is no backward
    return Program(placement, microbatches, tuple(map(tuple, ranks)), ("forward-only",), slices, vocabulary=sums)


def forward_of(program: Program) -> Program:
    """The forward-only program for the placement of a training program."""
    return forward_only(program.placement, program.microbatches, program.slices, shared=bool(program.vocabulary))


# Names kinds: a row says what an op needs, not that only a backward uses what it makes.
SHARED = (Kind.I, Kind.GIVE, Kind.SPREAD, Kind.S, Kind.MEET)  # ops of each rank for each unit, in this order


def _words(last: int, microbatches: int, slices: int) -> list[tuple[float, list[Op]]]:
    """(wave, ops) that all ranks run for a shared vocabulary: before the wave of a unit's first F, after the wave of
    its F on the `last` stage, and after the next wave."""
    timed = list[tuple[float, list[Op]]]()
    for unit in range(microbatches * slices):
        mb, part = divmod(unit, slices)
        look_up, give, spread, tell, meet = (Op(kind, 0, mb, 0, part) for kind in SHARED)
        end = unit + last
        timed += [(unit - 0.75, [look_up, give]), (end + 0.25, [spread]), (end + 1.5, [tell, meet])]
    return timed
