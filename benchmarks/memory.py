"""Bytes of live tensors over one step, from the profiler's allocator events."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

_STEP = "measured step"


def peak_live_bytes(build: Callable[[], Callable[[], Any]], warmup: int) -> int:
    """The most bytes of CPU tensors alive at once during the step that follows `warmup` others.

    The profiler runs from before `build` on, because it reports the release of a block only if it saw the
    allocation. It sees every call of the allocator, so storages that are resized in place count too.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = build()
        for _ in range(warmup):
            step()
        with record_function(_STEP):
            step()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    measured = next(event for event in events if event.name() == _STEP)
    start, end = measured.start_ns(), measured.start_ns() + measured.duration_ns()
    live = peak = 0
    for event in events:
        if event.name() != "[memory]" or event.start_ns() > end:
            continue
        peak = live if event.start_ns() < start else peak
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def peak_resident_bytes() -> int:
    """The most bytes of memory that this process has had resident since it started."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
