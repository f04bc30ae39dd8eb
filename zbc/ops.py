"""The meaning of every op, one row per kind. Order, messages, proof, times, memory and pictures are read from it.

A *value* is data that a rank holds: `kept` of stage 2, microbatch 5. An op reads values, writes values and frees some
of the values it reads; it runs on a *lane*. An op of the compute lane takes the rank's time. An op of any other lane
is asynchronous: it starts an *event*, its outputs exist once the event has completed, and their readers wait for that.

    F       reads   act of the edges in      writes  act of the edges out, kept     frees  its inputs
    B       reads   kept, grad of the        writes  grad of the edges in, left     frees  its inputs
                    edges out
    W       reads   left                     writes  part                           frees  left

A new kind needs a row, a cost column, a handler in the runtime and a pass that places it; nothing else.

An *owner* has parameters, ranks that hold them and a sum of their gradients: each stage, the rows of a vocabulary that
a rank has, the weights that stages share, and the experts of a stage that replicas share out. Ops of weights (REDUCE,
STEP, GATHER ..) are of an owner.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

SMALL = 64 * 1024  # bytes below which OFFLOAD leaves a tensor on the device


class Kind(StrEnum):
    """The work of an op. This enum is the glossary."""

    F = "F"  # forward of one stage for one microbatch
    B = "B"  # backward, gradient of the stage input
    W = "W"  # backward, gradient of the stage weights
    BW = "BW"  # B and W in one walk of the graph
    SEND_F = "SEND_F"  # start sending a stage output to the rank of the stage that reads it; does not wait
    RECV_F = "RECV_F"  # post the buffer for the input of a stage; the F that needs it waits
    SEND_B = "SEND_B"  # start sending an input gradient to the rank of the stage that made the input; does not wait
    RECV_B = "RECV_B"  # post the buffer for the gradient of a stage's output; the B or BW that needs it waits
    OVERLAP = "OVERLAP"  # the next two ops, an F and an F, B, BW or W, are one group: both start when both can
    REDUCE = "REDUCE"  # start summing an owner's gradients over all ranks that hold a replica of it; VALIDATE waits
    VALIDATE = "VALIDATE"  # all ranks agree on loss, gradient norm and whether to step: a barrier
    STEP = "STEP"  # optimizer step of one owner
    TENTATIVE = "TENTATIVE"  # write a stage's weights as if its step were final and unclipped; keep optimizer states
    NORM = "NORM"  # of the last step: wait for the sums of the ranks before, add this rank's, pass them to the next
    VERDICT = "VERDICT"  # of the last step: wait for the verdict of the next rank (the last one makes it), pass it back
    REDO = "REDO"  # if the verdict rejects the last step: step as it says, then run the forwards before this again
    COMMIT = "COMMIT"  # make the last step of one stage final: the ordinary optimizer step, unless REDO made it
    OFFLOAD = "OFFLOAD"  # start copying the activations that F saves to the host, after F; does not wait
    RELEASE = "RELEASE"  # wait for that copy, then free these activations on the device
    RELOAD = "RELOAD"  # allocate the memory again and start copying back; the B or BW that needs it waits
    GATHER = "GATHER"  # start the all-gather of a stage's weights from the ranks that each stepped a part of them
    # A vocabulary-parallel output layer and embedding. "Start": asynchronous, the op that needs the result waits.
    SPREAD = "SPREAD"  # start the broadcast of the last stage's output to all ranks
    S = "S"  # logits of this rank's words: maximum, sum of exp, target's logit; with 1 sum its part of the gradient
    MEET = "MEET"  # start the all-reduce of the results of S; with 1 sum that gives B of the last stage its gradient
    T = "T"  # gradient of this rank's rows of the output layer; with 2 sums also its part of the last stage's gradient
    SUM = "SUM"  # 2 sums: start the reduce of these parts to the last stage's rank, whose B waits
    I = "I"  # look up this rank's words
    GIVE = "GIVE"  # start the reduce of the looked-up rows to the first stage's rank, whose F waits
    TAKE = "TAKE"  # start the broadcast of the gradient of the first stage's input to all ranks
    E = "E"  # add it to the gradient of this rank's rows of the embedding
    SCATTER = "SCATTER"  # start the reduce-scatter of a stage's gradients so far into the parts that ranks step
    AVERAGE = "AVERAGE"  # start averaging a share of a stage's weights over the replicas, which sum no gradients then
    FREE = "FREE"  # reshard: free a stage's gathered weights; the parts that ranks step stay

    # Hashing by value keeps dict look-ups of ops in C; Enum's own __hash__ is a Python call.
    __hash__ = str.__hash__

    # Questions to the row, answered when this module is loaded (see `_answer`).
    row: Row
    computes: bool  # work on a microbatch that takes a rank's time
    is_transfer: bool
    is_send: bool
    is_recv: bool
    is_mark: bool  # no work of its own: binds the two ops after it
    is_collective: bool
    sums: bool  # a collective that sums gradients
    is_barrier: bool  # a collective that its rank waits for
    stage_wide: bool  # once per owner, on each rank that holds it
    rank_wide: bool  # once on every rank
    unit_wide: bool  # once on every rank for each unit: ranks of one replica meet
    takes: At | None  # the edges of its stage that it reads: SOURCES or SINKS; None: no edge
    gives: At | None  # the edges that it writes, likewise
    makes_part: bool  # its result is a share of the gradients of its stage's weights
    is_forward: bool  # computes the output of its stage
    is_backward: bool  # computes the gradient of its stage's input
    splits: bool  # leaves the gradients of weights to another op
    steps: bool  # makes new weights of its owner


WORDS = -1  # the owner of a rank's rows of a vocabulary that all ranks share
TIED = -2  # the owner of the weights that several stages share; each of these stages steps its copy
OWNERS = {WORDS: "v", TIED: "t"}  # how ops print owners that are no stage: `REDUCE v`
EXPERTS = -3  # EXPERTS - s owns the experts of stage s, which replicas share out: `REDUCE e3`


def experts_of(stage: int) -> int:
    """The owner of the experts of a stage, and the stage of that owner."""
    return EXPERTS - stage


def home_of(owner: int) -> int:
    """The stage of an owner of experts; any other owner itself."""
    return experts_of(owner) if owner <= EXPERTS else owner


def owners_among(stage: int, among: Container[int]) -> list[int]:
    """The owners of a stage's weights that are among these: itself, and that of its experts."""
    return [owner for owner in (stage, experts_of(stage)) if owner in among]


