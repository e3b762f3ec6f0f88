"""The memory report: what the ledger holds, beside what the equations say it must."""

from __future__ import annotations

from collections import Counter

import torch

from onenth import costs
from onenth.breakdown import Breakdown
from onenth.engine.engine import Engine
from onenth.model_states.optimizer_states import Updater
from onenth.model_states.unit import Flat
from onenth.states import ModelState, ResidualState, Tier


def report(engine: Engine, updater: Updater | None) -> Breakdown:
    """Bytes that this rank holds now, by (state, tier), and the equations' figures for the model states."""
    expected = equations(engine, updater, backwards=None)
    held = engine.ledger.held()
    local = (str(ResidualState.LOCAL_GRADIENTS), Tier.DEVICE)  # held by `no_sync`: gradients, to the equations
    if local in held:
        key = (str(ModelState.GRADIENTS), Tier.DEVICE)
        held[key] = held.get(key, 0) + held.pop(local)
    from_master = engine.partitions_parameters and any(flat.parameters.shard is None for flat in engine.flats())
    notes = {str(ModelState.PARAMETERS): "from the master"} if from_master else {}
    shown = {key: count for key, count in expected.items() if count}
    if from_master:  # a row of its own: nothing is held beside the master, and nothing should be
        held.setdefault((str(ModelState.PARAMETERS), Tier.DEVICE), 0)
        shown.setdefault((str(ModelState.PARAMETERS), Tier.DEVICE), 0)
    return Breakdown(held, shown, notes)


def equations(
    engine: Engine, updater: Updater | None, *, backwards: int | None, stage: int | None = None
) -> Counter[tuple[str, Tier]]:
    """The equations' bytes of this rank, by (state, tier).

    backwards: exchanged since the last `zero_grad`; None: as many as each flat buffer has, unexchanged ones included.
    stage: None is the engine's own.
    """
    stage = engine.config.stage if stage is None else stage
    placement = costs.Placement(stage=stage, ranks=engine.comm.size, rank=engine.comm.rank)
    expected: Counter[tuple[str, Tier]] = Counter()
    for flat in engine.flats():
        gradients = flat.gradients
        so_far = 0 if gradients is None else gradients.backwards
        expected.update(
            costs.model_state_bytes(
                [describe(flat, updater)],
                placement,
                _sizes(flat, updater),
                backwards=so_far if backwards is None else backwards,
                unexchanged=backwards is None and gradients is not None and gradients.is_open,
            )
        )
    return expected


def widening(engine: Engine) -> int:
    """Bytes that gradients hold in passing, beyond those in the end, in a step of several backwards."""
    placement = costs.Placement(stage=engine.config.stage, ranks=engine.comm.size, rank=engine.comm.rank)
    flats = [describe(flat, None) for flat in engine.flats()]
    return costs.widening_bytes(flats, placement, costs.ItemSizes.of(engine.config.dtypes))


def describe(flat: Flat, updater: Updater | None) -> costs.FlatBuffer:
    """A flat buffer as the equations see it."""
    return costs.FlatBuffer(
        flat.parameters.partition.numels,
        parameter_itemsize=flat.kind.dtype.itemsize,
        gradient_itemsize=flat.kind.dtype.itemsize if flat.gradients is None else flat.gradients.dtype.itemsize,
        trainable=flat.kind.trainable,
        updated=flat.kind.updated,
        unused=_unused(flat, updater),
    )


def _unused(flat: Flat, updater: Updater | None) -> frozenset[int]:
    """Parameters of which the optimizer has no states on this rank: no step had a gradient for them."""
    if flat.optimizer_states is None or updater is None:
        return frozenset()
    pieces = [piece for held in flat.optimizer_states.pieces.values() for piece in held]
    return frozenset(piece.range.parameter for piece in pieces if not updater.inner.state.get(piece.tensor))


def _sizes(flat: Flat, updater: Updater | None) -> costs.ItemSizes:
    """Item sizes of this flat buffer, with the states that its optimizer has made so far."""
    moments: dict[str, int] = {}
    scalars: dict[str, int] = {}
    states = flat.optimizer_states
    pieces = [] if states is None or updater is None else [p for held in states.pieces.values() for p in held]
    for piece in pieces:
        for name, value in updater.inner.state.get(piece.tensor, {}).items() if updater is not None else ():
            if isinstance(value, torch.Tensor) and value.shape == piece.tensor.shape:
                moments[name] = value.itemsize
            elif isinstance(value, torch.Tensor):
                scalars[name] = value.nbytes
    master = None if states is None or states.master is None else states.master.itemsize
    sums = 4 if flat.gradients is None else flat.gradients.sums_dtype.itemsize
    return costs.ItemSizes(sums=sums, master=master, moments=moments, scalars=scalars)
