"""The settings of PyTorch's CUDA caching allocator, as `PYTORCH_ALLOC_CONF` gives them.

Source: PyTorch 2.13, c10/core/AllocatorConfig.h and .cpp; limits and defaults are the ones that library enforces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from onenth.errors import ConfigError
from onenth.residual_states.blocks import LARGE_SEGMENT, MIB, MIN_BLOCK

_INTERVALS = 16  # of sizes, for rounding: below 2 MiB, then one for each doubling, up to 32 GiB and more


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `PYTORCH_ALLOC_CONF` sets, with PyTorch's defaults.

    max_split_size: bytes; blocks from this size on are not split, nor given to smaller requests. None: no limit. In
        expandable segments they are split all the same.
    roundup_power2_divisions: round sizes up to one of this many steps between two powers of two; a power of two.
        A mapping says it for each interval, as the variable does: {m: divisions} for sizes from m MiB to below 2m MiB,
        m a power of two; sizes below the first m are rounded as there, other intervals that are not named not at all.
    garbage_collection_threshold: fraction of the capacity above which old cached segments are given back before more
        is taken; 0: never. PyTorch does so only in a process with a memory fraction below 1: here that is the capacity.
    expandable_segments: one growing segment for each pool and stream.
    max_non_split_rounding: bytes that a block of `max_split_size` or more may be larger than the request it serves.
    large_segment_size: bytes of a segment for requests between 1 and 10 MiB, and of a large expandable segment's page.
    """

    max_split_size: int | None = None
    roundup_power2_divisions: int | Mapping[int, int] | None = None
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    max_non_split_rounding: int = LARGE_SEGMENT
    large_segment_size: int = LARGE_SEGMENT

    @classmethod
    def parse(cls, text: str) -> Settings:
        """Read a value of the variable, such as "expandable_segments:True,max_split_size_mb:128".

        Entries that do not change where blocks go are accepted and left out, `per_process_memory_fraction` among them:
        the capacity says it. Raises ConfigError naming every entry that cannot be read.
        """
        values: dict[str, Any] = {}
        wrong = []
        entries = [entry for entry in re.split(r",(?![^\[]*\])", "".join(text.split())) if entry]
        for entry in sorted(entries, key=lambda entry: not entry.startswith("large_segment_size_mb")):
            name, _, value = entry.partition(":")
            try:
                if name in _READERS:
                    field, read = _READERS[name]
                    values[field] = read(value, values.get("large_segment_size", LARGE_SEGMENT))
                elif name == "backend" and value != "native":
                    raise ValueError("only the native backend is simulated")
                elif name not in _IGNORED:
                    raise ValueError("no such setting")
            except ValueError as error:
                wrong.append(f"{entry!r}: {error}")
        if wrong:
            raise ConfigError(f"allocator settings that cannot be read: {'; '.join(wrong)}")
        return cls(**values)

    @cached_property
    def divisions(self) -> tuple[int, ...]:
        """Steps between two powers of two, for each of the 16 intervals of sizes; 0 or 1: no such rounding."""
        given = self.roundup_power2_divisions
        if given is None or isinstance(given, int):
            return (given or 0,) * _INTERVALS
        table = [0] * _INTERVALS
        for rank, start in enumerate(sorted(given)):
            at = min(start.bit_length() - 1, _INTERVALS - 1)
            if rank == 0:
                table[:at] = [given[start]] * at
            table[at] = given[start]
        return tuple(table)

    def rounded(self, size: int) -> int:
        """The bytes that a request of `size` bytes, 1 or more, looks for."""
        if self.roundup_power2_divisions is not None and size >= MIN_BLOCK:
            power = size.bit_length() - 1
            divisions = self.divisions[min(max(power - 20, 0), _INTERVALS - 1)]
            if divisions > 1 and size > MIN_BLOCK * divisions:
                step = (1 << power) >> (divisions.bit_length() - 1)
                return -(-size // step) * step
        return (size + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK


DEFAULTS: Final = Settings()


def _mebibytes(least: int) -> Callable[[str, int], int]:
    """Reads whole MiB; least: how many there must be, 0: as many as are in a large segment."""

    def read(value: str, large: int) -> int:
        bound = least or large // MIB
        if not value.isdecimal() or int(value) < bound:
            raise ValueError(f"must be a whole number of MiB, {bound} or more")
        return int(value) * MIB

    return read


def _threshold(value: str, _: int) -> float:
    if not re.fullmatch(r"0?\.\d+", value) or not float(value):
        raise ValueError("must be a fraction between 0 and 1")
    return float(value)


def _truth(value: str, _: int) -> bool:
    if value not in ("True", "False"):
        raise ValueError("must be True or False")
    return value == "True"


def _power(value: str) -> int:
    if not value.isdecimal() or int(value).bit_count() != 1:
        raise ValueError(f"{value!r} must be a power of two")
    return int(value)


def _divisions(value: str, _: int) -> int | dict[int, int]:
    """Reads "4" or "[256:1,512:2,>:4]", where > stands for every interval after the last one named."""
    if not value.startswith("["):
        return _power(value)
    table = [0] * _INTERVALS
    last, first = 0, True
    if not value.endswith("]"):
        raise ValueError("the closing bracket is missing")
    for entry in value[1:-1].split(","):
        start, _colon, given = entry.partition(":")
        divisions = 0 if given == "0" else _power(given)
        if start == ">":
            table[last + 1 :] = [divisions] * (_INTERVALS - last - 1)
            continue
        last = min(_power(start).bit_length() - 1, _INTERVALS - 1)
        table[: last if first else 0] = [divisions] * (last if first else 0)
        table[last], first = divisions, False
    return {1 << at: divisions for at, divisions in enumerate(table)}


_READERS: dict[str, tuple[str, Callable[[str, int], Any]]] = {
    "large_segment_size_mb": ("large_segment_size", _mebibytes(11)),
    "max_split_size_mb": ("max_split_size", _mebibytes(0)),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mebibytes(0)),
    "garbage_collection_threshold": ("garbage_collection_threshold", _threshold),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "expandable_segments": ("expandable_segments", _truth),
}
_IGNORED = {  # they change when and how fast memory is taken, or host memory, not where blocks go
    "backend",
    "graph_capture_record_stream_reuse",
    "per_process_memory_fraction",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "throw_on_cudamalloc_oom",
}
