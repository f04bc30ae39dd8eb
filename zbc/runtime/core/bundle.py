"""Several tensors between two layers, packed into one: stages send, keep and pass on a single tensor.

A layer that returns a tuple is given a `forward` that packs its bytes into one float32 tensor, the carrier; the next
layer gets the tuple back as its arguments, and any other structure (a list, a dict, a registered pytree) as one:

    | tensors that gradients flow through | tensors without: masks, tables, whole numbers |
    0                                     back                                          size

Only the first part comes back as a gradient (`back` numbers of it). The packed values are only copied, never computed
with, so every bit arrives. The packing of a layer's tensors is determined when the layers first run, without data
(training/probing/shapes.py). So are the constants between them (None, numbers, texts), which no message carries.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbc.errors import ZbcError
from zbc.runtime.core.current import SLICE
from zbc.runtime.core.private import pytree
from zbc.runtime.core.tensors import Laid, TensorSpec

_ALIGN = 16  # bytes: of the largest type, complex128
_WIDTH = 4  # bytes of a number of a carrier


class Alongside(NamedTuple):
    value: Any
    others: dict[str, Any]


def alongside(value: Any, **others: Any) -> Any:
    """Returns the output of your layer with other inputs of all later layers, by name.

    Each later layer is called with the value and with the others that its forward has a parameter for; its output takes
    the place of the value. The loss gets the value alone.
    """
    return Alongside(value, others)


Names = frozenset[str] | None


def names_of(forward: Callable[..., Any]) -> Names:
    """Returns the parameters of a forward that can be given by name; None: it accepts any keyword."""
    if inspect.isbuiltin(forward):  # of a function in C nobody knows them
        return frozenset()
    parameters = inspect.signature(forward).parameters.values()
    free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return None if free else frozenset(p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY)


def call(forward: Callable[..., Any], given: Any, takes: Names = None, *, later: Names = None) -> Any:
    """Calls a layer with the output of the layer before, or with the entries of a batch alongside of nothing. `takes`:
    see `names_of`; `later`: those of all later layers, () at the last one, whose output is given alone."""
    if not isinstance(given, Alongside):
        return forward(*given) if isinstance(given, tuple) else forward(given)
    value, others = given
    keywords = {name: other for name, other in others.items() if takes is None or name in takes}
    y = forward(*value, **keywords) if isinstance(value, tuple) else forward(value, **keywords)
    others = {name: other for name, other in others.items() if later is None or name in later}
    if isinstance(y, Alongside):
        return Alongside(y.value, {**others, **y.others})
    return Alongside(y, others) if others else y


class ByName:
    """A loss of a user, or its `count`: called with a target, or with those of several that it names."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._names = function, names_of(getattr(function, "forward", function))

    def __call__(self, *given: Any) -> Any:
        *output, target = given
        if isinstance(target, Tensor):
            return self._function(*given)
        named = {name: t for name, t in target.items() if self._names is None or name in self._names}
        return self._function(*output, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


class Form(NamedTuple):
    """The structure around the tensors of an output; its leaves, with the class `Tensor` in place of each tensor."""

    tree: Any
    leaves: tuple[Any, ...]
    kinds: tuple[type, ...]  # of the leaves: True == 1, but they differ as leaves

    def __deepcopy__(self, memo: object) -> Form:  # torch warns when the tree is copied
        return self

    def around(self, tensors: Sequence[Any]) -> Any:
        """Returns the structure with these tensors in the places of its tensors."""
        left = iter(tensors)
        return pytree.tree_unflatten([next(left) if leaf is Tensor else leaf for leaf in self.leaves], self.tree)


def taken_apart(y: Any) -> tuple[Sequence[Any], Form | None]:
    """Returns the tensors of an output and the structure around them; the structure of a tuple of tensors is None."""
    if isinstance(y, tuple) and all(isinstance(item, Tensor) for item in y):
        return y, None
    leaves, tree = pytree.tree_flatten(y)
    marked = (Tensor if isinstance(leaf, Tensor) else math.nan if leaf != leaf else leaf for leaf in leaves)
    kept = tuple(marked)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], Form(tree, kept, tuple(map(type, kept)))


class _Text(str):
    __repr__ = str.__str__


