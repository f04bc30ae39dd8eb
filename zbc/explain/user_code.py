"""E5xx: the data and the user's own code."""

from __future__ import annotations

from zbc.explain.entry import entry

ENTRIES = {
    "E501": entry(
        "data are missing",
        """
data.path names text files, or folders of them, and something there does not
exist, is empty or cannot be read. Without data.path the sources of this
Python's standard library are used, which some minimal installations lack.
""",
    ),
    "E502": entry(
        "code of yours cannot be imported or failed",
        """
"package.module:name" is looked up on the import path and in the current
directory. A model factory is called with model.args and returns the list of
layers; a data factory is called with data.args and returns a dataset with
__len__ and __getitem__; a loss takes (output, target) and returns their mean
over the microbatch. The lines show where your code failed.
""",
    ),
    "E503": entry(
        "a data file is not text",
        """
data.kind = "text" reads UTF-8. Convert the file, or leave it out of
data.path; for other data write a factory: data.kind = "package.module:name".
""",
    ),
    "E504": entry(
        "too little data",
        """
One step takes microbatches * microbatch_size different sequences of seq_len
tokens, and the data hold fewer, or those kept for evaluation (data.validation,
data.validation_path). Give or keep more data, or make a step smaller.
""",
    ),
    "E505": entry(
        "a tensor has another shape or type than planned",
        """
Shapes and types are fixed before the run, since receivers make their buffers
ahead. All microbatches have the same shape, a layer passes one tensor on, and
the loss is a single number. Plan again if the model changed since planning.
""",
    ),
    "E506": entry(
        "the model has another number of layers than planned",
        """
model.layers must be the number of layers that the factory returns; the plan
divides exactly these layers into stages.
""",
    ),
    "E507": entry(
        "a layer brings its own data parallelism",
        """
DistributedDataParallel and fully sharded wrappers exchange gradients in hooks.
These do not fire, or fire too early, when the weight gradient is an op of its
own: training would silently go wrong. Return the plain layers.
""",
    ),
    "E508": entry(
        "layers share a parameter",
        """
Two layers of the model hold the same parameter (tied weights). On different
stages it would exist twice and drift apart; give each layer its own. The
built-in families can share embedding and head: model.tie_embeddings = true.
""",
    ),
    "E509": entry(
        "a layer cannot be trained in a pipeline",
        """
Found before training starts. The layer

- is lazy, so that its parameters have no size yet, or has sparse gradients,
- draws random numbers that zbc cannot seed (Python's, numpy's, its own
  generator), or keeps a tensor that autograd computed,
- changes buffers in its forward (running statistics), but several ranks hold
  its stage, or the plan runs its forwards out of order,
- keeps state in plain attributes that its output depends on. This is also
  refused under recompute and without the barrier, where forwards run twice,
  and with checkpoints, which do not store attributes,
- keeps in attributes what its backward needs, but forwards of other
  microbatches come between.

docs/models.md lists what layers may do.
""",
    ),
    "E510": entry(
        "gradients are not those of plain autograd",
        """
`zbc doctor --model JOB.toml` runs two microbatches through the stages of the
plan and through the whole model, and compares the gradient of each parameter.
They should have the same bits in float32 on a CPU; a difference within 1e-5
(2e-2 in bfloat16) of a parameter's largest gradient counts as rounding. A
larger one means that a layer does not do the same thing both times, or gets its
gradient in a way that a pipeline breaks.
""",
    ),
    "E511": entry(
        "a layer cannot be compiled",
        """
With model.compile = true each layer is tried out on random numbers before
training starts, compiled and uncompiled, with B and W apart where the plan has
them apart. It is refused if torch.compile fails, if its output or a gradient
differs by more than rounding (1e-4 of its largest number, 5e-2 in bfloat16), or
if torch compiles it again for other numbers, which it would then do at every
microbatch. Without model.compile the layer trains as it is. What a factory
compiles itself is left alone.
""",
    ),
    "E520": entry(
        "the folder of pretrained weights cannot be read",
        """
model.pretrained and `zbc init --from-hf` name a Hugging Face folder, as
transformers' save_pretrained writes it: config.json and model.safetensors, or
several files and model.safetensors.index.json. A relative path starts at the
current directory. Weights in pytorch_model.bin are a pickle, which can run any
code when it is loaded. zbc never loads it: load and save the weights once with
transformers in a place you trust.
""",
    ),
    "E521": entry(
        "the pretrained model is not one that zbc computes",
        """
zbc has GPT-2 and Llama. The message names the key of config.json whose value
makes it another model: another model_type or activation, biases in a Llama,
a rope_type other than default, linear and llama3, a quantized model.
""",
    ),
    "E522": entry(
        "the job and the pretrained model differ",
        """
The sizes in [model] have to be those of config.json; each that differs is
listed. seq_len may be shorter, and tie_embeddings = false gives embedding and
head a matrix each, with equal initial values. `zbc init DIR --from-hf FOLDER`
writes a job that fits.
""",
    ),
    "E523": entry(
        "the pretrained weights are damaged or of another model",
        """
A tensor that the model needs is missing, has another shape than config.json
says, or there are tensors that the model does not have; or a file is cut off.
""",
    ),
    "E524": entry(
        "the model has no Hugging Face form",
        """
zbc run --save-hf writes a gpt with learned positions as GPT-2 and a llama as
Llama. Other models have no class in transformers that computes the same.
""",
    ),
    "E525": entry(
        "the weights cannot be written",
        """
The folder of `zbc run --save-hf` holds a model already, cannot be written, or
has no room left. The first two are found before training starts. A folder
with an index is complete; without one it may be removed.
""",
    ),
    "E530": entry(
        "a token file cannot be read",
        """
data.path has to name files made by `zbc data tokenize`, or files of plain
little-endian numbers whose type data.dtype says. FILE.json belongs to FILE:
keep both in one folder.
""",
    ),
    "E531": entry(
        "a token file is damaged",
        """
Its size is not what the JSON beside it says, the JSON cannot be read, or the
file became shorter while it was read: an interrupted copy, a full disk, a file
rewritten during a run. Copy or make it again.
""",
    ),
    "E532": entry(
        "a token is not in the vocabulary",
        """
model.vocab counts the tokens of the model, numbered from 0; the data have a
larger one. The data were made with another tokenizer, data.dtype is wrong, or
model.vocab is too small: set it and plan again.
""",
    ),
    "E533": entry(
        "text cannot be tokenized like this",
        """
OUT exists already, another process is writing it, or the tokenizer.json cannot
be read or has no token to end a document with (--end names one).
""",
    ),
}