def owner_text(owner: int) -> str:
    """The owner as ops print it: `s3`, `e3`, `v`."""
    return f"s{owner}" if owner >= 0 else OWNERS.get(owner) or f"e{experts_of(owner)}"


class Scope(Enum):
    """How often a kind runs, and which coordinates its ops have."""

    UNIT = "stage, microbatch, slice"  # on the rank that holds the stage
    EVERY = "microbatch, slice"  # on every rank
    STAGE = "owner"  # on every rank that holds the owner named by `Op.stage`
    RANK = "rank"


class Lane(Enum):
    """The queue that an op runs on: one op at a time per rank and lane, in the order in which they are started."""

    COMPUTE = "compute"
    LINK = "link"  # a message: one queue per pair of ranks and direction
    COLLECTIVE = "collective"  # over all members: one queue per rank
    OUT = "out"  # copy to the host
    BACK = "back"  # copy from the host
    MARK = "mark"  # no work: binds the two ops after it

    __hash__ = object.__hash__  # in C, as of kinds


class At(Enum):
    """The holder of a value that a row refers to, relative to the op."""

    OWN = "its own stage, microbatch, slice (as far as the value has them)"
    SOURCES = "on the edges from the stages it reads"
    SINKS = "on the edges to the stages that read it"
    EARLIER = "of the slice before, if there is one"
    LATER = "of the slice after, if there is one"
    UNITS = "all units of the owner on this rank"
    OWNERS = "all owners of this rank"
    WORDS = "of this rank's rows of the vocabulary"
    TIED = "of the weights that stages share, by an op of one of these stages"
    EXPERTS = "of the experts of its stage, where replicas share them out"
    FIRST = "of the first stage, by an op of it, or by one of every rank on the rank that holds it"
    LAST = "of the last stage, likewise"
    RANK_BEFORE = "of the rank before, if there is one"
    RANK_AFTER = "of the rank after, if there is one"


