"""`tokenize`: training data from text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from zbc.commands.console import labelled, progress, tell
from zbc.commands.options import Out
from zbc.text import size


def tokenize(
    texts: Annotated[list[str], typer.Argument(metavar="TEXT", help="Text or .jsonl files, or folders of them.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="OUT.bin", help="The token file.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="tokenizer.json", help="A tokenizer; without one, bytes are tokens.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Check chat data, with --tokenizer FOLDER, and show a sample.")
    ] = False,
    end: Annotated[str | None, typer.Option(metavar="TOKEN", help="The token after each document.")] = None,
    *,
    out: Out,
) -> None:
    """Turn text into a token file for data.kind = "tokens".

    A document is a file, or a line of a .jsonl file (its "text").
    """
    if chat != (output is None) or (chat and tokenizer is None):
        raise typer.BadParameter("give -o OUT.bin for the tokens of text, or --chat and --tokenizer FOLDER")
    if chat:
        return _check_chat(texts, str(tokenizer), out)
    assert output is not None
    from zbc.training.data.tokenize import Bytes, Json, total_bytes
    from zbc.training.data.tokenize import tokenize as make

    if tokenizer is None and end is not None:
        raise typer.BadParameter("bytes as tokens end documents with NUL; --end goes with --tokenizer")
    chosen = Bytes() if tokenizer is None else Json(tokenizer, end)
    with progress("tokenizing", total_bytes(texts, output), quiet=out.quiet) as done:
        made = make(texts, output, chosen, done=done)
    counts = {"tokens": made.tokens, "documents": made.documents, "dtype": made.dtype, "vocab": made.vocab}
    out.answer(
        lambda: {"format": "zbc-tokenized", "version": 1, "file": str(output), **counts},
        lambda: (
            labelled("tokens", f"{made.tokens} of {made.documents} documents, {made.dtype}"),
            labelled("file", f"{output}, {size(made.tokens * made.width)}"),
            labelled("next", f'[data] kind = "tokens", path = "{output}"; model.vocab = {made.vocab} or more'),
        ),
    )
    if made.documents == 0 and not out.silent:
        tell("there was no text")


def _check_chat(texts: list[str], folder: str, out: Out) -> None:
    """Makes tokens of every sample, and shows the first: tokens that the loss counts are in colour."""
    from rich.text import Text

    from zbc.training.data.chat import Chat

    samples = Chat(texts, folder, 1, {}, padded=False)
    counts = [samples.tokens(index)[1] for index in range(len(samples))]
    longest, learned = max(map(len, counts), default=0), sum(map(sum, counts))
    told = {"samples": len(samples), "tokens": sum(map(len, counts)), "learned": learned, "longest": longest}

    def shown() -> Iterator[Text]:
        parts = [*samples.shown(0)] if counts else []
        yield Text.assemble(*((text, "bold green" if said else "dim") for text, said in parts))
        yield labelled("learned", *(repr(text) for text, said in parts if said))
        yield labelled("samples", f"{told['samples']}, {told['tokens']} tokens, {learned} of them learned")
        yield labelled("next", f'[data] kind = "chat"; model.seq_len = {longest - 1} or more')

    out.answer(lambda: {"format": "zbc-chat", "version": 1, **told}, shown)
