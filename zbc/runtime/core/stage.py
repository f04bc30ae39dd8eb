"""One stage of the model on this rank: its layers, its parameters by global name, and what goes in and out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.job.userobject import IN_A_RANK
from zbc.runtime.core.alone import Alone
from zbc.runtime.core.bundle import Packing
from zbc.runtime.core.remembered import Decisions, Kept, Place, as_before, renew
from zbc.runtime.core.slot import Slot, swap_slot
from zbc.runtime.core.split import SplitLinear
from zbc.runtime.core.tape import Inputs, RecordedGraph, Tape, input_of
from zbc.runtime.core.tensors import Laid, TensorSpec
from zbc.runtime.seeding import Look, accused, drawing, seed_of

if TYPE_CHECKING:
    from zbc.runtime.features.parcels import Parcel
    from zbc.runtime.features.slicing import Part
from zbc.runtime.features.added import adding_to, current_adding


@dataclass(frozen=True)
class Traits:
    """What tries with made-up numbers found out of a layer's forward (training/probing)."""

    random: bool = False
    overwrites: bool = False
    remembers: tuple[str, ...] = ()  # names of buffers inside the layer
    whole: bool = False
    carries: tuple[str, ...] = ()  # attributes inside the layer that its output follows
    mixes: tuple[str, ...] = ()  # attributes that hold what a backward needs


@dataclass(frozen=True)
class StageLayer:
    """A layer of a stage, and what the runtime knows of its forward."""

    name: str
    module: nn.Module
    traits: Traits
    buffers: tuple[Place, ...] = ()  # those its forward changes
    compiled: Callable[[Tensor], Tensor] | None = None  # its forward in training, if that is another
    wary: bool = False  # seeded though no trial saw it draw: another layer of its stage does
    suspect: bool = False  # some layer of the rank draws from a generator that nobody seeds

    @functools.cached_property
    def call(self) -> Callable[[Tensor], Tensor]:
        """Its forward in training."""
        return self.module if self.compiled is None else self.compiled

    @functools.cached_property
    def plain(self) -> bool:
        """Whether nothing needs to be done around its forward."""
        return not (self.seeded or self.suspect or self.traits.overwrites or self.buffers)

    @property
    def seeded(self) -> bool:
        """Whether its forward starts from a seed of its own."""
        return self.traits.random or self.wary


