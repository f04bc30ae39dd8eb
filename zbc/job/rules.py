"""Checks across tables that are valid one by one: values that do not exist or exclude each other."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import Any

from zbc import excludes
from zbc.errors import ZbcError, raise_all
from zbc.job import adapter, balance, cuts, extent, flushless, gpu, learning_rate, model_section, ramp, tokens, toml
from zbc.job import unread as idle
from zbc.job.hfmodel import check_shared
from zbc.job.job import Draft, Job
from zbc.job.model_section import TRANSFORMERS, Model
from zbc.job.section import FACTORY
from zbc.job.sections import (
    ACTIVATIONS,
    BY_RANK,
    LAYERS_AGAIN,
    SECTIONS,
    Checkpoint,
    Data,
    Filler,
    GivenCosts,
    Hardware,
    Log,
    Memory,
    Optimizer,
    Parallel,
    Partition,
    Schedule,
    Train,
    parse_limit,
)
from zbc.job.unread import KINDS_OF_FILES, asks
from zbc.job.wording import did_you_mean

Found = Iterator[ZbcError]
Where = Callable[..., str]  # key path -> its place
REPLICATED = "replicated-1f1b"  # the schedule that reads parallel.replicas


def given(rule: Callable[..., Found]) -> Callable[[Draft], Found]:
    """A rule that is asked if all tables it names without a default could be read; it may take `draft` or `where`."""
    named = [*signature(rule).parameters.values()]

    def asked(draft: Draft) -> Found:
        found = {**draft.sections, "draft": draft, "where": draft.document.where}
        if all(table.default is None or found.get(table.name) is not None for table in named):
            yield from rule(**{table.name: found.get(table.name) for table in named})

    return asked


@given
def _model_rules(draft: Draft, model: Model) -> Found:
    yield from model_section.problems(model, draft.document)


@given
def _data_rules(draft: Draft, where: Where, data: Data, model: Model | None = None) -> Found:
    kinds = ("text", "tokens", "chat", "synthetic")
    if data.kind not in kinds and not FACTORY.fullmatch(data.kind):
        choices = 'use "text", "tokens", "chat", "synthetic" or "package.module:factory"'
        hint = did_you_mean(data.kind, kinds) or choices
        yield ZbcError("E103", f"config: unknown data.kind {data.kind!r}", where=where(("data", "kind")), hint=hint)
    yield from _path_rules(data, draft.document)
    if model is None:
        return
    if data.kind == "text" and model.builtin and model.vocab and model.vocab < 256:
        text = f"config: text data has 256 byte values, model.vocab is {model.vocab}"
        yield ZbcError("E150", text, where=where(("model", "vocab")), hint="use vocab = 256 or more")
    if data.kind == "synthetic" and not model.builtin and (model.vocab is None or model.seq_len is None):
        text = "config: synthetic data are tokens and need model.vocab and model.seq_len"
        yield ZbcError("E150", text, where=where(("data", "kind")), hint='or give data.kind = "package.module:factory"')
    if data.kind == "chat" and data.tokenizer is None and model.pretrained is None:
        text = "config: data.tokenizer is missing (the folder of a tokenizer and its chat template)"
        yield ZbcError("E105", text, where=where(("data",), key=True), hint='add tokenizer = "FOLDER"')
    if data.kind in KINDS_OF_FILES and not model.builtin and model.seq_len is None:
        text = f"config: {data.kind} data need model.seq_len"
        yield ZbcError("E150", text, where=where(("data",)), hint='or give data.kind = "package.module:factory"')


@given
def _evaluation_rules(where: Where, train: Train, data: Data, checkpoint: Checkpoint | None = None) -> Found:
    if train.eval_every and not data.validation:
        text = "config: train.eval_every evaluates on data that are kept for it, and [data] keeps none"
        hint = 'set data.validation = 0.01, or = "FILE"'
        yield ZbcError("E110", text, where=where(("train", "eval_every")), hint=hint)
    if "eval_every" in train.model_fields_set and train.eval_every:
        return
    reads: list[tuple[Any, str, str]] = [(train, "train", "patience"), (checkpoint, "checkpoint", "keep_best")]
    if "eval_every" not in train.model_fields_set:
        reads += [(train, "train", "eval_batches")]
        reads += [(data, "data", "validation")] if data.others is not None else []
    for section, name, key in reads:
        if section is not None and asks(section, key):
            text = f"config: train.eval_every is missing, without which nothing is evaluated and {name}.{key} not read"
            hint = "add eval_every = 100 (steps between two) to [train]"
            hint += ", or drop it" if key in ("patience", "keep_best") else ", or eval_every = 0 for none"
            yield ZbcError("E105", text, where=where((name, key)), hint=hint)


@given
def _writing_rules(where: Where, checkpoint: Checkpoint | None = None, log: Log | None = None) -> Found:
    """Settings of output that would silently write nothing, or into the current directory."""
    if checkpoint is not None and checkpoint.model_fields_set and "every" not in checkpoint.model_fields_set:
        text = "config: checkpoint.every is missing, without which there are no checkpoints"
        hint = "add every = 500 (steps between two), or every = 0 for none"
        yield ZbcError("E105", text, where=where(("checkpoint",), key=True), hint=hint)
    if checkpoint is not None and checkpoint.dir == "":
        hint = "give it a name, or leave it out"
        yield ZbcError("E103", "config: checkpoint.dir is empty", where=where(("checkpoint", "dir")), hint=hint)
    for i, name in enumerate(log.to if log is not None else ()):
        if name != "tensorboard" and not re.fullmatch("wandb:.+", name):
            text = f"config: log.to: {name!r} is neither tensorboard nor wandb:PROJECT"
            hint = 'write to = ["tensorboard", "wandb:my-project"], or one of them'
            yield ZbcError("E103", text, where=where(("log", "to", i)), hint=hint)


def _path_rules(data: Data, document: toml.Document) -> Found:
    if data.kind in ("tokens", "chat") and not data.path:
        text = f"config: data.path is missing (files of {data.kind})"
        hint = 'add path = "train.bin"; `zbc tokenize` makes such files'
        hint = hint if data.kind == "tokens" else 'add path = "train.jsonl", or a list of files'
        yield ZbcError("E105", text, where=document.where(("data",), key=True), hint=hint)
    if data.dtype is not None and data.kind != "tokens":
        text = f'config: data.dtype is for kind = "tokens", kind is "{data.kind}"'
        yield ZbcError("E150", text, where=document.where(("data", "dtype")), hint="drop it")
    if data.others is not None and data.kind not in KINDS_OF_FILES:
        text = f"config: data.validation names files of text, tokens or chat, data.kind is {data.kind!r}"
        hint = "write the share of the samples that is kept, such as 0.01"
        yield ZbcError("E150", text, where=document.where(("data", "validation")), hint=hint)


@given
def _cost_rules(draft: Draft, where: Where, costs: GivenCosts, model: Model | None = None) -> Found:
    given = [key for key in ("f", "b", "w") if getattr(costs, key) is not None]
    if 0 < len(given) < 3:
        missing = ", ".join(key for key in ("f", "b", "w") if key not in given)
        text = f"config: costs give {', '.join(given)} but not {missing}"
        yield ZbcError("E141", text, where=where(("costs", given[0])), hint="give all of f, b and w, or none")
    if given and draft.document.profile is not None:
        text = f"config: --profile and costs.{given[0]} are two answers to one question"
        yield ZbcError("E141", text, where=where(("costs", given[0])), hint=f"drop {', '.join(given)}, or the profile")
    if costs.act_w is not None and costs.act_b is None:
        text = "config: costs.act_w is a part of costs.act_b, which is not given"
        yield ZbcError("E141", text, where=where(("costs", "act_w")), hint="give act_b too")
    numbers = ("f", "b", "w", "optimizer", "act_b", "act_w")
    if asks(costs, "per") and all(getattr(costs, key) is None for key in numbers):
        text = f'config: costs.per = "{costs.per}" says what the other numbers are the costs of, and there are none'
        yield ZbcError("E141", text, where=where(("costs", "per")), hint="give f, b and w, or drop it")
    if model is not None and costs.per == "layer":
        for key in ("f", "b", "w", "optimizer", "act_b", "act_w"):
            value = getattr(costs, key)
            if isinstance(value, list) and len(value) not in (model.layers, model.layers + 2 * model.builtin):
                text = f"config: costs.{key} has {len(value)} numbers, model.layers is {model.layers}"
                hint = f"give one number, or {model.layers}; {model.layers + 2} with embedding and head"
                yield ZbcError("E141", text, where=where(("costs", key)), hint=hint)


@given
def _sharding_rules(where: Where, parallel: Parallel, memory: Memory) -> Found:
    if not parallel.frees and asks(memory, "resident"):
        text = f'config: memory.resident goes with parallel.shard = "weights" or "all", shard is "{parallel.shard}"'
        yield ZbcError("E110", text, where=where(("memory", "resident")), hint="drop it, or share out the weights")
    if parallel.one_sided and not parallel.frees:
        text = f'config: parallel.exchange = "one-sided" goes with shard = "weights" or "all", found "{parallel.shard}"'
        yield ZbcError("E110", text, where=where(("parallel", "exchange")), hint="drop it, or share out the weights")


def _idle_rules(draft: Draft) -> Found:
    yield from idle.problems(draft.sections, draft.document)


@given
def _memory_limit_rule(draft: Draft, schedule: Schedule) -> Found:
    if schedule.memory_limit is not None and parse_limit(schedule.memory_limit) is None:
        text = f"config: cannot read schedule.memory_limit {schedule.memory_limit!r}"
        where = draft.document.where(("schedule", "memory_limit"))
        yield ZbcError("E103", text, where=where, hint='write "1.0x" or "40 GiB"')


@given
def _extent_rule(
    draft: Draft, model: Model | None = None, parallel: Parallel | None = None, schedule: Schedule | None = None
) -> Found:
    ranks, ops = None if parallel is None else parallel.ranks, None
    if parallel is not None and schedule is not None:
        slices = schedule.slices if isinstance(schedule.slices, int) else 1
        ops = 3 * parallel.pp * (schedule.chunks or 1) * schedule.microbatches * slices
    yield from extent.problems(draft.document, model.layers if model is not None else None, ranks, ops)


@given
def _partition_rules(draft: Draft, partition: Partition, model: Model | None = None) -> Found:
    if partition.layout is None:
        return
    where = draft.document.where(("partition", "layers_per_stage"))
    if not re.fullmatch(r"[EtLm|*()\d, ]+", partition.layout):
        text = f"config: partition.layers_per_stage: expected a list or \"equal\", found '{partition.layout}'"
        yield ZbcError("E103", text, where=where, hint="a layout of Megatron-LM is like Et|t*3|tL")
    if model is not None and not model.builtin:
        text = "config: a layout names the parts of a built-in model, model.family is another"
        yield ZbcError("E110", text, where=where, hint="list the layers of each stage")


@given
def _tensor_parallel_rules(draft: Draft, parallel: Parallel, model: Model | None = None) -> Found:
    if parallel.tp == 1:
        return
    tp, where = parallel.tp, draft.document.where(("parallel", "tp"))
    if model is not None and model.builtin:
        widths: dict[str, int | None] = {"ffn": model.mlp_width}
        if model.experts:
            of = {"expert_hidden": model.expert_width, "shared_hidden": model.shared_hidden}
            widths = of | (widths if model.first_dense else {})
        counts = {"heads": model.heads, "kv_heads": model.kv_heads, **widths}
        for key, count in counts.items():
            if count is not None and count % tp:
                most = math.gcd(*(size for size in counts.values() if size is not None))
                fits = ", ".join(str(n) for n in range(1, most + 1) if most % n == 0)
                text = f"config: parallel.tp = {tp} does not divide model.{key} = {count}"
                yield ZbcError("E119", text, where=where, hint=f"what does: {fits}")
                break
    elif model is not None and model.family == TRANSFORMERS:
        try:
            check_shared(json.dumps(model.args["config"]), tp)
        except ZbcError as error:
            yield ZbcError(error.code, error.message, where=where, hint=error.hint)


@given
def _context_rules(draft: Draft, parallel: Parallel, model: Model) -> Found:
    """E119 for sequences that context parallelism cannot split into two equal chunks per rank."""
    if parallel.cp == 1:
        return
    where, chunks = draft.document.where(("parallel", "cp")), 2 * parallel.cp
    if not model.builtin and model.family != TRANSFORMERS:
        text = f"config: parallel.cp is for built-in models and those of transformers, not for {model.family!r}"
        yield ZbcError("E119", text, where=where, hint="set cp = 1")
    elif model.seq_len is not None and model.seq_len % chunks:
        text = f"config: 2 parallel.cp = {chunks} chunks of each sequence do not divide model.seq_len = {model.seq_len}"
        near = model.seq_len // chunks * chunks or chunks
        yield ZbcError("E119", text, where=where, hint=f"set seq_len = {near}, or another cp")


@given
def _sequence_rules(draft: Draft, parallel: Parallel, model: Model | None = None) -> Found:
    """E119 for settings that exclude sequence parallelism (`tp_sequence`)."""
    if not parallel.tp_sequence:
        return
    where = draft.document.where(("parallel", "tp_sequence"))
    if parallel.tp == 1:
        text = "config: parallel.tp_sequence shares tokens among ranks that share layers, and parallel.tp is 1"
        yield ZbcError("E119", text, where=where, hint="set parallel.tp, or leave tp_sequence out")
        return
    if model is not None and not model.builtin:
        text = f"config: parallel.tp_sequence is for the built-in models, model.family is {model.family!r}"
        yield ZbcError("E119", text, where=where, hint="leave tp_sequence out")
    elif model is not None and model.seq_len is not None and model.seq_len % parallel.width:
        named, ranks = "tp" if parallel.cp == 1 else "cp x parallel.tp", parallel.width
        text = f"config: parallel.{named} = {ranks} does not divide model.seq_len = {model.seq_len}"
        near = model.seq_len // ranks * ranks or ranks
        yield ZbcError("E119", text, where=where, hint=f"set seq_len = {near}, or leave tp_sequence out")


@given
def _vocabulary_rules(draft: Draft, parallel: Parallel) -> Found:
    """E110 for a vocabulary that ranks cannot share; "auto" leaves it at the ends then."""
    if parallel.vocabulary in ("ends", "auto"):
        return
    where = draft.document.where(("parallel", "vocabulary"))
    for text, hint in unshareable(draft.sections):
        yield ZbcError("E110", text, where=where, hint=hint)


def unshareable(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Reasons why a job with these sections cannot share its vocabulary, each with a fix."""
    parallel: Parallel = sections["parallel"]
    ends = 'vocabulary = "ends"'
    model: Model | None = sections.get("model")
    if model is not None and (not model.builtin or model.loss != "cross_entropy"):
        setting = f"model.loss is {model.loss!r}" if model.builtin else f"model.family is {model.family!r}"
        text = f"config: only the output layer of a built-in model with cross_entropy can be shared, {setting}"
        yield text, f"set {ends}"
    elif model is not None and model.vocab is not None and model.vocab < parallel.pp * parallel.tp:
        text = (
            f"config: a vocabulary of {model.vocab} words leaves some of {parallel.pp * parallel.tp} ranks without any"
        )
        yield text, f"set parallel.pp = {max(1, model.vocab // parallel.tp)} or less, or {ends}"


