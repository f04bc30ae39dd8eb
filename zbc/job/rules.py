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
from zbc.job import adapter as lora
from zbc.job import cuts, gpu, learning_rate, model_section, ramp, tokens, unread
from zbc.job.adapter import Adapter
from zbc.job.hfmodel import check_shared, unshareable_words
from zbc.job.job import Draft, Job
from zbc.job.model_section import TRANSFORMERS, Model
from zbc.job.section import FACTORY, LAYERS, OPS, RANKS, Problem
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
from zbc.job.unread import KINDS_OF_FILES, asks, reads_attention
from zbc.job.wording import did_you_mean

Found = Iterator[ZbcError | Problem] | Iterator[Problem]
REPLICATED = "replicated-1f1b"  # the schedule that reads parallel.replicas
RULES: list[Callable[[Draft], Iterator[ZbcError]]] = []  # in the order of their errors


def given(rule: Callable[..., Found]) -> Callable[[Draft], Iterator[ZbcError]]:
    """A rule that is asked if all tables it names without a default could be read; it may take `draft`. Its errors are
    at the place of their key; `[data]` is the head of a table."""
    named = [*signature(rule).parameters.values()]

    def asked(draft: Draft) -> Iterator[ZbcError]:
        found = {**draft.sections, "draft": draft}
        if any(table.default is not None and found.get(table.name) is None for table in named):
            return
        for problem in rule(**{table.name: found.get(table.name) for table in named}):
            if isinstance(problem, ZbcError):
                yield problem
                continue
            code, key, text, hint = problem
            head = isinstance(key, str) and key.startswith("[")
            path = tuple(key.strip("[]").split(".")) if isinstance(key, str) else key
            yield ZbcError(code, f"config: {text}", where=draft.document.where(path, key=head), hint=hint)

    RULES.append(asked)
    return asked


given(model_section.problems)


@given
def _extent_rule(
    draft: Draft, model: Model | None = None, parallel: Parallel | None = None, schedule: Schedule | None = None
) -> Found:
    """E114 for more layers, ranks or ops of a step than zbc plans."""
    ops = 0
    if parallel is not None and schedule is not None:
        slices = schedule.slices if isinstance(schedule.slices, int) else 1
        ops = 3 * parallel.pp * (schedule.chunks or 1) * schedule.microbatches * slices
    if model is not None and model.layers > LAYERS:
        text = f"model.layers = {model.layers} are more than zbc plans, {LAYERS}"
        yield "E114", "model.layers", text, f"use {LAYERS} or fewer"
    elif parallel is not None and parallel.ranks > RANKS:
        text = f"the job has {parallel.ranks} ranks (pp dp tp), more than zbc plans for, {RANKS}"
        yield "E114", "parallel.dp", text, "use fewer replicas or ranks"
    elif ops > OPS:
        hint = "use fewer microbatches (a larger microbatch_size), ranks or chunks"
        where, details = (
            draft.document.where(("schedule", "microbatches")),
            [f"= {OPS} take some 15 minutes and 19 GiB"],
        )
        text = f"config: a step of this job has {ops} ops, zbc plans up to {OPS}"
        yield ZbcError("E114", text, where=where, hint=hint, details=details)


