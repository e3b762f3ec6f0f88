"""The record of a step: storages, and the events of their lives in order. What is shown is computed from this alone.

A storage is counted once, whatever views there are of it. One that is resized in place goes on under a new number, as
for the allocator: the new bytes are taken, then the old ones are given back.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple, overload

from onenth.states import Tier


class Kind(IntEnum):
    """What happened to a storage."""

    ALLOCATION = 0
    RELEASE = 1
    TRANSFER = 2  # it lives on with another owner: a backward needs it no more, say


class Event(NamedTuple):
    """One event. bytes: the storage's. owner: from this event on; at a release, until it. module: whose storage it is.

    was: the owner until a transfer; otherwise "".
    """

    kind: Kind
    storage: int
    bytes: int
    owner: str
    was: str
    phase: str
    module: str
    tier: Tier


@dataclass(frozen=True, slots=True)
class Storage:
    """Where some bytes came from.

    bytes: its size. operator: what made it ("aten.mm"), "" if that was not seen. shape, dtype: of the first tensor in
    it. module: the path of the module that made it or, of an activation, that keeps it for backward. phase: in which
    it was made. turn: in which forward, loss, backward or step (counted over the record; 0: before it).
    """

    bytes: int
    tier: Tier
    operator: str
    module: str
    phase: str
    turn: int
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Timeline(Sequence[Event]):
    """The events of one rank, in order, as columns.

    names: the texts that owners and phases are indices of. storages: by number. turns: of each event. parts: of the
    turns: "forward", "loss", "backward", "optimizer step", "between"; each turn is one of them, from its start to its
    end, 0 the time before all.
    """

    storages: list[Storage] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    kinds: array[int] = field(default_factory=lambda: array("b"))
    numbers: array[int] = field(default_factory=lambda: array("q"))
    owners: array[int] = field(default_factory=lambda: array("l"))
    formers: array[int] = field(default_factory=lambda: array("l"))
    phases: array[int] = field(default_factory=lambda: array("l"))
    turns: array[int] = field(default_factory=lambda: array("l"))
    parts: list[str] = field(default_factory=list)
    _index: dict[str, int] = field(default_factory=dict)

    def name(self, text: str) -> int:
        """The index of a text; a new one is added."""
        found = self._index.get(text)
        if found is None:
            found = self._index[text] = len(self.names)
            self.names.append(text)
        return found

    def add(self, kind: Kind, number: int, owner: int, former: int, phase: int, turn: int) -> None:
        """Append an event; texts as indices."""
        self.kinds.append(kind)
        self.numbers.append(number)
        self.owners.append(owner)
        self.formers.append(former)
        self.phases.append(phase)
        self.turns.append(turn)

    def __len__(self) -> int:
        return len(self.kinds)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        kind, storage = Kind(self.kinds[index]), self.storages[self.numbers[index]]
        former = self.names[self.formers[index]] if kind is Kind.TRANSFER else ""
        return Event(
            kind,
            self.numbers[index],
            storage.bytes,
            self.names[self.owners[index]],
            former,
            self.names[self.phases[index]],
            storage.module,
            storage.tier,
        )

    def __iter__(self) -> Iterator[Event]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        return self.storages == other.storages and list(self) == list(other)

    def totals(self, tier: Tier = Tier.DEVICE) -> list[int]:
        """Bytes held on a tier after each event."""
        held, total = [], 0
        signs = {Kind.ALLOCATION: 1, Kind.RELEASE: -1, Kind.TRANSFER: 0}
        for kind, number in zip(self.kinds, self.numbers, strict=True):
            storage = self.storages[number]
            if storage.tier is tier:
                total += signs[Kind(kind)] * storage.bytes
            held.append(total)
        return held

    def series(self, tier: Tier = Tier.DEVICE) -> dict[str, list[int]]:
        """Bytes that each owner holds on a tier after each event; owners that never hold any are left out."""
        changes: dict[int, list[int]] = {}
        for position, (kind, number, owner) in enumerate(zip(self.kinds, self.numbers, self.owners, strict=True)):
            storage = self.storages[number]
            if storage.tier is tier and storage.bytes:
                line = changes.get(owner)
                if line is None:
                    line = changes[owner] = [0] * len(self)
                line[position] = -storage.bytes if kind == Kind.RELEASE else storage.bytes
                if kind == Kind.TRANSFER:
                    changes[self.formers[position]][position] = -storage.bytes
        return {self.names[owner]: list(accumulate(line)) for owner, line in changes.items()}

    def alive(self, position: int) -> dict[int, str]:
        """The storages held after the event at `position`, on any tier: number -> owner."""
        owners: dict[int, int] = {}
        for at in range(position + 1):
            if self.kinds[at] == Kind.RELEASE:
                del owners[self.numbers[at]]
            else:
                owners[self.numbers[at]] = self.owners[at]
        return {number: self.names[owner] for number, owner in owners.items()}