@given
def _order_rule(where: Where, parallel: Parallel) -> Found:
    if parallel.order is None:
        return
    world = parallel.pp * parallel.dp
    if sorted(parallel.order) != list(range(world)):
        what = "ranks" if parallel.width == 1 else f"groups of {parallel.width} ranks"
        text = f"config: parallel.order does not name each of the {what} 0 to {world - 1} once"
        hint = f"write {list(range(world))} in the order of the pipeline" if world <= 16 else "leave it out"
        yield ZbcError("E110", text, where=where(("parallel", "order")), hint=hint)


@given
def _function_rules(where: Where, train: Train, checkpoint: Checkpoint | None = None) -> Found:
    best = None if checkpoint is None else checkpoint.keep_best
    for section, key, name in (("train", "hook", train.hook), ("checkpoint", "keep_best", best)):
        if isinstance(name, str) and not FACTORY.fullmatch(name):
            text = f"config: {section}.{key} {name!r} does not name a function"
            hint = f'write {key} = "package.module:function"'
            yield ZbcError("E103", text, where=where((section, key)), hint=hint)


@given
def _filler_rule(draft: Draft, filler: Filler) -> Found:
    if filler.task is not None and not FACTORY.fullmatch(filler.task):
        text = f"config: filler.task {filler.task!r} does not name a function"
        where = draft.document.where(("filler", "task"))
        yield ZbcError("E103", text, where=where, hint='write task = "package.module:make"')


