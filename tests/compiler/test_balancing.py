"""Samples of unequal length dealt to replicas and packed into microbatches."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbc.plan import balancing
from zbc.plan.balancing import Shape, balanced, deal, dealt_evenly, first_fit, longest_first, samples_of_step


def fullest(costs, parts):
    """The largest load of a rank."""
    return max(sum(costs[i] for i in part) for part in parts)


def least(costs, ranks):
    """A lower bound of it: the mean, the largest cost, or the smallest two of the ranks + 1 largest."""
    first = sorted(costs, reverse=True)
    pair = first[ranks - 1] + first[ranks] if len(first) > ranks else 0.0
    return max(sum(costs) / ranks, first[0] if first else 0.0, pair)


def drawn(source, count, longest=8192, sigma=1.1):
    return [max(1, min(longest, round(source.lognormvariate(0, sigma) * longest / 6))) for _ in range(count)]


@given(st.lists(st.integers(1, 50), max_size=14), st.integers(1, 5))
def test_everything_is_dealt_once_and_never_worse_than_longest_first(costs, ranks):
    for way in (balanced, longest_first):
        parts = way(costs, ranks)
        assert len(parts) == ranks and sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert fullest(costs, balanced(costs, ranks)) <= fullest(costs, longest_first(costs, ranks))
    assert fullest(costs, balanced(costs, ranks)) >= least(costs, ranks) * (1 - 1e-9)


@pytest.mark.parametrize("each", [4, 8, 16])
def test_with_four_samples_per_rank_the_fullest_has_little_more_than_the_bound(each):
    source, found = random.Random(each), []
    for _ in range(100):
        ranks = source.choice((2, 4, 8))
        costs = [n + n * n / 16384 for n in drawn(source, each * ranks)]
        found.append(fullest(costs, balanced(costs, ranks)) / least(costs, ranks))
        assert fullest(costs, balanced(costs, ranks)) <= fullest(costs, longest_first(costs, ranks)) * (1 + 1e-12)
    assert statistics.mean(found) <= 1.01


@given(st.lists(st.integers(1, 16), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 3))
def test_each_sample_lies_once_in_a_row_that_has_room(lengths, replicas, rows):
    shape = Shape(replicas, 16, rows, 64, 2, 0.01)
    for replicas_of in (deal(lengths, shape), dealt_evenly(lengths, shape)):
        found = [row for mbs in replicas_of for mb in mbs for row in mb]
        assert sorted(i for row in found for i in row) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in row) <= 16 for row in found)
        assert all(len(mbs) >= 1 and all(len(mb) <= rows for mb in mbs) for mbs in replicas_of)
    evenly = dealt_evenly(lengths, shape)
    assert len({len(mbs) for mbs in evenly}) == 1
    slowest = [max(shape.time(mbs, lengths) for mbs in way) for way in (deal(lengths, shape), evenly)]
    assert slowest[0] <= slowest[1] * (1 + 1e-9)


def test_what_does_not_fit_is_not_dealt_and_attention_counts():
    assert deal([16] * 5, Shape(2, 16, most=2)) is None
    assert [len(mbs) for mbs in deal([16] * 5, Shape(2, 16, most=3))] in ([2, 3], [3, 2])
    assert first_fit([3, 9, 7, 6, 1], range(5), 10) == [[1, 4], [2, 0], [3]]
    # One long sample against short ones with as many tokens.
    lengths = [64] + [8] * 24
    shape = Shape(2, 64, 1, 16, 1, 0.05)
    long, short = deal(lengths, shape), deal(lengths, Shape(2, 64, 1, 16, 1, 0.0))
    assert sorted(map(len, long)) == [1, 3] and sorted(map(len, short)) == [2, 2]


def test_a_step_takes_samples_for_as_many_microbatches_as_asked():
    source = random.Random(3)
    lengths = drawn(source, 4096, 1024)
    for replicas, rows, mean in ((2, 1, 4), (4, 2, 8)):
        shape = Shape(replicas, 1024, rows, 4 * mean, 2, 0.0)
        count = samples_of_step(lengths, shape, mean)
        steps = [deal(source.sample(lengths, count), shape) for _ in range(20)]
        found = statistics.mean(len(mbs) for way in steps for mbs in way)
        assert found == pytest.approx(mean, rel=0.15)


def test_a_margin_keeps_samples_as_they_come_where_little_is_gained(monkeypatch):
    lengths = [16, 15, 15, 15]
    monkeypatch.setattr(balancing, "MARGIN", 0.5)
    assert deal(lengths, Shape(2, 16, most=4, quadratic=0.001)) == balancing.dealt_evenly(lengths, Shape(2, 16))
