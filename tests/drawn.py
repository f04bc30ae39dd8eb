"""Jobs with several randomly drawn features, and the reference training of each."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from tests.composed import CHANGES, SETTINGS, TOLERANCE, Tables, apart, settings, trained
from zbc.errors import ZbcError

EXPERTS = {"family": "llama", "experts": 4, "top_k": 2, "expert_hidden": 16}
# In addition to `SETTINGS`: the settings of a feature, and whether it changes the training.
MORE: dict[str, tuple[dict[str, dict[str, Any]], bool]] = {
    "experts": ({"model": EXPERTS}, True),
    "ep": ({"model": EXPERTS, "parallel": {"ep": 2, "dp": 2}}, True),
    "fewer keys": ({"model": {"kv_heads": 2}}, True),
    "recompute": ({"memory": {"activations": "recompute"}}, False),
    "selective": ({"memory": {"activations": "selective"}}, False),
    "muon": ({"optimizer": {"kind": "muon"}}, True),
    "groups by name": ({"optimizer": {"groups": [{"names": ["*norm*"], "weight_decay": 0.0}]}}, True),
    "moving average": ({"optimizer": {"ema": 0.9}}, False),
    "clip": ({"optimizer": {"clip_grad_norm": 0.1}}, True),
    "slow ranks": ({"hardware": {"slow": [1.0, 1.5]}}, False),
    "early": ({"schedule": {"early": 1, "kind": "interleaved-1f1b"}}, False),
}
KINDS = (
    "1f1b",
    "zb-h1",
    "interleaved-1f1b",
    "zb-v",
    "gis",
    "looped-zb",
    "v-half",
    "gpipe",
    "braid-v",
    "hanayo",
    "chimera",
)
KINDS += ("dualpipe", "dualpipe-v", "bitpipe", "zb-auto", "v-auto")
LEFT_OUT = ("compile", "replicas", "average", "asynchronous", "open kind", "freeze", "group")  # slow, or of other sizes
LEFT_OUT += ("capped logits",)  # changes a training; see test_together.py
NEAR = {"bfloat16 weights": 0.05, "autocast": 0.05, "muon": 5e-3}  # features that round more


class Drawn(NamedTuple):
    traits: tuple[str, ...]
    kind: str
    both: Tables
    plain: Tables
    near: float

    @property
    def name(self) -> str:
        return f"{self.kind}: {', '.join(self.traits)}"


def drawn(seed: int) -> Drawn:
    """Two to five features with a schedule, on two ranks of a pipeline; the table of exclusions may refuse them."""
    rng = random.Random(seed)
    known = [trait for trait in (*SETTINGS, *MORE) if trait not in LEFT_OUT]
    sampled, kind = rng.sample(list(dict.fromkeys(known)), rng.randint(2, 5)), rng.choice(KINDS)
    traits = tuple(t for i, t in enumerate(sampled) if not any(_keys(t) & _keys(other) for other in sampled[:i]))
    changes = [trait for trait in traits if trait in CHANGES or (trait in MORE and MORE[trait][1])]
    both, plain = (_tables(some) for some in (traits, changes))
    if both["schedule"]["kind"] == "1f1b":
        both["schedule"]["kind"] = kind
    plain["schedule"]["kind"] = "1f1b"
    plain["parallel"] = {"pp": 2}
    replicas = both["parallel"].get("dp", 1)
    both["schedule"]["microbatches"], plain["schedule"]["microbatches"] = 8 // replicas, 8
    if "ramp" in traits:
        for tables, count in ((both, 4 // replicas), (plain, 4)):
            tables["schedule"]["ramp"] = [{"microbatches": count, "steps": 1}]
    near = max((NEAR.get(trait, TOLERANCE) for trait in traits), default=TOLERANCE)
    return Drawn(traits, kind, both, plain, 3 * near)


def _keys(trait: str) -> set[str]:
    """The keys of sync, activations and schedule that a feature sets; a job has one each, the first drawn counts."""
    said = {key for key, _ in SETTINGS.get(trait, ())}
    said |= {f"{table}.{key}" for table, values in MORE.get(trait, ({}, False))[0].items() for key in values}
    return said & {"optimizer.sync", "memory.activations", "schedule.kind"}


def _tables(traits: Any) -> Tables:
    found = settings(*(trait for trait in traits if trait not in MORE))
    found["parallel"]["pp"], found["model"]["layers"] = 2, 4
    if "bfloat16 weights" in traits:
        found["model"]["dtype"] = "bfloat16"
    for trait in traits:
        for table, values in MORE[trait][0].items() if trait in MORE else ():
            found.setdefault(table, {}).update(values)
    return found


def outcome(one: Drawn) -> tuple[str, str]:
    """("right" | "wrong" | "refused", the difference or the reason)."""
    try:
        found = trained(one.both)
    except ZbcError as error:
        return "refused", f"{error.code} {error.message}"
    off = apart(found, trained(one.plain))
    return "right" if off <= one.near else "wrong", f"off by {off:.1e}"
