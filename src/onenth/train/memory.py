"""Bytes of a run beside those it holds: what it would hold unsharded, and the most that it ever used."""

from __future__ import annotations

import resource
import sys

import torch
from torch import nn

from onenth.config import Precision
from onenth.costs import FlatBuffer, ItemSizes, Placement, model_state_bytes


def unsharded_bytes(model: nn.Module, precision: Precision) -> dict[str, int]:
    """Bytes of each model state if one rank held all of it, by the equations. Ask before sharding."""
    flats = [
        FlatBuffer(
            numels=tuple(p.numel() for p in model.parameters() if p.requires_grad is trainable),
            parameter_itemsize=precision.parameters.itemsize,
            gradient_itemsize=precision.gradients.itemsize,
            trainable=trainable,
        )
        for trainable in (True, False)
    ]
    held = model_state_bytes(flats, Placement(stage=0, ranks=1), ItemSizes.of(precision), backwards=1)
    return {state: count for (state, _), count in held.items()}


def peak_bytes(device: torch.device) -> int:
    """The most that this process ever used: allocated on its accelerator, or resident memory on the CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
