"""Jobs whose microbatches are of unequal length: keys, times of their ops, memory, bounds, orders and their numbers."""

import math
import random
from dataclasses import replace

import pytest

from tests.compiler.test_simulate import hold
from tests.jobs import job
from tests.profiles import profile_of
from tests.refusals import refused
from tests.tiers import few
from zbc.compiler import numbering, recall
from zbc.compiler.compile import compile_job
from zbc.compiler.cost import pricing
from zbc.compiler.memory.host import host_bytes
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.numbering import numbered
from zbc.compiler.partition.setup import start_of
from zbc.compiler.schedules import SCHEDULES
from zbc.compiler.search.problem import Problem
from zbc.compiler.shapes import load_job
from zbc.compiler.sim.bounds import bounds
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import simulate
from zbc.compiler.steps import in_a_row
from zbc.errors import ZbcError
from zbc.ir import Kind, Op, Placement
from zbc.plan.directory import StoredPlan

LONG = {"model": {"family": "llama", "seq_len": 2048, "hidden": 64}}
TOKENS = [2048, 256, 1024, 128, 2048, 64, 640, 1024]
GIVEN = {"costs": {"f": 4.0, "b": 4.0, "w": 4.0, "comm": 0.5}, "model": {"seq_len": 16}}
SHARES, TWO = [16, 4, 8, 16, 2, 16, 4, 8], [16, 8] * 4


def unequal(tokens=TOKENS, **changes):
    return {**LONG, **changes, "schedule": {"tokens": tokens, **changes.pop("schedule", {})}}


def planned(**changes):
    return compile_job(job(**changes), suggest=False, budget=0.0)


def costs_of(made, placement=None):
    return start_of(made, placement or Placement.linear(4))[1]


# ---- keys -----------------------------------------------------------------------------------------------------------


def test_tokens_stand_in_the_plan_as_it_numbers_them_and_cost_the_same_when_it_is_read_again(tmp_path):
    compiled = planned(**unequal(kind="zb-h1"))
    manifest = compiled.write(tmp_path / "plan")
    assert manifest.planning["schedule"]["tokens"] == list(compiled.report.unequal.tokens)
    assert sorted(compiled.report.unequal.tokens) == sorted(TOKENS) and compiled.report.unequal.given == tuple(TOKENS)
    assert recall.costs_of(StoredPlan.read(tmp_path / "plan").manifest) == compiled.costs
    assert "unequal" not in manifest.predicted
    again = load_job(tmp_path / "plan")
    assert again.tokens == compiled.job.tokens
    assert compile_job(again, budget=0.0).step_ms <= compiled.step_ms * (1 + 1e-9)


@pytest.mark.long
def test_host_memory_is_that_of_the_longest_microbatch_a_stage_offloads():
    memory = {"memory": {"activations": "offload"}, "hardware": {"host_gbps": 20.0}}
    made = planned(m=8, kind="1f1b", **unequal([64, 24] * 4, schedule={"renumber": False}, **memory))
    text = "F s0 m{0}, OFFLOAD s0 m{0}, RELEASE s0 m{0}, RELOAD s0 m{0}, BW s0 m{0}"
    for several in ((1, 3), (1, 0, 3)):
        ops = [Op.parse(one) for m in several for one in text.format(m).split(", ")]
        ranks = (tuple(ops), *made.program.ranks[1:])
        longest = max(made.costs.held_bytes(Op(Kind.RELOAD, 0, m)) for m in several)
        assert host_bytes(replace(made.program, ranks=ranks), 0, made.costs) == longest > 0
    assert host_bytes(made.program, 3, made.costs) == 0.0


@pytest.mark.parametrize("changes", [LONG | {"schedule": {"tokens": [2048] * 8}}, {"schedule": {"tokens": [16] * 8}}])
def test_equal_tokens_make_the_plan_that_none_make_byte_for_byte(changes):
    plain = planned(**{name: table for name, table in changes.items() if name != "schedule"}, kind="zb-auto")
    told = planned(**changes, kind="zb-auto")
    (mine, files), (theirs, others) = told.assemble(), plain.assemble()
    assert mine.dumps() == theirs.dumps() and files == others


def test_a_number_for_each_microbatch_up_to_the_length_of_the_model_is_asked_for():
    with refused(
        "E103", match="3 numbers, schedule.microbatches is 8", hint="set microbatches = 3, or give 8"
    ) as caught:
        job(schedule={"tokens": [4, 8, 16]})
    assert caught.value.where.endswith("tokens") or ":" in caught.value.where
    with refused("E103", match="rows of 17 tokens, model.seq_len is 16", hint="set model.seq_len = 17"):
        job(schedule={"tokens": [16] * 7 + [17]})
    with refused("E110", match="schedule.renumber is for", hint="set schedule.tokens"):
        job(schedule={"renumber": False})


