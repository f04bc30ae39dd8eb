"""All boundary tensors and parameter names of a model, derived without computing anything.

All layers are built and run once, in order, on torch's meta device. Every rank does this for the whole model, so all
have the same names in the same order and the same shapes, and a plan that disagrees is refused before training.

Under autocast a layer's output type depends on its ops. The meta device has no autocast, so the layers then run with
fake tensors of the real device: boundaries get the type that they have without a partition, which keeps results
independent of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.job.userobject import FAILURES
from zbc.plan.directory import Boundary, Manifest
from zbc.runtime.core.bucket import gradient_type
from zbc.runtime.core.bundle import Alongside, Names, Packing, adapt, names_of, taken_apart
from zbc.runtime.core.private import FakeTensorMode, pytree
from zbc.runtime.core.stage import Ports, Traits
from zbc.runtime.core.tensors import Laid, Part, TensorSpec, lower_precision
from zbc.runtime.features.slices.slicing import Inside, within
from zbc.runtime.seeding import seeded
from zbc.training import frames
from zbc.training.models.model import LayerPlan, Owners, hollow
from zbc.training.probing.probe import observe, reaches, union
from zbc.training.probing.trials import adds, carried

_CONSTANTS = (type(None), bool, int, float, str)  # allowed between tensors
META = torch.device("meta")
_TRIALS = 8  # forwards of a layer that returns several tensors, some of which might require a gradient


@dataclass(frozen=True)
class Shapes:
    """Shapes and properties of the whole model: of its stages; all parameter names of the model, sorted, and their
    sizes; the types of the gradients of those that train; per layer its traits. `before`: the input of each layer, by
    name; `output`: the output of the last one; `ends`: its packing if that is several tensors. `packed`: per layer, the
    packings of its input and output if they are several tensors.
    """

    stages: tuple[Ports, ...]
    parameters: tuple[str, ...]
    sizes: tuple[int, ...]
    gradients: Mapping[str, torch.dtype]
    traits: dict[str, Traits]
    before: Mapping[str, Laid]
    output: TensorSpec
    ends: Packing | None
    packed: Mapping[str, tuple[Packing | None, Packing | None]]

    def of_tokens(self, count: int, whole: Collection[str], firsts: Sequence[str]) -> Shapes:
        """The shapes if the tokens between layers are sharded over `count` ranks, but not those that the layers `whole`
        get; `firsts`: of each stage the first layer."""

        def part(spec: TensorSpec) -> TensorSpec:
            batch, tokens, *rest = spec.shape
            return spec._replace(shape=(batch, tokens // count, *rest))

        whole = {next(iter(self.before)), *whole}
        before = {name: one if name in whole else Laid(part(one.spec)) for name, one in self.before.items()}
        stages = list[Ports]()
        for one, first, after in zip(self.stages, firsts, (*firsts[1:], ""), strict=True):
            if first not in whole:
                one = one._replace(takes=part(one.takes), laid=Laid(part(one.takes)))
            stages.append(one if one.gives is None or after in whole else one._replace(gives=part(one.gives)))
        return replace(self, stages=tuple(stages), before=before)


class _Seen(NamedTuple):
    """The result of a layer's trial. `laid`: its output, and `gives` its packing if it is several tensors; `trains`:
    the output may require a gradient; `passes`: its gradient reaches the input, or would if that required one; `made`:
    buffers that its first forward made. `sizes` of its parameters, and `types` of their gradients."""

    traits: Traits
    laid: Laid
    gives: Packing | None
    trains: bool
    passes: bool
    made: tuple[str, ...]
    sizes: Mapping[str, int] = {}
    types: Mapping[str, torch.dtype] = {}

    def judged(self, follows: bool, mixes: bool) -> _Seen:
        """With the traits of changed attributes and made buffers: `follows`: the output depends on other forwards
        through them; `mixes`: microbatches mix in them."""
        names, remembers = self.traits.carries, self.traits.remembers
        traits = replace(
            self.traits,
            remembers=union(remembers, self.made) if follows else remembers,
            carries=names if follows else (),
            mixes=names if mixes else (),
        )
        return self._replace(traits=traits)


def derive(
    plans: Sequence[LayerPlan],
    first: Callable[[str], TensorSpec | Mapping[str, TensorSpec]],
    manifest: Manifest,
    *,
    ends: Names = None,
    autocast: tuple[torch.device, torch.dtype] | None,
    lowered: torch.dtype | None = None,
    rows: int | None = None,
    flow: bool = False,
) -> Shapes:
    """Runs all layers without data, from model inputs of the spec `first(layer)` for each layer that reads the data, or
    the specs of its entries; `ends`: the names of entries that the loss takes, None: any. `autocast` are the device and
    type to autocast for, if any.

    `lowered` is the type that parameters are cast to for forward, if it is not their own. `rows`: the number of tokens
    of a slice, if `first` is one. `flow`: the input of the first layer requires a gradient.

    Raises E505 if a layer cannot run, nothing takes an entry or the plan has other boundaries or layers, E508 if two
    layers share a parameter, E509 if a layer cannot be trained in a pipeline.
    """
    _check_layers(plans, manifest)
    before, packed = dict[str, Laid](), dict[str, tuple[Packing | None, Packing | None]]()  # of each layer's input
    trials, seen = dict[str, dict[Any, _Seen]](), dict[str, _Seen]()  # of alike layers; of each
    owners, wanted, after, later = Owners(), flow, read_by(plans), dict[str, Names]()
    for plan in plans:
        sources = [seen[source] for source in after[plan.name]]
        flow = any(source.trains for source in sources) if sources else wanted
        given = None if sources else first(plan.name)
        if isinstance(given, Mapping):
            later = _later(plans)
            enters: tuple[Laid, Packing | None] = _entered(given, later[""], ends)
        else:
            enters = _taken(plan.name, sources) if given is None else (Laid(given), None)
        taken, comes = enters
        comes = comes and comes._replace(later=later.get(plan.name, frozenset() if plan is plans[-1] else None))
        before[plan.name] = taken
        known = trials.setdefault(plan.like or plan.name, plan.trials)
        place = taken, comes, flow, rows, autocast, lowered
        if place not in known:
            module = plan.on_meta(owners)
            inner = {local: p.numel() for local, p in module.named_parameters()}
            lower_precision(module.parameters(), lowered)
            types = {local: gradient_type(p) for local, p in module.named_parameters() if p.requires_grad}
            look = _Look(plan, taken, comes, flow, rows)
            found = _output(look, module, autocast, lowered)
            if found.traits.carries or found.made:
                found = found.judged(*carried(look.adapted(with_values(plan, lowered), found.gives), taken.spec))
            if found.traits.adds:
                own = look.adapted(with_values(plan, lowered), found.gives)
                found = found._replace(traits=replace(found.traits, adds=adds(own, taken.spec)))
            known[place] = found._replace(sizes=inner, types=types)
        seen[plan.name] = known[place]
        gives = known[place].gives
        packed[plan.name] = comes, gives and gives._replace(ends=plan is plans[-1])
    _check_ties(plans, {f"{name}.{local}": size for name, layer in seen.items() for local, size in layer.sizes.items()})
    inside = [(plan, local, seen[plan.name]) for plan in plans for local in seen[plan.name].sizes]
    every = [(f"{plan.name}.{local}", local, layer) for plan, local, layer in inside if local not in plan.ties]
    ways, stages = _ways(after, seen), _stages(manifest, after, before, seen, packed)
    outputs: list[TensorSpec | None] = [
        _agreed(stage, stages[stage].made.spec, planned, free_dtype=autocast is not None, rows=rows)
        for stage, planned in enumerate(manifest.boundaries)
    ]
    inputs = [None if ends.home is None else outputs[ends.home] for ends in stages]
    through = seen[plans[0].name].passes and ways[plans[0].name]  # to a stage without layers before all others
    return Shapes(
        stages=tuple(
            Ports(
                takes or ends.laid.spec,
                gives,
                came=ends.layout,
                goes=packed[ends.last][1] if ends.last and gives is not None else None,
                laid=ends.laid,
                flows=any(seen[name].trains for name in ends.sources) if ends.sources else wanted,
                passed=ways[ends.last] if ends.last else through,
            )
            for ends, takes, gives in zip(stages, inputs, (*outputs, None), strict=True)
        ),
        parameters=tuple(sorted(name for name, _, _ in every)),
        sizes=tuple(layer.sizes[local] for _, local, layer in sorted(every, key=lambda each: each[0])),
        gradients={name: layer.types[local] for name, local, layer in every if local in layer.types},
        traits={name: found.traits for name, found in seen.items()},
        before=before,
        output=seen[plans[-1].name].laid.spec,
        ends=packed[plans[-1].name][1],
        packed=packed,
    )


def in_a_slice(rows: int | None) -> AbstractContextManager[None]:
    """A context of forwards on a slice of `rows` tokens, without values; None: on whole microbatches."""
    return nullcontext() if rows is None else within(Inside(Part(0, 0, rows, rows)))


def _later(plans: Sequence[LayerPlan]) -> dict[str, Names]:
    """By layer the names of the parameters of all later layers' forwards, and of all under ""; None: some take any."""
    found, names = dict[str, Names](), cast(Names, frozenset())
    for plan in reversed(plans):
        found[plan.name], own = names, names_of(plan.on_meta().forward)
        names = None if own is None or names is None else names | own
    return {**found, "": names}


