"""The tables of a job file, their keys and defaults: each a frozen pydantic model."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from zbc.job import learning_rate
from zbc.job.adapter import Adapter
from zbc.job.model_section import Model
from zbc.job.ramp import Phase
from zbc.job.section import Amount, Count, Gib, Ms, NotNegative, Positive, Rate, Section, Us, key
from zbc.job.unread import reads_attention
from zbc.topology import Topology, inner_of, row_unit

ACTIVATIONS = ("keep", "selective", "recompute", "offload", "selective+offload", "recompute+offload", "auto")

LearningRate = Annotated[NotNegative, Field(le=1e3)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a moving mean: the share that is kept
PerPart = Ms | list[Ms]  # one number for all ranks, stages or layers, or one each
AmountPerPart = Amount | list[Amount]


class Average(Section):
    """`parallel.average`: replicas that average their weights instead of summing their gradients."""

    every: Count = key(1, "steps from one average to the next")
    share: Annotated[float, Field(gt=0, le=1)] = key(0.05, "of a stage's weights, each time another one")
    delay: Annotated[int, Field(ge=0, le=1)] = key(1, "steps after which an average lands; 0: the step waits for it")
    ema: Annotated[float, Field(ge=0, lt=1)] | None = key(
        None, "of what was added to a weight the last time, the share that is added again; default delay / 2"
    )

    @property
    def parts(self) -> int:
        """The number of averages that cover all weights once."""
        return math.ceil(1 / self.share - 1e-9)

    @property
    def smooth(self) -> float:
        """The effective `ema`."""
        return self.delay / 2 if self.ema is None else self.ema


class Parallel(Section):
    """`[parallel]`: the numbers of ranks, and the work that they share out."""

    pp: Count = key(..., "pipeline ranks")
    dp: Count = key(1, "data-parallel replicas of the pipeline")
    tp: Count = key(1, 'ranks that share each layer of a built-in model (tensor parallel); with world also "auto"')
    cp: Count = key(
        1,
        'ranks that share the tokens of each microbatch of a built-in model (context parallel); with world also "auto"',
    )
    ep: Count = key(1, 'neighbouring ranks that share out the experts of each block; with world also "auto"')
    expert_tp: Count | None = key(
        None,
        "ranks that share each expert: 1, and each of the tp ranks routes a part of the tokens to whole "
        "experts; or tp; default: 1 with ep, else tp",
    )
    tp_sequence: bool | Literal["regather"] = key(
        False,
        "these ranks also share the tokens between the layers; regather: and gather them again in the "
        "backward, in place of keeping what was gathered",
    )
    world: Count | Literal["auto"] | None = key(
        None, 'ranks of the run, instead of pp and dp: the fastest are taken; "auto": the GPUs there are'
    )
    shard: Literal["none", "optimizer", "gradients", "weights", "all"] = key(
        "none",
        "what replicas of a stage share out: the optimizer's state and work; gradients too, after each run "
        "of backwards of a stage; or the weights, which are then gathered when ops need them; or all of that",
    )
    exchange: Literal["collective", "one-sided"] = key(
        "collective",
        "how shared weights and their gradients travel: all replicas of a rank meet; or, on one host, each "
        "takes from and lays into the memory of the others",
    )
    average: Average | None = key(None, "replicas average a rotating share of their weights, and sum no gradients")
    replicas: list[Count] | Literal["auto"] | None = key(
        None, 'replicated-1f1b: ranks of each stage, pp in all; "auto": the fastest'
    )
    vocabulary: Literal["ends", "shared", "shared-2", "auto"] = key(
        "ends",
        "where embedding and output layer are: ends: on the first and the last stage; shared: vocabulary "
        "parallel over all ranks of the pipeline, with one all-reduce before a last backward; shared-2: with two, and "
        "one microbatch more is held; auto: ends or shared, as a step is faster",
    )
    order: list[Annotated[int, Field(ge=0)]] | None = key(
        None,
        "the ranks of the run in the order of the pipeline, or with tp the groups that share layers; "
        "default: by hardware.links, or as numbered",
    )

    @property
    def ranks(self) -> int:
        """The number of ranks of a run."""
        return self.pp * self.dp * self.width

    @property
    def width(self) -> int:
        """The number of ranks of a run per rank of a pipeline."""
        return self.cp * self.tp

    @property
    def copies(self) -> int:
        """The number of ranks of a run that hold the same part of a stage, in one pipe."""
        return self.dp * self.cp

    @property
    def folded(self) -> bool:
        """Whether ranks that share layers have whole experts."""
        return self.tp > 1 and self.ep > 1 and self.expert_tp in (None, 1)

    @property
    def topology(self) -> Topology:
        """The axes of a run of one pipe."""
        order, inner = tuple(self.order or ()), inner_of(self)
        return Topology(self.pp, self.dp, inner=inner, order=order, ep=self.ep, folded=self.folded)

    @property
    def of_experts(self) -> int:
        """The number of ranks of a run that hold the same experts, in one pipe."""
        return self.topology.listed * self.dp // self.ep

    @property
    def unit(self) -> int:
        """The tokens of a row are a multiple of it."""
        return row_unit(self.cp, self.shared)

    @property
    def regathers(self) -> bool:
        """Whether tokens gathered for a layer are gathered again in its backward, instead of kept."""
        return self.tp_sequence == "regather"

    @property
    def frees(self) -> bool:
        """Whether sharded weights are unsharded and resharded within a step."""
        return self.shard in ("weights", "all")

    @property
    def scatters(self) -> bool:
        """Whether gradients are reduce-scattered after each run of backwards of a stage."""
        return self.shard in ("gradients", "all")

    @property
    def one_sided(self) -> bool:
        """Whether replicas read sharded weights from each other's memory, without collectives."""
        return self.exchange == "one-sided"

    @property
    def shared(self) -> int:
        """The number of ranks that share the tokens of activations between stages (sequence parallel)."""
        return self.tp if self.tp_sequence else 1

    @property
    def sent(self) -> int:
        """The number of ranks that each send their part of the tokens between stages."""
        return self.shared * self.cp