class Ref(NamedTuple):
    """A reference to a value: its name and its holder."""

    what: str
    at: At = At.OWN


class Value(NamedTuple):
    """Data that a rank can hold: per unit (stage, microbatch, slice), per edge between stages, per stage, per rank. A
    "share" is per rank and slice of a microbatch: the rank's part of a layer that all ranks share."""

    scope: str  # "edge", "unit", "share", "stage", "rank"
    memory: str = ""  # category of the ledger; "": it takes no memory of its own
    stays: bool = False  # may outlive the step
    text: str = ""  # for messages


VALUES = {
    "act": Value("edge", "transit", text="the output of a stage, on its way to one that reads it"),
    "grad": Value("edge", "transit", text="the gradient of a stage's output, on its way back"),
    "kept": Value("unit", "activations", text="what F leaves for B"),
    "left": Value("unit", "activations", text="what B leaves for W"),
    "host": Value("unit", "host", text="what F leaves for B, on the host"),
    "kv": Value("unit", "kv", text="keys and values that later slices attend to"),
    "dkv": Value("unit", "kv", text="gradients of keys and values, from later slices"),
    "top": Value("share", text="the output of the last stage, for the words of all ranks"),
    "hidden": Value("share", text="the output of the last stage, on a rank that holds words"),
    "logits": Value("share", text="the logits of a rank's words"),
    "sums": Value("share", text="what S made of a rank's words"),
    "stats": Value("share", text="what all words come to together"),
    "dtop": Value("share", text="a rank's part of the gradient of the last stage's output"),
    "turn": Value("share", text="the gradient of the last stage's output, from the words of all ranks"),
    "words": Value("share", text="what a rank looked up"),
    "input": Value("share", text="the input of the first stage, from the words of all ranks"),
    "bottom": Value("share", text="the gradient of the first stage's input"),
    "dinput": Value("share", text="the gradient of the first stage's input, on a rank that holds words"),
    "outpart": Value("share", stays=True, text="one microbatch's share of the gradient of a rank's output rows"),
    "inpart": Value("share", stays=True, text="one microbatch's share of the gradient of a rank's embedding rows"),
    "part": Value("unit", stays=True, text="one microbatch's share of the gradients of a stage's weights"),
    "weights": Value("stage", stays=True, text="the weights of a stage, whole"),
    "shard": Value("stage", stays=True, text="what an optimizer step makes: weights, or this rank's share of them"),
    "total": Value("stage", stays=True, text="gradients summed over all replicas"),
    "clean": Value("stage", stays=True, text="room for new gradients: those of the last step are gone"),
    "norm": Value("rank", stays=True, text="the gradient norm, as far as the ranks so far know it"),
    "verdict": Value("rank", stays=True, text="whether to step, and how far to clip"),
    "stands": Value("rank", stays=True, text="weights that are as the verdict says"),
}


class Look(NamedTuple):
    """Letters in the first and the second pipe, their meaning, the fills of even and odd microbatches, and the ink.
    `shades` are the fills on a terminal, in numbers of its 256 colours; the ink is the same."""

    letter: str
    other: str
    name: str
    fills: tuple[str, str]
    shades: tuple[int, int]
    ink: str = "#000000"


class Row(NamedTuple):
    """The meaning of a kind."""

    scope: Scope
    lane: Lane
    reads: tuple[Ref, ...] = ()
    writes: tuple[Ref, ...] = ()
    frees: tuple[Ref, ...] = ()  # some of `reads`
    cost: str = ""  # column of Costs; "" takes no time
    blocks: bool = False  # the compute lane waits for its event
    early: bool = False  # its event begins when its inputs exist, not when its rank comes to it
    closes: str = ""  # which end of a step it belongs to: "barrier" or "ahead"
    repeats: bool = False  # may come before REDO, which runs it again
    data: str = ""  # of each sample, that its rank reads for it: "inputs" or "targets"
    family: str = ""  # its class in a search policy: "forward", "input" or "weight" (gradients)
    look: Look | None = None  # None: pictures leave it out
    needs: str = ""  # names of the owner's bytes that it takes while it runs
    place: str = ""  # its position in a step, for errors
    places: Mapping[int, str] = MappingProxyType({})  # the same of TIED and WORDS, if they have such ops; "": `place`
    feature: str = ""  # the one of `Program.features` without which a program has no such ops
    dealt: bool = False  # only of owners that ranks share out
    idle: str = ""  # why it has nothing to work on in a program without its feature
    fault: str = "E202"  # code of the error if such an op is missing or runs twice

    @property
    def with_weights(self) -> bool:
        """Whether it computes with weights."""
        return self.scope in UNIT_SCOPES and any(ref.what == "weights" for ref in self.reads)


