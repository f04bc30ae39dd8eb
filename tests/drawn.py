"""Jobs with several randomly drawn features, the reference training of each, and the comparison of both."""

from __future__ import annotations

import random
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from tests.check import operational
from tests.composed import CHANGES, SETTINGS, STEPS, TOLERANCE, Tables, apart, settings, written
from tests.jobs import tiny_tensors_move
from tests.threads import numbers, run_threads
from zbc.compiler.compiled import Compiled
from zbc.compiler.memory.host import host_bytes
from zbc.compiler.schedules import SCHEDULES
from zbc.errors import ZbcError
from zbc.ir import COPY, Kind, Program
from zbc.plan.directory import StoredPlan
from zbc.runtime.core.state import Worker
from zbc.runtime.transports.hub import Hub
from zbc.training.checkpoint import folder as disk
from zbc.training.evaluate import EvaluationRun
from zbc.training.models import compiled
from zbc.training.models.experts import Experts
from zbc.training.recording.measure import Scale

EXPERTS = {"family": "llama", "experts": 4, "top_k": 2, "ffn_hidden": 32}
LIMITED = {"expert_groups": [2, 1]}
NODES = {"ranks_per_node": 2, "link_gbps": 8.0, "link_us": 0.0, "inter_node_gbps": 0.01}
GRAPH = {"a": [1], "b": [2], "c": [1, "a", "b"]}
COUNTS = {"a": 1, "b": 2, "c": 1}
USERS: dict[str, dict[str, dict[str, Any]]] = {
    "dropout": {
        "model": {"family": "tests.runtime.sliced_models:mixers", "loss": "mse", "vocab": None, "heads": None},
        "data": {"kind": "tests.runtime.sliced_models:Sequences", "args": {"width": 32, "count": 64, "length": 32}},
    },
    "graph": {
        "model": {"family": "tests.runtime.graph_models:layers", "loss": "mse", "graph": GRAPH},
        "data": {"kind": "tests.runtime.graph_models:Vectors", "args": {"of": ["a", "b"]}},
    },
    "zoo": {
        "model": {"family": "tests.runtime.zoo:inline", "loss": "mse"},
        "data": {"kind": "tests.runtime.user_models:Vectors"},
    },
}
USERS["dropout"]["model"] |= {"args": {"width": 32, "count": 8, "dropout": 0.2}, "hidden": None}
USERS["graph"]["model"] |= {"args": {"counts": COUNTS}}
for vectors in (USERS["graph"], USERS["zoo"]):
    vectors["model"] |= dict.fromkeys(("hidden", "heads", "vocab", "seq_len"))
