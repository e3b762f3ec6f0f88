"""An embedding's gradient needs its indices only, so the unit is not gathered again for backward."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onenth
from onenth.partition import Partition
from tests.distributed.pool import Pool

ROWS, WIDTH = 50, 16


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return hidden.square().mean()


def gathered_elements(group: dist.ProcessGroup, activations: str) -> int:
    """What this rank sent for gathers in one step."""
    model = Looked()
    model, optimizer = onenth.shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), group=group, stage=3, activations=activations
    )
    optimizer.backward(model(torch.arange(ROWS)))
    optimizer.step()
    return model.__dict__["_onenth"].comm.counters["gather"]


def test_a_lookup_is_gathered_once(pool: Pool) -> None:
    """Blocks are gathered twice, the embedding once, and twice where its forward is run again in backward."""
    embed = Partition((ROWS * WIDTH,), 2).shard_numel
    block = Partition((WIDTH * WIDTH, WIDTH), 2).shard_numel
    assert pool.run(2, gathered_elements, "keep") == [embed + 2 * 2 * block] * 2
    assert pool.run(2, gathered_elements, "recompute") == [2 * embed + 2 * 2 * block] * 2
