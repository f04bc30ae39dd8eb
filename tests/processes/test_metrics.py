"""The run directory and the console line of a step."""

import errno
import io
import json
import math
import os
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.processes.plans import compiled, metrics, run_here, write_plan
from tests.refusals import error_of, refused
from tests.test_linefile import no_file_beyond
from zbc.compiler.recorded.log import read
from zbc.errors import ZbcError
from zbc.job import gpu
from zbc.plan.directory import read_manifest
from zbc.plan.phases import Phases
from zbc.runtime.core.progress import EvaluationResult, StepResult
from zbc.training.checkpoint.resume import Start
from zbc.training.launch import launch, torchrun
from zbc.training.launch.launch import RunOptions
from zbc.training.metrics.live import Screen
from zbc.training.metrics.metrics import RunRecord

MIB = 2**20


def result(step=0, **changes):
    numbers = {"loss": 5.5, "grad_norm": 1.25, "stop": False, "skipped": False, "seconds": 0.1}
    numbers |= {"busy_seconds": (0.05, 0.075, 0.02, 0.01), "peak_bytes": (MIB, 3 * MIB, 2 * MIB, MIB)}
    return StepResult(step=step, **{**numbers, **changes})


@pytest.fixture
def open_log(tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # set by some terminals

    def open_log(steps=12, out=tmp_path / "run", go_on=None, first=0, **changes):
        plan = write_plan(tmp_path, **{"log": {"every": 5}, **changes})
        phases = Phases.of(read_manifest(plan))
        options, start = RunOptions(plan, out=out, device="cpu"), Start(run=go_on)
        return RunRecord(read_manifest(plan), options, steps, ["here:1"] * 4, phases, first, start)

    return open_log


def test_a_line_has_all_a_reader_looks_for(open_log):
    with open_log() as log:
        line = log.record(result())
    assert line == (
        "step  1/12  loss 5.5000  grad norm 1.25  lr 0.0003  640 tokens/s  100.0 ms  idle 61.3%  balance 51.7%  "
        "process 3 MiB (rank 1)"
    )


@pytest.mark.parametrize("columns", [60, 80])
def test_a_line_is_broken_between_its_numbers_where_a_terminal_is_narrow(columns, open_log, monkeypatch):
    with open_log() as log:
        whole = log.record(result())
        monkeypatch.setenv("COLUMNS", str(columns))
        broken = log.record(result(4)).split("\n")
    assert len(broken) > 1 and all(len(line) <= columns for line in broken)
    assert all(line.startswith(" " * 12) for line in broken[1:])
    assert "  ".join(map(str.strip, broken)) == whole.replace("step  1", "step  5")


@pytest.fixture
def toy(monkeypatch):
    """A GPU of 0.001 TFLOPS, by name."""
    monkeypatch.setitem(gpu.GPUS, "toy", gpu.GPUS["l40s"]._replace(tflops=0.001))
    return {"gpu": "toy", "device": "cpu", "tflops": 1.0}


def test_what_a_run_gets_done_is_what_its_plan_would_at_the_same_time_of_a_step(open_log, tmp_path, toy):
    """One function computes both, so a prediction is off only by the time of a step."""
    with open_log(log={"every": 5}, hardware=toy) as log:
        told = json.loads((tmp_path / "run" / "run.json").read_text())["predicted"]
        log.record(result(seconds=told["barrier_ms"] / 1e3))
    (row,) = metrics(tmp_path / "run")
    keys = ("samples_per_s", "tokens_per_s", "tokens_per_s_per_rank", "mfu")
    assert all(row[key] == pytest.approx(told[key]) and told[key] > 0 for key in keys)


def test_the_first_the_last_every_nth_and_a_stopped_step_have_a_line(open_log):
    with open_log(steps=12) as log:
        shown = [step + 1 for step in range(12) if log.record(result(step, stop=step == 6)) is not None]
    assert shown == [1, 5, 7, 10, 12]


def test_every_step_is_on_disk_before_the_next_begins(open_log, tmp_path):
    with open_log() as log:
        for step in range(3):
            log.record(result(step))
            assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(1, step + 2))


