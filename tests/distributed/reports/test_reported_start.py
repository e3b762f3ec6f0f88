"""How models come to `shard`: with different seeds, on the meta device, compiled."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onenth
from onenth.errors import ShardError
from tests.distributed.reports.harness import (
    ALL_STAGES,
    TOLERANCE,
    WIDTH,
    Block,
    Job,
    Stack,
    adamw,
    assert_same_training,
    captured_log,
    deviation,
    message_of,
    train_plain,
    train_steps,
)


class WithBuffer(Block):
    """A block with a persistent and a non-persistent buffer."""

    table: Tensor
    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(WIDTH))
        self.register_buffer("hidden", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill this module's own buffers; its linear layers fill themselves."""
        nn.init.normal_(self.table)
        self.hidden.fill_(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.table + self.hidden


class WithoutReset(Block):
    """A block with a parameter and a buffer of its own and no `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("hidden", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain * self.hidden


def with_buffer() -> nn.Module:
    return Stack(WithBuffer)


def without_reset() -> nn.Module:
    return Stack(WithoutReset)


def fill(module: nn.Module) -> None:
    """An `init` of the user's: every module's own parameters and buffers, by constants."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.constant_(tensor, 0.125 * (1 + tensor.ndim))


def start(group: Any, job: Job, build: Callable[[], nn.Module], stage: int, **arguments: Any) -> dict[str, Tensor]:
    """The state dict at rank 0 right after `shard` of whatever `build` makes. Runs on ranks."""
    model = build()
    onenth.shard(model, job.optimizer(model), group=group, stage=stage, precision="fp32", **arguments)
    return onenth.full_state_dict(model)


def train(group: Any, job: Job, build: Callable[[], nn.Module], stage: int, **arguments: Any) -> dict[str, Tensor]:
    """The state dict at rank 0 after the job's steps, started from whatever `build` makes. Runs on ranks."""
    model = build()
    model, optimizer = onenth.shard(
        model, job.optimizer(model), group=group, stage=stage, precision="fp32", **arguments
    )
    train_steps(group, job, model, optimizer, stage)
    return onenth.full_state_dict(model)


def seeded(job: Job, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return job.build()


def train_from_seeds(group: Any, same: bool) -> tuple[dict[int, tuple[float, str]], list[str]]:
    """Deviation from training started with rank 0's seed, by stage, and this rank's log. Runs on ranks."""
    job, rank = Job(with_buffer), dist.get_rank(group)
    expected = train_plain(job, dist.get_world_size(group))
    found = {}
    with captured_log() as lines:
        for stage in ALL_STAGES:
            if state := train(group, job, partial(seeded, job, 0 if same else rank), stage):
                found[stage] = deviation(state, expected)
    return found, lines


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_different_seeds(pool, ranks):
    """Rank 0's parameters and buffers win, and one line per `shard` says that the others differed."""
    results = pool.run(ranks, train_from_seeds, False)
    assert all(relative <= TOLERANCE for relative, _ in results[0][0].values()), results[0][0]
    lines = [line for _, lines in results for line in lines if re.search("differ", line)]
    assert len(lines) == len(ALL_STAGES), lines


def test_ranks_with_one_seed(pool):
    """Nothing is said where nothing differs."""
    for _, lines in pool.run(2, train_from_seeds, True):
        assert not [line for line in lines if "differ" in line]


def on_meta(job: Job) -> nn.Module:
    with torch.device("meta"):
        return job.build()


def train_from_meta_on_others(group: Any) -> dict[int, tuple[float, str]]:
    """Deviation by stage where all ranks but 0 hold the model on meta. Runs on ranks."""
    job = Job(with_buffer)
    expected = train_plain(job, dist.get_world_size(group))
    build = job.model if dist.get_rank(group) == 0 else partial(on_meta, job)
    states = {stage: train(group, job, build, stage) for stage in ALL_STAGES}
    return {stage: deviation(state, expected) for stage, state in states.items() if state}


@pytest.mark.parametrize("ranks", [2, 3])
def test_meta_on_all_ranks_but_the_first(pool, ranks):
    """Rank 0's values, non-persistent buffers included, reach ranks that never held the model."""
    found = pool.run(ranks, train_from_meta_on_others)[0]
    assert all(relative <= TOLERANCE for relative, _ in found.values()), found


def train_from_meta(group: Any) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """(Start, end) by stage, where every rank's model is on meta and fills itself. Runs on ranks."""
    job = Job(with_buffer)
    found = []
    for stage in ALL_STAGES:
        states = []
        for run in (start, train):
            torch.manual_seed(dist.get_rank(group))
            states.append(run(group, job, partial(on_meta, job), stage))
        found.append((states[0], states[1]))
    return found


def from_state(state: dict[str, Tensor]) -> nn.Module:
    model = with_buffer()
    model.load_state_dict(state)
    return model


def test_meta_on_all_ranks(pool):
    """`reset_parameters` of each module fills the model: initialised at every stage, trained as in plain."""
    for state, trained in pool.run(2, train_from_meta)[0]:
        assert all(value.isfinite().all() and value.std() > 0 for value in state.values())
        expected = train_plain(Job(partial(from_state, state)), 2)
        relative, name = deviation(trained, expected)
        assert relative <= TOLERANCE, f"{name} is off by {relative}"


def meta_without_reset(group: Any) -> tuple[str, list[dict[str, Tensor]]]:
    """The message without `init`, and what `init` fills in, by stage. Runs on ranks."""
    job = Job(without_reset)
    message = message_of(ShardError, lambda: start(group, job, partial(on_meta, job), 3))
    return message, [start(group, job, partial(on_meta, job), stage, init=fill) for stage in ALL_STAGES]


def test_meta_modules_that_cannot_fill_themselves(pool):
    """Modules without `reset_parameters` are listed, all of them; with `init` they are filled."""
    plain = without_reset()
    with torch.no_grad():
        for module in plain.modules():
            fill(module)
    results = pool.run(2, meta_without_reset)
    for message, _ in results:
        assert all(f"blocks.{index}" in message for index in range(3)), message
        assert "init" in message
    for state in results[0][1]:
        assert deviation(state, plain.state_dict()) == (0.0, "")


def compiled_units() -> nn.Module:
    """Blocks compiled in place; a backend without code generation keeps the test fast."""
    model = Stack(depth=2)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def train_compiled_after_shard(group: Any) -> dict[int, tuple[float, str]]:
    """Deviation by stage where blocks are compiled once the model is sharded. Runs on ranks."""
    job = Job(partial(Stack, depth=2))
    expected = train_plain(job, dist.get_world_size(group))
    found = {}
    for stage in (2, 3):
        model = job.model()
        model, optimizer = onenth.shard(model, adamw(model), group=group, stage=stage, precision="fp32")
        for block in model.blocks:
            block.compile(backend="aot_eager")
        train_steps(group, job, model, optimizer, stage)
        if state := onenth.full_state_dict(model):
            found[stage] = deviation(state, expected)
    return found


def test_units_compiled_before_shard(pool):
    """Compiled blocks see real parameters: the hooks stay out of the compiled graph."""
    assert_same_training(pool, Job(compiled_units), stages=(2, 3))


def test_units_compiled_after_shard(pool):
    """The same where blocks are compiled once they are sharded."""
    found = pool.run(2, train_compiled_after_shard)[0]
    assert all(relative <= TOLERANCE for relative, _ in found.values()), found
