"""A small model, its batches, and how it is trained plainly and sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import onenth

STEPS = 3
INPUT, WIDTH, OUTPUT, BATCH = 7, 20, 5, 4  # nothing divides evenly

State = dict[str, Tensor]
BuildOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.scale.to(hidden.dtype) * self.linear(self.norm(hidden)).tanh()


class Toy(nn.Module):
    """[BATCH, INPUT] -> [BATCH, OUTPUT]"""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(INPUT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, OUTPUT)
        self.register_buffer("classes", torch.arange(OUTPUT))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.stem(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(self, batch)


def toy() -> Toy:
    """A new Toy, the same bits at every call."""
    torch.manual_seed(0)
    return Toy()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """(inputs [BATCH, INPUT], targets [BATCH, OUTPUT]), fp32"""
    source = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, INPUT, generator=source), torch.randn(BATCH, OUTPUT, generator=source)


def loss_of(model: nn.Module, example: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = example
    return F.mse_loss(model(inputs).float(), targets)


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def snapshot(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def plain_backward(model: nn.Module, step: int, ranks: int) -> None:
    """Leaves in `.grad` the mean over the ranks' micro-batches."""
    for rank in range(ranks):
        (loss_of(model, batch(step, rank)) / ranks).backward()


def train_plain(
    ranks: int,
    build_optimizer: BuildOptimizer = adamw,
    steps: int = STEPS,
    max_grad_norm: float | None = None,
) -> State:
    model = toy()
    optimizer = build_optimizer(list(model.parameters()))
    for step in range(steps):
        plain_backward(model, step, ranks)
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


def shard_toy(
    group: dist.ProcessGroup, build_optimizer: BuildOptimizer = adamw, **settings: Any
) -> tuple[Toy, onenth.ShardedOptimizer]:
    """A sharded Toy; stage 3 and fp32 unless the settings say otherwise."""
    model = toy()
    optimizer = build_optimizer(list(model.parameters()))
    return onenth.shard(model, optimizer, group=group, **({"stage": 3, "precision": "fp32"} | settings))


def train(model: nn.Module, optimizer: onenth.ShardedOptimizer, rank: int, steps: range = range(STEPS)) -> None:
    for step in steps:
        optimizer.backward(loss_of(model, batch(step, rank)))
        optimizer.step()
        optimizer.zero_grad()


def trained_state(group: dist.ProcessGroup, build_optimizer: BuildOptimizer = adamw, **settings: Any) -> State:
    model, optimizer = shard_toy(group, build_optimizer, **settings)
    train(model, optimizer, group.rank())
    return onenth.full_state_dict(model)


def parameter(model: nn.Module, name: str) -> nn.Parameter:
    """The parameter object itself, without reading its value."""
    return dict(model.named_parameters())[name]
