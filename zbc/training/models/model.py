"""Named layers of `[model]`, each with a function that builds it, and the loss function.

Layers are named "embed", "layers.0", ..., "head" for the built-in families and "layers.0", ... for a factory's, or
"vision.0", ... in a group `vision` of a graph;
parameters `{layer}.{name inside it}`. Names and initial weights depend neither on the partition into stages nor on the
number of ranks.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from zbc.errors import ZbcError
from zbc.job import graph, spec, userobject
from zbc.runtime.core.bundle import ByName
from zbc.runtime.core.private import mse_kernel
from zbc.runtime.core.split import refuse_wrapped
from zbc.runtime.core.tensors import Loss
from zbc.runtime.features.tensor_parallel import Group
from zbc.runtime.features.words import cross_entropy as heads
from zbc.runtime.features.words import words
from zbc.runtime.features.words.words import AS_IS, PLAIN, Terms
from zbc.runtime.seeding import seed_of, seeded
from zbc.training.models import gpt
from zbc.training.probing.probe import refuse_untrainable

TIED = "embed.tokens.weight"  # the weight shared by embedding and head, under its name in the embedding


@dataclass(frozen=True)
class LayerPlan:
    """One layer that can be built on any rank: `make` takes no arguments and returns the module.

    Layers with the same `like` differ in their weights only, so output and parameter shapes of one hold for all. `fill`
    overwrites the initial weights of a built layer; `alter` then changes the layer, and draws new weights from a seed
    of its own.
    `ties` maps parameters to those of other layers: `{"logits.weight": "embed.tokens.weight"}`.
    `after`: in a graph the layers whose outputs it reads, in the order of its arguments; None: the previous layer.
    `compiles`: `model.compile` applies to it. `whole`: it gets all tokens, even if the ranks of a group share them.
    """

    name: str
    make: Callable[[], nn.Module]
    like: str | None = None
    fill: Callable[[nn.Module], None] | None = None
    alter: Callable[[nn.Module], None] | None = None
    ties: Mapping[str, str] = field(default_factory=dict)
    compiles: bool = False
    after: tuple[str, ...] | None = None
    whole: bool = False
    trials: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)  # see probing/shapes.py

    def build(self, seed: int) -> nn.Module:
        """The layer on the CPU with initial weights, drawn from a seed of its own, made of `seed` and the name."""
        with seeded(seed_of(seed, self.name)):
            module = self._call()
        refuse_wrapped(self.name, module)
        if self.fill is not None:
            self.fill(module)
        if self.alter is not None:
            with seeded(seed_of(seed, self.name, "alter")):
                self.alter(module)
        return module

    def on_meta(self, owners: Owners | None = None) -> nn.Module:
        """The layer without storage: shapes, dtypes and parameter names only. Raises E508 if `owners` has its
        parameters under another layer, E509 if it cannot be trained in a pipeline."""
        try:
            with torch.device("meta"):
                module = self.make()
        except userobject.FAILURES:  # a constructor that looks at values, such as torch.linspace(...)[i].item()
            with seeded(0):
                module = self._call()
        refuse_untrainable(self.name, module)
        if owners is not None:
            owners.add(self.name, module, self.ties)
        module = hollow(module, "meta")
        if self.alter is not None:
            self.alter(module)
        return module

    def _call(self) -> nn.Module:
        module = userobject.call(self.make, {}, self.name, "model layer")
        if not isinstance(module, nn.Module):
            text = f"run: the builder of {self.name} returned {type(module).__name__}, not a torch.nn.Module"
            raise ZbcError("E502", text, hint="return modules, or functions without arguments that return modules")
        return module


class Owners:
    """The layer of each parameter; detects builders that return the same module twice."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}

    def add(self, name: str, layer: nn.Module, tied: Collection[str] = ()) -> None:
        """Adds a layer. Raises E508 if another layer has one of its parameters, except those in `tied`."""
        for parameter in [p for local, p in layer.named_parameters() if local not in tied]:
            other, owner = self._known.get(id(parameter), (None, name))
            if other is not None and other() is parameter:  # ids of freed parameters are reused
                raise _shared([owner, name])
            self._known[id(parameter)] = weakref.ref(parameter), name


def _shared(names: list[str]) -> ZbcError:
    """E508 for layers that share a parameter: on two ranks, each would train its own copy."""
    text = f"model: {' and '.join(names)} share a parameter"
    hint = 'say which are one in [model.ties], as "layers.3.weight" = "layers.0.weight", or give each its own'
    return ZbcError("E508", text, hint=hint)


def layers(model: spec.Model, seed: int) -> list[LayerPlan]:
    """All layers in order. Raises E502 (factory) or E505 (another number of layers than in the job)."""
    return _family(model) if model.builtin else _factory(model, seed)


