"""A random order of any number of things that is computed, not stored: item i of a billion costs microseconds.

A Feistel network permutes the smallest square of a power of two that covers the numbers; results that are too large go
through it again, which keeps a permutation one (cycle walking; at most four rounds of that on average).
"""

from __future__ import annotations

_ROUNDS = 6
_MASK = 2**64 - 1


class Permutation:
    """A permutation of range(count): `order[i]`, a pure function of (count, seed)."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._half = max(1, ((count - 1).bit_length() + 1) // 2)
        self._low = (1 << self._half) - 1
        self._keys = [_mix(seed + round_ * 0x9E3779B97F4A7C15) for round_ in range(1, _ROUNDS + 1)]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._count:
            raise IndexError(index)
        while (index := self._turn(index)) >= self._count:
            pass
        return index

    def _turn(self, number: int) -> int:
        left, right = number >> self._half, number & self._low
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._low)
        return left << self._half | right


def _mix(x: int) -> int:
    """The finaliser of splitmix64: every bit of the result depends on every bit of `x`."""
    x &= _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
