"""CUDA's caching allocator, simulated: what PyTorch reserves for a sequence of allocations, and whether they fit.

Source: PyTorch 2.13, c10/cuda/CUDACachingAllocator.cpp (the native backend), c10/core/AllocatorConfig.h (constants and
settings) and ATen/core/CachingHostAllocator.h (pinned memory). Sizes are in bytes throughout.

What is simulated: rounding, the two pools, best fit, splitting and joining, all settings that change where a block
goes, expandable segments, and running out of memory. What is not: private pools of CUDA graphs, `record_stream` (a
block is free when it is released), other processes on the device, and the addresses that the driver picks, which
decide between free blocks of equal size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Final

from onenth.errors import OnenthError
from onenth.residual_states.allocator_settings import DEFAULTS, Settings
from onenth.residual_states.blocks import (
    MIN_BLOCK,
    MIN_LARGE,
    ROUND_LARGE,
    SMALL_SEGMENT,
    SMALL_SIZE,
    Block,
    Device,
    Piece,
    Pool,
    Segment,
    segments_of,
)

__all__ = [
    "DEFAULTS",
    "EMPTY_CACHE",
    "Block",
    "CachingAllocator",
    "Replay",
    "Segment",
    "Settings",
    "SimulatedOutOfMemoryError",
    "pinned_bytes",
    "replay",
]


class _Mark(Enum):
    EMPTY_CACHE = auto()


#: The key of an event of 0 bytes that stands for `torch.cuda.empty_cache()`.
EMPTY_CACHE: Final = _Mark.EMPTY_CACHE


class SimulatedOutOfMemoryError(OnenthError, MemoryError):
    """An allocation does not fit, even after all that is cached was given back; every attribute is in bytes."""

    def __init__(self, requested: int, reserved: int, allocated: int, capacity: int) -> None:
        super().__init__(
            f"{requested} bytes do not fit: of {capacity}, {reserved} are reserved, {allocated} of them in use"
        )
        self.requested, self.reserved, self.allocated, self.capacity = requested, reserved, allocated, capacity


class CachingAllocator:
    """The allocator of one device.

    capacity: bytes that it may take from the device; None: as many as it asks for.
    """

    def __init__(self, settings: Settings = DEFAULTS, *, capacity: int | None = None) -> None:
        self.settings, self.capacity = settings, capacity
        self.allocated = 0  # bytes of blocks in use, as `torch.cuda.memory_allocated` counts
        self.requested = 0  # bytes that were asked for in them
        self._device = Device(capacity)
        self._small = Pool("small", self._device, SMALL_SEGMENT)
        self._large = Pool("large", self._device, settings.large_segment_size)
        self._collects = capacity is not None and settings.garbage_collection_threshold > 0
        self._used: dict[Hashable, tuple[Pool, Piece] | None] = {}

    @property
    def reserved(self) -> int:
        """Bytes of the segments, as `torch.cuda.memory_reserved` counts."""
        return self._device.reserved

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free block, of any stream; addresses without memory behind them do not count."""
        tops = (found[-1][0] for pool in (self._small, self._large) for found in pool.free.values() if found)
        return max(tops, default=0)

    def allocate(self, key: Hashable, size: int, stream: int = 0) -> None:
        """Allocate `size` bytes under the name `key`; 0 bytes take nothing. A key that is in use is a ValueError.

        Raises SimulatedOutOfMemoryError.
        """
        if key in self._used:
            raise ValueError(f"{key!r} is allocated already")
        if size < 0:
            raise ValueError(f"{key!r} cannot have {size} bytes")
        if size == 0:
            self._used[key] = None
            return
        rounded = self.settings.rounded(size)
        pool = self._small if rounded <= SMALL_SIZE else self._large
        piece = self._cached(pool, rounded, stream) or self._new(pool, rounded, stream)
        if piece is None:
            raise SimulatedOutOfMemoryError(size, self.reserved, self.allocated, self.capacity or 0)
        if self._splits(pool, rounded, piece.size - rounded):
            piece = pool.cut(piece, rounded)
        piece.used, piece.key, piece.requested = True, key, size
        self._used[key] = pool, piece
        self.allocated += piece.size
        self.requested += size

    def release(self, key: Hashable) -> None:
        """Release what `key` names, and join it with free neighbours. A key that is not in use is a KeyError."""
        held = self._used.pop(key)
        if held is None:
            return
        pool, piece = held
        piece.used = False
        self.allocated -= piece.size
        self.requested -= piece.requested
        pool.join(piece, piece.prev)
        pool.join(piece, piece.next)
        pool.put(piece)

    def empty_cache(self) -> None:
        """Give every unused segment, or page of an expandable one, back to the device."""
        self._large.give_back_all()
        self._small.give_back_all()

    def segments(self) -> list[Segment]:
        """The segments now, by address."""
        pieces = {piece: pool.name for pool in (self._small, self._large) for piece in pool.pieces()}
        pieces.update({held[1]: held[0].name for held in self._used.values() if held is not None})
        return segments_of(pieces)

    def _splits(self, pool: Pool, size: int, remaining: int) -> bool:
        """Whether a block that is `remaining` bytes larger than the rounded `size` is cut."""
        if pool is self._small or self.settings.expandable_segments:
            return remaining >= MIN_BLOCK
        return remaining > SMALL_SIZE and not self._is_oversize(size)

    def _is_oversize(self, size: int) -> bool:
        limit = self.settings.max_split_size
        return limit is not None and size >= limit

    def _is_near(self, size: int, found: int) -> bool:
        """Whether an unsplittable block of `found` bytes may serve the rounded `size`: only if nearly as large."""
        return self._is_oversize(size) and found < size + self.settings.max_non_split_rounding

    def _cached(self, pool: Pool, size: int, stream: int) -> Piece | None:
        """A free block for the rounded `size`, taken out of the pool; None where the best one may not serve it."""
        if self._collects:
            pool.lookups += 1
        piece = pool.fit(size, stream, self.settings.expandable_segments)
        if piece is None:
            return None
        if self._is_oversize(piece.size) and not self._is_near(size, piece.size):
            return None
        pool.take(piece)
        return piece

    def _new(self, pool: Pool, size: int, stream: int) -> Piece | None:
        """A block from the device; what is cached is given back if that is what it takes."""
        if self._collects:
            self._collect()
        piece = self._obtain(pool, size, stream)
        if piece is None and self._release_oversize(pool, size, stream):
            piece = self._obtain(pool, size, stream)
        if piece is None:
            self.empty_cache()
            piece = self._obtain(pool, size, stream)
        return piece

    def _obtain(self, pool: Pool, size: int, stream: int) -> Piece | None:
        if self.settings.expandable_segments:
            return pool.extend(size, stream)
        if size <= SMALL_SIZE:
            taken = SMALL_SEGMENT
        elif size < MIN_LARGE:
            taken = self.settings.large_segment_size
        else:
            taken = -(-size // ROUND_LARGE) * ROUND_LARGE
        return Piece(self._device.place(taken), taken, stream) if self._device.grab(taken) else None

    def _release_oversize(self, pool: Pool, size: int, stream: int) -> bool:
        """Give back blocks that are not split: one of the wanted size, else the largest until they add up to it."""
        limit = self.settings.max_split_size
        if limit is None:
            return False
        wanted = max(size, limit)
        single = pool.fit(wanted, stream, expandable=False)
        if single is not None and single.span is None:
            pool.give_back(single)
            return True
        released = 0
        for _, _, piece in reversed(list(pool.free[stream])):
            if released >= wanted or piece.size < limit:
                break
            if piece.span is None:
                released += piece.size
                pool.give_back(piece)
        return released >= wanted

    def _collect(self) -> None:
        """Above the threshold, give back the cached segments that are older than the average, oldest first."""
        target = self.reserved - int(self.settings.garbage_collection_threshold * (self.capacity or 0))
        pool = self._large
        whole = [piece for piece in pool.pieces() if piece.is_whole() and piece.span is None]
        while target > 0 and whole:
            ages = [pool.lookups - piece.born for piece in whole]
            bound = sum(ages) / len(ages)
            left = []
            for piece, age in zip(whole, ages, strict=True):
                if age < bound:
                    left.append(piece)
                    continue
                target -= piece.size
                pool.give_back(piece)
            if len(left) == len(whole):  # rounding of the average: no block is as old as it
                return
            whole = left


@dataclass(frozen=True)
class Replay:
    """What a sequence of events did; the lists hold bytes after each event, the one that did not fit being the last.

    out_of_memory_at: the event that did not fit, where one did not; what came after it is not replayed.
    """

    reserved: list[int]
    allocated: list[int]
    largest_free: list[int]
    out_of_memory_at: int | None

    @property
    def peak_reserved(self) -> int:
        """The most bytes reserved after any event."""
        return max(self.reserved, default=0)

    @property
    def peak_allocated(self) -> int:
        """The most bytes in use after any event."""
        return max(self.allocated, default=0)

    @property
    def peak_event(self) -> int | None:
        """The first event after which the peak was reserved; None without events."""
        return self.reserved.index(self.peak_reserved) if self.reserved else None

    @property
    def fragmentation(self) -> int:
        """Bytes reserved beyond those in use when the peak was reserved."""
        at = self.peak_event
        return 0 if at is None else self.reserved[at] - self.allocated[at]

    @property
    def largest_free_at_peak(self) -> int:
        """Bytes of the largest free block when the peak was reserved."""
        at = self.peak_event
        return 0 if at is None else self.largest_free[at]


def replay(
    events: Iterable[tuple[Hashable, int]],
    settings: Settings = DEFAULTS,
    *,
    capacity: int | None = None,
    streams: Mapping[Hashable, int] = MappingProxyType({}),
) -> Replay:
    """Run a new allocator through `events`: (key, bytes), allocated where positive, released where negative.

    An event of 0 bytes does nothing, unless its key is EMPTY_CACHE. A released key may be used again.
    streams: of the keys that are not on stream 0.
    """
    allocator = CachingAllocator(settings, capacity=capacity)
    reserved: list[int] = []
    allocated: list[int] = []
    largest: list[int] = []
    failed = None
    for index, (key, size) in enumerate(events):
        try:
            if size > 0:
                allocator.allocate(key, size, streams.get(key, 0))
            elif size < 0:
                allocator.release(key)
            elif key is EMPTY_CACHE:
                allocator.empty_cache()
        except SimulatedOutOfMemoryError:
            failed = index
        reserved.append(allocator.reserved)
        allocated.append(allocator.allocated)
        largest.append(allocator.largest_free)
        if failed is not None:
            break
    return Replay(reserved, allocated, largest, failed)


def pinned_bytes(size: int) -> int:
    """Bytes of page-locked host memory that `size` bytes take: the next power of two.

    Blocks are neither split nor joined; `pinned_max_round_threshold_mb`, which ends the rounding at a size, is not set.
    """
    if size < 0:
        raise ValueError(f"{size} bytes cannot be pinned")
    return 1 << (size - 1).bit_length() if size else 0
