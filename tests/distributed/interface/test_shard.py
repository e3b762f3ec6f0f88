"""What `shard` returns, keeps and refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onenth
from tests.distributed.interface import toys
from tests.distributed.interface.compare import relative_distance
from tests.distributed.pool import Pool


def grouped_adamw(model: nn.Module) -> torch.optim.AdamW:
    """Groups out of the model's order, an empty one among them, hyperparameters of their own."""
    weights = [value for value in model.parameters() if value.dim() == 2]
    vectors = [value for value in model.parameters() if value.dim() != 2]
    groups = [
        {"params": vectors, "weight_decay": 0.0},
        {"params": []},
        {"params": weights, "lr": 3e-3, "name": "w"},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9))


def check_what_shard_keeps(group: dist.ProcessGroup, stage: int) -> None:
    model = toys.toy()
    optimizer = grouped_adamw(model)
    groups = list(optimizer.param_groups)
    settings = [{name: value for name, value in entry.items() if name != "params"} for entry in groups]
    members = [[id(value) for value in entry["params"]] for entry in groups]
    names = [name for name, _ in model.named_parameters()]
    shapes = {name: (value.shape, value.dtype, value.device) for name, value in model.named_parameters()}

    sharded, wrapped = onenth.shard(model, optimizer, group=group, stage=stage, precision="fp32")

    assert sharded is model
    assert isinstance(wrapped, torch.optim.Optimizer)
    assert isinstance(wrapped, onenth.ShardedOptimizer)
    assert [id(entry) for entry in wrapped.param_groups] == [id(entry) for entry in groups], "other group dicts"
    assert settings == [
        {name: value for name, value in entry.items() if name in before}
        for entry, before in zip(wrapped.param_groups, settings, strict=True)
    ]
    assert members == [[id(value) for value in entry["params"]] for entry in wrapped.param_groups]
    assert [name for name, _ in sharded.named_parameters()] == names
    assert shapes == {name: (value.shape, value.dtype, value.device) for name, value in sharded.named_parameters()}
    assert {id(value) for value in sharded.parameters()} == {entry for group in members for entry in group}
    assert repr(sharded).startswith("Toy(")
    assert "0.003" in repr(wrapped), "the optimizer no longer shows its settings"
    with pytest.raises(onenth.ShardError, match="step"):
        optimizer.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_shard_keeps_model_and_groups(pool: Pool, stage: int) -> None:
    """Model object, parameters and group dicts stay (order, empty ones, settings); the old step() raises."""
    pool.run(2, check_what_shard_keeps, stage)


def distance_with_groups(group: dist.ProcessGroup) -> float:
    model = toys.toy()
    model, optimizer = onenth.shard(model, grouped_adamw(model), group=group, stage=3, precision="fp32")
    toys.train(model, optimizer, group.rank())
    state = onenth.full_state_dict(model)
    plain = toys.toy()
    reference = grouped_adamw(plain)
    for step in range(toys.STEPS):
        toys.plain_backward(plain, step, group.size())
        reference.step()
        reference.zero_grad()
    return relative_distance(state, plain.state_dict()) if state else 0.0


def test_each_group_trains_with_its_own_settings(pool: Pool) -> None:
    """Learning rate, betas and weight decay of each group act as in plain PyTorch."""
    assert pool.run(2, distance_with_groups)[0] <= 1e-5


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Moves lr and beta1 in every step."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=10)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def distance_with_scheduler(group: dist.ProcessGroup, make: Callable[..., Any], before: bool) -> float:
    plain = toys.toy()
    plain_optimizer = toys.adamw(list(plain.parameters()))
    plain_scheduler = make(plain_optimizer)
    model = toys.toy()
    optimizer = toys.adamw(list(model.parameters()))
    scheduler = make(optimizer) if before else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, sharded = onenth.shard(model, optimizer, group=group, stage=3, precision="fp32")
        scheduler = scheduler or make(sharded)
        for step in range(toys.STEPS):
            toys.train(model, sharded, group.rank(), range(step, step + 1))
            scheduler.step()
            toys.plain_backward(plain, step, group.size())
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            plain_scheduler.step()
    assert sharded.param_groups[0]["lr"] == plain_optimizer.param_groups[0]["lr"]
    state = onenth.full_state_dict(model)
    return relative_distance(state, plain.state_dict()) if state else 0.0


@pytest.mark.parametrize("before", [True, False], ids=["made before shard", "made after shard"])
@pytest.mark.parametrize("make", [one_cycle, halving])
def test_schedulers_take_effect_without_warnings(pool: Pool, make: Callable[..., Any], before: bool) -> None:
    """A scheduler on the plain or on the sharded optimizer steers as in plain PyTorch, without a warning."""
    assert pool.run(2, distance_with_scheduler, make, before)[0] <= 1e-5


