"""Breakdown: bytes by (state, tier), the one type that equations, ledger, plan and account answer with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from onenth.states import ModelState, ResidualState, Tier

Key: TypeAlias = tuple[str, Tier]

# The order of rows; a state that an optimizer names itself comes between model states and residual states.
_POSITION: dict[str, float] = {str(state): index for index, state in enumerate((*ModelState, *ResidualState))}
_OPTIMIZERS_OWN = len(ModelState) - 0.5
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB", "ZB")


def format_bytes(count: int) -> str:
    """Bytes with three significant digits and a decimal unit: 1 GB is 1e9 bytes."""
    value, unit = float(abs(count)), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{'-' if count < 0 else ''}{value:.3g} {_UNITS[unit]}"


@dataclass(frozen=True)
class Row:
    """One line of a breakdown's table.

    held: bytes.
    expected: the equation's bytes, None where no equation applies.
    """

    state: str
    tier: Tier
    held: int
    expected: int | None
    note: str

    @property
    def label(self) -> str:
        """The state's name, and its tier where that isn't the device."""
        return self.state if self.tier is Tier.DEVICE else f"{self.state} ({self.tier})"

    @property
    def difference(self) -> int | None:
        """Bytes held beyond the equation's figure."""
        return None if self.expected is None else self.held - self.expected


@dataclass(frozen=True)
class Breakdown:
    """Bytes that one rank holds, by (state, tier).

    held: bytes by (state's name, tier).
    expected: what the equations say, by the same keys; empty where no equation applies.
    notes: remarks by state ("from the master": gathered from the master copy, nothing kept beside it).

    A state is an attribute too: `breakdown.master` is its bytes over all tiers, 0 for a state that nobody
    holds. A name that is neither one of `states.py` nor held by anybody is an AttributeError.
    """

    held: Mapping[Key, int]
    expected: Mapping[Key, int] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def __getattr__(self, name: str) -> int:
        # While unpickling or copying, fields are not there yet: look them up without coming back here.
        held: Mapping[Key, int] = self.__dict__.get("held", {})
        expected: Mapping[Key, int] = self.__dict__.get("expected", {})
        if name in _POSITION or any(state == name for state, _ in (*held, *expected)):
            return sum(count for (state, _), count in held.items() if state == name)
        raise AttributeError(f"no state {name!r} is held, and {type(self).__name__} has no such attribute")

    @property
    def total(self) -> int:
        """Bytes held, over all states and tiers."""
        return sum(self.held.values())

    @property
    def by_tier(self) -> dict[Tier, int]:
        """Bytes held on each tier."""
        return {tier: sum(count for (_, at), count in self.held.items() if at is tier) for tier in Tier}

    @property
    def differences(self) -> dict[Key, int]:
        """Bytes held beyond the equations, by key; empty if what has an equation equals it to the byte."""
        return {
            key: self.held.get(key, 0) - count for key, count in self.expected.items() if self.held.get(key, 0) != count
        }

    def rows(self) -> list[Row]:
        """One row for each (state, tier): model states, what the optimizer names itself, residual states."""
        keys = sorted(
            dict.fromkeys((*self.held, *self.expected)),
            key=lambda key: (_POSITION.get(key[0], _OPTIMIZERS_OWN), key),
        )
        return [
            Row(
                state,
                tier,
                self.held.get((state, tier), 0),
                self.expected.get((state, tier)),
                self.notes.get(state, ""),
            )
            for state, tier in keys
        ]

    def __str__(self) -> str:
        rows = self.rows()
        compared = any(row.expected is not None for row in rows)
        lines = [["", "held", "equation", "difference", ""]]
        lines += [
            [
                row.label,
                format_bytes(row.held),
                "" if row.expected is None else format_bytes(row.expected),
                "" if row.difference is None else format_bytes(row.difference),
                row.note,
            ]
            for row in rows
        ]
        lines.append(["in all", format_bytes(self.total), "", "", ""])
        if compared and all(row.expected is not None for row in rows):
            expected = sum(self.expected.values())
            lines[-1][2:4] = [format_bytes(expected), format_bytes(self.total - expected)]
        return aligned(lines if compared else [[line[0], line[1], line[4]] for line in lines])

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts for JSON: `held` and `expected` as {state: {tier: bytes}}, `notes` as {state: note}."""
        return {"held": _nested(self.held), "expected": _nested(self.expected), "notes": dict(self.notes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Breakdown:
        """The inverse of `to_dict`."""
        return cls(_flat(data["held"]), _flat(data["expected"]), dict(data["notes"]))


def aligned(lines: list[list[str]]) -> str:
    """Lines of text with columns as wide as their widest cell; the first and the last are text, the others numbers."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    last = len(widths) - 1
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in (0, last) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _nested(counts: Mapping[Key, int]) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for (state, tier), count in counts.items():
        nested.setdefault(str(state), {})[str(tier)] = count
    return nested


def _flat(nested: Mapping[str, Mapping[str, int]]) -> dict[Key, int]:
    return {(state, Tier(tier)): count for state, tiers in nested.items() for tier, count in tiers.items()}
