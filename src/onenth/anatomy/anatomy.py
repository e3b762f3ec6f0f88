"""Anatomy: the memory of a step on one rank, by owner, module and moment."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onenth.anatomy import schema
from onenth.anatomy.findings import Finding, find
from onenth.anatomy.timeline import Timeline
from onenth.breakdown import Breakdown, Key, aligned, format_bytes
from onenth.errors import AnatomyError
from onenth.residual_states.fragmentation import Replay, Settings, replay
from onenth.states import ResidualState, Tier


@dataclass(frozen=True)
class OwnerRow:
    """One owner in the table. at_peak: bytes at the peak of all. peak: the most that it holds at any moment.

    expected: the equation's bytes; None where no equation applies.
    """

    owner: str
    at_peak: int
    peak: int
    expected: int | None

    @property
    def difference(self) -> int | None:
        """Bytes at the owner's own peak beyond the equation's."""
        return None if self.expected is None else self.peak - self.expected


@dataclass
class Anatomy:
    """What a recording found. Positions are indices into `timeline`; bytes are those of rank `rank`, on its device.

    timeline: the events. device: the device type. expected: the equations' bytes of the model states, by (state,
    tier), while gradients exist. capacity: bytes of the device, where it says so. outside: bytes of the device that
    the allocator doesn't know of (context, NCCL), by name. error: the first line of what ended the recording early.
    title: the model's class. stage: of a sharded model.
    """

    timeline: Timeline = field(default_factory=Timeline)
    device: str = "cpu"
    rank: int = 0
    ranks: int = 1
    expected: Mapping[Key, int] = field(default_factory=dict)
    capacity: int | None = None
    outside: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None
    title: str = ""
    stage: int | None = None
    _totals: dict[Tier, list[int]] = field(default_factory=dict, compare=False, repr=False)

    def totals(self, tier: Tier = Tier.DEVICE) -> list[int]:
        """Bytes held after each event."""
        found = self._totals.get(tier)
        if found is None or len(found) != len(self.timeline):
            found = self._totals[tier] = self.timeline.totals(tier)
        return found

    @property
    def peak_position(self) -> int | None:
        """The first event after which most bytes are held; None for an empty recording."""
        totals = self.totals()
        return totals.index(max(totals)) if totals else None

    @property
    def peak(self) -> Breakdown:
        """Bytes by (state, tier) on the device at the peak."""
        return Breakdown(self.at(self.peak_position))

    @property
    def peak_moment(self) -> str:
        """Where the peak is: "backward of model.layers.3", "optimizer step"."""
        position = self.peak_position
        return "nothing was recorded" if position is None else self.timeline[position].phase

    def at(self, position: int | None, tier: Tier = Tier.DEVICE) -> dict[Key, int]:
        """Bytes by (state, tier) held on a tier after the event at `position`."""
        held: Counter[Key] = Counter()
        for number, owner in ({} if position is None else self.timeline.alive(position)).items():
            storage = self.timeline.storages[number]
            if storage.tier is tier and storage.bytes:
                held[(owner, tier)] += storage.bytes
        return dict(held)

    @property
    def owner_peaks(self) -> dict[str, int]:
        """The most bytes that each owner holds on the device, each at its own moment."""
        return {owner: max(line) for owner, line in self.timeline.series().items()}

    @property
    def differences(self) -> dict[str, int]:
        """Bytes of each model state beyond its equation, at the state's own peak; empty if all are equal."""
        peaks = self.owner_peaks
        found = {state: peaks.get(state, 0) - count for (state, _), count in self.expected.items()}
        return {state: difference for state, difference in found.items() if difference}

    def rows(self) -> list[OwnerRow]:
        """One row for each owner, in the order of a breakdown's; `at_peak` adds up to the peak."""
        peaks, expected = self.owner_peaks, {state: count for (state, _), count in self.expected.items()}
        every = Breakdown({(owner, Tier.DEVICE): count for owner, count in peaks.items()}, self.expected)
        at_peak = self.peak.held
        return [
            OwnerRow(row.state, at_peak.get((row.state, Tier.DEVICE), 0), row.held, expected.get(row.state))
            for row in every.rows()
        ]

    def findings(self) -> list[Finding]:
        """Bytes held for no good reason, largest first, each with its likely cause."""
        position = self.peak_position
        if position is None:
            return []
        return find(self.timeline, position, whole_gradients=self.stage in (0, 1))

    def by_module(self) -> dict[str, int]:
        """Activation bytes held at the peak, by the path of the module that keeps them; largest first."""
        held: Counter[str] = Counter()
        position = self.peak_position
        for number, owner in ({} if position is None else self.timeline.alive(position)).items():
            storage = self.timeline.storages[number]
            if owner == ResidualState.ACTIVATIONS and storage.tier is Tier.DEVICE:
                held[storage.module] += storage.bytes
        return dict(held.most_common())

    def reserved(self, settings: Settings | None = None, *, capacity: int | None = None) -> Replay:
        """What CUDA's caching allocator would reserve for these events; lists run along `timeline`."""
        signs = {0: 1, 1: -1, 2: 0}
        storages = self.timeline.storages
        events = [
            (number, signs[kind] * storages[number].bytes if storages[number].tier is Tier.DEVICE else 0)
            for kind, number in zip(self.timeline.kinds, self.timeline.numbers, strict=True)
        ]
        return replay(events, settings if settings is not None else Settings(), capacity=capacity)

    def to_dict(self) -> dict[str, Any]:
        """The recording as plain data for JSON."""
        facts = {
            "schema": schema.SCHEMA,
            "title": self.title,
            "stage": self.stage,
            "device": self.device,
            "rank": self.rank,
            "ranks": self.ranks,
            "expected": Breakdown({}, self.expected).to_dict()["expected"],
            "capacity": self.capacity,
            "outside": dict(self.outside),
            "error": self.error,
        }
        return facts | schema.pack(self.timeline)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Anatomy:
        """The inverse of `to_dict`. Raises AnatomyError for what it never wrote."""
        try:
            schema.check_facts(data)
            return cls(
                timeline=schema.unpack(data),
                device=data["device"],
                rank=data["rank"],
                ranks=data["ranks"],
                expected=Breakdown.from_dict({"held": {}, "expected": data["expected"], "notes": {}}).expected,
                capacity=data["capacity"],
                outside=dict(data["outside"]),
                error=data["error"],
                title=data["title"],
                stage=data["stage"],
            )
        except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError) as error:
            if isinstance(error, AnatomyError):
                raise
            raise AnatomyError(f"not the JSON of a recording: {error!r}") from error

    def save(self, path: str | Path) -> None:
        """Write the recording as JSON."""
        Path(path).write_text(json.dumps(self.to_dict()))

    def page(self, path: str | Path) -> None:
        """Write the recording as one HTML page that needs no network. Raises AnatomyError without plotly."""
        from onenth.anatomy.view import page

        Path(path).write_text(page([self]), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Anatomy:
        """Read what `save` wrote. Raises AnatomyError, which names the file, for anything else."""
        data = schema.read(path)
        try:
            return cls.from_dict(data)
        except AnatomyError as error:
            raise AnatomyError(f"{path}: {error}") from error

    def verdict(self) -> str:
        """One line: the peak, its moment and the largest owner."""
        peak = self.peak
        if not peak.held:
            return "nothing was recorded"
        (owner, _), count = max(peak.held.items(), key=lambda item: item[1])
        share = f"{owner} hold{'' if owner.endswith('s') else 's'} {format_bytes(count)} of it"
        return f"peak {format_bytes(peak.total)} in {self.peak_moment}; {share}"

    def __str__(self) -> str:
        lines = [["", "at the peak", "own peak", "equation", "difference", ""]]
        for row in self.rows():
            difference = row.difference
            equation = "" if row.expected is None else format_bytes(row.expected)
            beyond = "" if difference is None else format_bytes(difference)
            lines.append([row.owner, format_bytes(row.at_peak), format_bytes(row.peak), equation, beyond, ""])
        total = self.peak.total
        lines.append(["in all", format_bytes(total), format_bytes(total), "", "", ""])
        found = [f"- {finding}" for finding in self.findings()]
        ended = [f"ended early by {self.error}"] if self.error else []
        return "\n".join([self.verdict(), *ended, "", aligned(lines), *([""] if found else []), *found])


@dataclass(frozen=True)
class Difference:
    """One owner in two recordings: the most bytes that each holds for it."""

    owner: str
    first: int
    second: int

    @property
    def change(self) -> int:
        """Bytes that the second holds more."""
        return self.second - self.first


def compare(first: Anatomy, second: Anatomy) -> list[Difference]:
    """Every owner of either recording at its own peak, the largest change first; the last row: the peaks of all."""
    ones, others = first.owner_peaks, second.owner_peaks
    rows = [Difference(owner, ones.get(owner, 0), others.get(owner, 0)) for owner in dict.fromkeys((*ones, *others))]
    rows.sort(key=lambda row: -abs(row.change))
    return [*rows, Difference("in all", first.peak.total, second.peak.total)]
