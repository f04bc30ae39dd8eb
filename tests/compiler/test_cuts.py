"""Layers to stages, and partition, recompute and order together, compared with every possible partition."""

import itertools
import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.jobs import job, per_layer
from tests.lowered import lower
from tests.refusals import error_of, refused
from tests.tiers import few
from zbc.compiler.check.memory import check_memory
from zbc.compiler.compile import compile_job
from zbc.compiler.cost import estimate
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.order import order
from zbc.compiler.partition import balance as balancing
from zbc.compiler.partition.balance import FEW, Loads, balance, even, of_ranks
from zbc.compiler.partition.initial import initial
from zbc.compiler.planner.case import Case
from zbc.compiler.schedules import SCHEDULES
from zbc.errors import ZbcError
from zbc.ir import Placement

BY_HAND = ("gpipe", "1f1b", "interleaved-1f1b", "breadth-first", "zb-h1", "eager-1f1b", "dualpipe-v", "hanayo")
BY_HAND += ("chimera",)


def drawn(seed):
    """A small job with uneven layers, as keyword arguments of `job`, and the number of its stages."""
    rng = Random(seed)
    kind = BY_HAND[seed % len(BY_HAND)]
    v = SCHEDULES[kind].default_chunks
    p = 2 if kind == "chimera" else rng.choice((2, 3) if v > 1 else (2, 3, 4))
    layers = p * v + rng.randint(-1, 2)

    def column(mean, first, last):
        return [first, *(round(mean * rng.choice((1, 1, rng.uniform(0.3, 2))), 3) for _ in range(layers)), last]

    act_b = [0.0, *(round(rng.uniform(0.5, 1.5), 2) for _ in range(layers)), rng.choice((0.0, 1.0))]
    head = rng.choice((0.0, 1.0, 3.0, 6.0))
    costs = {"per": "layer", "f": column(3, 0.1, head), "b": column(3, 0.0, head), "w": column(2, 0.2, head)}
    costs |= {"act_b": act_b, "comm": rng.choice((0.0, 0.3))}
    schedule = {"objective": rng.choice(("makespan", "span", "period"))}
    return {"kind": kind, "pp": p, "m": rng.randint(2, 6), "layers": layers, "costs": costs}, schedule, p * v


def every_cut(layers, stages):
    """`layers_per_stage` of every partition of the blocks, embedding and head."""
    for inner in itertools.combinations(range(1, layers + 2), stages - 1):
        sizes = [b - a for a, b in itertools.pairwise((0, *inner, layers + 2))]
        sizes[0] -= 1
        sizes[-1] -= 1
        yield sizes


def step(made, found):
    """ms of a step; None if it is above the limits."""
    program = found.program
    if made.hardware.memory_gib is not None:
        program = lower(program, made.optimizer.sync, found.costs)
    try:
        check_memory(made, peaks(program, found.costs), found.costs)
    except ZbcError:
        return None
    return found.step_ms(made)


def planned(made, budget=None):
    found = order(made, budget)
    return step(made, found), found


def units(found):
    return max(rank.units for rank in peaks(found.program, found.costs))


def least_of_all(parts, schedule, stages):
    """The least step of all partitions that fit, and the least memory of any."""
    steps, needs = [], []
    for sizes in every_cut(parts["layers"], stages):
        ms, found = planned(job(**parts, schedule=schedule, partition={"layers_per_stage": sizes}), 0.0)
        steps += [] if ms is None else [ms]
        needs.append(units(found))
    return min(steps, default=None), min(needs)


@pytest.mark.parametrize("searched", [False, True], ids=["all tried", "walked"])
@pytest.mark.parametrize("seed", few(range(9), 5))
def test_no_cut_is_better_than_the_one_that_is_found(seed, searched, monkeypatch):
    if searched:
        monkeypatch.setattr(Case, "below", lambda self, step, most: None)
    parts, schedule, stages = drawn(seed)
    ms, found = planned(job(**parts, schedule=schedule))
    assert ms == pytest.approx(least_of_all(parts, schedule, stages)[0], rel=1e-9)
    assert found.all_tried is not searched


