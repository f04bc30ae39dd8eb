"""Bytes that a layer keeps for one microbatch, and temporaries of its ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

GRAD_BYTES = 4  # gradients and optimizer state are float32


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one layer for one microbatch, and elements of its largest parameter."""

    act_b: float = 0.0
    act_w: float = 0.0
    stays: float = 0.0  # the part of act_b that offload leaves on the device
    entry: float = 0.0  # its input
    entry_stays: float = 0.0  # the same of it
    result: float = 0.0  # its output
    more_f: float = 0.0
    more_alone: float = 0.0  # F that keeps nothing
    more_b: float = 0.0  # peak of its B, W or BW beyond the bytes held before it
    more_w: float = 0.0
    more_bw: float = 0.0
    came_b: float = 0.0  # gradients that its first B of a step makes, and its first W
    came_w: float = 0.0
    rise_b: float = 0.0  # as more_b in the first of a step, with gradients as they are made
    rise_w: float = 0.0
    rise_bw: float = 0.0
    # Of "b", "bw", "rise_b" and "rise_bw" the part by which the gradient that comes from the next layer of the stage is
    # gone; more_b and so on are of the part before.
    late: Mapping[str, float] = field(default_factory=dict)
    until_bw: float | None = None  # peak of a BW until its first collective, if later layers have none: at it ranks
    # compute the weight gradients of those
    whole: Footprint | None = None  # this footprint in plans that split no backward, if it differs
    casts: float = 0.0  # copies of weights in the autocast type, once for all microbatches
    tables: float = 0.0  # constants, not parameters
    logits: float = 0.0  # the part of act_b with an entry per word of the vocabulary
    largest: float = 0.0
    loose: float = 0.0  # the part of its input that only the first layer of a stage keeps
    tail: float = 0.0  # its output, if its backward needs that
    keeps_given: bool = False  # B leaves its incoming gradient itself for W, which act_w counts
    pair: float = 0.0  # elements: twice a parameter and once the one before it, at most; 0 for twice the largest
    ends: tuple[float, float] = (0.0, 0.0)  # elements of its first and its last parameter
    kv: float = 0.0  # the part of act_b in keys and values
    # In a slice, whose F finds kv there: bytes of all slices' keys, values and gradients that its B frees or (-) makes.
    ends_kv: float = 0.0

    def scaled(self, rows: float) -> Footprint:
        """The footprint of a share of the tokens; bytes of parameters stay."""
        return replace(self, **{name: rows * getattr(self, name) for name in _BY_TOKEN})


_BY_TOKEN = (
    "act_b",
    "stays",
    "act_w",
    "entry",
    "entry_stays",
    "result",
    "more_f",
    "more_alone",
    "logits",
    "loose",
    "tail",
    "kv",
)


NOTHING = Footprint()
