"""A fine-tuning of a tiny Qwen3 or DeepSeek-V3 on chat data beside TRL's SFTTrainer on one process, with the same
batches: the walk of docs/finetune.md.

    python bench/finetune.py [--model deepseek_v3] [--steps 20] [--adapter 4] [--quick]      needs: pip install trl peft

Without --model all cases that docs/finetune.md names: both models, all weights and adapters of attention.

zbc trains the folder under zb-v on four ranks, of which one is killed in the middle, and goes on from a checkpoint.
Prints the largest difference of the losses of a step, and of the logits of the merged model, loaded by transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.record import Record
from plans.finetune import KINDS, conversations, write
from zbc.training.data.data import Batches, RandomTokens

LENGTH, BATCH, SEED = 48, 8, 7
TARGETS = ["self_attn.*"]  # of an MLP beside experts peft loads none, and gives the stacked experts some of its own


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", choices=sorted(KINDS), help="this one alone")
    parser.add_argument("--adapter", type=int, default=0, help="rank of LoRA; 0: all weights")
    parser.add_argument("--quick", action="store_true", help="write no file")
    asked = parser.parse_args()
    record = Record("finetune")
    record(f"# {', '.join(f'{package} {version(package)}' for package in ('transformers', 'trl', 'peft'))}")
    cases = [(model, rank) for model in sorted(KINDS) for rank in (0, 4)]
    for model, rank in cases if asked.model is None else [(asked.model, asked.adapter)]:
        with tempfile.TemporaryDirectory() as name:
            place = Path(name)
            write(model, place)
            losses, merged = ours(place, asked.steps, rank)
            theirs, logits = beside(place, conversations(), asked.steps, rank)
        far = max(abs(a - b) for a, b in zip(losses, theirs, strict=True))
        what = f"{model}, {f'LoRA of rank {rank}' if rank else 'all weights'}"
        record(f"{what}: {asked.steps} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}; losses differ by {far:.1e}")
        record(f"logits of the saved model differ by {(merged - logits).abs().max().item():.1e}")
    if not asked.quick:
        record.write()


JOB = """
[model]
pretrained = "{place}/model"
seq_len = {length}
[parallel]
pp = 4
[schedule]
kind = "zb-v"
microbatches = 4
microbatch_size = 2
[train]
steps = {steps}
seed = {seed}
[optimizer]
lr = {lr}
betas = [0.9, 0.999]
weight_decay = 0.0
[data]
kind = "chat"
path = "{place}/train.jsonl"
[adapter]
rank = {rank}
targets = {targets}
[checkpoint]
every = 5
[log]
every = 1
"""


def zbc(*words: Any) -> None:
    ran = subprocess.run(command(*words), check=False, text=True, capture_output=True)
    if ran.returncode:
        sys.exit(ran.stderr)


def command(*words: Any) -> list[str]:
    return [sys.executable, "-m", "zbc", *map(str, words)]


def killed(folder: Path, steps: int, *words: Any) -> None:
    """Starts a run that writes `folder`, and kills one of its ranks after so many steps."""
    run = subprocess.Popen(command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while run.poll() is None and len(rows(folder)) < steps:
        time.sleep(0.02)
    ranks = subprocess.run(["pgrep", "-P", str(run.pid)], check=True, capture_output=True, text=True).stdout.split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    _, said = run.communicate()
    if not run.returncode:
        sys.exit("the run did not notice")
    print(said.decode().splitlines()[0])


def rows(folder: Path) -> dict[int, float]:
    """The losses of a run, by step."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return {}
    read = [json.loads(line) for line in lines if line.endswith("}")]
    return {row["step"]: row["loss"] for row in read if "loss" in row}


def ours(place: Path, steps: int, rank: int) -> tuple[list[float], torch.Tensor]:
    """Losses of steps, a rank killed in the middle; and logits of the saved model."""
    for name, lr in (("start", 0.0), ("job", 1e-2)):
        text = JOB.format(place=place, length=LENGTH, steps=steps, seed=SEED, lr=lr, rank=rank, targets=TARGETS)
        (place / f"{name}.toml").write_text(text if rank else re.sub(r"\[adapter\](\n.*){2}\n", "", text))
        zbc("plan", place / f"{name}.toml", "-o", place / name)
    if rank:
        zbc(
            "run",
            place / "start",
            "--local",
            4,
            "--steps",
            1,
            "-o",
            place / "zero",
            "--save-adapter",
            place / "lora",
        )
    killed(place / "run", steps // 2, "run", place / "job", "--local", 4, "-o", place / "run")
    zbc("run", place / "job", "--local", 4, "-o", place / "run", "--resume", "auto", "--save-hf", place / "saved")
    found = rows(place / "run")
    return [found[step] for step in sorted(found)], logits_of(place / "saved")


def logits_of(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: torch.Tensor = model(torch.arange(LENGTH)[None]).logits.detach()
    return found


def beside(place: Path, samples: list[dict[str, Any]], steps: int, rank: int) -> tuple[list[float], torch.Tensor]:
    """The same of TRL's trainer, with the samples in zbc's order."""
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    losses = []

    class Trainer(SFTTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset or self.train_dataset)

        def compute_loss(self, *args: Any, **how: Any) -> Any:
            found = super().compute_loss(*args, **how)
            losses.append((found[0] if isinstance(found, tuple) else found).item())
            return found

    order = Batches(RandomTokens(2, 1, 0, len(samples)), seed=SEED, microbatches=4, size=BATCH // 4)
    rows = [samples[i % len(samples)] for step in range(steps) for mb in range(4) for i in order.numbers(step, mb)]
    model = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(model, place / "lora", is_trainable=True) if rank else model
    rates = {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 0.0}
    how = {"per_device_train_batch_size": BATCH, "max_steps": steps, "max_length": LENGTH, "assistant_only_loss": True}
    still = {"report_to": [], "use_cpu": True, "save_strategy": "no", "bf16": False, "gradient_checkpointing": False}
    config = SFTConfig(output_dir=str(place / "trl"), **rates, **how, **still)
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    Trainer(model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer).train()
    model = model.merge_and_unload() if rank else model
    model.save_pretrained(place / "theirs")
    return losses, logits_of(place / "theirs")


if __name__ == "__main__":
    main()