# In addition to `SETTINGS`: the settings of a feature, and whether it changes the training.
MORE: dict[str, tuple[dict[str, dict[str, Any]], bool]] = {
    **{name: (tables, True) for name, tables in USERS.items()},
    "experts": ({"model": EXPERTS}, True),
    "ep": ({"model": EXPERTS, "parallel": {"ep": 2, "dp": 2}}, True),
    "folded over nodes": ({"model": EXPERTS, "parallel": {"ep": 4, "dp": 2, "tp": 2}, "hardware": NODES}, True),
    "node limit": ({"model": EXPERTS | LIMITED, "parallel": {"ep": 4, "dp": 2, "tp": 2}, "hardware": NODES}, True),
    "copies of experts": ({"model": EXPERTS, "parallel": {"ep": 2, "tp": 4, "dp": 1}}, True),
    "limited": ({"model": {**EXPERTS, **LIMITED}}, True),
    "expert bias": ({"model": {**EXPERTS, "balance_rate": 0.01, "router": "sigmoid"}}, True),
    "balance loss": ({"model": {**EXPERTS, "balance_loss": 0.01, "router_z_loss": 0.01}}, True),
    "fewer keys": ({"model": {"kv_heads": 2}}, True),
    "llama": ({"model": {"family": "llama"}}, True),
    "windows": ({"model": {"family": "llama", "window": 9}}, True),
    "recompute": ({"memory": {"activations": "recompute"}}, False),
    "some layers": ({"memory": {"activations": "recompute 1"}}, False),
    "selective": ({"memory": {"activations": "selective"}}, False),
    "recompute+offload": ({"memory": {"activations": "recompute+offload"}, "hardware": {"host_gbps": 20.0}}, False),
    "selective+offload": ({"memory": {"activations": "selective+offload"}, "hardware": {"host_gbps": 20.0}}, False),
    "open activations": ({"memory": {"activations": "auto"}, "schedule": {"memory_limit": "0.8x"}}, False),
    "little room": ({"schedule": {"memory_limit": "0.6x"}}, False),
    "dp": ({"parallel": {"dp": 2}}, False),
    "zero1": ({"parallel": {"dp": 2, "shard": "optimizer"}}, False),
    "resident 1": ({"parallel": {"dp": 2, "shard": "weights"}, "memory": {"resident": 1}}, False),
    "regather": ({"parallel": {"tp": 2, "tp_sequence": "regather"}}, False),
    "two sums": ({"parallel": {"vocabulary": "shared-2"}}, False),
    "open vocabulary": ({"parallel": {"vocabulary": "auto"}}, False),
    "four slices": ({"schedule": {"slices": 4}}, False),
    "open slices": ({"schedule": {"slices": "auto"}}, False),
    "even cuts": ({"schedule": {"slices": 2, "cuts": "even"}}, False),
    "muon": ({"optimizer": {"kind": "muon"}}, True),
    "momentum": ({"optimizer": {"kind": "sgd", "momentum": 0.9}}, True),
    "groups by name": ({"optimizer": {"groups": [{"names": ["*norm*"], "weight_decay": 0.0}]}}, True),
    "moving average": ({"optimizer": {"ema": 0.9}, "train": {"eval_every": 1}}, False),
    "evaluation": ({"train": {"eval_every": 2}}, False),
    "resume": ({"checkpoint": {"every": 2}}, False),
    "clip": ({"optimizer": {"clip_grad_norm": 0.1}}, True),
    "warmup": ({"optimizer": {"schedule": {"kind": "cosine", "warmup_steps": 1}}}, True),
    "feedback": ({"optimizer": {"sync": "two-versions", "feedback": 0.5}}, True),
    "lookahead": ({"optimizer": {"sync": "asynchronous", "every": 2, "lookahead": True}}, True),
    "slow ranks": ({"hardware": {"slow": [1.0, 1.5]}}, False),
    "memory by rank": ({"hardware": {"memory_gib": [1.0, 2.0]}}, False),
    "early": ({"schedule": {"early": 1, "kind": "interleaved-1f1b"}}, False),
    "two chunks": ({"schedule": {"chunks": 2, "kind": "looped-zb"}}, False),
    "three pieces": ({"schedule": {"kind": "breadth-first", "chunks": 2}}, False),
    "balance": ({"data": {"balance": "length"}}, True),
    "tokens": ({"schedule": {"tokens": [64, 24], "renumber": False}}, True),
    "dealt by tokens": ({"data": {"balance": "tokens"}, "schedule": {"tokens": [64, 24], "renumber": False}}, True),
    "freeze later": ({"freeze": {"most": [0.5, STEPS]}}, False),
    "adapter": ({"adapter": {"rank": 4}}, True),
    "world": ({"parallel": {"world": 4, "pp": None}, "schedule": {"batch": 16, "microbatches": None}}, False),
}
KINDS = tuple(SCHEDULES)
ALONE = ("model", "adapter", "optimizer", "train", "data", "checkpoint")  # tables that one rank has as well
LEFT_OUT = ("freeze", "zoo")  # another training each time, see "freeze later"; four layers only
FIRST = {"bfloat16 weights": 0.01, "autocast": 0.01}  # what rounds more in a step
# And what a step does with that: Adam takes signs of what is near 0, a token chooses another of two experts alike.
LATER = {"bfloat16 weights": 0.5, "autocast": 0.5, "muon": 0.015}
SIGNS = 1e-3  # of losses and norms, of Adam's steps by gradients that are rounded otherwise


class Drawn(NamedTuple):
    traits: tuple[str, ...]
    kind: str
    both: Tables
    plain: Tables
    first: float  # how far off losses and norms may be in the first step, and in those behind it
    later: float

    @property
    def name(self) -> str:
        return f"{self.kind}: {', '.join(self.traits)}"


