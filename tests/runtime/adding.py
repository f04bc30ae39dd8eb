"""Layers with losses of their own, and the data for them."""

import torch
from torch import Tensor, nn

import zbc

WIDTH, ROWS, SAMPLES = 6, 4, 16


class Balanced(nn.Module):
    """A linear layer with a loss of its own per microbatch, which keeps outputs small."""

    def __init__(self, how: str, weight: float = 0.3) -> None:
        super().__init__()
        self.linear, self.router, self.how, self.weight = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), how, weight

    def value(self, x: Tensor) -> Tensor:
        return self.weight * self.router(x).softmax(-1).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.how == "none":
            return y
        value = self.value(x)
        if self.how == "add":
            return zbc.add_loss(y, value)
        if self.how == "hook" and y.requires_grad:
            y.register_hook(lambda grad: grad + self.weight)
        if self.how == "inside" and value.requires_grad:
            value.backward(retain_graph=True)
        if self.how in ("hook", "inside"):
            return y
        return _Own.apply(y, value, zbc.loss_scale() if self.how == "scaled" else 1.0)


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, value, scale):
        ctx.scale = scale
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.tensor(ctx.scale, dtype=grad.dtype), None


def layers(how: str = "add", places: tuple[int, ...] = (0, 2, 3), count: int = 4) -> list[nn.Module]:
    return [lambda i=i: Balanced(how if i in places else "none").double() for i in range(count)]


def mixed(hows: tuple[str, ...]) -> list[nn.Module]:
    return [lambda how=how: Balanced(how).double() for how in hows]


class Rows:
    """Sequences of vectors; none repeats."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.sin(torch.arange(ROWS * WIDTH, dtype=torch.float64) * (1 + 0.1 * index)).view(ROWS, WIDTH)
        return x, torch.cos(x + 0.05 * index)
