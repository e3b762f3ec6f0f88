"""Metrics of a run as JSON lines, and as TensorBoard files where TensorBoard is installed."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any, Protocol

from onenth.train.files import write_whole

Record = dict[str, Any]


class Sink(Protocol):
    """Where records go."""

    def write(self, record: Record) -> None:
        """Keep one record."""

    def close(self) -> None:
        """Finish."""


class JsonLines:
    """A file of JSON lines. Each is written at once, and taken back if the disk could not hold all of it.

    path: the file; what it holds up to step `after` is kept (None: it must not be there yet).
    """

    def __init__(self, path: Path, *, after: int | None = None) -> None:
        self._path = path
        if after is not None and path.exists():
            write_whole(path, _up_to(path, after))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(path, flags if after is not None else flags | os.O_EXCL, 0o644)

    def write(self, record: Record) -> None:
        """Append one line. Raises OSError, with the file as it was before, if there is no room."""
        line = (json.dumps(record) + "\n").encode()
        before = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written < len(line):
                os.write(self._file, line[written:])
        except OSError as error:
            os.ftruncate(self._file, before)
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _up_to(path: Path, step: int) -> bytes:
    """The lines of `path` that tell of steps up to `step`."""
    lines = path.read_bytes().splitlines(keepends=True)
    return b"".join(line for line in lines if json.loads(line).get("step", 0) <= step)


class TensorBoard:
    """TensorBoard event files: every number of a record, by its name."""

    def __init__(self, directory: Path, *, after: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if after is None else after + 1
        self._writer = SummaryWriter(str(directory), purge_step=purge)  # type: ignore[no-untyped-call]

    def write(self, record: Record) -> None:
        """Add the record's numbers."""
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, record.get("step", 0))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()  # type: ignore[no-untyped-call]


def sinks(output: Path, *, after: int | None) -> list[Sink]:
    """Where a run that writes to `output` puts metrics; `after`: the step it goes on from, None at the start."""
    found: list[Sink] = [JsonLines(output / "metrics.jsonl", after=after)]
    if importlib.util.find_spec("tensorboard") is not None:
        found.append(TensorBoard(output / "tensorboard", after=after))
    return found
