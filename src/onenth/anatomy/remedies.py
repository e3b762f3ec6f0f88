"""Remedies: what would have made a step fit, cheapest first, with the bytes that each saves.

Bytes of model states at another stage are the equations' (`costs.py`), as a share of what is held. Activations are
taken to grow evenly over the units that are still to run, and to shrink with the micro-batch; recomputed, those of one
unit and the inputs of all are left (Chen et al., 2016, arXiv 1604.06174).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from onenth.anatomy.shortage import Shortage
from onenth.engine.engine import Engine
from onenth.engine.report import equations
from onenth.states import ModelState, ResidualState, Tier

_SCALE_WITH_BATCH = (
    ResidualState.ACTIVATIONS,
    ResidualState.TEMPORARY,
    ResidualState.INPUTS,
    ResidualState.OUTPUTS,
)
_STAGE_TEXT = {1: "stage=1", 2: "stage=2", 3: "stage=3 (half as much traffic again)"}
_STAGE_COST = {1: 0.0, 2: 0.01, 3: 0.3}
_HALVINGS = 4  # of the micro-batch that are considered


@dataclass(frozen=True)
class Change:
    """One setting changed. kind, level: which, and how far. cost: a measure of the time that it costs, to order by.

    states, activations: bytes that it saves of each. parts: what the micro-batch is divided by.
    """

    kind: str
    level: int
    text: str
    cost: float
    states: int = 0
    activations: int = 0
    parts: int = 1


@dataclass(frozen=True)
class Remedy:
    """Changes that are made together. saves: bytes, that all of them save."""

    changes: tuple[Change, ...]
    saves: int

    @property
    def cost(self) -> float:
        """The time that all of them cost."""
        return sum(change.cost for change in self.changes)

    @property
    def text(self) -> str:
        """The changes in words."""
        return " and ".join(change.text for change in self.changes)


@dataclass(frozen=True)
class Remedies:
    """found: the cheapest that would have fitted; where none would, the one that saves most.

    needed: bytes to be saved: those that were missing, those that units still to run would have kept, and those of
    optimizer states that the first step will make.
    """

    needed: int
    found: tuple[Remedy, ...]
    fits: bool


def remedies(shortage: Shortage, engine: Engine | None, count: int = 3) -> Remedies:
    """The `count` cheapest remedies."""
    activations = _Activations(shortage, engine)
    needed = shortage.missing + activations.to_come + _states_to_come(engine)
    every = list(_combined(_changes(shortage, activations, engine), _grows(shortage) + activations.to_come))
    every.sort(key=lambda one: (one.cost, -one.saves))
    chosen: list[Remedy] = []
    for remedy in every:
        if remedy.saves >= needed and not any(_goes_further(remedy, than=other) for other in chosen):
            chosen.append(remedy)
    if chosen:
        return Remedies(needed, tuple(chosen[:count]), fits=True)
    most = sorted(every, key=lambda one: -one.saves)
    return Remedies(needed, tuple(remedy for remedy in most[:1] if remedy.saves > 0), fits=False)


def _goes_further(one: Remedy, *, than: Remedy) -> bool:
    """Whether a remedy changes all that another one does, as far or further."""
    levels = {change.kind: change.level for change in one.changes}
    return all(levels.get(change.kind, -1) >= change.level for change in than.changes)


class _Activations:
    """What a step's activations are, as far as the moment of failure tells.

    held: bytes now. to_come: bytes that the units which have not finished their forward will keep. left: bytes that
    recomputation would leave of both.
    """

    def __init__(self, shortage: Shortage, engine: Engine | None) -> None:
        self.held = shortage.held.get(ResidualState.ACTIVATIONS, 0)
        self.to_come = self.left = 0
        blocks = [] if engine is None else engine.activities[1:]
        ran = [block for block in blocks if block.has_outstanding]
        if not ran or engine is None:
            return
        own = sum(
            count
            for module, count in shortage.modules.items()
            if any(module == block.unit.name or module.startswith(f"{block.unit.name}.") for block in ran)
        )
        one = (own if shortage.modules else self.held) // len(ran)
        late = [] if engine.in_backward else [block for block in blocks if not block.has_outstanding]
        self.to_come = one * len(late)
        inputs = max(block.input_bytes for block in ran) * (len(ran) + len(late))
        # Beside the inputs of all, one unit's activations while it is run again, and as much for their gradients.
        self.left = min(self.held + self.to_come, self.held - one * len(ran) + inputs + 2 * one)


def _states_to_come(engine: Engine | None) -> int:
    """Bytes of the states that the optimizer makes in its first step; 0 once it has made them."""
    updater = None if engine is None else engine.updater
    if engine is None or updater is None or any(updater.inner.state.values()):
        return 0
    defaults = updater.inner.defaults
    moments = 2 if "betas" in defaults else int(bool(defaults.get("momentum")))  # Adam's kind, or SGD's
    states = [flat.optimizer_states for flat in engine.flats() if flat.optimizer_states is not None]
    numel = sum(piece.tensor.numel() for one in states for pieces in one.pieces.values() for piece in pieces)
    return moments * numel * engine.config.dtypes.moments.itemsize


def _grows(shortage: Shortage) -> int:
    """Bytes that grow with the micro-batch; what was asked for is taken to be of them."""
    return sum(shortage.held.get(state, 0) for state in _SCALE_WITH_BATCH) + (shortage.asked or 0)


def _changes(shortage: Shortage, activations: _Activations, engine: Engine | None) -> list[list[Change]]:
    """Alternatives, in groups of which one or none can be chosen."""
    groups = [list(_smaller_batches(shortage, engine))]
    if engine is None:
        return groups
    groups.append(list(_stages(shortage, engine)))
    if activations.left and engine.config.activations == "keep":
        saved = activations.held + activations.to_come - activations.left
        groups.append(
            [Change("recompute", 1, 'activations="recompute" (a third more compute)', 0.33, activations=saved)]
        )
    return groups


def _smaller_batches(shortage: Shortage, engine: Engine | None) -> Iterator[Change]:
    batch = None if engine is None else engine.batch
    sums = 0  # that several backwards keep beyond one
    if engine is not None:
        key = (str(ModelState.GRADIENTS), Tier.DEVICE)
        sums = equations(engine, engine.updater, backwards=2)[key] - shortage.held.get(ModelState.GRADIENTS, 0)
    for halving in range(1, _HALVINGS + 1):
        parts = 2**halving
        if batch is not None and batch % parts:
            return
        size = f"micro-batch {batch // parts} instead of {batch}" if batch else f"a micro-batch of one {parts}th"
        yield Change("batch", parts, f"{size}, over {parts} backwards a step", 0.1 * halving, -sums, parts=parts)


def _stages(shortage: Shortage, engine: Engine) -> Iterator[Change]:
    if engine.comm.size == 1:
        return
    now = equations(engine, engine.updater, backwards=1)
    for stage in range(engine.config.stage + 1, 4):
        then = equations(engine, engine.updater, backwards=1, stage=stage)
        saved = 0
        for (state, tier), count in now.items():
            if tier is Tier.DEVICE and count:
                held = shortage.held.get(state, 0)
                saved += held - held * then[(state, tier)] // count
        if engine.config.stage == 0:
            saved += _states_to_come(engine) * (engine.comm.size - 1) // engine.comm.size
        if stage == 3:
            saved -= _gathered(engine)
        yield Change("stage", stage, _STAGE_TEXT[stage], _STAGE_COST[stage], states=saved)


def _gathered(engine: Engine) -> int:
    """Bytes of the units that stage 3 has whole at once: the root, and the two largest others."""
    whole = [[flat.parameters.full for flat in unit.flats] for unit in engine.units]
    sizes = [sum(full.numel() * full.itemsize for full in fulls) for fulls in whole]
    return sizes[0] + sum(sorted(sizes[1:])[-2:])


def _combined(groups: Sequence[Sequence[Change]], grows: int) -> Iterator[Remedy]:
    """Every choice of changes that all save something; grows: bytes that grow with the micro-batch."""
    for chosen in product(*[[None, *group] for group in groups]):
        changes = tuple(change for change in chosen if change is not None)
        states, activations = sum(one.states for one in changes), sum(one.activations for one in changes)
        parts = max((one.parts for one in changes), default=1)
        halved = max(0, grows - activations) * (parts - 1) // parts
        if changes and all(one.states > 0 or one.activations > 0 or one.parts > 1 for one in changes):
            yield Remedy(changes, states + activations + halved)
