"""Live bytes from the allocator's own events: a count that shares nothing with the ledger.

    with LiveBytes() as live:
        build()
        with live.phase("forward"):
            loss = model(x)
    live.peak("forward"), live.after("forward")

PyTorch's profiler reports every allocation and release of the CPU allocator in this thread, storages resized in
place too. What gloo's own threads release (the tensors of a broadcast, say) it does not see.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_PREFIX = "live bytes: "


class LiveBytes:
    """Bytes allocated since entry and not released yet, by phase; to be read once the block is left."""

    def __enter__(self) -> LiveBytes:
        gc.collect()
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._profile.__exit__(*exception)
        self._bytes: dict[str, list[int]] = {}
        events = self._profile.profiler.kineto_results.events()
        phases = [event for event in events if event.name().startswith(_PREFIX)]
        memory = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        for phase in phases:
            live = sum(delta for moment, delta in memory if moment < phase.start_ns())
            series = [live]
            for moment, delta in memory:
                if phase.start_ns() <= moment <= phase.end_ns():
                    live += delta
                    series.append(live)
            self._bytes[phase.name().removeprefix(_PREFIX)] = series

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names a stretch of the run; names are used once."""
        with record_function(_PREFIX + name):
            yield

    def before(self, name: str) -> int:
        """Live bytes when the phase began."""
        return self._bytes[name][0]

    def peak(self, name: str) -> int:
        """The most live bytes at any moment of the phase, its beginning included."""
        return max(self._bytes[name])

    def after(self, name: str) -> int:
        """Live bytes when the phase ended."""
        return self._bytes[name][-1]


def live_tensors() -> int:
    """Tensors that Python still sees."""
    gc.collect()
    return sum(issubclass(type(entry), torch.Tensor) for entry in gc.get_objects())
