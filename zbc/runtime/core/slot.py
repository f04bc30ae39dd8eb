"""Where weight-gradient work waits between the two halves of a backward.

A `Slot` belongs to one (stage, microbatch). It is current while the stage's forward runs, and every layer that can
split its backward takes it along in its autograd context:

    F    slot = Slot(); with using(slot): y = stage(x)
    B    slot.split = True; backward(y)     each layer returns its input gradient and defers the rest: slot.defer(fn)
    W    slot.run()                         runs what was deferred

With `split` left False the same backward computes everything at once (BW). Pairing goes through the slot a layer took
at forward time, never through an order: B and W of different microbatches may come in any order, on any thread.

Layers of users can take part: read `current_slot()` in forward, call `slot.defer` in backward.
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
        self.fills = False  # split, and W follows its B at once: what is deferred may run where the B waits
        self.spares = 0  # what B makes again: nothing, what ranks gather, or all that is cheap (again.py)
        self._work: list[Callable[[], None]] = []

    def defer(self, work: Callable[[], None]) -> None:
        """Keep `work` for W, or run it now if this backward is not split. To be called from a layer's backward.

        `work` computes gradients without recording and adds them with `accumulate`. It should hold detached tensors:
        one that still has its `grad_fn` keeps the graph alive until W.
        """
        if self.split:
            self._work.append(work)
        else:
            with torch.no_grad():
                work()

    def run(self, between: Callable[[int], None] | None = None) -> None:
        """W: run the deferred work in the order it was deferred, releasing what each piece holds as it ends.

        `between` is called after each piece, with how many are left.
        """
        work = self._work[::-1]
        self._work.clear()
        before, current = torch.is_grad_enabled(), _slots.value
        if self.frozen:  # for `accumulate`; otherwise none is current, and what runs a forward here defers nothing
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
_between = Current[Callable[[int], None]]()
using, swap_slot = _slots.using, _slots.swap


def current_slot() -> Slot | None:
    """The slot of the forward that runs on this thread; None outside a pipeline step (evaluation, tests)."""
    return _slots.value


def call_between(function: Callable[[int], None] | None) -> None:
    """Have W on this thread call `function` between the weight gradients of two layers, with how many are left."""
    _between.value = function


def between() -> Callable[[int], None] | None:
    """What W calls between the weight gradients of two layers."""
    return _between.value


def accumulate(parameter: Tensor, grad: Tensor) -> None:
    """Add `grad` to `parameter.grad` as autograd does: take it over the first time, add in place afterwards.

    Low-precision parameters may collect their gradients in float32: `parameter.grad_dtype` says so. A layer that does
    not ask whether its parameters are frozen in this microbatch has computed one for nothing: it is dropped.
    """
    if not isinstance(parameter, nn.Parameter):
        parameter = _original(parameter)
    if _is_frozen(parameter):
        return
    wanted = parameter.grad_dtype
    if grad.dtype is not wanted and wanted is not None:
        grad = grad.to(wanted)
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad.add_(grad)


def accumulate_product(parameter: Tensor, grad: Tensor, rows: Tensor) -> None:
    """Add `grad` (N, out) transposed times `rows` (N, in) to `parameter.grad` (out, in) as the product is computed.

    One kernel in place of a product, a cast and a sum: equal to `accumulate` to rounding. A CPU multiplies in one type
    only; there, narrow products are cast and added as ever.
    """
    if not isinstance(parameter, nn.Parameter):
        parameter = _original(parameter)
    if _is_frozen(parameter):
        return
    left, into, wanted = grad.t(), parameter.grad, parameter.grad_dtype or parameter.dtype
    if wanted is rows.dtype:
        if into is None:
            parameter.grad = left.mm(rows)
        else:
            into.addmm_(left, rows)
    elif not rows.is_cuda or wanted is not torch.float32:
        accumulate(parameter, left.mm(rows))
    elif into is None:
        parameter.grad = torch.mm(left, rows, out_dtype=wanted)
    else:
        torch.addmm(into, left, rows, out_dtype=wanted, out=into)


def _is_frozen(parameter: Tensor) -> bool:
    slot = _slots.value
    return slot is not None and bool(slot.frozen) and id(parameter) in slot.frozen


# Where activations may move, hooks see to what a forward saves, and autograd then hands out another tensor for a saved
# parameter each time it is asked: parameters by what they have in common with it.
_Place = tuple[int, int, torch.Size, tuple[int, ...]]
_parameters: WeakValueDictionary[_Place, nn.Parameter] = WeakValueDictionary()


def know(parameters: Iterable[nn.Parameter]) -> None:
    """Let `accumulate` find these parameters by what forwards save of them."""
    for parameter in parameters:
        _parameters[_place(parameter)] = parameter


def _place(tensor: Tensor) -> _Place:
    storage: int = tensor.untyped_storage()._cdata
    return storage, int(tensor.storage_offset()), tensor.shape, tensor.stride()


def _original(tensor: Tensor) -> Tensor:
    """The parameter that a saved tensor is; the tensor itself where activations stay."""
    return _parameters.get(_place(tensor), tensor) if len(_parameters) else tensor
