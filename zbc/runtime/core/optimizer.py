"""The optimizer of one stage on one rank, behind one interface.

Handlers use `StageOptimizer` only. Its implementations differ in the weights that forward reads: the ones the optimizer
updates, a low-precision copy of them, or weights of which this rank updates a shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from zbc.job import spec
from zbc.ops import EXPERTS, WORDS, home_of
from zbc.plan import dealing
from zbc.runtime.core import rounded
from zbc.runtime.core.muon import Wholes, grouped, muon
from zbc.runtime.core.private import scale_all
from zbc.runtime.core.split import SplitLinear
from zbc.runtime.core.tensors import lower_precision
from zbc.runtime.core.validate import squares_of
from zbc.runtime.transports.transport import Transport

if TYPE_CHECKING:
    from zbc.runtime.core.state import Worker

Named = Mapping[str, nn.Parameter]  # by global name
Torch = torch.optim.Optimizer | None  # None if nothing trains
NO_WHOLES: Wholes = {}


class Held(NamedTuple):
    """A checkpoint's entry of a parameter: its elements from `start` on, in memory order, and the optimizer's state.
    `shape` is the whole parameter's. `tensor` is the tensor that the optimizer updates and has state for, a master or
    the parameter itself; if the parameter does not train, it is the parameter."""

    name: str
    start: int
    shape: tuple[int, ...]
    tensor: nn.Parameter
    shared: bool = True  # other ranks with a replica of the stage hold the same


class StageOptimizer:
    """One stage's weights and their optimizer: here around an `inner` one, of which subclasses change some methods.

    `parameters`: the working weights, which forward reads and whose `.grad` backward fills, by global name.
    `optimizer`: the torch optimizer that holds the state; None if nothing of the stage trains here.
    `apart`: other ranks with a replica of the stage update other shards; `mirrored`: others have the same shard.
    """

    parameters: Named
    optimizer: Torch
    apart = mirrored = False

    def __init__(self, inner: StageOptimizer) -> None:
        self._inner, self.apart, self.mirrored = inner, inner.apart, inner.mirrored
        self.parameters, self.optimizer = inner.parameters, inner.optimizer
        self.also = list[str]()  # keys of wrappers in the optimizer's state of a parameter

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients with which this rank updates, and the names of their parameters."""
        return self._inner.gradients()

    def squares(self) -> dict[str, Tensor]:
        """Sums of squares of each gradient this rank reports, one float64 number per chunk, by global name."""
        return self._inner.squares()

    def step(self, scale: float | None) -> None:
        """Multiplies the gradients by `scale` (None: unchanged) and updates the working weights with them."""
        self._inner.step(scale)

    def commit(self, scale: float | None) -> None:
        """As `step`, for masters and the optimizer's state only: the working weights stay as they are."""
        self._inner.commit(scale)

    def drop(self) -> None:
        """Ends the step: drops the gradients, and the casts of weights that may have changed."""
        self._inner.drop()

    def stepped(self, transport: Transport, *, skipped: bool) -> None:
        """Publishes the updated weights to other ranks, after a step."""
        self._inner.stepped(transport, skipped=skipped)

    def held(self) -> list[Held]:
        """This rank's entries of a checkpoint. Together the ranks with a replica of the stage hold all of it."""
        return self._inner.held()

    def incomplete(self) -> list[Held]:
        """Working weights that are sharded over other ranks, too."""
        return self._inner.incomplete()

    def loaded(self) -> None:
        """The tensors of `held`, and the full `incomplete` weights, have been overwritten from outside."""
        self._inner.loaded()

    def state_of(self, stepped: Tensor) -> dict[str, Any] | None:
        """The optimizer's state of a parameter, where a wrapper may keep a tensor; None before Adam has made its own,
        for which it would take any."""
        state: dict[str, Any] = {} if self.optimizer is None else self.optimizer.state[stepped]
        return state if state or isinstance(self.optimizer, torch.optim.SGD) else None