def _family(model: spec.Model) -> list[LayerPlan]:
    if model.hidden is None or model.heads is None or model.vocab is None or model.seq_len is None:
        text = f"config: model.hidden, heads, vocab and seq_len are needed for family {model.family}"
        raise ZbcError("E105", text)
    ties, block = {"logits.weight": TIED} if model.tie_embeddings else {}, functools.partial(gpt.Block, model)
    return [
        LayerPlan("embed", functools.partial(gpt.Embed, model)),
        *(LayerPlan(f"layers.{i}", block, like="block", compiles=True) for i in range(model.layers)),
        LayerPlan("head", functools.partial(gpt.GptHead, model), ties=ties),
    ]


def _factory(model: spec.Model, seed: int) -> list[LayerPlan]:
    """Calls the user's factory. Ready-made modules are drawn from one seed in its order, so they are equal on all
    ranks; builders are cheaper, since a rank then builds only its own layers."""
    factory = userobject.load(model.family, "model.family")
    with seeded(seed_of(seed, "model")):
        made = userobject.call(factory, model.given, model.family, "model.family")
    if model.graph:
        return _grouped(model, made)
    if isinstance(made, Mapping):
        text = f"model: {model.family} returned groups of layers ({', '.join(map(str, made))}), there is no model.graph"
        raise ZbcError("E502", text, hint="say in model.graph how many layers each has, and what it reads")
    found = _as_list(made, model.family)
    if len(found) != model.layers:
        text = f"model: {model.family} returned {len(found)} layers, model.layers is {model.layers}"
        raise ZbcError("E505", text, hint=f"set model.layers = {len(found)} and plan again")
    _refuse_shared(found, [_ties(model, i) for i in range(len(found))])
    return [
        LayerPlan(f"layers.{i}", _builder(item), getattr(item, "like", None), ties=_ties(model, i), compiles=True)
        for i, item in enumerate(found)
    ]


def _grouped(model: spec.Model, made: Any) -> list[LayerPlan]:
    """The layers of a graph, group by group. Raises E502 for no dict, E505 for other groups or numbers of layers."""
    if not isinstance(made, Mapping):
        text = f"model: {model.family} returned {type(made).__name__}, and model.graph has groups of layers"
        raise ZbcError("E502", text, hint="return a dict with a list of layers for each group, or drop model.graph")
    if {*made} != {*model.graph}:
        text = f"model: {model.family} returned groups {', '.join(sorted(map(str, made)))}"
        text += f", model.graph has {', '.join(sorted(model.graph))}"
        raise ZbcError("E505", text, hint="name the same groups in both, and plan again")
    plans = list[LayerPlan]()
    for group, span in graph.spans(model).items():
        found = _as_list(made[group], f"group {group} of {model.family}")
        if len(found) != len(span):
            text = f"model: {model.family} returned {len(found)} layers for {group}, model.graph has {len(span)}"
            raise ZbcError("E505", text, hint=f"write {len(found)} in graph.{group} and model.layers, and plan again")
        after = tuple(f"{source}.{model.groups[source] - 1}" for source in model.reads[group])
        for i, item in enumerate(found):
            plans.append(LayerPlan(f"{group}.{i}", _builder(item), after=after, compiles=True))
            after = (f"{group}.{i}",)
    _refuse_shared([item for group in graph.spans(model) for item in made[group]], [{}] * len(plans))
    return plans


def _ties(model: spec.Model, layer: int) -> dict[str, str]:
    """The parameters of a layer that `model.ties` ties to another layer's."""
    start = f"layers.{layer}."
    return {name.removeprefix(start): owner for name, owner in model.tied.items() if name.startswith(start)}


def _as_list(made: Any, family: str) -> list[Any]:
    hint = "return a list of modules, or of functions without arguments that return modules"
    if not hasattr(made, "__iter__"):
        text = f"model: {family} returned {type(made).__name__}, not a list of layers"
        raise ZbcError("E502", text, hint=hint)
    given: Callable[[], Any] = functools.partial(list, made)  # which may run more of the factory
    found: list[Any] = userobject.call(given, {}, family, "model.family")
    for index, item in enumerate(found):
        if not callable(item):
            text = f"model: layer {index} of {family} is {type(item).__name__}, not a module or a builder"
            raise ZbcError("E502", text, hint=hint)
    return found


def _builder(item: Any) -> Callable[[], nn.Module]:
    return (lambda: item) if isinstance(item, nn.Module) else item


