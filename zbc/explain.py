"""The long text of every error: what it means, an example, what to do. `zbc explain CODE` prints it.

A test demands that the codes here are exactly those that zbc raises.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """`title` is one line; `text` explains, in lines of at most 80 characters."""

    title: str
    text: str


# Second character of a code -> what its family is about.
FAMILIES = {
    "1": "A problem in the job file or on the command line (exit code 3).",
    "2": "The order of operations is wrong (exit code 4).",
    "3": "The plan is right but does not fit (exit code 5).",
    "4": "A problem with a plan directory or a file of another tool (exit code 4).",
    "5": "A problem in the data or in the user's own code (exit code 6).",
    "6": "The environment is not what the command needs (exit code 6).",
    "7": "A run failed (exit code 7).",
}


def _entry(title: str, text: str) -> Entry:
    return Entry(title, text.strip())


CATALOGUE = {
    "E100": _entry(
        "the job file is not valid TOML",
        """
The file cannot be parsed; the place is where the parser gave up, often just
behind the mistake.

    kind = zb-v          strings need quotes: kind = "zb-v"
    [schedule            a table needs both brackets
    pp = 4, dp = 1       one key per line
""",
    ),
    "E101": _entry(
        "the job file cannot be read",
        """
It does not exist, is a directory, may not be read, or is not UTF-8 text.
`zbc init` writes a first job file called zbc.toml.
""",
    ),
    "E102": _entry(
        "unknown key or table",
        """
Names are checked strictly: a key that nobody reads is a typing error that
would otherwise change nothing without a word.

    [model]
    hiden = 512          did you mean "hidden"?

`zbc config schema` prints all keys as a JSON Schema for editors.
""",
    ),
    "E103": _entry(
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
    "E104": _entry(
        "unknown schedule",
        """
`zbc schedules` lists the names. The names of the papers and the class names
of torch are both accepted: 1f1b and Schedule1F1B are the same.
""",
    ),
    "E105": _entry(
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

Everything else has a default; `zbc config show JOB.toml` shows them.
""",
    ),
    "E106": _entry(
        "the job file has another version",
        """
`zbc = 1` at the top says which format the file has. A higher number needs a
newer zbc.
""",
    ),
    "E107": _entry(
        "not supported by this version of zbc",
        """
The format reserves this value for a later version. It is refused rather than
ignored, so that a job never means less than it says. The hint names the value
to use now. Some values can be planned but not run (model.experts): then it is
`zbc run` that refuses.
""",
    ),
    "E108": _entry(
        "extends does not work out",
        """
`extends = "base.toml"` inherits from one other file, named relative to this
one. The file must exist, and a chain of files must not come back to itself.
Tables merge key by key; any other value replaces the inherited one.
""",
    ),
    "E109": _entry(
        "a --set or --sweep cannot be read",
        """
Both take the dotted name of a key and a TOML value; strings may go without
quotes. A sweep takes several values.

    --set schedule.microbatches=16
    --set 'partition.layers_per_stage=[7, 8, 9, 8]'
    --sweep schedule.microbatches=8,16,32
""",
    ),
    "E110": _entry(
        "values that do not go together",
        """
Each value is fine alone, but not beside another one.

    hidden = 100, heads = 3         hidden must be a multiple of heads
    positions = "rotary"            needs an even hidden / heads
    args = {...}, family = "gpt"    args belong to "package.module:factory"
    mode and layers_per_stage       are two answers to one question
    momentum = 0.9, kind = "adamw"  nothing would read momentum

A key that nothing reads beside what else the job says is refused, unless its
value is the default.
""",
    ),
    "E111": _entry(
        "init does not overwrite a file",
        """
There is a zbc.toml already. Move it away, or write the new one elsewhere:

    zbc init another-folder
""",
    ),
    "E112": _entry(
        "no such error code",
        """
Codes look like E201. `zbc explain` without a code lists all of them.
""",
    ),
    "E113": _entry(
        "noise that cannot be simulated",
        """
Noise is a share of the predicted times: 5% or 0.05, and 0 for none. The number
of trials is one or more.

    zbc simulate plan --jitter 5% --straggler 10% --trials 200
""",
    ),
    "E114": _entry(
        "a job that is too large to plan",
        """
A step has 3 ops or so for each stage and microbatch. Ten million of them take
some minutes and several GB to plan; beyond that, and beyond a hundred thousand
layers or ranks, zbc does not begin. Such numbers are rarely meant.

    schedule.microbatches = 100000000       per step, not of the whole training
""",
    ),
    "E120": _entry(
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
    "E121": _entry(
        "a schedule plugin does not work",
        """
schedule.plugin = "package.module:function" names a function that takes a
zbc.compiler.schedules.Request (p ranks, m microbatches, v chunks, and group,
early and overlap as in the job) and returns a zbc.ir.Program for just these. It
is looked up on the import path and in the current directory.
""",
    ),
    "E122": _entry(
        "schedule.file is an order for another job",
        """
A torch CSV file fixes the number of ranks (its rows), of microbatches and of
stages per rank. They have to be those of the job: parallel.pp,
schedule.microbatches and, where it is given, schedule.chunks.
""",
    ),
    "E123": _entry(
        "a ramp changes where stages are",
        """
schedule.ramp begins a training with fewer microbatches per step. Weights stay
where they are when the number grows, so all plans of a training need the same
stages on the same ranks. Schedules of zbc have them; a plugin that places
stages by the number of microbatches cannot be used with a ramp.
""",
    ),
    "E130": _entry(
        "fewer layers than stages",
        """
Every stage holds at least one layer. There are parallel.pp times the chunks
of the schedule stages: zb-v on 8 ranks has 16. Use more layers, fewer ranks,
or a schedule with fewer stages per rank.
""",
    ),
    "E131": _entry(
        "layers_per_stage does not add up",
        """
partition.layers_per_stage needs one number per stage, and they must sum up to
model.layers. Embedding and head are not counted: they belong to the first and
last stage, the only ones that may have 0.

    layers = 30, 4 stages:   layers_per_stage = [7, 8, 8, 7]
""",
    ),
    "E132": _entry(
        "partition.layout cannot be read",
        """
partition.layout takes the pipeline layout string of Megatron-LM: one letter
per layer, a bar between stages, x*3 and (..)*29 for repeats.

    layout = "Et*3|t*4|t*4|t*3L"     E embedding, t layer, L head and loss

E comes first and L last; stages come in order, one per stage of the schedule.
""",
    ),
    "E140": _entry(
        "a list of costs has the wrong length",
        """
With costs.per = "rank" a list has one number per rank, with "stage" one per
stage, with "layer" one per layer. A single number stands for all of them.
""",
    ),
    "E141": _entry(
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
    "E142": _entry(
        "the profile was made for something else",
        """
A profile holds what the layers of one model cost on one kind of device, for
one size of microbatch. Times of another model, width, data type or size say
nothing of this job, so it is refused; the lines below the error name every
difference. The number of blocks, of ranks and of microbatches, the schedule,
the cut, recomputation and the optimizer may differ.

    zbc profile JOB.toml -o profile.json
    zbc plan JOB.toml --profile profile.json
""",
    ),
    "E143": _entry(
        "the profile cannot be read",
        """
costs.profile and `zbc plan --profile` name a file that `zbc profile` wrote.
It is not there, is not JSON, has another version, or a number in it is
missing, has the wrong type or is no time or rate that can be: the message
names it. A relative path starts at the folder of the job file that names it.
""",
    ),
    "E150": _entry(
        "the data do not go with the model",
        """
Text data are bytes: model.vocab must be at least 256, and a model that is not
a gpt must say its seq_len. Synthetic data are tokens: they need model.vocab
and model.seq_len. Other models bring their own data with
data.kind = "package.module:factory". data.path names files of text or tokens,
data.args are for a factory; beside another kind nothing would read them.
""",
    ),
    "E160": _entry(
        "a step to record is not one of the run",
        """
`zbc run PLAN --trace 10-19` records steps 10 to 19, counted from 1 as on the
console. The run ends before the last of them: train.steps, or --steps, says
after how many. Or the first of them belongs to a ramp of the batch size, whose
steps run plans of their own.
""",
    ),
    "E201": _entry(
        "deadlock",
        """
The order of ops makes ranks wait for each other forever. The lines are a
shortest circle: each op waits for the next, the last for the first.

    rank 0 step 3: SEND_F s0 m1 >r1  waits for  rank 1 step 4: RECV_F s1 m1 <r0
    rank 1 step 3: SEND_B s1 m0 >r0  waits for  rank 0 step 4: RECV_B s0 m0 <r1

Schedules of zbc never do; a plugin or an edited plan may. Break the circle at
one place: post the receive earlier, or run the op that another rank waits for
before the one that waits.
""",
    ),
    "E202": _entry(
        "the program is not complete",
        """
Every stage runs F and either BW or B and W of every microbatch, once, and with
two pipes a microbatch goes through one of them. A step is closed by a barrier
(VALIDATE, STEP) or without one (NORM, VERDICT, REDO, COMMIT, TENTATIVE), not
by both. An op is missing, runs twice, or does not belong to this program.
Behind an OVERLAP stand an F and a B or BW that do not need each other.
""",
    ),
    "E203": _entry(
        "a transfer has no other end",
        """
Every SEND meets one RECV on the rank of the neighbouring stage, and stages of
one rank hand tensors over without any. `zbc` adds transfers itself: plugins
return compute ops only.
""",
    ),
    "E204": _entry(
        "messages of one direction are received in another order than sent",
        """
Transports deliver the messages of one rank to another in the order of their
sending. Receives must be posted in that order; they may be posted early.
""",
    ),
    "E205": _entry(
        "an op runs on a rank that does not hold its stage",
        """
The placement says which rank holds which stage; an op of a stage runs there.
""",
    ),
    "E206": _entry(
        "an op runs before what it needs",
        """
Within a rank ops run in the order of the list, so F stands before B of the
same stage and microbatch, B before W, a SEND behind the op that makes its
tensor, a STEP behind all gradients. Without the optimizer's barrier, what
stands before REDO is run again when the step before does not stand, so it has
to be forwards and their messages alone, with both ends before REDO; COMMIT
stands before the first backward of its stage.
""",
    ),
    "E207": _entry(
        "the plan needs sends that return at once",
        """
Asked for with `zbc check --strict`. The plan is free of deadlock as long as a
SEND only starts a message, which is how the runtime sends. On a transport
where a SEND holds up its rank until the message is received, it would hang.
Schedules on a line of ranks usually survive that, V placements do not.
""",
    ),
    "E301": _entry(
        "does not fit into the memory of a rank",
        """
The fullest rank needs more than hardware.memory_gib: weights, gradients,
optimizer state, activations at their peak and receive buffers together.
The lines show the parts, and the schedules that would fit.

What helps, cheapest first: another schedule, a smaller microbatch_size, more
ranks (parallel.pp), a smaller model.
""",
    ),
    "E302": _entry(
        "holds more activations than memory_limit",
        """
schedule.memory_limit bounds the activations of every rank: "1.0x" is the peak
of 1F1B, which is parallel.pp activation units; "40 GiB" counts bytes. The
hint names the limit that this schedule needs; the lines, others that keep to
the given one.
""",
    ),
    "E303": _entry(
        "no order keeps to memory_limit",
        """
schedule.memory_limit is below what a single microbatch on its way through the
stages of one rank needs, so no order at all can keep to it. The hint names
the smallest limit that works with this placement and cut.
""",
    ),
    "E401": _entry(
        "a plan directory cannot be read",
        """
A plan directory holds plan.json and one rank-NNNN.json per rank; something of
it is missing or cannot be read. `zbc plan JOB.toml -o DIR` writes one.
""",
    ),
    "E402": _entry(
        "a plan was edited after planning",
        """
plan.json keeps the sha256 of every file of the plan, and one of the files
differs. Nothing runs from an edited plan, since nothing is proven of it.
`zbc check DIR` also says what is wrong with its ops. Make the plan again; an
order of your own is best written as a plugin (schedule.plugin).
""",
    ),
    "E403": _entry(
        "a plan of another version",
        """
The plan was written by a zbc whose plan format this one does not read, or
whose plan.json has other fields; nobody edited it. Plan the job again.
""",
    ),
    "E404": _entry(
        "a plan file is damaged",
        """
It is cut off, not JSON, not a plan, or contains lines that are not ops of
this plan. Make the plan again with `zbc plan JOB.toml`.
""",
    ),
    "E405": _entry(
        "something else is in the place of the plan",
        """
A plan directory is replaced as a whole, so zbc only replaces directories that
are empty or hold nothing but a plan. Choose another place with -o.
""",
    ),
    "E406": _entry(
        "the plan needs ops that this zbc does not have",
        """
The plan was written by a newer zbc. Use that one, or plan again.
""",
    ),
    "E407": _entry(
        "a plan directory cannot be written",
        """
The system refused: no permission, no space, or a file where a folder has to
be. Nothing was changed.
""",
    ),
    "E410": _entry(
        "a CSV file cannot be read",
        """
An order in torch's form is a text file of comma-separated values, one row per
rank and one action per cell, as `0F0,0F1,0B0,0B1`. The file does not exist,
is not text, or is not made of such rows.
""",
    ),
    "E411": _entry(
        "a cell of a CSV file is not an action",
        """
An action is a stage, a letter and a microbatch: 2F0 is the forward of stage 2
for microbatch 0; I is the input gradient, W the weight gradient and B both in
one. torch reads a cell as far as it makes sense and drops the rest, so that
2F0garbage is 2F0 to it; zbc does not guess. Cells like 0SEND_F1 or 1UNSHARD
belong to torch's lowered form: dump the schedule with format="compute_only".
""",
    ),
    "E412": _entry(
        "the rows of a CSV file make no pipeline",
        """
Each row is a rank with work, each stage stands in one row only, and stages and
microbatches are numbered 0, 1, 2, ... without gaps.
""",
    ),
    "E413": _entry(
        "another tool cannot express the plan",
        """
`zbc export` writes a file only if it says the same as the plan. What the other
tool has no words for (a second pipe, slices, an order that is not one of its
own) is named; `zbc export PLAN --to json` keeps all of it.
""",
    ),
    "E414": _entry(
        "an order cannot be repaired by moving its ops",
        """
`zbc check FILE.csv --suggest` changes the order of actions and drops repeated
ones. It does not invent actions that are missing: add them first.
""",
    ),
    "E415": _entry(
        "there is no job to write a plan of",
        """
A plan directory holds the model, the training section and the costs of a job
beside the order of ops. A plan that was read, from a directory or from a CSV
file, is not written again. Plan a job; `schedule.file` takes an order in
torch's CSV form.
""",
    ),
    "E430": _entry(
        "there is no trace of a run",
        """
`zbc run PLAN --trace 10-19` records when each rank did what, in the folder
`trace` of the run directory: a file per rank, and a copy of the plan. Ranks of
several machines write theirs where they run; copy them to one place. A run that
was killed in its first recorded step has left nothing to read.
""",
    ),
    "E431": _entry(
        "a trace is damaged",
        """
A file of the trace does not say what a trace says there; the place is its file
and line. Each line is one JSON object. A last line without its end is what a
killed run leaves, and is no error: steps that all ranks completed are read.
""",
    ),
    "E432": _entry(
        "a step was not recorded",
        """
`zbc visualize RUN --from 12 --steps 3` draws steps that the run recorded; which
these are, `zbc run PLAN --trace STEPS` was told. A run that was killed has them
up to the last one that all its ranks completed.
""",
    ),
    "E501": _entry(
        "data are missing",
        """
data.path names text files, or folders of them, and something there does not
exist, is empty or cannot be read. Without data.path the sources of this
Python's standard library are used, which some minimal installations lack.
""",
    ),
    "E502": _entry(
        "code of yours cannot be imported or failed",
        """
"package.module:name" is looked up on the import path and in the current
directory. A model factory is called with model.args and returns the list of
layers; a data factory is called with data.args and returns a dataset with
__len__ and __getitem__; a loss takes (output, target) and returns their mean
over the microbatch. The lines show where your code failed.
""",
    ),
    "E503": _entry(
        "a data file is not text",
        """
data.kind = "text" reads UTF-8. Convert the file, or leave it out of
data.path; for other data write a factory: data.kind = "package.module:name".
""",
    ),
    "E504": _entry(
        "too little data",
        """
One step takes microbatches * microbatch_size different sequences of seq_len
tokens, and the data hold fewer. Give more data, or make a step smaller.
""",
    ),
    "E505": _entry(
        "a tensor has another shape or type than planned",
        """
Shapes and types are fixed before the run, since receivers make their buffers
ahead. All microbatches have the same shape, a layer passes one tensor on, and
the loss is a single number. Plan again if the model changed since planning.
""",
    ),
    "E506": _entry(
        "the model has another number of layers than planned",
        """
model.layers must be what the factory returns; the plan cuts just these layers
into stages.
""",
    ),
    "E507": _entry(
        "a layer brings its own data parallelism",
        """
DistributedDataParallel and fully sharded wrappers exchange gradients in hooks
that do not fire, or fire too early, where the weight gradient is an op of its
own: training would go wrong silently. Return the plain layers.
""",
    ),
    "E508": _entry(
        "layers share a parameter",
        """
Two layers of the model hold the same parameter (tied weights). On different
stages it would exist twice and drift apart; give each layer its own. The
built-in families can share embedding and head: model.tie_embeddings = true.
""",
    ),
    "E509": _entry(
        "a layer cannot be trained in a pipeline",
        """
Found when the layers are looked at before training starts: a lazy layer whose
parameters have no size yet, sparse gradients, random numbers that nobody seeds
(Python's, numpy's, a generator of its own), a tensor that autograd computed
beside its parameters, or buffers that a forward changes (running statistics)
where they could not come out as in one process: a stage that several ranks
hold a copy of, or a plan that runs its forwards out of order. The same holds
with two pipes for plain attributes that a forward changes and that its output
depends on, and for those also under recompute and without the barrier, where
forwards run twice.
docs/models.md lists what layers may do.
""",
    ),
    "E510": _entry(
        "gradients are not those of plain autograd",
        """
`zbc doctor --model JOB.toml` runs one microbatch through the stages of the plan
and through the uncut model, and compares the gradient of each parameter. They
should have the same bits in float32 on a CPU; a difference within 1e-5 (2e-2 in
bfloat16) of a parameter's largest gradient counts as rounding. More than that
means that a layer does not do the same thing both times, or gets its gradient
in a way a pipeline breaks.
""",
    ),
    "E511": _entry(
        "a layer cannot be compiled",
        """
With model.compile = true each layer that is to be compiled is tried out before
training starts: on numbers drawn for it, as it is and compiled, with B and W
apart where the plan has them apart. It is refused if torch.compile fails, if
its output or a gradient differs by more than rounding (1e-4 of its norm, 5e-2
in bfloat16), or if torch compiles it anew for other numbers, which it would
then do at every microbatch. Without model.compile the layer trains as it is;
what a factory compiles itself is left alone.
""",
    ),
    "E520": _entry(
        "the folder of pretrained weights cannot be read",
        """
model.pretrained and `zbc init --from-hf` name a Hugging Face folder, as
transformers' save_pretrained writes it: config.json and model.safetensors, or
several files and model.safetensors.index.json. A relative path starts at the
current directory. Weights in pytorch_model.bin are a pickle, which can run any
code when it is loaded; zbc never does that: load and save them once with
transformers in a place you trust.
""",
    ),
    "E521": _entry(
        "the pretrained model is not one that zbc computes",
        """
zbc has GPT-2 and Llama. The message names the key of config.json whose value
makes it another model: another model_type or activation, biases in a Llama,
a rope_type other than default, linear and llama3, a quantized model.
""",
    ),
    "E522": _entry(
        "the job and the pretrained model differ",
        """
The sizes in [model] have to be those of config.json; each that differs is
listed. seq_len may be shorter, and tie_embeddings = false gives embedding and
head a matrix each that begin alike. `zbc init DIR --from-hf FOLDER` writes a
job that fits.
""",
    ),
    "E523": _entry(
        "the pretrained weights are damaged or of another model",
        """
A tensor that the model needs is missing, has another shape than config.json
says, or there are tensors that the model does not have; or a file is cut off.
""",
    ),
    "E524": _entry(
        "the model has no Hugging Face form",
        """
zbc run --save-hf writes a gpt with learned positions as GPT-2 and a llama as
Llama. Other models have no class in transformers that computes the same.
""",
    ),
    "E525": _entry(
        "the weights cannot be written",
        """
The folder of `zbc run --save-hf` holds a model already, cannot be written, or
has no room left. The first two are found before training starts. A folder
with an index is complete; without one it may be removed.
""",
    ),
    "E530": _entry(
        "a token file cannot be read",
        """
data.path has to name files made by `zbc data tokenize`, or files of plain
little-endian numbers whose type data.dtype says. Beside FILE stands FILE.json,
which goes where FILE goes.
""",
    ),
    "E531": _entry(
        "a token file is damaged",
        """
Its size is not what the JSON beside it says, the JSON cannot be read, or the
file became shorter while it was read: a copy that broke off, a full disk, a
file made anew in the middle of a run. Copy or make it again.
""",
    ),
    "E532": _entry(
        "a token is not in the vocabulary",
        """
model.vocab counts the tokens of the model, numbered from 0; the data have a
larger one. The data were made with another tokenizer, data.dtype is wrong, or
model.vocab is too small: set it and plan again.
""",
    ),
    "E533": _entry(
        "text cannot be tokenized like this",
        """
OUT exists already, or another process is making it; or the tokenizer.json
cannot be read, is none, or has no token to end a document with (--end names
one).
""",
    ),
    "E601": _entry(
        "the plan wants another number of ranks",
        """
A plan is made for parallel.pp ranks in each of parallel.dp copies of the
pipeline, and one process runs each.

    torchrun --standalone --nproc-per-node 4 -m zbc run plan     under torchrun
    zbc run plan --local 4                                       on this CPU

For another number of ranks plan again with --set parallel.pp=N or
--set parallel.dp=N.
""",
    ),
    "E602": _entry(
        "a package is missing or too old",
        """
Planning needs no torch; `zbc run` needs 2.11 or newer. A proof that no better
schedule exists needs ortools: pip install 'zbc[solve]'. `zbc doctor` says what
is installed.
""",
    ),
    "E603": _entry(
        "the device is missing",
        """
hardware.device = "cuda" needs one CUDA device per rank on this machine.
`zbc doctor` lists them. Plan again with --set hardware.device=cpu to train on
the CPU.
""",
    ),
    "E604": _entry(
        "not started by torchrun",
        """
`zbc run PLAN` is one rank of several and learns from torchrun which. Start it
with torchrun, or let zbc start all ranks on this machine with --local N.

    torchrun --standalone --nproc-per-node 4 -m zbc run plan
""",
    ),
    "E605": _entry(
        "ranks run different plans or versions",
        """
All ranks compare what they run before the first step: the plan, the versions
of zbc, torch and Python, zbc's own sources, and those of every module that the
job's layers, loss and data have loaded (but for installed packages). Give
every machine the same plan directory, code and environment.
""",
    ),
    "E606": _entry(
        "the run directory cannot be written",
        """
Metrics go to a new folder below log.dir. Name another place with --out.
""",
    ),
    "E607": _entry(
        "the run directory belongs to another run",
        """
--out names a folder that has metrics in it. Choose another, or remove it:
metrics of two runs in one file could not be told apart.
""",
    ),
    "E608": _entry(
        "a file cannot be written",
        """
The system refused to write what was asked for with -o, --dump-ir or init: no
permission, no space, or a file where a folder has to be.
""",
    ),
    "E609": _entry(
        "the ranks cannot find each other",
        """
Ranks meet at a store: torchrun hosts it, under other launchers rank 0 does, at
MASTER_ADDR and MASTER_PORT. A wrong address, a port in use, a firewall or a
first machine that did not start keeps the others from it.
""",
    ),
    "E610": _entry(
        "an optional package is not installed",
        """
Some features need a package that zbc itself does not:

    pip install 'zbc[hf]'             safetensors: pretrained weights, export
    pip install 'zbc[tokenizers]'     tokenizers: zbc data tokenize --tokenizer
    pip install 'zbc[tensorboard]'    log.tensorboard
    pip install 'zbc[wandb]'          log.wandb
""",
    ),
    "E611": _entry(
        "a checkpoint cannot be written",
        """
The disk is full, the folder cannot be written (which every rank tries before
the first step) or is not the same on all machines, or a tensor is of a type
that safetensors files cannot hold. The run ends, since going on unsaved is no
better later; the newest complete checkpoint stays as it is, and

    zbc run plan --resume auto ...

goes on from there once there is room. checkpoint.dir names another place,
checkpoint.keep says how many stay, checkpoint.every = 0 turns them off.
""",
    ),
    "E612": _entry(
        "a checkpoint cannot be read",
        """
Only a checkpoint with the file .complete in it is read, and every byte of it is
compared with what was written before training goes on: length and checksums of
each file. A file that was cut off, changed or lost is named. zbc does not fall
back to an older checkpoint on its own, since that would repeat steps without a
word; the message names the one before it, to be given with --resume PATH.
""",
    ),
    "E613": _entry(
        "the checkpoint is of another training",
        """
Schedule, ranks, copies, ZeRO-1, recompute and the like may change between a
checkpoint and the run that goes on from it. What may not: the parameters, their
shapes and types ([model]), the kind of optimizer, and train.seed, on which the
order of the data and dropout depend. To begin another training with these
weights, write them with --save-hf and set model.pretrained.
""",
    ),
    "E614": _entry(
        "checkpoints of another run are in the way",
        """
A run that begins anew, or from an older checkpoint, would write among later
checkpoints of another run, and --resume auto could not tell them apart. Go on
from the newest with --resume auto, choose another --out or checkpoint.dir, or
remove the old ones. So it is with a run that writes there at the same time:
rank 0 holds a lock on the file .writer, which ends with its process.
""",
    ),
    "E615": _entry(
        "machines of a run cannot reach each other",
        """
Ranks of one machine found the store of the run, but no way to ranks of another
machine. A rank listens on the interface through which it reaches the store, at
ports that the system chooses; /etc/hosts and firewalls are the usual reasons.

    GLOO_SOCKET_IFNAME=eth1     on every machine: listen there instead
    NCCL_SOCKET_IFNAME=eth1     the same for NCCL
""",
    ),
    "E616": _entry(
        "Weights & Biases does not start",
        """
log.wandb asks for it, and wandb.init, which rank 0 calls before the first step,
failed: nobody is logged in (`wandb login`, or WANDB_API_KEY), or its server is
out of reach. WANDB_MODE=offline keeps the run on this machine; `wandb sync`
sends it later. Without log.wandb metrics.jsonl still has every number.
""",
    ),
    "E617": _entry(
        "no compiler for model.compile",
        """
torch.compile makes C++ of layers on a CPU, Triton on CUDA, and found nothing
to compile it with. Every machine of a run needs one.

    apt install g++           or clang; CXX=/path/to/compiler names another
    pip install triton        on CUDA; it comes with torch there
""",
    ),
    "E701": _entry(
        "no progress",
        """
No op ended on any rank for train.watchdog_s seconds. The lines say in which op
each rank is; the marked one is not waiting for another rank and so holds the
others up, and its Python stack follows. A rank that does not respond at all
was stopped, has lost its machine, or is in native code that holds Python's
lock. A slow first step (compilation, cold files) may need a larger
train.watchdog_s.
""",
    ),
    "E702": _entry(
        "a rank was lost",
        """
A rank ended, so the others cannot go on. The reason stands in the message of
the rank that failed first; if it has none, it was killed from outside, often
by the system for lack of memory. With checkpoints and --max-restarts, zbc's own
with --local or torchrun's, a run goes on by itself (docs/failures.md).
""",
    ),
    "E703": _entry(
        "an op failed",
        """
The message names the rank, the step and the op, and the lines where the code
failed. If it speaks of the plan (a message nobody takes, a tensor that is not
there), the plan did not come from this zbc: check it with `zbc check`.
""",
    ),
    "E704": _entry(
        "the gradients are not finite",
        """
A step whose gradients are not all finite changes nothing on any rank. With
train.nonfinite = "skip" the run goes on, until train.skip_limit steps in a row
or train.skip_total in all were skipped; with "stop" it ends at the first. The
message says whether the losses were finite, and in which stage backward first
met such a gradient. A lower learning rate, a longer warm-up or clipping help
against steps that are too large; data that are broken are the same each time.
""",
    ),
    "E705": _entry(
        "copies that must be equal differ",
        """
Copies of a stage (parallel.dp, the two pipes of bidirectional schedules) and of
a tied weight are bit for bit equal after every step. Before a checkpoint is
complete their hashes are compared; the message names the tensors and the ranks.
Something else than the optimizer wrote to a weight, or a device computes
wrongly. The checkpoint before is untouched.
""",
    ),
}
