"""Jobs that are refused: all settings that cannot be, or do not go together, each with the error that says so."""

import pytest
import tomli

from tests.jobs import job, toml_text
from zbc.compiler.compile import compile_job
from zbc.errors import ZbcError
from zbc.job import toml

OWN = 'model.family="a.b:c"; model.layers=4; model.loss="mse"'
EXPERTS = 'model.family="llama"; model.experts=4; model.seq_len=32; model.ffn_hidden=48; parallel.pp=2'
COSTS = "costs.f=1.0; costs.b=1.0; costs.w=1.0"
GRAPH = 'model.family="plans.graphs:towers"; model.layers=6'
REPLICAS = 'schedule.kind="replicated-1f1b"; parallel.pp=3; parallel.replicas=[2, 1]; schedule.microbatches=5'
AVERAGE = "parallel.pp=2; parallel.dp=2"
ONE_SIDED = 'parallel.dp=2; parallel.exchange="one-sided"; parallel.shard="weights"'
# What jobs of a group say, and a line for each: what else it says, what the error points at last =>
# the code and words of the error [=> of its hint].
READ = {
    "": """\
checkpoint.keep=5 => E105 checkpoint.every is missing
checkpoint.every=5; checkpoint.dir="" => E103 checkpoint.dir is empty
log.to=["wandb"] => E103 neither tensorboard nor wandb:PROJECT
costs.per="layer"; costs.b=1; costs.w=1; costs.f=[1.0] => E141 costs.f has 1 numbers, model.layers is 8
costs.b=1; costs.w=1; costs.f=[1, -2] => E103 costs.f.1: must be at least 0, found -2
costs.b=1; costs.w=1; costs.f=1e300 => E103 must be at most
costs.f=1; costs.b=1; costs.w=1; costs.comm=1e300 => E103 must be at most
hardware.link_us=1e300 => E103 must be at most
model.heads=1000000007 => E103 must be at most
costs.head.f=1.0 => E102 costs.head is gone; write lists of costs.f
costs.per="layer" => E141 there are none
partition.layers_per_stage="equel" => E103 expected a list or "equal", found 'equel'
data.kind="txt" => E103 unknown data.kind
data.kind="synthetic"; data.path="a" => E150 data.kind is 'synthetic'
data.kind="synthetic"; data.items="steps" => E150 is of a dataset of yours
data.kind="a.b:c"; data.path="a" => E150 names files of text, tokens or chat
data.kind="a.b:c"; data.items="steps"; data.validation=0.1 => E110 data.validation keeps samples
data.args.x=1 => E150 belong to a factory or a chat template, data.kind is
data.validation="a" => E105 train.eval_every is missing
data.kind="synthetic"; data.balance="tokens" => E110 schedule.tokens is not set
train.eval_batches=3 => E105 train.eval_every is missing
train.hook="mine" => E103 does not name a function
train.eval_every=1; data.validation=0.1; checkpoint.every=1; checkpoint.keep_best="a" => E103 not name a function
memory.attention="keep" => E110 of selective recompute
model.family="gtp" => E103 unknown model.family
model.head_size=8 => E110 model.head_size is not for family gpt
model.variant="own norms" => E110 is not for family gpt
model.rope_theta=1e6 => E110 needs rotary positions
model.top_k=2 => E110 top_k is for models with experts
model.ffn_hidden=[8, 9] => E110 the second number of model.ffn_hidden is for models with experts
model.experts=2; model.top_k=3 => E110 top_k = 3 is more than model.experts = 2
model.dtype="bfloat16"; model.loss_scale=8.0 => E110 is for float16, model.dtype is 'bfloat16'
model.dtype="float16"; model.parameters="bfloat16" => E110 computes in bfloat16
parallel.vocabulary="shared"; model.loss_chunk=8 => E110 model.loss_chunk
model.loss="mse"; model.z_loss=0.1 => E110 model.z_loss is for cross_entropy
model.label_smoothing=1.0 => E103 label_smoothing
optimizer.betas=[0.9] => E103 expected 2 numbers, found [0.9] => write betas = [0.9, 0.95]
optimizer.betas=[0.9, 0.9, 0.9] => E103 expected 2 numbers => write betas = [0.9, 0.95]
optimizer.betas=[1.5, 0.9] => E103 must be less than 1, found 1.5
optimizer.betas=0.9 => E103 expected a list, found 0.9
optimizer.lr=[] => E103 found []
optimizer.lr=[0.1, 0.2] => E110
optimizer.kind="sgd"; optimizer.betas=[0.5, 0.9] => E110 is for adam, adamw and muon
optimizer.kind="sgd"; optimizer.state="bfloat16" => E110 optimizer.state
optimizer.momentum=0.9 => E110 sgd and muon, optimizer.kind is 'adamw'
optimizer.feedback=0.5 => E110 feedback
optimizer.schedule.by="samples" => E110 does nothing
optimizer.schedule.warmup_steps=4 => E110 warmup_steps = 4 is more than train.steps = 3
optimizer.schedule={kind="linear", warmup_steps=2, decay_steps=2} => E110 decay_steps = 2 and warmup_steps = 2
optimizer.schedule={kind="cosine", min_lr=1.0} => E110 min_lr = 1 is above optimizer.lr
optimizer.schedule.min_lr=1e-5 => E110 min_lr does nothing
optimizer.schedule.decay_steps=1 => E110 decay_steps does nothing
hardware.gpu="h1000" => E103 no GPU is known as 'h1000' => did you mean "h100"?
hardware.gpu="tpu-v4" => E103 no GPU is known as 'tpu-v4' => known: h100-sxm
hardware.device="tpu" => E103 hardware.device => write device = "cuda" or "cpu"
hardware.device="gpu" => E103 hardware.device => "cuda"?
hardware.device="rocm" => E103 hardware.device => "cuda"?
schedule.kind="gis"; parallel.pp=8; model.layers=16; schedule.group=3 => E110 gis on 8 ranks takes 4 to 8
schedule.kind="gis"; parallel.pp=8; model.layers=16; schedule.group=9 => E110 gis on 8 ranks takes 4 to 8
schedule.kind="replicated-1f1b" => E110 needs parallel.replicas
model.seq_len=9; parallel.tp=3 => E119 does not divide model.heads = 4
model.compile=true; parallel.tp=2 => E110 parallel.tp and model.compile
parallel.tp_sequence=true => E119 parallel.tp is 1
parallel.tp=2; model.seq_len=9; parallel.tp_sequence=true => E119 does not divide model.seq_len = 9
parallel.cp=3 => E119 2 parallel.cp = 6 chunks of each sequence do not divide model.seq_len = 16
model.vocab=3; data.kind="synthetic"; parallel.vocabulary="shared" => E110 a vocabulary of 3 words leaves some of 4
model.loss="mse"; parallel.vocabulary="shared" => E110 ranks share the output layers of causal models
parallel.vocabulary="shared-3" => E103 vocabulary
adapter.alpha=2.0 => E110 alpha""",
    'model.family="llama"': """\
model.variant="rotary" => E110 is not for family llama
model.kv_heads=3 => E110 model.kv_heads = 3 does not divide model.heads = 4
model.head_size=7; model.heads=4 => E110 rotary positions need an even head size, it is 7
model.args.x=1 => E110 model.args belongs to a factory, family is llama
model.kv_heads=2; parallel.tp=4 => E119 model.kv_heads = 2
model.expert_groups=[4, 2] => E110 model.expert_groups is for models with experts
adapter.rank=4; adapter.targets=["q_projj"] => E110 q_projj
adapter.rank=4; adapter.targets=["whole q_proj"] => E110 no module is called q_proj => lm_head""",
    'model.family="llama"; model.experts=8': """\
model.expert_groups=[3, 1] => E110 has 3 groups, which does not divide model.experts = 8
model.expert_groups=[4, 5] => E110 model.expert_groups has 5 of 4 groups
model.top_k=3; model.expert_groups=[4, 1] => E110 2 experts, and it meets model.top_k = 3
adapter.rank=4; adapter.dropout=0.1; adapter.targets=["experts.*"] => E110 adapter.dropout
adapter.rank=4; adapter.targets=["experts.up_proj"] => E110 no linear layer is called experts.up_proj
adapter.rank=4; adapter.targets=["gate_proj"] => E110 no linear layer is called gate_proj => q_proj""",
    EXPERTS: """\
parallel.dp=3; parallel.ep=3 => E110 does not divide model.experts = 4
parallel.dp=3; parallel.ep=2 => E110 does not divide parallel.dp = 3
parallel.cp=3; model.seq_len=36; parallel.ep=2 => E110 does not divide parallel.cp x parallel.dp = 3
parallel.tp=2; parallel.ep=4 => E110 does not divide parallel.tp x parallel.dp = 2
parallel.tp=2; parallel.expert_tp=2; parallel.ep=2 => E110 does not divide parallel.dp = 1
parallel.dp=4; parallel.ep="auto" => E110 parallel.world is missing
parallel.tp=4; parallel.dp=2; parallel.ep=2; parallel.expert_tp=2 => E110 parallel.expert_tp = 2 is neither 1 nor
parallel.tp=2; parallel.expert_tp=1 => E110 and parallel.ep = 1
model.ffn_hidden=49; parallel.tp=2 => E119 does not divide model.ffn_hidden = 49
parallel.dp=2; parallel.ep=2; parallel.average.every=1 => E110 of which ep = 2 makes one""",
    OWN: """\
model.ties=true => E110 or is true; family is a.b:c
model.rope_theta=1.0 => E110 model.rope_theta is not for family a.b:c
model.hidden=8 => E110 model.hidden is not for family a.b:c
parallel.pp=2; parallel.cp=2 => E119 for built-in models
parallel.pp=2; parallel.dp=2; parallel.tp=2; parallel.ep=2 => E110 layers of your own route all tokens on each""",
    "parallel.dp=2": "parallel.ep=2 => E110 model.experts is not set",
    "schedule.tokens=[4, 4, 4, 4, 4, 4, 4, 4]; model.seq_len=16": """\
data.kind="text"; data.balance="tokens" => E110 one long sample
data.kind="a.b:c"; schedule.tokens=[4, 4, 4, 4, 4, 4, 4, 4] => E110 nothing says which of a.b:c they get
data.kind="synthetic"; data.balance="tokens"; schedule.max_microbatches=9 => E110 schedule.max_microbatches""",
    'data.kind="synthetic"; data.balance="length"; model.seq_len=64; parallel.dp=2; schedule.microbatch_size=1; '
    "parallel.pp=2; schedule.microbatches=3": """\
schedule.max_microbatches=2 => E103 less than the mean
schedule.microbatch_size="none"; schedule.tokens_per_microbatch=100 => E103 expected a whole number, found 1.5625
data.kind="text"; data.balance="length" => E110 text is one long sample
data.balance="none"; schedule.max_microbatches=6 => E110 balance samples""",
    'schedule.kind="auto"': """\
schedule.group=3 => E110 not for auto
schedule.early=1 => E110 not for auto
schedule.overlap=true => E110 schedule.overlap is for""",
    'schedule.kind="zb-h1"': """\
schedule.group=3 => E110 not for zb-h1
schedule.early=1 => E110 not for zb-h1
schedule.overlap=true => E110 not for zb-h1""",
    AVERAGE: """\
parallel.dp=1; parallel.average.share=0.1 => E110 dp is 1
schedule.kind="chimera"; parallel.average.share=0.1 => E110 several copies
parallel.average.share=0.0 => E103 share
parallel.average.share=1.5 => E103 share
parallel.average.every=0 => E103 every
parallel.average.delay=2 => E103 delay
parallel.average.ema=1.0 => E103 ema
parallel.average.shares=1 => E102 shares""",
    ONE_SIDED: """\
parallel.shard="none"; parallel.exchange="one-sided" => E110 goes with shard =
parallel.shard="optimizer"; parallel.exchange="one-sided" => E110 goes with shard =
parallel.shard="gradients"; parallel.exchange="one-sided" => E110 goes with shard =""",
    GRAPH: """\
model.graph={vision=[2, "decoder"], text=[2], decoder=[2, "vision", "text"]} => E110 vision -> decoder -> vision
model.graph={vision=[2], text=[2], decoder=[2, "vision"]} => E110 nobody reads text and decoder
model.graph={vision=[2], text=[2], decoder=[2, "vision", "txt"]} => E110 reads txt, which is no group
model.graph={vision=[2], text=[], decoder=[2, "vision", "text"]} => E110 no one number of layers of text
model.layers=7; model.graph={vision=[2], text=[2], decoder=[2, "vision", "text"]} => E110 6 layers in all""",
    REPLICAS: """\
parallel.pp=4; parallel.replicas=[2, 1] => E110 sum to 3, parallel.pp is 4
parallel.pp=7; parallel.replicas=[6, 1] => E110 a stage has 6 replicas and a step 5 microbatches
schedule.kind="1f1b"; parallel.replicas=[2, 1] => E110 goes with schedule.kind
schedule.ramp=[{microbatches=1, steps=2}]; parallel.replicas=[2, 1] => E110 a step of schedule.ramp 1
data.kind="tokens"; data.path="x"; data.balance="length"; parallel.replicas=[2, 1] => E110 a step of data.balance 1""",
    'parallel.pp="none"; schedule.microbatches="none"': """\
parallel.pp=2; schedule.batch=32; parallel.world=8 => E110 parallel.world and parallel.pp are two answers
parallel.dp=2; schedule.batch=32; parallel.world=8 => E110 parallel.world and parallel.dp are two answers
parallel.world=8; schedule.microbatches=4 => E110 schedule.microbatches are those of one pipeline
parallel.world=8; schedule.microbatches=4; schedule.batch=32 => E110 two answers
parallel.world=8 => E105 schedule.batch is missing
schedule.batch=32; parallel.world=0 => E103 parallel.world: must be at least 1
schedule.batch=32; parallel.world="all" => E103 parallel.world
parallel.world=8; schedule.batch=true => E103 schedule.batch
schedule.batch=32; parallel.world=9 => E110 no pp and dp of parallel.world can be planned
parallel.world=8; schedule.batch=16; parallel.tp=3 => E110 parallel.tp = 3 does not divide parallel.world = 8
parallel.world=8; schedule.batch=16; parallel.cp=3 => E110 parallel.cp = 3 does not divide parallel.world = 8
parallel.world=8; schedule.batch=16; parallel.tp=8; parallel.cp=2 => E110 parallel.cp x parallel.tp = 16 does not divide
parallel.pp=2; parallel.dp=2; schedule.microbatches=4; parallel.tp="auto" => E110 parallel.world is missing
parallel.pp=2; parallel.dp=4; schedule.microbatches=4; parallel.cp="auto" => E110 parallel.world is missing
schedule.microbatches=4 => E105 parallel.pp is missing
parallel.pp=2 => E105 schedule.microbatches is missing""",
    "parallel.pp=2; parallel.dp=2; train.steps=9": """\
schedule.ramp=[{microbatches=1}] => E110 entry 0 of schedule.ramp has neither of steps and samples
schedule.ramp=[{microbatches=8, steps=1}] => E110 has 8 microbatches, after 0 and before 8
schedule.ramp=[{microbatches=2, steps=1}, {microbatches=2, steps=1}] => E110 entry 1 of schedule.ramp has 2
schedule.ramp=[{microbatches=1, samples=36}] => E110 ends after step 9, train.steps is 9
schedule.ramp=[{microbatches=0, steps=1}] => E103 schedule.ramp.0.microbatches: must be at least 1, found 0
schedule.ramp=[{steps=1}] => E105 schedule.ramp.0.microbatches is missing""",
    "parallel.pp=4; model.layers=12": """\
hardware.slow=[1, 1] => E110 has 2 numbers
hardware.tflops=[1.0, 1.0] => E110 has 2 numbers
parallel.replicas=[1, 1, 1, 1]; schedule.kind="replicated-1f1b"; hardware.slow=[1, 1, 1, 1] => E110 step in""",
}
PLANNED = {
    f'{GRAPH}; {COSTS}; model.graph={{vision=[2], text=[2], decoder=[2, "vision", "text"]}}': """\
parallel.pp=2 => E110 each rank has layers of one group
parallel.pp=4; partition.layers_per_stage=[1, 2, 1, 2] => E130 where group vision ends""",
    "": """\
partition.layers_per_stage=[2, 2, 2, 3] => E130 layers_per_stage = [2, 2, 2, 3] sums to 9, model.layers is 8
partition.layers_per_stage=[4, 4] => E130 layers_per_stage has 2 entries, the schedule has 4 stages
partition.layers_per_stage=[4, 0, 2, 2] => E130 stage 1 has no layers
partition.layers_per_stage="Et*3|t*3|tL" => E130 it needs 3 bars
partition.layers_per_stage="Et*3|t*3|t|L" => E130 do not add up
partition.layers_per_stage="Et*8||L|L" => E130 its layers
partition.layers_per_stage="Et*4||t*4|L" => E130 stage 1 has no layers""",
}
CASES = [
    (step, "; ".join(filter(None, (group, line))))
    for step, groups in ((job, READ), (compile_job, PLANNED))
    for group, lines in groups.items()
    for line in lines.splitlines()
]


def asked(settings):
    """The tables of a job; of settings that are there twice the last counts, "none" leaves one out."""
    found = {}
    for setting in settings:
        ((table, keys),) = tomli.loads(setting).items()
        for key, value in keys.items():
            before = found.setdefault(table, {}).get(key)
            found[table][key] = before | value if isinstance(before, dict) else None if value == "none" else value
    return found


@pytest.mark.parametrize(("step", "line"), CASES, ids=lambda one: one if isinstance(one, str) else one.__name__)
def test_a_job_that_cannot_be_is_refused_where_it_says_so(step, line):
    """At the line of the last setting, unless one is missing."""
    said, error, *hint = line.split(" => ")
    settings, (code, _, words) = said.split("; "), error.partition(" ")
    made = asked(settings)
    with pytest.raises(ZbcError) as caught:
        step(job(**made)) if step is compile_job else job(**made)
    (error,) = caught.value.errors
    assert error.code == code and words in error.render(), error.render()
    assert not hint or hint[0] in error.hint
    document = toml.loads(toml_text(**made), "job")
    place = document.where(tuple(settings[-1].partition("=")[0].split(".")))
    assert code == "E105" or error.where.split(":")[-2] == place.split(":")[1], (error.where, place)