class Schedule(Section):
    """`[schedule]`: the order of ops."""

    kind: str = key(
        ...,
        "a name from `zbc explain schedules`, the CSV file of an order as torch has it, or your own "
        '"package.module:function", Request -> Program',
    )
    microbatches: Count = key(..., "microbatches per step and pipeline")
    batch: Count | None = key(None, "samples per step, instead of microbatches; needed with parallel.world")
    microbatch_size: Count = key(1, "sequences (samples) per microbatch; packed ones: rows of it")
    max_microbatches: Count | None = key(
        None, "data.balance: the most that one replica gets in a step; default twice microbatches"
    )
    tokens: list[Count] | Literal["recorded"] | None = key(
        None,
        "of each microbatch the tokens of its rows, where they are unequal; default model.seq_len. "
        "recorded: those of the run that --profile was derived from",
    )
    renumber: bool = key(True, "tokens: microbatches may be put in another order, in which a step is shorter")
    ramp: list[Phase] = key([], "smaller batches at the beginning: microbatches, and steps or samples")
    chunks: Count | None = key(None, "stages per rank, where the schedule leaves it open")
    group: Count | None = key(None, "microbatches per round (interleaved-1f1b) or unit (waves); default one per rank")
    early: Annotated[int, Field(ge=0, le=2)] | None = key(
        None,
        "waves: forwards of the next unit before the last backwards of this one; interleaved-1f1b: "
        "more forwards in the warm-up",
    )
    slices: Count | Literal["auto"] = key(
        1, 'parts along the sequence that each microbatch is cut into; "auto": the fastest number'
    )
    cuts: Literal["balanced", "even"] | list[Count] = key(
        "balanced", 'where slices end: "balanced" (equal time), "even" (equal length), or their lengths'
    )
    overlap: bool | None = key(
        None,
        "dualpipe, and interleaved-1f1b with early: pairs of F and backward are groups; default: if "
        "costs.overlap is not 0",
    )
    memory_limit: str | None = key(
        None, 'activations per rank: "1.0x" of the peak of 1F1B, or "40 GiB"; never exceeded'
    )
    passes: list[str] = key([], 'passes of yours, "package.module:function", (Program, Context) -> Program, run last')
    objective: Literal["makespan", "span", "period"] | None = key(
        None, "default: makespan with the optimizer's barrier, span without"
    )

    @property
    def file(self) -> str | None:
        """The CSV file that `kind` names."""
        return self.kind if self.kind.lower().endswith(".csv") else None

    @property
    def plugin(self) -> str | None:
        """The function that `kind` names."""
        return self.kind if ":" in self.kind and self.file is None else None

    @property
    def lengths(self) -> list[int]:
        """`tokens`; [] if none are given, or while they are to be read from a profile."""
        return self.tokens if isinstance(self.tokens, list) else []


