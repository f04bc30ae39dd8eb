"""Any causal language model of transformers, as itself: its embedding, its decoder layers and its head are layers.

A model is built without numbers and taken apart by its own forward, with a stub in place of its layers: the hidden
states that reach the stub are the embedding's output; the other arguments of its call (masks, rotary positions) are
those of a layer; from the hidden states that it returns, the model makes the head's output. So positions, scalings and
caps are the model's own. A rank makes only the layers that it has, the arguments of their calls once for each shape.

    layers.0            root: the model without its layers and its head
    layers.1 ..         layer: a decoder layer
    layers.N+1          root: the model without its layers and its embedding
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.utils.output_capturing import _active_collector

from zbc.errors import ZbcError
from zbc.job.model_section import OWN_NORMS
from zbc.job.wording import did_you_mean
from zbc.runtime.core.private import fake_mode, real_tensors, tree_leaves, valued
from zbc.runtime.features.added import add_loss
from zbc.runtime.features.context_parallel import Spread
from zbc.runtime.features.experts.expert_parallel import Swaps
from zbc.runtime.features.packing import places, rows_now
from zbc.runtime.features.slices.slicing import first_row, now, positions
from zbc.runtime.features.tensor_parallel import Group
from zbc.runtime.features.words.words import AS_IS
from zbc.training.models.experts import keep_own
from zbc.training.models.hfsharding import UNLIKE, Entered, by_words, check, ends_by_words, output, read, shard, tables
from zbc.training.models.model import hollow
from zbc.training.models.parts import fused
from zbc.training.models.registered import HINT, ZBC, Stack, Unfit, balance, here, is_experts, refused, stack
from zbc.training.models.sharding import Shares
from zbc.training.models.shared_words import Ends

_COUNTERS = {"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx"}  # attributes with a layer's number
_PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")  # lists in a config
_UNEQUAL = ("biogpt", "inkling2_text")  # of 189 (bench/models.py)
_lock = threading.RLock()  # ranks may be threads


class _Reached(Exception):
    pass


class _Stub(nn.Module):
    """In place of a module, with its attributes. Of the decoder layers: has its `call`, and returns `given` or
    ends the forward."""

    def __init__(self, like: nn.Module, given: Any = None) -> None:
        super().__init__()
        self.__dict__.update(like=like, given=given, call=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["like"], name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["call"] = hidden, args, kwargs
        if self.__dict__["given"] is None:
            raise _Reached
        return self.__dict__["given"]


class _Left(_Stub):
    """In place of a module whose parameters another layer has: returns its input, or a tensor that is not used."""

    def __deepcopy__(self, memo: object) -> _Left:
        return _Left(self.__dict__["like"])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        same = next((t for t in given if t.is_floating_point() and t.dim() > 2), None)
        return torch.zeros((), device=given[0].device if given else None) if same is None else same


def _pruned(module: nn.Module, keep: set[int], stack: nn.Module, without: nn.Module | None = None) -> nn.Module:
    """A copy without the modules none of whose parameters is in `keep`, nor the one `without`; others are shared. It
    has the modules around `stack`, which is empty."""
    own = copy.copy(module)
    own._modules = {}
    for name, child in module.named_children():
        ids = {id(p) for p in child.parameters()}
        if child is stack:
            own._modules[name] = nn.ModuleList()
        elif not ids or (ids <= keep and all(one is not without for one in child.modules())):
            own._modules[name] = child
        else:
            around = any(one is stack for one in child.modules())
            gone = child is without or not (ids & keep or around)
            own._modules[name] = _Left(child) if gone else _pruned(child, keep, stack, without)
    own._modules |= {name: None for name, child in module._modules.items() if child is None}
    own._parameters = {name: p for name, p in module._parameters.items() if p is None or id(p) in keep}
    return own


class Own(NamedTuple):
    """The tokens of this rank, with context parallelism, and their positions; None: of rows of any length."""

    tokens: Spread
    rows: Tensor | None

    def positions(self, x: Tensor) -> Tensor:
        count, packed = x.shape[1], rows_now()
        first = slice(first_row(), first_row() + count)
        own = self.tokens.positions(count, x.device) if self.rows is None else self.rows[first].to(x.device)
        return own if packed is None else places(packed, count * self.tokens.group.size, x.device)[:, own]


class TakenApart:
    """A model without numbers, taken apart. `path` and `list`: the module with the decoder layers, and their name in
    it; `kinds`: those of one kind differ in their weights only; `attention`: the implementation it has."""

    def __init__(self, config: Mapping[str, Any], implementation: str) -> None:
        settings = config_of(config)
        settings._experts_implementation = ZBC
        how = {"attn_implementation": implementation, "dtype": torch.float32}
        with real_tensors(), torch.device("meta"):
            self.root: Any = transformers.AutoModelForCausalLM.from_config(settings, **how)
        if self.root.config.model_type in _UNEQUAL:
            raise refused(self.root, "its parts do not compute what the whole computes")
        if implementation == ZBC and not self.root._supports_attention_backend:
            raise Unfit("it does not ask the registry for attention")
        for module in self.root.train().modules():
            if isinstance(module, transformers.PreTrainedModel):
                module.warn_if_padding_and_no_attention_mask = lambda *_: None  # it would look at words
        self.balance = balance(self.root, settings.get_text_config())
        self.attention, (self.path, self.list) = implementation, _trunk(self.root)
        self.fuses = OWN_NORMS not in config
        whole: Any = self.root.get_submodule(self.path)
        self.stack: nn.ModuleList = whole._modules[self.list]
        self.trunk = _pruned(whole, set(), self.stack)
        self.takes_positions = "position_ids" in inspect.signature(whole.forward).parameters
        self.kinds, self.tupled, self.beside = list[str](), False, list[None]()  # what layers return beside them
        self._calls, self._trunks = dict[Any, Any](), dict[Any, nn.Module]()
        fixed = [p for p in self.root.parameters() if not p.requires_grad]
        with real_tensors():
            self.root.requires_grad_(True)  # to see that they are read
            self._try(whole)
        for p in fixed:
            p.requires_grad_(False)

    def __deepcopy__(self, memo: object) -> TakenApart:
        return self

    def _try(self, whole: nn.Module) -> None:
        """Runs the model once, to see which parameters come before and after its layers."""
        ids = torch.zeros(1, 8, dtype=torch.long, device="meta")
        embedded, *_ = self.stubbed(self.root, self.path, 0, input_ids=ids)
        hidden, known = torch.empty(embedded.shape, device="meta", requires_grad=True), dict[Any, int]()
        for index, layer in enumerate(self.stack):
            _, args, kwargs = self.stubbed(whole, "", index, inputs_embeds=hidden)
            given = tree_leaves((args, kwargs))
            if any(isinstance(t, Tensor) and t.requires_grad for t in given):
                raise refused(self.root, "its layers read what the first layer reads, or parameters beside their own")
            told = [(tuple(t.shape), t.dtype) if isinstance(t, Tensor) else repr(t) for t in given]
            key = _described(layer), repr(told)
            if key not in known:
                y = layer(hidden, *args, **kwargs)
                self.tupled, others = isinstance(y, tuple), y[1:] if isinstance(y, tuple) else ()
                self.beside = [None for _ in others] if all(other is None for other in others) else []
                if not isinstance(y[0] if self.tupled else y, Tensor):
                    raise refused(self.root, "its layers do not return hidden states")
            self.kinds.append(f"{type(layer).__name__}-{known.setdefault(key, len(known))}")
        self.width, self.words = embedded.shape[-1], int(self.root.config.get_text_config().vocab_size)
        before, after = read(embedded), read(self.head(self.root, hidden))
        stacked = {id(p) for p in self.stack.parameters()}
        rest = {id(p) for p in self.root.parameters()} - stacked - after  # some are read without a gradient
        self.ends = before | rest, after

    def stubbed(
        self, module: nn.Module, path: str, index: int, given: Any = None, others: Any = (), **inputs: Any
    ) -> Any:
        """The arguments of layer `index` in the forward of a module that has the layers in its `path`: (hidden, args,
        kwargs); with `given` as the layer's output, the output of the module; `others`: in place of its children."""
        stub = _Stub(self.stack[index], given)
        outer: Any = copy.copy(module)
        outer._modules, at = {**module._modules, **dict(others)}, outer
        for part in filter(None, path.split(".")):
            at._modules = {**at._modules, part: copy.copy(at._modules[part])}
            at = at._modules[part]
        at._modules = {**at._modules, self.list: nn.ModuleList([stub])}
        at.config = _of_one_layer(at.config, index)
        here.inside = True
        try:
            made = outer(**inputs, use_cache=False)
        except _Reached:
            return stub.__dict__["call"]
        finally:
            here.inside = False
        if given is None:
            raise refused(self.root, "its forward does not run its layers one after the other")
        return made

    def head(self, root: nn.Module, hidden: Tensor, others: Any = ()) -> Tensor:
        """The logits for the hidden states after the last layer."""
        return self._after(root, hidden, others).logits  # type: ignore[no-any-return]

    def before_logits(self, root: nn.Module, hidden: Tensor, name: str) -> Tensor:
        """The input of its layer `name`, whose products make the logits."""
        stub = _Stub(root.get_submodule(name))
        self._after(root, hidden, {name: stub})
        return stub.__dict__["call"][0]  # type: ignore[no-any-return]

    def _after(self, root: nn.Module, hidden: Tensor, others: Any) -> Any:
        given = (hidden, *self.beside) if self.tupled else hidden
        return self.stubbed(root, self.path, len(self.stack) - 1, given, others, inputs_embeds=hidden.detach())

    @torch.no_grad()
    def call(self, index: int, hidden: Tensor, own: Own | None) -> Any:
        """The arguments of layer `index` beside its hidden states, kept for each shape and place in a sequence."""
        place = hidden.device, fake_mode()
        if place not in self._trunks:
            self._trunks[place] = self.filled(hollow(self.trunk, hidden.device))
        share = own and (own.tokens.group.place, own.tokens.group.size)
        key = (self.kinds[index], hidden.shape, hidden.dtype, first_row(), share, *place)
        kept = self._calls if rows_now() is None else {}
        if (found := kept.get(key)) is None:
            if len(kept) >= 64:  # shapes and places
                kept.clear()
            given = self.places(hidden, own)
            found = kept[key] = self.stubbed(self._trunks[place], "", index, inputs_embeds=hidden, **given)[1:]
        return found

    def places(self, x: Tensor, own: Own | None) -> dict[str, Tensor]:
        """The positions of tokens, where they are not those of whole rows."""
        if not self.takes_positions or (now() is None and rows_now() is None and own is None):
            return {}
        return {"position_ids": (positions(x) if own is None else own.positions(x)).view(-1, x.shape[1])}

    def filled(self, module: nn.Module) -> nn.Module:
        """A module with its initial weights and its tables, as transformers makes them."""
        if all(valued(t) for t in (*module.parameters(), *module.buffers())):
            with torch.no_grad():
                for one in reversed([inner for inner in module.modules() if not isinstance(inner, _Stub)]):
                    (one if isinstance(one, transformers.PreTrainedModel) else self.root)._init_weights(one)
        return fused(module) if self.fuses else module

    def end(self, side: int) -> nn.Module:
        """The model without its layers and its other end; 0: its embedding, 1: its head."""
        other = self.root.get_input_embeddings() if side else self.root.get_output_embeddings()
        return _pruned(self.root, self.ends[side], self.stack, other)

    def head_of(self, name: str, y: Tensor) -> Tensor:
        """The logits, of the output `y` of the head, a module of that name."""
        hidden = torch.empty(1, 1, self.width, device="meta")
        return self.head(self.root, hidden, {name: _Stub(self.root.get_output_embeddings(), y)})

    @property
    def ties(self) -> dict[str, str]:
        """The parameters that are another layer's, by their names in layers."""
        parts = [("root", self.end(0)), *(("layer", layer) for layer in self.stack), ("root", self.end(1))]
        first, found = dict[int, tuple[int, str]](), dict[str, str]()
        for place, (name, module) in enumerate(parts):
            for local, p in module.named_parameters():
                owner, tied = first.setdefault(id(p), (place, f"layers.{place}.{name}.{local}"))
                if owner != place:
                    found[f"layers.{place}.{name}.{local}"] = tied
        return found


