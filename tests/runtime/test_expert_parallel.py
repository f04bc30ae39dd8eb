"""Expert parallelism: equal to the training of replicas with all experts each, under every order and after resuming."""

import importlib
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch

from tests.check.each import check_complete
from tests.composed import TOLERANCE, apart, planned, written
from tests.jobs import job
from tests.refusals import refused
from tests.runtime.test_experts import tables
from tests.runtime.test_tensor_parallel import numbers
from tests.threads import each_parameter, run_threads
from tests.tiers import few
from zbc.compiler.compile import compile_job
from zbc.compiler.schedules import SCHEDULES
from zbc.errors import ZbcError
from zbc.ir import Kind, Op
from zbc.ops import EXPERTS, experts_of, home_of
from zbc.plan.directory import StoredPlan
from zbc.runtime.features.experts.expert_parallel import Copies
from zbc.runtime.features.tensor_parallel import SharedLayers


def asked(way, **parallel):
    """The tables of a job with eight microbatches per step over all replicas."""
    found = tables(way)
    found["parallel"] |= parallel
    found["schedule"]["microbatches"] = 8 // found["parallel"].get("dp", 1)
    return found


def plan(folder, way, **parallel):
    return written(asked(way, **parallel), folder)[1]


PAGE = Path(__file__).parents[2] / "docs" / "experts.md"


def test_in_a_group_the_backward_leads_and_counts_do_not_give_the_turn_away(tmp_path):
    """So that each op computes while the other's rows are under way."""
    made, begun = plan(tmp_path, {"schedule": {"kind": "braid-v"}}, dp=2, ep=2), {}

    def watch(worker):
        transport, mine = worker.features.of(SharedLayers).swaps.transport, begun.setdefault(worker.rank, [])
        start = transport.start_swap
        transport.start_swap = lambda *args: mine.append((worker.progress.index, args[0].dtype)) or start(*args)

    for worker in run_threads(made, 1, setup=watch):
        own, indices = worker.plan.ops, begun[worker.rank]
        groups = [at for at, op in enumerate(own) if op.kind.is_mark and own[at + 2].kind is Kind.BW]
        firsts = [next(own[index].kind for index, _ in indices if at < index < at + 3) for at in groups]
        assert firsts and set(firsts) == {Kind.BW} and all(own[at + 1].kind is Kind.F for at in groups)
        after = [other for (_, dtype), other in pairwise(indices) if dtype is torch.int64]
        assert len(after) > 2 * len(groups)
        counted = [index for index, dtype in indices if dtype is torch.int64]
        assert [index for index, _ in after] == counted


SHARING = [{"dp": 4, "ep": 2, "expert_tp": 2}, {"ep": 2}, {"ep": 2, "tp_sequence": True}]


@pytest.mark.always("{'dp': 4, 'ep': 2, 'expert_tp': 2}")
@pytest.mark.long
@pytest.mark.parametrize("parallel", SHARING, ids=str)
def test_ranks_that_share_layers_have_the_same_bits_of_all_else_and_tell_loads_once(tmp_path, parallel):
    way = {"schedule": {"kind": "1f1b"}, "model": {"balance_loss": [0.0, 0.05]}}
    some = run_threads(plan(tmp_path, way, tp=2, **parallel), 3)
    whole = run_threads(plan(tmp_path, {"model": way["model"]}, pp=1), 3)
    assert apart(numbers(some), numbers(whole)) <= TOLERANCE
    for one, other in zip(some[-1].results, whole[-1].results, strict=True):
        assert one.routed == other.routed and one.added == pytest.approx(other.added, rel=1e-5)
    held = dict[tuple[int, str], torch.Tensor]()
    for worker, name, weight in each_parameter(some):
        layers = worker.features.of(SharedLayers)
        if name not in layers.cuts and not name.startswith(layers.own):
            assert torch.equal(held.setdefault((worker.replica, name), weight), weight), name
    alike = {name.split(".", 2)[2] for _, name in held if "mlp" in name}
    assert alike == {"mlp.router.weight", "mlp.shared_gate.weight"}


