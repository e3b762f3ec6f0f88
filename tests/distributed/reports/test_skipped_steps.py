"""An Inf or NaN gradient on one rank: every rank skips the step and goes on as if it had not been."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onenth
from onenth.config import LossScale
from onenth.errors import ShardError
from tests.distributed.reports.harness import (
    ALL_STAGES,
    TOLERANCE,
    Block,
    Job,
    Stack,
    batch,
    captured_log,
    deviation,
    message_of,
    shard_job,
    train_plain,
)


class Poison(torch.autograd.Function):
    """Identity whose gradient is multiplied by a factor; Inf poisons exactly one parameter's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Scaled(Block):
    """A block with a gain whose gradient can be poisoned."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * Poison.apply(self.gain, self.factor)


def scaled() -> nn.Module:
    return Stack(Scaled)


JOB = Job(scaled)


def train_step(group: Any, model: nn.Module, optimizer: Any, step: int, factor: float = 1.0) -> None:
    """One step; `factor` multiplies the gradient of block 1's gain on the last rank."""
    rank = dist.get_rank(group)
    model.blocks[1].factor = factor if rank == dist.get_world_size(group) - 1 else 1.0
    optimizer.backward(model(batch(step, rank)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


@dataclass(frozen=True)
class Poisoned:
    """What a rank saw of a job with poisoned steps: the end state, (skipped, count) by step, log lines."""

    state: dict[str, Tensor]
    skips: list[tuple[bool, int]]
    lines: list[str]


def train_with_poisoned_steps(group: Any) -> dict[str, Poisoned]:
    """At every stage, by Inf and by NaN: the job with a poisoned step before each good one. Runs on ranks."""
    found = {}
    for stage, factor in product(ALL_STAGES, (math.inf, math.nan)):
        model, optimizer = shard_job(group, JOB, stage, max_skipped=2)
        skips = []
        with captured_log() as lines:
            for step in range(JOB.steps):
                for poison in (factor, 1.0):
                    train_step(group, model, optimizer, step, poison)
                    skips.append((optimizer.skipped, optimizer.skipped_steps))
        found[f"stage {stage}, {factor}"] = Poisoned(onenth.full_state_dict(model), skips, lines)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_inf_or_nan_on_one_rank_skips_the_step_everywhere(pool, ranks):
    """Parameters, moments and step counts end as if the steps had never been; the log names the culprit."""
    expected = train_plain(JOB, ranks)
    by_rank = pool.run(ranks, train_with_poisoned_steps)
    for label, at_rank_0 in by_rank[0].items():
        relative, name = deviation(at_rank_0.state, expected)
        assert relative <= TOLERANCE, f"{label}: {name} is off by {relative}"
        for found in by_rank:
            assert found[label].skips == [(True, 1), (False, 1), (True, 2), (False, 2), (True, 3), (False, 3)], label
        lines = [line for found in by_rank for line in found[label].lines if "blocks.1.gain" in line]
        assert len(lines) == JOB.steps, f"{label}: not one line a skip: {lines}"
        assert all(re.search(rf"rank\W*{ranks - 1}\b", line) for line in lines), lines


def skip_in_fp16(group: Any) -> list[tuple[float, float, bool, int]]:
    """(scale before, after, skipped, count) of a poisoned step and a good one, by stage. Runs on ranks."""
    found = []
    for stage in ALL_STAGES:
        model, optimizer = shard_job(group, JOB, stage, precision="fp16", loss_scale=LossScale(initial=256.0))
        for factor in (math.inf, 1.0):
            before = optimizer.loss_scale
            train_step(group, model, optimizer, 0, factor)
            found.append((before, optimizer.loss_scale, optimizer.skipped, optimizer.skipped_steps))
    return found


def test_an_inf_halves_the_scale_in_fp16(pool):
    """In fp16 the loss scale is halved on every rank, once, and the next step is taken at the new scale."""
    for found in pool.run(2, skip_in_fp16):
        assert found == [(256.0, 128.0, True, 1), (128.0, 128.0, False, 1)] * len(ALL_STAGES)


def skip_too_often(group: Any, precision: str) -> tuple[int, str]:
    """How many poisoned steps in a row were skipped before one raised, and what it said. Runs on ranks."""
    model, optimizer = shard_job(group, JOB, 3, precision=precision, max_skipped=3)
    train_step(group, model, optimizer, 0, math.nan)
    train_step(group, model, optimizer, 0)  # a good step: the count of skips in a row starts again
    for taken in range(10):
        try:
            train_step(group, model, optimizer, 0, math.nan)
        except ShardError as error:
            return taken, str(error)
    return 10, ""


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_skipping_too_often_raises(pool, precision):
    """Outside fp16, skips in a row mean divergence: every rank raises, naming the parameter and rank."""
    for taken, message in pool.run(2, skip_too_often, precision):
        assert taken in (2, 3), f"raised after {taken} skips in a row with max_skipped=3"
        assert "blocks.1.gain" in message
        assert re.search(r"rank\W*1\b", message), message


def skip_often_in_fp16(group: Any) -> int:
    """How many poisoned steps in a row are skipped in fp16 with max_skipped=2, out of 6. Runs on ranks."""
    model, optimizer = shard_job(group, JOB, 3, precision="fp16", max_skipped=2)
    for _ in range(6):
        train_step(group, model, optimizer, 0, math.nan)
    return optimizer.skipped_steps


def test_fp16_may_skip_as_often_as_it_needs(pool):
    """In fp16, finding the scale takes many skips in a row; they are no error."""
    assert pool.run(2, skip_often_in_fp16) == [6, 6]


def plain_backward_in_fp16(group: Any) -> str:
    model, optimizer = shard_job(group, JOB, 3, precision="fp16")
    model(batch(0, 0)).square().mean().backward()
    return message_of(ShardError, optimizer.step)


def test_a_plain_backward_in_fp16_is_refused(pool):
    """A loss that was never scaled may underflow silently: the step raises and names `optimizer.backward`."""
    for message in pool.run(2, plain_backward_in_fp16):
        assert "optimizer.backward" in message