class Partition(Section):
    """`[partition]`: layers to stages."""

    layers_per_stage: list[Annotated[int, Field(ge=0)]] | str | None = key(
        None,
        'blocks of each stage, "equal", or Megatron\'s pipeline layout; default: the costs of all layers are balanced',
    )

    @property
    def layout(self) -> str | None:
        """Megatron's pipeline layout, such as `Et*3|tL`."""
        return self.layers_per_stage if isinstance(self.layers_per_stage, str) and not self.equal else None

    @property
    def equal(self) -> bool:
        """Whether every stage has as many blocks."""
        return self.layers_per_stage == "equal"


class Hardware(Section):
    """`[hardware]`: the device of a rank, and the links between ranks; used to estimate costs and memory."""

    gpu: str | None = key(
        None,
        "a GPU by name, such as h100-sxm: its data sheet stands for device, memory_gib, tflops, "
        "memory_gbps, link_gbps and inter_node_gbps where these are not given; MFU is a share of its peak",
    )
    device: Literal["cuda", "cpu"] = "cpu"
    memory_gib: Gib | list[Gib] | None = key(
        None,
        "memory per rank, or of each rank of the pipeline; a plan that needs more is refused. On cuda 6% "
        "of it stay free for what no plan predicts (context, workspaces, communicators), or what the profile found if "
        "that is more",
    )
    tflops: Rate | list[Rate] | None = key(
        None, "sustained per rank, or of each rank of the pipeline; default 230 on cuda, 0.1 on cpu"
    )
    memory_gbps: Rate | list[Rate] | None = key(
        None, "GB/s to memory, or of each rank of the pipeline; default 1750 on cuda, 20 on cpu"
    )
    slow: list[Annotated[float, Field(ge=0.01, le=100)]] | None = key(
        None, "times as long as predicted that ops take, of each rank of the pipeline; see zbc report"
    )
    link_gbps: Rate | None = key(None, "Gbit/s between two ranks of a node; default 200 on cuda, 20 on cpu")
    link_us: Us | None = key(None, "latency of a transfer; default 10 on cuda, 700 on cpu")
    ranks_per_node: Count = key(
        8, "ranks of the run that share a node; which ones: so that the fewest bytes go between nodes"
    )
    inter_node_gbps: Rate | None = key(None, "Gbit/s between two nodes; default link_gbps")
    links: str | None = key(None, "a links.toml: GB/s and us between all ranks, or all nodes")
    host_gbps: Rate | None = key(
        None,
        "GB/s of copies between a rank and its host, each way (on cuda at once); default: what the profile measured",
    )
    host_shared: Count = key(
        1, "neighbouring ranks of a pipeline that share one link to the host, such as a PCIe switch"
    )
    host_gib: Gib | None = key(None, "pinned memory of the host per rank; a plan that needs more is refused")

    def of(self, rank: int) -> Hardware:
        """The hardware of one rank of the pipeline."""
        lists = {key: values[rank] for key in BY_RANK if isinstance(values := getattr(self, key), list)}
        return self.model_copy(update={**lists, "slow": None})

    @property
    def duplex(self) -> bool:
        """Whether a rank copies to its host and back at once."""
        return self.device == "cuda"

    @property
    def unequal(self) -> bool:
        """Whether ranks differ in memory, speed or bandwidth."""
        return any(isinstance(getattr(self, key), list) for key in (*BY_RANK, "slow"))

    @property
    def fastest(self) -> Hardware:
        """The hardware with the best number of all ranks for each key."""
        lists = {key: max(values) for key in BY_RANK if isinstance(values := getattr(self, key), list)}
        return self.model_copy(update={**lists, "slow": None})

    @property
    def least_gib(self) -> float | None:
        """The memory of the rank with the least."""
        return min(self.memory_gib) if isinstance(self.memory_gib, list) else self.memory_gib