def of_the_page(folder, way, **parallel):
    """A plan for the layers of docs/experts.md."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (folder / "moe_of_the_page.py").write_text(code)
    found = asked(way, **parallel)
    found["model"] = {"family": "moe_of_the_page:layers", "layers": 3, "loss": "mse"}
    found["model"] |= {"args": {"width": 8, "count": 4, "blocks": 3}}
    found["data"] = {"kind": "tests.processes.user_layers:Vectors"}
    return planned(found)


OF_THE_PAGE = [
    ({"schedule": {"kind": "1f1b"}}, {"dp": 2, "ep": 2}),
    ({"schedule": {"kind": "zb-h1"}, "memory": {"activations": "recompute"}}, {"dp": 4, "ep": 2, "shard": "all"}),
]


@pytest.mark.parametrize(("way", "parallel"), few(OF_THE_PAGE, 1), ids=str)
def test_experts_of_a_layer_of_a_user_train_as_in_one_process(tmp_path, monkeypatch, way, parallel):
    monkeypatch.syspath_prepend(tmp_path)
    workers = run_threads(of_the_page(tmp_path, way, **parallel), 3)
    single = run_threads(of_the_page(tmp_path, {}, pp=1), 3)
    assert apart(numbers(workers), numbers(single)) <= TOLERANCE
    own = {
        name for worker in workers for s, one in worker.optimizers.items() if s <= EXPERTS for name in one.parameters
    }
    assert len(own) == 3 * 4 * 2 and all(".experts." in name for name in own)


def test_a_layer_that_shares_out_nothing_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    made = of_the_page(tmp_path, {"schedule": {"kind": "1f1b"}}, dp=2, ep=2)
    module = importlib.import_module("moe_of_the_page")
    monkeypatch.setattr(module.Mixture, "share_experts", lambda self, group: "expert")
    with refused("E119", "share_experts of layers.0 returns 'expert'"):
        run_threads(made, 1)


def of_experts(ops):
    return {(op.kind, home_of(op.stage)) for op in ops if op.stage <= EXPERTS}


WITH = [
    *({"parallel": {"shard": shard}} for shard in ("none", "optimizer", "weights", "gradients", "all")),
    {"parallel": {"shard": "weights", "exchange": "one-sided"}},
    {"parallel": {"average": {"every": 1}}},
    {"parallel": {"vocabulary": "shared"}},
    *({"optimizer": {"sync": sync}} for sync in ("post-validate", "two-versions")),
    {"optimizer": {"sync": "two-versions"}, "parallel": {"shard": "optimizer"}},
]


@pytest.mark.long(
    "{'parallel': {'shard': 'all'}}",
    "{'parallel': {'shard': 'none'}}",
    "{'parallel': {'shard': 'weights'}}",
    "{'parallel': {'shard': 'optimizer'}}",
    "{'parallel': {'shard': 'gradients'}}",
    "{'optimizer': {'sync': 'post-validate'}}",
)
@pytest.mark.parametrize("way", few(WITH, lambda way: "vocabulary" not in str(way)), ids=str)
def test_a_stage_without_experts_has_no_ops_of_any(way):
    """Under each order that is not searched."""
    tried = 0
    for kind in (name for name, card in SCHEDULES.items() if not card.searched):
        rng = Random(f"{kind} {way}")
        pp, ep = rng.choice([2, 4]), rng.choice([2, 4])
        stages = SCHEDULES[kind].placement(pp, SCHEDULES[kind].default_chunks).stages
        inner = [rng.randint(1, 2) for _ in range(stages - 2)]
        blocks = [rng.randint(0, 2), *inner, rng.randint(0, 1) + (stages == 2)]
        parallel = {"pp": pp, "dp": ep * rng.choice([1, 2]), "ep": ep, **way.get("parallel", {})}
        model = {"family": "llama", "experts": 4, "ffn_hidden": 16, "layers": sum(blocks)}
        how = {"kind": kind, "m": 4, "model": model, "parallel": parallel, "partition": {"layers_per_stage": blocks}}
        try:
            found = compile_job(job(**way | how), budget=0.0, suggest=False)
        except ZbcError as error:
            assert error.code.startswith("E1"), error  # what does not go together
            continue
        ops = [op for _, _, op in found.program]
        those = {s for s, names in enumerate(found.layers) if any(name.startswith("layers.") for name in names)}
        steps = {stage for kind, stage in of_experts(ops) if kind in (Kind.STEP, Kind.TENTATIVE)}
        assert steps == {stage for _, stage in of_experts(ops)} == those
        assert {*found.program.dense} == {*range(stages)} - those
        tried += len(those) < stages
    assert tried > 1


def test_owners_of_experts_that_are_not_there_and_experts_without_an_owner_are_refused(tmp_path):
    made = plan(tmp_path, {"schedule": {"kind": "1f1b"}, "partition": {"layers_per_stage": [0, 4]}}, dp=2, ep=2)
    assert made.manifest.dense == [0] and made.program.dense == (0,)
    plain = plan(tmp_path, {"schedule": {"kind": "1f1b"}}, dp=2, ep=2)
    assert "dense" not in json.loads(plain.manifest.dumps()), "as in plans that know no such field"
    (first, second), step = made.program.ranks, Op(Kind.STEP, experts_of(0))
    with refused("E202", match="STEP e0 has nothing to work on: no experts of this stage are shared out"):
        check_complete(made.program.with_ranks([(*first, step), second], by="more"))
    with refused("E202", match="rank 0 never runs STEP e0"):
        check_complete(replace(made.program, dense=()))
    with refused("E505", match="the plan has no experts in stage 1, the model has"):
        run_threads(StoredPlan(made.manifest.model_copy(update={"dense": [0, 1]}), made.program), 1)


@pytest.mark.long
def test_swaps_take_the_time_of_what_goes_over_the_link(no_launches):
    def costs(ep):
        sizes = {"family": "llama", "layers": 4, "hidden": 64, "heads": 4, "vocab": 256, "seq_len": 32, "experts": 4}
        link = {"link_gbps": 0.001, "link_us": 0.0, "tflops": 1e6, "memory_gbps": 1e9}
        more = {"schedule": {"kind": "1f1b", "microbatches": 4, "microbatch_size": 1}}
        made = job(model=sizes, parallel={"pp": 2, "dp": 2, "ep": ep}, hardware=link, **more)
        return compile_job(made, budget=0.0, suggest=False).costs

    rows = 2 * 32 * 64 * 4  # top_k tokens of one sequence in float32, of which half stays
    each = 2 * 2 * rows / 2 / (0.001e9 / 8) * 1e3  # two blocks of a stage swap twice
    f, b = costs(2).of("f"), costs(2).of("b")
    assert f - costs(1).of("f") == pytest.approx(each, rel=0.01)
    assert b - costs(1).of("b") == pytest.approx(each, rel=0.01)


def test_copies_are_added_row_by_row_in_their_order():
    of = torch.tensor([4, 0, 2, 0, 4, 4])
    copies, x = Copies.rows(of, 5), torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(copies.summed(x), torch.zeros(5, 3, dtype=torch.float64).index_add(0, of, x))
    assert torch.equal(copies.spread(rows), rows[of])
    assert torch.autograd.gradcheck(copies.summed, x) and torch.autograd.gradcheck(copies.spread, rows)
    nothing = Copies.rows(of[:0], 5)
    assert torch.equal(nothing.summed(x[:0]), torch.zeros(5, 3, dtype=torch.float64))
