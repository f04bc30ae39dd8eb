"""Chat data: tokens and targets against those written by hand, trained as by one process; samples that are none."""

import json
import sys

import pytest
import torch

from tests.refusals import refused
from tests.runtime.small_plans import LLAMA, hold, make_plan, make_program, reference
from tests.threads import run_threads
from zbc.cli import main
from zbc.training.data.chat import Chat

pytest.importorskip("transformers")
SAID = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
ASK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
NAMED = "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no role ' + m.role) }}{% endif %}"
MARKED = SAID.replace("{{ m.content }}<|end|>", "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>")
MARKED = MARKED.replace("{% endfor %}", "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}")
CHANGING = SAID.replace("<|end|>", "{% if loop.last %}!{% endif %}<|end|>")  # as templates that drop earlier thoughts
TURNS = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
TURNS += [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]
BOTH = [("<|user|>ab<|end|><|assistant|>", False), ("c<|end|>", True)]
BOTH += [("<|user|>?<|end|><|assistant|>", False), ("yes<|end|>", True)]
ASKED = "".join(text for text, _ in BOTH[:3])


def tokenizer_of(folder, template=None):
    """Writes a tokenizer whose tokens are bytes, and a few more."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocab=letters, merges=[]))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    more = {"additional_special_tokens": ["<|user|>", "<|assistant|>"], "pad_token": "<|pad|>", "eos_token": "<|end|>"}
    made = PreTrainedTokenizerFast(tokenizer_object=plain, **more)
    made.chat_template = template
    made.save_pretrained(folder)


@pytest.fixture
def folder(tmp_path):
    tokenizer_of(tmp_path / "tokenizer")
    return tmp_path


def chat(folder, *samples, template=SAID + ASK, longest=40, padded=True):
    path = folder / "chat.jsonl"
    path.write_text("".join(s if isinstance(s, str) else json.dumps(s) + "\n" for s in samples))
    return Chat([str(path)], str(folder / "tokenizer"), longest, {"chat_template": template}, padded=padded)


@pytest.mark.parametrize(
    ("template", "sample", "parts"),
    [
        (SAID + ASK, {"messages": TURNS}, BOTH),
        (MARKED + ASK, {"messages": TURNS}, BOTH),
        (SAID + ASK, {"prompt": TURNS[:3], "completion": TURNS[3:]}, [(ASKED, False), BOTH[3]]),
        (SAID + ASK, {"prompt": "ü?", "completion": " é"}, [("ü?", False), (" é<|end|>", True)]),
    ],
)
def test_the_assistant_is_learned_and_nothing_else(folder, template, sample, parts):
    found = chat(folder, sample, template=template)
    assert [*found.shown(0)] == parts
    (x, y), (tokens, said) = found[0], found.tokens(0)
    count = len(tokens) - 1
    assert x[:count].tolist() == tokens[:-1] and len(x) == len(y) == 40 and found.lengths == [count]
    assert y.tolist()[:count] == [token if known else -100 for token, known in zip(tokens[1:], said[1:], strict=True)]
    assert y[count:].tolist() == [-100] * (40 - count)
    short = chat(folder, sample, template=template, padded=False)[0]
    assert torch.equal(short[0], x[:count]) and torch.equal(short[1], y[:count])


@pytest.mark.long("[1]\\n-E501-no JSON object")
@pytest.mark.parametrize(
    ("sample", "code", "words"),
    [
        ({"messages": [{"content": "x"}]}, "E505", "sample 1 has a message without a role"),
        ({"messages": TURNS[:1]}, "E505", "nothing in it is the assistant's"),
        ({"messages": [{"role": "tool", "content": "x"}, *TURNS]}, "E505", "tokenizer: no role tool"),
        ({"text": "x"}, "E505", 'sample 1 has neither "messages"'),
        ({"prompt": "x", "completion": 3}, "E505", "sample 1 is not a conversation"),
        ({"prompt": "x" * 40, "completion": "y"}, "E505", "sample 1 has 42 tokens, model.seq_len is 40"),
        ("{\n", "E501", "not JSON"),
        ("[1]\n", "E501", "no JSON object"),
    ],
)
def test_a_sample_that_is_none_is_named_with_its_line(folder, sample, code, words):
    with refused(code, words) as caught:
        chat(folder, {"messages": TURNS}, sample, template=SAID.replace("<|{{", NAMED + "<|{{") + ASK)[1]
    assert caught.value.where == f"{folder}/chat.jsonl:2"


def test_a_template_that_changes_what_was_said_has_to_mark_it(folder):
    with refused("E505", "other tokens for message 1 when others follow: mark them"):
        chat(folder, {"messages": TURNS}, template=CHANGING + ASK)[0]
    with refused("E502", "has no chat template"):
        chat(folder, {"messages": TURNS}, template=None)[0]
    with refused("E502", "cannot read the tokenizer"):
        Chat([], str(folder), 8, {}, padded=True)


@pytest.mark.parametrize(("missing", "paths"), [("pyarrow", ["chat.parquet"]), ("transformers", [])])
def test_a_package_that_is_not_there_is_named(folder, monkeypatch, missing, paths):
    monkeypatch.setitem(sys.modules, missing, None)
    with refused("E602", missing, "not installed"):
        Chat(paths, str(folder / "tokenizer"), 8, {}, padded=True)


def test_tokenize_checks_every_sample_and_shows_the_first(folder, capsys):
    chat(folder, {"messages": TURNS}, {"prompt": "a", "completion": "bc"})
    tokenizer_of(folder / "tokenizer", SAID + ASK)
    words = ["tokenize", str(folder / "chat.jsonl"), "--chat", "--tokenizer", str(folder / "tokenizer")]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(words)
    assert "learned    'c<|end|>'" in (told := capsys.readouterr().out) and "2, 19 tokens, 9 of them learned" in told
    (folder / "chat.jsonl").write_text('{"messages": []}')
    with pytest.raises(SystemExit):
        main(words)
    assert "chat.jsonl:1" in capsys.readouterr().err


@pytest.mark.long("2")
@pytest.mark.parametrize("dp", [1, 2])
def test_a_training_is_that_of_one_process(folder, dp):
    samples = [{"messages": [{**TURNS[0], "content": "a" * k}, *TURNS[1:]]} for k in range(24)]
    chat(folder, *samples, {"prompt": "hello", "completion": " world"})
    data = {"kind": "chat", "path": str(folder / "chat.jsonl"), "tokenizer": str(folder / "tokenizer")}
    data["args"] = {"chat_template": SAID + ASK}
    plan = make_plan(make_program("zb-h1", 2, 4, copies=dp), model={**LLAMA, "vocab": 261, "seq_len": 48}, data=data)
    hold(run_threads(plan, 2), reference(plan, 2), tolerance=2e-6)
    with refused("E505", "model.vocab is 256"):
        run_threads(make_plan(make_program("1f1b", 1, 4), model={**LLAMA, "vocab": 256, "seq_len": 48}, data=data), 1)
