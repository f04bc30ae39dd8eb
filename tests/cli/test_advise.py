"""`zbc advise`: the best ways to train a model on a number of GPUs, from a Hugging Face config or a job."""

import json
import math
import tomllib
from dataclasses import replace

import pytest

from tests.jobs import write_job
from tests.refusals import refused
from tests.tiers import few
from zbc.commands import advising
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.machine import Machine
from zbc.compiler.schedules import SCHEDULES
from zbc.compiler.shapes import load_job
from zbc.compiler.whatif import advise as core
from zbc.compiler.whatif.compare import Asked, combinations, compare
from zbc.job import toml

LLAMA = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12}
LLAMA |= {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096}
LLAMA |= {"rms_norm_eps": 1e-6, "rope_theta": 1e4}
LARGE = LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}


@pytest.fixture
def model(tmp_path):
    """Writes the config.json of a model into a folder of its own."""

    def written(config, name="model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return tmp_path / name

    return written


def document_of(folder, *, gpus=8, gpu="a100-40g", batch="64", seq_len=1024, settings=()):
    return advising._document(folder, gpus, gpu, batch, seq_len, settings)


def test_weights_and_state_are_those_of_the_model(model):
    """By hand: two matrices of the vocabulary, and per block queries, keys, values, output, three of the MLP, norms."""
    state = core.state_of(document_of(model(LLAMA)))
    block = 2 * 1024 * 1024 + 2 * 1024 * 512 + 3 * 1024 * 2816 + 2 * 1024
    assert state.parameters == 12 * block + 2 * 32000 * 1024 + 1024
    assert 16 <= state.bytes / state.parameters <= 19, "weight, gradient, master and two moments"
    assert state.share == state.bytes / 8


@pytest.mark.long
def test_what_cannot_fit_is_said_with_gpus_that_would_do(model):
    found = document_of(model(LARGE), gpu="rtx4090")
    with refused("E301", "of 8 GPUs", hint="b200 or mi300x") as caught:
        core.state_of(found)
    count = int(caught.value.hint.split("what does: ")[1].split(" GPUs")[0])
    assert core.state_of(document_of(model(LARGE, "more"), gpu="rtx4090", gpus=count)).gpus == count
    with refused("E301"):
        core.state_of(document_of(model(LARGE, "less"), gpu="rtx4090", gpus=count - 1))


@pytest.mark.long
def test_where_activations_leave_no_room_the_least_too_large_shape_is_named(model):
    """State fits on all GPUs together, but not together with long sequences."""
    found = document_of(model(LARGE), gpu="h100", gpus=18, batch="18", seq_len=32768)
    with refused("E301", "of all shapes pp", hint="what does: hardware.memory_gib = "):
        core.advise(found)


@pytest.fixture(scope="module")
def advice(tmp_path_factory):
    folder = tmp_path_factory.mktemp("advised")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return core.advise(document_of(folder)), folder


def test_rows_are_ranked_and_each_uses_all_gpus_and_the_whole_batch(advice):
    rows = advice[0].rows
    assert 1 < len(rows) <= core.ROWS
    assert [row.sample_ms for row in rows] == sorted(row.sample_ms for row in rows)
    assert all(row.shape.ranks == 8 and row.compiled.sequences == 64 for row in rows)
    assert all(row.compiled.report.peak_bytes <= row.job.room for row in rows)
    assert max(sum(other.shape == row.shape for other in rows) for row in rows) <= core.OF_SHAPE


def test_no_other_shape_is_faster_under_1f1b(advice):
    """Against every shape planned by hand."""
    best, by_hand = advice[0].rows[0].sample_ms, []
    size = advice[0].rows[0].job.schedule.microbatch_size
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8):
            if pp * tp <= 8:
                path = advice[1] / "other.toml"
                path.write_text(advising.job_text(advice[0], 1, advice[1]).replace("tp_sequence = true\n", ""))
                dp = 8 // pp // tp
                shape = [f"parallel.pp={pp}", f"parallel.dp={dp}", f"parallel.tp={tp}", 'schedule.kind="1f1b"']
                shape += [f"schedule.microbatches={64 // dp // size}", "memory.activations=keep"]
                shape += ["parallel.tp_sequence=true"] if tp > 1 else []
                shape += ["parallel.shard=none"] if dp == 1 else []
                made = compile_job(load_job(path, shape), budget=0.0)
                by_hand.append(made.settled_ms / made.sequences)
    assert best <= min(by_hand) * (1 + 1e-9) and max(by_hand) > 1.2 * best


