"""Layout: from a model as the user built it to units with flat buffers, and anew where parameters are unfrozen."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from onenth.config import Precision
from onenth.engine import access, hooks, loading
from onenth.engine.engine import Engine
from onenth.engine.machine import Activity, UnitState
from onenth.engine.units import Choice, owned
from onenth.errors import ShardError
from onenth.model_states.optimizer_states import Updater
from onenth.model_states.unit import Flat, Kind, Terms, Unit


def unify_ties(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Parameters that share memory become one object, in the modules and in the optimizer's groups.

    Raises ShardError for parameters that overlap without being the same.
    """
    first: dict[tuple[object, ...], nn.Parameter] = {}
    spans: dict[int, dict[nn.Parameter, tuple[int, int]]] = defaultdict(dict)
    names = {id(p): name for name, p in model.named_parameters()}
    same: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.numel():
                continue
            storage = parameter.untyped_storage()._cdata
            place = (storage, parameter.storage_offset(), parameter.shape, parameter.stride())
            chosen = first.setdefault(place, parameter)
            if chosen is not parameter:
                same[id(parameter)] = chosen
                module._parameters[key] = chosen
            start = parameter.storage_offset()
            steps = zip(parameter.shape, parameter.stride(), strict=True)
            reach = sum((int(size) - 1) * int(stride) for size, stride in steps)
            spans[storage][chosen] = (int(start), int(start) + 1 + reach)
    clashes = []
    for ranges in spans.values():
        ordered = sorted(ranges.items(), key=lambda entry: entry[1])
        for (one, here), (other, there) in itertools.pairwise(ordered):
            if there[0] < here[1]:
                clashes.append(f"{names[id(one)]} and {names[id(other)]}")
    if clashes:
        raise ShardError(
            f"parameters overlap in memory without being the same: {'; '.join(clashes)}. Clone one of them"
        )
    for group in [] if optimizer is None or not same else optimizer.param_groups:
        group["params"] = list(dict.fromkeys(same.get(id(p), p) for p in group["params"]))


def build_units(
    model: nn.Module,
    choices: list[Choice],
    terms: Terms,
    updated: set[nn.Parameter],
    materializer: loading.Materializer,
) -> tuple[list[Unit], bool]:
    """Lay out and fill every unit; returns them, and whether this rank's values differed from rank 0's."""
    owner = owned(choices)
    fp32 = kept_fp32(model, terms.precision)
    names = {parameter: name for name, parameter in model.named_parameters()}
    users: dict[int, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for index in {owner[p] for p in module._parameters.values() if p is not None} or {0}:
            users[index].append(module)
    units, differed = [], False
    for index, (name, modules) in enumerate(choices):
        for module in users[index]:
            materializer.fill(module)
        unit = Unit(index, name, modules)
        mine = {p: names[p] for p, one in owner.items() if one == index and p.is_floating_point()}
        unit.flats = make_flats(mine, terms, updated, fp32)
        for flat in unit.flats:
            values = [None if p in materializer.unknown else p.data for p in flat.parameters.parameters]
            differed |= loading.distribute(flat, values, terms.comm, f"unit {name}'s parameters")
            del values
            loading.place(flat)
        units.append(unit)
    return units, differed


def make_flats(
    names: dict[nn.Parameter, str], terms: Terms, updated: set[nn.Parameter], fp32: set[nn.Parameter]
) -> list[Flat]:
    """One flat buffer for each kind among the parameters, in the order of `names`."""
    kinds: dict[Kind, list[nn.Parameter]] = defaultdict(list)
    for parameter in names:
        dtype = torch.float32 if parameter in fp32 else terms.precision.parameters
        trainable = parameter.requires_grad and terms.trains
        kinds[Kind(dtype, trainable, parameter in updated)].append(parameter)
    return [Flat(kind, [names[p] for p in members], members, terms) for kind, members in kinds.items()]


def kept_fp32(model: nn.Module, precision: Precision) -> set[nn.Parameter]:
    """Parameters that stay fp32: of the precision's modules, and of those that a transformers model says must."""
    return {p for module in kept_modules(model, precision, theirs=True) for p in module.parameters()}


def kept_modules(model: nn.Module, precision: Precision, *, theirs: bool) -> list[nn.Module]:
    """Modules of `Precision.keep_fp32`; `theirs`: with transformers' own list, whose modules cast for themselves."""
    entries = list(precision.keep_fp32)
    if theirs:
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            entries += list(getattr(model, attribute, None) or ())
    classes = tuple(entry for entry in entries if not isinstance(entry, str))
    words = {entry for entry in entries if isinstance(entry, str)}
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, classes) or name in words or words & set(name.split("."))
    ]


def check_kept(model: nn.Module, precision: Precision) -> list[str]:
    """Entries of `Precision.keep_fp32` that match no module."""
    return [
        entry if isinstance(entry, str) else entry.__name__
        for entry in precision.keep_fp32
        if not any(
            (name == entry or entry in name.split(".")) if isinstance(entry, str) else isinstance(module, entry)
            for name, module in model.named_modules()
        )
    ]


def replicate(model: nn.Module, terms: Terms) -> list[str]:
    """Move parameters that are not floating point (4-bit bases, say) whole to the device; returns their names."""
    names = []
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            parameter.data = parameter.data.to(terms.comm.device).contiguous()
            terms.comm.broadcast(parameter.data, f"parameter {name}")
            terms.ledger.register(parameter.data, "parameters")
            names.append(name)
    return names


def refresh(engine: Engine, updated: set[nn.Parameter], updater: Updater | None) -> None:
    """Lay out anew the units in which a parameter was unfrozen, or joined the optimizer. All ranks must do the same."""
    for activity in engine.activities:
        if activity.state is UnitState.SHARDED and any(
            engine.terms.trains
            and parameter.requires_grad
            and (not flat.kind.trainable or (parameter in updated and not flat.kind.updated))
            for flat in activity.unit.flats
            for parameter in flat.parameters.parameters
        ):
            rebuild(engine, activity, updated, updater)
            hooks.watch_gradients(engine, activity)
    engine.exchanger.order.units = [unit.index for unit in reversed(engine.units) if unit.trainable]


@torch.no_grad()
def rebuild(engine: Engine, activity: Activity, updated: set[nn.Parameter], updater: Updater | None) -> None:
    """Lay a unit out by what its parameters are now; values and optimizer states are kept."""
    unit = activity.unit
    if any(flat.gradients is not None and flat.gradients.backwards for flat in unit.flats):
        raise ShardError(f"unit {unit.name}: unfreeze parameters right after zero_grad(), not between two backwards")
    slots = [slot for slot in engine.slots().values() if slot.activity is activity]
    values = {slot.parameter: access.whole_parameter(engine, slot) for slot in slots}
    states: dict[nn.Parameter, dict[str, Any]] = {}
    for slot in slots:
        if updater is not None and slot.flat.optimizer_states is not None:
            states[slot.parameter] = access.whole_state(engine, updater, slot)
    for flat in unit.flats:
        if updater is not None and flat.optimizer_states is not None:
            updater.forget(flat.optimizer_states)
    names = {slot.parameter: slot.name for slot in slots}
    fp32 = {slot.parameter for slot in slots if slot.flat.kind.dtype != engine.terms.precision.parameters}
    unit.flats = make_flats(names, engine.terms, updated, fp32)
    for flat in unit.flats:
        loading.place(flat)
    access.write_parameters(engine, activity, values)
    for slot in [slot for slot in engine.slots().values() if slot.activity is activity]:
        if updater is not None and states.get(slot.parameter):
            access.set_state(updater, slot, states[slot.parameter])
