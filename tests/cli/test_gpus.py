"""`hardware.gpu`: a GPU by name provides the settings that a job leaves open."""

import pytest

from tests.jobs import job, write_job
from zbc.compiler.compile import compile_job
from zbc.compiler.shapes import load_job
from zbc.job import gpu


def test_a_gpu_by_name_fills_what_is_open():
    """The numbers of NVIDIA's data sheets; plans use 70% and 85% of them."""
    found = job(hardware={"gpu": "h100-sxm"})
    hardware = found.hardware
    assert hardware.device == "cuda" and hardware.memory_gib == 80 and gpu.peak_tflops(hardware.gpu) == 989
    assert hardware.tflops == pytest.approx(0.7 * 989, abs=0.1) and hardware.memory_gbps == 0.85 * 3350
    assert hardware.link_gbps == 0.85 * 900 / 2 * 8, "NVLink has 900 GB/s both ways together"
    assert hardware.inter_node_gbps == 0.85 * 400
    assert found.where("hardware", "tflops") == found.where("hardware", "gpu"), "what it comes from"


def test_a_table_of_gpus_gives_what_a_job_does_not_say(tmp_path, folder):
    over = write_job(tmp_path, hardware={"gpu": "a100", "memory_gib": 70})
    found = load_job(over).hardware
    assert (found.device, found.memory_gib, found.tflops) == ("cuda", 70, round(0.7 * 312, 1))
    found = load_job(over, ["hardware.gpu=H100_PCIe", "hardware.link_gbps=5"]).hardware
    assert (found.memory_gib, found.tflops, found.link_gbps) == (80, round(0.7 * 756, 1), 5)
    compile_job(load_job(write_job(folder, hardware={"gpu": "l40s"})), budget=0.0).write(folder / "p")
    assert load_job(folder / "p").hardware == load_job(folder / "zbc.toml").hardware
    assert load_job(folder / "p", ["hardware.gpu=h200"]).hardware.memory_gib == 141


def test_mfu_is_a_share_of_the_peak_of_every_gpu():
    peaks = {gpu.peak_tflops(name) for name in gpu.GPUS}
    assert peaks == {989, 756, 2250, 312, 1307, 362, 165}
    assert {*gpu.SHORT.values()} <= gpu.GPUS.keys() and len(gpu.GPUS) == 9


def test_a_measured_link_counts_before_a_data_sheet(zbc, folder):
    """The link of a profile overrides that of a GPU by name; a link in the job overrides both."""
    hardware = job(hardware={"gpu": "h100"}).hardware
    assert gpu.measured(hardware).link_gbps is None
    written = job(hardware={"gpu": "h100", "link_gbps": 7.0}).hardware
    assert gpu.measured(written).link_gbps == 7.0


@pytest.mark.long
def test_a_forgotten_device_is_said(zbc, folder):
    write_job(folder, hardware={"tflops": 400.0})
    words = "hardware.tflops = 400 is no CPU's: estimated with a CPU's memory bandwidth"
    assert words in zbc("plan", "zbc.toml", "-o", "p", "--budget", "0").out
    assert words in zbc("compare", "zbc.toml", "--schedule", "1f1b", "--budget", "0").out
    for more in ({"device": "cuda"}, {"gpu": "h100"}, {"tflops": 2.0}, {"device": "cpu"}):
        assert gpu.forgotten(job(hardware={"tflops": 400.0} | more).hardware) is None


def test_explain_lists_gpus_with_their_sources(zbc):
    said = zbc("explain", "gpu")
    assert "h100-sxm: NVLink 4; NVIDIA H100" in said.out and max(map(len, said.out.split("\n"))) <= 80
    rows = {row["name"]: row for row in zbc("explain", "gpu", "--json").json()["gpus"]}
    assert rows["mi300x"]["memory_gib"] == 192 and rows["mi300x"]["planned"]["hardware.tflops"] == round(0.7 * 1307, 1)
