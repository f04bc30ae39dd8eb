"""Layers of every kind a user may bring; each factory returns four of them for vectors of width 8."""

import random
import threading
import warnings
from functools import partial
from itertools import count

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from zbc.runtime.core.slot import current_slot

W = 8
LINEAR, NUMBERS = partial(nn.Linear, W, W), count()


def these(*builders):
    """A factory of these four layers, of two in turns, or of one four times."""
    return lambda: [*builders] * (4 // len(builders))


def ready(*builders):
    """A factory of four layers that exist already."""
    return lambda: [build() for build in builders]


def among(kind):
    """A factory of this layer after a linear one and before two plain ones."""
    return these(LINEAR, kind, nn.ReLU, nn.ReLU)


def layer(**parts):
    """Makes a forward a class of layers with these parts, each made by its function of a layer's arguments."""

    def made(forward):
        def init(self, *given):
            nn.Module.__init__(self)
            for name, make in parts.items():
                setattr(self, name, make(*given))

        members = {"__init__": init, "forward": forward, "__module__": forward.__module__, "__doc__": forward.__doc__}
        return type(forward.__name__, (nn.Module,), members)

    return made


def layer_of(forward, **parts):
    """A class of layers that compute an expression of themselves and their input, by default with a linear layer."""
    forward.__name__ = f"Layer{next(NUMBERS)}"
    return layer(**(parts or {"linear": LINEAR}))(forward)


class One(nn.Module):
    """A linear layer, and the name of an additional behaviour."""

    def __init__(self, how: object = None) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(W, W), how


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(W, W), nn.Linear(W, W)


@layer(scale=lambda: nn.Parameter(torch.linspace(0.5, 1.5, W)), w=lambda: nn.Parameter(torch.randn(W, W) / 4))
def Inline(self, x: Tensor) -> Tensor:
    """Parameters used without a module around them."""
    return functional.linear(torch.tanh(x) * self.scale, self.w)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return w * x**3

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w * 3 * x**2, (grad * x**3).sum(0)


@layer(a=LINEAR, w=lambda: nn.Parameter(torch.full((W,), 0.1)), b=LINEAR)
def Custom(self, x: Tensor) -> Tensor:
    """An autograd.Function of the user's own, between two linear layers."""
    return self.b(Cube.apply(torch.tanh(self.a(x)), self.w))


@layer(conv=lambda: nn.Conv1d(2, 4, 3, padding=1), back=lambda: nn.ConvTranspose1d(4, 2, 3, padding=1))
def Conv(self, x: Tensor) -> Tensor:
    return self.back(functional.gelu(self.conv(x.view(-1, 2, W // 2)))).flatten(1)


class Tied(Two):
    """One weight used by two modules of a layer, one module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) + self.a(x)


class Hooked(Two):
    """Hooks that change outputs and gradients, on modules and on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_hook(lambda module, inputs, output: output * 2)
        self.a.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
        self.b.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0.5,))
        self.b.weight.register_hook(lambda grad: grad * 3)
        self.register_forward_hook(lambda module, inputs, output: output - 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def damp(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(0.75).clamp_(max=0.1)


class Listens(Two):
    """Hooks that change gradients, depending on the order and the number of calls."""

    def __init__(self, which: str) -> None:
        super().__init__()
        if which == "each":
            self.a.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3) * 3)
        else:
            self.b.weight.register_post_accumulate_grad_hook(damp)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


@layer(linear=LINEAR, mean=lambda: nn.Buffer(torch.ones(W)), count=lambda: nn.Buffer(torch.zeros(())))
def Averages(self, x: Tensor) -> Tensor:
    """A buffer that its forward reads and changes in place, and one it replaces: both decide the output."""
    with torch.no_grad():
        self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
    self.count = self.count + 1
    return self.linear(x) * self.mean / self.count


# Writes into its input.
Overwrites = layer_of(lambda m, x: m.linear(x.mul_(0.5).relu_()) + x)
# Returns a view that is not contiguous.
Strided = layer_of(lambda m, x: torch.tanh(m.linear(x))[:, ::2], linear=lambda: nn.Linear(W, 2 * W))
# A float input becomes whole numbers, which stops gradients.
Rounds = layer_of(lambda m, x: (m.linear(x) * 10).long().clamp(0, 9))
# Returns lazily conjugated or negated views, and requires such gradients.
Mirrors = layer_of(
    lambda m, x: (x.conj() * m.scale).conj(),
    scale=lambda: nn.Parameter(torch.randn(W // 2, dtype=torch.complex64)),
)
ToPairs = layer_of(lambda m, x: torch.view_as_complex(m.linear(x).view(-1, W // 2, 2)))
FromPairs = layer_of(lambda m, x: m.linear(torch.view_as_real(x.resolve_conj()).flatten(1)))
Complex = layer_of(lambda m, x: m.linear(x), linear=lambda: nn.Linear(W // 2, W // 2, dtype=torch.complex64))
# Return a transposed view; take one, and need the memory layout of such a view.
TurnsAway = layer_of(lambda m, x: torch.tanh(m.linear(x)).t())
TurnsBack = layer_of(lambda m, x: m.linear(x.t().view(-1).view(-1, W)))
# Returns a weight itself, for any input.
Hands = layer_of(lambda m, x: m.table, table=lambda: nn.Parameter(torch.randn(2, W)))


def overwrites():
    inside = nn.ReLU(inplace=True), nn.Linear(W, W)
    return [lambda: nn.Linear(W, W), Overwrites, lambda: nn.Sequential(*inside), Overwrites]


def half_frozen():
    layer = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W))
    layer[0].requires_grad_(False)
    return layer


def handed_out_twice():
    """Builders that all return the same module."""
    shared = nn.Linear(W, W)
    return [lambda: shared, nn.ReLU, lambda: nn.Sequential(shared), nn.ReLU]


def compiled_one():
    """A layer that its user compiled; the backend leaves out code generation, not the graphs of autograd."""
    return torch.compile(nn.Sequential(nn.Linear(W, W), nn.GELU(), nn.LayerNorm(W)), backend="aot_eager")


class Rules(One):
    """Computes a gradient inside of its forward; with `how` that gradient is differentiable."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.linear(inner)).sum(), inner, create_graph=self.how)
        return self.linear(x) + slope


@layer(linear=lambda where: nn.Linear(W, W), where=lambda where: where, generator=lambda where: torch.Generator())
def Draws(self, x: Tensor) -> Tensor:
    """Draws random numbers from other generators."""
    if self.where == "numpy":
        return self.linear(x) * float(numpy.random.rand())
    return self.linear(x) * torch.rand(W, generator=self.generator)


@layer(
    linear=LINEAR,
    conv=lambda: nn.Conv1d(2, 2, 3, padding=1),
    w=lambda: nn.Parameter(torch.randn(W, W) / 4),
    k=lambda: nn.Parameter(torch.randn(2, 2, 3) / 4),
)
def Made(self, x: Tensor) -> Tensor:
    """A linear layer and a convolution whose weights are computed from the data."""
    y = torch.func.functional_call(self.linear, {"weight": self.w * (1 + x.mean())}, (x,))
    z = torch.func.functional_call(self.conv, {"weight": self.k * (1 + x.mean())}, (x.view(-1, 2, W // 2),))
    return torch.tanh(y + z.flatten(1))


class Empty(nn.Module):
    """Layers without features, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nothing to initialise
            self.linear, self.into, self.out = nn.Linear(W, W), nn.Linear(W, 0), nn.Linear(0, W)
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + self.out(self.into(x)) + self.none.sum())


@layer(linear=LINEAR)
def OverwritesQuietly(self, x: Tensor) -> Tensor:
    """Writes into its input in a way that leaves no version behind."""
    x.data.mul_(0.5)
    return self.linear(x) + x


@layer(linear=LINEAR, mean=lambda: nn.Buffer(torch.ones(W)))
def AveragesQuietly(self, x: Tensor) -> Tensor:
    """Writes into its buffer in a way that leaves no version behind."""
    y = self.linear(x)
    self.mean.data.mul_(0.5).add_(y.detach().mean(0), alpha=0.5)
    return torch.tanh(y - self.mean)


class WritesWeights(One):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight.data if self.how else self.linear.weight.detach()
        weight.clamp_(-0.2, 0.2)
        return self.linear(x)


@layer(linear=LINEAR, lock=lambda: threading.Lock())
def Locked(self, x: Tensor) -> Tensor:
    with self.lock:
        return self.linear(x)


def normed():
    parametrized = nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm
    return [lambda wrap=wrap: nn.Sequential(wrap(nn.Linear(W, W)), nn.Tanh()) for wrap in parametrized * 2]


def scripted_one():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather see it go
        return torch.jit.script(nn.Linear(W, W))


def one_with_history():
    """A weight with a graph, like in the old torch.nn.utils.weight_norm."""
    layer = nn.Linear(W, W)
    layer.doubled = layer.weight * 2
    return layer


@layer(
    linear=lambda linear: nn.Linear(W, W) if linear else nn.Unflatten(1, (2, W // 2)),
    flat=lambda linear: nn.Parameter(torch.randn(2 * W)),
)
def Shaped(self, x: Tensor) -> Tensor:
    """Adds a flat parameter in the shape of a microbatch: its gradient is a view of the activation's gradient."""
    y = self.linear(x)
    return torch.tanh(y + self.flat.view(y.shape)).flatten(1)


class Carries(One):
    """The output depends on an attribute set by earlier forwards."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.seen, self.count, self.table = [], 0, None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.count += 1
        self.seen.append(y if self.how == "graph" else y.detach())
        if self.table is None:
            self.table = torch.ones(W, device=x.device)
        if self.how in ("last", "graph"):
            return y + 0.1 * sum(self.seen[:-1], torch.zeros_like(y)).detach()
        return y * self.count if self.how == "count" else y * self.table


class Grows(One):
    """Its first forward creates a buffer: from one that was None, or a new one; a mean of inputs, or a table."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        if how != "new":
            self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        before = getattr(self, "mean", None)
        if self.how != "table":
            now = y.detach().mean(0)
            self.register_buffer("mean", now if before is None else (before + now) / 2)
        elif before is None:
            self.register_buffer("mean", torch.linspace(0, 1, W, device=x.device))
        return torch.tanh(y - self.mean)


class Reuses(One):
    """Keeps in an attribute data that the backward of its microbatch needs: memory that every forward overwrites, or an
    input that a hook reads."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.kept = None
        if how == "hook":
            self.linear.register_full_backward_hook(self.weigh)

    def weigh(self, module, inner, outer):
        return (inner[0] * self.kept,)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.how == "hook":
            self.kept = torch.tanh(x.detach())
            return y
        with torch.no_grad():
            if self.kept is None or self.kept.device != x.device:
                self.kept = torch.empty_like(y)
            self.kept.copy_(y).clamp_(-1, 1)
        return self.kept if self.how == "output" else y if self.how == "aside" else y * self.kept


class ReusesInSecret(Reuses):
    """Shows in training only: no shape depends on it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.is_meta else super().forward(x)


def no_loss(output: Tensor, target: Tensor) -> Tensor:
    raise ValueError("no loss today")


# ---- where W finds its work: own functions, weights without a module, used twice, in ways torch alone knows
inline = these(Inline)
custom = these(Custom)
conv = these(Conv)
tied = these(Tied)
branches = among(layer_of(lambda m, x: {"a": m.a(x), "b": m.b(x)}, a=LINEAR, b=LINEAR))
# Calls its linear layers through torch's own transforms.
mapped = these(layer_of(lambda m, x: torch.vmap(m.a)(torch.tanh(m.b(input=x))), a=LINEAR, b=LINEAR))
made_weights = these(Made)
empty = these(Empty)
scripted = among(scripted_one)
compiled = these(compiled_one, LINEAR)
# ---- hooks on outputs, gradients and parameters
hooked = these(Hooked)
listens_to_each = these(partial(Listens, "each"))
listens_to_sums = these(partial(Listens, "sums"))
reuses_in_a_hook = ready(LINEAR, partial(Reuses, "hook"), LINEAR, LINEAR)
# ---- memory that two share: views, writing in place, gradients that are views
# An identity in front of a layer that writes into its input.
aliases = these(nn.Identity, lambda: nn.Sequential(nn.Identity(), nn.Flatten()), Overwrites, nn.Identity)
strided = these(Strided, Strided, LINEAR, Strided)
mirrored = these(ToPairs, Mirrors, Mirrors, FromPairs)
negated = these(layer_of(lambda m, x: torch._neg_view(torch.tanh(m.linear(x)))))
turns = these(TurnsAway, TurnsBack, TurnsAway, TurnsBack)
overwrites_quietly = these(nn.Identity, OverwritesQuietly, LINEAR, nn.Identity)
# The gradient of `flat` is in the memory of a tensor deferred to W.
beside_w = these(partial(Shaped, True))
# The gradient of `flat` is in the memory of the input gradient, which is sent to the stage before.
beside_sent = these(partial(Shaped, False))
hands_out_weights = ready(LINEAR, Hands, Overwrites, LINEAR)
# ---- buffers and attributes from one forward to the next
batchnorm = these(lambda: nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W), nn.Tanh()))
averages = these(Averages)
averages_quietly = these(AveragesQuietly)
grows = these(partial(Grows, "none"))
grows_new = these(partial(Grows, "new"))
grows_table = these(partial(Grows, "table"))
carries_last = ready(LINEAR, partial(Carries, "last"), LINEAR, LINEAR)
# What is kept has a history of autograd, as a cache of keys and values has that nobody detaches.
carries_graph = ready(LINEAR, partial(Carries, "graph"), LINEAR, LINEAR)
carries_count = ready(LINEAR, partial(Carries, "count"), LINEAR, LINEAR)
carries_nothing = ready(LINEAR, partial(Carries, "nothing"), LINEAR, LINEAR)
reuses_output = ready(LINEAR, partial(Reuses, "output"), LINEAR, LINEAR)
reuses_factor = ready(LINEAR, partial(Reuses, "factor"), LINEAR, LINEAR)
reuses_in_secret = ready(LINEAR, partial(ReusesInSecret, "hook"), LINEAR, LINEAR)
reuses_aside = ready(LINEAR, partial(Reuses, "aside"), LINEAR, LINEAR)
# ---- random numbers, said and unsaid, from elsewhere
# Draws from torch's generator without declaring it.
noise = these(layer_of(lambda m, x: m.linear(x) + 0.1 * torch.randn_like(x)))
dropped = these(
    layer_of(lambda m, x: functional.dropout(m.linear(x), 0.4) + functional.alpha_dropout(x, 0.2, training=True))
)
gambles = these(LINEAR, layer_of(lambda m, x: x * random.random(), none=lambda: None), LINEAR, LINEAR)
numpys = among(partial(Draws, "numpy"))
own_generator = among(partial(Draws, "own"))
# ---- gradients that end: whole numbers, constants, frozen and unused weights, slopes of no use
integers = these(Rounds, layer_of(lambda m, x: m.table(x).mean(1), table=lambda: nn.Embedding(10, W)), LINEAR, LINEAR)
unused = these(
    layer_of(
        lambda m, x: torch.tanh(m.linear(x)), linear=LINEAR, spare=LINEAR, lost=lambda: nn.Parameter(torch.zeros(3))
    )
)
frozen = these(half_frozen)
# The second layer passes no gradient on to its input.
stops = these(LINEAR, layer_of(lambda m, x: m.linear(x.detach())), LINEAR, Rounds)
# The second layer does not look at its input: nothing before it is trained.
constant = these(LINEAR, Hands, LINEAR, LINEAR)
rules = these(partial(Rules, False))
rules_again = these(partial(Rules, True))
# The gradient is not finite where the root is masked out: 0 times an infinite slope.
Roots = layer_of(lambda m, x: torch.where((y := m.linear(x)) > 0, y.sqrt(), y))
roots = ready(LINEAR, LINEAR, Roots, LINEAR)
locked = these(Locked)
# ---- other types on the way
imaginary = these(ToPairs, Complex, Complex, FromPairs)
# Computes in double precision in between.
wide = these(layer_of(lambda m, x: m.b(m.a(x.double()).float()), a=lambda: nn.Linear(W, W).double(), b=LINEAR))
renormed = these(Rounds, lambda: nn.Sequential(nn.Embedding(10, W, max_norm=1.0), nn.Flatten()), nn.ReLU, nn.ReLU)
with_history = among(one_with_history)
# ---- what is to be refused by name
lazy = these(lambda: nn.LazyLinear(W), LINEAR, LINEAR, LINEAR)
sparse = these(Rounds, lambda: nn.Sequential(nn.Embedding(10, W, sparse=True), nn.Flatten()), nn.ReLU, nn.ReLU)
SparseInside = layer_of(
    lambda m, x: functional.embedding(x, m.table, sparse=True).flatten(1),
    table=lambda: nn.Parameter(torch.randn(10, W)),
)
sparse_inside = these(Rounds, SparseInside, nn.ReLU, nn.ReLU)
sparse_between = among(layer_of(lambda m, x: x.to_sparse(), none=lambda: None))
# The second layer behaves differently inside a stage.
sneaky = these(LINEAR, layer_of(lambda m, x: m.linear(x) * (1.0 if current_slot() is None else 1.01)), LINEAR, LINEAR)
writes_weights = among(partial(WritesWeights, False))
writes_weights_quietly = among(partial(WritesWeights, True))
# Makes torch refuse values, not shapes: it shows in training only.
LateToRefuse = layer_of(lambda m, x: m.linear(x) if x.is_meta or not x.any() else x @ x)
late_to_refuse = these(LINEAR, LINEAR, LINEAR, LateToRefuse)
