"""What the equations say the model states hold, while gradients exist."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from onenth.breakdown import Key
from onenth.engine.engine import Engine
from onenth.engine.optimizer import ShardedOptimizer
from onenth.engine.report import equations, widening
from onenth.states import ModelState, Tier


def expected(engine: Engine | None, model: nn.Module, optimizer: Any, backwards: int) -> dict[Key, int]:
    """Bytes by (state, tier), at each state's own peak: `costs.py` for a sharded model, else sums over parameters.

    backwards: in a step.
    """
    if engine is not None:
        updater = optimizer.updater if isinstance(optimizer, ShardedOptimizer) else None
        counts = equations(engine, updater, backwards=backwards)
        if backwards > 1:
            counts[(str(ModelState.GRADIENTS), Tier.DEVICE)] += widening(engine)
        return {key: count for key, count in counts.items() if count}
    held: Counter[Key] = Counter()
    for parameter in model.parameters():
        held[(str(ModelState.PARAMETERS), Tier.DEVICE)] += parameter.nbytes
        if parameter.requires_grad and optimizer is not None:
            held[(str(ModelState.GRADIENTS), Tier.DEVICE)] += parameter.nbytes
    for state in ({} if optimizer is None else optimizer.state).values():
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor):
                held[(str(name), Tier.DEVICE)] += value.nbytes
    return dict(held)