def _entered(given: Mapping[str, TensorSpec], known: Names, ends: Names) -> tuple[Laid, Packing]:
    """The entries of the data that layers take, alongside of nothing. Raises E505 for one that no layer and no loss
    takes."""
    taken = {name: spec.empty(META) for name, spec in given.items() if known is None or name in known}
    packing = Packing.of([*taken.values()], [False] * len(taken), taken_apart(Alongside((), taken))[1])
    lost = [] if known is None or ends is None else [name for name in given if name not in known | ends]
    if lost or not packing.parts:
        text = f"data: samples have {', '.join(lost or given)}, which no parameter of a layer or the loss is called"
        raise ZbcError("E505", text, hint=f"drop it, or name it as layers do: {', '.join(sorted(known or ()))}")
    return Laid(packing.spec), packing


class _StageEnds(NamedTuple):
    """A stage: the layers that it reads, and the only stage whose output is its input, if there is one; its last layer,
    or the last one before if it has none ("" before the first); its input and output."""

    sources: tuple[str, ...]
    home: int | None
    last: str
    laid: Laid
    layout: Packing | None
    made: Laid


def _stages(
    manifest: Manifest,
    after: Mapping[str, tuple[str, ...]],
    before: Mapping[str, Laid],
    seen: Mapping[str, _Seen],
    packed: Mapping[str, tuple[Packing | None, Packing | None]],
) -> list[_StageEnds]:
    """The stages of a plan's partition. A stage without layers passes on its input, before the first layer the data."""
    found, last, made = list[_StageEnds](), "", next(iter(before.values()))
    homes = dict[str, int]()  # by its last layer, the latest stage
    for stage, names in enumerate(manifest.layers):
        if names:
            sources, laid, layout = after[names[0]], before[names[0]], packed[names[0]][0]
        else:
            sources, laid = (last,) if last else (), made
            layout = packed[last][1] if last else packed[next(iter(before))][0]
        home = homes.get(sources[0]) if len(sources) == 1 else None
        if names:
            last, made = names[-1], seen[names[-1]].laid
        found.append(_StageEnds(sources, home, last, laid, layout, made))
        homes[last] = stage
    return found


