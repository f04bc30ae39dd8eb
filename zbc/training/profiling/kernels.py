"""Kernels and collectives of the ops of a rig that runs on fake tensors: their operations, and the bytes they move.

torch's own rules count the operations of products. Every other op counts by its bytes: its inputs and its outputs,
once each. Times follow from `[hardware]` when a job is planned (compiler/cost/machine.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from zbc.ir import Kind, Op
from zbc.job.flops import TILE, keys_seen
from zbc.job.profile import Collective, Kernel
from zbc.runtime.core.private import DEVICE, NUMBERLESS, TorchDispatchMode, flop_rules, tree_leaves
from zbc.runtime.core.state import Handler, Worker
from zbc.runtime.transports.transport import Offer

aten = torch.ops.aten
PRODUCT, ATTENTION, FP8, MOVED = "product", "attention", "fp8", "moved"


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the kernels of ops under this mode, and collectives, by the name of what runs. `axes`: the names of groups
    of ranks. `device`: the kind of the device whose kernels are meant."""

    active: ClassVar[Kernels | None] = None  # that counts now

    def __init__(self, device: str, axes: dict[tuple[int, ...], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self._axes, self.rules = device, axes, {**dict.fromkeys(flop_rules(), _by_torch), **OURS}
        self._kernels: dict[Any, Counter[tuple[str, float, float]]] = {}
        self.collectives: dict[Any, list[Collective]] = {}
        self._now: Any = None

    @contextmanager
    def under(self, name: Any) -> Iterator[None]:
        """What runs in it counts for `name`."""
        self._kernels[name], self.collectives[name], self._now = Counter(), [], name
        Kernels.active = self
        try:
            with self:
                yield
        finally:
            Kernels.active = None

    def watch(self, worker: Worker, names: Callable[[Op], str | None]) -> None:
        """Counts each op of a worker that has a name, by its stage, its slice and that name."""

        def counted(handler: Handler, worker: Worker, op: Op) -> None:
            name = names(op)
            with nullcontext() if name is None else self.under((op.stage, op.slice, name)):
                handler(worker, op)

        worker.phase_run.wrap([*Kind], counted)

    def kernels(self, name: Any, less: Any = None) -> list[Kernel]:
        """The kernels of `name`, without those of `less`; equal ones are one entry."""
        found = self._kernels.get(name, Counter())
        counts = found - self._kernels.get(less, Counter()) if less is not None else found
        moved = [(key[2] * count, count) for key, count in counts.items() if key[0] == MOVED]
        products = [(what, f * n, size * n, n) for (what, f, size), n in sorted(counts.items()) if what != MOVED]
        return products + ([(MOVED, 0.0, sum(size for size, _ in moved), sum(n for _, n in moved))] if moved else [])

    def add(self, what: str, flops: float, moved: float) -> None:
        """Counts a kernel."""
        if Kernels.active is self:
            self._kernels[self._now][what, float(flops), float(moved)] += 1

    @contextmanager
    def joined(self, offer: Offer, ranks: tuple[int, ...]) -> Iterator[None]:
        """Counts a collective, and no kernels of what takes its place."""
        if Kernels.active is not self:
            yield
            return
        size = max(offer.source.nbytes, offer.target.nbytes if offer.what == "gather" else 0)
        self.collectives[self._now].append(("ep" if offer.what == "swap" else self._axes[ranks], offer.what, size))
        Kernels.active = None
        try:
            yield
        finally:
            Kernels.active = self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return args[0].device
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet, rule = func.overloadpacket, self.rules.get(func.overloadpacket)
        if packet in UNTOLD:
            raise NUMBERLESS[-1](func)  # as an op without a rule
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        if rule is not None:
            what, flops = rule(self, packet, args, kwargs, result)
            self.add(what, flops, _bytes(inputs) + _bytes(outputs))
        elif not func.is_view and packet not in NOTHING:
            known = {id(t.untyped_storage()) for t in inputs}
            fresh = [t for t in outputs if id(t.untyped_storage()) not in known]
            changes = any(each.alias_info and each.alias_info.is_write for each in func._schema.arguments)
            if fresh or changes:
                read = fresh if packet in LOOK_UPS else inputs
                self.add(MOVED, 0.0, _bytes(read) + _bytes(outputs if changes and packet not in WRITES else fresh))
                if packet in TWICE and len(fresh) > 1:
                    self.add(MOVED, 0.0, _bytes(inputs[: TWICE[packet]]))
        return result


def count(what: str, flops: float, *moved: Tensor) -> None:
    """Counts a kernel whose own ops say nothing of it."""
    if Kernels.active is not None:
        Kernels.active.add(what, flops, _bytes(moved))


def _tensors(tree: Any) -> list[Tensor]:
    """Each tensor once, though it is an input and takes the result."""
    return list({id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}.values())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.itemsize for t in tensors)


def _by_torch(_: Kernels, packet: Any, args: Any, kwargs: Any, result: Any) -> tuple[str, float]:
    low = any(t.itemsize == 1 and t.is_floating_point() for t in _tensors(args))
    return FP8 if low else PRODUCT, flop_rules()[packet](*args, **kwargs, out_val=result)


def _product(_: Kernels, packet: Any, args: Any, kwargs: Any, result: Any) -> tuple[str, float]:
    """Of two matrices, or of as many pairs, that may be added to something."""
    a, b = [one for one in args if isinstance(one, Tensor)][-2:]
    return PRODUCT, 2.0 * math.prod(a.shape) * b.shape[-1]


def _attention(products: int, first: int) -> Callable[..., tuple[str, float]]:
    """The operations of a kernel of attention with so many products of queries and keys; argument `first` is the
    queries, the last ones. Causal attention leaves out whole tiles of keys only."""

    def rule(self: Kernels, packet: Any, args: Sequence[Any], kwargs: Any, result: Any) -> tuple[str, float]:
        q, k, v = args[first : first + 3]
        causal = bool(next((one for one in args[first + 3 :] if isinstance(one, bool)), kwargs.get("is_causal", False)))
        rows, length = q.shape[-2], k.shape[-2]
        seen = length - rows + keys_seen(rows, TILE[self.device]) if causal else length
        width = (q.shape[-1] + v.shape[-1]) / 2
        return ATTENTION, products * 2 * math.prod(q.shape[:-1]) * seen * width

    return rule


# The CPU's kernel of attention, for which torch has no rule; backward computes the scores again. Products may have the
# type of their result as one more argument, which torch's own rules do not take.
OURS: dict[Any, Callable[..., tuple[str, float]]] = {
    **dict.fromkeys((aten.mm, aten.addmm, aten.bmm, aten.baddbmm), _product),
    aten._scaled_dot_product_flash_attention_for_cpu: _attention(2, 0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(5, 1),
}
UNTOLD = {aten.mkldnn_rnn_layer}  # of an LSTM: torch's rule of shapes leaves out what it keeps for backward
NOTHING = {aten.detach, aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided}
WRITES = {aten.copy_, aten.fill_, aten.zero_}  # they do not read what they change
LOOK_UPS = {aten.embedding, aten.index_select, aten.gather, aten.index}  # they read what comes out
# They read so many inputs once more, in a kernel of its own, if weights have gradients. Of a loss's passes over the
# logits, torch's log_softmax makes one more than is counted, and its nll_loss one less.
TWICE = {aten.native_layer_norm_backward: 2}
