"""Vocabulary parallel, planned from a job: costs of its ops, memory of ranks, refusals."""

import itertools
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.jobs import FREE, job, per_layer, write_job
from tests.profiles import layer, profile_of
from tests.recorded_runs import World, record
from tests.tiers import few
from zbc.compiler.check import check_all
from zbc.compiler.compile import compile_job
from zbc.compiler.cost import cards, estimate, vocabulary
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.passes.weave import Weave
from zbc.compiler.recorded.derive import derive
from zbc.compiler.schedules import Request, find
from zbc.compiler.sim.bounds import bounds
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import simulate
from zbc.compiler.whatif.compare import Asked, compare
from zbc.compiler.whatif.others import sharing
from zbc.ir import Kind, Op
from zbc.job.job import RESERVE
from zbc.job.profile import Origin, WordTimes
from zbc.ops import TIED, WORDS

LARGE = {"family": "llama", "layers": 8, "hidden": 64, "heads": 4, "vocab": 4096, "seq_len": 64}
SHARED = {"pp": 4, "vocabulary": "shared"}
SUMS = {1: "shared", 2: "shared-2"}
GIVEN = per_layer(8, embed=(1.0, 0.0, 2.0), head=(2.0, 3.0, 4.0))


def planned(**changes):
    return compile_job(job(**{"model": LARGE, "parallel": SHARED, **changes}))


KINDS = ("1f1b", "zb-h1", "zb-v", "zb-auto", "interleaved-1f1b", "looped-zb", "gpipe", "v-half")
CASES = [(kind, sums, slices) for kind in KINDS for sums, slices in ((1, 1), (2, 1), (1, 2), (2, 3))]


@pytest.mark.long("1f1b-1-1", "1f1b-1-2", "1f1b-2-3", "zb-v-1-2")
@pytest.mark.parametrize(
    ("kind", "sums", "slices"), few(CASES, CASES[:4] + [("zb-v", 1, 2), ("interleaved-1f1b", 2, 1)])
)
def test_plans_are_proven_and_every_rank_has_every_share(kind, sums, slices):
    found = planned(schedule={"kind": kind, "slices": slices}, parallel={**SHARED, "vocabulary": SUMS[sums]})
    units = found.program.microbatches * slices
    for ops in found.program.ranks:
        counts = {kind: sum(op.kind is kind for op in ops) for kind in Kind if kind.unit_wide}
        assert set(counts.values()) == ({units} if sums == 2 else {units, 0}) and (sums == 2 or not counts[Kind.SUM])
    assert found.program.vocabulary == sums
    assert found.timeline.makespan >= found.found.bounds.makespan * (1 - 1e-9)


@pytest.mark.long
def test_the_manifest_says_how_and_who_has_which_words():
    found = planned(model={**LARGE, "vocab": 4099}, parallel={**SHARED, "vocabulary": SUMS[2], "dp": 2})
    manifest, _ = found.assemble()
    assert manifest.vocabulary.sums == 2
    rows = manifest.vocabulary.rows
    assert rows[0] == 0 and rows[-1] == 4099 and max(b - a for a, b in itertools.pairwise(rows)) == 1025
    assert {"S", "T", "SUM", "REDUCE"} <= set(manifest.capabilities)
    assert all(Op(Kind.REDUCE, WORDS) in ops for ops in found.program.ranks)


@pytest.mark.long
def test_stages_have_what_is_left_and_shares_add_up_to_the_rest():
    """No parameter is lost, and none is counted twice."""
    for family in ("llama", "gpt"):
        ends, shared = (
            job(model={**LARGE, "family": family}, parallel={"pp": 4, "vocabulary": w}) for w in ("ends", "shared")
        )
        counts = [sum(layer.params for layer in estimate.layers(one)) for one in (ends, shared)]
        assert counts[0] == counts[1] + 4 * vocabulary.parameters(shared)
        assert counts[0] - counts[1] == 2 * 4096 * 64


