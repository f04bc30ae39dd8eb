"""`[adapter]`: low-rank matrices that train in place of the weights of linear layers (LoRA, arXiv 2106.09685).

    y = W x + b + alpha / rank B A drop(x)  A: rank x inputs, B: outputs x rank, 0 at first; all else is frozen

Weights of experts, which are stacked in a layer, have adapters for each expert where a target names "experts".

A linear layer of a built-in model may stack several layers of its Hugging Face folder: each target among these has an
adapter of its own, as in Hugging Face. Targets with "whole" before the name train whole, as peft's modules_to_save do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import Field

from zbc.errors import ZbcError
from zbc.job import hfmodel, hfnames
from zbc.job.model_section import Model
from zbc.job.section import LAYERS, Positive, Section, key

if TYPE_CHECKING:
    from zbc.job.job import Draft


WHOLE = "whole "  # before a target
ENDS = ("embed.tokens", "head.norm", "head.logits")  # of a built-in model, which may train whole
RANK_STABLE = r"^rslora [0-9]+(\.[0-9]+)?$"  # a value of alpha


class Adapter(Section):
    """`[adapter]`: low-rank matrices that train in place of the weights of a model."""

    rank: Annotated[int, Field(ge=0, le=65_536)] = key(
        0, "of what is added to the matrices of linear layers (LoRA); 0: the weights themselves train"
    )
    alpha: Positive | Annotated[str, Field(pattern=RANK_STABLE)] | None = key(
        None, 'what is added counts alpha / rank times, with "rslora 16" 16 / sqrt(rank) times; default: rank'
    )
    dropout: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = key(
        0.0, "share of the inputs of each adapter that are 0, others anew for each microbatch"
    )
    targets: list[str] = key(
        ["*"],
        "linear layers, as the model or its Hugging Face folder calls them or ends their names, with *: "
        '"q_proj", "mlp.*", "layers.3.qkv"; those of blocks in a built-in model; "experts.*": those of each expert; '
        '"whole lm_head": trains itself',
        min_length=1,
    )

    @property
    def given(self) -> float:
        """alpha as a number."""
        return float(self.alpha.split()[1]) if isinstance(self.alpha, str) else self.alpha or self.rank

    @property
    def scale(self) -> float:
        """The factor of the adapter's output, alpha / rank, or alpha / sqrt(rank)."""
        return self.given / (self.rank**0.5 if isinstance(self.alpha, str) else self.rank) if self.rank else 1.0

    @property
    def timed(self) -> dict[str, object]:
        """The settings that times of layers depend on; {} without adapters."""
        drops = {"dropout": self.dropout} if self.dropout else {}
        return {"rank": self.rank, "targets": self.targets, **drops} if self.rank else {}

    def names(self, *called: str, whole: bool = False, stacked: bool = False) -> bool:
        """Whether a linear layer with these names is a target; `whole`: whether a module is one that trains whole,
        `stacked`: whether a stack of experts' weights is one, of the targets that name experts."""
        ends = [".".join(parts[i:]) for name in called if (parts := name.split(".")) for i in range(len(parts))]
        asked = [target.removeprefix(WHOLE) for target in self.targets if target.startswith(WHOLE) == whole]
        asked = [target for target in asked if "experts" in target] if stacked else asked
        return any(fnmatchcase(end, target) for end in ends for target in asked)


class Part(NamedTuple):
    """Outputs `start` to `stop` of a linear layer, which have an adapter of their own: `name` in files."""

    name: str
    start: int
    stop: int

    @property
    def key(self) -> str:
        """Its name within the layer."""
        return self.name.rpartition(".")[2]


def stack(model: Model, path: str) -> str:
    """The name in its folder of a stack of experts' weights, `layers.3.mlp.experts.gate_up`."""
    if model.builtin:
        _, block, *_, name = path.split(".")
        return f"model.layers.{block}.mlp.experts.{name}_proj" if model.family == "llama" else path
    return hfmodel.called(model, path)


