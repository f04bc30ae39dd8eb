"""The TOML description of a job: its sections, their defaults, and what makes them wrong.

Each table is a frozen pydantic model. Reading collects every problem of a file with its place before it raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tomli
from pydantic import Field, ValidationError

from zbc import extent, learning_rate, model_section, ramp, toml
from zbc import profile as profiles
from zbc.errors import ZbcError, raise_all
from zbc.model_section import Model as Model
from zbc.profile import Profile
from zbc.ramp import Phase
from zbc.section import FACTORY, Count, NotNegative, Positive
from zbc.section import Section as Section
from zbc.wording import convert, did_you_mean, unknown

VERSION = 1
ACTIVATIONS = ("keep", "recompute", "auto", "offload")

PerPart = NotNegative | list[NotNegative]  # one number for all ranks, stages or layers, or one each


class Parallel(Section):
    """`[parallel]`: how many ranks."""

    pp: Count = Field(description="pipeline ranks")
    dp: Count = Field(1, description="data-parallel copies of the pipeline")
    node: tuple[Count, Count] | None = Field(
        None,
        strict=False,
        description="neighbours of a pipeline, and copies of each, on a node; default: what sends least between nodes",
    )


class Schedule(Section):
    """`[schedule]`: the order of work."""

    kind: str | None = Field(None, description="a name from `zbc schedules`")
    microbatches: Count = Field(description="microbatches per step and pipeline")
    microbatch_size: Count = Field(1, description="sequences (samples) per microbatch")
    ramp: list[Phase] = Field([], description="what a training begins with: microbatches, and steps or samples")
    chunks: Count | None = Field(None, description="stages per rank, where the schedule leaves it open")
    group: Count | None = Field(
        None, description="microbatches per round (interleaved-1f1b) or unit (waves); default one per rank"
    )
    early: Annotated[int, Field(ge=0, le=2)] | None = Field(
        None, description="waves: forwards of the next unit that run before the last backwards of this one"
    )
    overlap: bool | None = Field(
        None, description="dualpipe: pairs of F and backward are groups; default: if costs.overlap is not 0"
    )
    memory_limit: str | None = Field(
        None, description='activations per rank: "1.0x" of the peak of 1F1B, or "40 GiB"; never exceeded'
    )
    objective: Literal["makespan", "span", "period"] | None = Field(None, description="default follows optimizer.sync")
    file: str | None = Field(None, description="a torch pipelining CSV instead of kind")
    plugin: str | None = Field(None, description='own generator, "package.module:function", Request -> Program')


class Partition(Section):
    """`[partition]`: layers to stages."""

    mode: Literal["auto", "uniform"] = Field(
        "auto", description="auto balances the costs of all layers, embedding and head included"
    )
    layers_per_stage: list[Annotated[int, Field(ge=0)]] | None = Field(None, description="blocks of each stage")
    layout: str | None = Field(None, description="Megatron's pipeline layout string")


class Hardware(Section):
    """`[hardware]`: what one rank is, and the links between ranks; used to estimate costs and memory."""

    device: Literal["cuda", "cpu"] = "cpu"
    memory_gib: Positive | None = Field(None, description="memory per rank; a plan that needs more is refused")
    tflops: Positive | None = Field(None, description="sustained per rank; default 230 on cuda, 0.1 on cpu")
    memory_gbps: Positive | None = Field(None, description="GB/s to memory; default 1750 on cuda, 20 on cpu")
    kernel_us: NotNegative | None = Field(None, description="what every kernel takes at least; default 3, 5 on cpu")
    link_gbps: Positive | None = Field(
        None, description="Gbit/s between two ranks of a node; default 200 on cuda, 20 on cpu"
    )
    link_us: NotNegative | None = Field(None, description="latency of a transfer; default 10 on cuda, 700 on cpu")
    ranks_per_node: Count = Field(8, description="ranks of the run that share a node; see parallel.node")
    inter_node_gbps: Positive | None = Field(None, description="Gbit/s between two nodes; default link_gbps")
    inter_node_us: NotNegative | None = Field(None, description="latency between two nodes; default link_us")


class LayerCost(Section):
    """Costs of the embedding or the head where costs are given per layer; times in ms."""

    f: NotNegative = 0.0
    b: NotNegative = 0.0
    w: NotNegative = 0.0
    act_b: NotNegative = 0.0
    act_w: NotNegative = 0.0


class GivenCosts(Section):
    """`[costs]`: measured times in ms, instead of estimates."""

    per: Literal["rank", "stage", "layer"] = Field("rank", description="what one number is the cost of")
    f: PerPart | None = Field(None, description="forward")
    b: PerPart | None = Field(None, description="gradient of the input")
    w: PerPart | None = Field(None, description="gradient of the weights")
    comm: NotNegative | None = Field(None, description="one boundary transfer between two ranks")
    reduce: NotNegative | None = Field(
        None,
        description="one sum of a stage's gradients over its copies; default: from the link, where sizes are known",
    )
    optimizer: PerPart | None = Field(None, description="one optimizer step; default 0 where f, b and w are given")
    overlap: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="of an F and a backward in one group, the share of the shorter that hides behind the longer"
    )
    act_b: PerPart | None = Field(None, description="memory F keeps until B, any unit")
    act_w: PerPart | None = Field(None, description="of it, what B keeps until W; default act_b")
    embed: LayerCost = Field(LayerCost(), description="per = layer: the embedding")
    head: LayerCost = Field(LayerCost(), description="per = layer: final norm, head and loss")
    profile: str | None = Field(None, description='a profile.json, as `zbc profile` writes it; "" for none')


class Memory(Section):
    """`[memory]`: what happens to activations between F and B."""

    activations: str | dict[str, str] = Field(
        "keep",
        description='"keep", "recompute", or "auto" where memory forces it; all stages or some: { 0 = "recompute" }',
    )

    def of(self, stage: int) -> str:
        """What happens to the activations of one stage."""
        return self.activations if isinstance(self.activations, str) else self.activations.get(str(stage), "keep")

    def settled(self, again: Collection[int], stages: int) -> Memory:
        """With the stages that recompute, those of `again` where it was left open, in place of "auto"."""
        if "auto" not in self.chosen():
            return self
        chosen = {str(s): "recompute" for s in range(stages) if s in again or self.of(s) == "recompute"}
        return Memory(activations="keep" if not chosen else "recompute" if len(chosen) == stages else chosen)

    def chosen(self) -> set[str]:
        return {self.activations} if isinstance(self.activations, str) else set(self.activations.values())


class Optimizer(Section):
    """`[optimizer]`."""

    kind: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: NotNegative = 3e-4
    betas: tuple[NotNegative, NotNegative] = Field((0.9, 0.95), strict=False)
    eps: Positive = 1e-8
    weight_decay: NotNegative = Field(0.1, description="adamw: decoupled; adam and sgd: added to the gradient")
    momentum: NotNegative = Field(0.0, description="sgd")
    clip_grad_norm: Positive | None = Field(None, description="largest norm of all gradients together")
    sync: Literal["before-step", "post-validate"] = Field(
        "before-step", description="post-validate: no barrier; ranks agree on a step while the next one warms up"
    )
    schedule: learning_rate.Schedule = Field(learning_rate.Schedule(), description="the learning rate over the steps")
    zero1: bool = Field(False, description="copies of a stage share out the optimizer's state and work")

    @property
    def name(self) -> str:
        """What its time and state depend on."""
        return f"{self.kind}, momentum" if self.kind == "sgd" and self.momentum else self.kind


class Train(Section):
    """`[train]`."""

    steps: Count = 100
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1234
    eval_every: Annotated[int, Field(ge=0)] = Field(
        0, description="steps between evaluations, and one in the end; 0: none"
    )
    eval_batches: Count | None = Field(
        None,
        description="of as many samples as a step has; default all whole microbatches of the data kept for it",
    )
    watchdog_s: Positive = Field(120.0, description="seconds without progress of any op before a run is ended")
    nonfinite: Literal["skip", "stop"] = Field(
        "skip", description="what a step does whose gradients are not all finite: change nothing, or end the run"
    )
    skip_limit: Count = Field(10, description="steps skipped in a row that end the run")
    skip_total: Count | None = Field(None, description="steps skipped in all that end the run; default: no limit")


class Data(Section):
    """`[data]`."""

    kind: str = Field(
        "text", description='"text", "tokens", "synthetic", or "package.module:factory", a map-style dataset'
    )
    path: str | list[str] | None = Field(
        None, description="text files or folders (default: Python's own sources), or token files"
    )
    dtype: Literal["uint16", "uint32"] | None = Field(None, description="of token files without a JSON beside them")
    validation: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of the samples, at the end of the data, that is kept for evaluation"
    )
    validation_path: str | list[str] | None = Field(None, description="other files for evaluation")
    args: dict[str, Any] = Field({}, description="keyword arguments of the factory")


class Checkpoint(Section):
    """`[checkpoint]`."""

    every: Annotated[int, Field(ge=0)] = Field(0, description="steps between checkpoints; 0: none")
    keep: Count = Field(3, description="complete checkpoints that stay; older ones are deleted")
    dir: str | None = Field(None, description="their folder, which all ranks see; default: in the run directory")
    asynchronous: bool = Field(True, description="write beside the steps that follow; false: steps wait for the disk")
    at_end: bool = Field(True, description="also after the last step")


class Log(Section):
    """`[log]`."""

    every: Count = Field(10, description="steps between console lines")
    dir: str = Field("runs", description="folder of the run directories")
    peak_tflops: Positive | None = Field(
        None, description="what MFU is a share of, such as 989 for bfloat16 on an H100; default hardware.tflops"
    )
    tensorboard: bool = Field(False, description="also event files; pip install 'zbc[tensorboard]'")
    wandb: str | None = Field(
        None, description="a Weights & Biases project to log to as well; pip install 'zbc[wandb]'"
    )


SECTIONS: dict[str, type[Section]] = {
    "model": Model,
    "parallel": Parallel,
    "schedule": Schedule,
    "partition": Partition,
    "hardware": Hardware,
    "costs": GivenCosts,
    "memory": Memory,
    "optimizer": Optimizer,
    "train": Train,
    "data": Data,
    "checkpoint": Checkpoint,
    "log": Log,
}
# What planning reads, and so what the plan id covers (of optimizer also PLANNED); all else can change under one plan.
PLANNING = ("model", "parallel", "schedule", "partition", "hardware", "costs", "memory")


PLANNED = ("sync", "zero1")


@dataclass(frozen=True)
class Job:
    """A complete, valid description, and where each value was written."""

    document: toml.Document
    model: Model
    parallel: Parallel
    schedule: Schedule
    partition: Partition
    hardware: Hardware
    costs: GivenCosts
    memory: Memory
    optimizer: Optimizer
    train: Train
    data: Data
    checkpoint: Checkpoint
    log: Log
    profile: Profile | None = None  # what costs.profile names

    def where(self, *path: str | int) -> str:
        return self.document.where(path)

    @property
    def objective(self) -> str:
        """`makespan` or `span`: what one step costs with this optimizer, unless the job says otherwise."""
        return self.schedule.objective or ("makespan" if self.optimizer.sync == "before-step" else "span")

    def planning(self) -> dict[str, Any]:
        """What decides the plan, as plain data: the sections, and what is in the profile instead of where it lies.

        Where initial weights come from is not part of that.
        """
        data = {name: getattr(self, name).model_dump(mode="json") for name in PLANNING}
        del data["model"]["pretrained"]
        data["costs"]["profile"] = None
        measured = {} if self.profile is None else {"profile": self.profile.plain()}
        return {**data, "optimizer": {key: getattr(self.optimizer, key) for key in PLANNED}, **measured}

    def training(self) -> dict[str, Any]:
        """The sections the runtime reads, as plain data."""
        names = [name for name in SECTIONS if name not in PLANNING]
        data = {name: getattr(self, name).model_dump(mode="json") for name in names}
        return {**data, "pretrained": self.model.pretrained}


@dataclass
class Draft:
    """The sections that could be read, and every problem found so far."""

    document: toml.Document
    sections: dict[str, Any]
    problems: list[ZbcError]
    profile: Profile | None = None

    def finish(self) -> Job:
        """The job, or every problem at once."""
        raise_all(self.problems)
        return Job(self.document, **self.sections, profile=self.profile)

    def add(self, code: str, message: str, *path: str | int, hint: str | None = None) -> None:
        self.problems.append(ZbcError(code, message, where=self.document.where(path), hint=hint))


def draft(
    path: Path,
    overrides: Sequence[str] = (),
    schedule: str | None = None,
    profile: Path | None = None,
    *,
    document: toml.Document | None = None,
) -> Draft:
    """Read a job file with `overrides` (`key.path=value`), `schedule` and `profile` on top; collect its problems.

    `document` is what stands in it, where it is no file.
    """
    document = toml.load(path) if document is None else document
    for override in overrides:
        document = toml.merge(document, _override(override, document.source))
    if schedule is not None:
        document = _choose(document, schedule)
    if profile is not None:
        place: dict[toml.KeyPath, str] = {("costs", "profile"): f"--profile {profile}"}
        named = {"costs": {"profile": str(profile)}}
        document = toml.merge(document, toml.Document(document.source, named, place, {**place}))
    result = Draft(document, {}, [])
    _check_version(result)
    for name in document.values.keys() - SECTIONS.keys() - {"zbc"}:
        known = [*SECTIONS, "zbc", "extends"]
        result.problems.append(unknown((name,), document, known))
    for name, section in SECTIONS.items():
        _read_section(result, name, section)
    for rule in RULES:
        result.problems.extend(rule(result))
    _read_profile(result)
    return result


def _read_profile(result: Draft) -> None:
    """The profile that costs.profile names; a relative path starts at the folder of the job file it is written in."""
    costs: GivenCosts | None = result.sections.get("costs")
    model, hardware, schedule = (result.sections.get(name) for name in ("model", "hardware", "schedule"))
    if costs is None or not costs.profile or model is None or hardware is None or schedule is None:
        return
    where = result.document.where(("costs", "profile"))
    path = Path(costs.profile)
    if not where.startswith("--"):  # written in a file, not on the command line
        path = Path(where.rsplit(":", 2)[0]).parent / path
    try:
        found = profiles.read(path, where)
    except ZbcError as error:
        result.problems.append(error)
        return
    wrong = profiles.misfits(found, model, device=hardware.device, microbatch_size=schedule.microbatch_size)
    if wrong:
        text = f"profile: {path.name} was made for something else"
        hint = "profile this job: `zbc profile JOB.toml -o FILE`"
        result.problems.append(ZbcError("E142", text, where=where, hint=hint, details=wrong))
        return
    result.profile = found


def _override(text: str, source: str) -> toml.Document:
    key, equals, value = text.partition("=")
    parts = tuple(key.strip().split("."))
    if not equals or len(parts) < 2 or not all(parts):
        hint = "write --set schedule.microbatches=16"
        raise ZbcError("E109", f"config: cannot read --set {text!r}", hint=hint)
    try:
        parsed = tomli.loads(f"x = {value}")["x"]
    except tomli.TOMLDecodeError:
        parsed = value.strip()
    tree: Any = parsed
    for part in reversed(parts):
        tree = {part: tree}
    places: dict[toml.KeyPath, str] = {parts: f"--set {text}"}
    if isinstance(parsed, list):
        places |= {(*parts, i): f"--set {text}" for i in range(len(parsed))}
    return toml.Document(source, tree, dict(places), places)


def _choose(document: toml.Document, schedule: str) -> toml.Document:
    """The document with `schedule` (a name, or a CSV file) in place of the kind, file or plugin it names."""
    chooser = "file" if schedule.lower().endswith(".csv") else "kind"
    place: dict[toml.KeyPath, str] = {("schedule", chooser): f"--schedule {schedule}"}
    chosen = toml.merge(document, toml.Document(document.source, {"schedule": {chooser: schedule}}, place, {**place}))
    others = {"kind", "file", "plugin"} - {chooser}
    section = {key: value for key, value in chosen.values["schedule"].items() if key not in others}
    return toml.Document(chosen.source, {**chosen.values, "schedule": section}, chosen.keys, chosen.places)


def _check_version(result: Draft) -> None:
    version = result.document.values.get("zbc", VERSION)
    if version != VERSION or isinstance(version, bool):
        result.add("E106", f"config: file version is {version!r}, this zbc reads {VERSION}", "zbc", hint="zbc = 1")


def _read_section(result: Draft, name: str, section: type[Section]) -> None:
    raw = result.document.values.get(name, {})
    if not isinstance(raw, Mapping):
        result.add("E103", f"config: {name} is a table, found {raw!r}", name, hint=f"write [{name}]")
        return
    required = [field for field, info in section.model_fields.items() if info.is_required()]
    if name not in result.document.values and required:
        keys = ", ".join(required)
        result.problems.append(
            ZbcError("E105", f"config: [{name}] is missing", where=result.document.source, hint=f"it needs {keys}")
        )
        return
    try:
        result.sections[name] = section.model_validate(dict(raw))
    except ValidationError as error:
        found: dict[tuple[Any, ...], ZbcError] = {}
        for problem in error.errors():
            converted, path = convert(name, section, problem, result.document)
            found.setdefault(path, converted)  # a union reports one problem per alternative
        # Of a list with a wrong item, the item is the problem, not that the list is no number.
        outer = {path[:end] for path in found for end in range(len(path))}
        result.problems.extend(problem for path, problem in found.items() if path not in outer)


# ---- rules over valid sections -------------------------------------------------------------------------------


def _model_rules(draft: Draft) -> Iterator[ZbcError]:
    model: Model | None = draft.sections.get("model")
    if model is not None:
        yield from model_section.problems(model, draft.document)


def _data_rules(draft: Draft) -> Iterator[ZbcError]:
    data: Data | None = draft.sections.get("data")
    model: Model | None = draft.sections.get("model")
    if data is None:
        return
    where = draft.document.where
    known = ("text", "tokens", "synthetic")
    if data.kind not in known and not FACTORY.fullmatch(data.kind):
        choices = 'use "text", "tokens", "synthetic" or "package.module:factory"'
        hint = did_you_mean(data.kind, known) or choices
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
    if data.kind in ("text", "tokens") and not model.builtin and model.seq_len is None:
        text = f"config: {data.kind} data need model.seq_len"
        yield ZbcError("E150", text, where=where(("data",)), hint='or give data.kind = "package.module:factory"')


def _evaluation_rules(draft: Draft) -> Iterator[ZbcError]:
    train, data = draft.sections.get("train"), draft.sections.get("data")
    if train is None or data is None:
        return
    if train.eval_every and not data.validation and data.validation_path is None:
        text = "config: train.eval_every evaluates on data that are kept for it, and [data] keeps none"
        hint = "set data.validation = 0.01, or data.validation_path"
        yield ZbcError("E110", text, where=draft.document.where(("train", "eval_every")), hint=hint)


def _writing_rules(draft: Draft) -> Iterator[ZbcError]:
    """What would be written nowhere, or in the current directory, without a word."""
    where = draft.document.where
    checkpoint = draft.sections.get("checkpoint")
    if checkpoint is not None and checkpoint.model_fields_set and "every" not in checkpoint.model_fields_set:
        text = "config: checkpoint.every is missing, without which there are no checkpoints"
        hint = "add every = 500 (steps between two), or every = 0 for none"
        yield ZbcError("E105", text, where=where(("checkpoint",), key=True), hint=hint)
    for section, key in (("checkpoint", "dir"), ("log", "dir"), ("log", "wandb")):
        found = draft.sections.get(section)
        if found is not None and getattr(found, key) == "":
            text = f"config: {section}.{key} is empty"
            yield ZbcError("E103", text, where=where((section, key)), hint="give it a name, or leave it out")


def _path_rules(data: Data, document: toml.Document) -> Iterator[ZbcError]:
    if data.kind == "tokens" and not data.path:
        text = "config: data.path is missing (token files)"
        hint = 'add path = "train.bin"; `zbc data tokenize` makes such files'
        yield ZbcError("E105", text, where=document.where(("data",), key=True), hint=hint)
    if data.dtype is not None and data.kind != "tokens":
        text = f'config: data.dtype is for kind = "tokens", kind is "{data.kind}"'
        yield ZbcError("E150", text, where=document.where(("data", "dtype")), hint="drop it")
    if data.validation_path is not None and (data.kind not in ("text", "tokens") or data.validation > 0):
        text = "config: data.validation_path names files of text or tokens, instead of data.validation"
        hint = "drop one of them" if data.validation > 0 else "use data.validation"
        yield ZbcError("E150", text, where=document.where(("data", "validation_path")), hint=hint)


def _cost_rules(draft: Draft) -> Iterator[ZbcError]:
    costs: GivenCosts | None = draft.sections.get("costs")
    model: Model | None = draft.sections.get("model")
    if costs is None:
        return
    where = draft.document.where
    given = [key for key in ("f", "b", "w") if getattr(costs, key) is not None]
    if 0 < len(given) < 3:
        missing = ", ".join(key for key in ("f", "b", "w") if key not in given)
        text = f"config: costs give {', '.join(given)} but not {missing}"
        yield ZbcError("E141", text, where=where(("costs", given[0])), hint="give all of f, b and w, or none")
    if given and costs.profile:
        text = f"config: costs.profile and costs.{given[0]} are two answers to one question"
        yield ZbcError("E141", text, where=where(("costs", "profile")), hint=f"drop {', '.join(given)}, or the profile")
    if costs.act_w is not None and costs.act_b is None:
        text = "config: costs.act_w is a part of costs.act_b, which is not given"
        yield ZbcError("E141", text, where=where(("costs", "act_w")), hint="give act_b too")
    for key in ("embed", "head"):
        if draft.document.has(("costs", key)) and costs.per != "layer":
            text = f'config: costs.{key} goes with per = "layer", per is "{costs.per}"'
            yield ZbcError("E141", text, where=where(("costs", key)), hint='set per = "layer", or drop it')
    if model is not None and costs.per == "layer":
        for key in ("f", "b", "w", "optimizer", "act_b", "act_w"):
            value = getattr(costs, key)
            if isinstance(value, list) and len(value) != model.layers:
                text = f"config: costs.{key} has {len(value)} numbers, model.layers is {model.layers}"
                hint = f"give one number, or {model.layers}"
                yield ZbcError("E140", text, where=where(("costs", key)), hint=hint)


def _memory_limit_rule(draft: Draft) -> Iterator[ZbcError]:
    schedule: Schedule | None = draft.sections.get("schedule")
    if schedule is None:
        return
    if schedule.memory_limit is not None and parse_limit(schedule.memory_limit) is None:
        text = f"config: cannot read schedule.memory_limit {schedule.memory_limit!r}"
        where = draft.document.where(("schedule", "memory_limit"))
        yield ZbcError("E103", text, where=where, hint='write "1.0x" or "40 GiB"')
    chosen = [key for key in ("kind", "file", "plugin") if getattr(schedule, key) is not None]
    if len(chosen) != 1:
        found = " and ".join(chosen) or "none"
        text = f"config: [schedule] needs one of kind, file and plugin, found {found}"
        key = ("schedule", chosen[-1]) if chosen else ("schedule",)
        hint = "keep one of them" if chosen else 'add kind = "zb-v"; `zbc schedules` lists them'
        yield ZbcError("E105" if not chosen else "E103", text, where=draft.document.where(key), hint=hint)


def _extent_rule(draft: Draft) -> Iterator[ZbcError]:
    model: Model | None = draft.sections.get("model")
    parallel: Parallel | None = draft.sections.get("parallel")
    schedule: Schedule | None = draft.sections.get("schedule")
    ranks, ops = None if parallel is None else parallel.pp * parallel.dp, None
    if parallel is not None and schedule is not None:
        ops = 3 * parallel.pp * (schedule.chunks or 1) * schedule.microbatches
    yield from extent.problems(draft.document, model.layers if model is not None else None, ranks, ops)


def _partition_rules(draft: Draft) -> Iterator[ZbcError]:
    partition: Partition | None = draft.sections.get("partition")
    model: Model | None = draft.sections.get("model")
    if partition is None or partition.layout is None:
        return
    where = draft.document.where(("partition", "layout"))
    if partition.layers_per_stage is not None:
        text = "config: [partition] has both layers_per_stage and layout"
        yield ZbcError("E110", text, where=where, hint="keep one of them")
    if model is not None and not model.builtin:
        text = "config: a layout names the parts of a built-in model, model.family is another"
        yield ZbcError("E110", text, where=where, hint="use layers_per_stage")


def parse_limit(text: str) -> tuple[float, Literal["x", "bytes"]] | None:
    """`1.5x` -> (1.5, "x"); `40 GiB` -> (bytes, "bytes"); None if it is neither."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(x|KiB|MiB|GiB|TiB)\s*", text)
    if match is None or float(match[1]) <= 0:
        return None
    if match[2] == "x":
        return float(match[1]), "x"
    return float(match[1]) * 1024 ** (1 + ["KiB", "MiB", "GiB", "TiB"].index(match[2])), "bytes"


