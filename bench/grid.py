"""Do plans stay the same, byte for byte? Hashes of the plans of some 300 jobs, compared with those in bench/grid.json.

    python bench/grid.py            compare; exit 1 and name what differs
    python bench/grid.py --write    write bench/grid.json anew

Three hashes a job: of all files of the plan, of its ops alone, and of what it predicts.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.jobs import toml_text
from zbc.compiler.compile import compile_job, load_job
from zbc.compiler.schedules import SCHEDULES
from zbc.errors import ZbcError

RECORD = Path(__file__).parent / "grid.json"
GIVEN = {"f": 1.3, "b": 1.4, "w": 0.7, "comm": 0.1}
UNEVEN = {"f": [1.0, 1.2, 0.9, 1.5], "b": [1.1, 1.3, 1.0, 1.6], "w": [0.5, 0.6, 0.4, 0.8], "comm": 0.05}
OPTIMIZER = {"optimizer": 0.4, "reduce": 0.6}


def jobs() -> Iterator[tuple[str, dict[str, object], float | None]]:
    """(name, changes to the small job of the tests, budget in seconds; None for the usual search)."""
    names = [*SCHEDULES, "auto"]
    for name in names:
        for p, m in ((2, 3), (4, 8), (4, 9), (6, 14)):
            yield f"{name} {p}x{m}", {"kind": name, "pp": p, "m": m, "layers": 2 * p * 6, "costs": GIVEN}, 0.0
        yield f"{name} uneven", {"kind": name, "m": 10, "layers": 24, "costs": {**UNEVEN, "per": "rank"}}, 0.0
        yield f"{name} estimated", {"kind": name, "layers": 24}, 0.0
        yield f"{name} tight", {"kind": name, "layers": 24, "hardware": {"memory_gib": 0.0025}}, 0.0
        yield f"{name} recompute", {"kind": name, "layers": 24, "memory": {"activations": "auto"}}, 0.0
        sums = {"kind": name, "layers": 24, "parallel": {"dp": 2}, "costs": {**GIVEN, **OPTIMIZER}}
        yield f"{name} replicas", sums, 0.0
        yield f"{name} zero1", {**sums, "optimizer": {"zero1": True}}, 0.0
        ahead = {"optimizer": {"sync": "post-validate", "clip_grad_norm": 1.0}}
        yield f"{name} ahead", {**sums, **ahead}, 0.0
        tied = {"model": {"tie_embeddings": True}, "parallel": {"dp": 2}, "kind": name, "layers": 24}
        yield f"{name} tied", tied, 0.0
        both = {"optimizer": {"sync": "post-validate", "clip_grad_norm": 1.0, "zero1": True}}
        yield f"{name} tied ahead", {**tied, **both}, 0.0
    for name in ("zb-v", "zb-auto", "v-auto", "v-half", "v-min", "1f1b-v", "looped-zb", "auto"):
        yield f"{name} searched", {"kind": name, "layers": 16, "costs": {**UNEVEN, "per": "rank"}}, None
        yield f"{name} searched model", {"kind": name, "layers": 16}, None


def hashes(changes: dict[str, object], budget: float | None) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "zbc.toml"
        path.write_text(toml_text(**changes))
        try:
            compiled = compile_job(load_job(path), suggest=False, budget=budget)
        except ZbcError as error:
            return [sha(error.code)] * 3
    manifest, files = compiled.assemble()
    ops = [[str(op) for op in rank] for rank in compiled.program.ranks]
    everything = [manifest.dumps(), *(f"{name}\n{text}" for name, text in sorted(files.items()))]
    return [sha("\n".join(everything)), sha(json.dumps(ops)), sha(json.dumps(manifest.predicted))]


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> int:
    found = {name: hashes(changes, budget) for name, changes, budget in jobs()}
    if "--write" in sys.argv[1:]:
        RECORD.write_text("{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in found.items()) + "\n}\n")
        return 0
    known = json.loads(RECORD.read_text())
    wrong = 0
    for name in known | found:
        before, now = known.get(name), found.get(name)
        if before != now:
            wrong += 1
            parts = ("files", "ops", "predicted")
            differs = [part for part, a, b in zip(parts, before or (0,) * 3, now or (1,) * 3, strict=True) if a != b]
            print(f"{name}: {', '.join(differs)}")
    print(f"{len(found)} jobs, {wrong} differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