def _trunk(base: nn.Module) -> tuple[str, str]:
    """The module with the longest list of layers, and the name of the list in it."""
    found = [
        (len(child), -path.count("."), path, name)
        for path, module in base.named_modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and path.count(".") < 3
        if not any(isinstance(one, nn.Linear | nn.Embedding) for one in child)
    ]
    if not found:
        raise refused(base, "it has no list of layers")
    return max(found)[2:]


def _of_one_layer(config: Any, index: int) -> Any:
    one = copy.copy(config)
    kinds = {key: getattr(one, key, None) for key in _PER_LAYER}
    some = {key: [of[index]] for key, of in kinds.items() if isinstance(of, list | tuple) and len(of) > index}
    for key, value in {"num_hidden_layers": 1, **some}.items():
        with contextlib.suppress(Exception):  # of its validators
            setattr(one, key, value)
    return one


def _described(layer: nn.Module) -> str:
    """Equal for layers that differ in their weights only."""
    settings = (bool, int, float, str, list, tuple)
    return repr(
        [
            (path, type(one), [(name, p.shape) for name, p in one.named_parameters(recurse=False)])
            + tuple((k, v) for k, v in vars(one).items() if k not in _COUNTERS and isinstance(v, settings))
            for path, one in layer.named_modules()
        ]
    )


