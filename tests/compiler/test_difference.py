"""Differences between programs: complete, in order, and as few moves as possible."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compiler.grid import make
from tests.lowered import lower
from zbc.compiler.report.difference import difference
from zbc.ir import Kind, Op

OPS = [Op(Kind.F, 0, mb) for mb in range(8)]
few = settings(max_examples=200, deadline=None, derandomize=True)
sides = st.tuples(st.permutations(OPS), st.permutations(OPS), st.integers(0, 8), st.integers(0, 8))


def longest(left, right):
    """The longest common subsequence, by brute force."""
    for size in range(min(len(left), len(right)), 0, -1):
        for some in combinations(left, size):
            places = [right.index(op) if op in right else -1 for op in some]
            if min(places) >= 0 and all(a < b for a, b in pairwise(places)):
                return size
    return 0


@pytest.mark.long
@few
@given(sides)
def test_the_lines_of_a_difference_are_both_orders(drawn):
    left, right = drawn[0][: drawn[2]], drawn[1][: drawn[3]]
    one, two = (make("1f1b", 1, 1).with_ranks([ops], by="x") for ops in (left, right))
    (found,) = difference(one, two)
    assert [line.op for line in found.lines if line.left is not None] == list(left)
    assert [line.op for line in found.lines if line.right is not None] == list(right)
    assert [line.left for line in found.lines if line.left is not None] == list(range(len(left)))
    assert found.only_left == len(set(left) - set(right))
    assert found.only_right == len(set(right) - set(left))
    assert found.moved == len(set(left) & set(right)) - longest(left, right)


def test_transfers_are_compared_only_when_asked_for():
    program = lower(make("1f1b", 2, 2))
    ranks = [list(ops) for ops in program.ranks]
    ranks[0][1], ranks[0][2] = ranks[0][2], ranks[0][1]
    other = program.with_ranks(ranks, by="x")
    swapped = [program.ranks[0][1].kind, program.ranks[0][2].kind]
    assert all(rank.same for rank in difference(program, other)) == any(kind.is_transfer for kind in swapped)
    assert difference(program, other, compute_only=False)[0].moved == 1


def test_a_rank_of_one_side_alone_is_all_new():
    found = difference(make("1f1b", 2, 2), make("1f1b", 3, 2))
    assert found[2].only_right == 4
    assert found[2].only_left == found[2].moved == 0
