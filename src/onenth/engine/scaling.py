"""Dynamic loss scaling: keeps fp16 gradients out of the range where they vanish or overflow."""

from __future__ import annotations

from onenth.config import LossScale


class LossScaler:
    """The running scale of fp16 losses. scale: 1.0 where nothing is scaled."""

    def __init__(self, rule: LossScale, *, active: bool) -> None:
        self.rule, self.active = rule, active
        self.scale = rule.initial if active else 1.0
        self.good, self.bad = 0, 0

    def update(self, *, overflowed: bool) -> None:
        """A step was taken, or skipped because the scaled gradients overflowed."""
        if not self.active:
            return
        if overflowed:
            self.good, self.bad = 0, self.bad + 1
            if self.bad >= self.rule.hysteresis:
                self.scale = max(self.scale * self.rule.backoff, self.rule.minimum)
                self.bad = 0
            return
        self.good, self.bad = self.good + 1, 0
        if self.good >= self.rule.growth_interval:
            self.scale, self.good = self.scale * self.rule.growth, 0