def _node_rule(draft: Draft) -> Iterator[ZbcError]:
    parallel: Parallel | None = draft.sections.get("parallel")
    hardware: Hardware | None = draft.sections.get("hardware")
    if parallel is None or parallel.node is None:
        return
    where, (parts, copies) = draft.document.where(("parallel", "node")), parallel.node
    if parallel.pp % parts or parallel.dp % copies:
        text = f"config: parallel.node = [{parts}, {copies}] does not divide pp = {parallel.pp} and dp = {parallel.dp}"
        yield ZbcError("E110", text, where=where, hint="leave it out, and the least traffic between nodes decides")
    elif hardware is not None and parts * copies != hardware.ranks_per_node:
        text = f"config: parallel.node has {parts * copies} ranks, hardware.ranks_per_node is {hardware.ranks_per_node}"
        yield ZbcError("E110", text, where=where, hint=f"set hardware.ranks_per_node = {parts * copies}")


def _activation_rules(draft: Draft) -> Iterator[ZbcError]:
    memory: Memory | None = draft.sections.get("memory")
    if memory is None:
        return
    given = memory.activations if isinstance(memory.activations, dict) else {None: memory.activations}
    for stage, choice in given.items():
        place = ("memory", "activations") if stage is None else ("memory", "activations", stage)
        where = draft.document.where(place)
        if stage is not None and not re.fullmatch(r"0|[1-9]\d*", stage):
            text = f"config: memory.activations has the key {stage!r}, not the number of a stage"
            yield ZbcError("E103", text, where=where, hint='write { 0 = "recompute" }')
        if choice not in ACTIVATIONS:
            hint = did_you_mean(choice, list(ACTIVATIONS)) or 'use "keep", "recompute" or "auto"'
            yield ZbcError("E103", f"config: unknown memory.activations {choice!r}", where=where, hint=hint)


