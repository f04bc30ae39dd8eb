"""The optimizer of one stage on one rank, behind one interface.

Handlers know stages by `StageOptimizer` alone: whether the weights that forward reads are what the optimizer updates,
a low-precision copy of it, or a part of it that other ranks complete is the business of the implementation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from zbc.job import spec
from zbc.plan import dealing
from zbc.runtime.core.muon import Whole, grouped, muon
from zbc.runtime.core.precision import lower_precision
from zbc.runtime.core.private import scale_all
from zbc.runtime.core.split import SplitLinear
from zbc.runtime.core.validate import squares_of
from zbc.runtime.transports.transport import Transport

NO_WHOLES: Mapping[str, Whole] = {}


class Held(NamedTuple):
    """What a checkpoint keeps of a parameter: its elements from `start` on, in memory order, and the optimizer's state.

    `shape` is that of the whole parameter. `tensor` is what the optimizer steps, a master or the parameter itself, and
    what its state is kept for; of a parameter that does not train it is the parameter.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    tensor: nn.Parameter
    shared: bool = True  # other ranks with a copy of the stage hold the same


class StageOptimizer(Protocol):
    """One stage's weights and what updates them.

    `parameters`: the working weights, those that forward reads and whose `.grad` backward fills, by global name.
    `optimizer`: the torch optimizer that holds the state; None if nothing of the stage trains here.
    `apart`: other ranks with a copy of the stage step other parts of it; `mirrored`: others have the same part.
    """

    @property
    def apart(self) -> bool: ...

    @property
    def mirrored(self) -> bool: ...

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer | None: ...

    def squares(self) -> dict[str, Tensor]:
        """Sums of squares of each gradient this rank answers for, one float64 number per chunk, by global name."""

    def step(self, scale: float | None) -> None:
        """Multiply the gradients by `scale` (None: leave them) and update the working weights with them."""

    def commit(self, scale: float | None) -> None:
        """The same of masters and the optimizer's state alone: the working weights stay as they are."""

    def drop(self) -> None:
        """End the step: drop the gradients, and the casts of weights that may have changed."""

    def stepped(self, transport: Transport, *, skipped: bool) -> None:
        """A step is over: let other ranks have what they are to have of it."""

    def held(self) -> list[Held]:
        """What this rank would write down. Together the ranks with a copy of the stage hold all of it."""

    def incomplete(self) -> list[Held]:
        """Working weights of which other ranks hold parts."""

    def loaded(self) -> None:
        """What is held, and all of what is incomplete, has been overwritten from outside."""