def test_given_heads_are_shared_out_by_rank():
    one = vocabulary.columns(job(model=LARGE, parallel=SHARED, costs=GIVEN))
    assert (one["s"], one["t"], one["i"], one["e"]) == (5 / 4, 1.0, 0.25, 0.5)
    two = vocabulary.columns(job(model=LARGE, parallel={**SHARED, "vocabulary": SUMS[2]}, costs=GIVEN))
    assert (two["s"], two["t"]) == (0.5, 7 / 4)
    layers = estimate.layers(job(model=LARGE, parallel=SHARED, costs=GIVEN))
    assert layers[0].total == layers[-1].total == 0.0 and layers[1].total == 3.0
    own = vocabulary.columns(
        job(model=LARGE, parallel=SHARED, costs={"f": 1.0, "b": 1.0, "w": 1.0, "vocabulary": [0.5, 0.25, 0.0, 0.0]})
    )
    assert (own["s"], own["t"], own["i"]) == (0.5, 0.25, 0.0)


def test_estimates_of_all_ranks_are_those_of_the_whole_head():
    """The sum is the whole work plus small overhead: kernel starts on every rank, rows that each rank reads."""
    ways = [{**SHARED, "pp": p, "vocabulary": SUMS[n]} for p in (2, 4) for n in (1, 2)]
    found = [cards.words(job(model=LARGE, parallel=way)) for way in ways]
    assert [one.rows for one in found] == [2048, 2048, 1024, 1024] and [
        one.values["sums"] > 0 for one in found
    ] == 2 * [True, False]
    ends, shared = (estimate.layers(job(model=LARGE, parallel={"pp": 4, "vocabulary": w})) for w in ("ends", "shared"))
    one = vocabulary.columns(job(model=LARGE, parallel=SHARED))
    assert ends[-1].total < 4 * (one["s"] + one["t"]) + shared[-1].total < 1.25 * ends[-1].total


@pytest.mark.long
def test_slices_have_their_share_of_the_words():
    whole = compile_job(job(model=LARGE, parallel=SHARED, costs=GIVEN)).costs
    cut = compile_job(job(model=LARGE, parallel=SHARED, costs=GIVEN, schedule={"slices": 2, "cuts": [16, 48]})).costs
    assert cut.of("s", 3, 0) == pytest.approx(0.25 * whole.of("s", 3)) and cut.column("s") == pytest.approx(
        whole.column("s")
    )


def test_memory_is_that_of_shares_and_logits():
    """Neither end holds a whole table, and a rank has the logits of one unit at a time."""
    ends, shared = (
        planned(parallel={"pp": 4, "vocabulary": w}, partition={"layers_per_stage": [2, 2, 2, 2]})
        for w in ("ends", "shared")
    )
    table = 4096 * 64 * 4  # bytes of one table in float32
    assert ends.memory[0].weights - shared.memory[0].weights == pytest.approx(table - 2 * table / 4, rel=0.01)
    assert shared.memory[1].optimizer - ends.memory[1].optimizer == pytest.approx(2 * 2 * table / 4)
    logits = 4 * 1024 * 2 * 64  # of a microbatch of 2 x 64 tokens, for 1024 words
    assert shared.costs.share_of("logits") == logits + 25 * 2 * 64  # and five numbers, 25 bytes, for each token
    least = shared.memory[1].gradients + logits
    assert shared.memory[1].together > least
    assert shared.memory[3].bytes < ends.memory[3].bytes


@pytest.mark.long
def test_a_bound_counts_the_words_of_every_rank():
    found = planned(model={**LARGE, "vocab": 4 * 4096})
    plain = bounds(found.program.placement, found.costs.with_ms(s=(), t=(), i=(), e=()), 8)
    counted = bounds(found.program.placement, found.costs, 8)
    words = 8 * sum(found.costs.of(name, 0) for name in "ste")
    assert plain.span < counted.span <= plain.span + words + 8 * found.costs.of("i", 0) + 1e-9


