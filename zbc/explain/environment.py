"""E6xx: what a command needs around it."""

from __future__ import annotations

from zbc.explain.entry import entry

ENTRIES = {
    "E601": entry(
        "the plan wants another number of ranks",
        """
A plan is made for parallel.pp ranks in each of parallel.dp replicas of the
pipeline. Each rank is one process.

    torchrun --standalone --nproc-per-node 4 -m zbc run plan     under torchrun
    zbc run plan --local 4                                       on this CPU

For another number of ranks plan again with --set parallel.pp=N or
--set parallel.dp=N.
""",
    ),
    "E602": entry(
        "a package is missing or too old",
        """
Planning needs no torch; `zbc run` needs 2.11 or newer. A proof that no better
schedule exists needs ortools: pip install 'zbc[solve]'. `zbc doctor` says what
is installed.
""",
    ),
    "E603": entry(
        "the device is missing",
        """
hardware.device = "cuda" needs one CUDA device per rank on this machine.
`zbc doctor` lists them. Plan again with --set hardware.device=cpu to train on
the CPU.
""",
    ),
    "E604": entry(
        "not started by torchrun",
        """
`zbc run PLAN` is one rank of several and learns from torchrun which. Start it
with torchrun, or let zbc start all ranks on this machine with --local N.

    torchrun --standalone --nproc-per-node 4 -m zbc run plan
""",
    ),
    "E605": entry(
        "ranks run different plans or versions",
        """
All ranks compare what they run before the first step: the plan, the versions
of zbc, torch and Python, zbc's own sources, and those of every module that the
job's layers, loss and data have loaded (but for installed packages). Give
every machine the same plan directory, code and environment.
""",
    ),
    "E606": entry(
        "the run directory cannot be written",
        """
Metrics go to a new folder in log.dir. Name another place with --out. A disk
that fills up during a run ends the run, too; what is written by then stays,
every line whole.
""",
    ),
    "E607": entry(
        "the run directory belongs to another run",
        """
--out names a folder that already has metrics in it. Choose another, or remove
it: zbc does not mix the metrics of two runs.
""",
    ),
    "E608": entry(
        "a file cannot be written",
        """
The system refused to write what was asked for with -o, --dump-ir or init, or
what goes to standard output: no permission, no space, or a file where a folder
has to be.
""",
    ),
    "E609": entry(
        "the ranks cannot find each other",
        """
Ranks meet at a store. torchrun hosts it; under other launchers rank 0 does, at
MASTER_ADDR and MASTER_PORT. Usual reasons: a wrong address, a port in use, a
firewall, or a first machine that did not start.
""",
    ),
    "E610": entry(
        "an optional package is not installed",
        """
Some features need a package that zbc itself does not:

    pip install 'zbc[hf]'             safetensors: pretrained weights, export
    pip install 'zbc[tokenizers]'     tokenizers: zbc data tokenize --tokenizer
    pip install 'zbc[tensorboard]'    log.tensorboard
    pip install 'zbc[wandb]'          log.wandb
""",
    ),
    "E611": entry(
        "a checkpoint cannot be written",
        """
The disk is full, the folder cannot be written (which every rank tries before
the first step) or is not the same on all machines, or a tensor is of a type
that safetensors files cannot hold. The run ends. The newest complete checkpoint
stays as it is, and

    zbc run plan --resume auto ...

continues from there once there is room. checkpoint.dir names another place,
checkpoint.keep says how many stay, checkpoint.every = 0 turns them off.
""",
    ),
    "E612": entry(
        "a checkpoint cannot be read",
        """
Only a checkpoint with the file .complete in it is read. Before training
continues, the length and the checksums of each file are checked. The message
names a file that was truncated, changed or lost. zbc does not fall back to an
older checkpoint by itself, because that would silently repeat steps; the
message names the one before it: give it with --resume PATH.
""",
    ),
    "E613": entry(
        "the checkpoint is of another training",
        """
Schedule, ranks, replicas, ZeRO-1, recompute and the like may change between a
checkpoint and the run that continues from it. These may not: the parameters,
their shapes and types ([model]), the kind of optimizer, and train.seed, on
which the order of the data and dropout depend. To begin another training with
these weights, write them with --save-hf and set model.pretrained.
""",
    ),
    "E614": entry(
        "checkpoints of another run are in the way",
        """
This run begins at step 1, or from an older checkpoint, and would write among
later checkpoints of another run; --resume auto could not tell them apart.
Continue from the newest with --resume auto, choose another --out or
checkpoint.dir, or remove the old ones. The error also comes while another run
writes there: its rank 0 holds a lock on the file .writer until it ends.
""",
    ),
    "E615": entry(
        "machines of a run cannot reach each other",
        """
Ranks of one machine found the store of the run, but no way to ranks of another
machine. A rank listens on the interface through which it reaches the store, at
ports that the system chooses; /etc/hosts and firewalls are the usual reasons.

    GLOO_SOCKET_IFNAME=eth1     on every machine: listen there instead
    NCCL_SOCKET_IFNAME=eth1     the same for NCCL
""",
    ),
    "E616": entry(
        "Weights & Biases does not start",
        """
log.wandb asks for it, but wandb.init failed on rank 0 before the first step:
nobody is logged in (`wandb login`, or WANDB_API_KEY), or the server cannot be
reached. WANDB_MODE=offline keeps the run on this machine; `wandb sync`
sends it later. Without log.wandb metrics.jsonl still has every number.
""",
    ),
    "E617": entry(
        "no compiler for model.compile",
        """
torch.compile needs a C++ compiler on a CPU and Triton on CUDA, and found none.
Every machine of a run needs one.

    apt install g++           or clang; CXX=/path/to/compiler names another
    pip install triton        on CUDA; it comes with torch there
""",
    ),
}
