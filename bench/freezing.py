"""What freezing gains: the linear program on published instances, steps of four gloo ranks, and a toy training.

    python bench/freezing.py            all three; writes bench/results/DATE-freezing.txt
    python bench/freezing.py --quick    fewer steps, writes nothing
    python bench/freezing.py --curves   the training alone, and its picture for docs/exactness.md

Ops of the runs sleep, so ranks do not compete for cores. The training is of a GPT of some 400,000 weights on the
sources of Python, on ranks as threads: it shows what freezing does to one loss curve, and no more than that.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.record import Record
from tests.jobs import job
from tests.lowered import lower
from tests.processes.plans import compiled, metrics
from tests.threads import run_threads
from zbc.compiler.compile import compile_job
from zbc.compiler.cost.cost import Costs
from zbc.compiler.passes.freeze import Freeze, alike, frozen
from zbc.compiler.passes.freeze_shares import frozen_shares
from zbc.compiler.schedules import Request, find
from zbc.compiler.sim.context import Context
from zbc.plan.directory import StoredPlan

QUICK = "--quick" in sys.argv
MS = 20.0  # of F, B and W of a rank
STEPS = 4 if QUICK else 6
LEFT_OUT = 2
TRAINED = 40 if QUICK else 200
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "freezing-loss.svg"
# schedule, ranks, microbatches, chunks, cap; ms and mean frozen share of the references, None where there is none
INSTANCES = [
    *(("1f1b", 4, 8, None, cap, ms, x) for cap, ms, x in ((0.3, 27.6, 0.2437), (0.5, 26.0, 0.375))),
    *(("1f1b", 4, 8, None, cap, ms, x) for cap, ms, x in ((0.8, 23.6, 0.675), (1.0, 22.0, 0.875))),
    *(("zb-h1", 4, 8, None, cap, ms, x) for cap, ms, x in ((0.3, 24.6, 0.3), (0.5, 23.0, 0.5), (0.8, 22.0, 0.625))),
    ("interleaved-1f1b", 4, 8, 2, 0.5, 23.0, 0.328),
    ("zb-v", 4, 8, None, 0.5, 21.5, 0.406),
    ("gpipe", 4, 8, None, 0.5, 26.0, 0.5),
    ("1f1b", 8, 94, None, 0.5, None, None),
    ("1f1b", 16, 128, None, 0.5, 350.0, None),
    ("1f1b", 16, 256, None, 0.5, 670.0, None),
]


def instances(record: Record) -> None:
    record("linear program, F = B = W = 1 per rank: the step, and the mean share of weight gradients left out")
    record(
        f"{'schedule':<18}{'p x m':>8}{'most':>6}{'plain':>8}{'alike':>8}{'step':>8}{'share':>8}{'known':>16}{'s':>7}"
    )
    for name, p, m, v, most, ms, share in INSTANCES:
        card = find(name)
        program = lower(card.make(Request(p=p, m=m, v=card.stages_per_rank(v))), "before-step")
        plain = Context(program, Costs.uniform(program.placement))
        began = time.perf_counter()
        step = frozen_shares(program, plain.graph, plain.costs, most).ms
        took = time.perf_counter() - began
        found = plain.then(Freeze(most).run(program, plain))
        shown = found.timeline.makespan if step is None else step
        known = "" if ms is None else f"{ms:g}" + ("" if share is None else f" ({share:g})")
        record(
            f"{name:<18}{f'{p} x {m}':>8}{most:>6g}{plain.timeline.makespan:>8.1f}{alike(plain, most):>8.1f}"
            f"{shown:>8.2f}{frozen(found.program):>8.3f}{known:>16}{took:>7.2f}"
        )


def step_ms(plan: Path, out: Path) -> float:
    command = [sys.executable, "-m", "zbc", "run", str(plan), "--local", "4", "--out", str(out)]
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return statistics.median(row["step_ms"] for row in list(metrics(out))[LEFT_OUT:])


def runs(record: Record) -> None:
    record(f"\nfour gloo processes, 8 microbatches, two layers a rank that sleep {MS:g} ms per op and rank")
    record(
        f"{'schedule':<10}{'most':>6}{'predicted ms':>14}{'measured ms':>13}{'predicted gain':>16}{'measured gain':>15}"
    )
    model = {"family": "bench.sleeping:layers", "loss": "mse", "layers": 8}
    layers = {"count": 8, "f": MS / 2, "b": MS / 2, "w": MS / 2}
    for schedule in ("1f1b", "zb-h1"):
        base: tuple[float, float] | None = None
        for most in (0.0, 0.5, 0.8):
            with tempfile.TemporaryDirectory() as name:
                made = compiled(
                    Path(name),
                    model={**model, "args": layers},
                    data={"kind": "bench.sleeping:Points"},
                    schedule={"kind": schedule, "microbatches": 8, "microbatch_size": 1},
                    costs={"f": MS, "b": MS, "w": MS},
                    train={"steps": STEPS},
                    freeze={"most": most},
                )
                made.write(Path(name) / "plan")
                took = step_ms(Path(name) / "plan", Path(name) / "run")
            meant = made.report.makespan_ms
            base = base or (meant, took)
            gains = f"{meant / base[0] - 1:>+16.1%}{took / base[1] - 1:>+15.1%}" if most else ""
            record(f"{schedule:<10}{most:>6g}{meant:>14.1f}{took:>13.1f}{gains}")


def curves(record: Record) -> None:
    """Losses of the same training with more and more frozen."""
    record(f"\na GPT of 8 blocks on four ranks, 1f1b, 8 microbatches of 2, {TRAINED} steps of AdamW; F = B = W")
    record(f"{'most':>6}{'frozen':>9}{'step':>8}{'last losses':>13}{'at the time of plain':>22}")
    found: list[tuple[str, float, list[float]]] = []
    for most in (0.0, 0.3, 0.5, 0.8):
        made = compile_job(
            job(
                model={"hidden": 64, "seq_len": 64},
                costs={"f": 1.0, "b": 1.0, "w": 1.0},
                data={"kind": "text"},
                train={"steps": TRAINED},
                optimizer={"lr": 2e-3, "schedule": {"warmup_steps": 20}},
                freeze={"most": most},
            )
        )
        manifest, _ = made.assemble()
        workers = run_threads(StoredPlan(manifest, made.program), TRAINED)
        losses = [one.loss for one in workers[0].results]
        ms = made.report.makespan_ms
        found.append((f"most = {most:g}" if most else "all trained", ms, losses))
        share = 0.0 if made.report.freezing is None else made.report.freezing.frozen
        count = min(TRAINED, round(TRAINED * ms / found[0][1]))  # of its steps, in the time of so many plain ones
        plain = statistics.mean(found[0][2][max(0, count - 20) : count])
        record(f"{most:>6g}{share:>9.1%}{ms:>8.1f}{statistics.mean(losses[-20:]):>13.4f}{plain:>22.4f}")
    record("at the time of plain: the loss of the plain training after as long as the frozen one takes, as predicted")
    if not QUICK:
        PICTURE.write_text(drawn(found), encoding="utf-8")


COLOURS = ("#28588f", "#4f9d83", "#e3a04f", "#b04a5a")


def drawn(found: list[tuple[str, float, list[float]]]) -> str:
    """Loss over steps, and over predicted time, side by side; each point is the mean of the steps around it."""
    smooth = [[statistics.mean(y[max(0, i - 10) : i + 10]) for i in range(len(y))] for _, _, y in found]
    low, high = min(map(min, smooth)), max(y[5] for y in smooth)
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 300" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="860" height="300" fill="#ffffff"/>')
    longest = found[0][1] * len(found[0][2])
    for panel, (title, unit) in enumerate((("steps", len(found[0][2])), ("predicted time, ms", longest))):
        left = 50 + 430 * panel
        parts.append(f'<path d="M{left} 20V260H{left + 360}" fill="none" stroke="#888888"/>')
        parts.append(f'<text x="{left + 180}" y="290" text-anchor="middle">{title}</text>')
        parts += [
            f'<text x="{left + 360 * k / 4:g}" y="275" text-anchor="middle">{unit * k / 4:g}</text>' for k in range(5)
        ]
        for k in range(4):
            value = low + (high - low) * k / 3
            parts.append(f'<text x="{left - 5}" y="{260 - 80 * k + 4}" text-anchor="end">{value:.1f}</text>')
        for colour, (name, ms, _), line in zip(COLOURS, found, smooth, strict=True):
            each = ms if panel else 1.0
            at = [(left + 360 * i * each / unit, 260 - 240 * (y - low) / (high - low)) for i, y in enumerate(line)]
            points = " ".join(f"{x:.1f},{max(y, 15):.1f}" for x, y in at[::2])
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            if not panel:
                k = COLOURS.index(colour)
                parts.append(f'<text x="{left + 250}" y="{40 + 16 * k}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    record = Record("freezing-curves" if "--curves" in sys.argv else "freezing")
    if "--curves" not in sys.argv:
        instances(record)
        runs(record)
    curves(record)
    if record.keeps:
        record.write()


if __name__ == "__main__":
    main()
