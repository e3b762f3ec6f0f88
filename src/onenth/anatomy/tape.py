"""The tape: what was seen, in order, before anybody says what it was. `attribution.py` makes a timeline of it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum

from onenth.states import Tier


class Mark(IntEnum):
    """What is written on the tape about a storage."""

    ALLOCATION = 0
    RELEASE = 1
    UNNEEDED = 2  # autograd has dropped the last of what it had saved in it


@dataclass(slots=True)
class Seen:
    """What is known about one storage.

    label: the state that somebody has said it belongs to; None: nobody has.
    operator: what made it; None: it was there, or was made out of sight.
    module, phase, turn, run: where that was (`phases.py`). run is 0 outside recomputations.
    keeper: the first module whose forward saved it for backward; None: none did.
    saves: how often autograd holds it now. made, gone, unneeded: positions on the tape.
    """

    number: int
    bytes: int
    tier: Tier
    shape: tuple[int, ...]
    dtype: str
    operator: str | None
    module: str
    phase: int
    turn: int
    run: int
    made: int
    label: str | None = None
    keeper: str | None = None
    saves: int = 0
    gone: int | None = None
    unneeded: int | None = None
    gone_turn: int | None = None


@dataclass
class Tape:
    """Everything that was seen. runs_end: positions at which recomputations ended, by their number."""

    seen: list[Seen] = field(default_factory=list)
    marks: array[int] = field(default_factory=lambda: array("b"))
    numbers: array[int] = field(default_factory=lambda: array("q"))
    phases: array[int] = field(default_factory=lambda: array("l"))
    turns: array[int] = field(default_factory=lambda: array("l"))
    runs_end: dict[int, int] = field(default_factory=dict)

    def until(self, position: int) -> Tape:
        """What was on the tape before a position; what happened to its storages later is known all the same."""
        numbers = self.numbers[:position]
        seen = self.seen[: max(numbers, default=-1) + 1]
        ends = {run: end for run, end in self.runs_end.items() if end <= position}
        return Tape(seen, self.marks[:position], numbers, self.phases[:position], self.turns[:position], ends)

    def write(self, mark: Mark, number: int, phase: int, turn: int) -> int:
        """Note a mark; returns its position."""
        self.marks.append(mark)
        self.numbers.append(number)
        self.phases.append(phase)
        self.turns.append(turn)
        return len(self.marks) - 1