def test_what_a_gpu_does_adds_up_to_its_time(advice):
    for row in advice[0].rows:
        assert math.fsum(core.spent(row).values()) == pytest.approx(8 * row.sample_ms)
        assert min(core.spent(row).values()) >= 0
    text = core.decides(advice[0].rows)
    assert text.startswith(f"{advice[0].rows[0].shape} is ") and "ahead of" in text


def test_the_job_of_a_row_plans_to_the_numbers_of_the_row(advice):
    found, folder = advice
    for number, row in enumerate(found.rows, 1):
        path = folder / f"{number}.toml"
        path.write_text(advising.job_text(found, number, folder))
        made = compile_job(load_job(path), budget=0.0)
        assert made.settled_ms == row.compiled.settled_ms and made.schedule == row.compiled.schedule
        assert made.report.peak_bytes == row.compiled.report.peak_bytes
        assert made.job.hardware.gpu == "a100-40g" and "tflops" not in path.read_text()


def test_a_mix_of_policies_is_written_as_a_job_that_plans_to_its_numbers(advice):
    found, folder = advice
    (row,) = core._whole(core._with(found.rows[0].document, {core.ACTIVATIONS: "recompute"}))
    mixed, path = core._mixed(row), folder / "mixed.toml"
    path.write_text(advising.job_text(replace(found, rows=(mixed,)), 1, folder))
    assert compile_job(load_job(path), budget=0.0).settled_ms == mixed.compiled.settled_ms < row.compiled.settled_ms


def test_the_job_of_a_row_leaves_layers_and_recompute_to_each_schedule(advice):
    """Pinned to the stages of its own schedule, it would be a job of only a few of the others."""
    found, folder = advice
    path = folder / "open.toml"
    path.write_text(advising.job_text(found, 1, folder))
    tables = load_job(path).document.values
    assert "partition" not in tables and tables["memory"]["activations"] == "auto"
    if tables["parallel"]["pp"] > 1:
        planned = [compile_job(load_job(path, [f"schedule.kind={kind}"]), budget=0.0) for kind in ("1f1b", "zb-v")]
        assert {plan.program.placement.stages // plan.program.placement.ranks for plan in planned} == {1, 2}


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "gpu", "gpus", "batch"),
    [
        (LLAMA | {"num_hidden_layers": 6}, "l40s", 2, "4"),
        (LLAMA | {"num_hidden_layers": 6, "vocab_size": 1000}, "l40s", 3, "6"),
    ],
)
def test_no_schedule_is_faster_for_the_job_of_the_first_row(model, config, gpu, gpus, batch):
    folder = model(config)
    found = core.advise(document_of(folder, gpus=gpus, gpu=gpu, batch=batch, settings=["hardware.ranks_per_node=1"]))
    path = folder / "best.toml"
    path.write_text(advising.job_text(found, 1, folder))
    rows = compare(Asked(path, budget=0.0), combinations([*SCHEDULES], ()))
    planned = {row.schedule: row.settled_ms for row in rows if row.error is None}
    assert found.rows[0].shape.pp > 1 and len(planned) > 10
    assert planned[found.rows[0].compiled.schedule] <= min(planned.values()) * (1 + core.AHEAD)