@pytest.mark.parametrize("seed", few(range(99, 108), 4))
def test_under_a_limit_no_cut_that_fits_is_better_and_where_none_fits_the_least_is_named(seed):
    parts, schedule, stages = drawn(seed)
    free = planned(job(**parts, schedule=schedule), 0.0)[1]
    limit = Random(seed).uniform(0.5, 1.0) * units(free) / parts["pp"]
    schedule = {**schedule, "memory_limit": f"{limit:.6f}x"}
    made = job(**parts, schedule=schedule)
    ms, found = planned(made)
    best, least = least_of_all(parts, schedule, stages)
    if best is not None:
        assert ms == pytest.approx(best, rel=1e-9)
        return
    assert units(found) == pytest.approx(least, rel=1e-9)
    hint = error_of(compile_job, made, suggest=False).hint
    named = float(re.search(r'memory_limit = "([\d.]+)x"', hint)[1])
    assert least <= named * parts["pp"] <= least * 1.001
    compile_job(job(**parts, schedule={**schedule, "memory_limit": f"{named}x"}), suggest=False)


def test_where_no_cut_fits_a_device_the_one_that_needs_least_is_named_with_what_is_on_its_way():
    parts = {"kind": "dualpipe", "pp": 2, "m": 6, "layers": 3, "model": {"seq_len": 64, "vocab": 1000}}
    parts = {**parts, "schedule": {"microbatch_size": 1}, "hardware": {"memory_gib": 0.002525}}

    def need(**more):
        made = job(**parts, **more)
        ms, found = planned(made, None)
        assert ms is None
        program = lower(found.program, made.optimizer.sync, found.costs)
        return max(rank.bytes for rank in peaks(program, found.costs))

    least = min(need(partition={"layers_per_stage": sizes}) for sizes in every_cut(parts["layers"], 2))
    assert need() == least


def heavy(seed):
    """A job whose first stage overflows with a partition even in time, with `memory_gib` between least and most."""
    rng = Random(seed)
    kind, p = rng.choice((("1f1b", 2), ("1f1b", 3), ("zb-h1", 2), ("gpipe", 3)))
    layers = p + rng.randint(-1, 2)
    model = {"hidden": 32, "seq_len": 128, "vocab": 256}
    parts = {"kind": kind, "pp": p, "m": rng.randint(3, 6), "layers": layers, "model": model}

    def most(activations):
        made = job(**parts, memory={"activations": activations})
        found = planned(made, 0.0)[1]
        program = lower(found.program, made.optimizer.sync, found.costs)
        return max(rank.bytes for rank in peaks(program, found.costs))

    low, high = most("recompute"), most("keep")
    return {**parts, "hardware": {"memory_gib": (low + (high - low) * rng.uniform(0.02, 0.95)) / 2**30}}, p


@pytest.mark.long("0", "2")
@pytest.mark.parametrize("seed", few(range(5), 3))
def test_the_least_recompute_that_fits_is_chosen_with_the_cut(seed):
    parts, stages = heavy(seed)
    steps = []
    for again in itertools.chain.from_iterable(itertools.combinations(range(stages), k) for k in range(stages + 1)):
        flags = {str(s): "recompute" for s in again} or "keep"
        for sizes in every_cut(parts["layers"], stages):
            made = job(**parts, memory={"activations": flags}, partition={"layers_per_stage": sizes})
            ms, _ = planned(made, 0.0)
            steps += [] if ms is None else [ms]
    ms, found = planned(job(**parts, memory={"activations": "auto"}))
    if found.activations is None:
        assert ms == pytest.approx(min(steps), rel=1e-9)
        assert found.recompute
    else:  # selectively
        assert ms < min(steps)


@pytest.mark.long
def test_nothing_is_recomputed_where_all_fits_and_what_is_set_stays():
    kept = compile_job(job(memory={"activations": "auto"}))
    assert not kept.found.recompute
    assert kept.assemble()[0].planning["memory"]["activations"] == "keep"
    assert kept.assemble()[0].id == compile_job(job()).assemble()[0].id
    even = {"layers_per_stage": [2, 2, 2, 2]}
    tight = {"memory_gib": 0.95 * compile_job(job(partition=even)).memory[0].bytes / 2**30}
    chosen = {"activations": {"3": "recompute", "0": "auto"}}
    some = compile_job(job(memory=chosen, hardware=tight, partition=even))
    assert some.assemble()[0].planning["memory"]["activations"] == {"0": "selective", "3": "recompute"}
    assert [stage.recompute for stage in some.report.cut.stages] == [False, False, False, True]
    assert [stage.selective for stage in some.report.cut.stages] == [True, False, False, False]


