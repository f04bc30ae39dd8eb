"""Small complete plans for runtime tests, and the same training done by one process with plain autograd."""

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from tests.lowered import lower
from zbc.compiler.check import check_all
from zbc.compiler.memory.host import slabs
from zbc.compiler.passes.gather_weights import GatherWeights
from zbc.compiler.schedules import Request, find
from zbc.ir import Kind, Op, Placement, Program
from zbc.job import spec
from zbc.ops import WORDS
from zbc.plan.directory import Boundary, RampPlan, RankPlan, StoredPlan, assemble
from zbc.plan.phases import Phases
from zbc.runtime.core.bundle import Alongside
from zbc.runtime.core.state import Worker
from zbc.runtime.seeding import seed_of, seeded
from zbc.runtime.transports.hub import Hub
from zbc.training.building.context import Settings
from zbc.training.data.counted import count_of
from zbc.training.data.data import Batches, build_samples
from zbc.training.models import adapters, model
from zbc.training.worker import build_worker

CPU = torch.device("cpu")
GPT = {"family": "gpt", "layers": 6, "hidden": 32, "heads": 4, "vocab": 61, "seq_len": 16}
LLAMA = {**GPT, "family": "llama", "kv_heads": 2, "ffn_hidden": 48, "vocab": 67}
NOISE = {"kind": "synthetic"}


def make_program(
    schedule: str,
    p: int,
    m: int,
    v: int | None = None,
    *,
    sync: str = "before-step",
    copies: int = 1,
    slices: int = 1,
    resident: int = 0,
    with_w: bool = False,
    **how: Any,
) -> Program:
    """A complete, checked program of `dp` replicas; `how` sets fields like `tied` and `sharded`. With `resident`
    weights are resharded, and W needs them if `with_w`."""
    found = find(schedule)
    v = found.stages_per_rank(v)
    program = replace(found.make(Request(p=p, m=m, v=v, slices=slices)), dp=copies, **how)
    program = lower(program, sync, gather=GatherWeights(resident, with_w) if resident else None)
    check_all(program)
    return program


