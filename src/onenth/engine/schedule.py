"""In which order units move: gathers as recorded in the step before, exchanges as listed, alike on every rank."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass
class GatherOrder:
    """Predicts the next gather from the order of the last pass of the same kind (training, evaluation).

    Where the order changes, on all ranks alike, the rest of that pass is gathered on demand and recorded anew.
    """

    recorded: dict[Hashable, list[int]] = field(default_factory=dict)
    current: list[int] = field(default_factory=list)
    kind: Hashable = None

    def begin(self, kind: Hashable) -> None:
        """A pass of this kind starts."""
        self.end()
        self.kind = kind

    def visit(self, unit: int) -> int | None:
        """`unit` is needed now and had to be gathered; which one will be next, if that is known."""
        self.current.append(unit)
        known = self.recorded.get(self.kind, [])
        here = len(self.current)
        return known[here] if here < len(known) and known[:here] == self.current else None

    def end(self) -> None:
        """The pass is over."""
        if self.current:
            self.recorded[self.kind] = self.current
        self.current = []


@dataclass
class ExchangeOrder:
    """Releases units for the exchange of their gradients strictly in one order, whatever order they finish in.

    units: the trainable units, last first: the order in which backward usually finishes them.
    """

    units: list[int]
    position: int = 0
    done: set[int] = field(default_factory=set)

    def begin(self) -> None:
        """A backward starts."""
        self.position = 0
        self.done.clear()

    def next(self) -> int | None:
        """The unit whose turn it is; None after the last."""
        return self.units[self.position] if self.position < len(self.units) else None

    def advance(self) -> None:
        """The unit whose turn it was has been sent."""
        self.position += 1
