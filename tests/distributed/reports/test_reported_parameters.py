"""Which parameters take part in a step: frozen, unfrozen, unused, unused on some ranks; and their groups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.distributed.reports.harness import (
    WIDTH,
    Block,
    Job,
    Stack,
    adamw,
    assert_same_training,
    batch,
    nothing,
    square_loss,
)


class Adapted(Block):
    """A frozen block with a small trainable adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.into = nn.Linear(WIDTH, 2, bias=False)
        self.out = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.out(self.into(x))


class Gated(Block):
    """A block with a parameter and a layer that are used only when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(WIDTH))
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, gated: bool = False) -> Tensor:
        x = super().forward(x)
        return x * self.extra + self.gate(x) if gated else x


class Skipping(Stack):
    """Runs the blocks that `order` names, block 1 gated or not, and a layer of the root's when asked to."""

    def __init__(self) -> None:
        super().__init__(Gated)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Parameter(torch.ones(3))

    def forward(
        self, x: Tensor, order: tuple[int, ...] = (0, 1, 2), gated: bool = False, with_side: bool = False
    ) -> Tensor:
        x = self.embed(x)
        for index in order:
            x = self.blocks[index](x, gated and index == 1)
        return self.head(x + self.side(x) if with_side else x)


class Mixture(nn.Module):
    """Three experts of one size; `order` says which run, and in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for index in order:
            x = self.experts[index](x)
        return x


class MixtureOfExperts(Stack):
    def __init__(self) -> None:
        super().__init__(Mixture, depth=2)

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, order)
        return self.head(x)


def adapted() -> nn.Module:
    return Stack(Adapted)


def frozen_start() -> nn.Module:
    """Embedding and first block frozen: no gradient ever reaches the first block's input."""
    model = Stack()
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


def skipping() -> nn.Module:
    return Skipping()


def mixture_of_experts() -> nn.Module:
    return MixtureOfExperts()


def trainable_only(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


def unfreezing(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    """The first block trains from step 1 on, and is frozen again at step 3."""
    model.blocks[0].requires_grad_(step in (1, 2))
    yield from square_loss(model, step, rank)


def add_first_block_early(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """While it is still frozen."""
    if step == 0:
        optimizer.add_param_group({"params": list(model.blocks[0].parameters()), "lr": 5e-3})


def add_first_block_late(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """After a step in which it had gradients that no optimizer held."""
    if step == 1:
        optimizer.add_param_group({"params": list(model.blocks[0].parameters()), "lr": 5e-3})


def unused_at_times(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    """A layer, and part of a block, are used in steps 0 and 3, block 2 in all but step 2; on all ranks."""
    order = (0, 1) if step == 2 else (0, 1, 2)
    used = step in (0, 3)
    yield model(batch(step, rank), order, gated=used, with_side=used).square().mean()


def unused_on_one_rank(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    """Rank 0 uses all of block 1 in steps 0 and 2, the others never do."""
    yield model(batch(step, rank), gated=rank == 0 and step != 1).square().mean()


def layer_used_on_one_rank(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    yield model(batch(step, rank), with_side=rank == 0 and step != 1).square().mean()


def block_skipped_on_one_rank(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    yield model(batch(step, rank), order=(0, 2) if rank == 1 else (0, 1, 2)).square().mean()


def blocks_in_opposite_order(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    yield model(batch(step, rank), order=(2, 1, 0) if rank == 1 else (0, 1, 2)).square().mean()


def one_expert_each(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    """Every rank runs another expert, and one expert is run by none."""
    yield model(batch(step, rank), order=((step + rank) % 3,)).square().mean()


def experts_in_opposite_order(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    yield model(batch(step, rank), order=(1, 0) if rank == 1 else (0, 1)).square().mean()


def three_groups(model: nn.Module) -> Optimizer:
    """Decayed, not decayed, and an empty group between them."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.2},
            {"params": []},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0, "lr": 3e-2},
        ],
        lr=1e-2,
    )


def halve_learning_rates(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def scheduled(model: nn.Module) -> Optimizer:
    """The scheduler is made before the model is sharded."""
    optimizer = three_groups(model)
    model.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return optimizer


def step_scheduler(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """The scheduler is made after the first step unless there is one."""
    if not hasattr(model, "scheduler"):
        model.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model.scheduler.step()


@pytest.mark.parametrize("build", [adapted, frozen_start])
@pytest.mark.parametrize("optimizer", [adamw, trainable_only])
def test_frozen_parameters(pool, build, optimizer):
    """Frozen parameters stay as they are, in the optimizer or not, and never keep a unit gathered."""
    assert_same_training(pool, Job(build, optimizer=optimizer))


@pytest.mark.parametrize(
    ("optimizer", "after_step"),
    [
        (adamw, nothing),
        (trainable_only, nothing),
        (trainable_only, add_first_block_early),
        (trainable_only, add_first_block_late),
    ],
    ids=["held_from_the_start", "never_held", "added_while_frozen", "added_after_a_backward"],
)
def test_frozen_and_later_unfrozen(pool, optimizer, after_step):
    """A block that is unfrozen, trained and frozen again, whenever the optimizer got to know it."""
    assert_same_training(pool, Job(frozen_start, unfreezing, optimizer, after_step, steps=4))


def test_unused_on_all_ranks(pool):
    """Parameters, layers and blocks unused by all get no weight decay, and their moments don't decay."""
    assert_same_training(pool, Job(skipping, unused_at_times, steps=4), ranks=(2, 3))


def test_unused_on_one_rank(pool):
    """Used on one rank only: zeros from the others, weight decay as always, and no rank waits for another."""
    assert_same_training(pool, Job(skipping, unused_on_one_rank), ranks=(2, 3))


@pytest.mark.parametrize("losses", [layer_used_on_one_rank, block_skipped_on_one_rank, blocks_in_opposite_order])
def test_units_that_run_differently_on_each_rank(pool, losses):
    """Below stage 3, gradients may complete in any order on each rank; equal sizes must not be swapped."""
    assert_same_training(pool, Job(skipping, losses), stages=(0, 1, 2))


@pytest.mark.parametrize("losses", [one_expert_each, experts_in_opposite_order])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_experts_that_differ_by_rank(pool, losses, activations):
    """Experts of one size, chosen by each rank for itself, at every stage."""
    assert_same_training(pool, Job(mixture_of_experts, losses), ranks=(2, 3), activations=activations)


@pytest.mark.parametrize("after_step", [nothing, halve_learning_rates])
def test_several_parameter_groups_and_an_empty_one(pool, after_step):
    """Each group's own hyperparameters hold, and changes to them between steps take effect."""
    assert_same_training(pool, Job(optimizer=three_groups, after_step=after_step))


@pytest.mark.parametrize("optimizer", [scheduled, three_groups], ids=["before_shard", "after_shard"])
def test_schedulers(pool, optimizer):
    """A scheduler made before the model was sharded still drives it, and so does one made after."""
    assert_same_training(pool, Job(optimizer=optimizer, after_step=step_scheduler))
