"""Words of the field, explained in terms of zbc: `zbc explain WORD`."""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple


class Word(NamedTuple):
    """`names`: in papers, Megatron-LM, DeepSpeed, torch and zbc, zbc's own first; `page` of docs/."""

    names: tuple[str, ...]
    text: str
    page: str


def _word(names: str, text: str, page: str) -> Word:
    return Word(tuple(name.strip() for name in names.split(",")), text, page)


WORDS = (
    _word(
        "stage, model chunk, pipeline stage",
        "Consecutive layers that run as one op. A rank has one stage, or several: schedule.chunks says how many.",
        "memory.md#layers-to-stages",
    ),
    _word(
        "chunks, virtual stages, virtual pipeline, VPP, interleaving, num_layers_per_virtual_pipeline_stage",
        "Stages per rank. Interleaved schedules deal them round and round the ranks, V schedules to and fro.",
        "schedules/README.md",
    ),
    _word(
        "microbatch, MBS, gradient accumulation, accumulation steps",
        "The part of a step's samples that one op takes: schedule.microbatches of schedule.microbatch_size sequences "
        "for each replica. Their gradients add up.",
        "reading.md",
    ),
    _word("F, forward pass", "The forward of one microbatch through one stage.", "reading.md"),
    _word(
        "B, dgrad, input gradient, activation gradient",
        "The half of the backward that gives the gradient of a stage's input, for which the stage before waits.",
        "reading.md",
    ),
    _word(
        "W, wgrad, weight gradient, deferred weight gradients, delayed wgrad",
        "The half of the backward that gives the gradients of weights. Nobody waits for it but the optimizer, so it "
        "fills idle time.",
        "reading.md",
    ),
    _word("BW, full backward, D", "B and W of a stage in one op; pictures call it D.", "reading.md"),
    _word(
        "idle, bubble, bubble rate, pipeline bubble",
        "The share of a step in which a rank does not compute, mean over ranks. Papers' bubble rates divide by the "
        "makespan or by the longest span; -v shows both.",
        "reading.md",
    ),
    _word("makespan", "ms from the first start to the last end of a step, over all ranks.", "reading.md"),
    _word("span", "ms from a rank's own first start to its last end; steps without a barrier cost that.", "reading.md"),
    _word(
        "steady state, settled",
        "Steps that follow one another, once each is like the one before; step times with the optimizer are those.",
        "reading.md",
    ),
    _word(
        "warm-up, cooldown, drain",
        "What comes before the first backward of a rank, and after its last forward.",
        "reading.md",
    ),
    _word(
        "units, activation memory, M_B",
        "Activations in shares of what one microbatch leaves on a rank: 1F1B holds p units on rank 0.",
        "memory.md#less-memory-offloading-activations",
    ),
    _word(
        "recompute, activation checkpointing, gradient checkpointing, rematerialization, full recompute",
        "A stage keeps only its input and runs its forward again before its backward: memory.activations = "
        '"recompute".',
        "memory.md#layers-to-stages",
    ),
    _word(
        "selective, selective recompute, selective activation recomputation, core_attn",
        'Norms, attention and activation functions run again, products do not: memory.activations = "selective".',
        "memory.md#layers-to-stages",
    ),
    _word(
        "offload, reload, cpu offload, prefetch, PipeOffload, activation offloading",
        "Activations move to the host's memory after a forward and back before the backward, beside other ops: "
        'memory.activations = "offload".',
        "memory.md#less-memory-offloading-activations",
    ),
    _word(
        "replicas, data parallel, DP, DDP, copies",
        "Whole pipelines beside one another, each with its share of the samples: parallel.dp.",
        "memory.md#data-parallelism-zero-1-tied-embeddings",
    ),
    _word(
        'shard = "optimizer", ZeRO, ZeRO-1, distributed optimizer, ZeRO stage 1',
        "Each replica steps its share of the weights and keeps the optimizer's state of that share alone.",
        "memory.md#sharded-weights",
    ),
    _word(
        'shard = "gradients", ZeRO-2, reduce-scatter of gradients',
        "Each replica keeps the summed gradients of its share alone.",
        "memory.md#sharded-weights",
    ),
    _word(
        'shard = "weights", ZeRO-3, FSDP, FSDP2, fully sharded data parallel, fully_shard',
        'Each replica keeps its share of a stage\'s weights; the whole is gathered when ops need it. "all": gradients '
        "too.",
        "memory.md#sharded-weights",
    ),
    _word("GATHER, unshard, all-gather of weights", "Replicas collect a stage's weights.", "memory.md#sharded-weights"),
    _word("FREE, reshard, reshard_after_forward", "A stage's gathered weights are freed.", "memory.md#sharded-weights"),
    _word(
        "resident, max unsharded stages, max_active_stages",
        "memory.resident: stages whose gathered weights a rank has room for at once.",
        "memory.md#sharded-weights",
    ),
    _word(
        "tp, tensor parallel, tensor model parallel",
        "Ranks that share every matrix of their layers: parallel.tp.",
        "tensor_parallel.md",
    ),
    _word(
        "tp_sequence, sequence parallel, SP",
        "Ranks of a tensor-parallel group share the tokens of norms and sums, too: parallel.tp_sequence.",
        "tensor_parallel.md",
    ),
    _word(
        "fused_gradients, gradient accumulation fusion, wgrad accumulation",
        "Linear layers add weight gradients to their sums inside the matrix product: train.fused_gradients.",
        "costs.md",
    ),
    _word(
        "cp, context parallel, ring attention, zigzag",
        "Ranks that share the tokens of a sequence and gather keys and values: parallel.cp.",
        "sequence.md",
    ),
    _word(
        "slices, chunked pipeline, sequence pipeline, Seq1F1B, TeraPipe, SlimPipe, sequence chunks",
        "Parts of a microbatch along the sequence that follow one another through the pipeline: schedule.slices.",
        "sequence.md",
    ),
    _word(
        "ep, expert parallel, all-to-all, MoE, mixture of experts, dispatch, combine",
        "Replicas that share out the experts of a block and swap tokens inside of its ops: parallel.ep.",
        "experts.md",
    ),
    _word(
        "groups, braid, overlap group, DualPipe overlap, batch-level overlap, TBO",
        "Two ops of a rank that take turns at their exchanges, so that one computes while the other's are under way: "
        "schedule.overlap.",
        "tensor_parallel.md",
    ),
    _word(
        "shared vocabulary, vocabulary parallel, vocab parallelism, vocab-parallel embedding, LM head",
        'Each rank of the pipeline has some rows of embedding and output layer: parallel.vocabulary = "shared".',
        "vocabulary.md",
    ),
    _word(
        "post-validate, optimizer post-validation, bypassing synchronization, barrier",
        "Ranks step before they know the norm of all gradients, and undo the step where it was wrong: "
        'optimizer.sync = "post-validate".',
        "optimizer.md",
    ),
    _word(
        "two-versions, no flush, PipeDream, PipeDream-2BW, asynchronous, weight stashing, 1F1B without flush",
        "Steps follow one another without a flush; gradients come a step late: optimizer.sync.",
        "exactness.md",
    ),
    _word(
        "memory_limit, memory budget, controllable memory, v-half, v-min",
        "The most activations that a rank may hold: searches find the fastest order under it.",
        "compare.md#how-schedules-are-searched",
    ),
    _word(
        "partition, layer split, layers per stage, cut, decoder-first-pipeline-num-layers",
        "Which layers each stage has; zbc evens out time and keeps to memory.",
        "memory.md#layers-to-stages",
    ),
    _word(
        "order of ranks, rank mapping, topology, device order",
        "Which GPU takes which stage, where links differ: hardware.links, parallel.order.",
        "advise.md#from-a-number-of-ranks-to-a-plan",
    ),
    _word(
        "two pipes, bidirectional pipeline, Chimera, BitPipe, DualPipe, direction",
        "Microbatches go through the ranks in both directions; each rank has a stage of both.",
        "bidirectional.md",
    ),
    _word(
        "filler, bubble filling, side work",
        "Work of yours that idle ranks do in the bubbles: [filler].",
        "advise.md#work-in-the-bubbles",
    ),
    _word("MFU, model FLOPs utilization", "Operations of the model per second, as a share of the peak.", "costs.md"),
    _word(
        "deadlock, hang, NCCL timeout, rendezvous",
        "A plan is proven free of it before it runs; a run that stops names the rank and the op.",
        "runs.md#when-something-fails",
    ),
    _word(
        "plan, schedule file, pipeline csv",
        "The proven order of ops of every rank, a file each, with what the model's ops cost.",
        "architecture.md#plan-files",
    ),
    _word(
        "profile, measured costs, cost model",
        "What layers and links cost on your machine, in place of estimates: zbc profile.",
        "costs.md",
    ),
    _word(
        "adapters, LoRA, PEFT, low-rank adaptation",
        "Low-rank matrices beside frozen weights, which alone train: [adapter], merged by --save-hf.",
        "finetune.md",
    ),
    _word(
        "early stopping, patience, EarlyStoppingCallback, load_best_model_at_end, keep_best",
        "train.patience ends a run whose evaluations get no better; checkpoint.keep_best keeps the best one.",
        "finetune.md",
    ),
    _word(
        "packing, packed rows, sequence packing, sample packing",
        'data.balance = "length": samples of unequal length share rows, and do not attend to each other.',
        "training.md",
    ),
    _word(
        "chat template, SFT, SFTTrainer, instruction tuning, assistant_only_loss",
        'data.kind = "chat": conversations by the tokenizer\'s template; the loss counts what the assistant says.',
        "finetune.md",
    ),
)


def find(text: str) -> Word | None:
    """The entry with this name, in any spelling; None if there is none."""
    known = {_plain(name): word for word in WORDS for name in word.names}
    return known.get(_plain(text)) or known.get(_plain(text).removesuffix("s"))


def near(text: str) -> list[str]:
    """Names that are similar to `text` or contain it."""
    names = [name for word in WORDS for name in word.names]
    plain = {_plain(name): name for name in names}
    inside = [name for key, name in plain.items() if len(text) > 2 and _plain(text) in key]
    close = [plain[key] for key in difflib.get_close_matches(_plain(text), plain, 3, 0.75)]
    return [*dict.fromkeys([*close, *inside])][:4]


def _plain(text: str) -> str:
    return re.sub(r"[\s_\-\"=.]+", "", text.lower())
