"""Context parallelism: the results of one process, gathers in F, sums in B."""

from collections import Counter

import pytest
import torch

from tests.refusals import refused
from tests.runtime.test_tensor_parallel import plan_of
from tests.threads import run_threads
from zbc.runtime.features.context_parallel import rows_of

HERE = "tests.runtime.test_context_parallel"


class Holes:
    """Sequences of tokens with some targets that do not count; in some the whole first half does not."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        made = torch.randint(259, (9,), generator=torch.Generator().manual_seed(index))
        target = made[1:].clone()
        target[: index % 5] = -100
        return made[:-1], target


def test_each_rank_has_an_early_and_a_late_chunk_of_each_slice():
    assert [rows_of([0, 8], place, 2).tolist() for place in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert rows_of([0, 4, 12], 1, 2).tolist() == [1, 2, 6, 7, 8, 9]
    sizes = [sum(row + 1 for row in rows_of([0, 96], place, 4).tolist()) for place in range(4)]
    assert len({*sizes}) == 1, "keys that queries see"


EXCHANGES = {
    "apart": ("zb-h1", {}, {"F": (1, 0), "B": (0, 1), "BW": (0, 1)}),
    "recompute": ("1f1b", {"memory": {"activations": "recompute"}}, {"F": (1, 0), "BW": (1, 1)}),
    "selective": ("1f1b", {"memory": {"activations": "selective"}}, {"F": (1, 0), "BW": (1, 1)}),
    "slices": ("zb-h1", {"slices": 2}, {"F": (1, 0), "B": (0, 1), "BW": (0, 1)}),
}


@pytest.mark.parametrize("way", EXCHANGES)
def test_a_block_gathers_once_in_f_sums_once_in_b_and_does_nothing_in_w(way, tmp_path):
    """Keys and values of all tokens, and of all slices together: 2 x 2 x 8 tokens x 32 features x 4 bytes."""
    kind, how, meant = EXCHANGES[way]
    counts, sizes, ops = Counter(), Counter(), Counter()

    def count(worker):
        transport, progress, start = worker.transport, worker.progress, worker.transport.start

        def started(offer, ranks):
            counts[progress.op.split()[0], offer.what] += 1
            sizes[offer.what] += max(offer.source.nbytes, offer.target.nbytes)
            return start(offer, ranks)

        if worker.rank == 1:
            transport.start = started
            ops.update(op.kind.value for op in worker.plan.ops if op.kind.computes)

    run_threads(plan_of(tmp_path, kind, pp=1, more={"cp": 2}, **how), 1, setup=count)
    blocks, per = 3, {}
    for op in ops:
        per[op] = tuple(counts[op, what] / (blocks * ops[op]) for what in ("gather", "scatter"))
    assert {op: pair for op, pair in per.items() if any(pair)} == {op: pair for op, pair in meant.items() if op in ops}
    each = 2 * 2 * 8 * 32 * 4 * blocks * 4
    again = sum(pair[0] for pair in meant.values() if pair[1])
    assert sizes["scatter"] == each and sizes["gather"] == each * (2 if again else 1)


@pytest.mark.parametrize(
    ("more", "model", "code", "text"),
    [
        ({"cp": 3}, {}, "E119", "2 parallel.cp = 6 chunks of each sequence do not divide model.seq_len = 8"),
        ({"cp": 2, "tp": 2, "tp_sequence": True}, {"seq_len": 12}, "", ""),
        ({"cp": 2}, {"compile": True}, "E110", "parallel.cp.*compiled layers cannot meet others inside"),
        (
            {"cp": 2},
            {"family": "tests.runtime.user_models:shared", "loss": "mse", "hidden": None, "heads": None},
            "E119",
            "for built-in models",
        ),
    ],
)
def test_what_cannot_share_tokens_is_refused(more, model, code, text, tmp_path):
    if not code:
        assert plan_of(tmp_path, pp=1, more=more, model_more=model).manifest.topology.world == 4
        return
    with refused(code, match=text):
        plan_of(tmp_path, pp=1, more=more, model_more=model)


def test_slices_are_cut_at_whole_chunks(tmp_path):
    sizes = {"model_more": {"seq_len": 40}, "more": {"cp": 2}}
    plan = plan_of(tmp_path, "zb-h1", pp=1, slices=3, **sizes)
    assert all(cut % 4 == 0 for cut in plan.manifest.cuts) and plan.manifest.cuts[-1] == 40
    with refused("E103", match="no multiples of 4, as .* ranks that share tokens need them"):
        plan_of(tmp_path, "zb-h1", pp=1, slices=2, schedule_more={"cuts": [18, 22]}, **sizes)


class Short(Holes):
    def __getitem__(self, index):
        x, target = super().__getitem__(index)
        return x[:4], target[:4]


def test_samples_of_another_length_are_refused(tmp_path):
    plan = plan_of(tmp_path, pp=1, more={"cp": 2}, data={"kind": f"{HERE}:Short"})
    with refused("E505", match="no 8 tokens for ranks to share out"):
        run_threads(plan, 1)
