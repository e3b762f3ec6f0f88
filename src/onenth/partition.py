"""1/N arithmetic: where each parameter lies in its unit's flat buffer, and which rank owns which range. Integers only.

A flat buffer holds parameters one after another, each at a multiple of `ALIGNMENT` elements, and is cut into `ranks`
segments of one length, itself a multiple of `ALIGNMENT`; segment r is rank r's shard. Aligned starts keep GPU kernels
on their fast paths; aligned cuts keep the bits of vectorised optimizers independent of where a parameter is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

ALIGNMENT = 64  # elements


def align(numel: int) -> int:
    """Smallest multiple of `ALIGNMENT` that is at least `numel` (elements)."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Range:
    """Elements `start` to `stop` (exclusive) of parameter number `parameter`, counted in that parameter, on `rank`."""

    parameter: int
    rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class Partition:
    """The equal split of one flat buffer: parameter sizes in, ranges out.

    numels: elements of each parameter, in flat order.
    ranks: the number of equal segments.
    """

    numels: tuple[int, ...]
    ranks: int

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter starts in the flat buffer, in elements."""
        starts, position = [], 0
        for numel in self.numels:
            starts.append(position)
            position += align(numel)
        return tuple(starts)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one rank's segment, padding included."""
        used = sum(align(numel) for numel in self.numels)
        return align(-(-used // self.ranks))

    @property
    def flat_numel(self) -> int:
        """Elements of the whole flat buffer, padding included."""
        return self.shard_numel * self.ranks

    def ranges(self, rank: int) -> list[Range]:
        """What `rank` owns, in flat order; parameters of which it owns nothing are left out."""
        low, high = rank * self.shard_numel, (rank + 1) * self.shard_numel
        owned = []
        for index, (offset, numel) in enumerate(zip(self.offsets, self.numels, strict=True)):
            start, stop = max(offset, low), min(offset + numel, high)
            if start < stop:
                owned.append(Range(index, rank, start - offset, stop - offset))
        return owned

    def owners(self, parameter: int) -> list[Range]:
        """The ranges of one parameter over all ranks that hold some of it, in order."""
        offset, numel = self.offsets[parameter], self.numels[parameter]
        if numel == 0:
            return []
        first, last = offset // self.shard_numel, (offset + numel - 1) // self.shard_numel
        length = self.shard_numel
        return [
            Range(parameter, rank, max(rank * length - offset, 0), min((rank + 1) * length - offset, numel))
            for rank in range(first, last + 1)
        ]