def move_when_lr_is_set(group: dist.ProcessGroup) -> list[float]:
    moves = []
    for rate in (0.0, 0.1):
        model, optimizer = toys.shard_toy(group, toys.sgd)
        optimizer.param_groups[0]["lr"] = rate
        toys.train(model, optimizer, group.rank())
        state = onenth.full_state_dict(model)
        moves.append(relative_distance(state, toys.toy().state_dict()) if state else 0.0)
    return moves


def test_setting_lr_in_the_group_takes_effect(pool: Pool) -> None:
    """`param_groups[0]["lr"] = 0` stops training, another value doesn't."""
    frozen, moved = pool.run(2, move_when_lr_is_set)[0]
    assert frozen == 0.0
    assert moved > 1e-3


def check_without_optimizer(group: dist.ProcessGroup, stage: int) -> None:
    inputs, _ = toys.batch(0, group.rank())
    expected = toys.toy()(inputs)
    model, optimizer = onenth.shard(toys.toy(), group=group, stage=stage, precision="fp32")
    assert optimizer is None
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(inputs), expected)
    held = onenth.memory_report(model, optimizer)
    assert held.parameters > 0
    assert held.gradients == held.master == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_without_optimizer_runs_forward(pool: Pool, stage: int) -> None:
    """With optimizer=None the sharded model computes the plain one's outputs, and holds parameters only."""
    pool.run(2, check_without_optimizer, stage)


LONE_RANK = """
import torch, torch.distributed as dist, onenth
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
try:
    onenth.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
except onenth.OnenthError as error:
    print("refused:", error)
torch.sum(model(torch.ones(4))).backward()
print("plain" if type(model) is torch.nn.Linear and not model.weight.isnan().any() else "sharded")
"""


def test_one_rank_where_the_environment_says_more_is_an_error() -> None:
    """WORLD_SIZE=2 and a process group of one rank is refused, by that name, and the model stays plain."""
    environment = os.environ | {"WORLD_SIZE": "2", "RANK": "0", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", LONE_RANK],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    refused, state = done.stdout.splitlines()
    assert refused.startswith("refused:")
    assert "WORLD_SIZE" in refused
    assert state == "plain"


def check_bad_settings(group: dist.ProcessGroup) -> None:
    model = toys.toy()
    optimizer = toys.adamw(list(model.parameters()))
    with pytest.raises(onenth.ConfigError) as raised:
        onenth.shard(model, optimizer, group=group, stgae=3, precision="bf17", max_grad_norm=-1)
    for offender in ("stgae", "did you mean stage", "bf17", "max_grad_norm"):
        assert offender in str(raised.value), offender
    with pytest.raises(onenth.ConfigError, match="Config"):
        onenth.shard(model, optimizer, {"stage": 3}, group=group)
    toys.loss_of(model, toys.batch(0, 0)).backward()
    optimizer.step()
    assert relative_distance(model.state_dict(), toys.toy().state_dict()) > 0


def test_bad_settings_are_listed_and_leave_the_model_alone(pool: Pool) -> None:
    """One error lists every bad setting; model and optimizer still work as plain PyTorch."""
    pool.run(2, check_bad_settings)


def bytes_of_parameters(group: dist.ProcessGroup) -> list[int]:
    config = onenth.Config(stage=0, precision="bf16")
    held = []
    for settings in ({}, {"stage": 3}, {"precision": "fp32"}):
        model = toys.toy()
        optimizer = toys.adamw(list(model.parameters()))
        held.append(onenth.memory_report(*onenth.shard(model, optimizer, config, group=group, **settings)).parameters)
    return held


def test_settings_override_the_config(pool: Pool) -> None:
    """Settings given beside a Config win over its fields, and the other fields stay."""
    config_alone, stage_3, fp32 = pool.run(2, bytes_of_parameters)[0]
    assert stage_3 == 0, "at stage 3 in bf16 parameters come from the master copy"
    assert fp32 == 2 * config_alone


def world_of_this_rank(group: dist.ProcessGroup) -> tuple[int, int, str]:
    world = onenth.init(group)
    return world.rank, world.size, torch.device(world.device).type


def test_init_describes_the_group(pool: Pool) -> None:
    """`init(group)` answers with this rank, the group's size, and the device that training will use."""
    assert pool.run(2, world_of_this_rank) == [(0, 2, "cpu"), (1, 2, "cpu")], "gloo moves CPU tensors"