def config_of(config: Mapping[str, Any]) -> Any:
    """transformers' configuration, without dropout, as in zbc's families. Raises E521 for a model that it does not know
    or that has code of its own, or a configuration that it refuses."""
    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING or kind not in CAUSAL:
        text = f"model: transformers {transformers.__version__} has no causal language model of model_type {kind!r}"
        hint = did_you_mean(kind, [*CAUSAL]) or "is it newer than this transformers?"
        if "auto_map" in config:
            hint = f"its folder has code of its own (auto_map), which zbc never runs: {HINT}"
        raise ZbcError("E521", text, hint=hint)
    if config.get("quantization_config"):
        text = f"model: the weights of this {kind} are quantized (quantization_config), and do not train"
        raise ZbcError("E521", text, hint="take the folder of the model in bfloat16")
    try:
        found = (made := CONFIG_MAPPING[kind]).from_dict(made._decode_special_floats(dict(config)))
    except Exception as error:  # of validators
        lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
        text = f"model: transformers refuses the config.json of this {kind}"
        raise ZbcError("E521", text, details=lines[:3], hint="compare it with that of the original model") from None
    found.update({key: 0.0 for key, of in vars(found).items() if "drop" in key and isinstance(of, float)})
    return found


@functools.lru_cache(4)
def _apart(text: str) -> TakenApart:
    transformers.logging.set_verbosity_error()
    config, errors = json.loads(text), list[str]()
    for implementation in (ZBC, "sdpa", "eager"):
        try:
            return TakenApart(config, implementation)
        except ZbcError:
            raise
        except Exception as error:  # of its own code
            errors.append(f"with {implementation} attention: {type(error).__name__}: {error}".splitlines()[0][:190])
    text = f"model: {config['model_type']} of transformers cannot be taken apart"
    raise ZbcError("E521", text, details=errors, hint=HINT)


