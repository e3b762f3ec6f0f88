"""The loop of the reference trainer under `onenth.shard`, as one rank of a group runs it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onenth
from tests.distributed.models import TASKS, adamw
from tests.distributed.reference import MakeOptimizer, micro_batch


@dataclass(frozen=True)
class ShardedResult:
    """What one rank has at the end.

    parameters: whole parameters by name from the master copy, on rank 0; empty on the others.
    gathered: hash of the whole parameters that this rank computes with.
    norms: gradient norm of every step. losses: this rank's mean loss of every step.
    """

    parameters: Mapping[str, Tensor]
    gathered: str
    norms: list[float]
    losses: list[float]


def start(
    group: dist.ProcessGroup, task: str, make_optimizer: MakeOptimizer = adamw, **settings: Any
) -> tuple[nn.Module, Any]:
    """The task's model and optimizer, sharded; the task's own units unless `settings` name others."""
    model = TASKS[task].model()
    return onenth.shard(model, make_optimizer(model), group=group, **({"units": TASKS[task].units} | settings))


def step(
    group: dist.ProcessGroup, task: str, model: nn.Module, optimizer: Any, number: int, backwards: int = 1
) -> float:
    """Step `number` of the reference's data order, gradients left in place; returns this rank's mean loss."""
    total = 0.0
    for backward in range(backwards):
        batch = micro_batch(number, dist.get_rank(group), backward)
        loss = TASKS[task].loss(model, batch) / backwards
        optimizer.backward(loss)
        total += loss.item()
    optimizer.step()
    return total


def train(
    group: dist.ProcessGroup,
    task: str,
    *,
    steps: int = 5,
    backwards: int = 1,
    make_optimizer: MakeOptimizer = adamw,
    **settings: Any,
) -> ShardedResult:
    """Train as `reference.train` does, `settings` being those of `onenth.shard`."""
    model, optimizer = start(group, task, make_optimizer, **settings)
    norms, losses = [], []
    for number in range(steps):
        losses.append(step(group, task, model, optimizer, number, backwards))
        norms.append(float(optimizer.grad_norm))
        optimizer.zero_grad()
    parameters = onenth.full_state_dict(model)
    with onenth.gathered(model):
        gathered = digest(parameter for _, parameter in model.named_parameters())
    return ShardedResult(parameters, gathered, norms, losses)


def train_each(
    group: dist.ProcessGroup, task: str, variants: Mapping[str, Mapping[str, Any]]
) -> dict[str, ShardedResult]:
    """`train` once for each variant's arguments."""
    return {label: train(group, task, **arguments) for label, arguments in variants.items()}


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash of the bits of all tensors."""
    total = hashlib.sha256()
    for tensor in tensors:
        copy = tensor.detach().clone(memory_format=torch.contiguous_format).flatten()
        total.update(copy.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def different_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, int]:
    """How many elements differ in their bits, by name of the tensors in which any does."""
    assert ours.keys() == theirs.keys()
    return {
        name: int((ours[name] != value).sum())
        for name, value in theirs.items()
        if digest([ours[name]]) != digest([value])
    }