def _rate_rules(draft: Draft) -> Iterator[ZbcError]:
    optimizer, train, planned = (draft.sections.get(name) for name in ("optimizer", "train", "schedule"))
    if optimizer is None or train is None:
        return
    steps = float(train.steps)
    parallel: Parallel | None = draft.sections.get("parallel")
    if planned is not None and planned.ramp and parallel is not None and optimizer.schedule.by == "samples":
        per = planned.microbatch_size * parallel.dp
        steps = ramp.full_steps(planned.ramp, planned.microbatches, per, train.steps)
    yield from learning_rate.problems(optimizer.lr, optimizer.schedule, steps, draft.document)


def _ramp_rules(draft: Draft) -> Iterator[ZbcError]:
    planned: Schedule | None = draft.sections.get("schedule")
    parallel: Parallel | None = draft.sections.get("parallel")
    train: Train | None = draft.sections.get("train")
    if planned is None or not planned.ramp:
        return
    if planned.file is not None:
        text = "config: schedule.file is an order for one number of microbatches, and schedule.ramp has others"
        yield ZbcError("E110", text, where=draft.document.where(("schedule", "ramp")), hint="drop one of them")
    if parallel is not None and train is not None:
        per = planned.microbatch_size * parallel.dp
        yield from ramp.problems(planned.ramp, planned.microbatches, per, train.steps, draft.document)


