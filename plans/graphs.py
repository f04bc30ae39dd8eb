"""Models that are no chain: what `family = "plans.graphs:..."` in towers.toml, translator.toml and skip.toml name.

A factory returns a dict: the layers of each group of `model.graph`, in lists. The first layer of a group that reads
several others takes their outputs as its arguments, in the order in which the graph names them. All else is as in
convnet.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

Layers = dict[str, list[Callable[[], nn.Module]]]


def towers(width: int = 32, vision: int = 2, text: int = 2, decoder: int = 2, vocab: int = 16) -> Layers:
    """Does a caption belong to a picture? One tower looks at the picture, one reads the caption, both are joined."""
    return {
        "vision": [partial(nn.Linear, PATCH, width), *(partial(Block, width) for _ in range(vision - 1))],
        "text": [partial(nn.Embedding, vocab, width), *(partial(Block, width) for _ in range(text - 1))],
        "decoder": [
            partial(Join, width),
            *(partial(Block, width) for _ in range(decoder - 2)),
            partial(Verdict, width),
        ],
    }


def translator(width: int = 32, encoder: int = 3, decoder: int = 3, vocab: int = 16) -> Layers:
    """An encoder and a decoder: each block of the decoder attends to what the encoder made of the source.

    Blocks of the decoder pass both on, as a tuple.
    """
    return {
        "encoder": [partial(nn.Embedding, vocab, width), *(partial(Block, width) for _ in range(encoder - 1))],
        "prefix": [partial(nn.Embedding, vocab, width)],
        "decoder": [*(partial(Cross, width) for _ in range(decoder - 1)), partial(Words, width, vocab)],
    }


def skip(width: int = 32, blocks: int = 2, vocab: int = 16) -> Layers:
    """Down, along the bottom and up again, where what came down is added: a skip connection over the bottom."""
    return {
        "down": [partial(nn.Embedding, vocab, width), *(partial(Block, width) for _ in range(blocks - 1))],
        "bottom": [partial(Block, width) for _ in range(blocks)],
        "up": [partial(Add, width), partial(nn.Linear, width, vocab)],
    }


PATCH = 12  # numbers of a patch of a picture


class Block(nn.Module):
    """x + mlp(mixed(norm(x))): each place meets the mean of all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(2 * width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = torch.cat([y, y.mean(1, keepdim=True).expand_as(y)], -1)
        return x + self.down(nn.functional.gelu(self.up(y)))


class Join(nn.Module):
    """(B, P, C) of a picture and (B, T, C) of a caption -> (B, T, C)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.look = nn.Linear(width, width)

    def forward(self, picture: Tensor, caption: Tensor) -> Tensor:
        seen = self.look(picture)
        weight = torch.softmax(caption @ seen.transpose(1, 2) / seen.shape[-1] ** 0.5, -1)
        return caption * (weight @ seen)


class Verdict(nn.Module):
    """(B, T, C) -> (B, 2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean(1))


class Cross(nn.Module):
    """Attends to the source, which it passes on beside what it has made of the prefix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.block = nn.Linear(width, width), Block(width)

    def forward(self, source: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = torch.softmax(self.query(x) @ source.transpose(1, 2) / x.shape[-1] ** 0.5, -1)
        return source, self.block(x + weight @ source)


class Words(nn.Module):
    """The logits of the next word."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, vocab)

    def forward(self, source: Tensor, x: Tensor) -> Tensor:
        return self.linear(x)


class Add(nn.Module):
    """What came down and what came along the bottom."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = Block(width)

    def forward(self, down: Tensor, bottom: Tensor) -> Tensor:
        return self.block(down + bottom)


class Captions:
    """Pictures of patches, and captions that name the brightest patch or another one: input {vision, text}, class."""

    def __init__(self, count: int = 4096, patches: int = 4, words: int = 3, vocab: int = 16) -> None:
        self.count, self.patches, self.words, self.vocab = count, patches, words, vocab

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        made = torch.Generator().manual_seed(index)
        picture = torch.randn(self.patches, PATCH, generator=made)
        bright = int(torch.randint(self.patches, (), generator=made))
        picture[bright] += 1.0
        picture[:, 0] = torch.arange(self.patches)
        caption = torch.randint(self.patches, self.vocab, (self.words,), generator=made)
        fits = index % 2
        caption[0] = bright if fits else (bright + 1) % self.patches
        return {"vision": picture, "text": caption}, torch.tensor(fits)


class Reversed:
    """Sentences to turn round: input {encoder: the sentence, prefix: the answer so far}, target the answer."""

    def __init__(self, count: int = 4096, length: int = 6, vocab: int = 16) -> None:
        self.count, self.length, self.vocab = count, length, vocab

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        sentence = torch.randint(1, self.vocab, (self.length,), generator=torch.Generator().manual_seed(index))
        answer = sentence.flip(0)
        return {"encoder": sentence, "prefix": torch.cat([torch.zeros(1, dtype=torch.long), answer[:-1]])}, answer
