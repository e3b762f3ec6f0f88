"""The C library's heap, which is the CPU's allocator: how it is kept from growing beyond what is held.

Each aligned block is cut out of a larger one, and glibc (seen with 2.36; see sourceware bug 14581) puts the snippet of
less than 100 bytes that is left over into its per-thread cache, where it never joins its neighbours again. When the
block is freed, the snippet stands between it and the next free one, the hole is too small for the next aligned block of
the same size, and the heap grows. Without that cache, and with freed pages kept, a unit gathered again finds the pages
it was gathered into before: no page is faulted in, and resident memory stays near what is live.

The cache can be switched off only when a process starts: `launch` does it for the ranks that it starts. Elsewhere free
pages are given back every few steps, and faulted in again.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

EVERY = 8  # steps between two trims

_VARIABLE = "GLIBC_TUNABLES"
_NO_CACHE = "glibc.malloc.tcache_count=0"
SETTINGS = (
    _NO_CACHE,
    "glibc.malloc.mxfast=0",  # the other place where snippets are kept apart
    "glibc.malloc.mmap_threshold=1073741824",  # blocks up to 1 GiB lie in the heap, where their pages are kept
    "glibc.malloc.trim_threshold=2147483647",  # free bytes at the heap's end before they are given back
)


@contextmanager
def whole_blocks() -> Iterator[None]:
    """Processes started inside have a heap that reuses its blocks; settings that the user made are left alone."""
    before = os.environ.get(_VARIABLE)
    made = before.split(":") if before else []
    names = {setting.partition("=")[0] for setting in made}
    added = [setting for setting in SETTINGS if setting.partition("=")[0] not in names]
    os.environ[_VARIABLE] = ":".join(made + added)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


class HeapTrimmer:
    """Gives free heap pages back every `EVERY` steps, where tensors live in a heap that does not reuse its blocks."""

    def __init__(self, device: torch.device) -> None:
        reuses = _NO_CACHE in os.environ.get(_VARIABLE, "").split(":")
        self.trim = _malloc_trim() if device.type == "cpu" and not reuses else None
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
