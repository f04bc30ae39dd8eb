"""A random permutation of any number of items, computed on demand: item i of a billion costs microseconds.

A Feistel network permutes the numbers below the smallest square of a power of two that covers them; results that are
too large go through it again, so that it stays a permutation (cycle walking; at most four passes on average).
"""

from __future__ import annotations

_ROUNDS = 6
_MASK = 2**64 - 1
_REMEMBERED = 4096  # cached values of a round; all values for up to 2**24 items


class Permutation:
    """A permutation of range(count): `order[i]`, a pure function of (count, seed)."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._half = max(1, ((count - 1).bit_length() + 1) // 2)
        self._low = (1 << self._half) - 1
        keys = (_mix(seed + round_ * 0x9E3779B97F4A7C15) for round_ in range(1, _ROUNDS + 1))
        self._rounds = [_Round(key, self._low) for key in keys]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._count:
            raise IndexError(index)
        half, low, rounds, count = self._half, self._low, self._rounds, self._count
        while True:
            left, right = index >> half, index & low
            for values in rounds:
                left, right = right, left ^ values[right]
            index = left << half | right
            if index < count:
                return index


class _Round(dict[int, int]):
    """The round function, with cached values: mixing takes ten times as long as a look-up."""

    def __init__(self, key: int, low: int) -> None:
        super().__init__()
        self._key, self._low = key, low

    def __missing__(self, half: int) -> int:
        value = _mix(half ^ self._key) & self._low
        if len(self) < _REMEMBERED:
            self[half] = value
        return value


def _mix(x: int) -> int:
    """The finaliser of splitmix64: every bit of the result depends on every bit of `x`."""
    x &= _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
