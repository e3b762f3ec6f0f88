"""Ranks whose control flow truly diverges: an error in bounded time, no hang, no swapped messages."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from onenth.errors import TransferError
from tests.distributed.reports.harness import Job, Stack, batch, message_of, shard_job

TIMEOUT = 1.0  # seconds that a transfer may wait


class Routed(Stack):
    """Runs the blocks that `route` names; all blocks have one size, so that a swap would go unnoticed."""

    def forward(self, x: Tensor, route: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        x = self.embed(x)
        for index in route:
            x = self.blocks[index](x)
        return self.head(x)


def routed() -> nn.Module:
    return Routed()


def another_block(model: nn.Module, optimizer: Any, rank: int) -> None:
    """Rank 1 runs block 2 where the others run block 1."""
    optimizer.backward(model(batch(0, rank), (0, 2) if rank == 1 else (0, 1)).square().mean())
    optimizer.step()


def a_block_less(model: nn.Module, optimizer: Any, rank: int) -> None:
    """Rank 1 leaves block 1 out."""
    optimizer.backward(model(batch(0, rank), (0, 2) if rank == 1 else (0, 1, 2)).square().mean())
    optimizer.step()


def a_forward_more(model: nn.Module, optimizer: Any, rank: int) -> None:
    """Rank 1 evaluates by itself before the step."""
    for _ in range(1 + rank):
        loss = model(batch(0, rank)).square().mean()
    optimizer.backward(loss)
    optimizer.step()


def no_backward(model: nn.Module, optimizer: Any, rank: int) -> None:
    """Rank 1 skips the backward of its batch and goes straight to the next."""
    loss = model(batch(0, rank)).square().mean()
    if rank != 1:
        optimizer.backward(loss)
        optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(model(batch(1, rank)).square().mean())
    optimizer.step()


def a_batch_less(model: nn.Module, optimizer: Any, rank: int) -> None:
    """Rank 1's data ends early: it comes to the next transfer never."""
    for step in range(1 if rank == 1 else 2):
        optimizer.backward(model(batch(step, rank)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def a_step_less(model: nn.Module, optimizer: Any, rank: int) -> None:
    """Rank 1 accumulates over two backwards, the others over one."""
    for step in range(2):
        optimizer.backward(model(batch(step, rank)).square().mean())
        if rank != 1 or step == 1:
            optimizer.step()
            optimizer.zero_grad()


def diverge(
    group: Any, stage: int, act: Callable[[nn.Module, Any, int], None], prefetch: bool
) -> tuple[str | None, float]:
    """The `TransferError` that this rank raised, if any, and the seconds until then. Runs on ranks."""
    model, optimizer = shard_job(group, Job(routed), stage, timeout=TIMEOUT, prefetch=prefetch)
    start = time.monotonic()
    try:
        act(model, optimizer, dist.get_rank(group))
    except TransferError as error:
        return str(error), time.monotonic() - start
    return None, time.monotonic() - start


def assert_named_in_time(results: list[tuple[str | None, float]]) -> None:
    """Rank 0 fails in time; whoever fails names a rank, a unit and the call that it waited in."""
    assert results[0][0], "rank 0 went on without the others"
    for message, seconds in results:
        assert seconds < 4 * TIMEOUT + 1.0, f"took {seconds:.1f} s: {message}"
        if message is not None:
            assert re.search(r"\brank", message), message
            assert re.search(r"\b(blocks\.\d|embed|head|root)", message), message
            assert re.search(r"gather|exchange|sums|step", message), message


@pytest.mark.parametrize("act", [another_block, a_block_less, a_forward_more, no_backward, a_batch_less])
def test_divergence_at_stage_3(pool, act):
    """Ranks that run other units, or another number of forwards or backwards, fail in time and say where."""
    assert_named_in_time(pool.run(2, diverge, 3, act, True, breaks_group=True))


def test_divergence_without_prefetch(pool):
    """The same where every gather starts when its unit is needed."""
    assert_named_in_time(pool.run(2, diverge, 3, another_block, False, breaks_group=True))


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("act", [no_backward, a_batch_less, a_step_less])
def test_divergence_below_stage_3(pool, stage, act):
    """With whole parameters a forward needs nobody, but backwards and steps have to meet."""
    results = pool.run(2, diverge, stage, act, True, breaks_group=True)
    assert results[0][0], "rank 0 went on without the others"
    assert all(seconds < 4 * TIMEOUT + 1.0 for _, seconds in results), results


def test_divergence_of_one_rank_in_three(pool):
    """The ranks that agree with each other fail in time as well."""
    assert_named_in_time(pool.run(3, diverge, 3, another_block, True, breaks_group=True))


def another_model(group: Any) -> str:
    """The message of `shard` where rank 1's model has one block more. Runs on ranks."""
    job = Job(deeper if dist.get_rank(group) == 1 else routed)
    return message_of(RuntimeError, lambda: shard_job(group, job, 3, timeout=TIMEOUT))


def deeper() -> nn.Module:
    return Stack(depth=4)


def test_ranks_with_different_models(pool):
    """Another model on one rank is refused by `shard`, on every rank."""
    for message in pool.run(2, another_model, breaks_group=True):
        assert "rank" in message, message
