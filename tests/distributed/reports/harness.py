"""Train one small job twice, in plain PyTorch over the ranks' micro-batches and sharded, and compare.

A job's parts are module-level functions, because the ranks import them by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import onenth

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from tests.distributed.pool import Pool

WIDTH = 8
TOLERANCE = 1e-5  # of each parameter's norm, in fp32
ALL_STAGES = (0, 1, 2, 3)


def batch(step: int, rank: int, *shape: int) -> Tensor:
    """fp32 noise of `shape` (default: 4 rows of `WIDTH`), the same whenever `step` and `rank` are."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(*(shape or (4, WIDTH)), generator=generator)


class Block(nn.Module):
    """A residual block of two linear layers, (…, WIDTH) -> (…, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Linear, blocks, linear: (…, WIDTH) -> (…, 5). Subclasses run the blocks in their own way."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 5)

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run_blocks(self.embed(x)))


def adamw(model: nn.Module) -> Optimizer:
    """Weight decay tells a missing gradient from zeros, and so do the moments."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(model: nn.Module) -> Optimizer:
    """For parameters whose true gradient is zero (biases of keys, or before a norm): Adam follows noise."""
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def square_loss(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    """One forward, one loss."""
    yield model(batch(step, rank)).square().mean()


def nothing(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """The default of `Job.after_step`."""


@dataclass(frozen=True)
class Job:
    """A small training.

    build: makes the model, under seed 0.
    losses: (model, step, rank) -> the losses of that rank's micro-batch, each backpropagated before the next
        is asked for. It may change the model on the way (unfreeze, evaluate), for every rank alike.
    optimizer: model -> optimizer.
    after_step: (model, optimizer, step), for what a user does to the optimizer between steps.
    steps: optimizer steps.
    retain_graph: as in `Tensor.backward`.
    """

    build: Callable[[], nn.Module] = Stack
    losses: Callable[[nn.Module, int, int], Iterator[Tensor]] = square_loss
    optimizer: Callable[[nn.Module], Optimizer] = adamw
    after_step: Callable[[nn.Module, Optimizer, int], None] = nothing
    steps: int = 3
    retain_graph: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()


def train_plain(job: Job, ranks: int) -> dict[str, Tensor]:
    """The state dict after plain PyTorch averaged the gradients of `ranks` copies in every step.

    A gradient that some copies lack counts as zeros there; one that all copies lack stays None.
    """
    copies = [job.model() for _ in range(ranks)]
    model = copies[0]
    optimizer = job.optimizer(model)
    for step in range(job.steps):
        for rank, copy in enumerate(copies):
            for loss in job.losses(copy, step, rank):
                loss.backward(retain_graph=job.retain_graph)
        for shared in zip(*(copy.parameters() for copy in copies), strict=True):
            gradients = [parameter.grad for parameter in shared if parameter.grad is not None]
            shared[0].grad = torch.stack(gradients).sum(0) / ranks if gradients else None
        optimizer.step()
        for copy in copies:
            copy.zero_grad()
            with torch.no_grad():
                for own, stepped in zip(copy.parameters(), model.parameters(), strict=True):
                    own.copy_(stepped)
        job.after_step(model, optimizer, step)
    return {name: value.detach() for name, value in model.state_dict().items()}


def shard_job(group: Any, job: Job, stage: int, **settings: Any) -> tuple[nn.Module, Any]:
    """The job's model and optimizer, sharded in fp32 unless `settings` say otherwise."""
    model = job.model()
    return onenth.shard(model, job.optimizer(model), group=group, stage=stage, **({"precision": "fp32"} | settings))


def train_steps(group: Any, job: Job, model: nn.Module, optimizer: Any, stage: int) -> None:
    """Run the job's steps on a sharded model; after each, nothing may be left gathered at stage 3."""
    rank = dist.get_rank(group)
    for step in range(job.steps):
        for loss in job.losses(model, step, rank):
            optimizer.backward(loss, retain_graph=job.retain_graph)
        optimizer.step()
        optimizer.zero_grad()
        if stage == 3:
            assert not (left := gathered_names(model)), f"left gathered after step {step}: {left}"
        job.after_step(model, optimizer, step)


def gathered_names(model: nn.Module) -> list[str]:
    """Parameters whose values can be read right now; a released one is a placeholder of NaN."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.numel() and not parameter.detach().isnan().all()
    ]


def deviation(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The worst ‖found - expected‖ / ‖expected‖ of any tensor, and its name; inf: not comparable."""
    if found.keys() != expected.keys():
        return float("inf"), f"keys: {sorted(found.keys() ^ expected.keys())}"
    worst = (0.0, "")
    for name, value in expected.items():
        if found[name].shape != value.shape or found[name].dtype != value.dtype:
            return float("inf"), f"{name}: {found[name].dtype} {tuple(found[name].shape)}"
        difference = (found[name].double() - value.double()).norm().item()
        relative = difference / (value.double().norm().item() or 1.0)
        if not relative <= worst[0]:  # NaN included
            worst = (relative, name)
    return worst


def deviations(group: Any, job: Job, stages: Sequence[int], settings: dict[str, Any]) -> dict[int, tuple[float, str]]:
    """On rank 0: stage -> deviation from plain PyTorch after the whole job. Runs on ranks."""
    expected = train_plain(job, dist.get_world_size(group))
    found = {}
    for stage in stages:
        model, optimizer = shard_job(group, job, stage, **settings)
        train_steps(group, job, model, optimizer, stage)
        state = onenth.full_state_dict(model)
        if state:
            found[stage] = deviation(state, expected)
    return found


def assert_same_training(
    pool: Pool, job: Job, *, ranks: Sequence[int] = (2,), stages: Sequence[int] = ALL_STAGES, **settings: Any
) -> None:
    """Sharded training ends with plain PyTorch's parameters and buffers, at each of `ranks` and `stages`."""
    for n in ranks:
        found = pool.run(n, deviations, job, stages, settings)[0]
        assert all(relative <= TOLERANCE for relative, _ in found.values()), f"{n} ranks, by stage: {found}"


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """The lines that onenth logs on this rank in the meantime."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("onenth"), Collect()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def message_of(error: type[BaseException], call: Callable[[], object]) -> str:
    """The message of the `error` that `call` raises; its absence is a failure."""
    try:
        call()
    except error as raised:
        return str(raised)
    raise AssertionError(f"no {error.__name__} was raised")
