"""Time and memory of `zbc plan`, interpreter start included, and its step insert-comm compared with torch's.

    python bench/compile.py

`zbc plan` covers everything: schedule, passes, proof, prediction, files. The last two columns compare one step of it,
insert-comm, with its counterpart in torch.distributed.pipelining, `_add_send_recv`, on the same compute order.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import Record

JOB = """zbc = 1
[model]
family = "gpt"
layers = {layers}
hidden = 1024
heads = 16
vocab = 50257
seq_len = 1024
[parallel]
pp = {p}
[schedule]
kind = "{kind}"
microbatches = {m}
[costs]
f = 18.522
b = 18.086
w = 9.337
comm = 0.601
"""

CASES = [(8, 64, "zb-v", 5), (32, 128, "interleaved-1f1b", 3), (64, 512, "interleaved-1f1b", 2), (64, 512, "zb-v", 2)]

LOWERING = """
import sys, time
from torch.distributed.pipelining.schedules import _Action, _ComputationType as T, _add_send_recv
from zbc.compiler.sim.context import Context
from zbc.compiler.passes.insert_comm import InsertComm
from zbc.compiler.schedules import SCHEDULES, Request
p, m, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
program = SCHEDULES[kind].make(Request(p, m, 2))
name = {"F": T.FORWARD, "B": T.BACKWARD_INPUT, "W": T.BACKWARD_WEIGHT, "BW": T.FULL_BACKWARD}
actions = {r: [_Action(o.stage, name[o.kind.value], o.mb) for o in ops] for r, ops in enumerate(program.ranks)}
began = time.perf_counter()
InsertComm().run(program, Context.of(program))
between = time.perf_counter()
_add_send_recv(actions, program.placement.rank_of, program.placement.stages)
print(between - began, time.perf_counter() - between)
"""


def measured(command: list[str]) -> tuple[float, float, str]:
    """Seconds, peak MiB and output of a command; ends the benchmark if it fails."""
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - began
        output.seek(0)
        text = output.read()
    if status:
        sys.exit(f"{' '.join(command)} failed:\n{text}")
    return seconds, usage.ru_maxrss / 1024, text


def main() -> None:
    record = Record("compile")
    zbc = [sys.executable, "-m", "zbc"]
    help_seconds = statistics.median(measured([*zbc, "--help"])[0] for _ in range(5))
    record(f"zbc --help: {help_seconds:.2f} s (median of 5)")
    record("  p    m schedule           zbc plan s  peak MiB  insert-comm s  torch's s")
    with tempfile.TemporaryDirectory() as folder:
        for p, m, kind, times in CASES:
            job = Path(folder) / f"{kind}-{p}-{m}.toml"
            job.write_text(JOB.format(layers=2 * p, p=p, m=m, kind=kind))
            runs = [measured([*zbc, "plan", str(job), "-o", f"{folder}/plan"]) for _ in range(times)]
            seconds, peak = statistics.median(r[0] for r in runs), max(r[1] for r in runs)
            text = measured([sys.executable, "-c", LOWERING, str(p), str(m), kind])[2]
            ours, theirs = map(float, text.splitlines()[-1].split())
            record(f"{p:3} {m:4} {kind:18} {seconds:10.2f} {peak:9.0f} {ours:14.2f} {theirs:10.2f}")
    record()
    record("the job:")
    record(JOB.format(layers="2*p", p="p", m="m", kind="schedule").rstrip())
    record.write()


if __name__ == "__main__":
    main()
