"""The pool of ranks itself: what a test may rely on."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import Pool, RankError


def _sum(group: Any, factor: int) -> tuple[int, int, float]:
    value = torch.tensor([float(factor * (dist.get_rank(group) + 1))])
    dist.all_reduce(value, group=group)
    return dist.get_rank(group), dist.get_world_size(group), value.item()


def _pid(group: Any) -> int:
    return os.getpid()


def _raise_on_rank_1(group: Any) -> None:
    if dist.get_rank(group) == 1:
        raise ValueError("no such thing")
    dist.barrier(group)


def _sleep_on_rank_1(group: Any) -> None:
    if dist.get_rank(group) == 1:
        time.sleep(60)


def _exit_on_rank_0(group: Any) -> None:
    if dist.get_rank(group) == 0:
        os._exit(7)


def _leave_a_send_behind(group: Any) -> None:
    if dist.get_rank(group) == 0:
        group.send([torch.ones(4)], 1, 0)


def _receive(group: Any) -> float:
    value = torch.zeros(4)
    if dist.get_rank(group) == 0:
        group.send([torch.full((4,), 2.0)], 1, 0).wait()
    else:
        group.recv([value], 0, 0).wait()
    return value.sum().item()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_runs_on_n_ranks(pool: Pool, n: int) -> None:
    """A function sees a group of exactly n ranks, and its results come back by rank."""
    total = sum(10.0 * (rank + 1) for rank in range(n))
    assert pool.run(n, _sum, 10) == [(rank, n, total) for rank in range(n)]


def test_processes_are_reused(pool: Pool) -> None:
    """Two runs meet the same processes: torch is imported once."""
    assert pool.run(2, _pid) == pool.run(3, _pid)[:2]


def test_an_exception_names_its_rank(pool: Pool) -> None:
    """One rank's exception arrives with its traceback, though the other hangs; then the pool works again."""
    with pytest.raises(RankError, match=r"(?s)rank 1 raised ValueError: no such thing.*_raise_on_rank_1"):
        pool.run(2, _raise_on_rank_1)
    assert len(pool.run(2, _pid)) == 2


def test_a_hang_names_its_rank(pool: Pool) -> None:
    """A rank that does not answer is named with the line it stands at, and killed."""
    with pytest.raises(RankError, match=r"(?s)rank 1 did not answer.*_sleep_on_rank_1"):
        pool.run(3, _sleep_on_rank_1, timeout=1)


def test_a_death_names_its_rank(pool: Pool) -> None:
    """A rank whose process ends is named with its exit code."""
    with pytest.raises(RankError, match="rank 0 died with exit code 7"):
        pool.run(2, _exit_on_rank_0)


def test_a_broken_group_is_replaced(pool: Pool) -> None:
    """After `breaks_group=True` the next run does not meet messages that nobody received."""
    pool.run(2, _leave_a_send_behind, breaks_group=True)
    assert pool.run(2, _receive) == [0.0, 8.0]
