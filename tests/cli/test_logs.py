"""Logs of Megatron-LM and torchtitan: their steps, ranks and settings, compared with a plan of the same job."""

import json

import pytest

from tests.refusals import refused
from zbc.compiler.recorded import beside
from zbc.interop import logs
from zbc.text import GIB, MIB

TITAN = """\
{rank}Building 2-D device mesh with ['pp', 'dp_replicate', 'dp_shard'], [4, 1, 2]
{rank}Peak FLOPS used for computing MFU: 9.890e+14
{rank}Trainer is initialized with local batch size 8, global batch size 16, sequence length 16, total steps 9
"""
MEGATRON = """\
  pipeline_model_parallel_size ................................. 4
  tensor_model_parallel_size ................................... 1
  data_parallel_size ........................................... 1
  seq_length ................................................... 16
  world_size ................................................... 4
  lr ........................................................... 0.0001
"""


def titan(step, second, rank=0, loss="4.0123", memory=1.5, tps="1,000", colour=False):
    head, tail = ("\x1b[31m", "\x1b[39m") if colour else ("", "")
    when = f"2026-01-01 10:00:{int(second):02d},{round(1000 * (second % 1)):03d}"
    numbers = f"grad_norm:  0.5  memory: {memory:.2f}GiB(2.00%)  tps: {tps}  tflops: 1,300.50  mfu: 30.50%"
    return f"[rank{rank}]:{head}[titan] {when} - root - INFO - step: {step:2d}  loss: {loss}  {numbers}{tail}\n"


def megatron(step, ms, batch=8):
    return (
        f"3:  [2026-01-01 10:00:0{step}] iteration {step:8d}/      90 | consumed samples: {step * batch:12d} | elapsed "
        f"time per iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): 200.5 | learning rate: 1.000E-04 | "
        f"global batch size: {batch:5d} | lm loss: 4.000000E+00 | loss scale: 1.0 | grad norm: 1.000 |\n"
    )


def memory(rank, most):
    return f"[Rank {rank}] (after 1 iterations) memory (MB) | allocated: 3.0 | max allocated: {most} | reserved: 9.0\n"


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "train.log"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("colour", [False, True])
def test_steps_of_torchtitan_take_what_lies_between_their_lines(written, colour):
    lines = [titan(s, 10 + 1.5 * k, rank, "-1.0" if rank == 0 else "4.5", 1 + rank, colour=colour)
             for k, s in enumerate((1, 10, 20)) for rank in (0, 7)]  # fmt: skip
    log = logs.read(written(TITAN.format(rank="[rank0]:") + "".join(lines)))
    assert log.tool == "torchtitan" and [step.number for step in log.counted] == [10, 20]
    assert [step.ms for step in log.counted] == pytest.approx([1500 / 9, 150])
    assert {step.loss for step in log.counted} == {4.5}  # the rank that has the loss
    assert (log.steps[20].tokens_per_s_per_rank, log.steps[20].tflops, log.steps[20].mfu) == (1000, 1300.5, 0.305)
    assert log.settings == {"pp": 4, "dp": 2, "ranks": 8, "sequences": 16, "seq_len": 16, "peak_tflops": 989}
    assert log.by_pp(4, 8) == {0: GIB, 3: 8 * GIB}


def test_a_log_of_torchtitan_without_times_has_those_of_its_tokens(written):
    line = "step: {}  loss: 4.0  memory: 1.00GiB(1.00%)  wps: 2,000  mfu: 10.00%\n"
    text = TITAN.format(rank="") + "".join(map(line.format, (1, 2)))
    found = beside.quantities(logs.read(written(text)), None)
    assert found["step"].measured == pytest.approx(1e3 * 16 * 16 / (2000 * 8))
    assert found["tokens_per_s"].measured == 16_000 and found["tool_mfu"].measured == 0.1


def test_steps_of_megatron_take_what_it_says_and_tokens_follow(written):
    text = MEGATRON + "".join(memory(rank, 100.0 + rank) for rank in range(4)) + memory(2, 50.0)
    log = logs.read(written(text + megatron(1, 900) + megatron(2, 100) + megatron(3, 110) + megatron(4, 120)))
    assert log.tool == "Megatron-LM"
    assert log.settings == {"pp": 4, "tp": 1, "dp": 1, "seq_len": 16, "ranks": 4, "sequences": 8}
    found = beside.quantities(log, None)
    assert (found["step"].measured, found["step"].low, found["step"].high) == (110, 105, 115)
    assert found["tokens_per_s"].measured == pytest.approx(1e3 * 8 * 16 / 110)
    assert found["tool_tflops"].measured == 200.5 and "mfu" not in found
    assert log.by_pp(4, 4) == {rank: (100 + rank) * MIB for rank in range(4)}


@pytest.mark.parametrize("text", ["", "step 1: loss 3\n", "iteration 3/ 9 | lm loss: 3 |\n"])
def test_a_file_without_steps_is_no_log(written, text):
    with refused("E430", "no line of Megatron-LM or torchtitan"):
        logs.read(written(text))


def test_a_log_stands_beside_the_plan_of_its_job(zbc, job, written):
    """MFU differs only by the time of a step; other differences of the plan are named."""
    planned = job(m=4, costs={"f": 1.0, "b": 1.0, "w": 1.0}, hardware={"gpu": "l40s", "device": "cpu"})
    (meant,) = zbc("compare", planned, "--schedule", "1f1b", "--json").json()["schedules"]
    step = meant["barrier_ms"]
    log = written(MEGATRON + memory(0, 1.0) + megatron(1, 900) + megatron(2, 2 * step))
    ran = zbc("report", str(log), "--plan", planned, "--json").json()
    assert ran["step"]["predicted"] == pytest.approx(step) and ran["step"]["measured"] == pytest.approx(
        2 * step, abs=0.1
    )
    assert ran["mfu"]["measured"] == pytest.approx(meant["mfu"] / 2, rel=0.1 / step)
    assert ran["memory"] == [{"rank": 0, "predicted": meant["per_rank"][0]["peak_bytes"], "measured": MIB}]
    assert ran["differs"] == {}
    assert "differs" not in zbc("report", str(log), "--plan", planned).out
    other = written(
        MEGATRON.replace("size ................................... 1", "size ................. 2") + megatron(1, 9)
    )
    ran = zbc("report", str(other), "--plan", planned)
    assert "differs    the log is of another job than the plan:" in ran.out and "tp 2, not 1" in ran.out


def test_a_plan_directory_does_as_well_as_its_job(zbc, job, written):
    zbc("plan", job(m=4), "-o", "plan", "-q")
    log = written(MEGATRON + megatron(1, 900) + megatron(2, 100))
    one, other = (zbc("report", str(log), "--plan", which, "--json").out for which in ("plan", "zbc.toml"))
    assert json.loads(one) == json.loads(other)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((".", "--plan", "zbc.toml"), "a run knows its plan"),
    ],
)
def test_options_of_logs_and_runs_are_not_mixed(zbc, job, arguments, text):
    job()
    ran = zbc("report", *arguments)
    assert ran.code == 2 and text in " ".join(ran.err.split())