# ---- times ----------------------------------------------------------------------------------------------------------


@pytest.mark.long("2")
@pytest.mark.parametrize("tp", [1, 2])
def test_ops_of_a_microbatch_take_what_a_job_of_rows_of_its_length_says(tp):
    several = {"parallel": {"tp": tp}}
    stages, costs = start_of(job(**unequal(**several)), Placement.linear(4))
    for mb, tokens in enumerate(TOKENS):
        alone = {**several, "model": {**LONG["model"], "seq_len": tokens}}
        like = pricing.build(job(**alone), Placement.linear(4), stages)
        for kind in (Kind.F, Kind.B, Kind.W, Kind.BW):
            for stage in range(4):
                assert costs.duration(Op(kind, stage, mb)) == pytest.approx(like.duration(Op(kind, stage)))
        assert costs.link(0, 1, 2, mb) == pytest.approx(like.link(0, 1, 2))
        assert costs.held_bytes(Op(Kind.F, 1, mb)) == pytest.approx(like.held_bytes(Op(Kind.F, 1)))
        assert costs.need_bytes(Op(Kind.BW, 1, mb)) == pytest.approx(like.need_bytes(Op(Kind.BW, 1)))


def busiest(costs):
    return max(map(sum, zip(*map(costs.column, "fbw"), strict=True)))


def test_of_given_times_blocks_of_a_known_model_have_less_of_attention_too():
    costs = costs_of(job(model={"seq_len": 2048}, schedule={"tokens": [2048] * 7 + [1024]}, costs=GIVEN["costs"]))
    f, w = (costs.of(name, 1, 7) / costs.of(name, 1, 0) for name in ("f", "w"))
    # per token 24 h^2 and 4 h for each of the keys it sees, half of the row: h = 32
    assert w == pytest.approx(0.5) and f == pytest.approx(0.5 * (24 * 32 + 2 * 1024) / (24 * 32 + 2 * 2048))


def test_times_that_are_given_are_of_whole_rows_and_less_by_tokens():
    model = {"family": "tests.toys:layers", "seq_len": 16}
    costs = costs_of(job(schedule={"tokens": SHARES}, costs=GIVEN["costs"], model=model))
    assert [costs.duration(Op(Kind.F, 2, mb)) for mb in range(8)] == pytest.approx([4 * n / 16 for n in SHARES])
    assert [costs.held(Op(Kind.F, 2, mb)) for mb in range(8)] == pytest.approx([n / 16 for n in SHARES])
    assert [costs.link(0, 1, 2, mb) for mb in range(8)] == pytest.approx([0.5 * n / 16 for n in SHARES])
    assert costs.column("f")[0] == pytest.approx(4 * sum(SHARES) / 16 / 8)


@pytest.mark.parametrize("axis", ["tp", "cp", "ep"])
@pytest.mark.parametrize("per", ["layer", "rank"])
def test_given_times_of_collectives_are_of_whole_rows_and_less_by_tokens(axis, per):
    more = {"experts": 4, "top_k": 2} if axis == "ep" else {}
    parallel = {"ep": {"dp": 2, "ep": 2}}.get(axis, {axis: 2})
    how = {"parallel": parallel, "model": {"family": "llama", "seq_len": 16, **more}, "schedule": {"tokens": TWO}}
    times = {"per": per, "f": 8.0, "b": 6.0, "w": 4.0}
    without, given = (costs_of(job(**how, costs=times | ms)) for ms in ({}, {axis: 1.6}))
    for mb, tokens in enumerate(TWO):
        for column in ("f", "b"):
            assert given.of(column, 1, mb) - without.of(column, 1, mb) == pytest.approx(0.1 * tokens), (column, mb)


@pytest.mark.long
def test_a_whole_backward_is_shorter_by_that_of_its_b_and_its_w():
    """Attention makes B more than proportionally shorter, and W not."""
    sizes = {"model": {"seq_len": 2048}, "schedule": {"tokens": [2048] * 7 + [1024]}}
    profiled = replace(job(**sizes), profile=profile_of(job(**sizes)))
    given = {"parallel": {"tp": 2}, "costs": {"f": 4.0, "b": 4.0, "w": 4.0, "tp": 1.0}}
    for found in (costs_of(profiled), costs_of(job(**sizes, **given))):
        whole, short = ([found.of(name, 1, mb) for name in ("b", "w", "bw")] for mb in (0, 7))
        sums = [found.of("b_sums", 1, mb) for mb in (0, 7)]
        assert short[1] == pytest.approx(0.5 * whole[1]) and short[0] < 0.45 * whole[0]
        assert short[2] == pytest.approx(short[0] + short[1] - sums[1] + found.of("bw_waits", 1, 7))


