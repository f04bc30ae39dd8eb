"""The one table of features that exclude each other, a row for each pair, with the reason.

A trait is a setting of a job, or a property of its schedule, named or chosen. Each pair is listed once: its reason says
why it is impossible, or is UNWRITTEN if it could be built. Jobs are checked when they are read, and again when another
job is derived from them; so is every candidate of a choice. `zbc explain limits` and docs/limits.md print the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from zbc.errors import ZbcError

TRANSFORMERS = "zbc.training.models.transformers:layers"  # the factory of models of transformers (job/hfmodel.py)
Sections = Mapping[str, Any]
Where = Callable[[tuple[str, ...]], str]


class Trait(NamedTuple):
    """`key`: the setting of a job. `there`: whether a value of the key has the trait; None: the schedule has it.
    `text`: its name in messages, by default the key."""

    key: str
    there: Callable[[Any], bool] | None = None
    text: str = ""

    @property
    def place(self) -> tuple[str, ...]:
        return tuple(self.key.split("."))

    @property
    def label(self) -> str:
        return self.text or self.key

    def of(self, sections: Sections) -> bool:
        """Whether a job with these sections has the trait."""
        table, _, key = self.key.partition(".")
        value = getattr(sections.get(table), key, None)
        return self.there is not None and value is not None and self.there(value)


def _is(*values: object) -> Callable[[Any], bool]:
    return lambda value: value in values


def _not(*values: object) -> Callable[[Any], bool]:
    return lambda value: value not in values


def _value(key: str, wanted: str) -> Trait:
    """A key with this value."""
    return Trait(key, lambda value: isinstance(value, str) and value.lower() == wanted, f'{key} = "{wanted}"')


def _choices(value: str | Mapping[str, str]) -> str:
    return value if isinstance(value, str) else " ".join(value.values())


def _open(value: str | Mapping[str, str]) -> bool:
    return "auto" in _choices(value).split() and "offload" not in _choices(value)


def _listed(value: object) -> bool:
    return isinstance(value, list)


def _whole(targets: list[str]) -> bool:
    return any(target.startswith("whole ") for target in targets)


def _given(value: object) -> bool:
    return True  # `Trait.of` never asks about None


TRAITS = {
    "compile": Trait("model.compile", bool),
    "tied embeddings": Trait("model.ties", _is(True), "model.ties = true"),
    "ties": Trait("model.ties", lambda value: value is not True and bool(value), "model.ties of layers"),
    "bfloat16 weights": Trait("model.parameters", _not("float32")),
    "no masters": _value("model.parameters", "bfloat16 alone"),
    "autocast": Trait("model.dtype", _not("float32")),
    "float16": Trait("model.dtype", _is("float16"), 'model.dtype = "float16"'),
    "experts": Trait("model.experts", bool),
    "own layers": Trait("model.family", _not("gpt", "llama"), "layers of your own"),
    "model of transformers": Trait("model.family", _is(TRANSFORMERS), "a model of transformers"),
    "norms of heads": Trait("model.variant", _is("qwen3")),
    "loss by chunks": Trait("model.loss_chunk", _given),
    "expert bias": Trait("model.balance_loss", lambda of: isinstance(of, tuple) and of[1] > 0, "biases of experts"),
    "graph": Trait("model.graph", bool),
    "tp": Trait("parallel.tp", _not(1)),
    "tp_sequence": Trait("parallel.tp_sequence", bool),
    "cp": Trait("parallel.cp", _not(1)),
    "dp": Trait("parallel.dp", _not(1)),
    "ep": Trait("parallel.ep", _not(1)),
    "ep over dp": Trait("parallel.topology", lambda run: run.span > 1, "parallel.ep over dp"),
    "world": Trait("parallel.world", _given),
    "replicas": Trait("parallel.replicas", _given),
    "average": Trait("parallel.average", _given),
    "one-sided": _value("parallel.exchange", "one-sided"),
    "sharded optimizer": _value("parallel.shard", "optimizer"),
    "sharded weights": _value("parallel.shard", "weights"),
    "sharded gradients": _value("parallel.shard", "gradients"),
    "sharded all": _value("parallel.shard", "all"),
    "shared vocabulary": Trait("parallel.vocabulary", _is("shared", "shared-2"), 'parallel.vocabulary = "shared"'),
    "open vocabulary": _value("parallel.vocabulary", "auto"),
    "open kind": _value("schedule.kind", "auto"),
    "slices": Trait("schedule.slices", _not(1, "auto")),
    "open slices": _value("schedule.slices", "auto"),
    "ramp": Trait("schedule.ramp", bool),
    "tokens": Trait("schedule.tokens", bool),
    "file": Trait("schedule.kind", lambda kind: kind.lower().endswith(".csv"), 'schedule.kind = "FILE.csv"'),
    "plugin": Trait("schedule.kind", lambda kind: ":" in kind, 'schedule.kind = "module:function"'),
    "overlap": Trait("schedule.overlap", bool),
    "group": Trait("schedule.group", _given),
    "chunks": Trait("schedule.chunks", _not(1)),
    "memory limit": Trait("schedule.memory_limit", _given),
    "offload": Trait("memory.activations", lambda v: "offload" in _choices(v), "memory.activations with offload"),
    "selective": Trait("memory.activations", lambda v: "selective" in _choices(v), "memory.activations with selective"),
    "slow ranks": Trait("hardware.slow", _given),
    "rates by rank": Trait("hardware.tflops", _listed, "hardware.tflops by rank"),
    "bandwidths by rank": Trait("hardware.memory_gbps", _listed, "hardware.memory_gbps by rank"),
    "memory by rank": Trait("hardware.memory_gib", _listed, "hardware.memory_gib by rank"),
    "open activations": Trait("memory.activations", _open, 'memory.activations = "auto"'),
    "post-validate": _value("optimizer.sync", "post-validate"),
    "two versions": _value("optimizer.sync", "two-versions"),
    "asynchronous": _value("optimizer.sync", "asynchronous"),
    "feedback": Trait("optimizer.feedback", bool),
    "moving average": Trait("optimizer.ema", _given),
    "clipped scores": Trait("optimizer.qk_clip", _given),
    "freeze": Trait("freeze.most", bool),
    "adapter": Trait("adapter.rank", bool),
    "dropout": Trait("adapter.dropout", bool),
    "trained whole": Trait("adapter.targets", _whole, 'adapter.targets with "whole"'),
    "balance": _value("data.balance", "length"),
    "dealt by tokens": _value("data.balance", "tokens"),
    "steps": _value("data.items", "steps"),
    "period": _value("schedule.objective", "period"),
    "evaluation": Trait("train.eval_every", _not(0)),
    "metric": Trait("checkpoint.keep_best", lambda value: isinstance(value, str), "checkpoint.keep_best by a metric"),
    "fused gradients": Trait("train.fused_gradients", bool),
    "filler": Trait("filler.task", _given),
    "copies": Trait("schedule.kind", text="a schedule with several copies of a stage"),
    "groups": Trait("schedule.kind", text="a schedule with groups of ops"),
    "whole": Trait("schedule.kind", text="a schedule of whole microbatches"),
    "chains": Trait("schedule.kind", text="a schedule of chains"),
    "flush": Trait("schedule.kind", text="a schedule that needs a flush"),
    "trace": Trait("run.trace", text="--trace"),
    "exact": Trait("run.exact", text="--exact"),
}
FLUSHLESS = {"two-versions": "two versions", "asynchronous": "asynchronous"}  # optimizer.sync -> trait
# Names that rows use for several traits at once.
SEVERAL = {
    "sliced": ("slices", "open slices"),
    "tied": ("tied embeddings", "ties"),
    "flushless": tuple(FLUSHLESS.values()),
    "barrier-free": ("post-validate", "two versions", "asynchronous"),
    "unlike ranks": ("slow ranks", "rates by rank", "bandwidths by rank"),
    "frees": ("sharded weights", "sharded all"),
    "scatters": ("sharded gradients", "sharded all"),
    "shards more": ("sharded weights", "sharded gradients", "sharded all"),
    "sharded": ("sharded optimizer", "sharded weights", "sharded gradients", "sharded all"),
    "vocabulary": ("shared vocabulary", "open vocabulary"),
}
UNWRITTEN = ""  # the reason of a pair that could be built
DROP = "drop one of them"


# Trait -> the traits that it excludes, names joined by |, each with the reason and maybe a fix. Errors point to the
# setting of the trait, or to the excluded one after an @.
ROWS: dict[str, dict[str, str | tuple[str, str]]] = {
    "flushless": {
        "tied": "stages step at other times",
        "shared vocabulary|offload": UNWRITTEN,
        "overlap": "the two ops of a group, which run at once, may be of different steps and weights",
        "freeze": "shares shorten a step from its first forward to its last backward, between two flushes",
        "file|plugin": "orders from elsewhere are of one step, from its first forward to its last backward",
        "balance": "steps of other numbers of microbatches do not follow one another without a flush",
        "filler": "there is little to fill",
        "flush": ("in a steady state there is no bubble that it could fill", "use 1f1b, interleaved-1f1b or gis"),
        "trace": ("steps are recorded that begin where the one before ended", "leave out --trace"),
    },
    "two versions": {"frees": UNWRITTEN, "replicas": "their order needs a flush"},
    "asynchronous": {
        "@dp|shards more|replicas|ep": ("replicas would wait for each other", "set dp = 1, and no shard"),
        "@cp": ("ranks with parts of a gradient would wait for each other", "set cp = 1"),
        "sliced": "slices of a microbatch would run on weights of several steps",
    },
    "average": {
        "post-validate": "what replicas would send each other may be taken back",
        "two versions": UNWRITTEN,
        "asynchronous": "replicas would wait for each other",
        "sharded": "replicas with weights of their own have nothing to share out",
        "replicas": "copies of a stage sum their gradients",
        "world": "it compares ranks by their samples alone",
        "bfloat16 weights": "a rotating share of bfloat16 weights would lose what is added to it",
        "balance": "replicas of unequal work would count alike",
        "copies": ("copies of a stage sum their gradients", "drop average, or use a schedule of one pipe"),
    },
    "freeze": {
        "tied": "a gradient that is shared by layers is not the mean over the microbatches of one",
        "compile": "a compiled layer cannot leave out its weight gradients in some microbatches only",
        "scatters": "gradients are summed over ranks before their mean is known",
        "replicas": "the replicas of a stage do not know what the others have left out",
        "sliced": "slices of a microbatch would be trained in different layers",
        "overlap|groups": "what a group takes does not follow from the shares of its ops",
        "balance": "the shares are those of one number of microbatches",
        "post-validate": "a step that is made again would need what was left out",
        "offload": "a frozen layer keeps less than the host has room for",
        "copies": (
            "they do not know what the others have left out",
            "drop [freeze], or use another schedule, such as 1f1b or zb-v",
        ),
    },
    "float16": {
        "barrier-free": (
            "the loss scale of a step follows from the verdict on the one before",
            'use dtype = "bfloat16", or sync = "before-step"',
        ),
        "average": ("replicas with weights of their own would have scales of their own", 'use dtype = "bfloat16"'),
    },
    "no masters": {
        "feedback|moving average": ("in bfloat16 most of what it adds would be lost by rounding", 'drop "alone"'),
    },
    "fused gradients": {"compile": "a compiled layer adds up its gradients as its graph says"},
    "adapter": {"@frees": ("frozen weights are whole on every replica", 'use shard = "optimizer" or "gradients"')},
    "dropout": {
        "tp|cp|sliced": "what is 0 in one part of a layer or of a sequence would be so in the others",
        "compile": UNWRITTEN,
    },
    "trained whole": {"tied|vocabulary": (UNWRITTEN, "leave its name out, and all of it is frozen")},
    "balance": {
        "@ramp": "balanced steps choose their own number of microbatches",
        "@sliced": "slices are cut at the same places of all microbatches",
        "@file": "a file is an order for one number of microbatches",
        "@compile": "attention depends on the lengths",
        "@trace": ("one plan is recorded for all replicas of a step", "leave out --trace"),
    },
    "tokens": {
        "sliced": "slices are cut at the same places of all microbatches",
        "ramp": "they are of one number of microbatches",
        "world": ("they are of one number of microbatches", "set parallel.pp and dp"),
        "balance": ("balanced steps choose their own number of microbatches", 'set data.balance = "tokens"'),
        "compile": ("a layer is compiled for whole microbatches", "set compile = false"),
    },
    "dealt by tokens": {
        "@asynchronous": UNWRITTEN,
        "@average": "replicas of unequal work would count alike",
        "@graph": UNWRITTEN,
    },
    "steps": {
        "sliced": "slices are cut at the same places of all microbatches",
        "ramp": "a step comes with all its microbatches",
        "balance|dealt by tokens": "a step comes with its microbatches",
        "experts": "experts would count and balance the rows of padding",
        "evaluation": "nothing is kept for it",
    },
    "graph": {
        "@chains": ("a rank has one stage of it, once", 'use kind = "1f1b", "zb-h1", "zb-auto" or "auto"'),
        "@file|plugin": ("orders from elsewhere are of chains", 'use kind = "1f1b" or "zb-h1"'),
        "@sliced": ("slices are of sequences in a chain", "drop it"),
        "@chunks": ("a rank has one stage of it", "drop it"),
        "@shared vocabulary": ("its ends are more than two", "drop it"),
        "@replicas": ("they are of stages in a chain", "use dp"),
        "@barrier-free": ("norms travel along a chain", 'use sync = "before-step"'),
        "@freeze": ("shares are found for a chain", "drop it"),
        "@balance": ("it packs sequences of tokens", "drop it"),
    },
    "loss by chunks": {
        "vocabulary": (
            "all ranks tell of a microbatch at once, of their words' logits, and keep them for the gradient",
            'drop it, or set parallel.vocabulary = "ends"',
        ),
    },
    "metric": {
        "cp|sliced": "it is a mean over whole samples",
        "loss by chunks|shared vocabulary": "no rank has the logits of a microbatch at once",
        "tp": UNWRITTEN,
    },
    "shared vocabulary": {
        "post-validate|replicas": (UNWRITTEN, f'{DROP}: vocabulary = "ends"'),
        "copies": (UNWRITTEN, 'set parallel.vocabulary = "ends", or use kind = "zb-v", "zb-auto" or "1f1b"'),
    },
    "sliced": {
        "compile": ("a layer is compiled for whole microbatches", "set compile = false, or slices = 1"),
        "file": ("its order is one of whole microbatches", "drop it, or name a schedule with kind"),
    },
    "slices": {
        "whole": (
            "its places meet in the middle, and slices come back in reverse",
            'drop schedule.slices, or use kind = "zb-v", "zb-auto" or "1f1b"',
        ),
    },
    "selective": {
        "compile": "a compiled layer is one piece",
        "model of transformers": "its layers do not say what is cheap",
    },
    "shards more": {
        "post-validate": ("tentative weights would be gathered twice", 'drop sync, or set shard = "optimizer"'),
    },
    "tp|cp|ep": {"compile": "compiled layers cannot meet others inside"},
    "ep over dp": {"@balance|dealt by tokens": "replicas of unequal work would wait for each other in every block"},
    "expert bias": {
        "@barrier-free": "the loads of a step are known when forwards of the next one have chosen their experts",
    },
    "clipped scores": {
        "norms of heads": "the norm of queries and keys undoes it",
        "adapter": "it scales weights that are frozen",
        "own layers": "only heads of built-in models are known",
        "flushless": "scores of weights from before the last clip would have it made twice",
        "compile": UNWRITTEN,
    },
    "unlike ranks": {
        "replicas": "replicas step in for ranks that are slow",
        "world": ("they are of one number of ranks", "set parallel.pp and dp"),
    },
    "memory by rank": {"world": ("it is of one number of ranks", "set parallel.pp and dp")},
    "exact": {
        "@slices|tokens": "the solver knows microbatches that are whole and alike",
        "@graph|copies|replicas": "the solver knows one pipe",
        "@overlap|groups": "the solver knows one op at a time",
        "@shared vocabulary|offload": "ops move after the order that the solver knows",
        "@barrier-free|period": "the solver knows one step",
        "@freeze": "shares shorten an order that is found without them",
    },
    "ramp": {"file": "a file is an order for one number of microbatches"},
}


class Exclusion(NamedTuple):
    """Two traits that no job can have together; `at` is the one whose setting an error points to."""

    one: str
    other: str
    why: str
    hint: str
    at: str

    @property
    def reason(self) -> str:
        return f"exclude each other: {self.why}" if self.why else "do not go together yet"

    def error(self, where: Where | None = None, schedule: str = "", of: str = "config") -> ZbcError:
        """`schedule`: name of the schedule that has the other trait; `of`: the first word of the message."""
        label, excluded = (TRAITS[name].label for name in (self.one, self.other))
        text = f"{of}: {label} and {f'{schedule}, {excluded},' if schedule else excluded} {self.reason}"
        return ZbcError("E110", text, where=where and where(TRAITS[self.at].place), hint=self.hint)


def _single(names: str) -> Iterator[str]:
    for name in names.lstrip("@").split("|"):
        yield from SEVERAL.get(name, (name,))


def _pairs() -> Iterator[Exclusion]:
    for trait, row in ROWS.items():
        for names, reason in row.items():
            why, hint = reason if isinstance(reason, tuple) else (reason, DROP)
            for name in _single(trait):
                for other in _single(names):
                    yield Exclusion(name, other, why, hint, other if names[0] == "@" else name)


PAIRS = tuple(_pairs())


def clashes(sections: Sections, more: Collection[str] = ()) -> Iterator[Exclusion]:
    """The excluded pairs that a job with these sections has; `more`: traits of its schedule."""
    there = {name for name, trait in TRAITS.items() if trait.of(sections)}.union(more)
    return (pair for pair in PAIRS if pair.one in there and pair.other in there)


def problems(sections: Sections, where: Where) -> Iterator[ZbcError]:
    """An error for each pair of settings."""
    return (pair.error(where) for pair in clashes(sections))


def of_schedule(sections: Sections, where: Where, name: str, traits: Collection[str]) -> Iterator[ZbcError]:
    """Errors of a job with these sections under the schedule of this name, which has these traits."""
    return (pair.error(where, name) for pair in clashes(sections, traits) if pair.other in traits)


def refused(one: str, other: str, of: str, schedule: str = "") -> ZbcError:
    """The error of two traits that were found together, without a place: no job is at hand."""
    return next(pair for pair in PAIRS if pair[:2] == (one, other)).error(None, schedule, of)


def of_plan(there: Collection[str]) -> Iterator[ZbcError]:
    """E406 of a runtime for each excluded pair of a plan's traits; zbc makes no such plan."""
    for pair in PAIRS:
        if pair.one in there and pair.other in there:
            text = f"run: the plan has {TRAITS[pair.one].label} and {TRAITS[pair.other].label}, which {pair.reason}"
            yield ZbcError("E406", text, hint="plan again without one of them")


def table(word: str = "") -> Iterator[tuple[str, str, str]]:
    """Rows (trait, excluded traits, reason) as text, of the traits with `word` among the words of their names."""
    for trait, row in ROWS.items():
        label = _called(_single(trait), "")
        for names, reason in row.items():
            excluded = _called(_single(names), "" if _has(label, word) else word)
            if excluded:
                yield label, excluded, (reason[0] if isinstance(reason, tuple) else reason) or "not written yet"


def _has(label: str, word: str) -> bool:
    """Whether a word of the label, or several in a row, begin with `word`; a short word is a whole one: ep, tp."""
    end = r"(?![a-z0-9])" if 0 < len(word) < 4 else ""
    return re.search(rf"(?<![a-z0-9]){re.escape(word.lower())}{end}", label.lower()) is not None


def _called(names: Iterable[str], word: str) -> str:
    """Labels that contain `word`, values of a key joined: `parallel.shard = "weights" or "all", parallel.cp`."""
    labels = dict[str, str]()
    for label in (TRAITS[name].label for name in names):
        key, _, value = label.partition(" = ")
        if _has(label, word):
            labels[key] = label if key not in labels else f"{labels[key]} or {value}" if " = " in labels[key] else key
    return ", ".join(labels.values())
