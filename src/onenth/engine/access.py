"""Access: whole parameters, gradients and optimizer states, put together from the ranges that ranks hold, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from onenth.engine.engine import Engine, Slot
from onenth.engine.machine import Activity, UnitState
from onenth.errors import ShardError
from onenth.model_states.optimizer_states import OptimizerStates, Piece, Updater, cut
from onenth.partition import Range

Held = Callable[[Range], torch.Tensor | None]


def assemble(
    engine: Engine, slot: Slot, held: Held, dtype: torch.dtype, what: str, *, everywhere: bool, to: int | None = None
) -> torch.Tensor:
    """A whole tensor in the parameter's shape from the ranges that ranks hold.

    held: this rank's values of a range, or None. everywhere: whether every rank holds all ranges (nothing is sent).
    to: the one rank that needs the result; None: all.
    """
    parameters = slot.flat.parameters
    ranges = parameters.partition.owners(slot.index)
    whole = torch.empty(parameters.partition.numels[slot.index], dtype=dtype, device=engine.comm.device)
    for owned in ranges:
        if (values := held(owned)) is not None:
            whole[owned.start : owned.stop].copy_(values)
    if not everywhere and engine.comm.size > 1:
        parts = [(owned.rank, owned.start, owned.stop) for owned in ranges]
        engine.comm.assemble(whole, parts, f"{what} of {parameters.names[slot.index]}", to)
    return whole.view(parameters.shapes[slot.index])


def within(slot: Slot, owned: Range, segment: torch.Tensor) -> torch.Tensor:
    """The part of a rank's segment (L,) that holds `owned`."""
    partition = slot.flat.parameters.partition
    start = partition.offsets[slot.index] + owned.start - owned.rank * partition.shard_numel
    return segment.narrow(0, start, owned.stop - owned.start)


@torch.no_grad()
def whole_parameter(engine: Engine, slot: Slot, to: int | None = None) -> torch.Tensor:
    """A parameter from the most precise copy there is: the master, or else the parameters themselves."""
    parameters, states = slot.flat.parameters, slot.flat.optimizer_states
    if states is not None and states.master is not None:
        held = {rank: states.segment(rank) for rank in states.segments}
    elif parameters.shard is not None:
        held = {engine.comm.rank: parameters.shard}
    else:
        held = {rank: parameters.segment(parameters.full, rank) for rank in range(engine.comm.size)}
    return assemble(
        engine,
        slot,
        lambda owned: within(slot, owned, held[owned.rank]) if owned.rank in held else None,
        next(iter(held.values())).dtype,
        "value",
        everywhere=len(held) == engine.comm.size,
        to=to,
    )


@torch.no_grad()
def write_parameters(engine: Engine, activity: Activity, values: dict[nn.Parameter, torch.Tensor]) -> None:
    """Give some parameters of a unit new whole values, the same on every rank: in every copy that is kept."""
    for flat in activity.unit.flats:
        members = flat.parameters.parameters
        if not any(parameter in values for parameter in members):
            continue
        states = flat.optimizer_states
        for index, parameter in enumerate(members):
            if parameter not in values:
                continue
            slot, flattened = Slot(activity, flat, index), values[parameter].reshape(-1)
            for owned in flat.parameters.partition.owners(index):
                part = flattened[owned.start : owned.stop]
                if states is not None and states.master is not None and owned.rank in states.segments:
                    within(slot, owned, states.segment(owned.rank)).copy_(part)
                if flat.parameters.shard is not None and owned.rank == engine.comm.rank:
                    within(slot, owned, flat.parameters.shard).copy_(part)
            if flat.parameters.is_whole:
                flat.parameters.views[index].copy_(values[parameter])


@contextmanager
def gathered(engine: Engine, activities: list[Activity], *, modify: bool) -> Iterator[None]:
    """The units whole inside; with `modify`, rank 0's changes are kept at the end, unless the block raised."""
    for activity in activities:
        engine.residency.fetch(activity)
        activity.pins += 1
    try:
        yield
        if modify:
            for activity in activities:
                _keep_changes(engine, activity)
    finally:
        for activity in activities:
            activity.pins -= 1
            if activity.state is UnitState.GATHERED and not engine.in_backward and not engine.root_depth:
                engine.residency.release(activity)


@torch.no_grad()
def _keep_changes(engine: Engine, activity: Activity) -> None:
    for flat in activity.unit.flats:
        parameters, states = flat.parameters, flat.optimizer_states
        parameters.adopt_replaced()
        engine.comm.broadcast(parameters.full, f"changes of unit {activity.unit.name}")
        if parameters.shard is not None:
            parameters.shard.copy_(parameters.own)
        if states is None or states.master is None:
            continue
        for rank in states.segments:
            master, new = states.segment(rank), parameters.segment(parameters.full, rank)
            old = master.to(new.dtype)
            changed = (new != old) & ~((new != new) & (old != old))
            master.copy_(torch.where(changed, new.to(master.dtype), master))


