"""The pieces that a simulated CUDA caching allocator keeps: segments, cut into blocks, in pools of free ones.

Modelled on PyTorch 2.13, c10/cuda/CUDACachingAllocator.cpp; the constants are those of c10/core/AllocatorConfig.h.
This file knows how blocks are cut, joined, mapped and given back; `fragmentation` decides when.

Addresses only break ties between free blocks of one size. The real ones are the driver's choice: here each segment
lies above every earlier one, and no address is used twice.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB

MIN_BLOCK = 512  # every size is a multiple of it
SMALL_SIZE = MIB  # the largest request that the small pool serves
SMALL_SEGMENT = 2 * MIB  # a segment of the small pool, or a page of its expandable one
LARGE_SEGMENT = 20 * MIB  # likewise of the large pool, for requests below MIN_LARGE
MIN_LARGE = 10 * MIB  # requests from here on get a segment of their own size ...
ROUND_LARGE = 2 * MIB  # ... rounded up to a multiple of this

_ADDRESSES = 1 << 44  # bytes of an expandable segment's range where the device's size is not known: never filled


@dataclass(frozen=True)
class Block:
    """A range of a segment, in bytes; `key` names the allocation that holds it, None where it is free."""

    address: int
    size: int
    free: bool
    key: Hashable = None


@dataclass(frozen=True)
class Segment:
    """Memory taken from the device in one piece; of an expandable segment, one stretch of mapped pages."""

    address: int
    size: int
    stream: int
    pool: str  # "small" or "large"
    blocks: tuple[Block, ...]
    expandable: bool = False


@dataclass(frozen=True)
class Span:
    """The range of addresses that an expandable segment may grow into, and the size of its pages."""

    address: int
    size: int
    page: int


class Piece:
    """A block as the allocator keeps it: it knows its neighbours in the segment, and changes in place."""

    __slots__ = ("address", "born", "key", "mapped", "next", "prev", "requested", "size", "span", "stream", "used")

    def __init__(self, address: int, size: int, stream: int, span: Span | None = None) -> None:
        self.address, self.size, self.stream, self.span = address, size, stream, span
        self.used = False
        self.mapped = True  # False: addresses of an expandable segment without memory behind them
        self.key: Hashable = None
        self.requested = 0
        self.born = 0  # the pool's lookups when this became free
        self.prev: Piece | None = None
        self.next: Piece | None = None

    def insert_after(self, before: Piece) -> None:
        """Become the neighbour behind `before`."""
        self.prev, self.next = before, before.next
        if before.next is not None:
            before.next.prev = self
        before.next = self

    def insert_before(self, after: Piece) -> None:
        """Become the neighbour in front of `after`."""
        self.prev, self.next = after.prev, after
        if after.prev is not None:
            after.prev.next = self
        after.prev = self

    def is_whole(self) -> bool:
        """Whether this is all of its segment."""
        return self.prev is None and self.next is None

    def room(self) -> int:
        """Bytes here and in the unmapped addresses behind, into which an expandable segment can grow."""
        following = self.next
        return self.size if following is None or following.mapped else self.size + following.size


class Device:
    """The memory that segments are taken from: `capacity` bytes, or any amount where that is None."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.reserved = 0
        self._top = ROUND_LARGE

    def grab(self, size: int) -> bool:
        """Take `size` bytes; False, and nothing is taken, where they are not there."""
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        return True

    def place(self, size: int) -> int:
        """The address of `size` bytes of new addresses."""
        address = self._top
        self._top += -(-size // ROUND_LARGE) * ROUND_LARGE
        return address

    def span(self, page: int) -> Span:
        """The range for a new expandable segment: 9/8 of the device, so that pages can move within it."""
        size = _ADDRESSES if self.capacity is None else self.capacity + self.capacity // 8
        size = max(-(-size // page), 1) * page
        return Span(self.place(size), size, page)


class Pool:
    """The free blocks of the small or the large pool, by stream; page: bytes of an expandable segment's page."""

    def __init__(self, name: str, device: Device, page: int) -> None:
        self.name, self.device, self.page = name, device, page
        self.lookups = 0  # counted only when garbage is collected: the clock of the blocks' ages
        self.free: defaultdict[int, list[tuple[int, int, Piece]]] = defaultdict(list)  # by size, then address
        self.unmapped: defaultdict[int, list[tuple[int, Piece]]] = defaultdict(list)  # by address

    def put(self, piece: Piece) -> None:
        """A block is free."""
        piece.born = self.lookups
        insort(self.free[piece.stream], (piece.size, piece.address, piece))

    def take(self, piece: Piece) -> None:
        """A block is no longer free, or is about to change its size or address."""
        found = self.free[piece.stream]
        del found[bisect_left(found, (piece.size, piece.address))]  # the shorter tuple sorts first

    def fit(self, size: int, stream: int, expandable: bool) -> Piece | None:
        """The free block of the stream that fits best; it stays in the pool.

        A block at the end of an expandable segment counts as large as it can grow, so others are used up first.
        """
        found = self.free[stream]
        at = bisect_left(found, (size,))
        if at == len(found):
            return None
        if expandable:
            while at + 1 < len(found) and found[at + 1][2].room() < found[at][2].room():
                at += 1
        return found[at][2]

    def cut(self, piece: Piece, size: int) -> Piece:
        """Cut the first `size` bytes off a block that is in no list; the rest becomes a free block."""
        front = Piece(piece.address, size, piece.stream, piece.span)
        front.insert_before(piece)
        piece.address += size
        piece.size -= size
        self.put(piece)
        return front

    def join(self, piece: Piece, other: Piece | None) -> None:
        """Absorb a neighbour if it is as free and as mapped as the block, which itself is in no list."""
        if other is None or other.used or other.mapped is not piece.mapped:
            return
        if other.mapped:
            self.take(other)
        else:
            self._drop_unmapped(other)
        if piece.prev is other:
            piece.address, piece.prev = other.address, other.prev
            if other.prev is not None:
                other.prev.next = piece
        else:
            piece.next = other.next
            if other.next is not None:
                other.next.prev = piece
        piece.size += other.size

    def give_back(self, piece: Piece) -> None:
        """Return a whole segment to the device."""
        self.take(piece)
        self.device.reserved -= piece.size

    def give_back_all(self) -> None:
        """Return every segment that no block is used of, and every page of expandable ones that is wholly free."""
        listed = [piece for stream in sorted(self.free) for _, _, piece in self.free[stream]]
        for piece in listed:
            if piece.span is not None:
                self._unmap(piece, piece.span)
            elif piece.is_whole():
                self.give_back(piece)

    def extend(self, size: int, stream: int) -> Piece | None:
        """A block of `size` bytes or more in an expandable segment, out of the lists; None where memory runs out.

        Pages that were mapped before it ran out stay, as free memory.
        """
        piece = self._stretch(size, stream)
        if not piece.mapped and not self._map(piece, min(piece.size, size)):
            return None
        while piece.size < size:
            following = piece.next
            assert following is not None
            if not self._map(following, min(size - piece.size, following.size)):
                return None
            piece = following
        self.take(piece)
        return piece

    def _stretch(self, size: int, stream: int) -> Piece:
        """The lowest block that, with the free and unmapped ones behind it, has addresses for `size` bytes."""
        for _, unmapped in self.unmapped[stream]:
            before = unmapped.prev
            piece = unmapped if before is None or before.used else before
            found, at = 0, piece
            while found < size and not at.used:
                found += at.size
                if at.next is None:
                    break
                at = at.next
            if found >= size:
                return piece
        span = self.device.span(self.page)
        piece = Piece(span.address, span.size, stream, span)
        piece.mapped = False
        self._add_unmapped(piece)
        return piece

    def _map(self, piece: Piece, size: int) -> bool:
        """Put memory behind the first `size` bytes of an unmapped block, in whole pages; False where there is none."""
        size = -(-size // self.page) * self.page
        if not self.device.grab(size):
            return False
        self._drop_unmapped(piece)
        piece.mapped = True
        if size < piece.size:
            rest = Piece(piece.address + size, piece.size - size, piece.stream, piece.span)
            rest.mapped = False
            rest.insert_after(piece)
            self._add_unmapped(rest)
            piece.size = size
        self.join(piece, piece.prev)
        self.join(piece, piece.next)
        self.put(piece)
        return True

    def _unmap(self, piece: Piece, span: Span) -> None:
        """Return the whole pages within a free block to the device; what is left of it stays free."""
        first = span.address + -(-(piece.address - span.address) // span.page) * span.page
        last = span.address + (piece.address + piece.size - span.address) // span.page * span.page
        if last <= first:
            return
        self.take(piece)
        end = piece.address + piece.size
        if first > piece.address:
            front = Piece(piece.address, first - piece.address, piece.stream, span)
            front.insert_before(piece)
            self.put(front)
        if end > last:
            rest = Piece(last, end - last, piece.stream, span)
            rest.insert_after(piece)
            self.put(rest)
        piece.address, piece.size, piece.mapped = first, last - first, False
        self.device.reserved -= piece.size
        self.join(piece, piece.prev)
        self.join(piece, piece.next)
        if not piece.is_whole():  # else nothing is left of the segment
            self._add_unmapped(piece)

    def _add_unmapped(self, piece: Piece) -> None:
        insort(self.unmapped[piece.stream], (piece.address, piece))

    def _drop_unmapped(self, piece: Piece) -> None:
        listed = self.unmapped[piece.stream]
        del listed[bisect_left(listed, (piece.address,))]

    def pieces(self) -> Iterator[Piece]:
        """The free blocks."""
        for found in self.free.values():
            yield from (piece for _, _, piece in found)


def segments_of(pieces: dict[Piece, str]) -> list[Segment]:
    """The segments that blocks form, by address; pieces: every mapped block, with its pool's name."""
    made = []
    for head, pool in pieces.items():
        if head.prev is not None and head.prev.mapped:
            continue
        blocks, at = [], head if head.mapped else None
        while at is not None and at.mapped:
            blocks.append(Block(at.address, at.size, not at.used, at.key if at.used else None))
            at = at.next
        size = sum(block.size for block in blocks)
        made.append(Segment(head.address, size, head.stream, pool, tuple(blocks), head.span is not None))
    return sorted(made, key=lambda segment: segment.address)