@given
def _data_rules(data: Data, model: Model | None = None) -> Found:
    kinds, own = ("text", "tokens", "chat", "synthetic"), 'or give data.kind = "package.module:factory"'
    if data.kind not in kinds and not FACTORY.fullmatch(data.kind):
        choices = 'use "text", "tokens", "chat", "synthetic" or "package.module:factory"'
        yield "E103", "data.kind", f"unknown data.kind {data.kind!r}", did_you_mean(data.kind, kinds) or choices
    if data.kind in ("tokens", "chat") and not data.path:
        hint = 'add path = "train.bin"; `zbc tokenize` makes such files'
        hint = hint if data.kind == "tokens" else 'add path = "train.jsonl", or a list of files'
        yield "E105", "[data]", f"data.path is missing (files of {data.kind})", hint
    if any(data.sets.values()) and data.kind not in KINDS_OF_FILES:
        text = f"data.validation names files of text, tokens or chat, data.kind is {data.kind!r}"
        yield "E150", "data.validation", text, "write the share of the samples that is kept, such as 0.01"
    if model is None:
        return
    if data.kind == "text" and model.builtin and model.vocab and model.vocab < 256:
        text = f"text data has 256 byte values, model.vocab is {model.vocab}"
        yield "E150", "model.vocab", text, "use vocab = 256 or more"
    if data.kind == "synthetic" and not model.builtin and (model.vocab is None or model.seq_len is None):
        yield "E150", "data.kind", "synthetic data are tokens and need model.vocab and model.seq_len", own
    if data.kind == "chat" and data.tokenizer is None and model.pretrained is None:
        text = "data.tokenizer is missing (the folder of a tokenizer and its chat template)"
        yield "E105", "[data]", text, 'add tokenizer = "FOLDER"'
    if data.kind in KINDS_OF_FILES and not model.builtin and model.seq_len is None:
        yield "E150", ("data",), f"{data.kind} data need model.seq_len", own


@given
def _cost_rules(draft: Draft, costs: GivenCosts, model: Model | None = None) -> Found:
    given = [key for key in ("f", "b", "w") if getattr(costs, key) is not None]
    numbers = ("f", "b", "w", "optimizer", "act_b", "act_w")
    if 0 < len(given) < 3:
        missing = ", ".join(key for key in ("f", "b", "w") if key not in given)
        text = f"costs give {', '.join(given)} but not {missing}"
        yield "E141", f"costs.{given[0]}", text, "give all of f, b and w, or none"
    if given and draft.document.profile is not None:
        text = f"--profile and costs.{given[0]} are two answers to one question"
        yield "E141", f"costs.{given[0]}", text, f"drop {', '.join(given)}, or the profile"
    if costs.act_w is not None and costs.act_b is None:
        yield "E141", "costs.act_w", "costs.act_w is a part of costs.act_b, which is not given", "give act_b too"
    if asks(costs, "per") and all(getattr(costs, key) is None for key in numbers):
        text = f'costs.per = "{costs.per}" says what the other numbers are the costs of, and there are none'
        yield "E141", "costs.per", text, "give f, b and w, or drop it"
    if model is None or costs.per != "layer":
        return
    for key in numbers:
        value = getattr(costs, key)
        if isinstance(value, list) and len(value) not in (model.layers, model.layers + 2 * model.builtin):
            text = f"costs.{key} has {len(value)} numbers, model.layers is {model.layers}"
            hint = f"give one number, or {model.layers}; {model.layers + 2} with embedding and head"
            yield "E141", f"costs.{key}", text, hint


@given
def _memory_limit_rule(schedule: Schedule) -> Found:
    if schedule.memory_limit is not None and parse_limit(schedule.memory_limit) is None:
        text = f"cannot read schedule.memory_limit {schedule.memory_limit!r}"
        yield "E103", "schedule.memory_limit", text, 'write "1.0x" or "40 GiB"'


given(cuts.problems)


@given
def _partition_rules(partition: Partition, model: Model | None = None) -> Found:
    key = "partition.layers_per_stage"
    if partition.layout is None:
        return
    if not re.fullmatch(r"[EtLm|*()\d, ]+", partition.layout):
        text = f"{key}: expected a list or \"equal\", found '{partition.layout}'"
        yield "E103", key, text, "a layout of Megatron-LM is like Et|t*3|tL"
    if model is not None and not model.builtin:
        text = "a layout names the parts of a built-in model, model.family is another"
        yield "E110", key, text, "list the layers of each stage"