@pytest.mark.long
def test_a_limit_leaves_room_for_the_meetings():
    found = planned(schedule={"kind": "zb-auto", "memory_limit": "1.0x"}, costs=FREE)
    assert max(rank.units for rank in found.memory) <= 4 + 1e-6
    assert max(rank.units for rank in planned(schedule={"kind": "zb-v"}, costs=FREE).memory) <= 4 + 1 + 1e-6


@pytest.mark.long
def test_a_tied_table_is_one_share_and_needs_no_sum_of_ends():
    found = planned(model={**LARGE, "ties": True})
    assert not found.program.tied and all(op.stage != TIED for ops in found.program.ranks for op in ops)
    assert vocabulary.parameters(found.job) == 1024 * 64


def test_measured_shares_are_planned_with():
    """Measured with 1,024 rows each; two ranks have twice as many. A run with shares gives the rest of the ends."""
    words = WordTimes(rows=1024, s=[8.0, 4.0], t=[3.0, 7.0], i=0.5, e=0.25)
    shared = job(model=LARGE, parallel=SHARED)
    for sums, s, t in ((1, 8.0, 3.0), (2, 4.0, 7.0)):
        mine = job(model=LARGE, parallel={**SHARED, "vocabulary": SUMS[sums]})
        profiled = replace(mine, profile=profile_of(mine, words=words))
        for p, share in ((4, 1.0), (2, 2.0)):
            one = replace(profiled, parallel=profiled.parallel.model_copy(update={"pp": p}))
            found = vocabulary.columns(one)
            assert [found[name] for name in "stie"] == [s * share, t * share, 0.5, 0.25]
    ran = Origin(device="cpu", source="trace")
    kinds = {"embed": layer(0.75, 0.5, 0.5), "block": layer(1.0, 2.0, 3.0), "head": layer(18.0, 17.0, 16.0)}
    profiled = replace(shared, profile=profile_of(shared, words=words, on=ran, layers=kinds))
    table = estimate.layers(profiled)
    assert (table[0].f, table[0].b, table[0].w) == pytest.approx((0.25, 0.5, 0.25))
    assert (table[-1].f, table[-1].b, table[-1].w) == pytest.approx((2.0, 1.0, 4.0))
    assert estimate.layers(profiled.with_vocabulary("ends"))[-1].f == 18.0


@pytest.mark.long("1")
@pytest.mark.parametrize("sums", [1, 2])
def test_a_recorded_run_tells_what_shares_took(tmp_path, sums):
    """One block per rank, of 2 ms forward; the rest of the ends is separated from the times of words."""
    took = {Kind.F: 2.0, Kind.BW: 5.0, Kind.S: 8.0, Kind.T: 3.0, Kind.I: 0.5, Kind.E: 0.25}
    if sums == 2:
        took |= {Kind.S: 4.0, Kind.T: 7.0}
    found = planned(model={**LARGE, "layers": 4}, parallel={**SHARED, "vocabulary": SUMS[sums]}, costs=FREE)
    trace = record(found, tmp_path, World(op=lambda op, rank, step: took[op.kind]))
    profile = derive(trace).profile
    assert profile.words == WordTimes(rows=1024, s=[8.0, 4.0], t=[3.0, 7.0], i=0.5, e=0.25)
    head = profile.layers["head"]
    assert head.f.ms >= 16.0 and head.parameters == 4096 * 64 + 64
    again = replace(found.job, profile=profile)
    left = estimate.layers(again)
    assert [left[0].f + left[1].f, left[-2].f + left[-1].f] == pytest.approx([2.0, 2.0], rel=1e-3)
    costs = compile_job(again).costs
    assert costs.column("s") == pytest.approx([took[Kind.S]] * 4) and costs.column("t")[0] == pytest.approx(
        took[Kind.T]
    )


HEAVY = {**LARGE, "vocab": 65536}
AUTO = {"pp": 4, "vocabulary": "auto"}