def _copies_rule(draft: Draft) -> Iterator[ZbcError]:
    """What cannot go together with copies of a stage, or with weights that two stages share."""
    model: Model | None = draft.sections.get("model")
    where = draft.document.where
    if model is not None and model.tie_embeddings and not model.builtin:
        text = "config: model.tie_embeddings is for built-in families; a factory's layers cannot share parameters"
        yield ZbcError("E110", text, where=where(("model", "tie_embeddings")), hint="drop it")


def _unsupported(draft: Draft) -> Iterator[ZbcError]:
    """Values the format reserves for later; refused rather than ignored."""
    get, where = draft.sections.get, draft.document.where
    later: list[tuple[str, str, Callable[[Any], bool], str]] = [
        ("memory", "activations", lambda s: "offload" in s.chosen(), 'use "keep" or "recompute"'),
    ]
    for name, key, is_set, hint in later:
        section = get(name)
        if section is not None and is_set(section):
            value = getattr(section, key)
            text = f"config: {name}.{key} = {value!r} is not supported by this version of zbc"
            yield ZbcError("E107", text, where=where((name, key)), hint=hint)


RULES = (
    _model_rules,
    _extent_rule,
    _data_rules,
    _cost_rules,
    _memory_limit_rule,
    _partition_rules,
    _activation_rules,
    _copies_rule,
    _rate_rules,
    _ramp_rules,
    _node_rule,
    _evaluation_rules,
    _writing_rules,
    _unsupported,
)


def json_schema() -> dict[str, Any]:
    """JSON Schema of a job file, for editors."""
    definitions: dict[str, Any] = {}
    properties: dict[str, Any] = {
        "zbc": {"const": VERSION, "description": "version of this file"},
        "extends": {"type": "string", "description": "a job file to inherit from"},
    }
    required = []
    for name, section in SECTIONS.items():
        schema = section.model_json_schema(ref_template="#/$defs/{model}")
        definitions |= schema.pop("$defs", {})
        definitions[name] = schema
        properties[name] = {"$ref": f"#/$defs/{name}"}
        if schema.get("required"):
            required.append(name)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "zbc job",
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        "$defs": definitions,
    }


def choices(section: str, field: str) -> tuple[str, ...]:
    """The literal values a field accepts."""
    return get_args(SECTIONS[section].model_fields[field].annotation)
