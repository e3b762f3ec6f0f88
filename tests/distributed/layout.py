"""Models whose units and flat buffers a test knows beforehand, so that equations need not ask the engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onenth
from onenth.config import PRECISIONS
from onenth.costs import FlatBuffer, ItemSizes, Unit

WIDE, ROWS = 384, 1  # weights outweigh activations by far, so that peaks are those of model states


class Wide(nn.Module):
    """Equal large blocks, some frozen, below a small root."""

    def __init__(self, frozen: Sequence[int] = (), blocks: int = 5) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDE))
        self.blocks = nn.ModuleList([nn.Linear(WIDE, WIDE) for _ in range(blocks)])
        self.bias = nn.Parameter(torch.zeros(WIDE))
        for index in frozen:
            self.blocks[index].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x + self.bias).float().square().mean()


def is_block(name: str, module: nn.Module) -> bool:
    """The `units` rule under which `units_of` holds."""
    return name.startswith("blocks.") and name.count(".") == 1


def input_of(number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """One row of random input."""
    return torch.randn(ROWS, WIDE, generator=torch.Generator().manual_seed(number)).to(dtype)


def shard_wide(group: dist.ProcessGroup, frozen: Sequence[int] = (), **settings: Any) -> tuple[Any, Any]:
    """The wide model and fused AdamW over its trainable parameters, sharded by block."""
    model = Wide(frozen)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    return onenth.shard(model, optimizer, group=group, units=is_block, **settings)


def units_of(model: nn.Module, precision: str) -> list[Unit]:
    """The flat buffers of each unit, the root first, when every trainable parameter is in the optimizer."""
    itemsize = PRECISIONS[precision].parameters.itemsize

    def unit(name: str) -> str:
        return ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""

    named = sorted(model.named_parameters(), key=lambda entry: unit(entry[0]))
    units = []
    for _, members in groupby(named, key=lambda entry: unit(entry[0])):
        parameters = [parameter for _, parameter in members]
        by_kind = {
            trainable: tuple(p.numel() for p in parameters if p.requires_grad == trainable)
            for trainable in (True, False)
        }
        units.append(
            [
                FlatBuffer(
                    numels=numels,
                    parameter_itemsize=itemsize,
                    gradient_itemsize=PRECISIONS[precision].gradients.itemsize,
                    trainable=trainable,
                    updated=trainable,
                )
                for trainable, numels in by_kind.items()
                if numels
            ]
        )
    return units


def sizes_of(precision: str, *, stepped: bool = True) -> ItemSizes:
    """Adam's item sizes; before the first step it has no states of its own."""
    if stepped:
        return ItemSizes.of(PRECISIONS[precision])
    return ItemSizes.of(PRECISIONS[precision], moments=(), scalars={})
