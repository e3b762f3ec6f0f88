"""Snapshots of CUDA memory, as `torch.cuda.memory._dump_snapshot` writes them: who holds what, and what would fit.

Source: PyTorch 2.13, torch/cuda/memory.py and torch/cuda/_memory_viz.py (how the file is read there). Sizes are in
bytes. `snapshot_file` reads the file, and runs nothing of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onenth.anatomy.snapshot_file import Frame, Key, SnapshotBlock, SnapshotSegment, TraceEntry, read
from onenth.residual_states.fragmentation import DEFAULTS, EMPTY_CACHE, Replay, Settings, replay

__all__ = ["Frame", "Holder", "Snapshot", "SnapshotBlock", "SnapshotSegment", "TraceEntry", "load"]

_TAKEN = ("segment_alloc", "segment_map")
_RETURNED = ("segment_free", "segment_unmap")


@dataclass(frozen=True)
class Holder:
    """What one place in the program holds: bytes of active blocks, and how many."""

    where: str
    bytes: int
    count: int


@dataclass(frozen=True)
class Snapshot:
    """A snapshot; traces: by device, oldest entry first; settings: the allocator's, as the file has them."""

    segments: tuple[SnapshotSegment, ...]
    traces: tuple[tuple[TraceEntry, ...], ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reserved(self) -> dict[Key, int]:
        """Bytes of segments by (device, pool, stream)."""
        return self._sum(lambda segment: segment.size)

    @property
    def allocated(self) -> dict[Key, int]:
        """Bytes of active blocks by (device, pool, stream)."""
        return self._sum(lambda segment: sum(block.size for block in segment.blocks if block.is_active))

    @property
    def requested(self) -> dict[Key, int]:
        """Bytes that were asked for in active blocks by (device, pool, stream)."""
        return self._sum(lambda segment: sum(block.requested for block in segment.blocks if block.is_active))

    @property
    def fragmentation(self) -> dict[Key, int]:
        """Bytes reserved beyond the active blocks by (device, pool, stream)."""
        allocated = self.allocated
        return {key: size - allocated[key] for key, size in self.reserved.items()}

    @property
    def failures(self) -> tuple[TraceEntry, ...]:
        """The "oom" entries of all traces."""
        return tuple(entry for trace in self.traces for entry in trace if entry.action == "oom")

    @property
    def recorded_settings(self) -> Settings:
        """The settings that the snapshot was made under, as far as it says them."""
        found = self.settings
        limit, threshold = found.get("max_split_size"), found.get("garbage_collection_threshold")
        steps = found.get("roundup_power2_divisions")
        return Settings(
            # Without a limit it is written as the largest number, or as -1.
            max_split_size=limit if isinstance(limit, int) and 0 < limit < 1 << 62 else None,
            garbage_collection_threshold=threshold if isinstance(threshold, float) and 0 < threshold < 1 else 0.0,
            expandable_segments=found.get("expandable_segments") is True,
            roundup_power2_divisions=_divisions(steps) if isinstance(steps, dict) else None,
        )

    def holders(self, count: int = 10) -> list[Holder]:
        """The `count` places that hold most bytes of active blocks: file:line function, of user code where there is."""
        sizes: Counter[str] = Counter()
        blocks: Counter[str] = Counter()
        for segment in self.segments:
            for block in segment.blocks:
                if block.is_active:
                    place = _place(block.frames)
                    sizes[place] += block.size
                    blocks[place] += 1
        return [Holder(place, size, blocks[place]) for place, size in sizes.most_common(count)]

    def reach(self, device: int | None = None) -> int | None:
        """Bytes that the allocator could have held when it last ran out: reserved then, and free on the device.

        None where the trace holds no "oom". device: as in `events`.
        """
        device = self._device(device)
        reserved = sum(segment.size for segment in self.segments if segment.device == device)
        for entry in reversed(self._trace(device)):
            if entry.action == "oom":
                return reserved + (entry.device_free or 0)
            if entry.action in _TAKEN:
                reserved -= entry.size
            elif entry.action in _RETURNED:
                reserved += entry.size
        return None

    def events(self, device: int | None = None) -> tuple[list[tuple[Hashable, int]], dict[Hashable, int]]:
        """What the trace did, as `onenth.residual_states.fragmentation.replay` takes it, and the keys' streams.

        device: None is the first one with a trace. First come the blocks that were there before the trace, in order of
        address: what free memory lay between them is not known. A request that failed is an allocation too, released at
        once. Segments that went back while nothing was being allocated are an empty_cache; others are the allocator's
        own doing. Private pools are taken for part of the common ones.
        """
        device = self._device(device)
        trace = self._trace(device)
        events: list[tuple[Hashable, int]] = []
        streams: dict[Hashable, int] = {}
        held: dict[int, Hashable] = {}
        ends = _end_of_life(trace)

        def take(key: Hashable, address: int, size: int, stream: int) -> None:
            if size:
                held[address], streams[key] = key, stream
                events.append((key, size))

        for address, (size, stream) in sorted(self._before(device, trace).items()):
            take(("before", address), address, size, stream)
        for index, entry in enumerate(trace):
            if entry.action == "alloc":
                take(index, entry.address, entry.size, entry.stream)
            elif entry.action == ends and entry.address in held:
                events.append((held.pop(entry.address), -1))
            elif entry.action == "oom" and entry.size:
                streams[index] = entry.stream
                events += [(index, entry.size), (index, -1)]
            elif entry.action in _RETURNED and _is_emptying(trace, index):
                events.append((EMPTY_CACHE, 0))
        return events, streams

    def replay(
        self, settings: Settings = DEFAULTS, *, capacity: int | None = None, device: int | None = None
    ) -> Replay:
        """Run the trace again under other settings; capacity: bytes that the allocator may reserve, None: any amount.

        The lists of the result follow `events`.
        """
        events, streams = self.events(device)
        return replay(events, settings, capacity=capacity, streams=streams)

    def would_fit(self, capacity: int, settings: Settings = DEFAULTS, *, device: int | None = None) -> bool:
        """Whether the trace, with every request in it that failed, fits in `capacity` bytes under these settings."""
        return self.replay(settings, capacity=capacity, device=device).out_of_memory_at is None

    def _sum(self, size: Callable[[SnapshotSegment], int]) -> dict[Key, int]:
        total: dict[Key, int] = {}
        for segment in self.segments:
            total[segment.key] = total.get(segment.key, 0) + size(segment)
        return dict(sorted(total.items()))

    def _device(self, device: int | None) -> int:
        traced = [index for index, trace in enumerate(self.traces) if trace]
        if device is None:
            device = traced[0] if traced else min((segment.device for segment in self.segments), default=0)
        return device

    def _trace(self, device: int) -> tuple[TraceEntry, ...]:
        return self.traces[device] if 0 <= device < len(self.traces) else ()

    def _before(self, device: int, trace: tuple[TraceEntry, ...]) -> dict[int, tuple[int, int]]:
        """Blocks that were active before the trace: (bytes, stream) by address; found by undoing it from its end."""
        live = {
            block.address: (block.requested or block.size, segment.stream)
            for segment in self.segments
            if segment.device == device
            for block in segment.blocks
            if block.is_active
        }
        ends = _end_of_life(trace)
        for entry in reversed(trace):
            if entry.action == "alloc":
                live.pop(entry.address, None)
            elif entry.action == ends:
                live[entry.address] = (entry.size, entry.stream)
        return live


def _divisions(steps: dict[str, Any]) -> dict[int, int] | None:
    """Rounding by interval, written as {"1": divisions, "2": ...}, from MiB on; None where there is none."""
    found = {
        int(start): step
        for start, step in steps.items()
        if start.isdecimal() and len(start) < 9 and int(start) and type(step) is int and 0 <= step < 1 << 20
    }
    return found if any(step > 1 for step in found.values()) else None


def _end_of_life(trace: tuple[TraceEntry, ...]) -> str:
    """The action after which a block may be reused; recordings may leave actions out."""
    actions = {entry.action for entry in trace}
    return "free_requested" if "free_completed" not in actions else "free_completed"


def _is_emptying(trace: tuple[TraceEntry, ...], index: int) -> bool:
    """Whether the run of returned segments that ends here served no allocation that follows it."""
    following = trace[index + 1].action if index + 1 < len(trace) else ""
    return following not in (*_RETURNED, *_TAKEN, "oom")


def _place(frames: tuple[Frame, ...]) -> str:
    """The innermost frame of user code, else of Python, else of anything."""
    for frame in (*filter(Frame.is_user, frames), *filter(Frame.is_python, frames), *frames):
        return str(frame)
    return "unknown: no stack was recorded"


def load(path: str | Path) -> Snapshot:
    """Read a snapshot's file. Raises AnatomyError: it is no snapshot, cut short, holds code, or a key is missing."""
    found = read(path)
    return Snapshot(found.segments, found.traces, found.settings)
