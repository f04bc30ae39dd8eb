"""Experiments 7 to 14 of bench/gpu.py: times, memory and waits of a GPU."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from experiments.job import Bench, Case

from zbc.text import GIB, MIB
from zbc.training.profiling.link import HostCopies

MEMORY = {"activations": "activation_bytes", "buffers": "buffer_bytes"}  # of a run, of a plan's ranks


def layers(bench: Bench) -> None:
    """F, B, W and BW of one rank by size and type, and B + W over BW: the cost of splitting."""
    sizes = (1024, 2048, 4096, 8192) if bench.cuda else (32, 64)
    bench.say(f"{'hidden':>6} {'how':24} {'F':>9} {'B':>9} {'W':>9} {'BW':>9} {'B+W / BW':>9}")
    ways: list[tuple[str, dict[str, Any], bool]] = [
        ("float32", {}, False),
        ("float32, TF32", {}, True),
        ("bfloat16", {"dtype": "bfloat16"}, False),
        ("bfloat16, recompute", {"dtype": "bfloat16", "activations": "recompute"}, False),
    ]
    rows = [(hidden, *way) for hidden in sizes for way in ways if hidden <= 4096 or way[0] == "bfloat16"]
    if bench.cuda:  # last, since it may fail by itself
        rows.append((2048, "bfloat16, compiled", {"dtype": "bfloat16", "compile": "true"}, False))
    for hidden, name, options, tf32 in rows:
        if tf32 and not bench.cuda:
            continue
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        heads = max(2, hidden // 128)
        small = {"hidden": hidden, "layers": 1, "vocab": 1024, "m": 4, "size": 2, "heads": heads, **options}
        whole = bench.case(pp=1, kind="1f1b", **small).timed()
        parts = bench.case(pp=1, kind="1f1b", apart=True, **small).timed()
        ratio = (parts["B"] + parts["W"]) / whole["BW"]
        shown = " ".join(f"{ms:9.3f}" for ms in (parts["F"], parts["B"], parts["W"], whole["BW"], ratio))
        bench.say(f"{hidden:6} {name:24} {shown}")
    torch.set_float32_matmul_precision("highest")


def memory(bench: Bench) -> None:
    """Bytes by category, and the allocator's peak, compared with the plan; then the same in just that much memory."""
    for options in ({}, {"dtype": "bfloat16"}, {"activations": "recompute"}):
        case = bench.case(pp=1, kind="1f1b", **options)
        rank = case.compiled.report.per_rank[0]
        held = case.held()
        for name, key in MEMORY.items():
            meant = getattr(rank, key)
            bench.say(f"{options or 'keep'} {name}: {held[name] / MIB:.1f} MiB, planned {meant / MIB:.1f}")
        meant = rank.activation_bytes
        off = abs(held["activations"] - meant) / meant
        bench.wants(off < 0.01, f"activations are {100 * off:.1f}% off what the plan says")
        if bench.cuda:
            _allocated(bench, case, rank.peak_bytes)


def _allocated(bench: Bench, case: Case, planned: int) -> None:
    total = torch.cuda.get_device_properties(bench.device).total_memory
    gc.collect()  # the workers that were weighed
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    case.run(3)
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    used = total - torch.cuda.mem_get_info()[0]
    bench.say(f"allocated {peak / GIB:.3f} GiB, planned {planned / GIB:.3f}; reserved by torch {reserved / GIB:.3f}")
    bench.say(f"in use of the device {used / GIB:.3f}: beside torch's own {(used - reserved) / GIB:.3f}")
    bench.wants(peak < 1.01 * planned + 96 * MIB, f"{peak / GIB:.3f} GiB allocated, {planned / GIB:.3f} planned")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (1.03 * planned + 256 * MIB) / total))
    try:
        case.run(3)
        bench.say("trains in 3% more than planned and 256 MiB")
    except RuntimeError as error:
        bench.wants(False, f"does not train in 3% more than planned and 256 MiB: {str(error).splitlines()[0]}")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def host(bench: Bench) -> None:
    """Host time of an op without waits, with kernels so short that the device is never late."""
    tiny = {"hidden": 64, "heads": 2, "vocab": 64, "seq_len": 16, "size": 1, "m": 8}
    for pp in (1, 4):
        case = bench.case(pp=pp, kind="zb-h1", **tiny)
        told = case.timed(6, waits=False)
        note = "" if bench.cuda else " (a CPU computes meanwhile)"
        shown = ", ".join(f"{kind} {1e3 * ms:.0f}" for kind, ms in sorted(told.items()))
        bench.say(f"pp = {pp}, us of the host{note}: {shown}")


