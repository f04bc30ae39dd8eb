"""Conversations as samples (`data.kind = "chat"`): the loss is of what the assistant says.

    {"messages": [{"role": "user", "content": ".."}, {"role": "assistant", "content": ".."}]}
    {"prompt": .., "completion": ..}    two texts, or two lists of messages

A sample is a line of a .jsonl file, or a row of a .parquet file. Messages become tokens by the chat template of a
tokenizer's folder. Tokens of the assistant are those that the template marks (`{% generation %}`), else those that each
of its messages adds to the ones before.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zbc.errors import ZbcError
from zbc.job import spec
from zbc.runtime.core.tensors import IGNORED
from zbc.training.data.corpus import unreadable

CHAT = "chat"
_MARKS = re.compile(r"\{%-?\s*generation\b")
_FORMS = 'each sample has "messages", or "prompt" and "completion"; a message is {"role": .., "content": ..}'


class Chat:
    """A map-style dataset of pairs (input, target) of at most `longest` tokens, padded to as many if `padded`; targets
    that are not the assistant's are -100.

    Raises E501 for files, E502 for the tokenizer, E505 for a sample, E602 if a package is missing.
    """

    def __init__(self, paths: Sequence[str], tokenizer: str, longest: int, how: Mapping[str, Any], *, padded: bool):
        self._samples = [sample for path in paths for sample in _read(Path(path))]
        self._tokenizer, self._longest, self._how, self._padded = _load(tokenizer), longest, dict(how), padded
        template = self._how.get("chat_template") or self._tokenizer.chat_template or ""
        self._marked, self._has_template, self._folder = bool(_MARKS.search(template)), bool(template), tokenizer

    @classmethod
    def of(cls, data: spec.Data, model: spec.Model) -> Chat:
        paths = [data.path] if isinstance(data.path, str) else data.path or []
        return cls(paths, data.tokenizer or "", model.seq_len or 1, data.args, padded=data.balance == "none")

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, said = self.tokens(index)
        if len(tokens) - 1 > self._longest:
            hint = "cut or split it, or set model.seq_len higher"
            raise self._wrong(index, f"has {len(tokens)} tokens, model.seq_len is {self._longest}", hint)
        x, counts = torch.tensor(tokens), torch.tensor(said, dtype=torch.bool)
        row, target = x[:-1], x[1:].where(counts[1:], IGNORED)
        if self._padded:
            missing = (0, self._longest - len(row))
            row = torch.nn.functional.pad(row, missing, value=self._tokenizer.pad_token_id or 0)
            target = torch.nn.functional.pad(target, missing, value=IGNORED)
        return row, target

    @cached_property
    def lengths(self) -> list[int]:
        """The tokens of each sample that have a target."""
        return [len(self.tokens(index)[0]) - 1 for index in range(len(self))]

    def tokens(self, index: int) -> tuple[list[int], list[bool]]:
        """The tokens of a sample, and whether the assistant says each."""
        try:
            found = self._tokens(self._samples[index][1])
        except (KeyError, TypeError) as error:
            raise self._wrong(index, f"is not a conversation: {error!r}", _FORMS) from None
        except ZbcError:
            raise
        except Exception as error:  # of the template: jinja's, or what it raises itself
            text = f"is refused by the chat template of {self._folder}: {error}"
            raise self._wrong(index, text, "the template says which roles it takes, and in which order") from None
        if isinstance(found, str):
            raise self._wrong(index, found, _FORMS)
        if not any(found[1][1:]):
            raise self._wrong(index, "has no token to learn: nothing in it is the assistant's", _FORMS)
        return found

    def shown(self, index: int) -> Iterator[tuple[str, bool]]:
        """Yields the parts of a sample as text, and whether the loss counts them."""
        for said, part in groupby(zip(*self.tokens(index), strict=True), key=lambda pair: pair[1]):
            yield self._tokenizer.decode([token for token, _ in part]), said

    def _tokens(self, sample: Mapping[str, Any]) -> tuple[list[int], list[bool]] | str:
        """Tokens and whether they count, or the reason why there are none."""
        if sample.get("messages") is not None:
            return self._of_messages(sample["messages"], sample)
        if {"prompt", "completion"} - sample.keys():
            return f'has neither "messages" nor "prompt" and "completion", but {", ".join(sample) or "nothing"}'
        prompt, completion = sample["prompt"], sample["completion"]
        if not isinstance(prompt, str):
            before = self._applied(prompt, sample, add_generation_prompt=True)
            whole = self._applied([*prompt, *completion], sample)
            return _after(before, whole) or "changes its prompt when the completion follows it"
        text = prompt + completion + (self._tokenizer.eos_token or "")
        found = self._tokenizer(text, return_offsets_mapping=True)
        return found["input_ids"], [start >= len(prompt) and stop > start for start, stop in found["offset_mapping"]]

    def _of_messages(self, messages: Sequence[Any], sample: Mapping[str, Any]) -> tuple[list[int], list[bool]] | str:
        if wrong := [m for m in messages if not isinstance(m, Mapping) or "role" not in m]:
            return f"has a message without a role: {str(wrong[0])[:60]}"
        if self._marked:
            found = self._applied(messages, sample, marks=True)
            return found["input_ids"], [bool(said) for said in found["assistant_masks"]]
        whole = self._applied(messages, sample)
        said = [False] * len(whole)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._applied(messages[:number], sample, add_generation_prompt=True)
                upto = self._applied(messages[: number + 1], sample)
                if _after(before, upto) is None or whole[: len(upto)] != upto:
                    return f"has other tokens for message {number} when others follow: mark them in the template"
                said[len(before) : len(upto)] = [True] * (len(upto) - len(before))
        return whole, said

    def _applied(self, messages: Sequence[Any], sample: Mapping[str, Any], *, marks: bool = False, **how: Any) -> Any:
        if not self._has_template:
            hint = 'use an instruct model\'s folder, or [data.args] chat_template = "{% for message in messages %}.."'
            raise ZbcError("E502", f"data: the tokenizer of {self._folder} has no chat template", hint=hint)
        given = {"tools": sample.get("tools"), "return_assistant_tokens_mask": marks, **self._how, **how}
        found = self._tokenizer.apply_chat_template([*messages], tokenize=True, return_dict=True, **given)
        return found if marks else found["input_ids"]

    def _wrong(self, index: int, text: str, hint: str) -> ZbcError:
        return ZbcError("E505", f"data: sample {index} {text}", where=self._samples[index][0], hint=hint)


def _after(before: list[int], whole: list[int]) -> tuple[list[int], list[bool]] | None:
    """All tokens, of which those after `before` count; None if they do not begin with these."""
    count = len(before)
    return (whole, [k >= count for k in range(len(whole))]) if whole[:count] == before else None


def _load(folder: str) -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads hang processes that are forked
    try:
        from transformers import AutoTokenizer
    except ImportError:
        text = "data: chat templates are rendered by transformers, which is not installed"
        raise ZbcError("E602", text, hint="pip install 'zbc[hf]'") from None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        text = f"data: cannot read the tokenizer of {folder}: {str(error).splitlines()[0]}"
        raise ZbcError("E502", text, hint="data.tokenizer names a folder with tokenizer.json") from None


def _read(file: Path) -> Iterator[tuple[str, Any]]:
    """Yields the place of each sample of a file, and the sample."""
    try:
        if file.suffix == ".parquet":
            yield from ((f"{file}:row {number}", row) for number, row in enumerate(_rows(file)))
            return
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise unreadable(file, error) from None
    for where, line in ((f"{file}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ZbcError("E501", f"data: a line is not JSON: {error}", where=where, hint=_FORMS) from None
        if not isinstance(found, dict):
            raise ZbcError("E501", f"data: a line is no JSON object: {str(found)[:60]}", where=where, hint=_FORMS)
        yield where, found


def _rows(file: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        text = f"data: {file} is a Parquet file, and pyarrow is not installed"
        raise ZbcError("E602", text, hint="pip install pyarrow, or write it as .jsonl") from None
    try:
        rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
    except ArrowInvalid as error:
        raise ZbcError("E501", f"data: {file} is not a Parquet file: {error}") from None
    return rows