def _refs(text: str) -> tuple[Ref, ...]:
    """`act@SOURCES kept` as refs."""
    pairs = (word.partition("@") for word in text.split())
    return tuple(Ref(what, At[at] if at else At.OWN) for what, _, at in pairs)


def _look(letters: str, name: str, fills: str, shades: tuple[int, ...], ink: str = "#000000") -> Look:
    """A look; a single letter, fill or shade is used for both pipes, or for even and odd microbatches."""
    colours = fills.split()
    return Look(letters[0], letters[-1], name, (colours[0], colours[-1]), (shades[0], shades[-1]), ink)


def _row(scope: Scope, lane: Lane, reads: str = "", writes: str = "", frees: str = "", **columns: Any) -> Row:
    """A row; those of every rank's words have their place and feature in common."""
    if scope is Scope.EVERY:
        columns = {"feature": "vocabulary", "place": _SHARE, **columns}
    return Row(scope, lane, _refs(reads), _refs(writes), _refs(frees), **columns)


_SHARE = "every rank has a share of each microbatch's words: add it"
_INPUTS = "kept grad@SINKS kv dkv@LATER"  # a backward reads and frees them
_READ = f"{_INPUTS} weights weights@EXPERTS clean"  # and reads these
_UNIT, _EVERY, _STAGE, _RANK = Scope
_COMPUTE, _LINK, _COLLECTIVE = Lane.COMPUTE, Lane.LINK, Lane.COLLECTIVE