@pytest.mark.long
def test_auto_shares_where_that_is_faster_and_not_where_it_is_not():
    heavy, light = planned(model=HEAVY, parallel=AUTO), planned(model={**LARGE, "vocab": 256}, parallel=AUTO)
    assert heavy.program.vocabulary == 1 and light.program.vocabulary == 0
    for found, model in ((heavy, HEAVY), (light, {**LARGE, "vocab": 256})):
        each = [planned(model=model, parallel={**AUTO, "vocabulary": way}).step_ms for way in ("ends", "shared")]
        assert found.step_ms == pytest.approx(min(each))


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": {"kind": "dualpipe"}},
        {"optimizer": {"sync": "post-validate"}},
        {"model": {**HEAVY, "loss": "mse"}},
        {"parallel": {**AUTO, "pp": 1}},
    ],
)
def test_auto_leaves_words_at_the_ends_where_they_cannot_be_shared(changes):
    assert planned(**{"model": HEAVY, "parallel": AUTO, **changes}).program.vocabulary == 0


@pytest.mark.long
def test_a_plan_says_what_its_output_layer_costs_and_what_sharing_would_give():
    ends = planned(model=HEAVY, parallel={"pp": 4})
    found = sharing(ends)
    shared = planned(model=HEAVY)
    assert not found.shared and found.other == "shared" and found.pays(ends.settled_ms)
    assert found.ms == pytest.approx(shared.settled_ms)
    table = estimate.layers(ends.job)
    assert found.blocks == pytest.approx(table[-1].total / table[1].total)
    back = sharing(shared)
    assert back.shared and back.other == "ends" and back.ms == pytest.approx(ends.settled_ms)
    assert back.blocks == pytest.approx(found.blocks)
    assert sharing(planned(model={**LARGE, "vocab": 256}, parallel={"pp": 4})) is None, "light"
    assert sharing(planned(model=HEAVY, parallel={"pp": 4}, schedule={"kind": "dualpipe"})) is None, "cannot"


@pytest.mark.long
def test_a_comparison_has_both_ways_where_that_is_open(tmp_path):
    path = write_job(tmp_path, model=HEAVY, parallel=AUTO)
    asked = Asked(path)
    wanted = asked.both_ways([("1f1b", ()), ("dualpipe", ())])
    assert wanted == [
        ("1f1b", (("parallel.vocabulary", '"ends"'),)),
        ("dualpipe", (("parallel.vocabulary", '"ends"'),)),
        ("1f1b", (("parallel.vocabulary", '"shared"'),)),
    ]
    rows = compare(asked, wanted)
    assert [row.shared for row in rows if row.schedule == "1f1b"] == [True, False], "the faster one first"
    swept = [("1f1b", (("parallel.vocabulary", '"ends"'),))]
    assert asked.both_ways(swept) == swept, "asked for"
    alone = Asked(path, ('parallel.vocabulary="shared"',))
    assert alone.both_ways([("1f1b", ())]) == [("1f1b", ())]
    assert alone("1f1b", ()).name == "1f1b +vocabulary"


@pytest.mark.long
def test_logits_of_two_units_wait_where_that_is_faster_and_fits():
    """With a smaller limit in bytes there is only one."""
    changes = {
        "model": {"family": "gpt", "layers": 26, "hidden": 2304, "heads": 8, "vocab": 256_000, "seq_len": 4096},
        "schedule": {"kind": "1f1b", "microbatches": 16, "microbatch_size": 1},
    }
    hardware = {"device": "cuda", "tflops": 400}
    free = planned(**changes, hardware=hardware)
    most = max(rank.bytes for rank in free.memory)

    def owed(found):
        """The most units of a rank between their S and their T."""
        count = top = 0
        for ops in found.program.ranks:
            for op in ops:
                count += (op.kind is Kind.S) - (op.kind is Kind.T)
                top = max(top, count)
        return top

    assert owed(free) == 3, "two wait while a third is made"
    gib = (most - 1) / 2**30 / (1 - RESERVE)
    tight = planned(**changes, hardware={**hardware, "memory_gib": gib})
    assert owed(tight) == 2 and tight.step_ms > free.step_ms and max(rank.bytes for rank in tight.memory) < most