BY_RANK = ("memory_gib", "tflops", "memory_gbps")  # may be lists


class GivenCosts(Section):
    """`[costs]`: measured times in ms, instead of estimates."""

    per: Literal["rank", "stage", "layer"] = key(
        "rank",
        "what one number of a list belongs to; layer: a block, with two numbers more the embedding first "
        "and the head last",
    )
    f: PerPart | None = key(None, "forward")
    b: PerPart | None = key(None, "gradient of the input")
    w: PerPart | None = key(None, "gradient of the weights")
    comm: Ms | None = key(None, "one boundary transfer between two ranks")
    message: Ms | None = key(
        None,
        "ms for which a message between two ranks keeps each of them from computing; default: what the "
        "profile measured, else of the runtime; 0 where f is given",
    )
    reduce: Ms | None = key(
        None, "one all-reduce of a stage's gradients; default: from the link, where sizes are known"
    )
    tp: Ms | None = key(None, "parallel.tp: the sums inside one stage's F; its B has as many")
    cp: Ms | None = key(None, "parallel.cp: the gathers inside one stage's F; the sums of its B take as long")
    ep: Ms | None = key(None, "parallel.ep: the swaps inside one stage's F; its B has as many")
    vocabulary: Annotated[list[Ms], Field(min_length=4, max_length=4)] | None = key(
        None,
        "parallel.vocabulary: [s, t, i, e], of one rank's words: logits, their gradient, look-up, its "
        "gradient; default 0 where f is given",
    )
    optimizer: PerPart | None = key(None, "one optimizer step; default 0 where f, b and w are given")
    overlap: Annotated[float, Field(ge=0, le=1)] = key(
        0.0, "of an F and a backward in one group, the share of the shorter that hides behind the longer"
    )
    offload: Ms | Annotated[list[Ms], Field(min_length=2, max_length=2)] | None = key(
        None, "a copy of a rank's share of a microbatch to the host, and back; [out, back] where they differ"
    )
    act_b: AmountPerPart | None = key(None, "memory F keeps until B, any unit")
    act_w: AmountPerPart | None = key(None, "the part of act_b that B keeps until W; default act_b")

    @classmethod
    def replaced(cls, given: Mapping[str, Any]) -> set[str]:
        """Keys that a profile replaces: all numbers if op times are `given`, else none.

        Except `overlap`, which no profile measures, and `offload`, which few do. For example a transfer time that is
        given alone goes with a profile.
        """
        timed = any(given.get(key) is not None for key in ("f", "b", "w"))
        return cls.model_fields.keys() - {"offload", "overlap"} if timed else set()


LAYERS_AGAIN = re.compile(r"recompute ([1-9]\d{0,6}|auto)")  # layers of a stage: a choice of memory.activations
OPEN_LAYERS = "recompute auto"
ENDS = ("embed", "head")  # names of a built-in model's first and last layer


def _by_layers(value: object) -> object:
    """{ recompute = 6 } as "recompute 6"."""
    return f"recompute {value['recompute']}" if isinstance(value, dict) and [*value] == ["recompute"] else value


