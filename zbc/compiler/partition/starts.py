"""Partitions that are even in what layers keep in memory, and in that and their time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import add

from zbc.compiler.cost import estimate
from zbc.compiler.partition.balance import Points, Weights, even
from zbc.ir import Placement
from zbc.job.spec import Job

STATE = 16.0  # bytes that stay with a parameter: weight, gradient and two moments


def even_in_memory(
    job: Job,
    table: Sequence[estimate.Layer],
    placement: Placement,
    flight: Sequence[int],
    times: Weights,
    *,
    guessed: bool,
    one_pipe: bool,
) -> Iterator[Points]:
    """With `flight[s]` microbatches on stage s; on a device also by what stays with layers; and mixed with `times`.

    A guess of what is in flight is not worth a proof that the last layer is where it should be. With `one_pipe` also
    for the first of two pipes: one microbatch alone is in one of them.
    """
    given = estimate.given_activations(job, list(table))
    kept = [layer.size.act_b for layer in table] if given is None else [act_b for act_b, _ in given]
    several = [[[count * size for size in kept] for count in flight]]
    if job.hardware.memory_gib is not None:
        state = [STATE * layer.params for layer in table]
        several.append([list(map(add, row, state)) for row in several[0]])
    for memory in several:
        if any(map(any, memory)):
            yield even(memory, placement, exact=not guessed)
            yield even(_mixed(times, memory), placement, exact=False)
            if one_pipe:
                yield even(memory, Placement(placement.pipes[:1]))


def _mixed(times: Weights, memory: Weights) -> list[list[float]]:
    """Time and memory, each by its share of the whole."""
    whole = [sum(map(sum, table)) or 1.0 for table in (times, memory)]
    return [
        [a / whole[0] + b / whole[1] for a, b in zip(*rows, strict=True)] for rows in zip(times, memory, strict=True)
    ]