@pytest.mark.long("{'layout': 'Et*4|tt|t|tL'}", "{'layers_per_stage': 'equal'}")
@pytest.mark.parametrize(
    "partition",
    [{"layers_per_stage": "equal"}, {"layers_per_stage": [4, 2, 1, 1]}, {"layout": "Et*4|tt|t|tL"}],
    ids=str,
)
def test_a_cut_that_is_asked_for_is_kept(partition):
    heavy_head = per_layer(8, head=(9.0, 9.0, 9.0))
    for kind in ("1f1b", "zb-auto", "auto"):
        limits = {"chunks": 1} if kind == "auto" else {}
        made = job(kind=kind, partition=partition, costs=heavy_head, schedule=limits)
        found = order(made, 0.0)
        sizes = [len(part) for part in found.stages]
        assert sizes == ([3, 2, 2, 3] if "equal" in partition.values() else [5, 2, 1, 2])


@pytest.mark.parametrize(
    "kind", few(["1f1b", "interleaved-1f1b", "v-auto", "chimera-zb"], ("interleaved-1f1b", "v-auto"))
)
def test_with_more_budget_a_plan_is_never_worse(kind, monkeypatch):
    parts, schedule, _ = drawn(5)
    parts |= {"kind": kind, "layers": 12, "m": 5, "pp": 4 if kind == "1f1b" else 2}
    for key in ("f", "b", "w", "act_b"):
        parts["costs"][key] = (parts["costs"][key] * 4)[:12]
    made = job(**parts, schedule=schedule)
    steps = [planned(made, budget)[0] for budget in (0.0, 0.001, 0.02, 0.1, 0.5)]
    assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(steps))