ROWS: dict[Kind, Row] = {
    Kind.F: _row(
        _UNIT,
        _COMPUTE,
        "act@SOURCES kv@EARLIER weights weights@EXPERTS",
        "act@SINKS kept kv",
        "act@SOURCES",
        cost="f",
        repeats=True,
        family="forward",
    ),
    Kind.B: _row(_UNIT, _COMPUTE, _READ, "grad@SOURCES dkv@EARLIER left", _INPUTS, cost="b", family="input"),
    Kind.W: _row(_UNIT, _COMPUTE, "left", "part", "left", cost="w", family="weight"),
    Kind.BW: _row(_UNIT, _COMPUTE, _READ, "grad@SOURCES dkv@EARLIER part", _INPUTS, cost="bw", family="input"),
    Kind.SEND_F: _row(_UNIT, _LINK, "act@SINKS", frees="act@SINKS", repeats=True, fault="E203"),
    Kind.RECV_F: _row(_UNIT, _LINK, writes="act@SOURCES", repeats=True, fault="E203"),
    Kind.SEND_B: _row(_UNIT, _LINK, "grad@SOURCES", frees="grad@SOURCES", fault="E203"),
    Kind.RECV_B: _row(_UNIT, _LINK, writes="grad@SINKS", fault="E203"),
    Kind.OVERLAP: _row(_RANK, Lane.MARK),
    # ---- activation offload
    Kind.OFFLOAD: _row(_UNIT, Lane.OUT, "kept", "host", cost="out", early=True, fault="E206"),
    Kind.RELEASE: _row(_UNIT, _COMPUTE, "host kept", frees="kept", fault="E206"),
    Kind.RELOAD: _row(_UNIT, Lane.BACK, "host", "kept", "host", cost="back", fault="E206"),
    # ---- the end of a step
    Kind.REDUCE: _row(_STAGE, _COLLECTIVE, "part@UNITS clean", "total", cost="reduce", needs="summed"),
    Kind.VALIDATE: _row(
        _RANK, _COLLECTIVE, "part@OWNERS total@OWNERS", "verdict", cost="agree", blocks=True, closes="barrier"
    ),
    Kind.STEP: _row(
        _STAGE, _COMPUTE, "verdict weights", "shard clean", "weights", cost="step", closes="barrier", needs="step"
    ),
    # ---- the same without a barrier
    Kind.TENTATIVE: _row(
        _STAGE,
        _COMPUTE,
        "part@UNITS total total@TIED weights",
        "shard",
        "weights",
        cost="tentative",
        closes="ahead",
        needs="tentative step",
    ),
    Kind.NORM: _row(_RANK, _COMPUTE, "norm@RANK_BEFORE", "norm", closes="ahead", repeats=True),
    Kind.VERDICT: _row(_RANK, _COMPUTE, "norm verdict@RANK_AFTER", "verdict", closes="ahead", repeats=True),
    Kind.REDO: _row(_RANK, _COMPUTE, "verdict", "stands", closes="ahead"),
    Kind.COMMIT: _row(_STAGE, _COMPUTE, "stands", "clean", cost="step", closes="ahead", needs="step"),
    # ---- sharded weights
    Kind.GATHER: _row(_STAGE, _COLLECTIVE, "shard", "weights", "shard", cost="gather", feature="sharded"),
    Kind.FREE: _row(_STAGE, _COMPUTE, "weights", frees="weights", feature="resident"),
    # ---- replicas that average weights
    Kind.AVERAGE: _row(_STAGE, _COLLECTIVE, "weights", cost="average", feature="averages"),
    # ---- sharded gradients
    Kind.SCATTER: _row(_STAGE, _COLLECTIVE, cost="reduce", feature="scatters", dealt=True),
    # ---- vocabulary parallel
    Kind.SPREAD: _row(_EVERY, _COLLECTIVE, "top@LAST", "hidden", "top@LAST", cost="spread"),
    Kind.S: _row(_EVERY, _COMPUTE, "hidden weights@WORDS", "logits sums", cost="s", data="targets"),
    Kind.MEET: _row(_EVERY, _COLLECTIVE, "sums", "stats turn@LAST", "sums", cost="meet"),
    Kind.T: _row(
        _EVERY, _COMPUTE, "hidden logits stats weights@WORDS clean@WORDS", "outpart", "hidden logits stats", cost="t"
    ),
    Kind.SUM: _row(_EVERY, _COLLECTIVE, "dtop", "turn@LAST", "dtop", cost="sum", feature="two sums"),
    Kind.I: _row(_EVERY, _COMPUTE, "weights@WORDS", "words", cost="i", data="inputs"),
    Kind.GIVE: _row(_EVERY, _COLLECTIVE, "words", "input@FIRST", "words", cost="give"),
    Kind.TAKE: _row(_EVERY, _COLLECTIVE, "bottom@FIRST", "dinput", "bottom@FIRST", cost="take"),
    Kind.E: _row(_EVERY, _COMPUTE, "dinput clean@WORDS", "inpart", "dinput", cost="e"),
}
_LOOKS = {  # pictures leave other kinds out
    Kind.F: _look("FP", "forward", "#28588f #3b6ca5", (25, 31), "#ffffff"),
    Kind.B: _look("BE", "backward for the input", "#e3a04f #eab26e", (215, 223)),
    Kind.W: _look("WM", "backward for the weights", "#f5e3a8 #f9edc5", (187, 230)),
    Kind.BW: _look("DQ", "both backwards in one", "#4f9d83 #66ad95", (72, 115)),
    Kind.OFFLOAD: _look("O", "copy to the host", "#8a8fd6", (104,)),
    Kind.RELOAD: _look("L", "copy back", "#d68ab8", (175,)),
    Kind.REDUCE: _look("S", "sum of gradients", "#b9a7cf", (146,)),
    Kind.TENTATIVE: _look("A", "tentative step", "#5a5a5a", (240,), "#ffffff"),
    Kind.COMMIT: _look("C", "final step", "#c4c4c4", (251,)),
    Kind.GATHER: _look("G", "gather of weights", "#d8cfe4", (188,)),
    Kind.AVERAGE: _look("K", "average of weights", "#cfe0e4", (152,)),
    Kind.SCATTER: _look("Z", "sum of some gradients", "#b9a7cf", (146,)),
    Kind.S: _look("V", "logits of a rank's words", "#3a2a4f", (54,), "#ffffff"),
    Kind.T: _look("U", "gradient of a rank's words", "#d0bde3", (183,)),
    Kind.I: _look("I", "look-up of a rank's words", "#6f6a7d", (60,), "#ffffff"),
    Kind.E: _look("N", "gradient of looked-up words", "#f7f7fb", (231,)),
}
_IDLE = {  # by feature
    "sharded": "no stage is stepped in parts",
    "resident": "weights stay",
    "scatters": "gradients are not shared out",
    "two sums": "the ranks that share the vocabulary sum once, in MEET",
}
_PLACES = {  # the place of each owner's op in a step; 0: of a stage
    (Kind.REDUCE, 0): (
        "every rank that holds a replica of the stage sums its gradients, after the last W or BW of the stage"
    ),
    (Kind.REDUCE, TIED): "every rank with a stage that shares weights sums their gradients, after its last W or BW",
    (Kind.REDUCE, WORDS): "every rank sums the gradients of its words over the replicas, after its last T and E",
    (Kind.VALIDATE, 0): "one VALIDATE on each rank, after its last op of compute",
    (Kind.STEP, 0): "one STEP for each stage a rank holds, after VALIDATE",
    (Kind.STEP, WORDS): "every rank steps its words, after VALIDATE",
    (Kind.TENTATIVE, 0): "one TENTATIVE for each stage a rank holds, after its last op of compute",
    (Kind.TENTATIVE, WORDS): "",
    (Kind.NORM, 0): "one NORM on each rank, before VERDICT",
    (Kind.VERDICT, 0): "one VERDICT on each rank, between NORM and REDO",
    (Kind.REDO, 0): "one REDO on each rank, after VERDICT, with nothing but forwards before it",
    (Kind.COMMIT, 0): "one COMMIT for each stage a rank holds, after REDO and before its first B or BW",
    (Kind.COMMIT, WORDS): "",
    (Kind.GATHER, 0): "one GATHER for each stage a rank holds, before its first F, or after its TENTATIVE",
    (Kind.GATHER, WORDS): "every rank gathers its words before its first I",
    (Kind.AVERAGE, 0): "one AVERAGE for each stage a rank holds, before its first op",
    (Kind.AVERAGE, TIED): "every rank with a stage that shares weights averages them apart, before its first op",
    (Kind.AVERAGE, WORDS): "every rank averages its words, before its first I",
}
for _kind, _made in ROWS.items():
    _own = {owner: text for (kind, owner), text in _PLACES.items() if kind is _kind}
    _place, _idle = _own.pop(0, _made.place), _IDLE.get(_made.feature, "")
    ROWS[_kind] = _made._replace(look=_LOOKS.get(_kind), place=_place, places=_own, idle=_idle)