def copies(bench: Bench) -> None:
    """Bandwidth of copies to the host, alone, both ways at once and during products; then a rank that offloads while it
    computes: its step compared with one that keeps activations, and the hidden share of its copies."""
    gbps = 20.0
    if bench.cuda:
        found = HostCopies(bench.device).measure()
        for name, value in found.model_dump().items():
            bench.say(f"{name:22} {value:8.2f}")
        gbps = min(found.gbps)
    else:
        bench.say("speeds need a GPU")
    options = {"pp": 1, "kind": "gpipe", "m": 6, "layers": 4}
    if bench.cuda:
        options |= {"hidden": 4096, "heads": 32, "seq_len": 2048, "size": 1, "dtype": "bfloat16", "vocab": 1024}
    else:  # tensors that are large enough to move
        options |= {"hidden": 128, "heads": 4, "seq_len": 128, "size": 2, "vocab": 256}
    kept = bench.case(**options)
    limits = {"schedule": 'memory_limit = "3x"', "hardware": f"host_gbps = {gbps}"}
    moved = bench.case(**options, activations="offload", **limits)
    report = moved.compiled.report.copied
    bench.say(
        f"a copy takes {report.k:.2f} of F + B + W; {report.moved:.0%} moves, {report.hidden:.0%} hidden as planned"
    )
    times = [case.step_ms() for case in (kept, moved)]
    hidden = 1 - max(0.0, times[1] - times[0]) / report.copying_ms
    bench.say(f"step {times[0]:.2f} ms kept, {times[1]:.2f} moved: {hidden:.0%} of {report.copying_ms:.2f} ms hidden")
    if bench.cuda and report.k <= 0.5:
        bench.wants(hidden >= 0.9, "less than 90% of the copies are hidden")


def profiled(bench: Bench) -> None:
    """A step of pp = 1 as planned with a profile of this device, and as measured."""
    large = {"dtype": "bfloat16", "hidden": 4096, "heads": 32, "layers": 4, "seq_len": 2048, "size": 2}
    off = [_profiled(bench, options) for options in ({}, large if bench.cuda else {"dtype": "bfloat16"})]
    if bench.cuda:
        bench.wants(max(abs(one - 1) for one in off) < 0.03, "a step is not within 3% of its plan")