def read_by(plans: Sequence[LayerPlan]) -> dict[str, tuple[str, ...]]:
    """The layers whose outputs each layer reads: in a chain the previous one."""
    found, previous = dict[str, tuple[str, ...]](), tuple[str, ...]()
    for plan in plans:
        found[plan.name] = previous if plan.after is None else plan.after
        previous = (plan.name,)
    return found


def _taken(name: str, sources: Sequence[_Seen]) -> tuple[Laid, Packing | None]:
    """The input of a layer and its packing: one output, or several packed into one. Raises E505 if one of several
    outputs is not a tensor."""
    if len(sources) == 1:
        return sources[0].laid, sources[0].gives
    several = next((source.gives for source in sources if source.gives is not None), None)
    if several is not None:
        text = f"run: layer {name} reads several groups, of which one ends in {several}"
        raise ZbcError("E505", text, hint="the last layer of a group that is read beside others returns one tensor")
    made = [source.laid.zeros(META) for source in sources]
    packing = Packing.of(made, [source.trains for source in sources])
    return Laid(packing.spec), packing


class _Look(NamedTuple):
    """A trial of a layer: `takes` is its input, `comes` the packing if that is several tensors; `flow`: whether the
    input requires a gradient; `rows` of a slice."""

    plan: LayerPlan
    takes: Laid
    comes: Packing | None
    flow: bool
    rows: int | None

    def adapted(self, module: nn.Module, gives: Packing | None = None) -> nn.Module:
        return adapt(self.plan.name, module, {self.rows: (self.comes, gives)}, trial=True)


