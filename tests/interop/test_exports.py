"""Plans in the forms of other tools, Megatron's layout string among them: exact, or refused."""

import json
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

import zbc
from tests.jobs import job
from tests.refusals import refused
from zbc.api import DIALECTS, EXPORTS
from zbc.compiler.compile import compile_job
from zbc.compiler.partition import megatron_layout
from zbc.compiler.schedules import SCHEDULES
from zbc.errors import ZbcError
from zbc.interop import torch_csv


@pytest.fixture(scope="module")
def plans():
    kinds = ["1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "gpipe"]
    return {kind: zbc.plan(job(kind=kind, pp=2, layers=8, m=4)) for kind in kinds}


@pytest.mark.long("1f1b")
@pytest.mark.parametrize("kind", ["1f1b", "zb-v"])
def test_json_says_what_each_op_needs(plans, kind):
    plan = plans[kind]
    document = json.loads(plan.export("json")[".json"])
    assert (document["format"], document["version"]) == ("zbc-timeline", 1)
    needs = {row["op"]: row["needs"] for entry in document["ranks"] for row in entry["compute"]}
    assert needs["F s0 m0"] is None
    assert needs["F s1 m2"] == "F s0 m2"
    assert document["makespan_ms"] == pytest.approx(plan.timeline.makespan)


def test_dot_has_a_node_for_each_op_and_an_arrow_for_each_dependency(plans):
    plan = plans["zb-v"]
    text = plan.export("dot")[".dot"]
    graph = plan.timeline.graph
    ops = [i for rank in range(plan.timeline.ranks) for i in plan.timeline.ops(rank)]
    labels = dict(re.findall(r'^ *(o\d+) \[label="([^"]+)"', text, re.M))
    assert list(labels.values()) == [str(graph.ops[i]) for i in ops]
    arrows = set(re.findall(r"(o\d+) -> (o\d+)(?!.*dotted)", text))
    assert arrows == {(f"o{ops.index(graph.sources[i])}", f"o{k}") for k, i in enumerate(ops) if graph.sources[i] >= 0}
    assert text.count("{") == text.count("}")
    assert text.count("subgraph") == 2


@pytest.mark.parametrize(("kind", "virtual"), [("1f1b", 1), ("interleaved-1f1b", 2)])
def test_megatron_gets_layout_and_sizes(plans, kind, virtual):
    plan = plans[kind]
    text = plan.export("megatron")[".args"]
    found = dict(re.findall(r"^(--\S+)(?: (.+))?$", text, re.M))
    assert found["--pipeline-model-parallel-size"] == "2"
    layout = megatron_layout.loads(found["--pipeline-model-parallel-layout"].strip('"'))
    assert len(layout) == 2 * virtual
    assert f"virtual pipeline size {virtual};" in text
    assert layout == tuple(sum(name.startswith("layers") for name in part) for part in plan.compiled.layers)
    assert (found["--micro-batch-size"], found["--global-batch-size"]) == ("2", "8")
    assert ("--microbatch-group-size-per-virtual-pipeline-stage" in found) == (virtual > 1)


def test_torchtitan_gets_its_settings_and_the_order(plans, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = plans["interleaved-1f1b"]
    files = plan.export("torchtitan", csv_name="my.csv")
    settings = tomli.loads(files[".toml"])
    parallelism = settings["parallelism"]
    assert parallelism["pipeline_parallel_degree"] == 2
    assert parallelism["pipeline_parallel_schedule_csv"] == str(tmp_path / "my.csv")
    assert settings["training"]["local_batch_size"] == 4 * parallelism["pipeline_parallel_microbatch_size"]
    parts = parallelism["module_fqns_per_model_part"]
    assert (parts[0][0], parts[-1][-2:]) == ("tok_embeddings", ["norm", "output"])
    assert [name for part in parts for name in part if "layers" in name] == [f"layers.{i}" for i in range(8)]
    order = torch_csv.loads(files[".csv"]).program
    assert [list(ops) for ops in order.ranks] == [[op for op in ops if op.kind.computes] for ops in plan.program.ranks]


@pytest.mark.parametrize(("shard", "replicated", "sharded"), [("optimizer", 2, 1), ("all", 1, 2)])
def test_torchtitan_gets_the_other_axes(shard, replicated, sharded):
    plan = zbc.plan(job(kind="1f1b", pp=2, parallel={"dp": 2, "tp": 2, "shard": shard}), budget=0.0)
    found = tomli.loads(plan.export("torchtitan", csv_name="my.csv")[".toml"])["parallelism"]
    degrees = {key: found[key] for key in found if key.endswith("degree")}
    assert degrees == {
        "pipeline_parallel_degree": 2,
        "data_parallel_replicate_degree": replicated,
        "data_parallel_shard_degree": sharded,
        "tensor_parallel_degree": 2,
    }


def titan_places(name, ranks, stages):
    """Stage -> rank as torchtitan computes it from the schedule's name (distributed/pipeline_parallel.py)."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    found = schedules.get_schedule_class(name)
    per_rank = stages // ranks
    if found in (schedules.ScheduleZBVZeroBubble, schedules.ScheduleDualPipeV):
        assert per_rank == 2, "v schedules assume 2 stages per rank"
        return {
            s: r for r, pair in enumerate(zip(range(ranks), reversed(range(ranks, stages)), strict=True)) for s in pair
        }
    assert per_rank == 1 or not issubclass(found, schedules.PipelineScheduleSingle)
    return {r + i * ranks: r for r in range(ranks) for i in range(per_rank)}


@pytest.mark.long("v-min-4", "v-half-4", "bitpipe-zb-4")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_torchtitan_builds_the_stages_where_the_order_has_them(kind, ranks):
    """A stage on another rank would silently hang in the first step."""
    plan = zbc.plan(job(kind=kind, pp=ranks, layers=16, m=2 * ranks), budget=0.0)
    placement = plan.program.placement
    try:
        text = plan.export("torchtitan")[".toml"]
    except ZbcError as error:
        assert error.code == "E413" and len(placement.pipes) > 1, error
        return
    name = tomli.loads(text)["parallelism"]["pipeline_parallel_schedule"]
    assert titan_places(name, ranks, placement.stages) == dict(enumerate(placement.pipes[0]))
    assert f"The loss is on rank {placement.pipes[0][-1]}" in text


def test_torchtitan_0_3_gets_a_function_that_sets_the_same(plans, monkeypatch):
    """Run with a stand-in for torchtitan's registry, whose model has 8 layers or, for another plan, too few."""
    layers = [None] * 8

    def llama3_debugmodel():
        part = lambda **values: SimpleNamespace(**values)  # noqa: E731
        wrapped = part(loss_fn="plain")
        return part(training=part(), parallelism=part(), loss=wrapped, model_spec=part(model=part(layers=layers)))

    registry = "torchtitan.models.llama3.config_registry"
    for name in ("torchtitan", "torchtitan.models", "torchtitan.models.llama3", registry):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[registry].llama3_debugmodel = llama3_debugmodel
    for kind, split in (("1f1b", False), ("zb-v", True)):
        files = plans[kind].export("torchtitan", dialect="0.3")
        assert list(files) == [".py", ".csv"]
        space = {}
        exec(files[".py"], space)
        config = space["planned"]()
        expected = tomli.loads(plans[kind].export("torchtitan")[".toml"])
        assert config.training.disable_cuda_graphs
        for key, value in expected["parallelism"].items():
            if key == "module_fqns_per_model_part":
                value[-1][-1] = "lm_head"
            assert getattr(config.parallelism, key) == value
        assert vars(config.training).items() >= expected["training"].items()
        assert (config.loss == "plain") == split
    layers.pop()
    with pytest.raises(ValueError, match="for 8 layers, llama3_debugmodel has 7"):
        space["planned"]()


OWN = {"model": {"family": "my.module:layers"}, "data": {"kind": "my.module:data"}}
RAMP = {"schedule": {"ramp": [{"microbatches": 1, "steps": 1}]}}
REFUSED = [  # a job, a target, the reason
    ({"kind": "zb-v"}, "megatron", "deals stages round and round"),
    ({"kind": "zb-h1"}, "megatron", "runs 1F1B here"),
    ({"kind": "gpipe"}, "megatron", "runs 1F1B here"),
    ({"kind": "hanayo", "schedule": {"chunks": 4}}, "torchtitan", "or in one V"),
    *((OWN, target, "my.module:layers") for target in ("megatron", "torchtitan")),
    *((RAMP, target, "schedule.ramp") for target in ("megatron", "torchtitan")),
]


@pytest.mark.parametrize(("changes", "target", "reason"), REFUSED)
def test_what_a_tool_has_no_words_for_or_would_run_otherwise_is_refused(changes, target, reason):
    with refused("E413", f"cannot express this plan ({target})") as caught:
        zbc.plan(job(pp=2, m=4, **changes), budget=0.0).export(target)
    assert reason in "\n".join(caught.value.details)


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_an_order_alone_is_no_model(tmp_path, target):
    (tmp_path / "x.csv").write_text("0F0,0B0\n1F0,1B0\n")
    with refused("E413", "order alone"):
        zbc.load(tmp_path / "x.csv").export(target)


def test_every_target_of_the_command_line_has_a_writer():
    from zbc.commands.exchanging import Dialect, Target

    assert [target.value for target in Target] == list(EXPORTS)
    assert [form.value for form in Dialect] == [form for forms in DIALECTS.values() for form in forms]


def test_the_lowered_form_has_every_transfer_of_the_plan_and_one_sum_per_stage(plans):
    plan = plans["zb-v"]
    rows = [row.split(",") for row in plan.export("torch-csv", dialect="compute_comms")[".csv"].splitlines()]
    for row, ops in zip(rows, plan.program.ranks, strict=True):
        expected = [f"{op.stage}{op.kind.value}{op.mb}" for op in ops if op.kind.is_transfer]
        assert [cell for cell in row if "SEND" in cell or "RECV" in cell] == expected
        assert sorted(cell for cell in row if cell.endswith("REDUCE_GRAD")) == sorted(
            f"{stage}REDUCE_GRAD" for stage in {op.stage for op in ops if op.kind.value == "F"}
        )
    assert rows[0][-1] == "0REDUCE_GRAD", "behind the last backward"
    with refused("E413"):
        plan.export("megatron", dialect="compute_comms")
    with pytest.raises(ZbcError, match="no dialect 'compute_only'"):
        plan.export("torchtitan", dialect="compute_only")


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_the_lowered_form_since_torch_2_15_waits_once_for_all_that_it_begins(name, plans, tmp_path):
    """It adds to the older form a wait after each sum, and a wait for each send once it has been received."""
    plan = plans[name]
    older, text = (plan.export("torch-csv", dialect=f"compute_comms{since}")[".csv"] for since in ("", "-2.15"))
    for before, row in zip(older.splitlines(), text.splitlines(), strict=True):
        cells = row.split(",")
        assert [cell for cell in cells if "WAIT" not in cell] == before.split(",")
        waits = {cell: place for place, cell in enumerate(cells) if "WAIT" in cell}
        begun = [cell for cell in cells if re.fullmatch(r"\d+(SEND_[FB]\d+|REDUCE_GRAD)", cell)]
        assert sorted(waits) == sorted(re.sub(r"^\d+", r"\g<0>WAIT_", cell) for cell in begun)
        for cell, place in waits.items():
            assert cells.index(cell.replace("WAIT_", "")) < place
            if "SEND_F" in cell:  # the gradient that has arrived was computed from the sent tensor
                assert cells[place - 1] in (cell.replace("WAIT_SEND_F", letter) for letter in "IB")
            elif "REDUCE" in cell:
                assert cells[place - 1] == cell.replace("WAIT_", "")
    (tmp_path / "lowered.csv").write_text(text)
    with pytest.raises(ZbcError, match="not an action") as caught:
        torch_csv.read(tmp_path / "lowered.csv")
    assert {error.hint for error in caught.value.errors} == {caught.value.errors[0].hint}


GOOD = {
    "Et*3|t*4|t*4|t*3L": (3, 4, 4, 3),
    "E|(tt|)*3,t*2|L": (0, 2, 2, 2, 2, 0),
    "Ettt|(t|)*2t,L": (3, 1, 1, 1),
    "Et*0|tL": (0, 1),
    "E|L": (0, 0),
}
BAD = {
    "": "its layers are none",
    "Et|tLt": "its layers are Et*2Lt",
    "Et|Et|tL": "its layers are EtEt*2L",
    "Et|xt|tL": "stage 1 has 'x'",
    "Et|tm|L": "multi-token prediction",
    "Et|(t|tL": "'(' at character 4",
    "E t|tL": "' ' at character 2",
    "Et|()*2|tL": "'(' at character 4",
    "Et|(t|)L": "brackets without *n at character 4",
    "Et*|tL": "'*' at character 3",
    "Et*9999999|L": "more than a hundred thousand",
    "Et|t*3|tL!": "'!' at character 10",
}


@pytest.mark.parametrize("text", GOOD)
def test_layouts_say_how_many_layers_each_stage_has(text):
    assert megatron_layout.loads(text) == GOOD[text]


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_layout_is_refused_with_what_was_found(text):
    with refused("E130") as caught:
        megatron_layout.loads(text, "zbc.toml:3:4")
    assert caught.value.where == "zbc.toml:3:4"
    assert BAD[text] in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.long
@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_what_is_written_reads_back(counts):
    names, number = [], 0
    for count in counts:
        names.append([f"layers.{number + i}" for i in range(count)])
        number += count
    names[0].insert(0, "embed")
    names[-1].append("head")
    assert megatron_layout.loads(megatron_layout.dumps(names)) == tuple(counts)


def test_a_job_is_cut_as_its_layout_says():
    compiled = compile_job(job(pp=4, layers=8, partition={"layers_per_stage": "Et|t*3|t*3|tL"}))
    assert [len(part) for part in compiled.layers] == [2, 3, 3, 2]
    assert compiled.layers[0] == ("embed", "layers.0")
    assert megatron_layout.dumps(compiled.layers) == "Et|t*3|t*3|tL"