@given
def _replica_rule(draft: Draft, parallel: Parallel, schedule: Schedule) -> Found:
    where, counts = draft.document.where(("parallel", "replicas")), parallel.replicas
    if schedule.kind.lower() != REPLICATED:
        chosen = draft.document.where(("schedule", "kind")).startswith("--")  # another schedule may be tried
        if counts is not None and not chosen:
            text = 'config: parallel.replicas goes with schedule.kind = "replicated-1f1b"'
            yield ZbcError("E110", text, where=where, hint="set that kind, or drop replicas")
    elif counts is None:
        text = f"config: {REPLICATED} needs parallel.replicas, the ranks of each stage"
        hint = f'write replicas = "auto", or numbers that sum to pp = {parallel.pp}'
        yield ZbcError("E110", text, where=draft.document.where(("schedule", "kind")), hint=hint)
    elif counts != "auto":
        yield from _counted_replicas(counts, parallel.pp, *fewest_microbatches(draft.sections), where)


def fewest_microbatches(sections: Mapping[str, Any]) -> tuple[int, str]:
    """The fewest microbatches of any step of a job with these sections, and the key that sets them."""
    data, schedule = sections.get("data"), sections["schedule"]
    if data is not None and data.balance == "length":
        return 1, "data.balance"
    return (schedule.ramp[0].microbatches, "schedule.ramp") if schedule.ramp else (schedule.microbatches, "")


