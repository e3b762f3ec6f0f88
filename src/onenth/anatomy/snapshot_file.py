"""The file that `torch.cuda.memory._dump_snapshot` writes: its segments, blocks and traces, typed and checked.

Source: PyTorch 2.13, torch/cuda/memory.py (`_snapshot` documents the dictionary) and
torch/csrc/cuda/memory_snapshot.cpp (how it is written). Sizes are in bytes. The file is a pickle; `plain_pickle` builds
nothing but plain containers, numbers and strings from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from onenth.anatomy.plain_pickle import plain_pickle
from onenth.errors import AnatomyError

LARGEST = 4 << 30  # bytes of a file that is read at all: each byte may become sixty

Key = tuple[int, str, int]  # device, pool, stream

# PyTorch as installed or in its own repository, and the standard library.
_INTERNAL = re.compile(r"(-packages|/pytorch)/torch/|/lib/python3[.]\d+/(?!(site|dist)-packages/)")


@dataclass(frozen=True)
class Frame:
    """A line of a stack."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.name}"

    def is_python(self) -> bool:
        """Whether this is Python code, not C++."""
        return self.file.endswith(".py") or self.file.startswith("<")

    def is_user(self) -> bool:
        """Whether this is Python code outside PyTorch and the standard library."""
        if self.file.startswith("<"):  # typed in, or made by a program
            return self.file.startswith(("<stdin>", "<ipython"))
        return self.is_python() and not _INTERNAL.search(self.file.replace("\\", "/"))


@dataclass(frozen=True)
class SnapshotBlock:
    """A block of a segment; frames: where it was allocated, innermost first, if that was recorded."""

    address: int
    size: int
    requested: int
    state: str
    frames: tuple[Frame, ...] = ()

    @property
    def is_active(self) -> bool:
        """Whether it cannot be reused: a tensor holds it, or a stream has yet to pass its release."""
        return self.state != "inactive"


@dataclass(frozen=True)
class SnapshotSegment:
    """Memory taken from the device in one piece; pool: "small" or "large", with its id if it is a private pool."""

    device: int
    address: int
    size: int
    stream: int
    pool: str
    expandable: bool
    blocks: tuple[SnapshotBlock, ...]

    @property
    def key(self) -> Key:
        """Device, pool and stream."""
        return self.device, self.pool, self.stream


@dataclass(frozen=True)
class TraceEntry:
    """One action of the allocator.

    size: bytes; of an "oom", what was asked for. device_free: only of an "oom", what the device had left.
    time: microseconds since the epoch, where recorded.
    """

    action: str
    address: int
    size: int
    stream: int
    frames: tuple[Frame, ...] = ()
    time: int | None = None
    device_free: int | None = None


@dataclass(frozen=True)
class Contents:
    """What a file holds; traces: by device; settings: the allocator's, by name."""

    segments: tuple[SnapshotSegment, ...]
    traces: tuple[tuple[TraceEntry, ...], ...]
    settings: Mapping[str, Any]


def read(path: str | Path) -> Contents:
    """Read a snapshot's file. Raises AnatomyError, one line that says why."""
    path = Path(path)
    try:
        if not path.is_file():
            raise AnatomyError(f"{path}: there is no such file")
        if path.stat().st_size > LARGEST:
            raise AnatomyError(f"{path}: larger than the {LARGEST} bytes that are read at most")
        data = path.read_bytes()
    except OSError as error:
        raise AnatomyError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return _Reader(len(data)).contents(plain_pickle(data))
    except AnatomyError as error:
        raise AnatomyError(f"{path}: {error}") from error.__cause__


_T = TypeVar("_T")
_NO_FRAMES: list[Any] = []