def _profiled(bench: Bench, options: dict[str, Any]) -> float:
    case = bench.case(pp=1, kind="1f1b", **options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "zbc.toml").write_text(case.job)
        where = ["--device", bench.device.type]
        quick = [] if bench.cuda else ["--rounds", "3"]
        _zbc(bench, folder, "profile", "zbc.toml", "-o", "profile.json", *where, *quick)
        _zbc(bench, folder, "plan", "zbc.toml", "--profile", "profile.json", "-o", "plan", "-q")
        planned = json.loads((folder / "plan" / "plan.json").read_text())["predicted"]
        steps = "12" if bench.cuda else "6"
        traced = ["--trace", "4-5"]
        _zbc(bench, folder, "run", "plan", "--local", "1", "--steps", steps, "-o", "run", *where, *traced)
        rows = _rows(folder / "run")
        for line in _zbc(bench, folder, "report", "run").splitlines()[:40]:
            bench.say(f"  {line}")
    took = statistics.median(row["step_ms"] for row in rows[len(rows) // 3 :])
    meant = planned["barrier_ms"]
    bench.say(f"step {took:.2f} ms, planned {meant:.2f} with the optimizer, ratio {took / meant:.3f}")
    return took / float(meant)


def optimizers(bench: Bench) -> None:
    """The ops that end a step, by the number of parameters."""
    sizes = {"0.1 B": (1024, 8), "1 B": (2048, 20)} if bench.cuda else {"0.1 M": (32, 8)}
    for name, (hidden, count) in sizes.items():
        for sync in ("before-step", "post-validate"):
            options = {"hidden": hidden, "layers": count, "size": 1, "m": 2, "dtype": "bfloat16"}
            case = bench.case(pp=1, kind="zb-h1", optimizer=f'sync = "{sync}"', **options)
            times = case.timed()
            ends = {kind: ms for kind, ms in times.items() if kind not in ("F", "B", "W", "BW", "OVERLAP")}
            bench.say(f"{name} {sync:14} " + ", ".join(f"{kind} {ms:.3f} ms" for kind, ms in sorted(ends.items())))


def driver(bench: Bench) -> None:
    """With a stream that is busy for two seconds: which calls of the host wait for it?"""
    if not bench.cuda:
        bench.say("needs a GPU: there is no driver to ask")
        return
    x = torch.randn(64, 64, device=bench.device).abs()
    _ = x + x  # loads that kernel
    torch.empty(1 << 20, device=bench.device)  # a block for empty_cache to return
    tries: dict[str, Callable[[], object]] = {
        "a kernel that runs already": lambda: x + x,
        "the first launch of a kernel": lambda: torch.special.zeta(x + 1.5, x + 2.0),
        "an allocation that needs a new block": lambda: torch.empty(3 << 28, device=bench.device),
        "torch.cuda.empty_cache()": torch.cuda.empty_cache,
        "a pinned allocation": lambda: torch.empty(7 << 20, pin_memory=True),
        "a tensor made of a Python number": lambda: torch.tensor(1.5).to(bench.device),
    }
    other = torch.cuda.Stream(bench.device)
    cycles = int(2e3 * torch.cuda.get_device_properties(bench.device).clock_rate) if _has_rate(bench) else 3_600_000_000
    for name, call in tries.items():
        bench.wait()
        with torch.cuda.stream(other):
            torch.cuda._sleep(cycles)
        began = time.perf_counter()
        call()
        took = time.perf_counter() - began
        bench.wait()
        whole = time.perf_counter() - began
        waits = "waits for the whole device" if took > 0.5 * whole else "does not wait"
        bench.say(f"{name}: {1e6 * took:.0f} us while a stream sleeps for {whole:.2f} s: {waits}")


def _has_rate(bench: Bench) -> bool:
    return hasattr(torch.cuda.get_device_properties(bench.device), "clock_rate")


def processes(bench: Bench) -> None:
    """Four processes that share the device: their peaks, one that is killed, one that is stopped, and resuming."""
    sizes: dict[str, Any] = {"train": f"steps = 8\nwatchdog_s = {10.0 if bench.cuda else 3.0}", "every": 2}
    case = bench.case(small=True, pp=4, kind="zb-h1", **sizes)
    where = ["--local", "4", "--device", bench.device.type]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "zbc.toml").write_text(case.job)
        _zbc(bench, folder, "plan", "zbc.toml", "-o", "plan", "-q")
        _zbc(bench, folder, "run", "plan", *where, "-o", "whole", "--trace", "3-4")
        rows = _rows(folder / "whole")
        peaks = [f"{peak / MIB:.0f}" for peak in rows[-1]["peak_bytes"]]
        meant = [f"{rank.peak_bytes / MIB:.0f}" for rank in case.compiled.report.per_rank]
        bench.say(f"peaks of the ranks {' '.join(peaks)} MiB, planned {' '.join(meant)}")
        for line in _zbc(bench, folder, "report", "whole").splitlines()[:14]:
            bench.say(f"  {line}")
        for how, code in ((signal.SIGKILL, "E702"), (signal.SIGSTOP, "E701")):
            out = f"run-{how.name}"
            said = _hurt(folder, where, out, how)
            first = next((line for line in said.splitlines() if line.startswith("error")), said[-200:])
            bench.say(f"{how.name} to rank 2: {first}")
            bench.wants(code in first and "rank 2" in said, f"{how.name}: expected {code} and rank 2 by name")
        _zbc(bench, folder, "run", "plan", *where, "-o", out, "--resume", "auto", "--steps", "8")
        same = {row["step"]: row["loss"] for row in _rows(folder / out)} == {row["step"]: row["loss"] for row in rows}
        bench.say(f"resumed after that: losses {'equal to the bit' if same else 'differ'}")
        bench.wants(same, "a resumed run has other losses than one that went on")


def _hurt(folder: Path, where: list[str], out: str, how: signal.Signals) -> str:
    """Starts an endless run and sends rank 2 a signal after a checkpoint; returns the output of the run."""
    command = [sys.executable, "-m", "zbc", "run", "plan", *where, "-o", out, "--steps", "1000000"]
    with subprocess.Popen(
        command, cwd=folder, env=_env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        said = ""
        for line in run.stdout:
            said += line
            if re.match(r"wrote .*step-", line):
                pids = json.loads((folder / out / "run.json").read_text())["processes"]
                os.kill(int(pids[2].rpartition(":")[2]), how)
                break
        said += run.stdout.read()
    return said


def _rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _env() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]), "COLUMNS": "100"}


def _zbc(bench: Bench, folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "zbc", *arguments], cwd=folder, env=_env(), capture_output=True, text=True, check=False
    )
    bench.wants(done.returncode == 0, f"zbc {' '.join(arguments)}: {done.stderr.strip() or done.stdout[-300:]}")
    return done.stdout