@pytest.mark.parametrize("seed", range(12))
def test_the_cuts_within_a_load_are_all_there_are(seed):
    rng = Random(seed)
    stages, n = rng.randint(1, 5), rng.randint(5, 9)
    draw = rng.random if seed % 2 else lambda: rng.randint(0, 4)
    weights = [[draw() * rng.choice((1, 1, 1.5)) for _ in range(n)] for _ in range(stages)]
    often = [[float(rng.randint(0, 2)) for _ in range(stages)] for _ in range(rng.randint(1, 3))]
    light = Loads(weights, often)
    cuts = [(0, *inner, n) for inner in itertools.combinations(range(1, n), stages - 1)]
    most = sorted(map(light.busiest, cuts))[len(cuts) // 2]
    found, whole = light.below(most, count=len(cuts), nodes=10**6)
    assert whole
    assert sorted(found) == sorted(cut for cut in cuts if light.busiest(cut) < most)
    assert [light.busiest(cut) for cut in found] == sorted(map(light.busiest, found))
    assert not found or not light.below(most, count=len(found) - 1, nodes=10**6)[1]


def with_head(layers, head, **parts):
    """F = B = W = 1 per layer, no transfer time, and a head of `head` layers."""
    return job(layers=layers, costs=per_layer(layers, head=(head,) * 3) | {"comm": 0.0}, **parts)


@pytest.mark.repeats
@pytest.mark.parametrize(("p", "m", "layers", "head", "gain"), few([(3, 9, 17, 5.0, 1.3), (4, 8, 18, 4.2, 1.35)], (3,)))
def test_auto_makes_room_for_a_heavy_head(p, m, layers, head, gain):
    """Compared with interleaved 1F1B on uniform partitions, and with every schedule by name on them."""
    uniform = {"pp": p, "m": m, "partition": {"layers_per_stage": "equal"}}
    base = planned(with_head(layers, head, kind="interleaved-1f1b", **uniform), 0.0)[0]
    step = planned(with_head(layers, head, kind="auto", pp=p, m=m), 0.0)[0]
    assert base / step >= gain
    assert step >= 3 * m * (layers + head) / p
    for name in SCHEDULES:
        try:
            other = planned(with_head(layers, head, kind=name, **uniform), 0.0)[0]
        except ZbcError:
            continue
        assert other is None or step <= other * (1 + 1e-9), name


@pytest.mark.long("zb-v-period", "chimera-span", "zb-v-makespan")
@pytest.mark.parametrize(
    ("kind", "objective"),
    few(
        [("auto", "makespan"), *itertools.product(("1f1b", "zb-v", "chimera"), ("makespan", "span", "period"))],
        ("1f1b", "zb-v", "chimera"),
    ),
)
def test_plans_are_chosen_by_the_step_that_is_predicted_of_them_with_all_its_sums(kind, objective):
    """A shared weight, copies of the pipeline, two pipes: each sums gradients over ranks."""
    for model, copies in (({"ties": True, "vocab": 5000}, 1), ({}, 2)):
        parts = {"kind": kind, "pp": 2, "m": 3, "layers": 6, "model": model, "parallel": {"dp": copies}}
        made = job(**parts, schedule={"objective": objective})
        found = order(made, 0.0)
        assert found.step_ms(made) == pytest.approx(compile_job(made, budget=0.0).step_ms, rel=1e-9)


ROOM = {"hardware": {"memory_gib": 1.0}}


@pytest.mark.long("chimera-zb")
@pytest.mark.parametrize("kind", few(["zb-v", "v-half", "v-min", "chimera-zb", "bitpipe-zb"], ("zb-v", "chimera-zb")))
def test_recompute_on_a_device_with_room_changes_no_unit_that_a_search_counts_in(kind):
    """With recompute W keeps more than F does; units stay shares of the activations without recompute."""
    parts = {"kind": kind, "pp": 4, "m": 4, "layers": 16, "memory": {"activations": "recompute"}}
    free, roomy = (order(made, 0.0) for made in (job(**parts), job(**parts, **ROOM)))
    assert step(job(**parts, **ROOM), roomy) is not None
    assert roomy.step_ms(job(**parts)) <= free.step_ms(job(**parts)) * 1.02


@pytest.mark.parametrize(("p", "m", "layers"), [(5, 3, 21), (6, 9, 25), (7, 5, 30)])
def test_with_little_memory_a_search_knows_the_cut_that_1f1b_would_have(p, m, layers):
    """Its first stages hold more microbatches, so they get fewer layers: an even partition would wait for memory."""
    found = {}
    for kind in ("1f1b", "zb-auto"):
        made = job(kind=kind, pp=p, m=m, layers=layers, schedule={"memory_limit": "0.5x"})
        found[kind] = order(made, 0.0).step_ms(made)
    assert found["zb-auto"] < found["1f1b"]


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


def weighed(rng, placement):
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
        weights = weighed(rng, where)
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


def headed(layers, ms=0.0):
    """F = B = W = 1 for each block, and `ms` for the head."""
    return {"layers": layers, "costs": per_layer(layers, head=(ms,) * 3)}


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        pytest.param(headed(13, 3.0), [4, 4, 4, 1], id="a heavy head"),
        pytest.param(
            {"layers": 10, "partition": {"layers_per_stage": "equal"}}, [3, 3, 2, 2], id="uniform spreads blocks only"
        ),
        pytest.param(
            {"layers": 8, "costs": {"f": 1.0, "b": 1.0, "w": 1.0}}, [2, 2, 2, 2], id="times of ranks say no cut"
        ),
        pytest.param({"layers": 6, "partition": {"layers_per_stage": [0, 3, 3, 0]}}, [0, 3, 3, 0], id="a given cut"),
        pytest.param(  # a layer costs 4 instead of 3 if it runs twice
            {"memory": {"activations": {"0": "recompute"}}, **headed(14)}, [2, 4, 4, 4], id="recompute"
        ),
        pytest.param({"memory": {"activations": "recompute"}, **headed(12)}, [3, 3, 3, 3], id="by all"),
    ],
)
def test_blocks_are_dealt_by_what_stages_have_to_do(changes, blocks):
    parts = names(job(**changes), 4)
    assert [sum(name.startswith("layers.") for name in part) for part in parts] == blocks
    assert parts[0][0] == "embed" and parts[-1][-1] == "head"


def test_more_stages_than_layers_is_refused():
    with refused("E130"):
        names(job(layers=3, partition={"layers_per_stage": "equal"}), 4)
    with refused("E130", "has 3, 1 blocks, embedding and head", hint="use model.layers = 2 or more"):
        names(job(layers=1), 4)
    assert names(job(layers=2), 4) == [["embed"], ["layers.0"], ["layers.1"], ["head"]]


def test_many_layers_are_divided_in_a_moment():
    assert balance(((1.0,) * 16_000,) * 8) == tuple(range(0, 16_001, 2_000))
    assert balancing._unavoidable([[1.0] * 120_000] * 4, Placement.looped(2, 2)) == 60_000
