"""Which sequences a step trains on: a function of seed, step and rank, so a resumed run needs no more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

_EPOCH_SEEDS = 1_000_003  # so that the epochs of neighbouring seeds are not shuffled alike


@dataclass
class Batches:
    """The training text in sequences, each once an epoch, in an order that the seed decides.

    tokens: (tokens,) int32; cut into windows of `sequence` tokens, the rest of the last one left out.
    ranks, rank: who shares a batch, and who this is.
    micro_batch: sequences that a rank runs at once.
    accumulation: micro-batches of each rank in a step.
    """

    tokens: torch.Tensor
    sequence: int
    seed: int
    ranks: int
    rank: int
    micro_batch: int
    accumulation: int
    _order: tuple[int, torch.Tensor] | None = field(default=None, init=False, repr=False)

    @property
    def windows(self) -> int:
        """Sequences in an epoch."""
        return self.tokens.numel() // self.sequence

    def of(self, step: int) -> Iterator[torch.Tensor]:
        """This rank's micro-batches in step number `step` (from 0): (micro_batch, sequence) int64 each."""
        for turn in range(self.accumulation):
            first = ((step * self.accumulation + turn) * self.ranks + self.rank) * self.micro_batch
            rows = [self._window(self._index(first + row)) for row in range(self.micro_batch)]
            yield torch.stack(rows).long()

    def _index(self, position: int) -> int:
        """The window at `position`, counted over all epochs and ranks."""
        epoch, place = divmod(position, self.windows)
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch * _EPOCH_SEEDS)
            self._order = (epoch, torch.randperm(self.windows, generator=generator))
        return int(self._order[1][place])

    def _window(self, index: int) -> torch.Tensor:
        return self.tokens[index * self.sequence : (index + 1) * self.sequence]