class Memory(Section):
    """`[memory]`: keep, recompute or offload activations between F and B, and max unsharded stages per rank."""

    activations: Annotated[str | dict[str, str], BeforeValidator(_by_layers)] = key(
        "keep",
        '"keep", "selective" (norms, attention and activations of built-in models run again), "recompute" '
        '(whole layers), "offload", "selective+offload" or "recompute+offload" where memory forces it; "auto": the '
        'fastest of these; all stages or some: { 0 = "recompute" }; { recompute = 6 } or "recompute 6": the first six '
        'layers of each stage; { recompute = "auto" }: the fewest that fit',
    )
    attention: Literal["again", "keep"] | None = key(
        None,
        'with "selective": run attention again (the default), or keep its tensors: less time for more '
        'memory; default with "auto": the faster',
    )

    resident: Annotated[int, Field(ge=1)] | Literal["auto"] = key(
        "auto",
        'with parallel.shard = "weights": stages whose gathered weights a rank has room for; auto: as many '
        "as fit memory_gib, 2 without it",
    )

    def of(self, stage: int) -> str:
        """The choice for the activations of one stage."""
        return self.activations if isinstance(self.activations, str) else self.activations.get(str(stage), "keep")

    def recomputes(self, stage: int) -> bool:
        """Whether F keeps only the inputs of the stage's layers, or of some of them."""
        return self.of(stage).startswith("recompute")

    def again(self, stage: int, names: Sequence[str]) -> int:
        """The number of the first layers of a stage that run again in its backward, of those with these names. Given
        as a number, it counts neither embedding nor head, and the head does not run again."""
        given = LAYERS_AGAIN.fullmatch(self.of(stage))
        if given is None:
            return len(names) if self.recomputes(stage) else 0
        ends = sum(name not in ENDS for name in names)
        return min(int(given[1]), ends) + (names[0] == ENDS[0]) if ends and given[1] != "auto" else 0

    def spares(self, stage: int) -> bool:
        """Whether F keeps only inputs and outputs of linear layers, and cheap ops run again (selective recompute)."""
        return self.of(stage) in ("selective", "selective+offload")

    @property
    def attends_again(self) -> bool:
        """Whether selective recompute runs attention again, beside norms and activations."""
        return self.attention != "keep"

    def offloads(self, stage: int) -> bool:
        """Whether saved activations may be offloaded to the host."""
        return self.of(stage).endswith("offload")

    def decided(self, recompute: Collection[int], stages: int) -> Memory:
        """With "auto" replaced: "recompute" for the stages in `recompute`, "keep" for the others."""
        return self.with_choice(["recompute" if s in recompute else "keep" for s in range(stages)])

    def with_choice(self, choice: Sequence[str], of: str = "auto") -> Memory:
        """With "auto", or another choice, replaced by the choice for each stage."""
        if of not in self.chosen():
            return self
        stages, own = len(choice), [self.of(s) for s in range(len(choice))]
        choices = [choice[s] if what == of else what for s, what in enumerate(own)]
        chosen = {str(s): what for s, what in enumerate(choices) if what != "keep"}
        alike = chosen and len(chosen) == stages and len(set(chosen.values())) == 1
        made = self.model_copy(update={"activations": chosen["0"] if alike else chosen or "keep"})
        return made if reads_attention(made.activations) else made.model_copy(update={"attention": None})

    def chosen(self) -> set[str]:
        return {self.activations} if isinstance(self.activations, str) else set(self.activations.values())


ROUNDS = 5  # of Newton-Schulz in a step of Muon


class OptimizerGroup(Section):
    """`[[optimizer.groups]]`: parameters that are stepped in another way."""

    names: list[str] = key(..., "of parameters, with *: layers.0.*, *.bias", min_length=1)
    rate: NotNegative = key(1.0, "times the learning rate")
    weight_decay: Annotated[NotNegative, Field(le=1e3)] | None = key(None, "default: the optimizer's")
    muon: bool = key(True, "kind muon: false has AdamW step their matrices")


