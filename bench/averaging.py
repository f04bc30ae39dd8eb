"""Replicas that average weights beside replicas that sum gradients: `python bench/averaging.py [--quick]`.

The training is of a GPT of some 400,000 weights on the sources of Python, two replicas of two ranks as threads: it
shows what averaging does to one loss curve, and no more than that. Its picture is that of docs/exactness.md. The share
of bytes is that of what goes between replicas if they sum all gradients.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.freezing import QUICK, TRAINED, drawn
from bench.record import Record
from tests.jobs import job
from tests.threads import run_threads
from zbc.compiler.compile import compile_job
from zbc.plan.directory import StoredPlan

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "averaging-loss.svg"
CLOSE = 0.05
TRAININGS: dict[str, dict[str, Any] | None] = {
    "gradients summed": None,
    "all, at once": {"share": 1.0, "delay": 0},
    "a quarter, a step later": {"share": 0.25},
    "a twentieth, a step later": {"share": 0.05},
}


def main() -> int:
    record = Record("averaging")
    record(
        f"a GPT of 8 blocks, 2 replicas of 2 ranks, 1f1b, 4 microbatches of 2 each, {TRAINED} steps of AdamW at 0.002"
    )
    record(f"{'training':<32}{'share of bytes':>15}{'last losses':>13}{'against summed':>16}")
    found: list[tuple[str, float, list[float]]] = []
    wide = 0
    for name, asked in TRAININGS.items():
        made = compile_job(
            job(
                m=4,
                model={"hidden": 64, "seq_len": 64},
                parallel={"pp": 2, "dp": 2, **({} if asked is None else {"average": asked})},
                costs={"f": 1.0, "b": 1.0, "w": 1.0},
                data={"kind": "text"},
                train={"steps": TRAINED},
                optimizer={"schedule": {"warmup_steps": 20}, "lr": 2e-3},
            )
        )
        manifest, _ = made.assemble()
        workers = run_threads(StoredPlan(manifest, made.program), TRAINED)
        losses = [one.loss for one in workers[0].results]
        found.append((name, made.settled_ms, losses))
        last, plain = statistics.mean(losses[-20:]), statistics.mean(found[0][2][-20:])
        share = 1.0 if asked is None else asked["share"] / asked.get("every", 1)
        record(f"{name:<32}{share:>15.1%}{last:>13.4f}{last / plain - 1:>+16.2%}")
        wide += last / plain - 1 > CLOSE
    if not QUICK:
        PICTURE.write_text(drawn(found), encoding="utf-8")
        record.write()
    return int(wide > 0)


if __name__ == "__main__":
    sys.exit(main())
