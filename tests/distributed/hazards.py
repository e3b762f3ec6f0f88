"""What a fast machine hides: messages that leave late, and memory that is read after it was given up."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

_PERTURB = -6  # mallopt's M_PERTURB: glibc overwrites memory as it is freed
_ALL_ONES = 0xFF  # as bytes of fp32, bf16 or fp16: NaN


class _LateWork:
    """A message that reads its tensor and leaves only after a while, as it may on a loaded network."""

    def __init__(self, send: Callable[[], Any], seconds: float) -> None:
        self._send, self._seconds = send, seconds
        self._work: Any = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        time.sleep(self._seconds)
        self._work = self._send()

    def wait(self, *timeout: Any) -> bool:
        self._thread.join()
        return self._work.wait(*timeout)


@contextmanager
def late_messages(seed: int, most_seconds: float = 0.002) -> Iterator[list[float]]:
    """Point-to-point messages leave after random delays, each on its own; yields the list of delays so far.

    Messages without a tag stay in order, which is all that tells them apart.
    """
    isend, delays, chance = dist.isend, list[float](), random.Random(seed)

    def late(tensor: torch.Tensor, *args: Any, tag: int = 0, **kwargs: Any) -> Any:
        def send() -> Any:
            return isend(tensor, *args, tag=tag, **kwargs)

        if tag == 0:
            return send()
        delays.append(chance.uniform(0.0, most_seconds))
        return _LateWork(send, delays[-1])

    dist.isend = late
    try:
        yield delays
    finally:
        dist.isend = isend


@contextmanager
def poisoned_memory() -> Iterator[list[int]]:
    """Bytes are NaN from their allocation until they are written, and again from their release on.

    Covers storages resized in place, `torch.empty`, and (with glibc) freed memory. Yields by how many bytes
    storages were resized so far.
    """
    resize, poisoned = torch.UntypedStorage.resize_, list[int]()

    def resize_and_poison(storage: torch.UntypedStorage, size: int) -> Any:
        if size < storage.nbytes():
            _poison(storage)
        poisoned.append(abs(size - storage.nbytes()))
        result = resize(storage, size)
        _poison(storage)
        return result

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    torch.UntypedStorage.resize_ = resize_and_poison  # type: ignore[method-assign]
    torch.use_deterministic_algorithms(True)  # fills uninitialised tensors with NaN
    if mallopt:
        mallopt(_PERTURB, _ALL_ONES)
    try:
        yield poisoned
    finally:
        if mallopt:
            mallopt(_PERTURB, 0)
        torch.use_deterministic_algorithms(False)
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def _poison(storage: torch.UntypedStorage) -> None:
    """Overwrite a storage's bytes; only storages that just grew or are about to be released come here."""
    if storage.nbytes():
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(_ALL_ONES)