def test_numbers_that_json_has_not_are_null(open_log, tmp_path):
    with open_log() as log:
        line = log.record(result(loss=math.nan, grad_norm=math.inf, skipped=True))
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row["loss"] is None and row["grad_norm"] is None and row["skipped"] is True
    assert "loss nan" in line and "SKIPPED" in line


def test_rows_of_experts_are_written_with_a_line_and_reported_over_their_mean(tmp_path):
    plan = read_manifest(write_plan(tmp_path, log={"every": 2}))
    model = plan.planning["model"] | {"experts": 4, "imbalance": 1.2}
    manifest = plan.model_copy(update={"planning": {**plan.planning, "model": model}, "ep": 2})
    options, rows = RunOptions(tmp_path, out=tmp_path / "run"), (30.0, 10.0, 20.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    with RunRecord(manifest, options, 3, ["here:1"] * 4, Phases.of(manifest)) as log:
        for step in range(3):
            log.record(result(step, routed=(*rows, *((10.0 + step, 10.0 - step) * 2))))
    told = [row.get("expert_rows") for row in metrics(tmp_path / "run")]
    blocks = [[30, 10, 20, 0], [0, 0, 0, 0]]
    assert told == [[*blocks, [10 + step, 10 - step] * 2] for step in range(3)]  # the first, every second, the last
    loads = read(tmp_path / "run").loads()
    assert loads.blocks == {
        0: pytest.approx([2, 2 / 3, 4 / 3, 0]),
        2: pytest.approx([1.1, 0.9] * 2),
    }  # a block without experts: none
    assert loads.ranks == pytest.approx([7 / 6, 5 / 6]) and loads.imbalance == pytest.approx(7 / 6)
    assert (loads.planned, loads.steps, loads.busiest) == (1.2, 3, pytest.approx(1.55))
    assert loads.as_json()["experts"]["busiest"] == loads.busiest


def test_without_a_sequence_length_samples_are_counted(open_log, tmp_path):
    model = {"family": "tests.processes.user_layers:layers", "loss": "mse"}
    data = {"kind": "tests.processes.user_layers:Vectors"}
    plan = compiled(tmp_path, model={**model, "args": {}}, data=data)
    planning = {**plan.write(tmp_path / "plan").planning, "model": {**model, "layers": 4, "seq_len": None}}
    manifest = read_manifest(tmp_path / "plan").model_copy(update={"planning": planning})
    options = RunOptions(tmp_path, out=tmp_path / "run")
    with RunRecord(manifest, options, 1, [], Phases.of(manifest)) as log:
        line = log.record(result())
    assert metrics(tmp_path / "run")[0]["samples_per_s"] == pytest.approx(80.0)
    assert "80 samples/s" in line


def test_an_existing_directory_is_used_if_no_run_is_in_it(open_log, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with open_log() as log:
        log.record(result())
    with refused("E614"):
        open_log()
    assert len(metrics(tmp_path / "run")) == 1


def test_of_two_runs_that_are_given_one_directory_at_once_the_second_changes_nothing(open_log, tmp_path, monkeypatch):
    tried, about = [], tmp_path / "run" / "run.json"

    def meanwhile(*args):
        monkeypatch.undo()
        before = about.read_text()
        tried.append((error_of(open_log, steps=99).code, about.read_text() == before))
        return []

    monkeypatch.setattr("zbc.training.metrics.sinks.open_sinks", meanwhile)
    with open_log() as log:
        log.record(result())
    assert tried == [("E614", True)]
    assert json.loads(about.read_text())["steps"] == 12 and len(metrics(tmp_path / "run")) == 1


@pytest.mark.parametrize("out", [True, False])
def test_a_full_disk_leaves_nothing_of_a_run_that_cannot_begin(open_log, tmp_path, monkeypatch, out):
    def full(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zbc.training.launch.rundir.replace_text", full)
    with refused("E608", "run.json: No space left on device", hint="make room") as caught:
        open_log(out=tmp_path / "a" / "run" if out else None)
    assert caught.value.exit_code == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.toml", "plan"]


def test_a_step_that_the_disk_has_no_room_for_is_named_and_leaves_no_half_line(open_log, tmp_path):
    with pytest.raises(ZbcError) as raised, open_log(log={"to": ["tensorboard"]}, checkpoint={"every": 5}) as log:
        log.record(result())
        with no_file_beyond((tmp_path / "run" / "metrics.jsonl").stat().st_size + 10):
            log.record(result(1))
    place = tmp_path / "run" / "metrics.jsonl"
    assert raised.value.code == "E608" and "--resume auto" in raised.value.hint
    assert raised.value.message == f"run: step 2: cannot write {place}: {os.strerror(errno.EFBIG)}"
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1]


@pytest.mark.long
def test_an_evaluation_has_lines_of_its_own(tmp_path):
    plan = write_plan(tmp_path, train={"eval_every": 2}, data={"validation": 0.0001})
    shown = [line for line in run_here(plan, 4, tmp_path / "run") if "evaluation:" in line]
    assert [line.split("  ")[0] for line in shown] == ["step 2/3", "step 3/3"]
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 2, 3, 3]
    found = [row for row in rows if "eval_loss" in row]
    assert [row["eval_samples"] for row in found] == [104, 104] and all(row["eval_loss"] > 5 for row in found)


# ---- other places ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 2])
def test_tensorboard_has_every_finite_number_of_each_step_once_when_a_run_goes_on(open_log, tmp_path, first):
    """After a checkpoint, or from the beginning without one."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_log(log={"to": ["tensorboard"]}) as log:
        for step in range(4):
            log.record(result(step, loss=1.0 + step))
    with open_log(log={"to": ["tensorboard"]}, go_on=tmp_path / "run", first=first) as log:
        for step in range(first, 6):
            log.record(result(step, loss=1.0 + step, grad_norm=math.inf if step == 5 else 1.25))
        assert " over 8 of 16 samples, " in log.record_evaluation(EvaluationResult(5, 4.25, 8, 0.5, 16))
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(step, float(step)) for step in range(1, 7)]
    assert [e.step for e in found.Scalars("grad_norm")] == [1, 2, 3, 4, 5]
    assert [(e.step, e.value) for e in found.Scalars("eval_loss")] == [(6, 4.25)]
    assert {"lr", "tokens_per_s", "bubble_rate_makespan", "peak_bytes/rank3"} <= set(found.Tags()["scalars"])


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in that records calls; the real package is large and not needed for that."""
    fake = mock.Mock(told=[])
    fake.init = lambda **options: fake.told.append(options) or fake
    fake.log = lambda numbers, step: fake.told.append((step, numbers))
    fake.finish = lambda: fake.told.append("finish")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_is_told_what_runs_and_every_step(open_log, tmp_path, wandb):
    with open_log(log={"to": ["wandb:project"]}) as log:
        log.record(result())
    begun, (step, numbers), end = wandb.told
    assert begun["project"] == "project" and begun["dir"] == str(tmp_path / "run") and begun["config"]["ranks"] == 4
    assert step == 1 and numbers["loss"] == 5.5 and numbers["busy_ms/rank1"] == 75.0 and end == "finish"


def test_a_run_that_goes_on_is_one_run_of_wandb(open_log, tmp_path, wandb):
    for go_on, first in ((None, 0), (tmp_path / "run", 1), (tmp_path / "run", 2)):
        with open_log(log={"to": ["wandb:project"]}, go_on=go_on, first=first) as log:
            log.record(result(first))
    with open_log(log={"to": ["wandb:project"]}, out=tmp_path / "other"):
        pass
    began = [told for told in wandb.told if isinstance(told, dict)]
    assert len({one["id"] for one in began[:3]}) == 1 and began[3]["id"] != began[0]["id"]
    assert all(one["resume"] == "allow" for one in began)
    assert [told[0] for told in wandb.told if isinstance(told, tuple)] == [1, 2, 3]


def test_a_wandb_that_does_not_start_is_an_error_in_words(open_log, wandb):
    wandb.init = lambda **options: (_ for _ in ()).throw(RuntimeError("No API key configured.\nUse `wandb login`."))
    with refused("E602", match="does not start: No API key", hint="WANDB_MODE=offline"):
        open_log(log={"to": ["wandb:project"]})
    with open_log():  # the same command again, after a login
        pass


@pytest.mark.parametrize("damage", ["[]", "{", '"text"', '{"wandb_run": 3}'])
def test_a_run_goes_on_whatever_has_become_of_its_run_json(open_log, tmp_path, wandb, damage):
    with open_log() as log:
        log.record(result())
    (tmp_path / "run" / "run.json").write_text(damage)
    with open_log(log={"to": ["wandb:project"]}, go_on=tmp_path / "run", first=1) as log:
        log.record(result(1))
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["first_step"] == 2


def test_a_package_that_is_missing_is_found_before_the_run_starts(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()  # the folder of an earlier run looks like a package without files
    monkeypatch.syspath_prepend(tmp_path)
    plan = write_plan(tmp_path, log={"to": ["wandb:project"]})
    with refused("E602", hint="zbc[wandb]"):
        run_here(plan, 4, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_mfu_is_the_share_of_the_peak_of_the_gpu(open_log, tmp_path, toy):
    with open_log(hardware=toy) as log:
        line = log.record(result())
    weights = 4 * (12 * 16 * 16) + 16 * 256
    flops = 8 * 6 * 8 * (weights + 4 * 8 * 16)  # 8 sequences of 8 tokens
    assert metrics(tmp_path / "run")[0]["mfu"] == pytest.approx(flops / (0.1 * 4 * 1e9))
    assert "MFU 1.6%" in line
    with open_log(out=tmp_path / "other", hardware={**toy, "tflops": 7.0}) as log:
        assert "MFU 1.6%" in log.record(result()), "of the peak, not of what is sustained"


# ---- the line that is written over -----------------------------------------------------------------------------


def test_the_live_line_says_how_far_the_run_is(open_log):
    with open_log(steps=12) as log:
        assert log.live(result(2)) == "[#####...............] 3/12  loss 5.5000  640 tokens/s  0:00:01 left"


def test_a_live_line_on_a_terminal_that_is_gone_goes_nowhere():
    class Gone(io.StringIO):
        def flush(self):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    lines = []
    screen = Screen(lines.append, Gone())
    screen.show("step 1")
    screen.say("stopped")
    assert lines == ["stopped"]


def test_lines_that_stay_clear_the_one_that_does_not(monkeypatch):
    monkeypatch.setattr("zbc.training.metrics.live.time.monotonic", lambda: 100.0)
    stream, kept = io.StringIO(), []
    screen = Screen(kept.append, stream)
    screen.show("one")
    screen.show("too soon")
    screen.say("stays")
    screen.say("too")
    assert stream.getvalue() == "\r\x1b[2Kone\r\x1b[2K" and kept == ["stays", "too"]


def test_only_a_terminal_gets_a_live_line(tmp_path, capfd):
    run_here(write_plan(tmp_path), 4, tmp_path / "run", steps=2)
    assert "\x1b" not in capfd.readouterr().err


def test_nccl_keeps_its_last_operations_unless_told_otherwise(tmp_path, monkeypatch):
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    cpu, gpu = (read_manifest(write_plan(tmp_path, d, hardware={"device": d})) for d in ("cpu", "cuda"))
    launch._flight_recorder(cpu)
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    launch._flight_recorder(gpu)
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000" and os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ  # of which torch warns
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE")
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    launch._flight_recorder(gpu)
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ


def test_what_the_flight_recorder_holds_is_written_where_torch_would(tmp_path, monkeypatch):
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert launch._recorder_file(3) == "/tmp/nccl_trace_rank_3"
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", f"{tmp_path}/nccl_")
    assert launch._recorder_file(3) == f"{tmp_path}/nccl_3"
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/fr_")
    path = Path(launch._recorder_file(3))
    c10d = "torch._C._distributed_c10d"
    monkeypatch.delattr(f"{c10d}._dump_fr_trace", raising=False)
    torchrun.write_flight_record(path)
    assert path == tmp_path / "fr_3" and not path.exists()
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):  # the second is called if torch has both
        monkeypatch.setattr(f"{c10d}.{name}", lambda name=name: name.encode(), raising=False)
        torchrun.write_flight_record(path)
        assert path.read_bytes() == name.encode()
    torchrun.write_flight_record(tmp_path / "not" / "there")