def _counted_replicas(counts: list[int], pp: int, microbatches: int, key: str, where: str) -> Found:
    if not counts or sum(counts) != pp:
        near = [*counts[:-1], pp - sum(counts[:-1])]
        fits = len(near) > 0 and near[-1] > 0
        hint = (
            f"set parallel.pp = {sum(counts)}" + (f", or replicas = {near}" if fits else "") if counts else "name some"
        )
        text = f"config: parallel.replicas sum to {sum(counts)}, parallel.pp is {pp}"
        yield ZbcError("E110", text, where=where, hint=hint)
    elif max(counts) > microbatches:
        of = f" of {key}" if key else ""
        text = f"config: a stage has {max(counts)} replicas and a step{of} {microbatches} microbatches"
        fix = "drop data.balance" if key == "data.balance" else f"use {max(counts)} microbatches or more"
        yield ZbcError("E110", text, where=where, hint=f"{fix}, or fewer replicas")


@given
def _gpu_rules(where: Where, hardware: Hardware) -> Found:
    if hardware.gpu is None:
        return
    try:
        gpu.named(hardware.gpu, where(gpu.GPU))
    except ZbcError as error:
        yield error


@given
def _rank_rules(draft: Draft, hardware: Hardware, parallel: Parallel) -> Found:
    """E110 for lists of [hardware] without exactly one entry per rank of the pipeline."""
    for key in (*BY_RANK, "slow"):
        values = getattr(hardware, key)
        if isinstance(values, list) and len(values) != parallel.pp:
            text = f"config: hardware.{key} has {len(values)} numbers, parallel.pp is {parallel.pp}"
            where = draft.document.where(("hardware", key))
            yield ZbcError("E110", text, where=where, hint="give one for each rank of the pipeline, or one for all")


