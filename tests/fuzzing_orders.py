"""Random jobs and damaged orders: those that zbc accepts run to their end on a machine independent of the proofs."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from tests.check import operational
from zbc.compiler.schedules import SCHEDULES
from zbc.ir import Program

_COPIES = 8  # more of a pipeline are not run


class UnsoundError(Exception):
    """zbc accepted a program that does not run."""


def runs(program: Program, seed: int = 0) -> None:
    """Raises UnsoundError unless the program runs to its end."""
    if program.dp <= _COPIES:
        outcome = operational.run(program, seed=seed)
        if not outcome.ok:
            raise UnsoundError(f"{outcome.state}: {outcome.reason}")


# ---- jobs ----------------------------------------------------------------------------------------------------

_TIMES = (0.0, 0.0, 0.0, 1e-14, 1e-10, 0.33, 1.0, 1.0, 4.5, 1e9)
_AMOUNTS = (0.0, 1e-12, 0.4, 1.0, 1.0, 2.0, 1e18)


def any_job(rng: random.Random) -> tuple[dict[str, Any], float | None]:
    """The tables of a job, for tests.jobs.toml_text, and the seconds its search may take.

    Often with a single microbatch, a single layer per stage, ops without length.
    """
    name = rng.choice([*SCHEDULES, "auto"])
    known = SCHEDULES.get(name)
    p = rng.choice((1, 2, 2, 3, 4, 6))
    chunks = rng.choice((None, None, 1, 2, 3)) if known and known.default_chunks > 1 else None
    stages = p * (chunks or (known.default_chunks if known else 2))
    layers = max(1, stages + rng.choice((-2, 0, 0, 0, 1, 5)))
    schedule: dict[str, Any] = {"kind": name, "microbatches": rng.choice((1, 1, 2, 3, 4, 5, 8)), "microbatch_size": 1}
    if chunks:
        schedule["chunks"] = chunks
    if rng.random() < 0.4:
        schedule["memory_limit"] = rng.choice(("0.3x", "0.5x", "1.0x", "1.0x", "2.0x", "0 GiB", "0.001 GiB", "40 GiB"))
    if rng.random() < 0.3:
        schedule["objective"] = rng.choice(("makespan", "span", "period"))
    changes: dict[str, Any] = {
        "layers": layers,
        "schedule": schedule,
        "parallel": {"pp": p, "dp": rng.choice((1, 1, 1, 2))},
        "optimizer": {"sync": rng.choice(("before-step", "post-validate")), "zero1": rng.random() < 0.2},
    }
    if rng.random() < 0.8:
        changes["costs"] = _costs(rng, {"rank": p, "stage": stages, "layer": layers})
    if rng.random() < 0.2:
        changes["memory"] = {"activations": rng.choice(("recompute", "auto"))}
    if rng.random() < 0.2:
        changes["hardware"] = {"memory_gib": rng.choice((1e-9, 1e-3, 1e-2, 1.0))}
    if rng.random() < 0.25:
        _share_out(rng, changes)
    if rng.random() < 0.2:
        changes["model"] = {"ties": True}
    return changes, rng.choice((None, 0.02, 0.02, 0.02, 0.3))


def _share_out(rng: random.Random, changes: dict[str, Any]) -> None:
    changes["parallel"] |= {
        "dp": rng.choice((1, 2, 2, 3)),
        "shard": rng.choice(("gradients", "weights", "weights", "all")),
    }
    changes["optimizer"]["zero1"] = False
    if rng.random() < 0.5:
        changes.setdefault("memory", {})["resident"] = rng.choice((1, 1, 2, 3, "auto"))
    if rng.random() < 0.5:
        changes["parallel"]["exchange"] = "one-sided"
        changes.setdefault("hardware", {})["ranks_per_node"] = rng.choice((1, 2, 4, 8))


def _costs(rng: random.Random, counts: dict[str, int]) -> dict[str, Any]:
    per = rng.choice(list(counts))

    def numbers(among: tuple[float, ...]) -> float | list[float]:
        usual = rng.choice(among)
        return usual if rng.random() < 0.5 else [rng.choice((usual, rng.choice(among))) for _ in range(counts[per])]

    found = {"per": per, **{key: numbers(_TIMES) for key in ("f", "b", "w")}}
    found |= {key: numbers(_AMOUNTS) for key in ("act_b", "act_w") if rng.random() < 0.2}
    found |= {key: rng.choice(_TIMES) for key in ("comm", "reduce", "optimizer") if rng.random() < 0.4}
    return found


# ---- orders --------------------------------------------------------------------------------------------------


def moved(rng: random.Random, items: list[str], others: list[str]) -> list[str]:
    """Lines or cells with some reordered, one repeated, one dropped, or one with another number."""
    items, at = list(items), rng.randrange(len(items))
    how = rng.randrange(6)
    if how == 0:
        items.insert(rng.randrange(len(items)), items.pop(at))
    elif how == 1:
        to = min(len(items) - 1, at + 1)
        items[at], items[to] = items[to], items[at]
    elif how == 2:
        del items[at]
    elif how == 3:
        items.insert(rng.randrange(len(items) + 1), items[at])
    elif how == 4:
        items[at] = rng.choice(others)
    else:
        digits = [i for i, letter in enumerate(items[at]) if letter.isdigit()]
        if digits:
            i = rng.choice(digits)
            items[at] = items[at][:i] + rng.choice(["0", "1", "7", "-1", "9" * 5000, "²", "1_0"]) + items[at][i + 1 :]
    return items


def move_ops(rng: random.Random, folder: Path) -> None:
    """Damages the ops of a rank in a plan directory."""
    path = rng.choice(sorted(folder.glob("rank-*.json")))
    data = json.loads(path.read_text())
    others = [line for file in sorted(folder.glob("rank-*.json")) for line in json.loads(file.read_text())["ops"]]
    data["ops"] = moved(rng, data["ops"], others)
    path.write_text(json.dumps(data))


def sign(folder: Path) -> None:
    """Corrects the hashes of a plan directory, if its manifest can still be read."""
    path = folder / "plan.json"
    try:
        data = json.loads(path.read_bytes())
        files = {name: _sha((folder / name).read_bytes()) for name in data["files"] if (folder / name).is_file()}
        data["files"] |= files
        data.pop("sha256", None)
        path.write_text(json.dumps({**data, "sha256": _sha(json.dumps(data, sort_keys=True).encode())}))
    except (ValueError, KeyError, TypeError, OSError):
        return


def _sha(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