class InPlace(StageOptimizer):
    """The default `StageOptimizer`: torch's optimizer updates the working weights themselves, also `lowered` ones."""

    def __init__(self, parameters: Named, optimizer: Torch, casts: Sequence[SplitLinear] = ()) -> None:
        self.parameters, self.optimizer, self._casts = parameters, optimizer, casts

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, p.grad) for name, p in self.parameters.items() if p.grad is not None)

    def squares(self) -> dict[str, Tensor]:
        return squares_of(dict(self.gradients()))

    def step(self, scale: float | None) -> None:
        _scale(self.parameters.values(), scale)
        if self.optimizer is not None:
            rounded.step(self.optimizer)

    commit = step  # there are no masters

    def drop(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        for cast in self._casts:
            cast.forget()

    def stepped(self, transport: Transport, *, skipped: bool) -> None:
        """Does nothing: no other rank needs the result of this step."""

    def held(self) -> list[Held]:
        return [Held(name, 0, tuple(p.shape), p) for name, p in self.parameters.items()]

    def incomplete(self) -> list[Held]:
        return []

    def loaded(self) -> None:
        self.drop()


class Masters(InPlace):
    """Working weights that are copies: the optimizer updates master weights, which are then published. Working weights
    that are `lowered` to another type have float32 gradients, summed over microbatches in float32."""

    def __init__(self, parameters: Named, optimizer: Torch, casts: Sequence[SplitLinear], masters: Named) -> None:
        super().__init__(parameters, optimizer, casts)
        self.masters, self._pairs = masters, [(parameters[name], master) for name, master in masters.items()]

    def step(self, scale: float | None) -> None:
        self.commit(scale)
        self.publish()

    def drop(self) -> None:  # casts are dropped when weights are published
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
        """Rewrites the working weights from the masters."""
        self._publish(self._pairs)

    def tentative(self) -> None:
        """Writes the working weights as if the step were taken unclipped; masters, state and gradients stay unchanged.
        The update runs on copies of the masters and their state, by the same code as `commit`, so that the results are
        bitwise equal. Copies exist for a few parameters at a time."""
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
                        tensors = {key: x.clone() for key, x in state.items() if isinstance(x, Tensor)}
                        optimizer.state[master] = {**state, **tensors}
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
        rounded.step(self.optimizer)
        for _, master in pairs:
            master.grad = None

    def _publish(self, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> None:
        for parameter, master in pairs:
            parameter.data.copy_(master.data)  # keeps the version: no graph made before this is used again
        for cast in self._casts:
            cast.forget()


Found = TypeVar("Found")


def inside(optimizer: StageOptimizer, kind: type[Found]) -> Found | None:
    """The optimizer of that type: `optimizer` itself or one that it wraps; None if there is none."""
    while not isinstance(optimizer, kind):
        if isinstance(optimizer, InPlace):
            return None
        optimizer = optimizer._inner
    return optimizer


def also_kept(optimizer: StageOptimizer, key: str) -> None:
    """Registers for checkpoints that a wrapper keeps a tensor of each parameter's shape under `key` in the state."""
    while not isinstance(optimizer, InPlace):
        optimizer.also.append(key)
        optimizer = optimizer._inner


def set_rate(stage: StageOptimizer, rate: float) -> None:
    for group in () if stage.optimizer is None else stage.optimizer.param_groups:
        group["lr"] = rate * group.get("times", 1.0)


def build_optimizer(
    options: spec.Optimizer,
    parameters: Named,
    casts: Iterable[SplitLinear] = (),
    wholes: Wholes = NO_WHOLES,
    *,
    lowered: torch.dtype | None,
    masters: bool = True,
    ahead: bool = False,
) -> StageOptimizer:
    """The optimizer that a job asks for, over the parameters of one stage. `lowered` is the type that forward reads, if
    it is not the parameters' own; `masters`: it then updates float32 masters of them; `ahead`: steps may be tentative;
    `wholes`: for parameters that are sharded over ranks."""
    if not ahead and (lowered is None or not masters):
        lower_precision(parameters.values(), lowered)
        return InPlace(parameters, torch_optimizer(options, parameters, wholes), tuple(casts))
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items() if p.requires_grad}
    lower_precision(copies.values(), torch.float32 if masters and lowered is not None else lowered)
    made = Masters(parameters, torch_optimizer(options, copies, wholes), tuple(casts), copies)
    lower_precision(parameters.values(), lowered)
    return made


def _scale(parameters: Iterable[nn.Parameter], scale: float | None) -> None:
    if scale is not None and (grads := [p.grad for p in parameters if p.grad is not None]):
        scale_all(grads, scale)


def kept_by(options: spec.Optimizer, *, matrix: bool = False) -> dict[str, bool]:
    """The optimizer's state of a parameter: for each tensor, by name, whether it has the parameter's shape or is one
    number; `matrix`: for a parameter that Muon updates."""
    tried = nn.Parameter(torch.zeros((2, 2) if matrix else 2))
    tried.grad = torch.zeros_like(tried)
    optimizer = torch_optimizer(options.model_copy(update={"groups": []}), {"": tried})
    if optimizer is None:
        return {}
    optimizer.step()
    state = optimizer.state[tried]
    return {key: state[key].shape == tried.shape for key in sorted(state) if isinstance(state[key], Tensor)}


def torch_optimizer(options: spec.Optimizer, named: Named, wholes: Wholes = NO_WHOLES) -> Torch:
    """`torch.optim` AdamW, Adam or SGD, or Muon, over the parameters that train; None if none does. On cuda it uses the
    fused kernels, if no number is complex: one launch for all parameters instead of several each."""
    trained = {name: p for name, p in named.items() if p.requires_grad}
    if not trained:
        return None
    fused = True if all(p.is_cuda and not p.is_complex() for p in trained.values()) else None
    decay = options.weight_decay
    groups = grouped(options, trained)
    if options.kind == "sgd":
        return torch.optim.SGD(groups, lr=options.rates[1], momentum=options.momentum, weight_decay=decay, fused=fused)
    kind = torch.optim.Adam if options.kind == "adam" else torch.optim.AdamW
    made = partial(kind, lr=options.rates[1], betas=options.betas, eps=options.eps, weight_decay=decay, fused=fused)
    return muon(options, trained, made, wholes) if options.kind == "muon" else made(groups)


def counted(worker: Worker) -> list[StageOptimizer]:
    """The optimizers of the stages whose gradients this rank reports in the norm of all. Of several replicas of a stage
    the one in pipe 0 of the first pipeline reports; if they shard its optimizer, each reports its shard, and if
    replicas do not sum gradients, each reports its own."""
    rank, placement = worker.plan.rank, worker.placement
    run, optimizers = worker.topology, list[StageOptimizer]()
    for owner, optimizer in worker.optimizers.items():
        alone = owner == WORDS or placement.rank_of(home_of(owner)) == rank
        first = run.first(worker.rank, worker.layout.apart) if owner <= EXPERTS else worker.within == 0
        if (optimizer.apart and not optimizer.mirrored) or (alone and (optimizer.apart or first)):
            optimizers.append(optimizer)
    return optimizers


def primary(worker: Worker) -> dict[str, nn.Parameter]:
    """The weights that this rank saves: each weight of the model is saved by one rank, in the first pipeline."""
    rank, placement = worker.plan.rank, worker.placement
    mine = [owner for owner in worker.optimizers if owner != WORDS and placement.rank_of(home_of(owner)) == rank]
    first = worker.topology.first(worker.rank)
    owners = [owner for owner in mine if (first if owner <= EXPERTS else worker.copy == 0)]
    parameters = {name: p for s in owners for name, p in worker.optimizers[s].parameters.items()}
    for feature in worker.features:
        parameters = feature.answers(worker, parameters)
    return parameters


def squares(worker: Worker) -> dict[str, Tensor]:
    """Sums of squares of the gradients this rank reports, by parameter name; see `StageOptimizer.squares`."""
    sums = {name: value for optimizer in counted(worker) for name, value in optimizer.squares().items()}
    for feature in worker.features:
        sums = feature.answers(worker, sums)
    return sums