class InPlace:
    """The ordinary one: torch's optimizer updates the working weights themselves."""

    apart = mirrored = False

    def __init__(
        self,
        options: spec.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        casts: Iterable[SplitLinear] = (),
        wholes: Mapping[str, Whole] = NO_WHOLES,
    ) -> None:
        self.parameters = parameters
        self.optimizer = torch_optimizer(options, parameters, wholes)
        self._casts = tuple(casts)

    def squares(self) -> dict[str, Tensor]:
        return squares_of({name: p.grad for name, p in self.parameters.items() if p.grad is not None})

    def step(self, scale: float | None) -> None:
        _scale(self.parameters.values(), scale)
        if self.optimizer is not None:
            self.optimizer.step()

    commit = step  # there are no masters

    def drop(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        for cast in self._casts:
            cast.forget()

    def stepped(self, transport: Transport, *, skipped: bool) -> None:
        """Nobody else needs what was stepped here."""

    def held(self) -> list[Held]:
        return [Held(name, 0, tuple(p.shape), p) for name, p in self.parameters.items()]

    def incomplete(self) -> list[Held]:
        return []

    def loaded(self) -> None:
        self.drop()


class Masters(InPlace):
    """Working weights that are copies: the optimizer updates master weights, which are then published.

    Working weights that are `lowered` to another type have float32 masters and gradients, and so is the sum of their
    gradients over microbatches; others have masters of their own type.
    """

    def __init__(
        self,
        options: spec.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        casts: Iterable[SplitLinear] = (),
        wholes: Mapping[str, Whole] = NO_WHOLES,
        *,
        lowered: torch.dtype | None,
    ) -> None:
        self.parameters = parameters
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        wide = {name: lowered is not None and p.is_floating_point() for name, p in trained.items()}  # not complex ones
        kinds = {name: torch.float32 if wide[name] else p.dtype for name, p in trained.items()}
        self.masters = {name: nn.Parameter(p.detach().to(kinds[name], copy=True)) for name, p in trained.items()}
        self.optimizer = torch_optimizer(options, self.masters, wholes)
        self._casts = tuple(casts)
        self._pairs = [(p, self.masters[name]) for name, p in trained.items()]
        lower_precision(parameters.values(), lowered)

    def step(self, scale: float | None) -> None:
        self.commit(scale)
        self.publish()

    def drop(self) -> None:  # casts go where weights are published
        for parameter in self.parameters.values():
            parameter.grad = None

    def held(self) -> list[Held]:
        return [Held(name, 0, tuple(p.shape), self.masters.get(name, p)) for name, p in self.parameters.items()]

    def loaded(self) -> None:
        self.publish()
        self.drop()

    def commit(self, scale: float | None) -> None:
        _scale(self.parameters.values(), scale)
        self._step(self._pairs)

    def publish(self) -> None:
        """Write the working weights again from the masters."""
        self._publish(self._pairs)

    def tentative(self) -> None:
        """Write the working weights as if the step were taken as it is; masters, state and gradients stay.

        The update runs on copies of the masters and their state, by the very code that `commit` runs on themselves, so
        that it has the same bits. Copies live for a few parameters at a time.
        """
        optimizer = self.optimizer
        if optimizer is None:
            return
        for part in dealing.batches([parameter.numel() for parameter, _ in self._pairs]):
            pairs = self._pairs[part.start : part.stop]
            kept = [(master, master.data, optimizer.state.pop(master, None)) for _, master in pairs]
            try:
                for master, data, state in kept:
                    master.data = data.clone()
                    if state is not None:
                        optimizer.state[master] = {key: _copy(value) for key, value in state.items()}
                self._step(pairs)
                self._publish(pairs)
            finally:
                for master, data, state in kept:
                    master.data = data
                    optimizer.state.pop(master, None)
                    if state is not None:
                        optimizer.state[master] = state

    def _step(self, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> None:
        if self.optimizer is None:
            return
        for parameter, master in pairs:
            master.grad = parameter.grad
        self.optimizer.step()
        for _, master in pairs:
            master.grad = None

    def _publish(self, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> None:
        for parameter, master in pairs:
            parameter.data.copy_(master.data)  # leaves no version behind: graphs made before this are of no use
        for cast in self._casts:
            cast.forget()


class OptimizerOver:
    """A `StageOptimizer` around another one: as that, but for what its own class says."""

    def __init__(self, inner: StageOptimizer) -> None:
        self._inner = inner
        self.also = list[str]()  # what others keep of a parameter, in the state of its optimizer

    @property
    def apart(self) -> bool:
        return self._inner.apart

    @property
    def mirrored(self) -> bool:
        return self._inner.mirrored

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self._inner.parameters

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._inner.optimizer

    def squares(self) -> dict[str, Tensor]:
        return self._inner.squares()

    def step(self, scale: float | None) -> None:
        self._inner.step(scale)

    def commit(self, scale: float | None) -> None:
        self._inner.commit(scale)

    def drop(self) -> None:
        self._inner.drop()

    def stepped(self, transport: Transport, *, skipped: bool) -> None:
        self._inner.stepped(transport, skipped=skipped)

    def held(self) -> list[Held]:
        return self._inner.held()

    def incomplete(self) -> list[Held]:
        return self._inner.incomplete()

    def loaded(self) -> None:
        self._inner.loaded()


Found = TypeVar("Found")


def inside(optimizer: StageOptimizer, kind: type[Found]) -> Found | None:
    """The one of that type: itself, or one that it is around."""
    while not isinstance(optimizer, kind):
        if not isinstance(optimizer, OptimizerOver):
            return None
        optimizer = optimizer._inner
    return optimizer


def also_kept(optimizer: StageOptimizer, key: str) -> None:
    """An optimizer around this one leaves something of each parameter's shape in its state: checkpoints know of it."""
    while isinstance(optimizer, OptimizerOver):
        optimizer.also.append(key)
        optimizer = optimizer._inner


def set_rate(stage: StageOptimizer, rate: float) -> None:
    """The learning rate of the steps from here on."""
    for group in () if stage.optimizer is None else stage.optimizer.param_groups:
        group["lr"] = rate * group.get("times", 1.0)


def build_optimizer(
    options: spec.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    casts: Iterable[SplitLinear] = (),
    wholes: Mapping[str, Whole] = NO_WHOLES,
    *,
    lowered: torch.dtype | None,
    ahead: bool = False,
) -> StageOptimizer:
    """The optimizer that a job asks for, over the parameters of one stage.

    `lowered` is the type that forward reads, if it is not the parameters' own; `ahead`: steps may be tentative;
    `wholes`: of the parameters that other ranks have other parts of.
    """
    if lowered is None and not ahead:
        return InPlace(options, parameters, casts, wholes)
    return Masters(options, parameters, casts, wholes, lowered=lowered)


def _scale(parameters: Iterable[nn.Parameter], scale: float | None) -> None:
    """Multiply the gradients by `scale`, in place."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if scale is not None and grads:
        scale_all(grads, scale)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def kept_by(options: spec.Optimizer, *, matrix: bool = False) -> dict[str, bool]:
    """What the optimizer keeps for a parameter, by name, and whether it has the parameter's shape or is one number;
    `matrix`: of one that Muon steps."""
    tried = nn.Parameter(torch.zeros((2, 2) if matrix else 2))
    tried.grad = torch.zeros_like(tried)
    optimizer = torch_optimizer(options.model_copy(update={"groups": []}), {"": tried})
    if optimizer is None:
        return {}
    optimizer.step()
    found = optimizer.state[tried]
    return {key: found[key].shape == tried.shape for key in sorted(found) if isinstance(found[key], Tensor)}


def torch_optimizer(
    options: spec.Optimizer, named: Mapping[str, nn.Parameter], wholes: Mapping[str, Whole] = NO_WHOLES
) -> torch.optim.Optimizer | None:
    """`torch.optim` AdamW, Adam or SGD, or Muon, over the parameters that train; None if none does.

    On cuda the fused kernels: one launch for all parameters instead of several per parameter.
    """
    trained = {name: p for name, p in named.items() if p.requires_grad}
    if not trained:
        return None
    fused = True if all(p.is_cuda for p in trained.values()) else None
    decay = options.weight_decay
    groups: Any = grouped(options, trained) if options.groups else list(trained.values())
    if options.kind == "sgd":
        return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, weight_decay=decay, fused=fused)
    kind = torch.optim.Adam if options.kind == "adam" else torch.optim.AdamW
    made = partial(kind, lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=decay, fused=fused)
    return muon(options, trained, made, wholes) if options.kind == "muon" else made(groups)