def _refuse_shared(found: list[Any], ties: Sequence[Mapping[str, str]]) -> None:
    """Raises E508 for parameters shared by ready-made layers that are not in `ties`."""
    owners = Counter(
        id(p)
        for item, tied in zip(found, ties, strict=True)
        if isinstance(item, nn.Module)
        for p in {id(p): p for name, p in item.named_parameters() if name not in tied}.values()
    )
    if shared := {key for key, count in owners.items() if count > 1}:
        guilty = [
            f"layers.{i}"
            for i, item in enumerate(found)
            if isinstance(item, nn.Module) and any(id(p) in shared for p in item.parameters())
        ]
        raise _shared(guilty)


def hollow(module: nn.Module, device: torch.device | str) -> nn.Module:
    """A copy with parameters and buffers of the same shapes on `device`, their values undefined. The module itself,
    which may be ready-made and in use, is left alone."""

    def empty(t: Tensor) -> Tensor:
        return torch.empty(t.shape, dtype=t.dtype, device=device)

    memo: dict[int, Any] = {id(t): empty(t) for t in module.buffers()}
    memo |= {id(p): nn.Parameter(empty(p), p.requires_grad) for p in module.parameters()}
    try:
        return copy.deepcopy(module, memo)
    except userobject.FAILURES as error:
        text = f"model: {type(module).__name__} cannot be copied, and so not be looked at"
        hint = "make what cannot be copied (locks, files, generators) in forward, or outside of the layer"
        if str(error).startswith("Only Tensors created explicitly"):
            text = f"model: {type(module).__name__} keeps a tensor with a history of autograd, and cannot be looked at"
            hint = "compute it in forward: torch.nn.utils.parametrizations instead of the old weight_norm"
        details = [f"{type(error).__name__}: {str(error).partition('.')[0]}"]
        raise ZbcError("E509", text, hint=hint, details=details) from error


def loss(name: str) -> Loss:
    """`cross_entropy` (logits (..., C), targets (...)), `mse`, or a user's function (output, target) -> scalar, which
    gets several targets by name."""
    return LOSSES[name] if name in LOSSES else ByName(userobject.load(name, "model.loss"))


def mse(output: Tensor, targets: Tensor) -> Tensor:
    """The mean of squared differences; tensors of different shapes are left to torch."""
    if mse_kernel is None or output.shape != targets.shape:
        return functional.mse_loss(output, targets)
    return mse_kernel(output, targets, 1)  # type: ignore[no-any-return]  # 1: the mean


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood over all leading dimensions, in float32 at least.

    Under autocast on a GPU torch computes it in bfloat16 for bfloat16 logits, on a CPU it does not.
    Raises E505 for targets of another shape than the logits without classes, and if torch's order would fit as well.
    """
    shape, others = logits.shape, (logits.shape[0], *logits.shape[2:])
    if shape[:-1] != targets.shape or (len(shape) > 3 and others == targets.shape):
        text = f"run: cross_entropy of an output {list(shape)} and a target {list(targets.shape)}"
        hint = "classes are the last dimension of the output, the target has the ones before; for torch's order, give"
        raise ZbcError("E505", text, hint=f"{hint} a loss that calls torch's cross_entropy")
    return functional.cross_entropy(words.wide(logits.flatten(0, -2)), targets.flatten())


LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "mse": mse}


# ---- the loss as ranks compute it: of sharded logits, with more terms than torch's, or by chunks ----------------


def by_words(chosen: spec.Model) -> bool:
    """Whether the loss can be computed from sharded logits."""
    return chosen.causal and chosen.loss == "cross_entropy"


def terms_of(chosen: spec.Model) -> Terms:
    return Terms(chosen.z_losses[0], chosen.label_smoothing, chosen.label_smoothing / (chosen.vocab or 1))


def loss_of(chosen: spec.Model, group: Group | None, layers: Iterable[nn.Module]) -> Loss:
    """The loss of a model; `layers` are this rank's, of which the head has the settings of a loss by chunks."""
    terms = terms_of(chosen)
    if not by_words(chosen) or (group is None and terms == PLAIN and chosen.loss_chunk is None):
        return loss(chosen.loss)
    return heads.cross_entropy(chosen.vocab or 0, terms, group, _chunks(layers))


def log_probabilities_of(
    chosen: spec.Model, group: Group | None, layers: Iterable[nn.Module]
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The function that computes log probabilities of targets; None if the model's output is not logits."""
    if not by_words(chosen):
        return None
    return heads.log_probabilities(chosen.vocab or 0, group, _chunks(layers))


def _chunks(layers: Iterable[nn.Module]) -> heads.Chunks | None:
    found: Iterable[Any] = (layer for layer in layers if getattr(layer, "chunk", None) is not None)
    return next((heads.Chunks(head.logits, head.chunk, getattr(head, "shaped", AS_IS)) for head in found), None)
