"""One stage of the model on this rank: its layers, its parameters by global name, its input and output specs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.job.userobject import IN_A_RANK
from zbc.runtime.core.bundle import Packing
from zbc.runtime.core.current import ADDING
from zbc.runtime.core.remembered import Decisions, Kept, Place, as_before, renew
from zbc.runtime.core.slot import Slot, current_slot, swap_slot, using
from zbc.runtime.core.split import SplitLinear
from zbc.runtime.core.tape import Alone, Inputs, RecordedGraph, Tape, input_of
from zbc.runtime.core.tensors import Batch, Laid, Length, Part, TensorSpec
from zbc.runtime.seeding import Watch, seed_of, seeded

if TYPE_CHECKING:
    from zbc.runtime.features.offload.parcels import Parcel


Finish = Callable[[Tensor], Tensor]  # what F makes of a stage's output: a message, the loss


@dataclass(frozen=True)
class Traits:
    """Properties of a layer's forward, found by trials with random data (training/probing)."""

    random: bool = False
    overwrites: bool = False
    remembers: tuple[str, ...] = ()  # names of buffers inside the layer
    whole: bool = False
    carries: tuple[str, ...] = ()  # attributes inside the layer that its output depends on
    mixes: tuple[str, ...] = ()  # attributes that hold tensors that a backward needs
    adds: bool = False  # its backward adds gradients that do not scale with the loss


@dataclass(frozen=True)
class StageLayer:
    """A layer of a stage, and the known properties of its forward."""

    name: str
    module: nn.Module
    traits: Traits
    buffers: tuple[Place, ...] = ()  # those its forward changes
    compiled: Callable[[Tensor], Tensor] | None = None  # its compiled forward for training, if any

    @functools.cached_property
    def call(self) -> Callable[[Tensor], Tensor]:
        return self.module if self.compiled is None else self.compiled


class Ports(NamedTuple):
    """The ends of a stage: `takes` is the input of one microbatch, `gives` the output (None for the last stage, which
    ends in the loss); the packings of both, if they are several tensors; the memory layout of the input in one process,
    if known: transfers make tensors contiguous.

    `flows`: the input may get a gradient, since something before it trains; `passed`: in a trial the output got one,
    and one forward cannot prove that it never does (training/probing/shapes.py).
    """

    takes: TensorSpec
    gives: TensorSpec | None
    came: Packing | None
    goes: Packing | None
    laid: Laid
    flows: bool
    passed: bool


