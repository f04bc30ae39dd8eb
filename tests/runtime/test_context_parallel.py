"""Context parallelism: the results of one process, gathers in F, sums in B."""

import torch

from tests.refusals import refused
from tests.runtime.test_tensor_parallel import plan_of
from tests.threads import run_threads
from zbc.runtime.features.context_parallel import rows_of


def test_each_rank_has_an_early_and_a_late_chunk_of_each_slice():
    assert [rows_of([0, 8], place, 2).tolist() for place in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert rows_of([0, 4, 12], 1, 2).tolist() == [1, 2, 6, 7, 8, 9]
    sizes = [sum(row + 1 for row in rows_of([0, 96], place, 4).tolist()) for place in range(4)]
    assert len({*sizes}) == 1, "keys that queries see"


class Short:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.arange(4), torch.arange(4)


def test_samples_of_another_length_are_refused(tmp_path):
    plan = plan_of(tmp_path, pp=1, more={"cp": 2}, data={"kind": f"{__name__}:Short"})
    with refused("E505", match="no 8 tokens for ranks to share out"):
        run_threads(plan, 1)