class Optimizer(Section):
    """`[optimizer]`."""

    kind: Literal["adamw", "adam", "sgd", "muon"] = key(
        "adamw", "muon: for the matrices of blocks; adamw for vectors, embedding and head"
    )
    lr: LearningRate | Annotated[tuple[LearningRate, LearningRate], Field(strict=False)] = key(
        3e-4, "muon: one for all, or two: of its matrices, and of what adamw steps"
    )
    scale: Literal["rms", "original"] = key(
        "rms", "muon: of a step, by shape. rms: as large as adamw's; original: sqrt(max(1, rows / columns))"
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), strict=False)
    eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-8  # of float32, whose least normal number is 1e-38
    weight_decay: Annotated[NotNegative, Field(le=1e3)] = key(
        0.1, "adamw: decoupled; adam and sgd: added to the gradient"
    )
    momentum: Decay = Field(
        default_factory=lambda told: 0.95 if told.get("kind") == "muon" else 0.0,
        description="sgd, and muon, whose default is 0.95",
    )
    clip_grad_norm: Positive | None = key(
        None, "largest norm of all gradients together; without a flush, of those of each stage"
    )
    sync: Literal["before-step", "post-validate", "two-versions", "asynchronous"] = key(
        "before-step",
        "post-validate: no barrier; ranks agree on a step while the next one warms up. two-versions: no "
        "flush; gradients come a step late, which is another training. asynchronous: nor a second version of the "
        "weights; each stage steps on its own",
    )
    every: Count = key(1, "asynchronous: microbatches from one step of a stage to its next")
    lookahead: bool = key(False, "asynchronous: forwards run on weights as they are expected to be at their backward")
    feedback: Annotated[float, Field(ge=0, le=1)] = key(
        0.0, "two-versions: how much of what an update was off by the next one makes good"
    )
    ema: Annotated[float, Field(gt=0, lt=1)] | None = key(
        None, "a moving average of the weights, which evaluations use: how much of it stays in each step"
    )
    qk_clip: Positive | None = key(
        None, "largest score of attention: queries and keys of a head beyond it are scaled down after the step"
    )
    schedule: learning_rate.RateSchedule = key(learning_rate.RateSchedule(), "the learning rate over the steps")
    state: Literal["float32", "bfloat16"] = key(
        "float32", "how moments (of sgd and muon: the momentum) are stored; steps compute in float32"
    )
    groups: list[OptimizerGroup] = key([], "of parameters that are stepped in another way, by name")

    @property
    def name(self) -> str:
        """The name of the kind, with momentum and another type of state, that its time and state depend on."""
        kind = f"{self.kind}, momentum" if self.kind == "sgd" and self.momentum else self.kind
        return kind if self.state == "float32" else f"{kind}, {self.state}"

    @property
    def rates(self) -> tuple[float, float]:
        """The learning rates of muon's matrices, and of what adamw steps; one and the same for other kinds."""
        return self.lr if isinstance(self.lr, tuple) else (self.lr, self.lr)

    @property
    def split(self) -> bool:
        """Whether there are two rates where no other kind of matrix is stepped."""
        return self.kind != "muon" and isinstance(self.lr, tuple)

    @property
    def peak_lr(self) -> float:
        """The rate that the schedule scales: that of muon's vectors if the matrices' is 0."""
        return self.rates[0] or self.rates[1]

    def still(self) -> Optimizer:
        """The optimizer as a profile runs it: behind the barrier, with steps that change nothing."""
        return self.model_copy(update={"lr": 0.0, "schedule": learning_rate.RateSchedule(), "sync": "before-step"})


class Train(Section):
    """`[train]`."""

    steps: Count = 100
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1234
    eval_every: Annotated[int, Field(ge=0)] = key(0, "steps between evaluations, and one in the end; 0: none")
    eval_batches: Count | None = key(
        None, "of as many samples as a step has; default: the whole validation data, but 100 at most"
    )
    patience: Count | None = key(None, "evaluations in a row without a lower loss, after which the run ends")
    watchdog_s: Positive = key(120.0, "seconds without progress of any op before a run is ended")
    skip_limit: Count = key(10, "a step whose gradients are not all finite is skipped; so many in a row end the run")
    fused_gradients: bool = key(
        False, "linear layers add weight gradients to their sums inside the product; equal to rounding"
    )
    hook: str | None = key(
        None, '"package.module:function", called by every rank after each step; a true answer ends the run'
    )


SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
Sets = Annotated[dict[SetName, str | list[str]], Field(min_length=1)]