Rows = dict[Kind, Row]


class RowPatch(NamedTuple):
    """The change of a row by a feature of a program: references that it adds and removes, and columns. Patches of
    several features add up, so that a program may have any of them."""

    kind: Kind
    reads: str = ""
    writes: str = ""
    frees: str = ""
    without: str = ""  # values no longer read, written or freed, unless they are added
    columns: tuple[tuple[str, Any], ...] = ()

    def of(self, row: Row) -> Row:
        gone = {*_refs(self.without)}
        additions = {"reads": self.reads, "writes": self.writes, "frees": self.frees}
        columns: dict[str, Any] = {
            name: (*(ref for ref in getattr(row, name) if ref not in gone), *_refs(added))
            for name, added in additions.items()
        }
        return row._replace(**columns, **dict(self.columns))


_TURN = ("turn@LAST", "bottom@FIRST", "turn@LAST")
PATCHES: dict[str, tuple[RowPatch, ...]] = {
    # Vocabulary parallel: both ends of the pipeline wait for collectives of all ranks, with one sum or two.
    "vocabulary": (
        RowPatch(Kind.F, "input@FIRST", "top@LAST", "input@FIRST"),
        RowPatch(Kind.B, *_TURN),
        RowPatch(Kind.BW, *_TURN),
    ),
    "two sums": (RowPatch(Kind.MEET, without="turn@LAST"), RowPatch(Kind.T, writes="dtop")),
    # Weights are unsharded and resharded within a step: STEP updates only this rank's shard, which exists from the
    # start and is gathered as often as needed.
    "resident": (
        RowPatch(Kind.GATHER, "shard", without="shard"),
        RowPatch(Kind.STEP, "shard", "", "shard", without="weights"),
    ),
    # W needs the weights, too, if layers keep a graph of their own.
    "weights for W": (RowPatch(Kind.W, "weights weights@EXPERTS"),),
    # Replicas average their weights and a step waits for that.
    "waits for averages": (RowPatch(Kind.AVERAGE, columns=(("blocks", True),)),),
    # Steps follow one another without a flush: there is no verdict, a stage steps once its gradients are summed.
    # REDUCE reads the parts of its own step only, which check/versions.py checks on the list of ops.
    "flushless": (
        RowPatch(Kind.REDUCE, without="part@UNITS clean"),
        RowPatch(Kind.STEP, "total", "", "total", without="verdict weights shard clean", columns=(("closes", ""),)),
    ),
    "flushless in shares": (RowPatch(Kind.STEP, "weights", "shard", "weights"),),
}


