"""Findings: bytes that a step holds for no good reason, each with its likely cause and what gives them back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from onenth.anatomy.phases import Part
from onenth.anatomy.timeline import Storage, Timeline
from onenth.breakdown import format_bytes
from onenth.states import ModelState, ResidualState, Tier

SHARE = 0.005  # of the peak: less is not worth a line


@dataclass(frozen=True)
class Finding:
    """Bytes that could be given back. text: what holds them, and the way out."""

    owner: str
    bytes: int
    text: str

    def __str__(self) -> str:
        return f"{self.owner}, {format_bytes(self.bytes)}: {self.text}"


@dataclass(frozen=True)
class _Moment:
    """What is held on the device after one event. forward: the last forward until then, as a turn; 0: none was."""

    phase: str
    forward: int
    held: list[tuple[str, Storage]]

    def bytes(self, owner: str, turns: Iterable[int]) -> int:
        return sum(s.bytes for held_by, s in self.held if held_by == owner and s.turn in turns)


def find(timeline: Timeline, peak: int, *, whole_gradients: bool) -> list[Finding]:
    """Findings at the peak and where a backward or a forward begins or ends; the largest of each kind, largest first.

    whole_gradients: whether gradients live as long as the model by design (sharded, stages 0 and 1).
    """
    total = max(1, sum(storage.bytes for _, storage in _moment(timeline, peak).held))
    found: dict[str, Finding] = {}
    for finding in _all(timeline, peak, whole_gradients):
        best = found.get(finding.text)
        if finding.bytes >= SHARE * total and (best is None or finding.bytes > best.bytes):
            found[finding.text] = finding
    return sorted(found.values(), key=lambda finding: -finding.bytes)


def _all(timeline: Timeline, peak: int, whole_gradients: bool) -> Iterator[Finding]:
    at_peak = _moment(timeline, peak)
    yield from _step_temporaries(at_peak)
    yield from _held_outputs(at_peak)
    yield from _earlier_graphs(at_peak)
    for position in _last_of(timeline, Part.BACKWARD):
        yield from _kept_after_backward(_moment(timeline, position))
    for position in () if whole_gradients else _last_of(timeline, Part.FORWARD):
        steps = [turn for turn in range(timeline.turns[position]) if timeline.parts[turn] == Part.STEP]
        yield from _gradients_in_forward(_moment(timeline, position), steps[-1] if steps else 0)
    if len(timeline):
        last = _moment(timeline, len(timeline) - 1)
        yield from _held_outputs(last)
        yield from _earlier_graphs(last)


def _moment(timeline: Timeline, position: int) -> _Moment:
    held = [(owner, timeline.storages[number]) for number, owner in timeline.alive(position).items()]
    turn = timeline.turns[position]
    forwards = [at for at in range(turn + 1) if timeline.parts[at] == Part.FORWARD]
    return _Moment(
        timeline.names[timeline.phases[position]],
        forwards[-1] if forwards else 0,
        [pair for pair in held if pair[1].tier is Tier.DEVICE],
    )


def _last_of(timeline: Timeline, part: Part) -> list[int]:
    """The last event of each turn of a part."""
    last = {turn: position for position, turn in enumerate(timeline.turns) if timeline.parts[turn] == part}
    return sorted(last.values())


def _earlier_graphs(at: _Moment) -> Iterator[Finding]:
    count = at.bytes(ResidualState.ACTIVATIONS, range(at.forward))
    if count:
        yield Finding(
            ResidualState.ACTIVATIONS,
            count,
            "graphs of earlier forwards are still referenced: a loss or an output in a list keeps its whole graph; "
            "keep loss.detach() or loss.item()",
        )


def _kept_after_backward(at: _Moment) -> Iterator[Finding]:
    count = at.bytes(ResidualState.ACTIVATIONS, [at.forward])
    if count and at.forward:
        yield Finding(
            ResidualState.ACTIVATIONS,
            count,
            "kept although their backward has run: retain_graph=True, or a part of the graph that no backward reached",
        )


def _held_outputs(at: _Moment) -> Iterator[Finding]:
    sizes: Counter[tuple[str, str]] = Counter()
    for owner, storage in at.held:
        if owner == ResidualState.OUTPUTS:
            sizes[storage.operator, storage.phase] += storage.bytes
    for (operator, phase), count in sizes.items():
        yield Finding(
            ResidualState.OUTPUTS,
            count,
            f"results of {operator} in {phase}, held by the caller (logits kept for metrics, say): "
            "reduce them before keeping, or delete them before backward",
        )


def _step_temporaries(at: _Moment) -> Iterator[Finding]:
    if at.phase != Part.STEP:
        return
    operators: Counter[str] = Counter()
    for owner, storage in at.held:
        if owner == ResidualState.TEMPORARY:
            operators[storage.operator] += storage.bytes
    for operator in list(dict(operators.most_common(1))):
        way_out = "fused=True" if "foreach" not in operator else "fused=True, or foreach=False"
        yield Finding(
            ResidualState.TEMPORARY,
            sum(operators.values()),
            f"what the optimizer's step computes in passing, most of it by {operator}: {way_out} needs less",
        )


def _gradients_in_forward(at: _Moment, step: int) -> Iterator[Finding]:
    """Gradients made before the last step, or before the recording: used already, or accumulating."""
    count = at.bytes(ModelState.GRADIENTS, range(max(step, 1)))
    if count:
        yield Finding(
            ModelState.GRADIENTS,
            count,
            "alive during a forward though a step has used them: call zero_grad() right after step()"
            if step
            else "alive during a forward: unless they accumulate, call zero_grad() right after step()",
        )
