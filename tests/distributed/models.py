"""Small models that cover what the engine has to cope with, each with a loss on numbered micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, TOKENS = 61, 24, 11  # nothing divides evenly


class Residual(nn.Module):
    """x + a little network, with a hidden width of its own."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class UnevenMlp(nn.Module):
    """Blocks of different sizes, none a multiple of any number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 33)
        self.blocks = nn.ModuleList([Residual(33, hidden) for hidden in (65, 17, 41)])
        self.last = nn.Linear(33, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Block(nn.Module):
    """A transformer block. Keys have no bias: its gradient is rounding alone, which Adam would amplify."""

    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A causal language model; its root holds the positions and the last norm."""

    def __init__(self, tied: bool, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        self.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class OddBlock(nn.Module):
    """Parameters of every awkward kind: frozen, unused, zero-sized, scalar."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.trained = nn.Linear(width, width)
        self.unused = nn.Linear(width, 3)
        self.empty = nn.Parameter(torch.empty(0, width))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.trained(torch.relu(self.frozen(x)))) + self.empty.sum()


class Odd(nn.Module):
    """Odd blocks below a root whose only direct parameter is a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList([OddBlock(13) for _ in range(3)])
        self.last = nn.Linear(13, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 6))
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.temperature


class Outer(nn.Module):
    """A unit with units inside, and parameters that it uses before and after them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.inner = nn.ModuleList([Residual(width, 2 * width + 1) for _ in range(2)])
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.gain
        for block in self.inner:
            y = block(y)
        return x + self.mix(y) * self.gain


class Nested(nn.Module):
    """Units within units."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleList([Outer(9) for _ in range(2)])
        self.last = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 2))
        for block in self.outer:
            x = block(x)
        return self.last(x)


def _regression(model: nn.Module, number: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(rows, 7, generator=generator), torch.randn(rows, 5, generator=generator)
    return F.mse_loss(model(x).float(), y)


def _next_token(model: nn.Module, number: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (rows, TOKENS + 1), generator=generator)
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Task:
    """A model and its loss.

    build: makes the module.
    batch_loss: (model, number of the micro-batch, rows) -> mean loss over the micro-batch.
    units: the `units` setting that shards it as the model is meant to be sharded.
    """

    build: Callable[[], nn.Module]
    batch_loss: Callable[[nn.Module, int, int], Tensor]
    units: Any = "auto"

    def model(self) -> nn.Module:
        """The module with the same initial parameters on every call, in every process."""
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return self.build()

    def loss(self, model: nn.Module, number: int, rows: int = 3) -> Tensor:
        """Mean loss on micro-batch `number`, fp32, scalar."""
        return self.batch_loss(model, number, rows)


TASKS: dict[str, Task] = {
    "uneven": Task(UnevenMlp, _regression),
    "tied": Task(lambda: Transformer(tied=True), _next_token),
    "untied": Task(lambda: Transformer(tied=False), _next_token),
    "odd": Task(Odd, _regression),
    "nested": Task(Nested, _regression, units=(Outer, Residual)),
}


def adamw(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    """AdamW with two groups, matrices decayed and the rest not; frozen parameters are left out."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "weight_decay": 0.1},
            {"params": [parameter for parameter in trainable if parameter.ndim < 2], "weight_decay": 0.0},
        ],
        lr=lr,
    )


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    """SGD with momentum: unlike Adam's, its update shows a gradient that is wrong by a factor."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
