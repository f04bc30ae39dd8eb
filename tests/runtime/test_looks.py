"""Ranks that each read a sample get the same, for any random numbers of its dataset; else they do not begin."""

import random

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.runtime.small_plans import make_plan, make_program
from tests.runtime.zoo import layer_of
from tests.threads import losses_of, run_threads
from tests.tiers import few
from zbc.errors import ZbcError
from zbc.runtime.seeding import reading
from zbc.training.data import prefetch
from zbc.training.data.data import Batches, Pairs, SampleRange
from zbc.training.data.prefetch import Together

WAYS = {
    "torch": lambda own: float(torch.rand(())),
    "python": lambda own: random.random(),
    "numpy": lambda own: float(numpy.random.rand()),
    "seeded": lambda own: float(torch.rand((), generator=torch.Generator().manual_seed(torch.initial_seed() % 2**40))),
    "own": lambda own: float(torch.rand((), generator=own)),  # which nobody seeds
}


class Drawn:
    """Input and target of a sample are random numbers, drawn in the factory and at each read, and its index."""

    def __init__(self, ways, first, count, start=0):
        self.own = torch.Generator()
        self.own.seed()
        self.ways, self.first, self.count, self.start = ways, sum(WAYS[way](self.own) for way in first), count, start

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        drawn = [WAYS[way](self.own) for way in (self.ways if index >= self.start else [])]
        look = torch.tensor([index, self.first, *drawn], dtype=torch.float64)
        return look, look.clone()


Same = layer_of(lambda m, x: x + 0 * m.weight, weight=lambda: nn.Parameter(torch.zeros(1, dtype=torch.float64)))


def layers():
    return [Same] * 4


def gap(output, target):
    return (output - target).abs().mean()


SEEDED = st.lists(st.sampled_from(["torch", "python", "numpy", "seeded"]), max_size=3)


def plan_of(schedule, p, m=4, **args):
    model = {"family": f"{__name__}:layers", "layers": 4, "loss": f"{__name__}:gap"}
    return make_plan(
        make_program(schedule, p, m), model=model, data={"kind": f"{__name__}:Drawn", "args": args}, size=2
    )


def pairs(ways, count=6, seed=1, **how):
    return Pairs(Drawn(ways, [], count), "drawn", seed, **how)


@pytest.mark.parametrize("examples", few([5, 100], (5,)))
def test_input_and_target_are_of_one_look(examples):
    @settings(max_examples=examples, deadline=None)
    @given(
        SEEDED, SEEDED, st.integers(8, 30), st.sampled_from([("1f1b", 2), ("zb-v", 2), ("dualpipe", 2), ("1f1b", 1)])
    )
    def check(ways, first, count, how):
        assert losses_of(run_threads(plan_of(*how, ways=ways, first=first, count=count), 4)) == [0.0] * 4

    check()


@pytest.mark.parametrize(
    ("ways", "first", "text"), [(["own"], [], "two looks at sample 8"), ([], ["own"], "other ranks")]
)
def test_what_nobody_seeds_is_refused_before_the_first_step(ways, first, text):
    plan = plan_of("1f1b", 2, ways=ways, first=first, count=16, start=8)
    with pytest.raises(ZbcError, match=f"E505.*{text}"):
        run_threads(plan, 1)


def test_looks_follow_from_the_seed_the_epoch_and_the_sample_alone():
    some = pairs(["torch", "python", "numpy"])
    late, again = some.inputs([8]), pairs(["torch", "python", "numpy"]).inputs([3, 2, 8])
    assert torch.equal(late[0], again[2]), "whatever was read before"
    assert late[0, 0] == again[1, 0] == 2 and not torch.equal(again[1, 2:], again[2, 2:]), "another look in each epoch"
    assert not torch.equal(pairs(["torch", "python", "numpy"], seed=2).inputs([8])[0, 2:], late[0, 2:])
    part = SampleRange(some, 2, 5)
    assert torch.equal(part.inputs([3 + 0])[0], some.inputs([6 + 2])[0]), "the first of the second epoch"


def test_a_batch_that_spans_epochs_has_looks_of_both():
    data = Batches(pairs(["torch"]), seed=3, microbatches=2, size=2)
    seen = [tuple(row) for step in range(6) for mb in range(2) for row in data.inputs(step, mb).tolist()]
    assert len(seen) == 24 and len(set(seen)) == 24 and len({row[0] for row in seen}) == 6


def test_generators_are_put_back():
    before = torch.random.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tobytes()
    with pytest.raises(KeyError), reading() as seed:
        seed(2**62 + 1)
        torch.rand(3), random.random(), numpy.random.rand()
        raise KeyError
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert (random.getstate(), numpy.random.get_state()[1].tobytes()) == before[1:]


class Overwriting:
    """Items of which each has the memory of the one before; `fails`: one that cannot be read."""

    def __init__(self, fails=-1):
        self.memory, self.read, self.fails = torch.zeros(1), [], fails

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == self.fails:
            raise KeyError(index)
        self.read.append(index)
        self.memory[0] = index
        return self.memory, torch.rand(1)


def test_samples_of_a_step_are_read_together_in_the_order_in_which_they_are_asked_for_and_then_fail(monkeypatch):
    monkeypatch.setattr(prefetch, "_EARLY_S", 60.0)
    order = [0, 1], [2, 3], [1, 3, 0, 2]
    plain = Batches(Pairs(Overwriting(), "o", 1), seed=3, microbatches=4, size=1)
    for mine in order:
        data = Overwriting()
        batches = Together(Pairs(data, "o", 1), [[("inputs", mb) for mb in mine]], seed=3, microbatches=4, size=1)
        for step in range(4):
            before = len(data.read)
            for mb in mine:
                assert torch.equal(batches.inputs(step, mb), plain.inputs(step, mb))
                assert len(data.read) == before + len(mine), "all at the first request, and none again"
            assert not batches._steps[step][0]
            assert data.read[before:] == [int(plain.inputs(step, mb)) for mb in mine]
    third = int(plain.inputs(0, 2))
    wants = [[("inputs", mb) for mb in range(4)]]
    batches = Together(Pairs(Overwriting(third), "o", 1), wants, seed=3, microbatches=4, size=1)
    batches.inputs(0, 0), batches.inputs(0, 1), batches.inputs(0, 3)
    with pytest.raises(KeyError):
        batches.inputs(0, 2)


@pytest.mark.parametrize(("p", "looks"), [(1, 16), (2, 32)])
def test_a_rank_with_both_ends_reads_each_sample_once(p, looks, monkeypatch):
    monkeypatch.setattr(prefetch, "_EARLY_S", 60.0)
    plan = plan_of("zb-v" if p == 1 else "1f1b", p, ways=["torch"], first=[], count=16)
    seen, original = [], Drawn.__getitem__
    run_threads(plan, 1)
    monkeypatch.setattr(Drawn, "__getitem__", lambda self, index: seen.append(index) or original(self, index))

    def forget(worker):
        if worker.rank == p - 1:
            seen.clear()

    workers = run_threads(plan, 2, setup=forget)
    assert len(seen) - 6 * p == looks
    assert not any(worker.batches._samples._targets for worker in workers)