SIZES = [(4, 8, 1, 0.0), (8, 24, 1, 0.25), (8, 12, 4, 0.25), (8, 24, 4, 0.0), (3, 5, 2, 0.5)]


def woven(kind, p, m, k, sums, late=1, **ms):
    """Makespan and most units, in slices, without and with the vocabulary; and the program."""
    card = find(kind)
    program = card.make(Request(p=p, m=m, v=card.default_chunks, slices=k))
    costs = Costs.uniform(program.placement)
    costs = costs.cut([1 / k] * k) if k > 1 else costs
    priced = costs.with_ms(**{name: (each / k,) * p for name, each in ms.items()})
    found = Weave(sums, late).run(program, Context(program, priced))
    check_all(found)
    ends = simulate(program, costs).makespan, simulate(found, priced).makespan
    units = [k * max(one.units for one in peaks(one, costs)) for one in (program, found)]
    return ends, units, found


@pytest.mark.long("zb-v-8-24-1-0.25", "8-12-4-0.25")
@pytest.mark.parametrize("sums", [1, 2])
@pytest.mark.parametrize(("p", "m", "k", "st"), few(SIZES, SIZES[:3]))
@pytest.mark.parametrize("kind", ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "gis"])
def test_the_bubble_is_what_it_was_and_a_sum_keeps_one_unit_more(kind, p, m, k, st, sums):
    (plain, found), (held, most), _ = woven(kind, p, m, k, sums, s=st, t=st)
    assert found <= plain + 2 * st * m + 1e-9
    assert most <= held + sums + 1e-9


@pytest.mark.long
def test_v_half_beside_what_was_published():
    """Published are 97 and 98, at p = 8, m = 24, S = T = 0.25."""
    for sums, late, makespan, units in ((1, 2, 94, 6), (2, 1, 96, 7)):
        (_, found), (_, most), _ = woven("v-half", 8, 24, 1, sums, late, s=0.25, t=0.25)
        assert found <= makespan + 1e-9 and most <= units + 1e-9


def test_all_ranks_start_their_collectives_in_one_order_and_t_is_late_by_no_more_than_allowed():
    for late in (1, 2):
        *_, program = woven("zb-h1", 4, 9, 2, 1, late, s=0.4, t=0.3, i=0.1, e=0.1)
        orders = [[op for op in ops if op.kind.unit_wide and op.kind.is_collective] for ops in program.ranks]
        assert all(one == other for one, other in pairwise(orders)) and len(orders[0]) == 4 * 9 * 2
        for ops in program.ranks:
            owed = most = 0
            for op in ops:
                owed += (op.kind is Kind.S) - (op.kind is Kind.T)
                most = max(most, owed)
            assert most <= late + 1


@pytest.mark.long("{'model': {'dtype': 'bfloat16'}}")
@pytest.mark.parametrize(
    "more", [{"model": {"dtype": "bfloat16"}}, {"parallel": {"dp": 2, "average": {"every": 1}}}], ids=str
)
def test_rows_of_words_are_held_as_the_same_weights_at_the_ends(more):
    """Weights in float32 have no masters however they are read, and averages of rows are under way, too."""
    how = [{**more, "parallel": {**more.get("parallel", {}), "vocabulary": words}} for words in ("shared", "ends")]
    found = [compile_job(job(pp=2, m=4, layers=2, **one), budget=0.0).memory for one in how]
    for what in ("weights", "masters", "optimizer"):
        shared, ends = (sum(getattr(rank, what) for rank in one) for one in found)
        assert shared == pytest.approx(ends, rel=0.02), what