@given
def _activation_rules(draft: Draft, memory: Memory) -> Found:
    given = memory.activations if isinstance(memory.activations, dict) else {None: memory.activations}
    for stage, choice in given.items():
        place = ("memory", "activations") if stage is None else ("memory", "activations", stage)
        where = draft.document.where(place)
        if stage is not None and not re.fullmatch(r"0|[1-9]\d{0,8}", stage):
            text = f"config: memory.activations has the key {stage!r}, not the number of a stage"
            yield ZbcError("E103", text, where=where, hint='write { 0 = "recompute" }')
        if choice not in ACTIVATIONS and not LAYERS_AGAIN.fullmatch(choice):
            hint = did_you_mean(choice, list(ACTIVATIONS)) or 'use "keep", "recompute", "offload" or "auto"'
            if choice.startswith("recompute "):
                hint = 'layers of a stage: { recompute = 6 } or { recompute = "auto" }'
            yield ZbcError("E103", f"config: unknown memory.activations {choice!r}", where=where, hint=hint)


@given
def _rate_rules(
    draft: Draft, optimizer: Optimizer, train: Train, parallel: Parallel | None = None, schedule: Schedule | None = None
) -> Found:
    steps = float(train.steps)
    if schedule is not None and schedule.ramp and parallel is not None and optimizer.schedule.by == "samples":
        per = schedule.microbatch_size * parallel.dp
        steps = ramp.full_steps(schedule.ramp, schedule.microbatches, per, train.steps)
    yield from learning_rate.problems(optimizer.peak_lr, optimizer.schedule, steps, draft.document)


