"""Metrics of a run as JSON lines, and as TensorBoard files where TensorBoard is installed."""

from __future__ import annotations

import importlib.util
import json
import socket
import time
from pathlib import Path
from typing import Any, Protocol

from onenth.train.files import Appended, write_whole

Record = dict[str, Any]


class Sink(Protocol):
    """Where records go."""

    def write(self, record: Record) -> None:
        """Keep one record."""

    def close(self) -> None:
        """Finish."""


class JsonLines:
    """A file of JSON lines.

    path: the file; what it holds up to step `after` is kept (None: it must not be there yet).
    """

    def __init__(self, path: Path, *, after: int | None = None) -> None:
        if after is not None and path.exists():
            write_whole(path, _up_to(path, after))
        self._file = Appended(path, new=after is None)

    def write(self, record: Record) -> None:
        """Append one line, whole or not at all."""
        self._file.write((json.dumps(record) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _up_to(path: Path, step: int) -> bytes:
    """The lines of `path` that tell of steps up to `step`."""
    lines = path.read_bytes().splitlines(keepends=True)
    return b"".join(line for line in lines if json.loads(line).get("step", 0) <= step)


class TensorBoard:
    """A TensorBoard event file: every number of a record, by its name.

    Written here and not by TensorBoard's writer, whose thread would keep a full disk to itself.
    directory: where the file goes; what others in it hold after step `after` no longer counts.
    """

    def __init__(self, directory: Path, *, after: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._file = Appended(directory / name, new=True)
        self._records = RecordWriter(self._file)
        self._event = Event
        self._put(file_version="brain.Event:2")
        if after is not None:
            self._put(step=after + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, record: Record) -> None:
        """Add the record's numbers."""
        from torch.utils.tensorboard.summary import scalar

        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._put(step=record["step"], summary=scalar(name, value))

    def _put(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def sinks(output: Path, *, after: int | None) -> list[Sink]:
    """Where a run puts its metrics, below `output`; `after`: the step it goes on from, None at the start."""
    found: list[Sink] = [JsonLines(output / "metrics.jsonl", after=after)]
    if importlib.util.find_spec("tensorboard") is not None:
        found.append(TensorBoard(output / "tensorboard", after=after))
    return found
