"""What sharded training must equal: plain PyTorch in one process, averaging all ranks' micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.distributed.models import Task, adamw

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def micro_batch(step: int, rank: int, backward: int = 0) -> int:
    """The number of the micro-batch that `rank` sees in this backward of this step."""
    return 10_000 * step + 100 * rank + backward


@dataclass(frozen=True)
class Result:
    """A finished training: parameters by name, and the gradient norm and mean loss of every step."""

    parameters: Mapping[str, Tensor]
    norms: list[float]
    losses: list[float]


def train(
    task: Task,
    ranks: int,
    *,
    steps: int = 5,
    backwards: int = 1,
    make_optimizer: MakeOptimizer = adamw,
    max_grad_norm: float | None = None,
) -> Result:
    """Train in fp32 in one process; a step averages over `ranks` and `backwards` micro-batches a rank."""
    model = task.model()
    optimizer = make_optimizer(model)
    norms, losses = [], []
    for step in range(steps):
        total = 0.0
        for rank in range(ranks):
            for backward in range(backwards):
                loss = task.loss(model, micro_batch(step, rank, backward)) / (ranks * backwards)
                loss.backward()
                total += loss.item()
        limit = math.inf if max_grad_norm is None else max_grad_norm
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return Result({name: p.detach().clone() for name, p in model.named_parameters()}, norms, losses)


def relative_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Norm of the difference over the norm of `theirs`, all parameters together, in fp64."""
    squares = [
        ((ours[name].double() - value.double()).square().sum(), value.double().square().sum())
        for name, value in theirs.items()
    ]
    difference, norm = (torch.stack(column).sum().sqrt() for column in zip(*squares, strict=True))
    return (difference / norm).item()
