"""A sharded model that nobody refers to any more is freed."""

from __future__ import annotations

import gc
import weakref

import torch
import torch.distributed as dist

import onenth
from tests.distributed.interface.toys import batch, loss_of, toy
from tests.distributed.pool import Pool


def check_freed(group: dist.ProcessGroup) -> None:
    for stage in (0, 3):
        model = toy()
        optimizer = torch.optim.AdamW(model.parameters())
        model, sharded = onenth.shard(model, optimizer, group=group, stage=stage, precision="fp32")
        sharded.backward(loss_of(model, batch(0, group.rank())))
        sharded.step()
        references = [weakref.ref(entry) for entry in (model, sharded, model.__dict__["_onenth"])]
        del model, optimizer, sharded
        gc.collect()
        assert [reference() for reference in references] == [None, None, None], f"stage {stage}"


def test_a_dropped_model_is_freed(pool: Pool) -> None:
    """Model, optimizer and engine die with the last reference: no hook keeps them in a cycle nobody sees."""
    pool.run(2, check_freed)