@pytest.mark.long("13-1-13", "13-20-26")
@pytest.mark.parametrize(("gpus", "batch", "fix"), [(7, "64", 56), (13, "20", 26), (13, "1", 13)])
def test_where_no_shape_is_possible_each_is_told_why_with_a_batch_that_does(model, gpus, batch, fix):
    """Fewer layers than ranks, and a batch of which replicas get no equal shares."""
    folder = model(LLAMA | {"num_hidden_layers": 6})
    with refused("E110", match=f"no shape of {gpus} GPUs can be planned", hint=f"a batch of {fix} ") as caught:
        core.advise(document_of(folder, gpus=gpus, batch=batch))
    told = caught.value.render()
    assert "more ranks than the 6 layers" in told and "does not divide" in told and "memory" not in told
    assert core.advise(document_of(folder, gpus=gpus, batch=str(fix))).rows[0].shape.dp == gpus


def test_every_shape_is_looked_at_once_with_each_way_to_share_out(model):
    found = core._shapes(document_of(model(LARGE), gpus=4))
    shards = [(shape, own.values["parallel"].get("shard")) for shape, own in found]
    assert {(shape.dp, how) for shape, how in shards} == {(d, s) for d in (2, 4) for s in core.SHARDS} | {(1, None)}
    assert len(set(shards)) == len(shards)


@pytest.mark.long
def test_exchanges_of_layers_that_are_alike_are_timed_once(model, monkeypatch):
    timed, plain = [], Machine.rings_ms
    monkeypatch.setattr(Machine, "rings_ms", lambda self, *how, **more: timed.append(how) or plain(self, *how, **more))
    found = core._shapes(document_of(model(LARGE), gpu="h100", gpus=4096, batch="4096"))
    own = next(own for shape, own in found if shape.why is None and shape.tp == 8)
    assert core._bound(own) > 0 and 0 < len(timed) < 20  # for 80 layers with several each


def test_batches_are_sequences_or_tokens():
    assert [advising._samples(*of) for of in (("512", 4096), ("4M", 8192), ("64k", 1024))] == [512, 512, 64]
    opened = advising.opened({"model": {"seq_len": 8192}}, toml.Document("x", {}), 48, None).values["schedule"]
    assert opened["batch"] % 48 == 0 and opened["microbatch_size"] == 1
    axes = [advising.opened({"model": {"seq_len": n}}, toml.Document("x", {}), 8, None) for n in (8192, 16384)]
    assert [one.values["parallel"].get("cp") for one in axes] == [None, "auto"]
    short = advising.opened({"model": {"seq_len": 1024}}, toml.Document("x", {}), 2, 6)
    assert short.values["schedule"] == {"batch": 6, "microbatch_size": 3}


@pytest.mark.long
def test_a_job_is_advised_with_its_own_ranks_batch_and_gpus(zbc, folder):
    write_job(folder, hardware={"gpu": "l40s"}, optimizer={"lr": 0.5})
    said = zbc("advise", "zbc.toml", "-o", "best.toml", "--json").json()
    assert said["gpus"] == 4 and said["job"] == "best.toml" and said["rows"][0]["tokens_per_s"] > 0
    made = load_job(folder / "best.toml")
    assert made.parallel.ranks == 4 and made.optimizer.lr == 0.5 and made.hardware.gpu == "l40s"
    assert made.parallel.dp * made.schedule.microbatches * made.schedule.microbatch_size == 16


@pytest.mark.long
def test_what_is_said_fits_a_terminal_and_names_the_next_command(zbc, folder, monkeypatch):
    """Of a large step the first row is told before it is compared."""
    monkeypatch.setattr(core, "LARGE", 0)
    write_job(folder)
    said = zbc("advise", "zbc.toml", "--gpus", "2", "--gpu", "l40s")
    assert said.code == 0 and max(map(len, said.out.split("\n"))) <= 80, said.out
    assert said.err.startswith("so far: pp ") and "1f1b" in said.err and "tokens/s" in said.err
    assert "parameters" in said.out.split("\n")[0] and "next       zbc advise zbc.toml --gpus 2 --gpu l40s" in said.out
    assert not zbc("advise", "zbc.toml", "--gpus", "2", "--gpu", "l40s", "-q").out