@pytest.mark.parametrize("kind", few(["1f1b", "zb-h1", "gpipe"], 1))
def test_a_step_takes_what_its_ops_take_one_by_one(kind):
    times = {**GIVEN["costs"], "comm": 5.0}
    compiled = planned(schedule={"tokens": SHARES[::-1], "renumber": False}, kind=kind, costs=times)
    costs = compiled.costs
    hold(simulate(compiled.compute, costs), costs.duration, lambda mb: costs.link(0, 0, 1, mb))


def test_steps_in_a_row_begin_again_with_the_first_microbatch():
    how = {"kind": "1f1b", "costs": GIVEN["costs"], "optimizer": {"sync": "two-versions"}}
    compiled = planned(schedule={"tokens": SHARES}, **how)
    timeline, busy = in_a_row(compiled.program, compiled.costs, 3), [0.0] * 24
    for span in timeline:
        if span.op.kind is Kind.F and span.op.stage == 1:
            busy[span.op.mb] = span.end - span.start
    assert busy == pytest.approx([compiled.costs.duration(Op(Kind.F, 1, mb)) for mb in range(8)] * 3)
    assert max(busy) > 4 * min(busy)


@pytest.mark.long
def test_a_partition_is_even_for_the_mean_of_all_microbatches_and_not_for_whole_rows():
    long = {"model": {"family": "llama", "seq_len": 4096, "hidden": 256, "vocab": 8192}, "layers": 12}
    short, whole = job(**{**long, "schedule": {"tokens": [128] + [64] * 7}}), job(**long)
    stages, costs = start_of(short, Placement.linear(4))
    others, _ = start_of(whole, Placement.linear(4))
    loads = [busiest(costs), busiest(pricing.build(short, Placement.linear(4), others))]
    assert stages != others and loads[0] < loads[1]


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_ranks_hold_what_the_microbatches_in_flight_are():
    compiled = planned(schedule={"tokens": SHARES, "renumber": False}, kind="1f1b", costs=GIVEN["costs"])
    for rank, found in enumerate(peaks(compiled.compute, compiled.costs)):
        held = most = 0.0
        for op in compiled.compute.ranks[rank]:
            held += SHARES[op.mb] / 16 * (1 if op.kind is Kind.F else -(op.kind in (Kind.BW, Kind.W)))
            most = max(most, held)
        assert found.units == pytest.approx(most)


@pytest.mark.long("tokens0", "v-min-2-tokens2", "v-half-3-tokens1")
@pytest.mark.parametrize("tokens", [SHARES, [16] * 4 + [2] * 4, [2] * 4 + [16] * 4])
@pytest.mark.parametrize(("kind", "units"), [("zb-v", 4), ("v-half", 3), ("v-min", 2)])
def test_a_limit_by_name_is_kept_with_any_numbers(kind, units, tokens):
    for costs in ({}, GIVEN["costs"]):
        compiled = planned(schedule={"tokens": tokens}, kind=kind, layers=16, costs=costs)
        most = max(rank.units for rank in compiled.memory)
        assert most <= units + 1e-6 == compiled.report.limits.activation_units + 1e-6


def test_numbers_keep_to_a_limit_that_the_given_ones_keep_to():
    tokens = [16, 2, 2, 4, 2, 8, 2, 8]

    def most(limit, **schedule):
        asked = {"tokens": tokens, "memory_limit": limit, **schedule}
        compiled = planned(schedule=asked, kind="1f1b", costs=GIVEN["costs"])
        return max(one.units for one in compiled.memory), compiled.step_ms

    (kept, slow), (free, fast) = most("4x", renumber=False), most("4x")
    limit = (kept + free) / 2
    found, step = most(f"{limit / 4:.4f}x")
    assert kept < found <= limit < free and fast < step < slow


def test_a_limit_below_the_longest_microbatch_is_refused():
    with refused("E303", match="one microbatch holds 1.216 activation units"):
        planned(schedule={"tokens": SHARES, "memory_limit": "0.24x"}, kind="zb-auto")


# ---- bounds and searches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    few(["1f1b", "zb-h1", "zb-h2", "gpipe", "zb-v", "interleaved-1f1b", "chimera", "dualpipe"], {"zb-h2", "chimera"}),
)
def test_no_order_is_below_the_bound(name):
    rng = random.Random(name)
    card = SCHEDULES[name]
    placement = card.placement(4, card.stages_per_rank(None))
    for _ in range(4):
        tokens = [16, *(rng.choice((1, 2, 5, 16)) for _ in range(6)), 2]
        times = {"f": 2.0, "b": rng.choice((1.0, 3.0)), "w": 1.5, "comm": 0.3}
        made = job(schedule={"tokens": tokens, "renumber": False}, costs=times, kind=name)
        compiled = compile_job(made, suggest=False, budget=0.0)
        least = bounds(placement, costs_of(made, placement), 8)
        found = Context(compiled.compute, compiled.costs).timeline
        assert least.makespan <= found.makespan * (1 + 1e-9) and least.span <= found.span * (1 + 1e-9)
        assert least.makespan >= 4 * (times["f"] + times["b"])  # the longest one's way