@given
def _ramp_rules(
    draft: Draft, schedule: Schedule, parallel: Parallel | None = None, train: Train | None = None
) -> Found:
    if not schedule.ramp:
        return
    if parallel is not None and train is not None:
        per = schedule.microbatch_size * parallel.dp
        yield from ramp.problems(schedule.ramp, schedule.microbatches, per, train.steps, draft.document)


@given
def _copies_rule(where: Where, model: Model) -> Found:
    """E110 for tied embeddings of a factory."""
    if model.tie_embeddings and not model.builtin:
        text = "config: model.tie_embeddings is for built-in families; a factory's layers cannot share parameters"
        yield ZbcError("E110", text, where=where(("model", "tie_embeddings")), hint="drop it")


@given
def _expert_rules(draft: Draft, parallel: Parallel, model: Model) -> Found:
    """E110 for `parallel.ep` without experts, or that does not divide experts and the ranks of a stage, and for
    `parallel.expert_tp` without `ep`, or that is neither 1 nor tp."""
    if (asked := parallel.expert_tp) not in (None, parallel.tp if parallel.ep == 1 else 1, parallel.tp):
        wrong = "is neither 1 nor" if asked != 1 else "and parallel.ep = 1: experts are shared like other layers by"
        text = f"config: parallel.expert_tp = {asked} {wrong} parallel.tp = {parallel.tp}"
        hint = "drop expert_tp" + ("" if parallel.ep > 1 else ", or set parallel.ep")
        yield ZbcError("E110", text, where=draft.document.where(("parallel", "expert_tp")), hint=hint)
    if parallel.ep == 1:
        return
    where, hint, text = draft.document.where(("parallel", "ep")), "drop ep", ""
    count = parallel.dp * (listed := parallel.topology.listed)
    axes = {"tp": parallel.tp if parallel.folded else 1, "cp": parallel.cp, "dp": parallel.dp}
    if model.builtin and not model.experts:
        text = "shares out the experts of a block, and model.experts is not set"
    elif parallel.folded and not model.builtin:
        text = "shares out whole experts over ranks that share layers, and layers of your own route all tokens on each"
        hint = f"set parallel.expert_tp = {parallel.tp}"
    elif model.experts and model.experts % parallel.ep:
        text, hint = f"does not divide model.experts = {model.experts}", "use a divisor of both, or 1"
    elif count % parallel.ep:
        ranks = " x ".join(f"parallel.{axis}" for axis, size in axes.items() if size > 1 or axis == "dp")
        text = f"does not divide {ranks} = {count}"
        hint = f"set dp = {parallel.ep // math.gcd(parallel.ep, listed)} or a multiple of it"
    if text:
        yield ZbcError("E110", f"config: parallel.ep = {parallel.ep} {text}", where=where, hint=hint)


