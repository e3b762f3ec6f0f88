"""A unit's life as a state machine: the states, the legal transitions, and what is under way for each unit."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from onenth.model_states.unit import Unit


class UnitState(Enum):
    """Where a unit is in its step. Bytes are those at stage 3; at stages 0 to 2 parameters are always whole."""

    SHARDED = "sharded"
    """At rest: this rank holds its shard. Reading a parameter is an error outside the model's forward."""
    GATHERING = "gathering"
    """A gather is under way: the full buffer has its bytes already, and nobody may read it."""
    GATHERED = "gathered"
    """Whole, and nobody computes with it: kept for the backward pass, or by `gathered`."""
    FORWARD = "forward"
    """Whole; a forward runs."""
    BACKWARD = "backward"
    """Whole; gradients are being computed, and a recomputed forward neither gathers nor releases."""
    EXCHANGING = "exchanging"
    """Released; its gradients wait for their turn or are on their way. The local gradient buffer has its bytes."""


_S = UnitState
TRANSITIONS: dict[UnitState, frozenset[UnitState]] = {
    _S.SHARDED: frozenset({_S.GATHERING}),
    _S.GATHERING: frozenset({_S.GATHERED, _S.SHARDED, _S.EXCHANGING}),  # the last two: a prefetch nobody wanted
    _S.GATHERED: frozenset({_S.FORWARD, _S.BACKWARD, _S.SHARDED, _S.EXCHANGING}),
    _S.FORWARD: frozenset({_S.GATHERED, _S.SHARDED, _S.EXCHANGING, _S.BACKWARD}),
    _S.BACKWARD: frozenset({_S.GATHERED, _S.EXCHANGING, _S.SHARDED}),
    _S.EXCHANGING: frozenset({_S.SHARDED, _S.GATHERING}),  # gathered again: another call, before its turn came
}

WHOLE = frozenset({_S.GATHERED, _S.FORWARD, _S.BACKWARD})


@dataclass(eq=False, repr=False)
class Call:
    """One forward of a unit that a backward will come for. Alive as long as the graph of its outputs.

    inputs: the graph nodes that hand the gradients of the call's inputs on. They know the call weakly: the outputs'
        nodes own it, so that no cycle through the graph keeps activations alive.
    all_watched: whether `inputs` are all that can tell when the call is done; if not, the end of the backward does.
    pending: positions in `inputs` that the running backward has not computed yet.
    """

    activity: Activity
    generation: int
    inputs: list[Any]
    all_watched: bool = True
    pending: set[int] = field(default_factory=set)


@dataclass(eq=False, repr=False)
class Activity:
    """What is under way for one unit.

    depth: forwards of the unit that are running, one in another.
    outstanding: calls that no backward has come for yet, by generation (one forward of the root).
    running: calls whose backward is running.
    ran: whether a forward used the unit since the last backward ended.
    kept: stays whole between forward and backward (the root, and `keep_gathered`).
    reads_in_backward: whether its backward needs the parameters; if not, it isn't gathered for it.
    pins: open `gathered` contexts.
    held: stays whole until the backward ends, and its exchange waits for that too: its parameters were read outside
        its forward, so that the gradients of its inputs do not tell when it is done.
    input_bytes: of the tensors that its forward was last called with, for a backward to come.
    sticky: stays whole until the next step: a graph through a backward (create_graph) may need it again.
    undo: takes the hooks on the unit's parameters away again, one call a hook.
    """

    unit: Unit
    kept: bool
    reads_in_backward: bool = True
    state: UnitState = UnitState.SHARDED
    depth: int = 0
    outstanding: dict[int, weakref.WeakSet[Call]] = field(default_factory=dict)
    running: set[Call] = field(default_factory=set)
    ran: bool = False
    pins: int = 0
    held: bool = False
    input_bytes: int = 0
    sticky: bool = False
    undo: list[Callable[[], None]] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"{self.unit}, {self.state.value}"

    def move(self, to: UnitState) -> None:
        """Go to another state; an illegal transition is a defect of the engine."""
        assert to in TRANSITIONS[self.state], f"unit {self.unit.name}: {self.state} -> {to}"
        self.state = to

    @property
    def is_whole(self) -> bool:
        """Whether parameters may be read."""
        return self.state in WHOLE

    @property
    def stays(self) -> bool:
        """Whether the unit stays whole when nothing computes with it."""
        return bool(self.pins) or self.held or self.sticky

    def awaits(self, generation: int) -> bool:
        """Whether calls of `generation` are still to be run backward."""
        return bool(self.outstanding.get(generation))

    @property
    def has_outstanding(self) -> bool:
        """Whether any call is still to be run backward."""
        return any(self.outstanding.values())

    def note(self, call: Call) -> None:
        """Remember a call until its backward is done or its graph is gone."""
        self.outstanding = {generation: calls for generation, calls in self.outstanding.items() if calls}
        self.outstanding.setdefault(call.generation, weakref.WeakSet()).add(call)

    def finish(self, call: Call) -> None:
        """The call's backward is done."""
        self.running.discard(call)
        calls = self.outstanding.get(call.generation)
        if calls is not None:
            calls.discard(call)