def _ways(after: Mapping[str, tuple[str, ...]], seen: Mapping[str, _Seen]) -> dict[str, bool]:
    """Per layer: does its output get a gradient in one process?"""
    readers: dict[str, list[str]] = {name: [] for name in after}
    for name, sources in after.items():
        for source in sources:
            readers[source].append(name)
    found = dict[str, bool]()
    for name in reversed([*after]):
        found[name] = not readers[name] or any(seen[reader].passes and found[reader] for reader in readers[name])
    return found


def _check_layers(plans: Sequence[LayerPlan], manifest: Manifest) -> None:
    planned = [name for names in manifest.layers for name in names]
    found = [plan.name for plan in plans]
    if planned != found:
        where = next((i for i, (a, b) in enumerate(zip(planned, found, strict=False)) if a != b), None)
        what = f"{len(planned)} layers" if where is None else f"{planned[where]!r} as layer {where}"
        have = f"{len(found)}" if where is None else f"{found[where]!r}"
        hint = "the model changed after planning: plan again"
        raise ZbcError("E505", f"run: the plan has {what}, the model has {have}", hint=hint)


def _output(
    look: _Look, module: nn.Module, autocast: tuple[torch.device, torch.dtype] | None, lowered: torch.dtype | None
) -> _Seen:
    """Runs the trial of a layer.

    A layer that cannot run without values is built and run once on the CPU. One that cannot take an input in the layout
    of the meta device gets a contiguous one: layouts there may differ from those in training.
    """
    device, low = (META, None) if autocast is None else autocast
    # Kernels of the CPU may need buffers of the parameters' type, which only a run with values shows.
    mixed = lowered is not None and device.type == "cpu" and any(b.is_floating_point() for b in module.buffers())
    found: _Seen | None = None
    plain = look._replace(takes=Laid(look.takes.spec))
    for laid in dict.fromkeys((look.takes, plain.takes)):
        try:
            found = _run(look._replace(takes=laid), module, device, low)
            break
        except ZbcError:
            raise
        except FAILURES:
            continue
    if found is not None and not mixed:
        return found
    try:
        with seeded(0):
            built = with_values(look.plan, lowered)
            with nullcontext() if low is None else torch.autocast("cpu", low):
                tried = _looked_at(plain, built, torch.device("cpu"))
        return found or tried
    except ZbcError:
        raise
    except FAILURES as error:
        what = f"a tensor {look.takes.spec}" if look.comes is None else f"the tensors {look.comes}"
        text = f"run: layer {look.plan.name} cannot take {what}"
        hint = "each layer takes what the layer before returns: what it is, or the items of a tuple as its arguments"
        if mixed:
            hint += '; with model.parameters = "bfloat16" its buffers stay as they are, try "float32"'
        raise ZbcError("E505", text, hint=hint, details=frames.raised(error)) from error


def with_values(plan: LayerPlan, lowered: torch.dtype | None) -> nn.Module:
    """A copy of a layer with initial weights: the module that the plan returns may exist already and be in use."""
    with seeded(0):
        built = adapt(plan.name, copy.deepcopy(plan.build(0)), {})
    if lowered is not None:
        lower_precision(built.parameters(), lowered)
    return built


def _run(look: _Look, module: nn.Module, device: torch.device, low: torch.dtype | None) -> _Seen:
    """Runs without values: on the meta device, or with fake tensors of another one, under autocast."""
    if device.type == "meta":
        return _looked_at(look, module, device)
    with FakeTensorMode(), torch.autocast(device.type, low):
        return _looked_at(look, hollow(module, device), device)


def _looked_at(look: _Look, module: nn.Module, device: torch.device, gives: Packing | None = None) -> _Seen:
    differentiable = look.takes.spec.numbers
    x = look.takes.zeros(device).requires_grad_(differentiable and look.flow)
    with torch.enable_grad():
        y, traits, made = observe(look.plan.name, look.adapted(module, gives), x)
        if not isinstance(y, Tensor) and gives is None:
            return _looked_at(look, module, device, _packing(look.plan, module, x, y))
        assert isinstance(y, Tensor)
        _sendable(look.plan, y)
    passes = reaches(y, x) if x.requires_grad else differentiable
    trains = y.requires_grad or (gives is None and _may_train(module, y, look.flow))
    return _Seen(traits, Laid.of(y), gives, trains, passes, made)