def make_plan(
    program: Program,
    *,
    model: dict[str, Any] = GPT,
    data: dict[str, Any] = NOISE,
    optimizer: dict[str, Any] | None = None,
    size: int = 2,
    boundaries: Sequence[Boundary | None] | None = None,
    seed: int = 7,
    steps: int = 100,
    train: dict[str, Any] | None = None,
    activations: str | dict[str, str] = "keep",
    freeze: dict[str, Any] | None = None,
    adapter: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    keep: Callable[[Op], bool] = lambda op: True,
    node: Sequence[int] = (),
    order: Sequence[int] = (),
    cuts: Sequence[int] | None = None,
    rows: Sequence[int] = (),
    words: Sequence[int] | None = None,
    tokens: Sequence[int] = (),
) -> StoredPlan:
    """The plan of a program, whose updates and shared words are those of the optimizer and the model unless these say
    otherwise; `keep` drops ops from it. Layers are dealt evenly, or cut at `cuts`.

    `rows`: starts of the slices of microbatches, and the end of the sequence; `words`: the first words of ranks in a
    shared vocabulary, by default even; `tokens`: of the rows of each microbatch.
    """
    kinds = {op.kind for ops in program.ranks for op in ops}
    ranks = [[op for op in ops if keep(op)] for ops in program.ranks]
    program = replace(program.with_ranks(ranks, by="test"), node=tuple(node) if node else None, order=tuple(order))
    words_too = program.tied and ":" not in model["family"]
    checked = spec.Model.model_validate({"ties": True, **model} if words_too else model)
    names = [f"layers.{i}" for i in range(checked.layers)]
    names = ["embed", *names, "head"] if checked.builtin else names
    stages = program.placement.stages
    cuts = [round(s * len(names) / stages) for s in range(stages + 1)] if cuts is None else cuts
    if words is None:
        count = program.placement.ranks
        words = [(checked.vocab or 0) * rank // count for rank in range(count + 1)]
    plain = partial(BaseModel.model_dump, mode="json")
    told = {"data": plain(spec.Data.model_validate(data))}
    updates = "two-versions" if program.cyclic else "post-validate" if Kind.COMMIT in kinds else "before-step"
    chosen = {key: value for key, value in (optimizer or {}).items() if key != "zero1"}  # the program says that
    told |= {"optimizer": plain(spec.Optimizer.model_validate({"sync": updates, **chosen}))}
    told |= {} if checkpoint is None else {"checkpoint": checkpoint}
    manifest, _ = assemble(
        program,
        layers=[names[a:b] for a, b in pairwise(cuts)],
        boundaries=boundaries,
        microbatch_size=size,
        cuts=rows,
        words=words if program.vocabulary else (),
        predicted={"host": on_host(program)},
        planning={
            "memory": {"activations": activations},
            "freeze": freeze or {},
            "model": plain(checked),
            **({} if adapter is None else {"adapter": adapter}),
            **({"schedule": {"tokens": [*tokens]}} if tokens else {}),
        },
        training={"train": {"seed": seed, "steps": steps, **(train or {})}, **told},
    )
    return StoredPlan(manifest, program)


def on_host(program: Program) -> dict[str, Any]:
    """The slabs of a manifest, with unknown sizes."""
    counts = {f"rank {rank}": slabs(program, rank) for rank in range(len(program.ranks))}
    return {name: {"slabs": {f"s{stage}": n for stage, n in found.items()}} for name, found in counts.items() if found}


def ramped(plan: StoredPlan, *starts: tuple[StoredPlan, int]) -> StoredPlan:
    """`plan` with a ramp of other plans, each for a number of steps."""
    parts = [
        RampPlan(folder=f"m{one.manifest.microbatches}", microbatches=one.manifest.microbatches, steps=steps, sha256="")
        for one, steps in starts
    ]
    return StoredPlan(plan.manifest.model_copy(update={"ramp": parts}), plan.program, tuple(one for one, _ in starts))


def plan_of(ranks: Sequence[str], placement: Placement, m: int, **options: Any) -> StoredPlan:
    """A plan from op texts, one string per rank with commas between ops."""
    ops = tuple(tuple(Op.parse(text.strip()) for text in rank.split(",")) for rank in ranks)
    return make_plan(Program(placement, m, ops, ("test",)), **options)


def make_worker(plan: StoredPlan, rank: int = 0, hub: Hub | None = None) -> Worker:
    topology = plan.manifest.topology
    hub, part = hub or Hub(topology.world, inside=topology.inside), topology.of(rank).pp
    ramp = [RankPlan(part, one.program.ranks[part], one.manifest) for one in plan.ramp]
    return build_worker(RankPlan(part, plan.program.ranks[part], plan.manifest), hub.end(rank), CPU, ramp)


@dataclass
class Reference:
    """Results of one process: loss and gradient norm per step, last gradients before clipping, weights; the scale of
    torch's GradScaler per step."""

    losses: list[float]
    norms: list[float] = field(default_factory=list)
    grads: dict[str, torch.Tensor | None] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    scales: list[float] = field(default_factory=list)


def plain_loss(chosen: spec.Model) -> Callable[[Any, Any], torch.Tensor]:
    """The loss of a model, by torch alone."""
    if chosen.loss != "cross_entropy" or not (chosen.z_loss or chosen.label_smoothing):
        return model.loss(chosen.loss)

    def loss(logits, targets):
        logits, targets = logits.flatten(0, -2), targets.flatten()
        z = logits[targets != -100].logsumexp(-1).square().mean() * chosen.z_loss
        return torch.nn.functional.cross_entropy(logits, targets, label_smoothing=chosen.label_smoothing) + z

    return loss


def _next(module, x):
    """What comes behind a layer, as docs/models.md says it."""
    if not isinstance(x, Alongside):
        return module(*x) if isinstance(x, tuple) else module(x)
    known = inspect.signature(module.forward).parameters
    y = module(x.value, **{name: one for name, one in x.others.items() if name in known})
    return Alongside(y, x.others)


def reference(
    plan: StoredPlan,
    steps: int = 1,
    frozen: Callable[[int, int], set[str]] = lambda step, mb: set(),
    *,
    delayed: bool = False,
    feedback: float = 0.0,
    read: Callable[[Batches], Any] = lambda batches: batches,
) -> Reference:
    """Trains the unsplit, unpatched model of `plan` with plain autograd: (loss / m).backward() per microbatch.

    `delayed`: the gradients of a step are those of the weights before the last step; `feedback`: the share of what the
    update before was off by that the next one makes good. `read`: makes the microbatches that are trained from those of
    the plan's data.

    `frozen` names the layers, or modules inside, that a microbatch does not train; gradients are means over the other
    microbatches.
    """
    manifest, settings = plan.manifest, Settings.of(plan.manifest)
    most, size, seed = manifest.topology.batch, manifest.microbatch_size, settings.train.seed
    samples, phases = build_samples(settings.data, settings.model, seed), Phases.of(manifest)
    batches = read(Batches(samples, seed=seed, microbatches=most, size=size, phases=phases))
    plans = adapters.adapted(model.layers(settings.model, seed), settings.adapter, settings.model)
    layers = [(layer.name, layer.build(seed)) for layer in plans]
    if settings.model.tie_embeddings:
        layers[-1][1].logits.weight = layers[0][1].tokens.weight
    modules = dict(layers)
    for name, owner in settings.model.tied.items():
        (_, one, path), (_, other, target) = (text.split(".", 2) for text in (name, owner))
        inner, _, leaf = path.rpartition(".")
        setattr(modules[f"layers.{one}"].get_submodule(inner), leaf, modules[f"layers.{other}"].get_parameter(target))
    named = {f"{name}.{local}": p for name, module in layers for local, p in module.named_parameters()}
    modules |= {f"{name}.{path}": inner for name, module in layers for path, inner in module.named_modules() if path}
    weights = {
        name: p
        for name, p in named.items()
        if (name, settings.model.tie_embeddings) != ("head.logits.weight", True) and name not in settings.model.tied
    }
    criterion, layers[-1][1].chunk = plain_loss(settings.model), None
    masters = _masters(weights) if settings.model.parameters == "bfloat16" else weights
    optimizer = _optimizer(settings.optimizer, {name: p for name, p in masters.items() if p.requires_grad})
    low = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(settings.model.dtype)
    said = settings.model.loss_scale
    scale, growth = said if isinstance(said, tuple) else (said, 2000)
    scaler = torch.amp.GradScaler("cpu", scale, growth_interval=growth, enabled=low == torch.float16)
    result = Reference([])
    before, last = [p.data.clone() for p in weights.values()], list[torch.Tensor]()
    for step in range(steps):
        newest = [p.data for p in weights.values()]
        for p, older in zip(weights.values(), before if delayed else newest, strict=True):
            p.data = older
        losses, m = [], phases.samples(step) // size
        weights_of = _weights(settings.model.loss, criterion, [batches.targets(step, mb) for mb in range(m)])
        trained = Counter(name for mb in range(m) for name in modules.keys() - frozen(step, mb))
        for mb in range(m):
            for name in frozen(step, mb):
                modules[name].requires_grad_(False)
            x, target = batches.inputs(step, mb), batches.targets(step, mb)
            with nullcontext() if low is None else torch.autocast("cpu", low):
                for name, module in layers:
                    with seeded(seed_of(seed, step, mb, name)):
                        x = _next(module, x)
                loss = criterion(x.value if isinstance(x, Alongside) else x, target)
            losses.append(loss.item() * weights_of[mb])
            if loss.requires_grad:
                scaler.scale(loss * weights_of[mb] / m).backward()
            for name in frozen(step, mb):
                modules[name].requires_grad_(True)
        for name in (name for name, count in trained.items() if count < m):
            for p in modules[name].parameters():
                if p.grad is not None:
                    p.grad.mul_(m / trained[name])
        result.scales.append(scaler.get_scale())
        if optimizer is not None:
            scaler.unscale_(optimizer)
        result.grads = {name: None if p.grad is None else p.grad.clone() for name, p in weights.items()}
        norm = sum(_squares(p.grad) for p in weights.values() if p.grad is not None) ** 0.5
        result.losses.append(sum(losses) / m)
        result.norms.append(norm)
        for p, data in zip(weights.values(), newest, strict=True):
            p.data = data
        before = [data.clone() for data in newest]
        clip = settings.optimizer.clip_grad_norm
        if manifest.flushless:  # of each stage
            clip = _clip_stages(clip, manifest.layers, weights)
        for group in [] if optimizer is None else optimizer.param_groups:
            group["lr"] = phases.rate(
                settings.optimizer.rates[0], settings.optimizer.schedule, settings.train.steps, step
            )
        step_it = None if optimizer is None else partial(scaler.step, optimizer)
        _step(step_it, clip, norm, [*zip(weights.values(), masters.values(), strict=True)])
        if feedback:
            moved = [p.data - older for p, older in zip(weights.values(), before, strict=True)]
            for p, now, then in zip(weights.values(), moved, last or moved, strict=True):
                p.data += feedback * (now - then)
            last = moved
        scaler.update()
    result.weights = {name: p.detach().clone() for name, p in weights.items()}
    return result


def hold(workers: Sequence[Worker], wanted: Reference, *, tolerance: float = 0.0, near: float = 0.0) -> None:
    """Asserts that losses, and norms if known, are nearly those of one process, and weights to the bit or `close`."""
    near = near or max(1e-6, tolerance)
    assert [result.loss for result in workers[0].results] == pytest.approx(wanted.losses, rel=near)
    if wanted.norms:
        assert [result.grad_norm for result in workers[0].results] == pytest.approx(wanted.norms, rel=near)
    for name, parameter in parameters(workers).items():
        expected = wanted.weights[name].detach()
        torch.testing.assert_close(parameter.detach(), expected, rtol=tolerance, atol=tolerance, msg=name)


def descend(
    weights: dict[str, torch.nn.Parameter],
    steps: int,
    loss: Callable[[], Any],
    *,
    delayed: bool = False,
) -> list[Any]:
    """Plain gradient descent at a rate of 0.3 in one process: the results of `loss` for each step, whose last number it
    minimizes; `delayed`: by the gradients of the weights before the last step."""
    found, before = [], [p.data.clone() for p in weights.values()]
    for _ in range(steps):
        newest = [p.data.clone() for p in weights.values()]
        for p, older in zip(weights.values(), before if delayed else newest, strict=True):
            p.data = older.clone()
        before, told = newest, loss()
        grads = torch.autograd.grad(told[-1], list(weights.values()), allow_unused=True)
        for p, new, grad in zip(weights.values(), newest, grads, strict=True):
            p.data = new if grad is None else new - 0.3 * grad
        found.append(tuple(number.item() for number in told))
    return found


def _weights(name: str, criterion: Any, targets: Sequence[torch.Tensor]) -> list[float]:
    """Weights of microbatches in a loss that is one mean over all targets that count: 1 if all are equal."""
    count = count_of(criterion, name, targets[0])
    counts = [1.0 if count is None else count(target) for target in targets]
    return [one * len(targets) / (sum(counts) or 1.0) for one in counts]


def _clip_stages(most: float | None, stages: Sequence[Sequence[str]], weights: dict[str, torch.nn.Parameter]) -> None:
    """Clips the gradients of each stage to a norm."""
    for names in () if most is None else stages:
        mine = tuple(f"{layer}." for layer in names)
        grads = [p.grad for name, p in weights.items() if name.startswith(mine)]
        norm = sum(_squares(grad) for grad in grads if grad is not None) ** 0.5
        for grad in grads if most / (norm + 1e-6) < 1 else ():
            if grad is not None:
                grad.mul_(most / (norm + 1e-6))


def _squares(grad: torch.Tensor) -> float:
    return (torch.view_as_real(grad) if grad.is_complex() else grad).double().square().sum().item()


class _Both:
    """torch's Muon for the matrices of blocks, its AdamW for the rest."""

    def __init__(self, options: spec.Optimizer, named: dict[str, torch.nn.Parameter]) -> None:
        inside = {n: p for n, p in named.items() if n.startswith("layers.") and p.dim() == 2}
        scale = {"rms": "match_rms_adamw", "original": "original"}[options.scale]
        how = {"momentum": options.momentum, "weight_decay": options.weight_decay, "adjust_lr_fn": scale}
        self._muon = torch.optim.Muon(inside.values(), lr=options.rates[0], **how)
        rest = [p for n, p in named.items() if n not in inside]
        plain = options.model_copy(update={"kind": "adamw", "lr": options.rates[1]})
        self._adamw = _optimizer(plain, dict(enumerate(rest)))
        self._own = options.rates[1] / options.rates[0]
        self.param_groups = self._muon.param_groups

    def step(self) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = self._own * self._muon.param_groups[0]["lr"]
        self._muon.step()
        self._adamw.step()


def _optimizer(options: spec.Optimizer, named: dict[Any, torch.nn.Parameter]) -> Any:
    parameters = [*named.values()]
    if not parameters:
        return None
    if options.kind == "muon":
        return _Both(options, named)
    how = {"lr": options.lr, "weight_decay": options.weight_decay}
    if options.kind == "sgd":
        return torch.optim.SGD(parameters, momentum=options.momentum, **how)
    made = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[options.kind]
    return made(parameters, betas=options.betas, eps=options.eps, **how)


def _step(
    step: Callable[[], Any] | None,
    largest: float | None,
    norm: float,
    pairs: list[tuple[torch.nn.Parameter, torch.nn.Parameter]],
) -> None:
    """Steps the second of each pair with the clipped gradient of the first, and copies it to the first."""
    scale = 1.0 if largest is None else min(1.0, largest / (norm + 1e-6))
    for parameter, master in pairs:
        if parameter.grad is not None:
            master.grad = parameter.grad.mul_(scale)
    if step is not None:
        step()
    for parameter, master in pairs:
        parameter.grad = master.grad = None
        parameter.data.copy_(master.data)


def _masters(weights: dict[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    """float32 copies; `weights` become bfloat16 and collect their gradients in float32."""
    masters = {name: torch.nn.Parameter(p.detach().clone()) for name, p in weights.items()}
    for parameter in weights.values():
        parameter.data = parameter.data.bfloat16()
        parameter.grad_dtype = torch.float32
    return masters


def parameters(workers: Sequence[Worker]) -> dict[str, torch.nn.Parameter]:
    """All parameters of all ranks by global name; rows of several ranks are concatenated."""
    found = {name: p for w in workers for stage in w.stages.values() for name, p in stage.parameters.items()}
    rows: dict[str, list[torch.nn.Parameter]] = {}
    for worker in workers:
        if WORDS in worker.optimizers and worker.replica == 0:
            for name, p in worker.optimizers[WORDS].parameters.items():
                rows.setdefault(name, []).append(p)
    for name, parts in rows.items():
        found[name] = torch.nn.Parameter(torch.cat([p.detach() for p in parts]))
        if all(p.grad is not None for p in parts):
            found[name].grad = torch.cat([p.grad for p in parts if p.grad is not None])
    return found
