"""What a run measured, by job and system, and the ratios between systems."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TypeAlias

from benchmarks.worker import Timing


@dataclass
class Result:
    """One system on one job, over all rounds.

    seconds: round -> its median step; a step takes as long as its slowest rank.
    loss: after the first round, averaged over ranks; later, rounding makes trajectories drift apart.
    live_bytes: the most bytes of live tensors during a step, on the rank that has most.
    resident_bytes: the most resident bytes of a rank.
    problem: why it was skipped or stopped.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    loss: float | None = None
    live_bytes: int | None = None
    resident_bytes: int = 0
    problem: str | None = None

    def add(self, round_: int, ranks: list[Timing]) -> None:
        """Take in the timed steps of one round."""
        slowest = [max(step) for step in zip(*(rank.seconds for rank in ranks), strict=True)]
        self.seconds[round_] = median(slowest)
        if self.loss is None:
            self.loss = fmean(rank.loss for rank in ranks)
        self.resident_bytes = max(self.resident_bytes, *(rank.resident_bytes for rank in ranks))

    @property
    def step(self) -> float | None:
        """Seconds of a step: the median over rounds."""
        return median(self.seconds.values()) if self.seconds else None

    def time_ratio(self, other: Result) -> float | None:
        """Step time over `other`'s: the median over rounds of the ratio within a round."""
        shared = self.seconds.keys() & other.seconds.keys()
        return median(self.seconds[round_] / other.seconds[round_] for round_ in shared) if shared else None

    def bytes_ratio(self, other: Result) -> float | None:
        """Peak live bytes over `other`'s."""
        return self.live_bytes / other.live_bytes if self.live_bytes and other.live_bytes else None


#: job -> system -> result
Results: TypeAlias = dict[str, dict[str, Result]]
