"""Text to token files."""

import fcntl
import json
from array import array
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.refusals import error_of, refused
from zbc.cli import main
from zbc.training.data import tokenize
from zbc.training.data.corpus import describe
from zbc.training.data.tokenize import Bytes, Json


def numbers(path):
    return array({"uint16": "H", "uint32": "I"}[describe(path).dtype], path.read_bytes()).tolist()


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("zwölf\nlines\n" * 20, encoding="utf-8")
    (folder / "b.txt").write_text("")
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": f"document {i} €"}) + "\n" for i in range(15)))
    (folder / "d.txt").write_text("ü" * 333, encoding="utf-8")
    return folder


@pytest.fixture
def word_tokenizer(tmp_path):
    """A tokenizer.json made here: one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "<|endoftext|>": 1, "lines": 2, "document": 3, "end": 70000}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_bytes_are_tokens_and_documents_end_with_nul(texts, tmp_path):
    out = tmp_path / "out.bin"
    made = tokenize.tokenize([str(texts)], out, Bytes())
    assert describe(out) == made
    assert (made.dtype, made.vocab, made.end, made.documents, made.tokenizer) == ("uint16", 256, 0, 18, "bytes")
    documents = bytes(numbers(out)).split(b"\0")
    small = [f"document {i} €" for i in range(15)]
    assert [d.decode() for d in documents] == ["zwölf\nlines\n" * 20, "", *small, "ü" * 333, ""]


def test_what_is_no_tokenizer_is_refused_with_what_to_name(tmp_path, word_tokenizer):
    pytest.importorskip("tokenizers")
    with refused("E501", match="cannot read") as caught:
        Json(tmp_path / "none.json", None)
    assert "tokenizer.json" in (caught.value.hint or "")
    (tmp_path / "bad.json").write_text("{}")
    for path, end in [(tmp_path / "bad.json", None), (tmp_path / "none.json", None), (word_tokenizer, "<end>")]:
        assert error_of(Json, path, end).code == "E501"


def test_a_tokenizer_of_its_own(texts, tmp_path, word_tokenizer):
    out = tmp_path / "out.bin"
    made = tokenize.tokenize([str(texts / "a.txt"), str(texts / "c.jsonl")], out, Json(word_tokenizer, None))
    assert (made.dtype, made.vocab, made.end) == ("uint32", 70001, 1)
    assert numbers(out)[-4:] == [3, 0, 0, 1] and numbers(out)[:3] == [0, 2, 0] and numbers(out).count(1) == 16
    other = tokenize.tokenize([str(texts / "a.txt")], tmp_path / "two.bin", Json(word_tokenizer, "end"))
    assert other.end == 70000 and numbers(tmp_path / "two.bin")[-1] == 70000


def test_an_attempt_that_ends_early_leaves_nothing(texts):
    out = texts / "out.bin"
    with pytest.raises(KeyboardInterrupt):  # with its first piece
        tokenize.tokenize([str(texts)], out, Bytes(), done=mock.Mock(side_effect=KeyboardInterrupt))
    assert not list(texts.glob("out.bin*"))
    heard, size = [], tokenize.total_bytes([str(texts)], out)
    tokenize.tokenize([str(texts)], out, Bytes(), done=heard.append)
    assert sum(heard) == size


def test_what_a_killed_attempt_left_among_the_texts_is_written_over(texts, tmp_path):
    out = texts / "out.bin"
    out.with_name("out.bin.part").write_bytes(b"torn")
    tokenize.tokenize([str(texts)], tmp_path / "whole.bin", Bytes())
    made, size = tokenize.tokenize([str(texts)], out, Bytes()), tokenize.total_bytes([str(texts / "a.txt")], out)
    assert made.documents == 18 and size == (texts / "a.txt").stat().st_size
    assert not list(texts.glob("*.part"))


def test_two_processes_do_not_make_one_file(texts, tmp_path):
    out = tmp_path / "out.bin"
    part = out.with_name("out.bin.part")
    with part.open("ab") as other:
        other.write(b"theirs")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        before = part.read_bytes()
        error = error_of(tokenize.tokenize, [str(texts)], out, Bytes())
        assert error.code == "E501" and "another process is making" in error.message and part.read_bytes() == before
    tokenize.tokenize([str(texts)], out, Bytes())


def test_half_of_a_character_is_named_with_what_is_before_it(tmp_path):
    """JSON can write half of a surrogate pair, UTF-8 cannot."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "pairs \\ud83d\\ude00 are fine"}\n')
    tokenize.tokenize([str(lines)], tmp_path / "fine.bin", Bytes())
    lines.write_text('{"text": "fine"}\n{"text": "broken \\ud83d here"}\n')
    error = error_of(tokenize.tokenize, [str(lines)], tmp_path / "l.bin", Bytes())
    assert error.code == "E501" and "'\\ud83d', after 'broken '" in error.message and error.where == f"{lines}:2"
    error.render().encode()


def test_what_is_there_is_not_overwritten_and_bad_text_is_named(texts, tmp_path):
    out = tmp_path / "out.bin"
    out.touch()
    assert error_of(tokenize.tokenize, [str(texts)], out, Bytes()).code == "E501"
    out.unlink()
    (texts / "e.txt").write_bytes(b"abc\xffdef")
    error = error_of(tokenize.tokenize, [str(texts)], out, Bytes())
    assert error.code == "E501" and error.where == f"{texts / 'e.txt'}:1" and "byte 3 is 0xff" in error.message
    assert error_of(tokenize.tokenize, [str(tmp_path / "gone.txt")], out, Bytes()).code == "E501"


@pytest.mark.parametrize("piece", [20, 2**22])
@pytest.mark.parametrize(
    "bad", [b'{"txt": 1}', b'{"text": "\xff"}', b'{"text": "\\ud83d"}', b"[1]", b"x", b'{"text": "a\\u0000b"}']
)
def test_a_bad_line_is_named_by_its_number_in_the_file_also_behind_the_first_piece(tmp_path, monkeypatch, bad, piece):
    monkeypatch.setattr(tokenize, "PIECE", piece)
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes(b'{"text": "fine"}\n\n' * 7 + bad + b'\n{"text": "fine"}\n')
    error = error_of(tokenize.tokenize, [str(lines)], tmp_path / "out.bin", Bytes())
    assert (error.code, error.where) == ("E501", f"{lines}:15")


def test_the_command_says_what_it_made_and_what_to_write_next(texts, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["tokenize", str(texts), "-o", str(tmp_path / "out.bin")])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "of 18 documents, uint16" in out and "model.vocab = 256" in out


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(documents=st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=40), max_size=6))
def test_every_text_comes_back_whole(documents, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i, text in enumerate(documents):
        (folder / f"{i}.txt").write_bytes(text.encode())
    (folder / "z.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    before, tokenize.PIECE = tokenize.PIECE, 11
    try:
        tokenize.tokenize([str(folder)], folder / "out.bin", Bytes())
    finally:
        tokenize.PIECE = before
    found = bytes(numbers(folder / "out.bin")).split(b"\0")[:-1]
    assert [d.decode() for d in found] == 2 * documents
