"""Training a case plainly and sharded. Functions of `group` run on every rank; results count at rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onenth
from tests.distributed.interface.compare import entries_that_differ, relative_distance
from tests.distributed.real_models.cases import CASES, Case

STEPS = 3

State = dict[str, Tensor]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def train_plain(case: Case, ranks: int) -> tuple[State, State]:
    """States before and after training one process on the mean over the ranks' micro-batches."""
    model = case.build().train()
    optimizer = adamw(model)
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(STEPS):
        for rank in range(ranks):
            (model(**case.batch(step, rank)).loss / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return initial, model.state_dict()


def train_sharded(group: dist.ProcessGroup, case: Case, **settings: Any) -> tuple[nn.Module, onenth.ShardedOptimizer]:
    model = case.build().train()
    model, optimizer = onenth.shard(model, adamw(model), group=group, **settings)
    for step in range(STEPS):
        optimizer.backward(model(**case.batch(step, group.rank())).loss)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def trained_state(group: dist.ProcessGroup, case: Case, **settings: Any) -> State:
    model, _ = train_sharded(group, case, **settings)
    return onenth.full_state_dict(model)


def distances_to_plain(
    group: dist.ProcessGroup, name: str, runs: Sequence[dict[str, Any]]
) -> tuple[float, list[float]]:
    """How far plain training moved the parameters; how far from its end each sharded run ended."""
    case = CASES[name]
    states = [trained_state(group, case, precision="fp32", **settings) for settings in runs]
    if group.rank() != 0:
        return 0.0, []
    initial, final = train_plain(case, group.size())
    return relative_distance(initial, final), [relative_distance(state, final) for state in states]


def differences_to_first(group: dist.ProcessGroup, name: str, runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """For each run after the first: entries of the trained state whose bits differ from the first's."""
    first, *others = [trained_state(group, CASES[name], **settings) for settings in runs]
    return [entries_that_differ(first, other) for other in others]
