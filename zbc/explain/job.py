"""E1xx: the job file and the command line."""

from __future__ import annotations

from zbc.explain.entry import entry

ENTRIES = {
    "E100": entry(
        "the job file is not valid TOML",
        """
The file cannot be parsed. The place is where the parser gave up, often just
after the mistake.

    kind = zb-v          strings need quotes: kind = "zb-v"
    [schedule            a table needs both brackets
    pp = 4, dp = 1       one key per line
""",
    ),
    "E101": entry(
        "the job file cannot be read",
        """
It does not exist, is a directory, may not be read, or is not UTF-8 text.
`zbc init` writes a first job file called zbc.toml.
""",
    ),
    "E102": entry(
        "unknown key or table",
        """
Names are checked strictly: a misspelled key would otherwise silently have no
effect.

    [model]
    hiden = 512          did you mean "hidden"?

`zbc config schema` prints all keys as a JSON Schema for editors.
""",
    ),
    "E103": entry(
        "a value has the wrong type or is out of range",
        """
The message says what was expected and what was found.

    layers = "24"              a number is written without quotes: layers = 24
    microbatches = 8.5         expected a whole number
    device = "gpu"             expected 'cuda' or 'cpu'
    memory_limit = "4 GB"      write "1.0x" (of the peak of 1F1B) or "4 GiB"

[schedule] takes exactly one of kind, file and plugin.
""",
    ),
    "E104": entry(
        "unknown schedule",
        """
`zbc schedules` lists the names. The names of the papers and the class names
of torch are both accepted: 1f1b and Schedule1F1B are the same.
""",
    ),
    "E105": entry(
        "a section or a key is missing",
        """
[model], [parallel] and [schedule] are needed, with at least

    [model]
    layers = 8           and for family "gpt": hidden, heads, vocab, seq_len
    [parallel]
    pp = 4
    [schedule]
    kind = "zb-v"
    microbatches = 8

Everything else has a default; `zbc config show JOB.toml` shows them all.
""",
    ),
    "E106": entry(
        "the job file has another version",
        """
`zbc = 1` at the top says which format the file has. A higher number needs a
newer zbc.
""",
    ),
    "E107": entry(
        "not supported by this version of zbc",
        """
The format reserves this value for a later version. It is refused rather than
ignored, so that a job never means less than it says. The hint names the value
to use now. Some values can be planned but not run (model.experts): then it is
`zbc run` that refuses.
""",
    ),
    "E108": entry(
        "extends cannot be followed",
        """
`extends = "base.toml"` inherits from one other file, named relative to this
one. The file must exist, and files must not extend each other in a cycle.
Tables merge key by key; any other value replaces the inherited one.
""",
    ),
    "E109": entry(
        "a --set or --sweep cannot be read",
        """
Both take the dotted name of a key and a TOML value; strings may go without
quotes. A sweep takes several values.

    --set schedule.microbatches=16
    --set 'partition.layers_per_stage=[7, 8, 9, 8]'
    --sweep schedule.microbatches=8,16,32
""",
    ),
    "E110": entry(
        "values that do not go together",
        """
Each value is fine alone, but not beside another one.

    hidden = 100, heads = 3         hidden must be a multiple of heads
    positions = "rotary"            needs an even hidden / heads
    args = {...}, family = "gpt"    args belong to "package.module:factory"
    mode and layers_per_stage       are two answers to one question
    momentum = 0.9, kind = "adamw"  nothing would read momentum

A key that has no effect next to the rest of the job is refused, unless its
value is the default.
""",
    ),
    "E111": entry(
        "init does not overwrite a file",
        """
There is a zbc.toml already. Move it away, or write the new one elsewhere:

    zbc init another-folder
""",
    ),
    "E112": entry(
        "no such error code",
        """
Codes look like E201. `zbc explain` without a code lists all of them.
""",
    ),
    "E113": entry(
        "noise that cannot be simulated",
        """
Noise is a share of the predicted times: 5% or 0.05, and 0 for none. The number
of trials is one or more.

    zbc simulate plan --jitter 5% --straggler 10% --trials 200
""",
    ),
    "E114": entry(
        "a job that is too large to plan",
        """
A step has 3 ops or so for each stage and microbatch. Ten million of them take
some minutes and several GB to plan; beyond that, and beyond a hundred thousand
layers or ranks, zbc does not begin. Such numbers are rarely meant.

    schedule.microbatches = 100000000       per step, not of the whole training
""",
    ),
    "E120": entry(
        "the schedule cannot have that many stages per rank, ranks, or that option",
        """
schedule.chunks is the number of stages per rank (and pipe). gpipe, 1f1b, zb-h1
and zb-h2 have one, zb-v has two; interleaved-1f1b and breadth-first take any
number, hanayo an even one. Leave chunks out to get the schedule's own.
dualpipe mirrors half of the ranks on the other half and needs an even number.
group, early and overlap mean something to some schedules only; the error names
them. "auto" and orders from files take none of them. The microbatches of a
group are dealt evenly to the pipes.
""",
    ),
    "E121": entry(
        "a schedule plugin does not work",
        """
schedule.plugin = "package.module:function" names a function that takes a
zbc.compiler.schedules.Request (p ranks, m microbatches, v chunks, and group,
early and overlap as in the job) and returns a zbc.ir.Program for just these. It
is looked up on the import path and in the current directory.
""",
    ),
    "E122": entry(
        "schedule.file is an order for another job",
        """
A torch CSV file fixes the number of ranks (its rows), of microbatches and of
stages per rank. They have to be those of the job: parallel.pp,
schedule.microbatches and, where it is given, schedule.chunks.
""",
    ),
    "E123": entry(
        "a ramp changes where stages are",
        """
schedule.ramp begins a training with fewer microbatches per step. Weights stay
where they are when the number grows, so all plans of a training need the same
stages on the same ranks. Schedules of zbc have them; a plugin that places
stages by the number of microbatches cannot be used with a ramp.
""",
    ),
    "E124": entry(
        "an order cuts microbatches into slices",
        """
A Program can split a microbatch along its sequence (slices), and the order of
such ops can be checked. What a slice costs is not known yet, and the runtime
cannot run one, so a plugin with slices is not planned, and such a plan is not
simulated. Return ops of whole microbatches.
""",
    ),
    "E130": entry(
        "fewer layers than stages",
        """
Every stage holds at least one layer. The number of stages is parallel.pp times
the schedule's chunks: zb-v on 8 ranks has 16. Use more layers, fewer ranks,
or a schedule with fewer stages per rank.
""",
    ),
    "E131": entry(
        "layers_per_stage does not add up",
        """
partition.layers_per_stage needs one number per stage, and they must sum up to
model.layers. Embedding and head are not counted: they belong to the first and
last stage, the only ones that may have 0.

    layers = 30, 4 stages:   layers_per_stage = [7, 8, 8, 7]
""",
    ),
    "E132": entry(
        "partition.layout cannot be read",
        """
partition.layout takes the pipeline layout string of Megatron-LM: one letter
per layer, a bar between stages, x*3 and (..)*29 for repeats.

    layout = "Et*3|t*4|t*4|t*3L"     E embedding, t layer, L head and loss

E comes first and L last; stages come in order, one per stage of the schedule.
""",
    ),
    "E140": entry(
        "a list of costs has the wrong length",
        """
With costs.per = "rank" a list has one number per rank, with "stage" one per
stage, with "layer" one per layer. A single number stands for all of them.
""",
    ),
    "E141": entry(
        "costs are incomplete or contradict each other",
        """
f, b and w are given together or not at all: mixing measured and estimated
times would rank schedules by the difference between the two. act_w is a part
of act_b and needs it. embed and head go with per = "layer", and with the costs
that the blocks are given.

    [costs]
    f = 18.5
    b = 18.1
    w = 9.3
    comm = 0.6
""",
    ),
    "E142": entry(
        "the profile was made for something else",
        """
A profile holds what the layers of one model cost on one kind of device, for
one size of microbatch. Times of another model, width, data type or size say
nothing about this job, so it is refused; the lines below the error name every
difference. The number of blocks, of ranks and of microbatches, the schedule,
the partition, recompute and the optimizer may differ.

    zbc profile JOB.toml -o profile.json
    zbc plan JOB.toml --profile profile.json
""",
    ),
    "E143": entry(
        "the profile cannot be read",
        """
costs.profile and `zbc plan --profile` name a file that `zbc profile` wrote. It
does not exist, is not JSON, has another version, or a number in it is missing,
has the wrong type or is impossible: the message names it. A relative path
starts at the folder of the job file that names it.
""",
    ),
    "E150": entry(
        "the data do not fit the model",
        """
Text data are bytes: model.vocab must be at least 256, and a model that is not
a gpt must say its seq_len. Synthetic data are tokens: they need model.vocab
and model.seq_len. Other models bring their own data with
data.kind = "package.module:factory". data.path names files of text or tokens,
data.args are for a factory; with another kind they have no effect.
""",
    ),
    "E160": entry(
        "a step to record is not one of the run",
        """
`zbc run PLAN --trace 10-19` records steps 10 to 19, counted from 1 as on the
console. The run ends before the last of them: train.steps, or --steps, says
how many steps it has.
""",
    ),
}