@torch.no_grad()
def whole_gradient(engine: Engine, slot: Slot) -> torch.Tensor | None:
    """The reduced gradient, unscaled, in the dtype it is stored in; None if no backward was exchanged."""
    gradients = slot.flat.gradients
    if gradients is None or gradients.backwards == 0:
        return None
    everywhere = gradients.whole
    held = gradients.sums if gradients.sums is not None else gradients.shard
    assert held is not None
    whole = assemble(
        engine,
        slot,
        lambda owned: (
            within(slot, owned, gradients.segment(owned.rank)) if everywhere or owned.rank == engine.comm.rank else None
        ),
        held.dtype,
        "gradient",
        everywhere=everywhere,
    )
    return whole.div_(engine.scaler.scale) if engine.scaler.active else whole


@torch.no_grad()
def set_gradient(engine: Engine, slot: Slot, value: torch.Tensor) -> None:
    """Replace the reduced gradient with a whole `value`, the same on every rank."""
    gradients = slot.flat.gradients
    if gradients is None:
        raise ShardError(f"parameter {slot.name} is frozen: it has no gradient to set")
    gradients.ensure_shard()
    if value.shape != slot.flat.parameters.shapes[slot.index]:
        raise ShardError(
            f"gradient of {slot.name}: shape {tuple(value.shape)} given, {tuple(slot.parameter.shape)} needed"
        )
    scaled = value.reshape(-1) * engine.scaler.scale if engine.scaler.active else value.reshape(-1)
    for owned in slot.flat.parameters.partition.owners(slot.index):
        if gradients.whole or owned.rank == engine.comm.rank:
            within(slot, owned, gradients.segment(owned.rank)).copy_(scaled[owned.start : owned.stop])
    gradients.seen[slot.index] = True
    gradients.remeasure()


def states_of(slot: Slot) -> OptimizerStates:
    """The optimizer states of a parameter's flat buffer."""
    if slot.flat.optimizer_states is None:
        raise ShardError(f"parameter {slot.name} is not updated by the optimizer: it has no optimizer state")
    return slot.flat.optimizer_states


def pieces_of(slot: Slot) -> Iterable[Piece]:
    """The pieces of one parameter on this rank."""
    held = states_of(slot).pieces.values()
    return [piece for pieces in held for piece in pieces if piece.range.parameter == slot.index]


@torch.no_grad()
def whole_state(engine: Engine, updater: Updater, slot: Slot) -> dict[str, Any]:
    """Every optimizer state of a parameter: whole tensors in its shape, scalars as they are."""
    held = {(p.range.rank, p.range.start): (p, updater.inner.state.get(p.tensor, {})) for p in pieces_of(slot)}
    described: dict[str, Any] = next((d for d in engine.comm.tell_all(_describe(held)) if d), {})
    everywhere = len(states_of(slot).segments) == engine.comm.size

    def of(owned: Range, name: str) -> torch.Tensor | None:
        found = held.get((owned.rank, owned.start))
        return None if found is None else found[1][name]

    return {
        name: assemble(engine, slot, lambda owned, n=name: of(owned, n), spec, f"{name}", everywhere=everywhere)  # type: ignore[misc]
        if isinstance(spec, torch.dtype)
        else spec
        for name, spec in described.items()
    }


def _describe(held: dict[Any, tuple[Piece, dict[str, Any]]]) -> dict[str, Any]:
    """By name: the dtype of a state of the parameter's shape, or the value of a scalar one."""
    for piece, state in held.values():
        return {
            name: value.dtype
            if isinstance(value, torch.Tensor) and value.shape == piece.tensor.shape
            else (value.detach().clone() if isinstance(value, torch.Tensor) else value)
            for name, value in state.items()
        }
    return {}


def set_state(updater: Updater, slot: Slot, state: dict[str, Any]) -> None:
    """Replace the named optimizer states of a parameter with whole ones, the same on every rank."""
    shape = slot.flat.parameters.shapes[slot.index]
    wrong = [
        f"{name}: {tuple(value.shape)}"
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != shape
    ]
    if wrong:
        raise ShardError(f"optimizer states of {slot.name}, which is {tuple(shape)}: {'; '.join(wrong)} given")
    for piece in pieces_of(slot):
        new = {name: cut(value, shape, piece) for name, value in state.items()}
        updater.put(piece, {**updater.inner.state.get(piece.tensor, {}), **new})
