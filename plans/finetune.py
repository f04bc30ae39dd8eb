"""A tiny folder as Hugging Face has it, and conversations to fine-tune it on: docs/finetune.md.

python plans/finetune.py qwen3|deepseek_v3 -o FOLDER   writes FOLDER/model and FOLDER/train.jsonl
python plans/finetune.py say FOLDER                      prints what the model of a folder answers
"""

import json
import sys
from functools import partial
from pathlib import Path

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4}
SIZES |= {"vocab_size": 264, "max_position_embeddings": 64, "tie_word_embeddings": False}
KINDS = {
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "deepseek_v3": {
        **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4},
        **{"qk_nope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4},
        **{"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2},
    },
}
# Marks what the assistant says: the loss counts these tokens.
SAID = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>" + SAID + "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<|assistant|>{% endif %}"


def write_model(kind: str, folder: Path) -> None:
    """The initial weights of a small model of a kind that transformers knows."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer whose tokens are bytes, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocab=letters, merges=[]))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    more = {"additional_special_tokens": ["<|user|>", "<|assistant|>"], "pad_token": "<|pad|>", "eos_token": "<|end|>"}
    made = PreTrainedTokenizerFast(tokenizer_object=plain, **more)
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)


def conversations() -> list[dict[str, list[dict[str, str]]]]:
    """Hundred sums, each asked for and questioned."""
    roles = ("user", "assistant", "user", "assistant")
    texts = [(f"{a}+{b}?", str(a + b), "sure?", "yes") for a in range(10) for b in range(10)]
    return [{"messages": [{"role": r, "content": t} for r, t in zip(roles, said, strict=True)]} for said in texts]


def say(folder: Path) -> None:
    from transformers import pipeline

    asked = [{"role": "user", "content": "2+3?"}]
    print(pipeline("text-generation", str(folder), device="cpu")(asked, max_new_tokens=4)[0]["generated_text"][-1])


def write(kind: str, folder: Path) -> None:
    write_model(kind, folder / "model")
    write_tokenizer(folder / "model")
    lines = [json.dumps(sample) + "\n" for sample in conversations()]
    (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    (say if sys.argv[1] == "say" else partial(write, sys.argv[1]))(Path(sys.argv[-1]))
