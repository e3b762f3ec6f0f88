"""Scratch: buffers that are needed by one unit after another during a backward, recycled instead of freed.

Units of one size follow each other, so the buffer that one gives back is the one that the next would allocate: no
more is held than without recycling, and the pages need not be faulted in again for every unit.
"""

from __future__ import annotations

import torch

from onenth.ledger import Ledger


class Scratch:
    """Free buffers by (elements, dtype), all of one device and one label in the ledger."""

    def __init__(self, device: torch.device, ledger: Ledger, state: str) -> None:
        self.device, self.ledger, self.state = device, ledger, state
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer (numel,) with anything in it. If none of this size is free, those of other sizes are given up."""
        free = self._free.get((numel, dtype))
        if free:
            return free.pop()
        self._free.clear()
        return self.ledger.register(torch.empty(numel, dtype=dtype, device=self.device), self.state)

    def give(self, buffer: torch.Tensor) -> None:
        """Nobody uses the buffer any more."""
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    def clear(self) -> None:
        """Give the free buffers' bytes back."""
        self._free.clear()