def parts(adapter: Adapter, model: Model, linear: str, outputs: int, *, stacked: bool = False) -> list[Part]:
    """The parts with adapters of a linear layer (`layers.3.qkv`) with `outputs` outputs, or of a stack of experts; []
    if it is no target."""
    if stacked:
        name = stack(model, linear)
        return [Part(name, 0, outputs)] if adapter.names(linear, name, stacked=True) else []
    if not model.builtin:
        name = hfmodel.called(model, linear)
        return [Part(name, 0, outputs)] if name and adapter.names(linear, name) else []
    targets, start = list[Part](), 0
    if linear.startswith("layers.") and linear.count(".") == 2:  # not those of experts and routers
        for tensor in hfnames.parts(model, f"{linear}.weight"):
            stop = start + (outputs - start if tensor.rows is None else tensor.rows)
            name = tensor.name.removesuffix(".weight")
            targets += [Part(name, start, stop)] if adapter.names(linear, name) else []
            start = stop
    return targets


def ends(model: Model, module: str) -> tuple[str, ...]:
    """The names of a module (`head.logits`) that may train whole, that in files last; () if it may not."""
    if not model.builtin:
        name = hfmodel.outside(model, module)
        return (*accumulate(module.split("."), "{}.{}".format), name) if name else ()
    if module not in ENDS:
        return ()
    return (module.partition(".")[0], module, hfnames.parts(model, f"{module}.weight")[0].name.removesuffix(".weight"))


def whole(adapter: Adapter, model: Model, module: str) -> str:
    """The name in files of a module that trains whole; "" if it does not."""
    names = () if ".lora." in module else ends(model, module)
    return names[-1] if adapter.names(*names, whole=True) else ""


def linears(model: Model) -> tuple[str, ...]:
    """Names of the linear layers in a block of a built-in model that may have adapters: with experts, of attention."""
    names = ("qkv", "proj", "gate_up" if model.family == "llama" else "up", "down")
    return names[:2] if model.experts else names


def stacks(model: Model) -> Iterator[tuple[str, ...]]:
    """The names of the stacks of experts in a built-in model's blocks, its own and in a Hugging Face folder."""
    for i in range(model.layers if model.builtin and model.experts else 0):
        for name in ("gate_up" if model.family == "llama" else "up", "down"):
            yield (path := f"layers.{i}.mlp.experts.{name}"), stack(model, path)


def called(model: Model) -> Iterator[tuple[str, ...]]:
    """The names of each linear layer of a built-in model's blocks: its own, then its names in a Hugging Face folder."""
    for i in range(model.layers if model.builtin else 0):
        for linear in (f"layers.{i}.{name}" for name in linears(model)):
            yield linear, *(tensor.name.removesuffix(".weight") for tensor in hfnames.parts(model, f"{linear}.weight"))


def unknown(
    adapter: Adapter,
    layers: Iterable[Sequence[str]],
    others: Iterable[Sequence[str]],
    stacked: Iterable[Sequence[str]] = (),
    where: str | None = None,
) -> Iterator[ZbcError]:
    """E110 for targets that match nothing; `layers`: the names of each linear layer, `others`: of each module that may
    train whole, `stacked`: of each stack of experts."""
    each_stack = list(stacked)
    all_names = {False: list(layers), True: list(others)}
    for target in adapter.targets if adapter.rank else ():
        asked, is_whole = adapter.model_copy(update={"targets": [target]}), target.startswith(WHOLE)
        if not is_whole and any(asked.names(*names, stacked=True) for names in each_stack):
            if adapter.dropout:
                text = f"config: adapter.dropout and adapters of experts, {target}, do not go together:"
                text += " an expert's rows come in another order on other ranks"
                yield ZbcError("E110", text, where=where, hint="set dropout = 0.0, or leave the target out")
            continue
        if not any(asked.names(*names, whole=is_whole) for names in all_names[is_whole]):
            last = dict.fromkeys(name.rpartition(".")[2] for names in all_names[is_whole] for name in names)
            kind, name = "module" if is_whole else "linear layer", target.removeprefix(WHOLE)
            text = f"{'config' if where else 'run'}: no {kind} is called {name}, which adapter.targets names"
            yield ZbcError("E110", text, where=where, hint=f"there are {', '.join([*last][:12])}")


def problems(draft: Draft, adapter: Adapter, model: Model) -> Iterator[ZbcError]:
    """E110 for targets that a built-in model does not have."""
    if model.builtin:
        few = model.model_copy(update={"layers": min(model.layers, LAYERS)})  # another rule rejects more layers
        where = draft.document.where(("adapter", "targets"))
        yield from unknown(adapter, called(few), [ends(few, name) for name in ENDS], stacks(few), where)