def test_a_search_reads_the_times_of_each_microbatch():
    costs = costs_of(job(**unequal()))
    rows = Problem.make(Placement.linear(4), costs, 8, None).rows()
    length, lags = rows.table().length, rows.table().waits[2]
    assert {*lags} - {0.0} == {costs.link(0, s, s + 1, mb) for s in range(3) for mb in range(8)}
    for kind in (Kind.F, Kind.B, Kind.W):
        assert [length[rows.op(kind, 2, mb)] for mb in range(8)] == pytest.approx(
            [costs.duration(Op(kind, 2, mb)) for mb in range(8)]
        )


@pytest.mark.parametrize("kind", few(["zb-auto", "v-auto", "chimera-zb"], 2))
def test_a_search_is_no_worse_than_orders_made_for_equal_microbatches(kind):
    compiled = planned(schedule={"tokens": SHARES, "renumber": False}, kind=kind, costs=GIVEN["costs"])
    found = compiled.report.unequal
    assert found.ms <= min(found.given_ms, found.alike_ms) and found.tokens == tuple(SHARES)
    assert compiled.report.makespan_ms == pytest.approx(found.ms)


# ---- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.long("3", "5")
@pytest.mark.parametrize("seed", few(range(24), 6))
def test_a_planned_step_is_never_longer_than_the_order_for_equal_lengths(seed):
    made = job(**(drawn := drawn_job(seed)))
    _, found, said = numbered(made, 0.0)
    even = job(**{**drawn, "schedule": {**drawn["schedule"], "tokens": None}})
    plain = compile_job(even, suggest=False, budget=0.0)
    theirs = pricing.build(made, plain.program.placement, plain.found.stages)
    assert said.ms <= Context(plain.found.complete.program, theirs).step_ms(made.objective) * (1 + 1e-9)
    assert said.ms == pytest.approx(found.complete.step_ms(made.objective))
    assert sorted(said.tokens) == sorted(said.given)


def drawn_job(seed):
    """Log-normal lengths, of those in TOKENS, a schedule and given or estimated times."""
    rng = random.Random(seed)
    m = rng.choice((4, 6, 8))

    def near(log):
        return min(TOKENS, key=lambda one: abs(math.log(one) - log))

    tokens = [near(rng.gauss(6, rng.choice((0.4, 1.1)))) for _ in range(m)]
    kind = rng.choice(("1f1b", "zb-h1", "zb-auto", "interleaved-1f1b", "zb-v", "gpipe"))
    layout = {"pp": rng.choice((2, 4)), "kind": kind, "m": m}
    costs = {"costs": {"f": 2.0, "b": 2.0, "w": 1.0, "comm": rng.choice((0.0, 0.4))}} if rng.random() < 0.5 else {}
    return {**layout, **unequal(tokens), **costs}


def test_numbers_that_are_kept_are_those_of_the_job(tmp_path):
    kept = planned(**unequal(kind="1f1b", schedule={"renumber": False}))
    free = planned(**unequal(kind="1f1b"))
    assert kept.job.tokens == tuple(TOKENS) and free.step_ms < 0.95 * kept.step_ms
    assert kept.assemble()[0].planning["schedule"]["renumber"] is False


def test_costs_with_other_numbers_are_those_of_a_job_with_them():
    numbers = [3, 1, 0, 2, 7, 6, 5, 4]
    other = costs_of(job(**unequal([TOKENS[k] for k in numbers])))
    assert costs_of(job(**unequal())).renumbered(numbers) == other


@pytest.mark.long
def test_where_no_order_can_be_made_for_unequal_ones_that_for_equal_ones_is_taken(monkeypatch):
    def only_equal(made, *more, seated=numbering.seated):
        if made.tokens:
            raise ZbcError("E201", "proof: a deadlock")
        return seated(made, *more)

    changes = {"kind": "bitpipe-zb", "parallel": {"dp": 2, "shard": "all"}, "layers": 8}
    model = {"family": "gpt", "seq_len": 64, "hidden": 64}
    schedule = {"tokens": [64, 24, 64, 24], "microbatches": 4, "renumber": False}
    monkeypatch.setattr(numbering, "seated", only_equal)
    found = planned(**changes, schedule=schedule, model=model)
    assert found.report.unequal.ms == found.report.unequal.alike_ms == pytest.approx(found.report.unequal.given_ms)
