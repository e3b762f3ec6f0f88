"""Forwards that do not run once, in order, before each backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.reports.harness import WIDTH, Block, Job, Stack, assert_same_training, batch


class Route(Stack):
    """Runs the blocks of `route` one after another, each called through `call` (plainly, or checkpointed)."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__(CanFail)
        self.call = call

    def forward(self, x: Tensor, route: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        x = self.embed(x)
        for index in route:
            x = self.call(self.blocks[index], x) if self.call else self.blocks[index](x)
        return self.head(x)


class CanFail(Block):
    """A block that raises halfway when told to, and skips its second half when told to."""

    failing = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.failing:
            raise ArithmeticError("as told")
        return x + self.down(torch.nn.functional.gelu(hidden))


class SegmentCheckpoint(Stack):
    """One checkpointed segment spans two blocks and part of the root's own forward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def segment(self, x: Tensor) -> Tensor:
        return self.blocks[1](torch.tanh(self.blocks[0](x)))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.segment, self.embed(x), use_reentrant=self.use_reentrant)
        return self.head(self.blocks[2](x))


def early_stopped(block: nn.Module, x: Tensor) -> Tensor:
    """Recompute stops inside `block`, as soon as the last saved tensor is back."""
    return checkpoint(block, x, use_reentrant=False)


def recomputed_in_full(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False, early_stop=False)


def reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def route() -> nn.Module:
    return Route()


def route_early_stopped() -> nn.Module:
    return Route(early_stopped)


def route_recomputed_in_full() -> nn.Module:
    return Route(recomputed_in_full)


def route_reentrant() -> nn.Module:
    return Route(reentrant)


def segment_reentrant() -> nn.Module:
    return SegmentCheckpoint(use_reentrant=True)


def segment() -> nn.Module:
    return SegmentCheckpoint(use_reentrant=False)


kept: list[Tensor] = []  # graphs that outlive the function that made them
BUILDS = [route, route_early_stopped, route_recomputed_in_full, route_reentrant]


def through(model: nn.Module, step: int, rank: int, route: tuple[int, ...] = (0, 1, 2)) -> Tensor:
    return model(batch(step, rank), route).square().mean()


def several_calls(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    """Block 0 runs three times and block 1 twice, with others in between and without."""
    yield through(model, step, rank, (0, 0, 1, 2, 0, 1))


def changing_order(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    """Another order in every step, the same on all ranks; the last step leaves a block out."""
    yield through(model, step, rank, [(0, 1, 2), (2, 0, 1), (1, 1, 0), (2, 1, 0), (2, 1)][step])


def two_forwards_one_backward(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    yield through(model, step, rank) + 0.5 * through(model, step + 50, rank, (2, 1))


def two_forwards_two_backwards(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    losses = [through(model, step, rank), through(model, step + 50, rank, (1, 2))]
    yield from losses if step % 2 else reversed(losses)


def forward_without_backward(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    """Another forward builds a graph that nobody ever uses, before or after the one that counts."""
    if step % 2:
        through(model, step + 50, rank)
    loss = through(model, step, rank)
    if not step % 2:
        kept.append(through(model, step + 50, rank))
    yield loss
    kept.clear()


def detached_block(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    """Block 0 runs with a graph that no loss reaches."""
    model.blocks[0](model.blocks[1](batch(step, rank)))
    yield through(model, step, rank, (1, 2))


def evaluation_between(
    model: nn.Module, step: int, rank: int, *, mode: Callable[[], contextlib.AbstractContextManager[object]]
) -> Iterator[Tensor]:
    """Forwards in eval, without a graph, before the forward, between it and its backward, and after."""
    evaluate(model, mode)
    loss = through(model, step, rank)
    evaluate(model, mode)
    yield loss
    evaluate(model, mode)


def evaluate(model: nn.Module, mode: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
    model.eval()
    with mode():
        assert through(model, 99, 0).isfinite()
    model.train()


def failing_forward(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    """In every step a forward fails halfway, before the good one or between it and its backward."""
    if step % 2:
        fail(model, step)
    loss = through(model, step, rank)
    if not step % 2:
        fail(model, step)
    yield loss


def fail(model: nn.Module, step: int) -> None:
    block = model.blocks[step % 3]
    block.failing = True
    with pytest.raises(ArithmeticError, match="as told"):
        model(batch(step, 0))
    block.failing = False


def plain_loss(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    yield model(batch(step, rank)).square().mean()


def sequence_of_calls(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    """The root's own forward runs several times on its own output, as in a recurrent rollout."""
    x = batch(step, rank)
    for _ in range(3):
        x = nn.functional.pad(model(x), (0, WIDTH - 5))
    yield x.square().mean()


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("losses", [several_calls, changing_order])
def test_calls_and_order_of_blocks(pool, build, losses):
    """Blocks called several times per forward and in another order each step, however recomputed."""
    assert_same_training(pool, Job(build, losses, steps=5))


@pytest.mark.parametrize("losses", [several_calls, changing_order, two_forwards_one_backward])
def test_calls_and_order_of_blocks_with_own_recompute(pool, losses):
    """The same with activations recomputed by unit, and prefetch on and off; on three ranks, too."""
    assert_same_training(pool, Job(route, losses, steps=5), activations="recompute")
    assert_same_training(pool, Job(route, losses, steps=5), ranks=[3], stages=[3], prefetch=False)


@pytest.mark.parametrize("build", [segment, segment_reentrant])
def test_a_checkpoint_over_two_blocks(pool, build):
    """One recomputed segment spans several units and the root's own operations."""
    assert_same_training(pool, Job(build, plain_loss))


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("losses", [two_forwards_one_backward, two_forwards_two_backwards])
def test_two_forwards(pool, build, losses):
    """Two graphs alive at once, for one backward over both or one backward each in either order."""
    assert_same_training(pool, Job(build, losses))


@pytest.mark.parametrize("losses", [forward_without_backward, detached_block])
def test_graphs_that_no_backward_reaches(pool, losses):
    """A graph that is dropped, or kept and never used, leaves no unit gathered and no gradient behind."""
    assert_same_training(pool, Job(route, losses))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_evaluation_between(pool, mode):
    """Eval forwards (no graph, inference mode, with a graph) between a forward and its backward."""
    assert_same_training(pool, Job(route, partial(evaluation_between, mode=mode)))


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_training_goes_on_after_an_exception_in_forward(pool, activations):
    """A forward that fails inside a block on all ranks leaves everything as it was."""
    assert_same_training(pool, Job(route, failing_forward), activations=activations)


def test_the_root_called_several_times(pool):
    """The whole model is called three times for one backward."""
    assert_same_training(pool, Job(route, sequence_of_calls))