def apart(config: Mapping[str, Any]) -> TakenApart:
    """A model of transformers, taken apart. Raises E521."""
    with _lock:
        return _apart(json.dumps(config, sort_keys=True))


# ---- its layers ----------------------------------------------------------------------------------------------


class Part(nn.Module):
    """A layer of such a model; `inside`: the name of its only module, `prefix` that module's name in the model."""

    inside, prefix = "root", ""

    def __init__(self, model: TakenApart) -> None:
        super().__init__()
        self.model = model
        self.own: Own | None = None
        self.met: Entered | None = None

    def shares(self, group: Group, joined: bool) -> Shares:
        """Reduces the layer to this rank's shard, in place; `joined`: logits stay whole. Raises E119."""
        rotary = getattr(self.model.root.config.get_text_config(), "qk_rope_head_dim", 0)
        self.met, self.joined = Entered(group, rotary), joined
        return self.shard(self.met)

    def shard(self, met: Entered) -> Shares:
        return shard(self, self.inside, self.prefix, self.model.root, met)

    def spread(self, tokens: Spread, rows: Tensor | None) -> None:
        """Runs on this rank's tokens, at the positions `rows`. Raises E119 for attention of the model's own."""
        if self.model.attention != ZBC or not self.model.takes_positions:
            kind = self.model.root.config.model_type
            text = f"model: {kind} has attention of its own, which has no part of the tokens"
            raise ZbcError("E119", text, hint="set parallel.cp = 1")
        self.own = Own(tokens, rows)
        for module in self.modules():
            module.__dict__["spread_over"] = tokens

    def theirs(self) -> Iterator[tuple[str, str, Tensor]]:
        """The parameters and saved buffers: the name here, transformers' name, and the numbers as it has them."""
        module = self.get_submodule(self.inside)
        for name, tensor in module.state_dict(keep_vars=True).items():
            path, _, leaf = name.rpartition(".")
            owner, theirs = module.get_submodule(path), name
            if isinstance(owner, Stack):
                theirs = path + "_bias" * (leaf == "bias")
                tensor = tensor.mT if owner.transposed and leaf == "weight" else tensor
            yield f"{self.inside}.{name}", self.prefix + theirs, tensor