@functools.lru_cache(maxsize=256)
def rows_with(features: tuple[str, ...]) -> Rows:
    """The rows of a program with these names of `PATCHES`."""
    rows = dict(ROWS)
    for name in features:
        for patch in PATCHES[name]:
            rows[patch.kind] = patch.of(rows[patch.kind])
    return rows


COUNTED = frozenset({Kind.GATHER, Kind.FREE, Kind.SCATTER})  # may occur several times in a step; `Op.mb` counts them

NUMBERED = COUNTED | {Kind.STEP}  # kinds whose ops print their number

UNIT_SCOPES = frozenset({Scope.UNIT, Scope.EVERY})


def _side(refs: tuple[Ref, ...]) -> At | None:
    """The side of a stage that the edge values of `refs` are on; an op reads on one side and writes on one."""
    return next((ref.at for ref in refs if VALUES[ref.what].scope == "edge"), None)


def _answer(kind: Kind, row: Row) -> None:
    """Sets the attributes of a kind that follow from its row, so that each costs one attribute look-up later."""
    kind.row = row
    kind.computes = row.lane is Lane.COMPUTE and row.scope in UNIT_SCOPES and bool(row.cost)
    kind.is_transfer = row.lane is Lane.LINK
    kind.is_send = kind.is_transfer and bool(row.reads)
    kind.is_recv = kind.is_transfer and not row.reads
    kind.is_mark = row.lane is Lane.MARK
    kind.is_collective = row.lane is Lane.COLLECTIVE
    kind.is_barrier = row.blocks
    kind.sums = kind.is_collective and not row.blocks and any(ref.what == "part" for ref in row.reads)
    kind.stage_wide = row.scope is Scope.STAGE
    kind.rank_wide = row.scope is Scope.RANK and not kind.is_mark
    kind.unit_wide = row.scope is Scope.EVERY
    kind.takes, kind.gives = _side(row.reads), _side(row.writes)
    written = {ref.what for ref in row.writes}
    kind.makes_part, kind.splits, kind.steps = "part" in written, "left" in written, "shard" in written
    kind.is_forward, kind.is_backward = row.family == "forward", row.family == "input"


for _kind in Kind:
    _answer(_kind, ROWS[_kind])


@functools.cache
def round_trip(*, split: bool) -> tuple[Kind, ...]:
    """The kinds that take a unit through a stage and back, in order: with a backward in one op, or `split` in two."""
    halves = {kind for kind in Kind if kind.row.family and (kind.splits or not kind.is_backward)}
    return tuple(kind for kind in Kind if kind.is_forward or (kind.row.family and (kind in halves) is split))


_WRITTEN = [ref.what for row in ROWS.values() for ref in row.writes]
# Value -> the kind that makes it, for values that only one kind makes.
MAKER = {ref.what: kind for kind, row in ROWS.items() for ref in row.writes if _WRITTEN.count(ref.what) == 1}
