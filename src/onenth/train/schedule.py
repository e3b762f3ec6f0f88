"""The learning rate: a linear warm-up, then half a cosine down to a tenth of the peak."""

from __future__ import annotations

import math

FLOOR = 0.1  # of the peak


def learning_rate(step: int, *, steps: int, peak: float, warmup: int) -> float:
    """Learning rate of step number `step` (from 0) out of `steps`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    return peak * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2)
