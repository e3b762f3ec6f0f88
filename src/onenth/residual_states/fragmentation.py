"""Fragmentation: bytes that an allocator has reserved and nobody holds.

The C library's heap is the CPU's allocator. Before glibc 2.38 it hardly ever reuses an aligned block that was freed for
another of the same size (sourceware bug 14581), so gathering and releasing units of less than 32 MiB, above which
blocks are mapped one by one, makes the heap grow far beyond what is held. Giving its free pages back every few steps
keeps resident memory near what is live; the pages that are used again are faulted in again.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

EVERY = 8  # steps between two trims


class HeapTrimmer:
    """Gives free heap pages back to the system every `EVERY` steps, where tensors live in the C library's heap."""

    def __init__(self, device: torch.device) -> None:
        self.trim = _malloc_trim() if device.type == "cpu" else None
        self.steps = 0

    def step(self) -> None:
        """A step is over."""
        self.steps += 1
        if self.trim is not None and self.steps % EVERY == 0:
            self.trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim; None in another C library."""
    found = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if found is not None:
        found.argtypes, found.restype = [ctypes.c_size_t], ctypes.c_int
    return found
