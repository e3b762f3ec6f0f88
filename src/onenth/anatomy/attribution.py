"""Attribution: from the tape to the timeline. Each storage has one owner at every moment, by the first rule that fits.

1. What the ledger, the model or the optimizer has labelled belongs to that state, all its life.
2. What autograd saved is an activation until autograd drops it, of the module whose forward saved it first. So is what
   a recomputation leaves behind: the backward that asked for it has it.
3. What nobody saw being made is unexplained.
4. What ends in the part of the step that made it (one forward, loss, backward or step) is a temporary buffer.
5. What a forward or a loss made and the caller still holds is an output.
6. The rest is held by other code.
"""

from __future__ import annotations

from dataclasses import dataclass

from onenth.anatomy.phases import Part, Phase
from onenth.anatomy.tape import Mark, Seen, Tape
from onenth.anatomy.timeline import Kind, Storage, Timeline
from onenth.states import ResidualState


@dataclass(frozen=True)
class _Life:
    """Owners of one storage: the first; and the one after `changes` (a position on the tape), if it changes."""

    first: str
    then: str | None = None
    changes: int | None = None


def attribute(tape: Tape, phases: list[Phase], parts: list[Part]) -> Timeline:
    """The timeline of a tape; parts: of its turns."""
    timeline = Timeline(parts=[str(part) for part in parts])
    lives = []
    for seen in tape.seen:
        lives.append(_life(seen, tape, phases[seen.phase].part))
        timeline.storages.append(_storage(seen, phases[seen.phase].name))
    names = [timeline.name(phase.name) for phase in phases]
    for position, (mark, number) in enumerate(zip(tape.marks, tape.numbers, strict=True)):
        life = lives[number]
        first = timeline.name(life.first)
        then = first if life.then is None else timeline.name(life.then)
        phase, turn = names[tape.phases[position]], tape.turns[position]
        if mark == Mark.ALLOCATION:
            timeline.add(Kind.ALLOCATION, number, first, first, phase, turn)
        elif mark == Mark.RELEASE:
            timeline.add(Kind.RELEASE, number, then, then, phase, turn)
        elif position == life.changes:
            timeline.add(Kind.TRANSFER, number, then, first, phase, turn)
    return timeline


def _storage(seen: Seen, phase: str) -> Storage:
    module = seen.module if seen.keeper is None else seen.keeper
    return Storage(seen.bytes, seen.tier, seen.operator or "", module, phase, seen.turn, seen.shape, seen.dtype)


def _life(seen: Seen, tape: Tape, part: Part) -> _Life:
    if seen.label is not None:
        return _Life(seen.label)
    activations = str(ResidualState.ACTIVATIONS)
    if seen.keeper is not None:
        if seen.unneeded is None or (seen.gone is not None and seen.gone <= seen.unneeded + 1):
            return _Life(activations)
        return _Life(activations, _unsaved_owner(seen, part), seen.unneeded)
    if seen.run and (seen.gone is None or seen.gone >= tape.runs_end.get(seen.run, len(tape.marks))):
        return _Life(activations)
    return _Life(_unsaved_owner(seen, part))


def _unsaved_owner(seen: Seen, part: Part) -> str:
    if seen.operator is None:
        return str(ResidualState.UNEXPLAINED)
    if seen.gone_turn == seen.turn:
        return str(ResidualState.TEMPORARY)
    if part in (Part.FORWARD, Part.LOSS):
        return str(ResidualState.OUTPUTS)
    return str(ResidualState.OTHER)
