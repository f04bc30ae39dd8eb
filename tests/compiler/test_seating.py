"""The order of ranks in a run, by the link table and inside of nodes; ranks that share out experts."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from itertools import product

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import in_turn
from tests.jobs import FREE, job, write_job
from tests.refusals import refused
from tests.runtime.small_plans import make_plan, make_program
from tests.runtime.test_expert_parallel import plan
from tests.threads import run_threads
from zbc.compiler import recall
from zbc.compiler.compile import compile_job
from zbc.compiler.cost import chain, estimate, pricing
from zbc.compiler.cost.machine import Machine
from zbc.compiler.cost.nodes import between, choose
from zbc.compiler.seating import transfers
from zbc.compiler.shapes import load_job
from zbc.errors import ZbcError
from zbc.ir import Placement
from zbc.job import world
from zbc.job.links import checked
from zbc.job.toml import Document, loads
from zbc.plan.directory import read_manifest
from zbc.topology import Topology
from zbc.training.models.experts import Experts
from zbc.training.profiling.link import table_of, turns


def random_times(rng, n, kind):
    ms = [[0.0] * n for _ in range(n)]
    for a, b in itertools.combinations(range(n), 2):
        node = 1.0 if a % 3 == b % 3 else 6.0
        ms[a][b] = ms[b][a] = {"any": rng.uniform(1, 10), "two": rng.choice([1.0, 8.0]), "node": node}[kind]
    return ms


@pytest.mark.parametrize("kind", ["any", "two", "node"])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7])
def test_chains_are_those_of_brute_force(kind, n):
    rng = random.Random(n)
    for _ in range(6 if n < 7 else 2):
        ms = random_times(rng, n, kind)
        found = chain.best_chain(ms)
        assert sorted(found) == list(range(n))
        least = min(chain.weight(ms, order) for order in itertools.permutations(range(n)))
        assert chain.weight(ms, found) == pytest.approx(least)


def test_a_long_chain_has_every_device():
    assert sorted(chain.best_chain(random_times(random.Random(3), 40, "any"))) == list(range(40))


def test_seats_and_ranks_are_each_others_inverse():
    turned = Topology(4, 2, order=(6, 2, 0, 4, 5, 1, 7, 3))
    assert [turned.rank(0, pp) for pp in range(4)] == [6, 2, 0, 4]
    assert [turned.rank(*turned.of(rank)) for rank in range(8)] == list(range(8))
    assert turned.of(2) == (0, 1, (0, 0)) and turned.of(5) == (1, 0, (0, 0)), "of seats, not of ranks"
    assert turned.name(2) == "rank 2 [dp 0, pp 1]"


def test_ranks_that_share_tokens_are_around_those_that_share_layers():
    both = Topology(2, 2, inner=(2, 2))
    assert [both.rank(*both.of(rank)) for rank in range(both.world)] == list(range(16))
    assert both.axes == " (2 pp x 2 dp x 2 cp x 2 tp)" and both.name(7) == "rank 7 [dp 0, pp 1, cp 1, tp 1]"
    assert both.beside("tp", 7) == (6, 7) and both.beside("cp", 7) == (5, 7)
    assert both.ranks([1], (0, 1)) == both.ranks([1], (1, 1)) == (5, 7, 13, 15), "who has the same part of layers"
    assert [both.copy(rank) for rank in (4, 5, 6, 7, 12, 14)] == [0, 0, 2, 2, 1, 3] and both.copies == 4
    assert both.inside == {(i, i + 1) for i in range(0, 16, 2)} | {
        (i + j, i + j + 2) for i in (0, 4, 8, 12) for j in (0, 1)
    }


GBPS = [[0, 1, 9, 1], [0, 0, 1, 9], [0, 0, 0, 9], [0, 0, 0, 0]]


def written(tmp_path, table=None, **changes):
    """A job whose links.toml has these lines."""
    lines = {"gbps": GBPS, "us": [[0] * 4 for _ in range(4)], **(table or {})}
    (tmp_path / "links.toml").write_text("\n".join(f"{key} = {json.dumps(rows)}" for key, rows in lines.items()))
    hardware = {"links": "links.toml", **changes.pop("hardware", {})}
    return write_job(tmp_path, hardware=hardware, **{"costs": FREE, **changes})


def test_a_pipeline_follows_its_fast_links(tmp_path):
    """0-2, 2-3 and 3-1 are fast, all others are slow."""
    path = written(tmp_path)
    found = compile_job(load_job(path))
    assert found.program.topology.order == (0, 2, 3, 1)
    assert compile_job(load_job(path, ["parallel.order=[0,1,2,3]"])).settled_ms > found.settled_ms
    ms = transfers(found.job)
    assert found.costs.links[0][0, 1] == pytest.approx(ms[0][2]) != ms[0][1]


def test_ranks_that_share_layers_are_seated_together(tmp_path):
    """Groups of two: 0-2, 2-3 and 3-1 are fast for both ranks, 0-1 for the first of them only."""
    wide = [[0.0] * 8 for _ in range(8)]
    for a, b in itertools.combinations(range(8), 2):
        near = {a // 2, b // 2} in ({0, 2}, {2, 3}, {1, 3}) or (a, b) == (0, 2)
        wide[a][b] = 50.0 if a // 2 == b // 2 else 9.0 if near else 1.0
    wide[4][5] = 20.0
    path = written(tmp_path, {"gbps": wide, "us": [[0] * 8] * 8}, parallel={"pp": 4, "tp": 2})
    found = compile_job(load_job(path))
    assert found.program.topology.order == (0, 2, 3, 1)
    machine = Machine.of(found.job)
    assert machine.link((0, 1)).speed == 9e6 and machine.link((0, 3)).speed == 1e6
    assert machine.rings_ms(machine.topology.circles("tp"), 1e6) == pytest.approx(1 / 20), "the slowest of the groups"
    copies = load_job(path, ["parallel.pp=2", "parallel.dp=2", "parallel.order=[0,2,1,3]"])
    met = {copies.topology.ranks([0], at) for at in copies.topology.every}
    assert Machine.of(copies).rings_ms(met, 1e6) == pytest.approx(1.0), "0-1: the second ranks meet on a slow link"
    with pytest.raises(ZbcError, match="each of the groups of 2 ranks 0 to 3 once"):
        load_job(path, ["parallel.order=[0,1,2,3,4,5,6,7]"])
    with pytest.raises(ZbcError, match="8 x 8, the run has 4 ranks"):
        load_job(path, ["parallel.pp=2"])


def test_the_machine_asks_the_table_of_ranks_or_of_nodes(tmp_path):
    job = load_job(written(tmp_path, {"us": [[0, 5, 7, 5]] * 4}, parallel={"order": [3, 1, 0, 2]}))
    machine = Machine.of(job)
    assert machine.link((0, 1)) == (pytest.approx(5e-3), 9e6), "stages 0 and 1 are on ranks 3 and 1"
    assert machine.link((1, 2)).speed == 1e6
    assert machine.rings_ms([machine.topology.ranks([0, 1])], 1e6) == pytest.approx(5e-3 + 1 / 9)
    table = {"per": "node", "gbps": [[20, 2], [0, 10]], "us": [[1, 9], [9, 1]]}
    job = load_job(written(tmp_path, table, hardware={"ranks_per_node": 2}))
    machine = Machine.of(job)
    assert [machine.between(a, b).speed for a, b in ((0, 1), (1, 2), (2, 3))] == [20e6, 2e6, 10e6]
    both = [[0, 4, 9, 9], [2, 0, 9, 9], [9, 9, 0, 9], [9, 9, 9, 0]]
    assert Machine.of(load_job(written(tmp_path, {"gbps": both}))).between(0, 1).speed == 2e6


@pytest.mark.parametrize(
    "changes",
    [{"kind": "zb-v"}, {"kind": "interleaved-1f1b"}, {"parallel": {"pp": 2, "dp": 2}}],
    ids=["v", "looped", "replicas"],
)
def test_rings_and_replicas_are_never_worse_than_as_numbered(tmp_path, changes):
    path = written(tmp_path, **changes)
    found = compile_job(load_job(path), budget=0.0)
    plain = compile_job(load_job(path, ["parallel.order=[0,1,2,3]"]), budget=0.0)
    assert found.report.makespan_ms <= plain.report.makespan_ms * (1 + 1e-9)
    assert sorted(found.program.topology.order) == [0, 1, 2, 3]


def test_a_plan_keeps_its_table_and_order(tmp_path):
    found = compile_job(load_job(written(tmp_path)))
    found.write(tmp_path / "plan")
    (tmp_path / "links.toml").unlink()
    again = compile_job(load_job(tmp_path / "plan"))
    assert again.program == found.program and again.settled_ms == found.settled_ms
    manifest = read_manifest(tmp_path / "plan")
    assert manifest.order == [0, 2, 3, 1] and recall.costs_of(manifest).links == found.costs.links


def test_given_op_times_still_take_their_links_from_the_table(tmp_path):
    path = written(tmp_path, costs={"f": 1.0, "b": 1.0, "w": 1.0})
    assert compile_job(load_job(path)).program.topology.order == (0, 2, 3, 1)
    with refused("E141", match=r"costs\.comm and hardware\.links"):
        load_job(path, ["costs.comm=0.5"])


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"gbps": [[0, 1], [1, 0]], "us": [[0, 1], [1, 0]]}, "the table is 2 x 2, the run has 4 ranks"),
        ({"gbps": [[0, 1], [1]]}, "gbps is not square: row 1 has 1 numbers"),
        ({"gbps": [[0, 0, 1, 1]] + GBPS[1:]}, r"gbps\[0\]\[1\] is 0, and so is gbps\[1\]\[0\]"),
        ({"gbps": [[0, -1, 1, 1]] + GBPS[1:]}, r"gbps\[0\] has -1"),
        ({"us": [[0]]}, "us has 1 rows, gbps has 4"),
        ({"per": "rack"}, "per is 'rack'"),
        ({"speed": [[0]]}, "unknown key speed"),
        ({"per": "node", "gbps": GBPS, "us": GBPS}, r"gbps\[0\]\[0\] is 0"),
    ],
)
def test_tables_that_are_none(tmp_path, table, text):
    with refused("E110", match=text) as caught:
        load_job(written(tmp_path, table))
    assert caught.value.hint


def test_two_sizes_give_latency_and_speed():
    """2 us and 1 GB/s one way; the measurement of the slower rank counts."""
    small, large = 2e-6 + 256 / 1e9, 2e-6 + (4 << 20) / 1e9
    found = table_of(2, [{(0, 1): (small, large)}, {(0, 1): (small / 2, large / 2)}])
    assert found.gbps == ((0.0, pytest.approx(1.0)), (pytest.approx(1.0), 0.0))
    assert found.us[0][1] == pytest.approx(2.0)
    assert checked(tomli.loads(found.dumps()), Document("", {})).gbps[1][0] == pytest.approx(1.0)


def test_pairs_that_share_no_machine_are_measured_at_once_and_first_ranks_speak_for_a_machine():
    hosts = [f"node-{r // 2}" for r in range(8)]
    order = turns(hosts, [r - r % 2 for r in range(8)])
    assert [len(turn) for turn in order] == [4, 2, 2, 2]  # inside of machines; then three turns of two pairs
    assert sorted(pair for turn in order for pair in turn if hosts[pair[0]] != hosts[pair[1]]) == [
        *itertools.combinations(range(0, 8, 2), 2)
    ]
    for turn in order:
        busy = [host for a, b in turn for host in {hosts[a], hosts[b]}]
        assert len(busy) == len(set(busy))
    assert len(turns([*"abcd"], range(4))) == 3 and len(turns(["a"] * 4, range(4))) == 6


def test_ranks_of_two_machines_have_the_link_of_the_first_ones():
    inside, across = (1e-6 + 256 / 9e9, 1e-6 + (4 << 20) / 9e9), (2e-6 + 256 / 1e9, 2e-6 + (4 << 20) / 1e9)
    own = [{(0, 1): inside, (0, 2): across}, {(0, 1): inside}, {(2, 3): inside, (0, 2): across}, {(2, 3): inside}]
    found = table_of(4, own, [*"aabb"], [0, 0, 2, 2])
    assert [found.gbps[1][other] for other in (0, 2, 3)] == [pytest.approx(speed) for speed in (9.0, 1.0, 1.0)]


@pytest.mark.parametrize("order", [(1, 0), (1, 2, 0)])
def test_threads_in_another_order_compute_the_same(order):
    """(1, 2, 0) is not its own inverse: taking it for its inverse would make ranks wait for wrong neighbours."""
    program = make_program("1f1b", len(order), 4)
    plain, turned = make_plan(program), make_plan(program, order=order)
    one, other = run_threads(plain, 3), run_threads(turned, 3)
    assert [r.loss for r in one[0].results] == [r.loss for r in other[0].results]
    for pp, rank in enumerate(order):
        assert other[rank].stages.keys() == one[pp].stages.keys() == {pp}


LINEAR, LOOPED, V = Placement.linear(4), Placement.looped(4, 2), Placement.vshape(4)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_every_rank_has_one_place(parts, along, copies, across):
    topology = Topology(parts * along, copies * across, node=(parts, copies))
    found = [topology.of(rank) for rank in range(topology.world)]
    assert len(set(found)) == len(found)
    assert [topology.rank(*place) for place in found] == list(range(len(found)))
    for first in range(0, len(found), parts * copies):
        node = found[first : first + parts * copies]
        assert len({place.pp for place in node}) == parts and len({place.dp for place in node}) == copies
    for pp in range(topology.pp):
        assert topology.ranks([pp]) == tuple(rank for rank, place in enumerate(found) if place.pp == pp)


@pytest.mark.parametrize("placement", [LINEAR, LOOPED, V, Placement.bidirectional((0, 1, 2, 3))])
def test_heavy_tensors_keep_pipelines_together_and_heavy_gradients_copies(placement):
    stages = placement.stages

    def chosen(dp, size, *, sent, grad):
        return choose(placement, Topology(4, dp), size, 8, [sent] * (stages - 1), [grad] * stages)

    assert chosen(2, 4, sent=1e6, grad=1.0) == (4, 1)
    assert chosen(4, 4, sent=1.0, grad=1e6) == (1, 4)
    assert chosen(8, 64, sent=1.0, grad=1e6) == (4, 1), "one node holds them all"
    assert chosen(3, 5, sent=1.0, grad=1e6) == (4, 1), "nothing tiles"


@pytest.mark.parametrize("placement", [LINEAR, LOOPED, V])
def test_what_is_chosen_sends_least(placement):
    for sent, grad in itertools.product((1.0, 10.0, 100.0), repeat=2):
        boundaries, grads = [sent] * (placement.stages - 1), [grad] * placement.stages
        found = choose(placement, Topology(4, 4), 4, 3, boundaries, grads)
        how, nodes = (placement, 4, 3, boundaries, grads), ((4, 1), (2, 2), (1, 4))
        totals = {node: between(Topology(4, 4, node=node), *how) for node in nodes}
        assert totals[found] == min(totals.values())


def test_bytes_between_nodes_are_those_counted_by_hand():
    """Two nodes of two ranks: ranks 0 1 | 2 3 of a pipeline, or both copies of rank 0 | of rank 1."""
    one = between(Topology(4, 1), LINEAR, 2, 5, [3.0, 7.0, 11.0], [0.0] * 4)
    assert one == 2 * 5 * 7.0
    two = Placement.linear(2)
    assert between(Topology(2, 2), two, 2, 5, [3.0], [10.0, 20.0]) == 2 * (10.0 + 20.0)
    assert between(Topology(2, 2, node=(1, 2)), two, 2, 5, [3.0], [10.0, 20.0]) == 2 * 2 * 5 * 3.0
    assert between(Topology(4, 1), LOOPED, 2, 1, [1.0] * 7, [0.0] * 8) == 2 * 3, "1-2, 3-0 and 1-2 again"
    assert between(Topology(4, 1), V, 2, 1, [1.0] * 7, [0.0] * 8) == 2 * 2, "1-2 and back"


def compiled(node=None, **changes):
    made = job(**{"pp": 2, "parallel": {"dp": 2}, "hardware": {"ranks_per_node": 2}, **changes})
    return compile_job(replace(made, node=node))


def test_a_plan_says_where_its_ranks_are():
    """With small tensors and large weights copies share a node; with many microbatches pipelines do."""
    few, many = compiled(m=1), compiled(m=64)
    assert (few.program.node, many.program.node) == ((1, 2), None)
    manifest = few.assemble()[0]
    assert [manifest.topology.name(rank) for rank in range(4)] == [
        "rank 0 [dp 0, pp 0]",
        "rank 1 [dp 1, pp 0]",
        "rank 2 [dp 0, pp 1]",
        "rank 3 [dp 1, pp 1]",
    ]
    assert many.assemble()[0].topology.name(1) == "rank 1 [dp 0, pp 1]"


def test_a_ramp_keeps_its_ranks_where_they_are():
    found = compiled(m=64, schedule={"ramp": [{"microbatches": 1, "steps": 1}]})
    assert [start.compiled.program.node for start in found.ramp] == [found.program.node] == [None]


def test_replicas_that_swap_rows_share_a_node_where_that_is_more_than_pipelines_send():
    how = {"microbatches": 16, "boundaries": [1e9] * 3, "grads": [1.0] * 4}

    def chosen(swapped=0.0, size=8, dp=8, **run):
        return choose(Placement.linear(4), Topology(4, dp, **run), size, **how, swapped=[swapped] * 4)

    assert chosen() == (4, 1)
    assert chosen(1e9, ep=4) == (2, 4)
    assert chosen(4e9, ep=8) == (1, 8)
    folded = {"inner": (2, 2), "dp": 4, "size": 2, "folded": True}  # nodes of eight ranks, four of them of one replica
    assert chosen(4e9, ep=4, **folded) == (4, 1)
    assert chosen(4e9, ep=8, **folded) == (1, 2)


RUN = Topology(2, 2, inner=(2, 2), ep=4, folded=True)  # ranks 0 to 3 of stage 0 and replica 0, 8 to 11 of replica 1


def test_neighbours_along_tp_then_cp_then_dp_share_out_experts():
    assert RUN.sharing(1) == (0, 1, 2, 3) and RUN.sharing(9) == (8, 9, 10, 11)
    assert RUN.alike([0], 9) == (1, 9) and RUN.alike([0, 1], 9) == (1, 5, 9, 13)
    assert [RUN.first(rank) for rank in (3, 11)] == [True, False] and RUN.span == 1
    both = replace(RUN, ep=8)
    assert both.sharing(9) == (0, 1, 2, 3, 8, 9, 10, 11) and both.alike([0], 9) == (9,) and both.span == 2
    small = replace(RUN, ep=2)
    assert small.sharing(3) == (2, 3) and small.alike([0], 3) == (1, 3, 9, 11)
    assert [rank for rank in RUN.held(0) if small.first(rank)] == [0, 1]


def test_without_folding_the_place_along_tp_is_the_same():
    cut = replace(RUN, folded=False)
    assert cut.sharing(1) == (1, 3, 9, 11) and cut.alike([0], 1) == (1,) and cut.span == 2
    assert cut.whole(1) == (0, 1, 2, 3, 8, 9, 10, 11) and RUN.whole(1) == (0, 1, 2, 3)
    assert replace(cut, ep=2).sharing(1) == (1, 3)


ORDER = (5, 3, 0, 11, 8, 1, 9, 2, 10, 7, 4, 6)
EVERY = [Topology(2, 6, inner=inner, folded=f, order=ORDER) for inner in product((1, 2), (1, 2)) for f in (False, True)]


@pytest.mark.parametrize("ep", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("bare", EVERY, ids=lambda run: f"{run.inner} {run.folded}")
def test_every_group_has_all_experts_once_and_every_copy_is_in_another_group(ep, bare):
    run = replace(bare, ep=ep)
    if run.dp * run.listed % ep:
        return
    for rank in range(run.world):
        group, copies = run.sharing(rank), run.alike([run.of(rank).pp], rank)
        assert len(group) == ep and rank in group and list(group) == sorted(group)
        assert {run.sharing(other).index(other) for other in copies} == {group.index(rank)}
        assert len({run.sharing(other) for other in copies}) == len(copies) == run.dp * run.listed // ep
        assert sum(run.first(other) for other in copies) == 1


WAYS = [
    {"dp": 2, "tp": 2, "ep": 4},
    {"cp": 2, "ep": 2},
    {"tp": 2, "ep": 2, "tp_sequence": True},
    {"tp": 2, "dp": 2, "ep": 2, "expert_tp": 2},
]


@pytest.mark.long
@pytest.mark.parametrize("parallel", WAYS, ids=str)
@pytest.mark.parametrize("shared", [None, 32])
def test_a_rank_sends_the_bytes_that_are_priced(tmp_path, monkeypatch, parallel, shared):
    """In F and B: rows of experts, with even loads, and what ranks that share layers, or tokens, sum and gather."""
    monkeypatch.setattr(Experts, "_chosen", in_turn)
    way = {"schedule": {"kind": "1f1b"}, "model": {"balance_loss": 0.0, "router_z_loss": 0.0, "shared_hidden": shared}}
    way["hardware"] = {"link_gbps": 1.0, "link_us": 0.0}
    made, sent = plan(tmp_path, way, **parallel), dict[tuple[int, str], float]()
    inner = "tp" if "tp" in parallel else "cp"

    def watch(worker):
        transport = worker.transport
        start = transport.start

        def started(offer, ranks):
            axis = "ep" if offer.what == "swap" else inner
            if worker.plan.ops[worker.progress.index].kind.computes:
                key, halves = (worker.rank, axis), 1 + (offer.what == "sum")
                whole = offer.target if offer.what == "gather" else offer.source
                sent[key] = sent.get(key, 0.0) + halves * (len(ranks) - 1) / len(ranks) * whole.nbytes
            return start(offer, ranks)

        transport.start = started

    run_threads(made, 1, setup=watch)
    found = load_job(tmp_path / "plan")
    exchanged = pricing.exchanges(found, [(table := estimate.layers(found))[:3], table[3:]])
    for axis, one in zip((inner, "ep"), exchanged, strict=True):
        ms = made.manifest.microbatches * (one.forward[0] + one.backward[0])
        for rank in (rank for rank in range(made.manifest.topology.world) if made.manifest.topology.of(rank).pp == 0):
            assert sent[rank, axis] == pytest.approx(ms * 1e6 / 8), (rank, axis)


def shapes(model, parallel, hardware=""):
    text = f"[model]\n{model}\n[schedule]\nbatch = 64\n[parallel]\n{parallel}\n{hardware}"
    return {(shape.pp, shape.dp, shape.tp, shape.ep) for shape in world.read(loads(text, source="zbc.toml")).shapes}


def test_shapes_of_a_world_say_how_experts_are_shared():
    model, node = "heads = 8\nlayers = 8\nexperts = 64", "[hardware]\nranks_per_node = 8"
    found = shapes(model, 'world = 64\ntp = 2\nep = "auto"', node)
    assert {ep for pp, _, _, ep in found if pp == 1} == {1, 2, 4, 8, 16, 32, 64}
    assert {ep for pp, _, _, ep in found if pp == 8} == {1, 2, 4, 8}
    cut = shapes(model, 'world = 64\ntp = 2\nexpert_tp = 2\nep = "auto"', node)
    assert {ep for pp, _, _, ep in cut if pp == 8} == {1, 2, 4}
    text = '[model]\nexperts = 4\n[schedule]\nbatch = 8\n[parallel]\nworld = 2\nexpert_tp = 1\nep = "auto"'
    opened = world.read(loads(text, source="zbc.toml"))
    for shape in opened.shapes:
        assert "expert_tp" not in opened.of(shape).values["parallel"]
    text = '[model]\nexperts = 4\n[schedule]\nbatch = 8\n[parallel]\nworld = 4\ntp = 4\nep = "auto"\nshard = "all"'
    opened = world.read(loads(text, source="zbc.toml"))
    kept = {shape.ep: "shard" in opened.of(shape).values["parallel"] for shape in opened.shapes}
    assert kept == {1: False, 2: True, 4: False}
