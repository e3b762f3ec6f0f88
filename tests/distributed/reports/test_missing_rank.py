"""A rank that never calls `shard`: the others say so in time."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onenth
from tests.distributed.pool import Pool


def shard_alone(group: dist.ProcessGroup) -> float:
    """Seconds until rank 0 gave up; rank 1 does nothing."""
    if group.rank() == 1:
        return 0.0
    model = nn.Linear(3, 3)
    start = time.monotonic()
    with pytest.raises(onenth.TransferError, match="rank 1"):
        onenth.shard(model, torch.optim.SGD(model.parameters()), group=group, timeout=0.5)
    return time.monotonic() - start


def test_a_rank_that_never_calls_shard_is_named(pool: Pool) -> None:
    """`shard` under `if rank == 0:` is an error within the configured time-out, not a hang until the group's."""
    seconds = pool.run(2, shard_alone, breaks_group=True)
    assert 0.4 < seconds[0] < 10