def _may_train(module: nn.Module, y: Tensor, flow: bool) -> bool:
    """Whether an output may require a gradient in some other forward: layers skip parts at random, or by the data."""
    return TensorSpec.of(y).numbers and (flow or any(p.requires_grad for p in module.parameters()))


def _packing(plan: LayerPlan, module: nn.Module, x: Tensor, y: object) -> Packing:
    """The packing of several outputs; a few more forwards show which of them require gradients. Other outputs are
    assumed not to: gradients of masks and tables would cost messages, and attention its fast kernels."""
    for path, leaf in pytree.tree_flatten_with_path(y)[0]:
        if isinstance(leaf, Tensor):
            _sendable(plan, leaf)
        elif type(leaf) not in _CONSTANTS:
            text = f"run: layer {plan.name} returned {type(leaf).__name__}" + f" at {pytree.keystr(path)}" * bool(path)
            hint = "return tensors, None, numbers and texts, in tuples, lists and dicts: tuple(x.shape) of a size"
            raise ZbcError("E505", text, hint=hint)
    several, form = taken_apart(y)
    if not several:
        text = f"run: layer {plan.name} returned {type(y).__name__}, in which there is no tensor"
        raise ZbcError("E505", text, hint="return at least one tensor, which the next layer takes")
    wants = [output.requires_grad for output in several]
    both = zip(wants, several, strict=True)
    doubted = any(not want and _may_train(module, output, x.requires_grad) for want, output in both)
    for seed in range(_TRIALS if doubted else 0):
        with seeded(seed):
            given = x if x.is_meta or not x.is_floating_point() else torch.randn_like(x).requires_grad_(x.requires_grad)
            made = module(given.clone())
        again, other = taken_apart(made)
        if other != form:
            raise Packing.of(several, wants, form).unlike(plan.name, made)
        wants = [want or output.requires_grad for want, output in zip(wants, again, strict=True)]
    return Packing.of(several, wants, form)


def _sendable(plan: LayerPlan, y: Tensor) -> None:
    """Raises E505 for a tensor that cannot be sent."""
    if y.layout is not torch.strided or y.is_nested or y.is_quantized:
        kind = "nested" if y.is_nested else "quantized" if y.is_quantized else str(y.layout).removeprefix("torch.")
        text = f"run: layer {plan.name} returned a {kind} tensor, which cannot be sent"
        raise ZbcError("E505", text, hint="return a dense tensor: to_dense(), dequantize()")


def _check_ties(plans: Sequence[LayerPlan], sizes: Mapping[str, int]) -> None:
    """Raises E508 for weights that cannot be tied."""
    for plan in plans:
        for local, owner in plan.ties.items():
            name = f"{plan.name}.{local}"
            missing = next((weight for weight in (name, owner) if weight not in sizes), None)
            if missing is not None:
                text = f"model: model.ties names {missing}, which is no parameter of the model"
                raise ZbcError("E508", text, hint="names are those of named_parameters() behind layers.N.")
            if sizes[name] != sizes[owner]:
                text = f"model: {name} has {sizes[name]} numbers and {owner} {sizes[owner]}: they cannot be one"
                raise ZbcError("E508", text, hint="tie parameters of the same shape")


def _agreed(
    stage: int, derived: TensorSpec, planned: Boundary | None, *, free_dtype: bool, rows: int | None
) -> TensorSpec:
    """The output of `stage`. Under autocast a plan may choose another floating-point type than the layers'. A plan has
    the shape of the longest slice; `rows` is the length of this one."""
    if planned is None:
        return derived
    dtype = getattr(torch, planned.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ZbcError("E505", f"run: the plan's boundary after stage {stage} has unknown dtype {planned.dtype!r}")
    shape = planned.shape if rows is None else [*planned.shape[:1], rows, *planned.shape[2:]]
    told = TensorSpec(tuple(shape), dtype)
    free = free_dtype and dtype.is_floating_point and derived.dtype.is_floating_point
    if told.shape != derived.shape or (told.dtype != derived.dtype and not free):
        text = f"run: the tensor after stage {stage} is {derived}, the plan says {told}"
        raise ZbcError("E505", text, hint="the model or its data changed after planning: plan again")
    return told