class Found(NamedTuple):
    """What came of one: "right", "wrong", "refused" or "crashed", and how far predictions are off."""

    how: str
    why: str
    memory: float | None = None  # predicted over measured bytes of the fullest rank, less 1
    host: float | None = None  # the same of what lies on the host
    step: float | None = None  # an emulated step over its prediction, less 1


def drawn(seed: int, *, least: int = 3, most: int = 6) -> Drawn:
    """`least` to `most` features with a schedule, on two or four ranks of a pipeline; the table may refuse them."""
    rng = random.Random(seed)
    known = [trait for trait in dict.fromkeys((*SETTINGS, *MORE)) if trait not in LEFT_OUT]
    rng.shuffle(known)
    kind, pp, count = rng.choice(KINDS), rng.choice((2, 2, 2, 4)), rng.randint(least, most)
    traits, said = list[str](), dict[str, Any]()
    for trait in known:
        values = dict(_values(trait))
        if len(traits) < count and all(said.get(key, value) == value for key, value in values.items()):
            traits.append(trait)
            said |= values
    return of(tuple(traits), kind, pp)


def of(traits: tuple[str, ...], kind: str, pp: int = 2) -> Drawn:
    """A job with these features, and the reference: one rank with only those that change a training.

    A feature may be any key with its value, as `model.router="sigmoid"`.
    """
    pp = 4 if {"replicas", "graph"} & {*traits} else pp
    changes = [trait for trait in traits if trait in CHANGES or (trait in MORE and MORE[trait][1])]
    changes += [trait for trait in traits if "=" in trait and trait.partition(".")[0] in ALONE]
    late = bool({"asynchronous", "lookahead"} & {*traits})
    again = {"recompute", "some layers", "selective", "open activations"}
    changes += [trait for trait in traits if late and trait in again]
    both, plain = (_tables(some, pp) for some in (traits, changes))
    if both["schedule"]["kind"] == "1f1b":
        both["schedule"]["kind"] = kind
    replicas = both["parallel"].get("dp", 1)
    plain["schedule"]["kind"], plain["parallel"] = "1f1b", {"pp": 1}
    if "average" in traits:
        plain["parallel"] |= {"dp": 2, "average": both["parallel"]["average"]}
    if "balance" in traits and {"balance loss", "expert bias"} & {*traits}:  # routers count the padding of rows
        plain["parallel"] |= {"dp": replicas}
    if "graph" in traits:
        plain["parallel"]["pp"] = 4
    if late:  # a delay for each stage, and what runs again for a backward does so on newer weights
        plain["schedule"]["kind"], plain["parallel"]["pp"] = both["schedule"]["kind"], both["parallel"].get("pp", pp)
        both["partition"] = plain["partition"] = {"layers_per_stage": "equal"}
    plain |= {table: both[table] for table in ("train", "data", "checkpoint") if table in both}
    plain["optimizer"] |= {key: value for key, value in both["optimizer"].items() if key == "ema"}
    if {"dropout", "balance loss"} & {*traits}:  # slices draw, or even loads, for themselves
        if "slices" in both["schedule"]:
            both["schedule"] |= {"cuts": "even", "slices": 2}
        plain["schedule"] |= {key: both["schedule"][key] for key in ("slices", "cuts") if key in both["schedule"]}
    whole = plain["parallel"].get("dp", 1)
    if "world" not in traits:
        both["schedule"]["microbatches"] = 8 // replicas
    plain["schedule"]["microbatches"] = 8 // whole
    for tables in (both, plain) if {"tokens", "dealt by tokens"} & {*traits} else ():
        tables["schedule"]["tokens"] = [64, 24] * (tables["schedule"].get("microbatches", 2) // 2)
    if "ramp" in traits:
        for tables, count in ((both, 4 // replicas), (plain, 4 // whole)):
            tables["schedule"]["ramp"] = [{"microbatches": count, "steps": 1}]
    first, later = (max([3 * TOLERANCE, *(each[one] for one in traits if one in each)]) for each in (FIRST, LATER))
    if "experts" in both["model"]:
        later = max(later, 1e-3)
    return Drawn(traits, both["schedule"]["kind"], both, plain, first, later)


def named(text: str) -> Drawn:
    """The job of a line, as `zb-v: tp, model.ties=true`; `zb-v 4: tp` has four ranks in its pipeline."""
    order, _, traits = text.partition(": ")
    kind, _, ranks = order.partition(" ")
    return of(tuple(traits.split(", ")), kind, int(ranks or 2))


def _values(trait: str) -> Iterator[tuple[str, Any]]:
    if "=" in trait:
        key, _, text = trait.partition("=")
        yield key, tomllib.loads(f"value = {text}")["value"]
    yield from SETTINGS.get(trait, ())
    for table, values in MORE.get(trait, ({}, False))[0].items():
        yield from ((f"{table}.{key}", value) for key, value in values.items())


def _tables(traits: Any, pp: int) -> Tables:
    found = settings(*(trait for trait in traits if trait in SETTINGS))
    found["parallel"]["pp"], found["model"]["layers"] = pp, 2 * pp
    found["model"] |= {"hidden": 64, "seq_len": 64}
    if "bfloat16 weights" in traits:
        found["model"]["dtype"] = "bfloat16"
    if "average" in traits:
        found["parallel"]["average"] = {"every": 1, "share": 1.0}  # shares of it follow the stages
    for trait in traits:
        for table, values in MORE[trait][0].items() if trait in MORE else ():
            found.setdefault(table, {}).update(values)
    args = found["model"].get("args", {})
    if "count" in args:
        found["model"]["args"] = {**args, "count": found["model"]["layers"]}
        found["model"]["seq_len"] = 32
    if "counts" in args:
        found["model"]["layers"] = sum(args["counts"].values())
    if "slow" in found.get("hardware", {}):
        found["hardware"]["slow"] = [1.0, 1.5] * (pp // 2)
    if "memory_gib" in found.get("hardware", {}):
        found["hardware"]["memory_gib"] = [1.0, 2.0] * (pp // 2)
    if "eval_every" in found["train"]:
        found["train"]["eval_batches"] = 2
        found["data"] |= {"validation": 0.25} if found["data"]["kind"] == "synthetic" else {"validation": 0.5}
    for key, value in (pair for trait in traits if "=" in trait for pair in _values(trait)):
        table, _, name = key.partition(".")
        found.setdefault(table, {})[name] = value
    return {name: {key: value for key, value in table.items() if value is not None} for name, table in found.items()}


Emulation = Callable[[Compiled, StoredPlan], float | None]  # a step over its prediction, less 1


def outcome(one: Drawn, *, weigh: bool = False, emulate: Emulation | None = None) -> Found:
    """Plan, prove and train both; `weigh` what ranks hold, in up to three runs; `emulate` a step if both are alike.

    Adam takes the sign of what is near 0, and so makes much of rounding: what is right in the first step, and by
    `SIGNS` in the others, is trained by SGD as well, which decides.
    """
    found = _outcome(one, weigh=weigh, emulate=emulate)
    if found.how != "begins right":
        return found
    if "kind" in one.both["optimizer"]:
        return found._replace(how="wrong")
    simple = {"kind": "sgd", "lr": 0.1}
    both, plain = ({**tables, "optimizer": tables["optimizer"] | simple} for tables in (one.both, one.plain))
    again = outcome(one._replace(both=both, plain=plain))
    return found._replace(how=again.how, why=f"{found.why}; by SGD {again.why}")


def _outcome(one: Drawn, *, weigh: bool, emulate: Emulation | None) -> Found:
    """The outcome by the optimizer that was drawn; "begins right" if SGD is to decide."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            made, plan = written(one.both, Path(folder) / "both")
        except ZbcError as error:
            return Found("refused", f"{error.code} {error.message}")
        stuck = unproven(made.program)
        if stuck:
            return Found("wrong", f"the machine: {stuck}")
        scales = dict[int, Scale]()
        changes = made.job.schedule.ramp or made.job.data.balance != "none" or made.program.cyclic  # from step to step
        weigh = weigh and made.costs.bytes is not None and not changes
        setup = (lambda worker: scales.update({worker.rank: Scale(worker)})) if weigh else None
        kept = [Path(folder) / name if "resume" in one.traits else None for name in ("saved", "saved alone")]
        try:
            workers = _run(plan, setup, folder=kept[0])
        except ZbcError as error:
            if not error.code.startswith("E1"):  # known once layers of the user's are built
                raise
            return Found("refused", f"{error.code} {error.message}")
        found = numbers(workers)
        plain = one.plain
        if made.job.optimizer.sync == "asynchronous":  # where its delays follow from what was chosen
            plain = plain | {"parallel": {"pp": made.job.parallel.pp}}
            plain["schedule"] = plain["schedule"] | {"kind": made.schedule}
        _, alone = written(plain, Path(folder) / "plain")
        expected = _run(alone, None, folder=kept[1])
        off, first = apart(found, numbers(expected)), apart(found[:1], numbers(expected)[:1])
        if "eval_every" in one.both["train"] and "eval_every" in one.plain["train"]:
            off = max(off, apart(*(_evaluated(each) for each in (workers, expected))))
        for other, whole, saved in ((alone, expected, kept[0]), (plan, workers, kept[1])):
            if saved is not None:
                resumed = _run(other, None, resume=disk.folder_of(saved, STEPS - 1))
                off = max(off, apart(numbers(resumed), numbers(whole)[-1:]))
        memory = host = None
        for attempt in range(3 if weigh else 0):
            if attempt or "experts" in one.both["model"]:
                _run(plan, setup, evenly=True)
            now, there = _held(plan, made, scales)
            memory = now if memory is None or abs(now) < abs(memory) else memory
            host = there if host is None or abs(there) < abs(host) else host
            if abs(memory) < 0.02 and abs(host) < 0.02:
                break
        how = "right" if first <= one.first and off <= one.later else "wrong"
        how = "begins right" if how == "wrong" and first <= one.first and off < SIGNS else how
        step = emulate(made, plan) if emulate is not None and how == "right" else None
        return Found(how, f"off by {first:.1e}, then {off:.1e}", memory, host, step)


def unproven(program: Program) -> str:
    """Why a plan does not run to its end on the machine of the tests, which knows no copies to the host."""
    kinds = {op.kind for ops in program.ranks for op in ops}
    if program.cyclic or any(op.stage < -2 for ops in program.ranks for op in ops):
        return ""
    rest = tuple(tuple(op for op in ops if op.kind not in COPY) for ops in program.ranks)
    ended = operational.run(replace(program, ranks=rest), redo=Kind.REDO in kinds)
    return "" if ended.ok else f"{ended.state}: {ended.reason}"


def _evaluated(workers: list[Worker]) -> list[tuple[float, float]]:
    run = workers[0].evaluation
    assert isinstance(run, EvaluationRun)
    return [(result.loss, result.samples) for result in run.results]


def _run(plan: StoredPlan, setup: Any, *, evenly: bool = False, **how: Path | None) -> list[Worker]:
    """`evenly`: as plans take it, each expert is met equally often."""
    topology = plan.manifest.topology
    hub = Hub(topology.world, inside=topology.inside, prompt=setup is not None)
    chosen = in_turn if evenly else Experts._chosen
    with (
        tiny_tensors_move(),
        mock.patch.object(Experts, "_chosen", chosen),
        mock.patch.object(compiled, "BACKEND", {"backend": "aot_eager"}),
    ):
        return run_threads(plan, STEPS, setup=setup, hub=hub, **how)  # type: ignore[arg-type]


def in_turn(experts: Experts, likely: Tensor) -> Tensor:
    """Choices in place of a router's: each expert is met equally often."""
    return torch.arange(likely.shape[0] * experts.top_k).view(-1, experts.top_k) % experts.count


def _held(plan: StoredPlan, made: Compiled, scales: dict[int, Scale]) -> tuple[float, float]:
    """How far predictions of the fullest rank are off, of its memory and of what is on its host.

    One that is ahead of its replicas holds what it sums with them for longer: of these the nearest counts.
    """
    of = plan.manifest.topology.of
    found = [0.0] * len(made.memory)
    for pp, scale in ((of(rank).pp, scale) for rank, scale in scales.items()):
        told = made.memory[pp].bytes
        found[pp] = min(found[pp], scale.held.peak, key=lambda size, told=told: abs(size - told))
    host = max(scale.held.host for scale in scales.values())
    slabs = max(host_bytes(made.program, rank, made.costs) for rank in range(len(made.program.ranks)))
    return max(rank.bytes for rank in made.memory) / max(found) - 1, slabs / host - 1 if host else 0.0