@dataclass
class Stage:
    """`takes` is the input of one microbatch, `gives` the output (None behind the last stage, where the loss is).

    `flows`: the input may get a gradient; `passed`: a trial saw that of the output arrive (training/probing/shapes.py).
    `laid`: how the input lies in memory in one process, if known.
    `recompute`: F keeps the inputs of the layers only, and backward runs each of them again. `spares`: what
    backward makes again otherwise (again.py).
    """

    index: int
    layers: tuple[StageLayer, ...]
    takes: TensorSpec
    gives: TensorSpec | None
    seed: int
    device: torch.device
    autocast: AbstractContextManager[object]
    recompute: bool = False
    spares: int = 0
    flows: bool = True
    passed: bool = True
    parameters: dict[str, nn.Parameter] = field(init=False)
    casts: list[SplitLinear] = field(default_factory=list)
    laid: Laid | None = None
    came: Packing | None = None  # how its input is packed, if it is several tensors
    goes: Packing | None = None  # how its output is
    part: Part | None = None  # the slice of microbatches that this one runs; None: whole ones
    asleep: frozenset[int] = frozenset()  # layers, by their place, that are frozen in the forward that runs
    reads: str = ""  # the group whose data it reads, where data are of several
    inputs: tuple[int, ...] = ()  # the stages whose outputs are its arguments, where they are several
    fused: bool = False  # whether its linear layers add up weight gradients inside their products
    watched: bool = False  # whether some forward may draw random numbers though no trial did: layers of users
    slices: tuple[Stage, ...] = ()  # where microbatches come in slices, the stage for each; this one is for the rest

    def at(self, part: int) -> Stage:
        """What runs that slice of a microbatch."""
        return self.slices[part] if self.slices else self

    def __post_init__(self) -> None:
        self.parameters = {
            f"{layer.name}.{local}": p for layer in self.layers for local, p in layer.module.named_parameters()
        }

    def seed_all(self, *, suspect: bool = False) -> None:
        """Seed every layer from now on: some other one has drawn, so any may.

        With `suspect`, find out which one draws from a generator that nobody seeds: E509 in its next forward.
        """
        self.watched = False  # a thread that looks cannot have the lock for itself
        self.layers = tuple(replace(layer, wary=True, suspect=suspect) for layer in self.layers)
        self.__dict__.pop("_calls", None)

    @functools.cached_property
    def alone(self) -> Alone:
        """Keeps the gradients apart from what the runtime still needs. First asked for when parameters are settled."""
        return Alone(self.parameters.values())

    @contextmanager
    def resting(self, layers: frozenset[int]) -> Iterator[list[nn.Parameter]]:
        """Freeze some layers, by their place, in the forwards in here, and where a backward runs these again; what is
        frozen."""
        _ = self._first_trained  # kept from the first time on, so not to be looked for while layers are frozen
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
        """Whether its linear layers keep casts of their weights for all microbatches."""
        return not isinstance(self.autocast, nullcontext)

    @property
    def slotted(self) -> bool:
        """Whether its forwards need a slot even where the plan runs B and W at once."""
        return self.casts_weights or self.spares > 0 or self.fused

    def forward(
        self,
        x: Tensor,
        step: int,
        mb: int,
        finish: Callable[[Tensor], Tensor],
        slot: Slot | None,
        parcel: Parcel | None = None,
    ) -> tuple[Tensor, Tape]:
        """What `finish` makes of the stage's output (a message, the loss), and what backward needs.

        With a parcel around it, that learns whose turn it is.

        Draws of dropout depend on (seed, step, microbatch, layer) alone. Where a layer draws for the first time, which
        no trial showed, the forward runs again with every layer seeded.
        """
        if not self.watched:
            return self._forward(x, step, mb, finish, slot, parcel)
        with Look(self.device) as look:
            found = self._forward(x, step, mb, finish, slot, parcel)
        if not look.drew:
            return found
        del found
        self.seed_all()
        if parcel is not None:
            parcel.forget()
        return self._forward(x, step, mb, finish, slot, parcel)

    def _forward(
        self,
        x: Tensor,
        step: int,
        mb: int,
        finish: Callable[[Tensor], Tensor],
        slot: Slot | None,
        parcel: Parcel | None,
    ) -> tuple[Tensor, Tape]:
        if slot is None and not (self.recompute or self.casts_weights):  # between two ops there is no slot
            y = self._through(x, step, mb, finish, parcel)
            return y, RecordedGraph(y)
        if slot is not None:
            slot.spares = self.spares
        before = swap_slot(slot)
        try:
            if self.recompute and self.layers:
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
        self, x: Tensor, step: int, mb: int, finish: Callable[[Tensor], Tensor], parcel: Parcel | None
    ) -> Tensor:
        calls: Iterable[tuple[Callable[[Tensor], Tensor], StageLayer | None]] = self._calls
        if parcel is not None:
            calls = parcel.naming(calls, self.names)
        try:
            for call, layer in calls:
                if layer is None:
                    x = call(x)
                    continue
                if layer.buffers:
                    renew(layer.buffers)
                x = self._run(layer, x, step, mb)
        except IN_A_RANK as error:
            _name(error, next(one for one in self.layers if one.call is call), x)
            raise
        return finish(x)

    @functools.cached_property
    def _calls(self) -> tuple[tuple[Callable[[Tensor], Tensor], StageLayer | None], ...]:
        """The forward of each layer, and the layer where more is to be done."""
        return tuple((layer.call, None if layer.plain else layer) for layer in self.layers)

    @property
    def buffers(self) -> list[Place]:
        """Where those are that forwards change."""
        return [place for layer in self.layers for place in layer.buffers]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Of its layers."""
        return tuple(layer.name for layer in self.layers)

    @functools.cached_property
    def empty_input(self) -> Callable[[], Tensor]:
        """A buffer for a stage input; see `TensorSpec.maker`."""
        return self.takes.maker(self.device)

    def empty_from(self, source: int) -> Tensor:
        """A buffer for the output of one of the several stages that it reads."""
        if self.came is None:
            raise TypeError(f"stage {self.index} has one input")
        return self.came.parts[self.inputs.index(source)].laid.spec.empty(self.device)

    @functools.cached_property
    def empty_grad(self) -> Callable[[], Tensor]:
        """A buffer for the gradient of a stage output."""
        return (self.returned or self.takes).maker(self.device)

    @functools.cached_property
    def returned(self) -> TensorSpec | None:
        """The gradient of its output as it comes: of several tensors those alone that have one."""
        return self.gives if self.goes is None else self.goes.gradient

    def arrived(self, x: Tensor) -> Tensor:
        """An input that a transfer brought, which is contiguous, as it lies in one process: layers may look at that."""
        return x if self.laid is None else self.laid.lay(x)

    def evaluate(self, x: Tensor, finish: Callable[[Tensor], Tensor], *place: object) -> Tensor:
        """What `finish` makes of the stage's output, with nothing kept for a backward.

        What draws random numbers even so draws from a seed made of `place`.
        """
        before, given = swap_slot(Slot()), x
        try:
            with Look(self.device) if self.watched else nullcontext() as look, torch.no_grad(), self.autocast:
                for layer in self.layers:
                    x = self._evaluate(layer, x, *place)
                found = finish(x)
        finally:
            swap_slot(before)
        if look is None or not look.drew:
            return found
        self.seed_all()
        return self.evaluate(given, finish, *place)

    def _evaluate(self, layer: StageLayer, x: Tensor, *place: object) -> Tensor:
        if layer.traits.overwrites:  # what it is given may be a weight, or a table that a layer returned
            x = x.clone()
        with drawing(self.device, seed_of(*place, layer.name)) if layer.seeded else nullcontext():
            y: Tensor = layer.module(x)
            return y

    def _keep_inputs(self, x: Tensor, step: int, mb: int, finish: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tape]:
        layers, last, asleep = self.layers, len(self.layers) - 1, self.asleep
        found: dict[int, list[Kept]] = {}  # layer -> its buffers before its forward
        adding, decisions = current_adding(), [Decisions() for _ in layers]

        def run(index: int, x: Tensor) -> Tensor:
            rests = self.resting(asleep & {index}) if asleep else nullcontext()
            with (
                self.autocast,
                rests,
                adding_to(adding),
                decisions[index].again(),
            ):  # in backward as well, when it runs again
                try:
                    y = self._run(layers[index], x, step, mb)
                except IN_A_RANK as error:
                    _name(error, layers[index], x)
                    raise
                return finish(y) if index == last else y

        def again(index: int) -> AbstractContextManager[None]:
            return as_before(layers[index].buffers, found.pop(index)) if index in found else nullcontext()

        inputs: list[Tensor] = []
        first = 0 if x.requires_grad else self._first_trained
        for index in range(len(layers)):
            inputs.append(x)
            if layers[index].buffers:
                found[index] = renew(layers[index].buffers)
            if layers[index].compiled is None:
                with torch.no_grad():
                    x = run(index, x)
            else:  # as backward will run it again: what torch compiles for no gradient has other bits
                x = run(index, input_of(index, x, first)).detach()
        return x, Inputs(inputs, run, again, first)

    def _run(self, layer: StageLayer, x: Tensor, step: int, mb: int) -> Tensor:
        if layer.plain:
            return layer.call(x)
        if layer.traits.overwrites:
            x = x.clone()
        with accused(layer.name) if layer.suspect else nullcontext():
            if not layer.seeded:
                return layer.call(x)
            with drawing(self.device, self._draw(step, mb, layer)):
                return layer.call(x)

    def _draw(self, step: int, mb: int, layer: StageLayer) -> int:
        """The seed of what a layer draws."""
        return seed_of(self.seed, step, mb, layer.name)

    @functools.cached_property
    def _first_trained(self) -> int:
        """The first layer with a parameter that trains; the number of layers if there is none."""
        trained = (any(p.requires_grad for p in layer.module.parameters()) for layer in self.layers)
        return next((index for index, found in enumerate(trained) if found), len(self.layers))

    def fit(self, y: Tensor) -> Tensor:
        """The output as the next stage expects it. Raises E505 if it is not."""
        gives = self.gives
        if gives is None or (y.dtype is gives.dtype and y.shape == gives.shape):
            return y
        autocast = not isinstance(self.autocast, nullcontext)
        if autocast and y.shape == gives.shape and y.dtype.is_floating_point and gives.dtype.is_floating_point:
            return y.to(gives.dtype)
        raise mismatch(f"output of stage {self.index}", y, gives)


def _name(error: BaseException, layer: StageLayer, x: Tensor) -> None:
    """Say which layer raised, and for what; an error of zbc's own says so itself."""
    if not isinstance(error, ZbcError):
        error.add_note(f"in layer {layer.name}, for {TensorSpec.of(x)}")


def mismatch(what: str, found: Tensor, wanted: TensorSpec) -> ZbcError:
    """E505 for a tensor that is not what the plan says; `what` names it."""
    text = f"run: {what} is {TensorSpec.of(found)}, it must be {wanted}"
    return ZbcError("E505", text, hint="every microbatch has the same shapes; layers must not depend on the data")