class _LookedUp(nn.Embedding):
    """Beside the class of an embedding: its argument are the rows that were looked up."""

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["weight"] = x.new_empty(0)  # some classes read its type
        return x.view_as(x)  # layers that save it have a tensor of their own


class Front(Part):
    """(batch, tokens) -> (batch, tokens, hidden); of a model with the loss of its routers also their choices, none."""

    root: Any

    def __init__(self, model: TakenApart) -> None:
        super().__init__(model)
        self.root = model.filled(hollow(model.end(0), torch.get_default_device()))
        self.begins_after = False  # the look-up

    def without_words(self) -> tuple[str, Tensor]:
        """Begins after the look-up of words; returns the name of their table, and it."""
        self.begins_after, table = True, self.root.get_input_embeddings()
        (name,) = (name for name, one in self.named_modules() if one is table)
        beside = () if type(table) is nn.Embedding else (type(table),)
        table.__class__ = type(type(table).__name__, (*beside, _LookedUp), {})
        return f"{name}.weight", table._parameters.pop("weight")

    def shard(self, met: Entered) -> Shares:
        table = self.root.get_input_embeddings()
        apart = ends_by_words(self.model)[0] and not self.begins_after
        return Shares(by_words(self, table, met, meets=True) if apart else {})

    def forward(self, ids: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        model, given = self.model, {"input_ids": ids}
        if self.begins_after:
            x = ids if self.met is None else self.met.group.leave(ids)
            given = {"inputs_embeds": self.root.get_input_embeddings()(x)}
        hidden: Tensor = model.stubbed(self.root, model.path, 0, **given, **model.places(ids, self.own))[0]
        count = model.balance and model.balance.experts
        return hidden if count is None else (hidden, torch.zeros(2, count, device=hidden.device))


class Decoder(Part):
    """(batch, tokens, hidden) -> the same."""

    inside = "layer"

    def __init__(self, model: TakenApart, index: int) -> None:
        super().__init__(model)
        self.index, self.prefix = index, f"{model.path}.{model.list}.{index}."
        self.layer = stack(model.filled(hollow(model.stack[index], torch.get_default_device())))

    def forward(self, hidden: Tensor, *told: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        args, kwargs = self.model.call(self.index, hidden, self.own)
        routers = {"router_logits": list[Tensor]()}  # of a model with their loss
        before = _active_collector.set(routers)
        try:
            y = self.layer(hidden, *args, **kwargs)
        finally:
            _active_collector.reset(before)
        if self.met is not None:
            self.met.forget()
        made: Tensor = y[0] if isinstance(y, tuple) else y
        return made if self.model.balance is None else (made, self.model.balance.told(told[0], *routers.values()))


class DecoderOfExperts(Decoder):
    """A layer in which replicas can share out experts."""

    def share_experts(self, group: Group) -> str:
        """Keeps this rank's experts."""
        (path, module), *_ = [(path, inner) for path, inner in self.named_modules() if is_experts(inner)]
        module.__dict__["swaps"] = Swaps(group)
        keep_own(module, group)
        return str(path)


class Back(Part):
    """(batch, tokens, hidden) -> (batch, tokens, words); its settings of a loss by chunks are those of a GptHead."""

    root: Any

    def __init__(self, model: TakenApart, chunk: int | None) -> None:
        super().__init__(model)
        self.root, self.chunk = model.filled(hollow(model.end(1), torch.get_default_device())), chunk
        self.ends_before, self.shaped = chunk is not None, (output(model) or ("", AS_IS))[1]

    def without_words(self) -> tuple[str, Tensor]:
        """Ends before the logits; returns the name of the table of their words, and it."""
        (name,) = (name for name, one in self.named_modules() if one is self.logits)
        self.ends_before, self.chunk, table = True, None, self.logits._parameters.pop("weight")
        self.logits.__dict__["weight"] = table.new_empty(0)  # some forwards read its type
        return f"{name}.weight", table

    def shard(self, met: Entered) -> Shares:
        self.apart = ends_by_words(self.model)[1]
        if self.ends_before and not self.apart:
            raise refused(self.model.root, "ranks do not share the words of its head", "drop model.loss_chunk")
        if self.ends_before and self.chunk is None:
            return Shares({})
        return Shares(by_words(self, self.logits, met, meets=self.chunk is None) if self.apart else {})

    def forward(self, hidden: Tensor, *told: Tensor) -> Tensor:
        if self.model.balance is not None and self.training:
            hidden = add_loss(hidden, self.model.balance.loss(told[0], self.own and self.own.tokens.group))
        met = self.met
        if self.ends_before and (made := output(self.model)) is not None:
            y = self.model.before_logits(self.root, hidden, made[0])
            return y if met is None else met.group.enter(y)
        y = self.model.head(self.root, hidden)
        if met is None:
            return y
        met.forget()
        if self.joined == self.apart:
            return met.group.join(y, self.model.words) if self.joined else met.group.split(y)
        return y

    @property
    def logits(self) -> Any:
        return self.root.get_output_embeddings()


def layers(config: Mapping[str, Any], chunk: int | None = None) -> list[Any]:
    """The builders of the layers of a model: `config` is the content of its config.json; `chunk`: tokens whose logits
    the loss makes at once. Raises E521."""
    model = apart(config)
    shared = [sum(map(is_experts, layer.modules())) == 1 for layer in model.stack]
    blocks = [functools.partial(DecoderOfExperts if of else Decoder, model, i) for i, of in enumerate(shared)]
    made: list[Any] = [functools.partial(Front, model), *blocks, functools.partial(Back, model, chunk)]
    for build, kind in zip(made, ("embed", *model.kinds, "head"), strict=True):
        build.like = kind
    return made


def called(config: Mapping[str, Any], name: str) -> str:
    """transformers' name of a module, as of `layers.1.layer.mlp`; "" if it is in no decoder layer."""
    model, (_, place, inside, rest) = apart(config), name.split(".", 3)
    return f"{model.path}.{model.list}.{int(place) - 1}.{rest}" if inside == Decoder.inside else ""


def shared(config: Mapping[str, Any], ranks: int) -> None:
    """Raises E119 for a model whose layers so many ranks cannot share."""
    group = Group((*range(ranks),), 0, None)  # type: ignore[arg-type]
    each = {build.like: build for build in layers(config)[1:-1]}
    with torch.device("meta"), real_tensors():
        check(apart(config), [build().shares(group, joined=False) for build in each.values()])


def words_of(config: Mapping[str, Any]) -> Ends | str:
    """The tables of a model of which ranks can have the rows of some words; or why they cannot. Raises E521."""
    return tables(apart(config))


def facts(config: Mapping[str, Any], folder: str | None, chunked: bool) -> tuple[dict[str, Any], int | None]:
    """The keys of [model] of a configuration, and its longest sequence. Raises E521; for a `folder` of weights E520."""
    model = apart(config)
    if chunked and output(model) is None:
        raise refused(model.root, f"model.loss_chunk is not for it, {UNLIKE}", "drop model.loss_chunk")
    if folder is not None:
        from zbc.training.models.hfweights import Weights

        Weights(model, Path(folder)).check()
    counts: list[Any] = [one.num_experts for one in model.stack.modules() if is_experts(one)]
    keys = {"layers": len(model.stack) + 2, "vocab": model.words, "experts": max(counts, default=None)}
    return {**keys, "ties": model.ties}, getattr(model.root.config.get_text_config(), "max_position_embeddings", None)