@dataclass
class Stage:
    """The layers and the ends (`Ports`) of one stage.

    `recompute`: the number of its first layers of which F keeps the inputs only, and which backward runs again.
    `spares`: the level of selective recompute of the others (again.py).
    """

    index: int
    layers: tuple[StageLayer, ...]
    takes: TensorSpec
    gives: TensorSpec | None
    seed: int
    device: torch.device
    autocast: AbstractContextManager[object]
    recompute: int = 0
    spares: int = 0
    flows: bool = True
    passed: bool = True
    parameters: dict[str, nn.Parameter] = field(init=False)
    casts: list[SplitLinear] = field(default_factory=list)
    laid: Laid | None = None
    came: Packing | None = None
    goes: Packing | None = None
    part: Part | None = None  # the slice of microbatches that it runs; None: whole microbatches
    asleep: frozenset[int] = frozenset()  # layers, by index, that are frozen in the current forward
    reads: str = ""  # the group of layers whose data it reads, if there are several groups
    inputs: tuple[int, ...] = ()  # the stages whose outputs are its arguments, if there are several
    fused: bool = False  # whether its linear layers add up weight gradients inside their products
    watch: Watch | None = None  # refuses draws of random numbers that no trial showed; of layers and losses of users
    slices: tuple[Stage, ...] = ()  # the stage of each slice, if microbatches have slices; this one is for the rest
    shorter: dict[Length, Stage] = field(default_factory=dict)  # the stages for shorter rows

    def at(self, part: int) -> Stage:
        """The stage that runs slice `part` of a microbatch."""
        return self.slices[part] if self.slices else self

    def of_rows(self, length: Length | None) -> Stage:
        """The stage that runs microbatches with rows of this length, with the same layers and weights."""
        if length is None or length.tokens == length.whole:
            return self
        found = self.shorter.get(length)
        if found is None:
            _ = self.alone, self._first_trained  # of all lengths together
            found = self.shorter[length] = copy.copy(self)
            for shaped in ("empty_input", "empty_grad", "returned"):
                vars(found).pop(shaped, None)
            found.takes, found.gives = self.takes.of_rows(length), self.gives and self.gives.of_rows(length)
            found.laid = self.laid and self.laid.of_rows(length)
        return found

    def __post_init__(self) -> None:
        self.parameters = {
            f"{layer.name}.{local}": p for layer in self.layers for local, p in layer.module.named_parameters()
        }

    @functools.cached_property
    def alone(self) -> Alone:
        """Copies gradients that share memory with tensors in use. First accessed when the parameters are final."""
        return Alone(self.parameters.values())

    @contextmanager
    def resting(self, layers: frozenset[int]) -> Iterator[list[nn.Parameter]]:
        """Freezes some layers, by index, in the forwards of its body, also when a backward runs them again; yields the
        frozen parameters."""
        _ = self._first_trained  # cached, so it must be computed before layers are frozen
        modules = [self.layers[index].module for index in layers]
        frozen = [p for module in modules for p in module.parameters() if p.requires_grad]
        before, self.asleep = self.asleep, layers
        for parameter in frozen:
            parameter.requires_grad = False
        try:
            yield frozen
        finally:
            self.asleep = before
            for parameter in frozen:
                parameter.requires_grad = True

    @functools.cached_property
    def casts_weights(self) -> bool:
        """Whether its linear layers cache casts of their weights over microbatches."""
        return not isinstance(self.autocast, nullcontext)

    @property
    def slotted(self) -> bool:
        """Whether its forwards need a slot even if the plan has BW, not B and W."""
        return self.casts_weights or self.spares > 0 or self.fused

    def forward(
        self, x: Tensor, step: int, mb: int, finish: Finish, slot: Slot | None, parcel: Parcel | None = None, /
    ) -> tuple[Tensor, Tape]:
        """`finish` of the stage's output (a message, the loss), and the tape for backward.

        A parcel is told which layer runs.

        Draws of dropout depend on (seed, step, microbatch, layer) alone. Raises E509 if a layer draws that did not draw
        in trials.
        """
        if slot is None and not (self.recompute or self.casts_weights):  # no slot is current between two ops
            y = self._through(x, step, mb, finish, parcel)
            return y, RecordedGraph(y)
        if slot is not None:
            slot.spares = self.spares
        before = swap_slot(slot)
        try:
            if self.recompute:
                return self._keep_inputs(x, step, mb, finish)
            if self.casts_weights:
                with self.autocast:
                    y = self._through(x, step, mb, finish, parcel)
            else:  # entering a context that does nothing costs as much as a small layer
                y = self._through(x, step, mb, finish, parcel)
            return y, RecordedGraph(y)
        finally:
            swap_slot(before)

    def _through(
        self, x: Tensor, step: int, mb: int, finish: Finish, parcel: Parcel | None = None, first: int = 0
    ) -> Tensor:
        for layer in self.layers[first:]:
            if parcel is not None:
                parcel.layer = layer.name
            if layer.buffers:
                renew(layer.buffers)
            x = self._run(layer, layer.call, x, self.seed, step, mb)
        return finish(x)

    @property
    def buffers(self) -> list[Place]:
        return [place for layer in self.layers for place in layer.buffers]

    @functools.cached_property
    def empty_input(self) -> Callable[[], Tensor]:
        return self.takes.maker(self.device)

    def empty_from(self, source: int) -> Tensor:
        """A buffer for the output of `source`, one of several stages that it reads."""
        if self.came is None:
            raise TypeError(f"stage {self.index} has one input")
        return self.came.parts[self.inputs.index(source)].laid.spec.empty(self.device)

    @functools.cached_property
    def empty_grad(self) -> Callable[[], Tensor]:
        return (self.returned or self.takes).maker(self.device)

    @functools.cached_property
    def returned(self) -> TensorSpec | None:
        """The spec of its output's gradient as it arrives: of several tensors only those that have one."""
        return self.gives if self.goes is None else self.goes.gradient

    def entered(self, batch: Batch) -> Tensor:
        """A microbatch of the data as the stage's input: of several entries its group's, or some as one carrier."""
        if isinstance(batch, Tensor):
            return batch
        names = [self.reads] if self.reads or self.came is None else self.came.alongside
        if missing := [name for name in names if name not in batch]:
            text = f"data: a microbatch has {', '.join(batch)}, and no {missing[0]} for stage {self.index}"
            raise ZbcError("E505", text, hint="give all samples the same entries")
        found = [batch[name] for name in names]
        return found[0] if self.reads or self.came is None else self.came.pack(found, "the data")

    def arrived(self, x: Tensor) -> Tensor:
        """A received input, which is contiguous, in the memory layout of one process, on which layers may depend."""
        return x if self.laid is None else self.laid.lay(x)

    def evaluate(self, x: Tensor, finish: Finish, *place: object) -> Tensor:
        """`finish` of the stage's output, without saving anything for a backward. Layers that draw random numbers even
        in evaluation use a seed made of `place`."""
        with using(Slot()), torch.no_grad(), self.autocast:
            for layer in self.layers:
                x = self._run(layer, layer.module, x, *place)
            return finish(x)

    def _keep_inputs(self, x: Tensor, step: int, mb: int, finish: Finish) -> tuple[Tensor, Tape]:
        layers, last, asleep = self.layers[: self.recompute], len(self.layers) - 1, self.asleep
        buffers: dict[int, list[Kept]] = {}  # layer -> its buffers before its forward
        now, decisions = ADDING.value, [Decisions() for _ in layers]

        def run(index: int, x: Tensor) -> Tensor:
            rests = self.resting(asleep & {index}) if asleep else nullcontext()
            # In backward as well, when it runs again.
            with self.autocast, rests, ADDING.using(now), decisions[index].again():
                y = self._run(layers[index], layers[index].call, x, self.seed, step, mb)
                return finish(y) if index == last else y

        def again(index: int) -> AbstractContextManager[None]:
            if (slot := current_slot()) is not None:
                slot.spares = 0
            return as_before(layers[index].buffers, buffers.pop(index)) if index in buffers else nullcontext()

        inputs: list[Tensor] = []
        first = 0 if x.requires_grad else self._first_trained
        for index in range(len(layers)):
            inputs.append(x)
            if layers[index].buffers:
                buffers[index] = renew(layers[index].buffers)
            if layers[index].compiled is None:
                with torch.no_grad():
                    x = run(index, x)
            else:  # as in the recompute: code compiled for no gradient has other results in the last bits
                x = run(index, input_of(index, x, first)).detach()
        if len(layers) > last:
            return x, Inputs(inputs, run, again, first)
        x = input_of(len(layers), x, first)
        with self.autocast:
            y = self._through(x, step, mb, finish, first=len(layers))
        return y, Inputs(inputs, run, again, first, (x, RecordedGraph(y)))

    def _run(self, layer: StageLayer, call: Callable[[Tensor], Tensor], x: Tensor, *place: object) -> Tensor:
        """`call`, a forward of a layer; its random draws depend on `place` and its name."""
        try:
            if layer.traits.overwrites:  # its input may be a weight, or a table that a layer returned
                x = x.clone()
            if layer.traits.random:
                with seeded(seed_of(*place, layer.name), self.device):
                    return call(x)
            if self.watch is None:
                return call(x)
            return self.watch.run(f"layer {layer.name}", call, x, compiled=call is layer.compiled)
        except IN_A_RANK as error:
            if not isinstance(error, ZbcError):  # these name it
                error.add_note(f"in layer {layer.name}, for {TensorSpec.of(x)}")
            raise

    @functools.cached_property
    def _first_trained(self) -> int:
        """The first layer with a parameter that trains; the number of layers if there is none."""
        trained = (any(p.requires_grad for p in layer.module.parameters()) for layer in self.layers)
        return next((index for index, trains in enumerate(trained) if trains), len(self.layers))

    def fit(self, y: Tensor) -> Tensor:
        """The output in the spec of the next stage's input. Raises E505 if its shape or type does not fit."""
        gives = self.gives
        if gives is None or (y.dtype is gives.dtype and y.shape == gives.shape):
            return y
        cast = self.casts_weights and y.dtype.is_floating_point and gives.dtype.is_floating_point
        if cast and y.shape == gives.shape:
            return y.to(gives.dtype)
        raise mismatch(f"output of stage {self.index}", y, gives)


def mismatch(what: str, found: Tensor, wanted: TensorSpec) -> ZbcError:
    """E505 for a tensor with another spec than the plan's; `what` names it."""
    text = f"run: {what} is {TensorSpec.of(found)}, it must be {wanted}"
    return ZbcError("E505", text, hint="every microbatch has the same shapes; layers must not depend on the data")