@given
def _average_rules(draft: Draft, parallel: Parallel) -> Found:
    if parallel.average is None:
        return
    where = draft.document.where(("parallel", "average"))
    if parallel.dp == 1 and parallel.world is None:
        text = "config: parallel.average averages the weights of replicas, and parallel.dp is 1"
        yield ZbcError("E110", text, where=where, hint="set parallel.dp to 2 or more, or drop average")
    elif parallel.topology.span == parallel.dp > 1:
        text = f"config: parallel.average averages weights of several replicas, of which ep = {parallel.ep} makes one"
        hint = f"set parallel.dp to a multiple of {parallel.ep}, or drop average"
        yield ZbcError("E110", text, where=where, hint=hint)
    if parallel.average.ema and not parallel.average.delay:
        text = f"config: parallel.average.ema = {parallel.average.ema} smooths what lands later, and delay is 0"
        yield ZbcError("E110", text, where=where, hint="set delay = 1, or drop ema")


def _excluded(draft: Draft) -> Found:
    yield from excludes.problems(draft.sections, draft.document.where)


RULES = (
    _model_rules,
    _extent_rule,
    _data_rules,
    _cost_rules,
    _memory_limit_rule,
    cuts.problems,
    _partition_rules,
    _activation_rules,
    _copies_rule,
    _rate_rules,
    _ramp_rules,
    _tensor_parallel_rules,
    _context_rules,
    _sequence_rules,
    _vocabulary_rules,
    _order_rule,
    _replica_rule,
    _function_rules,
    _filler_rule,
    _excluded,
    flushless.problems,
    _gpu_rules,
    _rank_rules,
    _evaluation_rules,
    _sharding_rules,
    adapter.problems,
    balance.problems,
    tokens.problems,
    _average_rules,
    _expert_rules,
    _idle_rules,
    _writing_rules,
)


_OF_COUNTS = (_extent_rule, _replica_rule, _excluded, flushless.problems, balance.problems)


_OF_PLANS = (_extent_rule, _cost_rules, _rank_rules, _average_rules)


def of_a_plan(draft: Draft) -> Found:
    """The problems of a plan's job, which somebody may have edited, that its readers do not expect."""
    return (problem for rule in _OF_PLANS for problem in rule(draft))


def asked_again(job: Job) -> Job:
    """Checks a job derived from another one with another number of microbatches, by the rules that depend on it; the
    other rules read the file, which a job from a plan does not have. Raises their errors."""
    draft = Draft(job.document, {name: getattr(job, name) for name in SECTIONS}, [])
    raise_all(problem for rule in _OF_COUNTS for problem in rule(draft))
    return job
