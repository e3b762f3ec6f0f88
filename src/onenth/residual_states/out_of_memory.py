"""Running out of memory: the error that says so, whichever allocator it came from, and how much was asked for."""

from __future__ import annotations

import re
import time

import torch

from onenth.errors import OnenthError

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_ASKED = re.compile(r"tried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)


class OutOfMemoryError(OnenthError, torch.OutOfMemoryError):
    """A step did not fit: where, what held the bytes then, and what would have fitted. Also torch's own error.

    rank: the one that failed. asked: bytes of the allocation that failed; None: the allocator didn't say.
    moment: ns on the machine's monotonic clock, before the other ranks were told.
    """

    def __init__(self, message: str, rank: int = 0, asked: int | None = None, moment: int | None = None) -> None:
        super().__init__(message)
        self.rank, self.asked = rank, asked
        self.moment = time.monotonic_ns() if moment is None else moment

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.rank, self.asked, self.moment)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator could not give what was asked for: an accelerator's, or the CPU's."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error) and "memory" in str(error)
    )


def asked_bytes(error: BaseException) -> int | None:
    """Bytes that the allocator was asked for, as exactly as its message says it; None where it doesn't."""
    found = _ASKED.search(str(error))
    return None if found is None else round(float(found[1]) * _UNITS[found[2]])