@given
def _activation_rules(memory: Memory) -> Found:
    given = memory.activations if isinstance(memory.activations, dict) else {None: memory.activations}
    for stage, choice in given.items():
        place = ("memory", "activations") if stage is None else ("memory", "activations", stage)
        if stage is not None and not re.fullmatch(r"0|[1-9]\d{0,8}", stage):
            text = f"memory.activations has the key {stage!r}, not the number of a stage"
            yield "E103", place, text, 'write { 0 = "recompute" }'
        if choice not in ACTIVATIONS and not LAYERS_AGAIN.fullmatch(choice):
            hint = did_you_mean(choice, list(ACTIVATIONS)) or 'use "keep", "recompute", "offload" or "auto"'
            if choice.startswith("recompute "):
                hint = 'layers of a stage: { recompute = 6 } or { recompute = "auto" }'
            yield "E103", place, f"unknown memory.activations {choice!r}", hint


@given
def _rate_rules(
    optimizer: Optimizer, train: Train, parallel: Parallel | None = None, schedule: Schedule | None = None
) -> Found:
    steps = float(train.steps)
    if schedule is not None and schedule.ramp and parallel is not None and optimizer.schedule.by == "samples":
        per = schedule.microbatch_size * parallel.dp
        steps = ramp.full_steps(schedule.ramp, schedule.microbatches, per, train.steps)
    yield from learning_rate.problems(optimizer.peak_lr, optimizer.schedule, steps)


@given
def _ramp_rules(schedule: Schedule, parallel: Parallel, train: Train) -> Found:
    per = schedule.microbatch_size * parallel.dp
    yield from ramp.problems(schedule.ramp, schedule.microbatches, per, train.steps)


@given
def _tensor_parallel_rules(parallel: Parallel, model: Model) -> Found:
    if (tp := parallel.tp) == 1:
        return
    if model.builtin:
        widths = [width for width in (model.mlp_width, model.shared_hidden) if width]
        counts = [("heads", model.heads), ("kv_heads", model.kv_heads), *(("ffn_hidden", width) for width in widths)]
        for key, count in counts:
            if count is not None and count % tp:
                most = math.gcd(*(size for _, size in counts if size is not None))
                fits = ", ".join(str(n) for n in range(1, most + 1) if most % n == 0)
                text = f"parallel.tp = {tp} does not divide model.{key} = {count}"
                yield "E119", "parallel.tp", text, f"what does: {fits}"
                break
    elif model.family == TRANSFORMERS:
        try:
            check_shared(json.dumps(model.args["config"]), tp)
        except ZbcError as error:
            yield error.code, "parallel.tp", error.message.removeprefix("config: "), error.hint or ""


@given
def _context_rules(parallel: Parallel, model: Model) -> Found:
    """E119 for sequences that context parallelism cannot split into two equal chunks per rank."""
    chunks = 2 * parallel.cp
    if parallel.cp == 1:
        return
    if not model.builtin and model.family != TRANSFORMERS:
        text = f"parallel.cp is for built-in models and those of transformers, not for {model.family!r}"
        yield "E119", "parallel.cp", text, "set cp = 1"
    elif model.seq_len is not None and model.seq_len % chunks:
        text = f"2 parallel.cp = {chunks} chunks of each sequence do not divide model.seq_len = {model.seq_len}"
        near = model.seq_len // chunks * chunks or chunks
        yield "E119", "parallel.cp", text, f"set seq_len = {near}, or another cp"


@given
def _sequence_rules(parallel: Parallel, model: Model | None = None) -> Found:
    """E119 for settings that exclude sequence parallelism (`tp_sequence`)."""
    text = hint = ""
    if not parallel.tp_sequence:
        return
    if parallel.tp == 1:
        text = "parallel.tp_sequence shares tokens among ranks that share layers, and parallel.tp is 1"
        hint = "set parallel.tp"
    elif model is not None and not model.builtin:
        text = f"parallel.tp_sequence is for the built-in models, model.family is {model.family!r}"
    elif model is not None and model.seq_len is not None and model.seq_len % parallel.width:
        named, ranks = "tp" if parallel.cp == 1 else "cp x parallel.tp", parallel.width
        text = f"parallel.{named} = {ranks} does not divide model.seq_len = {model.seq_len}"
        hint = f"set seq_len = {model.seq_len // ranks * ranks or ranks}"
    if text:
        yield "E119", "parallel.tp_sequence", text, f"{hint}{', or ' * bool(hint)}leave tp_sequence out"


