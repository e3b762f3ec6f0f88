"""Copies of a sharded model: inside `gathered` they are plain modules of their own."""

from __future__ import annotations

import copy
import pickle

import torch
import torch.distributed as dist

import onenth
from tests.distributed.interface.toys import batch, toy
from tests.distributed.pool import Pool


def check_copies(group: dist.ProcessGroup) -> None:
    inputs, _ = batch(0, 0)
    model = toy()
    model, _ = onenth.shard(
        model, torch.optim.AdamW(model.parameters()), group=group, stage=3, precision="fp32", activations="recompute"
    )
    expected = model(inputs).detach()
    with onenth.gathered(model):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for copied in copies:
        assert not any(key.startswith("_onenth") for part in copied.modules() for key in part.__dict__)
        assert torch.equal(copied(inputs), expected)
        copied(inputs).sum().backward()
        assert all(parameter.grad is not None for parameter in copied.parameters())
        for parameter in copied.parameters():
            parameter.data.zero_()
        assert not copied(inputs).any(), "the copy must compute with its own weights"
    assert torch.equal(model(inputs).detach(), expected)


def test_a_copy_made_inside_gathered_is_a_plain_model_of_its_own(pool: Pool) -> None:
    """deepcopy and pickle give modules without hooks that compute with, and train, their own weights."""
    pool.run(2, check_copies)