def test_gpus_are_asked_for(zbc, folder):
    write_job(folder)
    assert "--gpu missing" in zbc("advise", "zbc.toml").err
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert "--gpus and --gpu missing" in zbc("advise", "config.json").err


@pytest.mark.long
def test_init_of_a_large_model_is_for_gpus_and_of_a_small_one_for_this_machine(zbc, folder, model):
    said = zbc("init", "a", "--from-hf", str(model(LARGE)))
    assert said.code == 3 and "E105" in said.err and "--gpus 64 --gpu h100-sxm" in said.err
    small = model({**LLAMA, "num_hidden_layers": 4}, "small")
    assert zbc("init", "b", "--from-hf", str(small)).code == 0
    assert 'device = "cpu"' in (folder / "b" / "zbc.toml").read_text()


@pytest.mark.long
@pytest.mark.parametrize(("vocab", "kind"), [(255, "synthetic"), (256, "text")])
def test_a_first_job_has_data_for_however_few_words(zbc, folder, model, vocab, kind):
    few = model({**LLAMA, "num_hidden_layers": 4, "vocab_size": vocab}, "few")
    assert zbc("init", "a", "--from-hf", str(few)).code == 0
    assert tomllib.loads((folder / "a" / "zbc.toml").read_text())["data"] == {"kind": kind}
    assert zbc("plan", "a/zbc.toml", "--budget", "0").code == 0


DEEPSEEK = {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128}
DEEPSEEK |= {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
DEEPSEEK |= {"v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8}
DEEPSEEK |= {"moe_intermediate_size": 2048, "intermediate_size": 18432, "first_k_dense_replace": 3}
DEEPSEEK |= {"vocab_size": 129280, "max_position_embeddings": 163840, "num_nextn_predict_layers": 1}
GPT_OSS = {"model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64}
GPT_OSS |= {"num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4}
GPT_OSS |= {"intermediate_size": 2880, "vocab_size": 201088, "max_position_embeddings": 131072, "sliding_window": 128}


@pytest.mark.long
@pytest.mark.parametrize(("config", "published"), few([(GPT_OSS, 20.9e9), (DEEPSEEK, 671e9)], 1))
def test_a_model_of_transformers_has_the_published_parameters(model, config, published):
    """671B and 20.9B by their model cards."""
    folder = model(config)
    assert advising.parameters_of(folder) == pytest.approx(published, rel=0.01)
    values = advising.of_folder(folder)["model"]
    assert values["config"] == str(folder / "config.json") and values["seq_len"] == advising.LONGEST


@pytest.mark.long
def test_a_model_of_transformers_is_planned_as_itself(zbc, folder, model):
    small = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512, "head_dim": 32}
    path = str(model(GPT_OSS | small | {"num_local_experts": 4, "intermediate_size": 64, "num_key_value_heads": 2}))
    asked = ("advise", path, "--gpus", "2", "--gpu", "l40s", "--batch", "4", "--seq-len", "128")
    found = json.loads(zbc(*asked, "--json", "-o", "a.toml").out)
    assert found["rows"] and found["shapes"] > 4, "with tp and with ep, too"
    assert zbc("init", "b", "--from-hf", path).code == 0
    for job, length in (("a.toml", 128), ("b/zbc.toml", 2048)):
        written = tomllib.loads((folder / job).read_text())["model"]
        assert written.pop("config") == f"{path}/config.json" and written.pop("seq_len") == length
        assert not written.keys() - {"dtype", "parameters"}
        assert zbc("plan", job, "--budget", "0", "-o", "plan").code == 0