@given
def _vocabulary_rules(draft: Draft, parallel: Parallel) -> Found:
    """E110 for a vocabulary that ranks cannot share; "auto" leaves it at the ends then."""
    if parallel.vocabulary not in ("ends", "auto"):
        for text, hint in unshareable(draft.sections):
            yield "E110", "parallel.vocabulary", text, hint


def unshareable(sections: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Reasons why a job with these sections cannot share its vocabulary, each with a fix."""
    parallel: Parallel = sections["parallel"]
    ends = 'vocabulary = "ends"'
    model: Model | None = sections.get("model")
    if model is not None and (not model.causal or model.loss != "cross_entropy"):
        setting = f"model.loss is {model.loss!r}" if model.causal else f"model.family is {model.family!r}"
        yield f"ranks share the output layers of causal models with cross_entropy, {setting}", f"set {ends}"
    elif model is not None and (why := unshareable_words(model)):
        yield f"ranks cannot share the vocabulary of {why}", f"set {ends}"
    elif model is not None and model.vocab is not None and model.vocab < parallel.pp * parallel.tp:
        ranks = parallel.pp * parallel.tp
        text = f"a vocabulary of {model.vocab} words leaves some of {ranks} ranks without any"
        yield text, f"set parallel.pp = {max(1, model.vocab // parallel.tp)} or less, or {ends}"


@given
def _order_rule(parallel: Parallel) -> Found:
    world = parallel.pp * parallel.dp
    if parallel.order is not None and sorted(parallel.order) != list(range(world)):
        what = "ranks" if parallel.width == 1 else f"groups of {parallel.width} ranks"
        text = f"parallel.order does not name each of the {what} 0 to {world - 1} once"
        hint = f"write {list(range(world))} in the order of the pipeline" if world <= 16 else "leave it out"
        yield "E110", "parallel.order", text, hint


@given
def _replica_rule(draft: Draft, parallel: Parallel, schedule: Schedule) -> Found:
    key, counts = "parallel.replicas", parallel.replicas
    if schedule.kind.lower() != REPLICATED:
        chosen = draft.document.where(("schedule", "kind")).startswith("--")  # another schedule may be tried
        if counts is not None and not chosen:
            text = 'parallel.replicas goes with schedule.kind = "replicated-1f1b"'
            yield "E110", key, text, "set that kind, or drop replicas"
    elif counts is None:
        text = f"{REPLICATED} needs parallel.replicas, the ranks of each stage"
        hint = f'write replicas = "auto", or numbers that sum to pp = {parallel.pp}'
        yield "E110", "schedule.kind", text, hint
    elif counts != "auto":
        fewest, by = fewest_microbatches(draft.sections)
        if not counts or sum(counts) != parallel.pp:
            near = [*counts[:-1], parallel.pp - sum(counts[:-1])]
            fits = f", or replicas = {near}" if near[-1] > 0 else ""
            text = f"parallel.replicas sum to {sum(counts)}, parallel.pp is {parallel.pp}"
            yield "E110", key, text, f"set parallel.pp = {sum(counts)}{fits}" if counts else "name some"
        elif max(counts) > fewest:
            of = f" of {by}" if by else ""
            text = f"a stage has {max(counts)} replicas and a step{of} {fewest} microbatches"
            fix = "drop data.balance" if by == "data.balance" else f"use {max(counts)} microbatches or more"
            yield "E110", key, text, f"{fix}, or fewer replicas"


def fewest_microbatches(sections: Mapping[str, Any]) -> tuple[int, str]:
    """The fewest microbatches of any step of a job with these sections, and the key that sets them."""
    data, schedule = sections.get("data"), sections["schedule"]
    if data is not None and data.balance == "length":
        return 1, "data.balance"
    return (schedule.ramp[0].microbatches, "schedule.ramp") if schedule.ramp else (schedule.microbatches, "")


@given
def _function_rules(train: Train, checkpoint: Checkpoint | None = None, filler: Filler | None = None) -> Found:
    """E103 for names of functions that are none."""
    best, task = None if checkpoint is None else checkpoint.keep_best, None if filler is None else filler.task
    for key, name in (("train.hook", train.hook), ("checkpoint.keep_best", best), ("filler.task", task)):
        if isinstance(name, str) and not FACTORY.fullmatch(name):
            text, function = f"{key} {name!r} does not name a function", "make" if key == "filler.task" else "function"
            yield "E103", key, text, f'write {key.partition(".")[2]} = "package.module:{function}"'


def _excluded(draft: Draft) -> Iterator[ZbcError]:
    yield from excludes.problems(draft.sections, draft.document.where)


RULES.append(_excluded)


@given
def _sync_rules(optimizer: Optimizer, schedule: Schedule | None = None) -> Found:
    """E110 for settings that asynchronous stages cannot have."""
    sync, every = optimizer.sync, optimizer.every
    if sync == "asynchronous" and schedule is not None and schedule.microbatches % every:
        text = f"optimizer.every = {every} does not divide {schedule.microbatches} microbatches"
        yield "E110", "optimizer.every", text, "set a number that does"


@given
def _gpu_rules(draft: Draft, hardware: Hardware) -> Found:
    if hardware.gpu is not None:
        try:
            gpu.named(hardware.gpu, draft.document.where(gpu.GPU))
        except ZbcError as error:
            yield error


@given
def _rank_rules(hardware: Hardware, parallel: Parallel) -> Found:
    """E110 for lists of [hardware] without exactly one entry per rank of the pipeline."""
    for key in (*BY_RANK, "slow"):
        values = getattr(hardware, key)
        if isinstance(values, list) and len(values) != parallel.pp:
            text = f"hardware.{key} has {len(values)} numbers, parallel.pp is {parallel.pp}"
            yield "E110", f"hardware.{key}", text, "give one for each rank of the pipeline, or one for all"


@given
def _evaluation_rules(train: Train, data: Data, checkpoint: Checkpoint | None = None) -> Found:
    if train.eval_every and not data.validation:
        text = "train.eval_every evaluates on data that are kept for it, and [data] keeps none"
        yield "E110", "train.eval_every", text, 'set data.validation = 0.01, or = "FILE"'
    said = "eval_every" in train.model_fields_set
    if said and train.eval_every:
        return
    reads: list[tuple[Any, str]] = [(train, "train.patience"), (checkpoint, "checkpoint.keep_best")]
    reads += (
        [] if said else [(train, "train.eval_batches"), (data if any(data.sets.values()) else None, "data.validation")]
    )
    for section, key in reads:
        if section is not None and asks(section, key.partition(".")[2]):
            text = f"train.eval_every is missing, without which nothing is evaluated and {key} not read"
            hint = "add eval_every = 100 (steps between two) to [train]"
            alone = key in ("train.patience", "checkpoint.keep_best")
            yield "E105", key, text, hint + (", or drop it" if alone else ", or eval_every = 0 for none")


@given
def _sharding_rules(parallel: Parallel, memory: Memory) -> Found:
    fix = "drop it, or share out the weights"
    if not parallel.frees and asks(memory, "resident"):
        text = f'memory.resident goes with parallel.shard = "weights" or "all", shard is "{parallel.shard}"'
        yield "E110", "memory.resident", text, fix
    if parallel.one_sided and not parallel.frees:
        text = f'parallel.exchange = "one-sided" goes with shard = "weights" or "all", found "{parallel.shard}"'
        yield "E110", "parallel.exchange", text, fix


given(lora.problems)


@given
def _balance_rules(data: Data, schedule: Schedule, model: Model | None = None) -> Found:
    """E103 and E110 for settings that contradict `data.balance`."""
    most = schedule.max_microbatches
    if data.balance != "length" and asks(schedule, "max_microbatches"):
        text = f'schedule.max_microbatches goes with data.balance = "length", balance is "{data.balance}"'
        yield "E110", "schedule.max_microbatches", text, "drop it, or balance samples"
    if data.balance != "none" and data.kind == "text":
        hint = 'make documents of it with `zbc tokenize`, and use kind = "tokens"'
        yield "E110", "data.balance", "data.balance needs the length of each sample, and text is one long sample", hint
    if data.balance == "length" and most is not None and most < schedule.microbatches:
        text = f"schedule.max_microbatches is {most}, less than the mean"
        yield "E103", "schedule.max_microbatches", text, f"set it to {schedule.microbatches} or more, or drop it"
    if data.balance == "length" and model is not None and model.seq_len is None:
        text = "data.balance packs samples into rows of model.seq_len tokens, which is not given"
        yield "E110", "data.balance", text, "set model.seq_len"


given(tokens.problems)


@given
def _average_rules(parallel: Parallel) -> Found:
    if parallel.average is None:
        return
    if parallel.dp == 1 and parallel.world is None:
        text = "parallel.average averages the weights of replicas, and parallel.dp is 1"
        yield "E110", "parallel.average", text, "set parallel.dp to 2 or more, or drop average"
    elif parallel.topology.span == parallel.dp > 1:
        text = f"parallel.average averages weights of several replicas, of which ep = {parallel.ep} makes one"
        yield "E110", "parallel.average", text, f"set parallel.dp to a multiple of {parallel.ep}, or drop average"
    if parallel.average.ema and not parallel.average.delay:
        text = f"parallel.average.ema = {parallel.average.ema} smooths what lands later, and delay is 0"
        yield "E110", "parallel.average", text, "set delay = 1, or drop ema"


@given
def _expert_rules(parallel: Parallel, model: Model) -> Found:
    """E110 for `parallel.ep` without experts, or that does not divide experts and the ranks of a stage, and for
    `parallel.expert_tp` without `ep`, or that is neither 1 nor tp."""
    if (asked := parallel.expert_tp) not in (None, parallel.tp if parallel.ep == 1 else 1, parallel.tp):
        wrong = "is neither 1 nor" if asked != 1 else "and parallel.ep = 1: experts are shared like other layers by"
        text = f"parallel.expert_tp = {asked} {wrong} parallel.tp = {parallel.tp}"
        yield "E110", "parallel.expert_tp", text, "drop expert_tp" + ("" if parallel.ep > 1 else ", or set parallel.ep")
    if parallel.ep == 1:
        return
    hint, text = "drop ep", ""
    count = parallel.dp * (listed := parallel.topology.listed)
    axes = {"tp": parallel.tp if parallel.folded else 1, "cp": parallel.cp, "dp": parallel.dp}
    if model.builtin and not model.experts:
        text = "shares out the experts of a block, and model.experts is not set"
    elif parallel.folded and not model.builtin:
        text = "shares out whole experts over ranks that share layers, and layers of your own route all tokens on each"
        hint = f"set parallel.expert_tp = {parallel.tp}"
    elif model.experts and model.experts % parallel.ep:
        text = f"does not divide model.experts = {model.experts}"
        hint = f"use a divisor of {math.gcd(model.experts, count)}, which divides the {count} ranks, too"
    elif count % parallel.ep:
        ranks = " x ".join(f"parallel.{axis}" for axis, size in axes.items() if size > 1 or axis == "dp")
        text = f"does not divide {ranks} = {count}"
        hint = f"set dp = {parallel.ep // math.gcd(parallel.ep, listed)} or a multiple of it"
        hint += ", or drop expert_tp" if parallel.tp > 1 and not parallel.folded else ""
    if text:
        yield "E110", "parallel.ep", f"parallel.ep = {parallel.ep} {text}", hint


@given
def _idle_rules(
    draft: Draft,
    optimizer: Optimizer | None = None,
    memory: Memory | None = None,
    adapter: Adapter | None = None,
    data: Data | None = None,
) -> Found:
    """Keys that have no effect because of another key of their table."""
    yield from unread.problems(draft.sections)
    if optimizer and optimizer.split and asks(optimizer, "lr"):
        text = "optimizer.lr is two rates, of matrices and of the rest, which are for muon, optimizer.kind is another"
        yield "E110", "optimizer.lr", text, 'write one, or use kind = "muon"'
    if optimizer and optimizer.name == "sgd, bfloat16" and asks(optimizer, "state"):
        text = "optimizer.state is of moments, which sgd without momentum does not have"
        yield "E110", "optimizer.state", text, "drop it, or set momentum"
    if memory and not reads_attention(memory.activations) and asks(memory, "attention"):
        text = f"memory.attention is of selective recompute, memory.activations is {memory.activations!r}"
        yield "E110", "memory.attention", text, 'drop it, or use activations = "selective"'
    for name in ("alpha", "dropout", "targets") if adapter and not adapter.rank else ():
        if adapter and asks(adapter, name):
            text = f"adapter.{name} is of adapters, and with adapter.rank = 0 there are none"
            yield "E110", f"adapter.{name}", text, "set adapter.rank, or drop it"
    if data is None:
        return
    own, kind = 'set kind = "package.module:factory"', f"data.kind is {data.kind!r}"
    if data.kind not in KINDS_OF_FILES and asks(data, "path"):
        text = f"data.path names files of text, tokens or chat, {kind}"
        yield "E150", "data.path", text, "drop it; what a factory of data needs goes into [data.args]"
    if data.kind in (*KINDS_OF_FILES, "synthetic") and asks(data, "items"):
        yield "E150", "data.items", f"data.items is of a dataset of yours, {kind}", f"drop it, or {own}"
    if data.items == "steps" and asks(data, "validation"):
        text = "data.validation keeps samples, and with data.items = 'steps' there are none"
        yield "E110", "data.validation", text, "drop it"
    if data.kind in ("text", "tokens", "synthetic") and asks(data, "args"):
        yield "E150", "data.args", f"data.args belong to a factory or a chat template, {kind}", f"drop them, or {own}"


@given
def _writing_rules(checkpoint: Checkpoint | None = None, log: Log | None = None) -> Found:
    """Settings of output that would silently write nothing, or into the current directory."""
    if checkpoint is not None and checkpoint.model_fields_set and "every" not in checkpoint.model_fields_set:
        text = "checkpoint.every is missing, without which there are no checkpoints"
        yield "E105", "[checkpoint]", text, "add every = 500 (steps between two), or every = 0 for none"
    if checkpoint is not None and checkpoint.dir == "":
        yield "E103", "checkpoint.dir", "checkpoint.dir is empty", "give it a name, or leave it out"
    for i, name in enumerate(log.to if log is not None else ()):
        if name != "tensorboard" and not re.fullmatch("wandb:.+", name):
            text = f"log.to: {name!r} is neither tensorboard nor wandb:PROJECT"
            yield "E103", ("log", "to", i), text, 'write to = ["tensorboard", "wandb:my-project"], or one of them'


_OF_COUNTS = (_extent_rule, _replica_rule, _excluded, _sync_rules, _balance_rules)


_OF_PLANS = (_extent_rule, _cost_rules, _rank_rules, _average_rules)


def of_a_plan(draft: Draft) -> Iterator[ZbcError]:
    """The problems of a plan's job, which somebody may have edited, that its readers do not expect."""
    return (problem for rule in _OF_PLANS for problem in rule(draft))


def asked_again(job: Job) -> Job:
    """Checks a job derived from another one with another number of microbatches, by the rules that depend on it; the
    other rules read the file, which a job from a plan does not have. Raises their errors."""
    draft = Draft(job.document, {name: getattr(job, name) for name in SECTIONS}, [])
    raise_all(problem for rule in _OF_COUNTS for problem in rule(draft))
    return job
