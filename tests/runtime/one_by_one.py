"""Losses and training of one process that runs each sample alone, with plain autograd."""

import math

import torch
from torch import nn
from torch.nn import functional

from zbc.training.building.context import Settings
from zbc.training.models import model as models

SGD = {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "clip_grad_norm": 0.5}


class Texts:
    """A user's sequences of tokens, with their lengths; `wrong` is the length given for one, or "none"."""

    def __init__(self, count=400, vocab=61, longest=16, wrong=None):
        source = torch.Generator().manual_seed(3)
        self.lengths = torch.randint(1, longest + 1, (count,), generator=source).tolist()
        self._tokens = [torch.randint(vocab, (n + 1,), generator=source) for n in self.lengths]
        if wrong == "none":
            del self.lengths
        elif wrong is not None:
            self.lengths[7] = wrong

    def __len__(self):
        return len(self._tokens)

    def __getitem__(self, index):
        return self._tokens[index][:-1], self._tokens[index][1:]

    def pair(self, number):
        return self[number % len(self)]


TEXTS = f"{__name__}:Texts"


def built(plan):
    """The layers of a plan's model by name, with their initial weights."""
    settings = Settings.of(plan.manifest)
    seed = settings.train.seed
    return {layer.name: layer.build(seed) for layer in models.layers(settings.model, seed)}


def losses(layers, x, y, ignored=-100):
    """[tokens], of a sample."""
    h = x[None]
    for layer in layers.values():
        h = layer(h)
    return functional.cross_entropy(h[0], y, reduction="none", ignore_index=ignored)


def mean_over_tokens(plan, pairs, ignored=-100):
    """The loss of samples at initial weights."""
    layers = built(plan)
    total = sum(losses(layers, x, y, ignored).sum().item() for x, y in pairs)
    return total / sum(int((y != ignored).sum()) for _, y in pairs)


def train(plan, steps, pairs_of):
    """Losses, norms and weights of training by SGD; `pairs_of` gives the samples of a step."""
    clip, delayed = plan.manifest.training["optimizer"].get("clip_grad_norm") or math.inf, plan.manifest.flushless
    layers = built(plan)
    weights = {f"{name}.{local}": p for name, layer in layers.items() for local, p in layer.named_parameters()}
    optimizer = torch.optim.SGD(weights.values(), lr=SGD["lr"], momentum=SGD["momentum"])
    found, norms, before = [], [], [p.data.clone() for p in weights.values()]
    for step in range(steps):
        newest = [p.data for p in weights.values()]
        for p, older in zip(weights.values(), before if delayed else newest, strict=True):
            p.data = older
        pairs, total = pairs_of(step), 0.0
        tokens = sum(len(x) for x, _ in pairs)
        for x, y in pairs:
            loss = losses(layers, x, y).sum() / tokens
            loss.backward()
            total += loss.item()
        norms.append(float(nn.utils.clip_grad_norm_(weights.values(), clip)))
        for p, data in zip(weights.values(), newest, strict=True):
            p.data = data
        before = [data.clone() for data in newest]
        found.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return found, norms, {name: p.detach() for name, p in weights.items()}
