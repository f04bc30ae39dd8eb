"""Slots: deferred weight-gradient work between the two halves of a backward.

A `Slot` belongs to one (stage, microbatch). It is current while the stage's forward runs, and every layer that can
split its backward saves it in its autograd context:

    F    slot = Slot(); with using(slot): y = stage(x)
    B    slot.split = True; backward(y)     each layer returns its input gradient and defers the rest: slot.defer(fn)
    W    slot.run()                         runs the deferred work

With `split` left False the same backward computes everything at once (BW). B and W are paired by the slot that a layer
saved in its forward, never by an order: those of different microbatches may run in any order, on any thread.

Layers of users can defer work, too: read `current_slot()` in forward, call `slot.defer` in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from zbc.runtime.core.current import Current
from zbc.runtime.core.private import set_grad_enabled


class Slot:
    """The weight-gradient work of one (stage, microbatch, pipe, slice) between its B and its W."""

    __slots__ = ("__weakref__", "_work", "fills", "frozen", "spares", "split")

    def __init__(self, frozen: Iterable[nn.Parameter] = ()) -> None:
        self.split = False
        self.frozen = frozenset(map(id, frozen))  # parameters that this microbatch does not train
        self.fills = False  # split, and W follows its B at once: deferred work may run while the B waits
        self.spares = 0  # level of recompute: nothing, gathered tensors, what is cheap, attention too (again.py)
        self._work: list[Callable[[], None]] = []

    def defer(self, work: Callable[[], None]) -> None:
        """Keeps `work` for W, or runs it now if this backward is not split. To be called from a layer's backward.
        `work` computes gradients without recording and adds them with `accumulate`. It should hold detached tensors:
        one that still has its `grad_fn` keeps the graph alive until W."""
        if self.split:
            self._work.append(work)
        else:
            with torch.no_grad():
                work()

    def run(self, between: Callable[[int], None] | None = None) -> None:
        """W: runs the deferred work in the order it was deferred, freeing the tensors of each piece when it ends.
        `between` is called after each piece, with the number of pieces left."""
        work = self._work[::-1]
        self._work.clear()
        before, current = torch.is_grad_enabled(), _slots.value
        if self.frozen:  # for `accumulate`; otherwise none is current, and a forward that runs here defers nothing
            swap_slot(self)
        set_grad_enabled(False)
        try:
            while work:
                work.pop()()
                if between is not None:
                    between(len(work))
        finally:
            set_grad_enabled(before)
            swap_slot(current)

    def __len__(self) -> int:
        return len(self._work)


_slots = Current[Slot]()
# Called by W between the weight gradients of two layers, with the number left.
BETWEEN = Current[Callable[[int], None]]()
using, swap_slot = _slots.using, _slots.swap


def current_slot() -> Slot | None:
    """The slot of the forward that runs on this thread; None outside a pipeline step (evaluation, tests)."""
    return _slots.value


def accumulate(parameter: Tensor, grad: Tensor) -> None:
    """Adds `grad` to `parameter.grad` as autograd does: stores it the first time, adds in place afterwards.
    Low-precision parameters may accumulate their gradients in float32, given by `parameter.grad_dtype`. A gradient of a
    parameter that is frozen in this microbatch is dropped: layers need not check."""
    found = trained(parameter)
    if found is None:
        return
    parameter, wanted = found, found.grad_dtype
    if grad.dtype is not wanted and wanted is not None:
        grad = grad.to(wanted)
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad.add_(grad)


def accumulate_product(parameter: Tensor, grad: Tensor, rows: Tensor) -> None:
    """Adds `grad` (N, out) transposed times `rows` (N, in) to `parameter.grad` (out, in) inside the product. One kernel
    in place of a product, a cast and a sum: equal to `accumulate` to rounding. A CPU multiplies in one type only;
    there, narrow products are cast and added by `accumulate`."""
    found = trained(parameter)
    if found is None:
        return
    parameter, wanted = found, found.grad_dtype or found.dtype
    if parameter.grad is not None:
        add_product(parameter.grad, grad.t(), rows)
    elif wanted is torch.float32 and wanted is not rows.dtype and rows.is_cuda:
        parameter.grad = torch.mm(grad.t(), rows, out_dtype=wanted)
    else:
        parameter.grad = grad.t().mm(rows).to(wanted)


def add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds `left` times `right` to `into`, in one kernel if the types allow."""
    if into.dtype is right.dtype:
        into.addmm_(left, right)
    elif into.is_cuda and into.dtype is torch.float32:
        torch.addmm(into, left, right, out_dtype=into.dtype, out=into)
    else:
        into.add_(left.mm(right))


def trained(parameter: Tensor) -> Tensor | None:
    """The parameter whose gradient is asked for; None if it is frozen in this microbatch."""
    if len(_parameters) and not isinstance(parameter, nn.Parameter):  # activations may be offloaded
        parameter = _parameters.get(_place(parameter), parameter)
    slot = _slots.value
    frozen = slot is not None and bool(slot.frozen) and id(parameter) in slot.frozen
    return None if frozen else parameter


# If activations may be offloaded, hooks process saved tensors, and autograd then returns a new tensor for a saved
# parameter on each access: parameters are looked up by the properties that such tensors share with them.
_Place = tuple[int, int, torch.Size, tuple[int, ...]]
_parameters: WeakValueDictionary[_Place, nn.Parameter] = WeakValueDictionary()


def know(parameters: Iterable[nn.Parameter]) -> None:
    """Lets `accumulate` find these parameters by the tensors that forwards save for them."""
    for parameter in parameters:
        _parameters[_place(parameter)] = parameter


def _place(tensor: Tensor) -> _Place:
    storage: int = tensor.untyped_storage()._cdata
    return storage, int(tensor.storage_offset()), tensor.shape, tensor.stride()