class _Reader:
    """Checks the containers and makes a snapshot of them.

    left: how many more blocks, entries and frames may come. A file cannot describe more of them than it has bytes,
    unless its lists hold one another many times over.
    """

    def __init__(self, left: int) -> None:
        self.left = left
        self._frames: dict[int, tuple[Frame, ...]] = {}  # by list: stacks are shared

    def contents(self, root: object) -> Contents:
        """What the snapshot holds; raises AnatomyError naming what is missing or wrong."""
        if type(root) is not dict:
            raise AnatomyError(f"not a snapshot: a {type(root).__name__}, not a dict")
        traces = []
        for index, trace in enumerate(self._list(root, "device_traces", "the snapshot")):
            if type(trace) is not list:
                raise AnatomyError(f"device_traces[{index}]: a {type(trace).__name__}, not a list")
            where = f"device_traces[{index}]"
            traces.append(tuple(self._entry(entry, f"{where}[{at}]") for at, entry in enumerate(trace)))
        segments = tuple(
            self._segment(segment, f"segments[{index}]")
            for index, segment in enumerate(self._list(root, "segments", "the snapshot"))
        )
        settings = _get(root, "allocator_settings", dict, "the snapshot", {})
        return Contents(segments, tuple(traces), settings)

    def _segment(self, given: object, where: str) -> SnapshotSegment:
        found = self._dict(given, where)
        address = _count(found, "address", where)
        size = _count(found, "total_size", where)
        kind = _get(found, "segment_type", str, where)
        private = _get(found, "segment_pool_id", tuple, where, (0, 0))
        blocks = []
        end = address
        for index, block in enumerate(self._list(found, "blocks", where)):
            blocks.append(self._block(block, end, f"{where}.blocks[{index}]"))
            end += blocks[-1].size
        if end != address + size:
            raise AnatomyError(f"{where}: its blocks do not add up to its total_size")
        if not all(type(part) is int and 0 <= part < 1 << 64 for part in private):
            raise AnatomyError(f"{where}: 'segment_pool_id' is no pair of numbers")
        return SnapshotSegment(
            device=_count(found, "device", where),
            address=address,
            size=size,
            stream=_count(found, "stream", where, low=-(1 << 63)),
            pool=f"{kind} of private pool {'.'.join(map(str, private))}" if any(private) else kind,
            expandable=_get(found, "is_expandable", bool, where, False),
            blocks=tuple(blocks),
        )

    def _block(self, given: object, address: int, where: str) -> SnapshotBlock:
        found = self._dict(given, where)
        size = _count(found, "size", where)
        requested = _count(found, "requested_size", where, size)
        state = _get(found, "state", str, where)
        return SnapshotBlock(address, size, requested, state, self._stack(found, where))

    def _entry(self, given: object, where: str) -> TraceEntry:
        found = self._dict(given, where)
        action = _get(found, "action", str, where)
        failed = action == "oom"
        return TraceEntry(
            action=action,
            address=0 if failed else _count(found, "addr", where),
            size=_count(found, "size", where),
            stream=_count(found, "stream", where, low=-(1 << 63)),
            frames=self._stack(found, where),
            time=_count(found, "time_us", where) if "time_us" in found else None,
            device_free=_count(found, "device_free", where) if failed else None,
        )

    def _stack(self, found: dict[str, Any], where: str) -> tuple[Frame, ...]:
        given = _get(found, "frames", list, where, _NO_FRAMES)
        if id(given) not in self._frames:
            frames = [self._dict(frame, f"{where}.frames[{index}]") for index, frame in enumerate(given)]
            self._frames[id(given)] = tuple(
                Frame(
                    _get(frame, "filename", str, f"{where}.frames"),
                    _count(frame, "line", f"{where}.frames", low=-(1 << 63)),
                    _get(frame, "name", str, f"{where}.frames"),
                )
                for frame in frames
            )
        return self._frames[id(given)]

    def _dict(self, given: object, where: str) -> dict[str, Any]:
        self.left -= 1
        if self.left < 0:
            raise AnatomyError("not a snapshot: its lists hold one another")
        if type(given) is not dict:
            raise AnatomyError(f"{where}: a {type(given).__name__}, not a dict")
        return given

    def _list(self, found: dict[str, Any], key: str, where: str) -> list[Any]:
        return _get(found, key, list, where)


_REQUIRED: Any = object()


def _get(found: dict[str, Any], key: str, kind: type[_T], where: str, default: _T = _REQUIRED) -> _T:
    """`found[key]`, which is a `kind`; its default where it is not there, and an error where it must be."""
    value = found.get(key, default)
    if value is _REQUIRED:
        raise AnatomyError(f"{where}: {key!r} is missing")
    if type(value) is not kind:
        raise AnatomyError(f"{where}: {key!r} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _count(found: dict[str, Any], key: str, where: str, default: int = _REQUIRED, low: int = 0) -> int:
    value = _get(found, key, int, where, default)
    if not low <= value < 1 << 64:
        raise AnatomyError(f"{where}: {key!r} is out of range")
    return value
