"""Files that are whole or not there, and files that only ever grow by whole records."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Put `data` at `path` in one piece; if that fails, what was there before is still there."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush_directory(path.parent)


def flush_directory(directory: Path) -> None:
    """Make renames in `directory` last through a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Appended:
    """A file that grows by whole records: each is there once `write` returns, or the file is as it was before.

    new: it must not be there yet.
    """

    def __init__(self, path: Path, *, new: bool) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_EXCL if new else 0), 0o644)

    def write(self, record: bytes) -> None:
        """Append one record. Raises OSError, naming the file, if there is no room for all of it."""
        before = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, record)
            if written < len(record):  # the disk is full: this raises what the first call could not
                os.write(self._file, record[written:])
        except OSError as error:
            os.ftruncate(self._file, before)
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