class Data(Section):
    """`[data]`."""

    kind: str = key("text", '"text", "tokens", "chat", "synthetic", or "package.module:factory", a map-style dataset')
    path: str | list[str] | None = key(None, "text files or folders (default: Python's own sources), or token files")
    tokenizer: str | None = key(None, "chat: folder of the tokenizer and its chat template; default: model.pretrained")
    dtype: Literal["uint16", "uint32"] | None = key(None, "type of the numbers in token files without a JSON file")
    validation: Annotated[float, Field(ge=0, lt=1)] | str | list[str] | Sets = key(
        0.0,
        "share of the samples, at the end of the data, that is kept for evaluation; or other files; a table of names "
        "has several sets, the first says which is best",
    )
    args: dict[str, Any] = key({}, "keyword arguments of the factory; chat: of the template")
    items: Literal["samples", "steps"] = key(
        "samples", "of your dataset; steps: each is a list of microbatches (input, target, weight)"
    )
    balance: Literal["none", "length", "tokens"] = key(
        "none",
        "length: samples are of unequal length; packed, and dealt to replicas so that all take as long. "
        "tokens: one to a row, the longest in the longest microbatches of schedule.tokens",
    )

    @property
    def kept(self) -> float:
        """The share of the samples that is kept for evaluation."""
        return self.validation if isinstance(self.validation, float | int) else 0.0

    @property
    def sets(self) -> dict[str, str | list[str] | None]:
        """The paths of each validation set by its name; without names one, "", maybe of no files of its own."""
        one = None if isinstance(self.validation, float | int) else self.validation
        return {**one} if isinstance(one, dict) else {"": one}


class Checkpoint(Section):
    """`[checkpoint]`."""

    every: Annotated[int, Field(ge=0)] = key(0, "steps between checkpoints; 0: none")
    keep: Count = key(3, "complete checkpoints that stay; older ones are deleted")
    keep_best: bool | str = key(
        False,
        "also one after each evaluation with a lower loss than all before; the last of them stays. "
        '"package.module:function" of output and target: by what it returns',
    )
    dir: str | None = key(None, "folder of the checkpoints, which all ranks see; default: in the run directory")

    @property
    def metric(self) -> str | None:
        """The name of the metric that says which evaluation is the best; None: the loss."""
        return self.keep_best if isinstance(self.keep_best, str) else None


class Filler(Section):
    """`[filler]`: user work while a rank waits."""

    task: str | None = key(None, '"package.module:make" of rank and ranks: makes an object with step()')


Some = Annotated[float, Field(gt=0, le=1)]  # a share


class Freeze(Section):
    """`[freeze]`: leaves out weight gradients to shorten a step; changes the training."""

    most: Annotated[float, Field(ge=0, le=1)] | Annotated[tuple[Some, Count], Field(strict=False)] = key(
        0.0, "largest share of a stage's weight gradients that a step leaves out; two: after steps that leave out none"
    )

    @property
    def share(self) -> float:
        return self.most if isinstance(self.most, float) else self.most[0]

    @property
    def after(self) -> int:
        return 0 if isinstance(self.most, float) else self.most[1]


class Log(Section):
    """`[log]`."""

    every: Count = key(10, "steps between console lines")
    to: list[str] = key(
        [],
        'beside metrics.jsonl: "tensorboard" (event files) and "wandb:PROJECT" (Weights & Biases); pip '
        "install 'zbc[tensorboard]' or 'zbc[wandb]'",
    )


SECTIONS: dict[str, type[Section]] = {
    "model": Model,
    "parallel": Parallel,
    "schedule": Schedule,
    "partition": Partition,
    "hardware": Hardware,
    "costs": GivenCosts,
    "memory": Memory,
    "freeze": Freeze,
    "adapter": Adapter,
    "optimizer": Optimizer,
    "train": Train,
    "data": Data,
    "checkpoint": Checkpoint,
    "log": Log,
    "filler": Filler,
}
# Sections that planning reads and the plan id covers, and keys of others; all else may change under one plan.
PLANNING = ("model", "parallel", "schedule", "partition", "hardware", "costs", "memory", "freeze", "adapter")

PLANNED = {"optimizer": ("sync", "qk_clip"), "train": ("fused_gradients",)}


def is_name(kind: str) -> bool:
    """Whether a kind names a schedule of zbc, and no CSV file or `package.module:function`."""
    return ":" not in kind and not kind.lower().endswith(".csv")


def parse_limit(text: str) -> tuple[float, Literal["x", "bytes"]] | None:
    """`1.5x` -> (1.5, "x"); `40 GiB` -> (bytes, "bytes"); None if it is neither."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(x|KiB|MiB|GiB|TiB)\s*", text)
    if match is None or float(match[1]) <= 0:
        return None
    if match[2] == "x":
        return float(match[1]), "x"
    return float(match[1]) * 1024 ** (1 + ["KiB", "MiB", "GiB", "TiB"].index(match[2])), "bytes"
