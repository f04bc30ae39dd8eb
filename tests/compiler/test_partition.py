"""Layers to stages."""

import itertools
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.jobs import job, per_layer
from tests.refusals import refused
from zbc.compiler.cost import estimate
from zbc.compiler.partition import balance as balancing
from zbc.compiler.partition.balance import FEW, balance, even, of_ranks
from zbc.compiler.partition.initial import initial
from zbc.errors import ZbcError
from zbc.ir import Placement


def splits(n, parts):
    """Every partition of n items into that many non-empty parts."""
    for inner in itertools.combinations(range(1, n), parts - 1):
        yield [0, *inner, n]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_balance_finds_the_best_cut_of_all(weights, data):
    """Smallest largest part, then the least sum of squares, against every possible split; some parts weigh more."""
    parts = data.draw(st.integers(1, len(weights)))
    factors = data.draw(st.lists(st.integers(1, 2), min_size=parts, max_size=parts))
    inside = [[factor * weight for weight in weights] for factor in factors]

    def score(cuts):
        sizes = [sum(inside[k][a:b]) for k, (a, b) in enumerate(itertools.pairwise(cuts))]
        return max(sizes), sum(x * x for x in sizes)

    found = balance(inside)
    assert found[0] == 0 and found[-1] == len(weights) and all(a < b for a, b in itertools.pairwise(found))
    assert score(found) == min(score(cuts) for cuts in splits(len(weights), parts))


def names(description, stages, placement=None):
    table = estimate.layers(description)
    parts = initial(description, placement or Placement.linear(stages))
    return [[table[i].name for i in part] for part in parts]


def a_placement(rng):
    p = rng.randint(2, 4)
    return rng.choice(
        [
            Placement.vshape(p, rng.randint(2, 3)),
            Placement.looped(p, rng.randint(2, 3)),
            Placement.bidirectional(Placement.vshape(p).pipes[0]),
            Placement((tuple(range(p)) + tuple(rng.sample(range(p), p)),)),
        ]
    )


def drawn(rng, placement):
    """Layer weights per stage; in some stages the layers weigh more."""
    n = placement.stages + rng.randint(0, 4)
    layers = [rng.choice([1, 1, 2, 5]) if rng.random() < 0.5 else rng.random() for _ in range(n)]
    return [
        [factor * layer for layer in layers] for factor in (rng.choice([1, 1, 4 / 3]) for _ in range(placement.stages))
    ]


@pytest.mark.parametrize("few", [0, FEW], ids=["searched", "all tried"])
def test_the_fullest_rank_is_as_light_as_in_the_best_of_all_cuts(few, monkeypatch):
    """Several stages per rank, 120 draws, compared with every partition."""
    monkeypatch.setattr(balancing, "FEW", few)
    rng = Random(few)
    for _ in range(120):
        where = a_placement(rng)
        weights = drawn(rng, where)
        loads = of_ranks(weights, where)
        best = min(loads.busiest(cuts) for cuts in splits(len(weights[0]), where.stages))
        assert loads.busiest(even(weights, where)) == pytest.approx(best, rel=1e-9)
        assert balancing._unavoidable(weights, where) <= best * (1 + 1e-9)


@pytest.mark.parametrize(("p", "v", "layers"), [(64, 2, 200), (64, 8, 600), (16, 4, 100)])
def test_large_placements_are_cut_too(p, v, layers):
    """Equal layers and a heavy head: the least load of the fullest rank is known."""
    weights = [[1.0] * (layers - 1) + [7.0]] * (p * v)
    where = Placement.vshape(p, v)
    cuts = even(weights, where)
    assert cuts[0] == 0 and cuts[-1] == layers and all(a < b for a, b in itertools.pairwise(cuts))
    assert of_ranks(weights, where).busiest(cuts) == max(7 + (v - 1), -(-(layers + 6) // p))


def with_head(layers, ms=0.0):
    """F = B = W = 1 for each block, and `ms` for the head."""
    return {"layers": layers, "costs": per_layer(layers, head=(ms,) * 3)}


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        pytest.param(with_head(13, 3.0), [4, 4, 4, 1], id="a heavy head"),
        pytest.param(
            {"layers": 10, "partition": {"layers_per_stage": "equal"}}, [3, 3, 2, 2], id="uniform spreads blocks only"
        ),
        pytest.param(
            {"layers": 8, "costs": {"f": 1.0, "b": 1.0, "w": 1.0}}, [2, 2, 2, 2], id="times of ranks say no cut"
        ),
        pytest.param({"layers": 6, "partition": {"layers_per_stage": [0, 3, 3, 0]}}, [0, 3, 3, 0], id="a given cut"),
        pytest.param(  # a layer costs 4 instead of 3 if it runs twice
            {"memory": {"activations": {"0": "recompute"}}, **with_head(14)}, [2, 4, 4, 4], id="recompute"
        ),
        pytest.param({"memory": {"activations": "recompute"}, **with_head(12)}, [3, 3, 3, 3], id="by all"),
    ],
)
def test_blocks_are_dealt_by_what_stages_have_to_do(changes, blocks):
    parts = names(job(**changes), 4)
    assert [sum(name.startswith("layers.") for name in part) for part in parts] == blocks
    assert parts[0][0] == "embed" and parts[-1][-1] == "head"


def test_more_stages_than_layers_is_refused():
    with refused("E130") as caught:
        names(job(layers=3, partition={"layers_per_stage": "equal"}), 4)
    with pytest.raises(ZbcError, match="has 3, 1 blocks, embedding and head") as caught:
        names(job(layers=1), 4)
    assert caught.value.hint.startswith("use model.layers = 2 or more")
    assert names(job(layers=2), 4) == [["embed"], ["layers.0"], ["layers.1"], ["head"]]


def test_many_layers_are_divided_in_a_moment():
    assert balance(((1.0,) * 16_000,) * 8) == tuple(range(0, 16_001, 2_000))
    assert balancing._unavoidable([[1.0] * 120_000] * 4, Placement.looped(2, 2)) == 60_000
