"""A random job run in random ways equals the job run by one rank: losses, norms, evaluations, final state.

Random are the model (random_models.py), the optimizer with clipping and gradients that are not finite, a ramp, the
schedule and its ranks, copies, their sharding and exchange, the barrier, the partition, recompute, delays of the
transport, and a resume in another way.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.runtime import random_models
from tests.runtime.small_plans import make_plan, make_program, ramped
from tests.threads import run_threads
from zbc.compiler.schedules import SCHEDULES
from zbc.errors import ZbcError
from zbc.plan.directory import StoredPlan
from zbc.runtime.core.optimizer import Held
from zbc.runtime.core.state import Worker
from zbc.runtime.features.shards.gathers import Gathers
from zbc.runtime.transports.hub import Hub
from zbc.training.checkpoint.folder import folder_of

HERE = "tests.runtime.random_models"
TOLERANCE = 1e-9  # of the largest number of a tensor, in double precision
RANKS = 8  # at most, over all copies


@dataclass(frozen=True)
class Job:
    """The training. `microbatches` are over all copies; those of the ramp have their steps."""

    layers: list[str]
    data: dict[str, Any]
    train: dict[str, Any]
    optimizer: dict[str, Any]
    microbatches: int
    ramp: list[tuple[int, int]]
    steps: int


@dataclass(frozen=True)
class Way:
    """The way to run it; by default on one rank without features."""

    schedule: str = "gpipe"
    p: int = 1
    v: int = 1
    copies: int = 1
    sync: str = "before-step"
    shard: str = "none"
    resident: int = 0
    one_sided: bool = False
    cuts: tuple[int, ...] | None = None
    recompute: tuple[int, ...] = ()
    prompt: bool = False


@dataclass
class Ran:
    """The result, or the reason of a refusal."""

    steps: list[tuple[float, ...]] = field(default_factory=list)  # step, loss, norm, skipped
    evaluations: dict[int, float] = field(default_factory=dict)
    left: dict[str, Tensor] = field(default_factory=dict)
    refused: ZbcError | None = None


def random_job(rng: random.Random) -> Job:
    kind = rng.choice(["adamw", "adam", "sgd"])
    optimizer = {"kind": kind, "lr": rng.choice([1e-3, 1e-2]), "eps": 1e-3, "weight_decay": rng.choice([0.0, 0.1])}
    if kind == "sgd":
        optimizer["momentum"] = rng.choice([0.0, 0.9])
    if rng.random() < 0.5:
        optimizer["clip_grad_norm"] = rng.choice([0.1, 1.0, 100.0])
    if rng.random() < 0.4:
        by, warmup = rng.choice(["steps", "samples"]), rng.randint(0, 2)
        optimizer["schedule"] = {"kind": rng.choice(["linear", "cosine"]), "warmup_steps": warmup, "by": by}
    spoiled = {name: [rng.randrange(64) for _ in range(rng.choice([0, 0, 2]))] for name in ("nan", "large")}
    copies, each = rng.choice([1, 2, 2, 3]), rng.randint(1, 7)
    ramp = [(copies * rng.randint(1, each - 1), rng.randint(1, 2))] if each > 1 and rng.random() < 0.3 else []
    evaluates = {"eval_every": rng.randint(1, 3), "eval_batches": 1} if rng.random() < 0.3 else {}
    layers = random_models.chain(rng, rng.randint(1, 9))
    data, train = {"kind": f"{HERE}:Vectors", "args": spoiled, "validation": 0.0}, {"skip_limit": 1000, **evaluates}
    return Job(layers, data, train, optimizer, copies * each, ramp, rng.randint(2, 5))


def random_way(rng: random.Random, job: Job) -> Way:
    while True:
        name = rng.choice(sorted(SCHEDULES))
        schedule, p = SCHEDULES[name], rng.randint(1, 6)
        v = rng.choice([1, 2, 3]) if schedule.chunks[1] is None else schedule.default_chunks
        if p % schedule.ranks_in or not schedule.allows(v) or p > RANKS:
            continue
        counts = [job.microbatches, *(count for count, _ in job.ramp)]
        fit = [copies for copies in (1, 2, 3) if not any(count % copies for count in counts) and p * copies <= RANKS]
        copies, sync = rng.choice(fit), rng.choice(["before-step", "post-validate"])
        placement = schedule.placement(p, v)
        two, stages = len(placement.pipes) > 1, placement.stages
        shard = rng.choice(["none", *_shards(copies, sync, two=two)])
        frees = shard in ("weights", "all")
        resident = rng.randint(1, len(placement.stages_of(0))) if frees else 0
        one_sided = frees and not two and rng.random() < 0.5
        cuts = (0, *sorted(rng.choices(range(len(job.layers) + 1), k=stages - 1)), len(job.layers))
        recompute = tuple(s for s in range(stages) if rng.random() < 0.4)
        return Way(name, p, v, copies, sync, shard, resident, one_sided, cuts, recompute, rng.random() < 0.5)


def _shards(copies: int, sync: str, *, two: bool) -> list[str]:
    """Possible sharding of copies; `two`: with two pipes."""
    if copies == 1 or sync == "post-validate":
        return ["optimizer"]
    return ["optimizer", "weights", "weights", *([] if two else ["gradients", "all", "all"])]


def plan_of(job: Job, way: Way, **options: Any) -> StoredPlan:
    def one(microbatches: int) -> StoredPlan:
        v = way.v if SCHEDULES[way.schedule].allows(way.v) else None
        how = {"sync": way.sync, "copies": way.copies, "one_sided": way.one_sided, "resident": way.resident}
        shares = {"sharded": way.shard != "none", "scatters": way.shard in ("gradients", "all")}
        count = microbatches // way.copies
        made = make_program(way.schedule, way.p, count, v, with_w=way.resident > 0, **how, **shares)
        model = {"family": f"{HERE}:layers", "layers": len(job.layers), "loss": f"{HERE}:loss"}
        model |= {"args": {"names": job.layers}}
        data = {**job.data, "validation": 0.4 if "eval_every" in job.train else 0.0}
        optimizer = {**job.optimizer, "sync": way.sync, "zero1": way.shard == "optimizer"}
        run = {"train": job.train, "steps": job.steps, "size": random_models.SIZE, "cuts": way.cuts, **options}
        again = {str(stage): "recompute" for stage in way.recompute}
        return make_plan(made, model=model, data=data, optimizer=optimizer, activations=again, **run)

    return ramped(one(job.microbatches), *((one(count), steps) for count, steps in job.ramp))


def run(job: Job, way: Way, steps: int | None = None, folder: Path | None = None, resume: Path | None = None) -> Ran:
    """Trains; a refusal counts only if no rank has begun. `folder`: write a checkpoint after step `steps`."""
    built: list[Worker] = []
    try:
        plan = plan_of(job, way, checkpoint={} if folder is None else {"every": steps})
    except ZbcError as error:
        return Ran(refused=error)  # a group of two stages, and room for one
    hub = Hub(plan.manifest.topology.world, prompt=way.prompt)
    try:
        run_threads(plan, steps or job.steps, setup=built.append, hub=hub, folder=folder, resume=resume)
    except ZbcError as error:
        if len(built) == plan.manifest.topology.world and error.code != "E611":  # E611: no checkpoint holds the state
            raise
        return Ran(refused=error)
    found = [[(r.step, r.loss, r.grad_norm, r.skipped) for r in worker.results] for worker in built]
    differ = [rank for rank, results in enumerate(found) if not all(map(_alike, results, found[0]))]
    if differ:
        raise AssertionError(f"ranks {differ} tell of other steps than rank 0")
    evaluation = built[0].evaluation
    evaluations = {} if evaluation is None else {r.step: r.loss for r in evaluation.results}
    return Ran(found[0], evaluations, _left(built))


def resumed(job: Job, ways: Sequence[Way], steps: int, folder: Path) -> Ran:
    """Runs the first `steps` in one way, the others in another."""
    first = run(job, ways[0], steps, folder)
    if first.refused is not None:
        return first
    second = run(job, ways[1], resume=folder_of(folder, steps))
    every = job.train.get("eval_every", 1)
    early = {step: loss for step, loss in first.evaluations.items() if (step + 1) % every == 0}  # one comes at each end
    return replace(second, steps=first.steps + second.steps, evaluations={**early, **second.evaluations})


def differences(found: Ran, expected: Ran) -> list[str]:
    steps = zip(found.steps, expected.steps, strict=True)
    wrong = [f"step {one}, not {other}" for one, other in steps if not _alike(one, other)]
    if found.evaluations.keys() != expected.evaluations.keys():
        wrong.append(f"evaluated after {sorted(found.evaluations)}, not {sorted(expected.evaluations)}")
    elif not _alike([*found.evaluations.values()], [*expected.evaluations.values()]):
        wrong.append(f"evaluations {found.evaluations}, not {expected.evaluations}")
    wrong += [f"{name} on one side only" for name in sorted(found.left.keys() ^ expected.left.keys())]
    names = sorted(found.left.keys() & expected.left.keys())
    return wrong + [f"{name} differs" for name in names if not _close(found.left[name], expected.left[name])]


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(math.isclose(a, b, rel_tol=TOLERANCE) or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    a, b = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (one, other))
    finite = b[b.isfinite()].abs()
    slack = TOLERANCE * max(1.0, finite.max().item() if finite.numel() else 0.0)
    return torch.allclose(a, b, rtol=0.0, atol=slack, equal_nan=True)


def _left(workers: Sequence[Worker]) -> dict[str, Tensor]:
    """Weights, buffers and optimizer state, by name; raises AssertionError where copies of a weight differ."""
    found: dict[str, Tensor] = {}
    for worker in workers:
        for stage in worker.stages.values():
            for name, parameter in stage.parameters.items():
                value = parameter.detach()
                if value.numel() and not value.untyped_storage().nbytes():  # sharded, so in the parts held by ranks
                    continue
                if not torch.equal(found.setdefault(name, value).nan_to_num(), value.nan_to_num()):
                    raise AssertionError(f"copies of {name} differ")
            for layer in stage.layers:
                found |= {f"{layer.name}.{name}": buffer for name, buffer in layer.module.named_buffers()}
        for optimizer in worker.optimizers.values():
            state = {} if optimizer.optimizer is None else optimizer.optimizer.state
            for held in optimizer.held():
                if optimizer in worker.features.of(Gathers).freed:
                    _join(found, held.name, held, held.tensor.detach())
                for key, value in state.get(held.tensor, {}).items() if held.tensor.numel() else ():
                    if not isinstance(value, Tensor):
                        continue
                    name = f"{held.name} {key}"
                    if key == "step":
                        found[name] = value
                        continue
                    _join(found, name, held, value)
    return found


def _join(found: dict[str, Tensor], name: str, held: Held, part: Tensor) -> None:
    """Inserts a part of a tensor."""
    whole = found.setdefault(name, torch.zeros(held.shape, dtype=part.dtype))
    whole.view(-1)[held.start : held.start + part.numel()] = part.reshape(-1)


def tried(seed: int, folder: Path) -> str:
    """Runs the job of a seed in two ways: "refused" or "same". Raises AssertionError with the difference."""
    rng = random.Random(seed)
    job = random_job(rng)
    ways = [random_way(rng, job) for _ in range(2)]
    expected = run(job, Way())
    if rng.random() < 0.4 and job.steps > 2:
        found = resumed(job, ways, rng.randint(1, job.steps - 1), folder)
    else:
        found = run(job, ways[0])
    if found.refused is not None or expected.refused is not None:
        return "refused"
    wrong = differences(found, expected)
    if wrong:
        raise AssertionError("\n".join([f"seed {seed}: {job}", *map(str, ways), *wrong[:8]]))
    return "same"
