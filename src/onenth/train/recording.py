"""The memory anatomy of one step of a run: recorded on every rank, written by rank 0 as a page and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from onenth.anatomy.anatomy import Anatomy
from onenth.anatomy.record import record
from onenth.anatomy.view import page
from onenth.train.display import Display
from onenth.train.files import write_whole
from onenth.train.ranks import collect
from onenth.world import World

WARM_UP = 2  # steps before the recorded one: the first makes the optimizer's states, the second is the first like all


@dataclass(frozen=True)
class Recording:
    """Records step `at` of a run.

    path: where the page goes (run.html); ranks' recordings go beside it (run.rank0.json).
    """

    path: Path
    at: int
    model: nn.Module
    optimizer: Any
    world: World
    display: Display

    @contextmanager
    def around(self, index: int) -> Iterator[None]:
        """Around every step; records the one that is asked for."""
        if index != self.at:
            yield
            return
        with record(self.model, self.optimizer) as anatomy:
            yield
        self._write(anatomy)

    def _write(self, anatomy: Anatomy) -> None:
        anatomies = [Anatomy.from_dict(data) for data in collect(anatomy.to_dict())]
        if not anatomies:
            return
        for one in anatomies:
            write_whole(self.path.with_suffix(f".rank{one.rank}.json"), json.dumps(one.to_dict()).encode())
        write_whole(self.path, page(anatomies).encode())
        largest = max(anatomies, key=lambda one: one.peak.total)
        self.display.anatomy(self.path, self.at + 1, f"rank {largest.rank}: {largest.verdict()}")
