"""List-scheduler policies that between them lose little on any instance: a fixed portfolio.

Chosen offline by greedy cover over a grid of policies on some hundred instances (published profiles, memory limits from
half to twice 1F1B's, even and uneven stages). Among the one-chunk policies, the five that wait for half an op and more
were added on eighty instances with half to seven eighths. Columns as in listing.py.
"""

from __future__ import annotations

# mode, w_gap, w_slack, first_b, look, pick_f, pick_b, w_memory, reserve_later
_ONE_CHUNK = (
    (1, 0.5, 1, 0.5, 0.25, 0, 0, 1, 0.0),
    (1, 0.75, 0, 0, 0.25, 0, 0, 1, 0.0),
    (1, 0.75, 1, 0, 0.75, 0, 0, 0, 0.0),
    (1, 0, 0, 99, 0.25, 0, 0, 0, 0.0),
    (1, 0.5, 0, 0, 1, 0, 0, 1, 0.0),
    (1, 0.5, 0, 0, 0, 0, 0, 1, 0.0),
    (2, 0.75, 0, 0, 0.25, 0, 0, 0, 0.0),
    (1, 1, 1, 0, 0.25, 0, 0, 1, 0.0),
    (1, 0, 0, 1, 1, 0, 0, 0, 0.0),
    (1, 0.75, 1, 0, 1, 0, 0, 1, 0.0),
    (0, 1, 0, 0, 0.75, 0, 0, 0, 0.0),
    (1, 0.75, 1, 0, 0.5, 0, 0, 0, 0.0),
    (1, 0.5, 1, 0, 0.5, 0, 0, 0, 0.0),
)
_CHUNKS = (
    (1, 0.25, 0, 99, 0, 0, 0, 0, 0.5),
    (0, 0.75, 1, 99, 0, 0, 1, 1, 0.0),
    (2, 0.75, 0, 99, 0, 0, 1, 1, 0.0),
    (1, 0.25, 0, 1, 0.25, 0, 1, 1, 0.5),
    (2, 0.75, 1, 1, 0.25, 0, 1, 0, 0.5),
    (2, 0.75, 0, 99, 1, 0, 0, 1, 0.0),
    (1, 0.25, 0, 0, 0.25, 0, 0, 0, 0.5),
    (2, 0.75, 0, 1, 1, 0, 1, 0, 0.0),
    (0, 0.25, 0, 99, 0, 0, 1, 1, 0.0),
    (1, 0.75, 0, 99, 1, 0, 0, 1, 0.0),
    (0, 0.25, 1, 1, 0, 0, 1, 0, 0.5),
    (2, 1, 0, 99, 0.25, 0, 1, 0, 0.0),
)


def policies(v: int) -> list[tuple[float, ...]]:
    """Policy vectors for v chunks per rank."""
    rows = _ONE_CHUNK if v == 1 else _CHUNKS
    return [tuple(float(x) for x in (*row[:8], 1.0, row[8], 0.0, 0.0)) for row in rows]