class Part(NamedTuple):
    """The place of a tensor in a carrier: its layout and its first number; `flows`: it gets a gradient."""

    laid: Laid
    start: int
    flows: bool

    def of(self, carrier: Tensor) -> Tensor:
        """A view of the tensor inside a carrier, or inside a carrier's gradient."""
        shape, dtype = self.laid.spec
        count = torch.Size(shape).numel()
        numbers = -(-count * dtype.itemsize // _WIDTH)
        flat = carrier[self.start : self.start + numbers].view(torch.uint8)[: count * dtype.itemsize].view(dtype)
        return flat.view(shape) if self.laid.strides is None else flat.as_strided(shape, self.laid.strides)


class Packing(NamedTuple):
    """The layout of a packed tuple of tensors: `parts` in its order; `size` and `back` in float32 numbers. `form`: the
    structure around the tensors; None for a tuple. `ends`: the input of the loss, which takes it unpacked. `later`: of
    a layer's input, the names that all later layers have parameters for (`call`)."""

    parts: tuple[Part, ...]
    size: int
    back: int
    form: Form | None = None
    ends: bool = False
    later: Names = None

    @property
    def alongside(self) -> Sequence[str]:
        """The names of the other inputs alongside a layer's."""
        whole = None if self.form is None else self.form.around(self.parts)
        return [*whole.others] if isinstance(whole, Alongside) else []

    @classmethod
    def of(cls, tensors: Sequence[Tensor], flows: Sequence[bool], form: Form | None = None) -> Packing:
        """`flows`: whether each of `tensors` gets a gradient."""
        starts, at, back = dict[int, int](), 0, 0
        for index in sorted(range(len(tensors)), key=lambda index: not flows[index]):
            starts[index] = at
            used = tensors[index].numel() * tensors[index].dtype.itemsize
            at += -(-used // _ALIGN) * _ALIGN // _WIDTH
            back = at if flows[index] else back
        parts = (Part(Laid.of(t), starts[i], flows[i]) for i, t in enumerate(tensors))
        return cls(tuple(parts), max(at, 1), max(back, 1), form)  # messages must not be empty

    def __str__(self) -> str:
        return _shown([part.laid.spec for part in self.parts], self.form)

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec((self.size,), torch.float32)

    @property
    def gradient(self) -> TensorSpec:
        """The spec of a carrier's gradient."""
        return TensorSpec((self.back,), torch.float32)

    def pack(self, tensors: Sequence[Tensor], where: str) -> Tensor:
        """The tensors as one carrier. Raises E505 for tensors of other specs than at first; `where` names the layer."""
        specs = [TensorSpec.of(tensor) for tensor in tensors]
        wanted = [part.laid.spec for part in self.parts]
        if specs != wanted:
            text = f"run: layer {where} returned {_shown(specs)}, it must be {_shown(wanted)}"
            hint = "every microbatch has the same shapes; layers must not depend on the data"
            raise ZbcError("E505", text, hint=hint)
        return _Pack.apply(self, *tensors)  # type: ignore[no-any-return, no-untyped-call]

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Outputs of several stages as the input of one, a leaf: `parted` splits its gradient."""
        return _fill(self, torch.zeros(self.size, device=tensors[0].device), tensors)

    def parted(self, grad: Tensor) -> list[Tensor]:
        """The gradient of each tensor; zeros for tensors without one."""
        parts = (part.of(grad) if part.flows else part.laid.zeros(grad.device) for part in self.parts)
        return [part.contiguous() for part in parts]

    def unpack(self, carrier: Tensor) -> tuple[Tensor, ...]:
        return _Unpack.apply(self, carrier)  # type: ignore[no-any-return, no-untyped-call]

    def unlike(self, where: str, y: Any) -> ZbcError:
        """Returns E505 for an output with another structure than in the trials."""
        places, tree = pytree.tree_flatten_with_path(y)
        if self.form is not None and tree == self.form.tree:
            for (path, leaf), known, kind in zip(places, self.form.leaves, self.form.kinds, strict=True):
                if known is not Tensor and (type(leaf) is not kind or leaf != known):
                    what = shown(leaf)
                    text = f"run: layer {where} returned {what} at {pytree.keystr(path)}, where {known!r} was before"
                    hint = "what is no tensor is the same in every microbatch: return torch.tensor(..) of it"
                    return ZbcError("E505", text, hint=hint)
        text = f"run: layer {where} returned {shown(y)}, it must be {self}"
        return ZbcError("E505", text, hint="layers must not depend on the data")

    def example(self, device: torch.device | None = None) -> Tensor:
        """A carrier of random values; integers and masks are zeros."""
        return _fill(self, torch.zeros(self.size), [part.laid.spec.drawn() for part in self.parts]).to(device)

    def widened(self, grad: Tensor) -> Tensor:
        """A carrier's gradient extended to the carrier's size: zeros for the rest, which are never read."""
        if len(grad) == self.size:
            return grad
        whole = grad.new_zeros(self.size)
        whole[: self.back] = grad
        return whole


def shown(y: Any) -> str:
    """Returns the text of an output, with shapes and types in place of tensors."""
    tensors, form = taken_apart(y)
    return _shown(map(TensorSpec.of, tensors), form)


def _shown(specs: Iterable[TensorSpec], form: Form | None = None) -> str:
    texts = [_Text(spec) for spec in specs]
    return f"({', '.join(texts)})" if form is None else str(form.around(texts))


def _fill(layout: Packing, carrier: Tensor, tensors: Sequence[Tensor | None], *, back: bool = False) -> Tensor:
    for part, tensor in zip(layout.parts, tensors, strict=True):
        if tensor is not None and (part.flows or not back):
            part.of(carrier).copy_(tensor)
    return carrier


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: Packing, *tensors: Tensor) -> Tensor:
        ctx.layout = layout
        carrier = torch.zeros(layout.size, device=tensors[0].device)
        return _fill(layout, carrier, [tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        parts = ctx.layout.parts
        needed = ctx.needs_input_grad[1:]
        return None, *(s.of(grads[0]).clone() if s.flows and n else None for s, n in zip(parts, needed, strict=True))


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: Packing, carrier: Tensor) -> tuple[Tensor, ...]:
        ctx.layout = layout
        ctx.set_materialize_grads(False)
        tensors = tuple(part.of(carrier).clone() for part in layout.parts)
        ctx.mark_non_differentiable(*(t for t, part in zip(tensors, layout.parts, strict=True) if not part.flows))
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        layout = ctx.layout
        device = next((grad.device for grad in grads if grad is not None), None)
        if device is None:
            return None, None
        return None, _fill(layout, torch.zeros(layout.size, device=device), grads, back=True)


Ways = Mapping[int | None, tuple[Packing | None, Packing | None]]  # by the rows of a slice; None: whole microbatches


def rows() -> int | None:
    """Rows of the current slice; None outside of slices."""
    inside = None if torch.compiler.is_compiling() else SLICE.value
    return None if inside is None else int(inside.part.rows)


class Adapted:
    """The `forward` of a layer that takes or returns several tensors; a `trial` may find new ones with a gradient."""

    def __init__(self, name: str, forward: Callable[..., Any], ways: Ways, *, trial: bool) -> None:
        self.name, self.forward, self._ways, self._trial = name, forward, ways, trial
        self._takes = names_of(forward)

    @property
    def way(self) -> tuple[Packing | None, Packing | None]:
        """The current packings of its input and of its output."""
        return self._ways.get(rows(), (None, None))

    def __call__(self, x: Tensor) -> Any:
        layout, given = self.way
        if layout is None:
            y = self.forward(x)
        else:
            came = layout.unpack(x)
            taken = came if layout.form is None else layout.form.around(came)
            y = call(self.forward, taken, self._takes, later=layout.later)
        if given is None or (given.ends and not self._trial):
            return y
        tensors, form = taken_apart(y)
        if form != given.form:
            raise given.unlike(self.name, y)
        for index, (tensor, part) in enumerate(zip(tensors, given.parts, strict=False)):
            if tensor.requires_grad and not part.flows and not self._trial and torch.is_grad_enabled():
                text = f"run: tensor {index} of layer {self.name} wants a gradient, which trials did not show"
                hint = "let it depend on what trains in every forward: add 0 * x.sum(), or detach() it in every one"
                raise ZbcError("E509", text, hint=hint)
        return given.pack(tensors, self.name)


def adapt(name: str, module: nn.Module, ways: Ways, *, trial: bool = False) -> nn.Module:
    """Makes `module` take and return one tensor in place of several; it may have been adapted before."""
    if isinstance(module.forward, Adapted):
        module.forward = module.forward.forward
    if any(packing is not None for way in ways.values() for packing in way):
        module.forward = Adapted(name, module.forward, ways, trial=trial)
    return module


def is_adapted(module: nn.Module) -> bool:
    return isinstance(module.forward, Adapted)


def example_for(module: nn.Module, takes: TensorSpec) -> Tensor:
    """Random input for a layer, on the CPU."""
    layout = module.forward.way[0] if isinstance(module.forward, Adapted) else None
    return takes.drawn() if layout is None else layout.example()
