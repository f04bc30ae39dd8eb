"""The cost model against what others measured on GPUs: bench/vocabulary.py has the table and says what is compared."""

import pytest

from bench.vocabulary import SUSTAINED, cases


@pytest.fixture(scope="module")
def found():
    return list(cases())


def test_throughput_of_naive_over_balanced_vocabulary_is_within_six_percent_for_seven_of_eight(found):
    """The eighth is half as fast and 8 GB larger than its neighbours, for reasons its paper does not give."""
    assert [one.odd for one in found] == [False] * 3 + [True] + [False] * 4
    assert all(abs(one.error) <= 0.06 for one in found if not one.odd), [one.error for one in found]


@pytest.mark.repeats
def test_the_ratios_do_not_hang_on_the_rate_of_the_device():
    for tflops in (156.0, 200.0, 250.0):
        others = list(cases(tflops, SUSTAINED[1]))
        assert sum(abs(one.error) <= 0.06 for one in others) == 7, tflops


def test_steps_with_a_balanced_vocabulary_take_as_long_as_published(found):
    for one in found:
        assert one.seconds[1] == pytest.approx(one.published_s[1], rel=0.03)


def test_memory_of_the_fullest_rank_is_what_was_measured(found):
    for one in found:
        assert one.odd or one.gb == pytest.approx(one.published_gb, rel=0.08)
