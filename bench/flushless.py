"""What steps without a flush gain, and what they do to a training: four gloo ranks, and a toy.

    python bench/flushless.py            both; writes bench/results/DATE-flushless.txt
    python bench/flushless.py --quick    fewer steps, writes nothing
    python bench/flushless.py --curves   the training alone, and its picture for docs/exactness.md

Ops of the runs sleep, so ranks do not compete for cores. The training is of a GPT of some 400,000 weights on the
sources of Python, on ranks as threads: it shows what a delay does to one loss curve, and no more than that.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.freezing import QUICK, TRAINED, drawn, step_ms
from bench.record import Record
from tests.jobs import job
from tests.processes.plans import compiled
from tests.threads import run_threads
from zbc.compiler.compile import compile_job
from zbc.plan.directory import StoredPlan

MS = 40.0  # of each op
STEPS = 6 if QUICK else 10
CLOSE = 0.05  # of what is predicted
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "flushless-loss.svg"
SYNCS = ("before-step", "two-versions", "asynchronous")
TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {"lr": 2e-3},
    "two-versions": {"lr": 5e-4, "sync": "two-versions"},
    "asynchronous": {"lr": 5e-4, "sync": "asynchronous"},
    "asynchronous, lookahead": {"lr": 1e-3, "sync": "asynchronous", "lookahead": True},
}


def runs(record: Record) -> bool:
    """Whether the steps without a flush take what is predicted, within `CLOSE`."""
    record(f"four gloo processes, ops that sleep {MS:g} ms")
    record(f"{'schedule':<18}{'m':>3}  {'sync':<14}{'predicted ms':>13}{'measured ms':>13}{'off':>8}{'gain':>8}")
    model, close = {"family": "bench.sleeping:calibrated", "loss": "mse", "layers": 8}, True
    for schedule, m, v in (("1f1b", 4, 1), ("1f1b", 8, 1), ("interleaved-1f1b", 8, 2)):
        base, ms = 0.0, v * MS
        for sync in SYNCS:
            with tempfile.TemporaryDirectory() as name:
                made = compiled(
                    Path(name),
                    model={**model, "args": {"count": 8, "f": ms / 2, "b": ms / 2, "w": ms / 2}},
                    data={"kind": "bench.sleeping:Points"},
                    schedule={"kind": schedule, "microbatches": m, "microbatch_size": 1},
                    costs={"f": ms, "b": ms, "w": ms},
                    train={"steps": STEPS},
                    optimizer={"sync": sync},
                )
                made.write(Path(name) / "plan")
                took = step_ms(Path(name) / "plan", Path(name) / "run")
            meant, base = made.settled_ms, base or took
            off = took / meant - 1
            close &= sync == "before-step" or abs(off) <= CLOSE
            gain = "" if sync == "before-step" else f"{base / took:>7.2f}x"
            record(f"{schedule:<18}{m:>3}  {sync:<14}{meant:>13.1f}{took:>13.1f}{off:>+8.1%}{gain}")
    return close


def curves(record: Record) -> None:
    """Losses of the same training with and without a flush."""
    record(f"\na GPT of 8 blocks on four ranks, 1f1b, 8 microbatches of 2, {TRAINED} steps of AdamW; F = B = W")
    record(f"{'training':<24}{'lr':>8}{'step':>8}{'last losses':>13}{'against plain':>15}{'at the time of plain':>22}")
    found: list[tuple[str, float, list[float]]] = []
    for name, options in TRAININGS.items():
        made = compile_job(
            job(
                model={"hidden": 64, "seq_len": 64},
                costs={"f": 1.0, "b": 1.0, "w": 1.0},
                data={"kind": "text"},
                train={"steps": TRAINED},
                optimizer={"schedule": {"warmup_steps": 20}, **options},
            )
        )
        manifest, _ = made.assemble()
        workers = run_threads(StoredPlan(manifest, made.program), TRAINED)
        losses = [one.loss for one in workers[0].results]
        ms, last = made.settled_ms, statistics.mean(losses[-20:])
        found.append((name, ms, losses))
        _, plain_ms, plain = found[0]
        count = min(TRAINED, round(TRAINED * ms / plain_ms))  # of its steps, in the time of so many plain ones
        then = statistics.mean(plain[max(0, count - 20) : count])
        against = last / statistics.mean(plain[-20:]) - 1
        record(f"{name:<24}{options['lr']:>8g}{ms:>8.1f}{last:>13.4f}{against:>+15.2%}{then:>22.4f}")
    record("at the time of plain: the loss of the plain training after as long as this one takes, as predicted")
    if not QUICK:
        PICTURE.write_text(drawn(found), encoding="utf-8")


def main() -> None:
    record = Record("flushless-curves" if "--curves" in sys.argv else "flushless")
    close = True
    if "--curves" not in sys.argv:
        close = runs(record)
    curves(record)
    if record.keeps:
        record.write()
    if not close:
        sys.exit(f"a step without a flush is more than {CLOSE:.0%} off")


if __name__ == "__main__":
    main()
