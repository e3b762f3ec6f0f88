"""What users call to train: `shard` and its company. The command line and the tests use the same functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import nn

from onenth.anatomy.out_of_memory import explain_steps
from onenth.breakdown import Breakdown
from onenth.comm import Communicator
from onenth.config import Config
from onenth.engine import access, guards, hooks
from onenth.engine import optimizer as optimizers
from onenth.engine.engine import Engine, Slot, engine_of
from onenth.engine.loading import Init
from onenth.engine.optimizer import ShardedOptimizer
from onenth.engine.report import report
from onenth.engine.sharding import shard as shard_in_place
from onenth.errors import ShardError
from onenth.world import init as join
from onenth.world import local_device

Target: TypeAlias = nn.Module | nn.Parameter


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: Config | None = None,
    *,
    group: Any = None,
    device: torch.device | str | None = None,
    init: Init | None = None,
    **settings: Any,
) -> tuple[nn.Module, ShardedOptimizer | None]:
    """Shard a model and its optimizer over the ranks of a process group, in place.

    model: any module, on the cpu, an accelerator or meta. The same object comes back, hooked; its parameters are moved
        unit by unit and hold rank 0's values. Its forward and backward are called as before.
    optimizer: any elementwise optimizer over any subset of the parameters; None for a model that only runs forward.
    config, settings: an `onenth.Config`, and single fields of it on top.
    group: the ranks; None: the default process group, made from the environment if there is none (`onenth.init`).
    device: where this rank computes; None: its accelerator, or the cpu.
    init: for a model on meta everywhere: fills one module's own parameters and buffers in place.

    Returns the model and a `ShardedOptimizer` (None without an optimizer).
    Raises ConfigError listing every wrong setting, ShardError listing every obstacle.
    """
    resolved = Config.resolve(config, settings)
    join(group)
    place = torch.device(device) if device is not None else local_device(group)
    comm = Communicator(group, place, resolved.timeout_delta)
    model, sharded = shard_in_place(model, optimizer, resolved, comm, init)
    engine = engine_of(model)
    _extend(model, engine)
    explain_steps(model, engine)
    return model, sharded


def _extend(model: nn.Module, engine: Engine) -> None:
    """Methods of the model that must reach the shards, on the instance."""
    plain_zero_grad, plain_load = model.zero_grad, model.load_state_dict

    def zero_grad(set_to_none: bool = True) -> None:
        engine.zero_gradients()
        plain_zero_grad(set_to_none)

    @functools.wraps(plain_load)
    def load_state_dict(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return _load_state_dict(engine, plain_load, state_dict, *args, **kwargs)

    guards.put_methods(model, {"zero_grad": zero_grad, "load_state_dict": load_state_dict})
    generate = getattr(model, "generate", None)
    if callable(generate) and engine.partitions_parameters and "synced_gpus" in inspect.signature(generate).parameters:
        guards.put_methods(model, {"generate": functools.partial(_generate, engine, generate)})


def _generate(engine: Engine, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """transformers' generate: ranks that stop early go on running forward while others gather.

    transformers counts those that still run over the default group; in another group the model is gathered instead.
    """
    if engine.comm.size == 1 or all(activity.is_whole for activity in engine.activities):
        return generate(*args, **kwargs)
    if engine.comm.is_default:
        return generate(*args, **{"synced_gpus": True, **kwargs})
    with access.gathered(engine, engine.activities, modify=False):
        return generate(*args, **kwargs)


@torch.no_grad()
def _load_state_dict(
    engine: Engine, plain: Callable[..., Any], state_dict: Any, strict: bool = True, assign: bool = False
) -> Any:
    """Whole parameters (the same dict on every rank) into every copy that is kept; buffers as PyTorch loads them."""
    slots = engine.slots()
    names = {name: p for name, p in engine.model.named_parameters(remove_duplicate=False) if p in slots}
    given = {name: value for name, value in state_dict.items() if name in names}
    wrong = [
        f"{name} is {tuple(value.shape)}, the model's is {tuple(names[name].shape)}"
        for name, value in given.items()
        if value.shape != names[name].shape
    ]
    missing = [name for name in names if name not in given]
    unknown = [name for name in state_dict if name not in names and name not in dict(engine.model.named_buffers())]
    if wrong or (strict and (missing or unknown)):
        raise ShardError(
            f"load_state_dict: missing {missing}, unexpected {unknown}, of another shape: {'; '.join(wrong) or 'none'}"
            ". It takes whole parameters on every rank, as onenth.full_state_dict gives them on rank 0"
        )
    values = {names[name]: value for name, value in given.items()}
    for activity in engine.activities:
        access.write_parameters(engine, activity, values)
    buffers = dict(engine.model.named_buffers())
    for name, value in state_dict.items():
        if name in buffers:
            buffers[name].copy_(value)
    return nn.modules.module._IncompatibleKeys(missing, unknown)


def unshard(model: nn.Module) -> nn.Module:
    """Make `model` a plain module again, whole on every rank, in the parameters' dtype. The same object comes back."""
    engine = engine_of(model)
    slots = engine.slots()
    with access.gathered(engine, engine.activities, modify=False):
        values = {parameter: parameter.data.clone() for parameter in slots}
    for activity in engine.activities:
        for undo in activity.undo:
            undo()
    guards.remove(model)
    for parameter, value in values.items():
        parameter.grad = None
        parameter.data = value
    if engine.cap is not None:
        engine.cap.close()
    del model.__dict__["_onenth"]
    engine.closed = True
    return model


def register_forward_method(model: nn.Module, name: str) -> None:
    """Let another method of the model (`"training_step"`) count as its forward. Raises ShardError if there is none."""
    engine = engine_of(model)
    if not callable(getattr(model, name, None)):
        raise ShardError(f"{type(model).__name__} has no method {name!r}")
    hooks.wrap(engine, engine.root, model, name)


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, backwards keep whole local gradients (2Ψ bytes more at stages 2 and 3) and send nothing.

    The next backward outside exchanges them with its own; a `step` before that raises.
    """
    return optimizers.no_sync(engine_of(model))


def gathered(target: Target | Iterable[Target], modify: bool = False) -> AbstractContextManager[None]:
    """Inside, parameters are whole on every rank (in the parameters' dtype), with those of their units.

    target: a module or a parameter, or several of them.
        All ranks must enter and leave together; what they do inside is free.
    modify: keep rank 0's changes, on every rank; only elements that changed reach the master copy.
    """
    engine, slots = _slots(target)
    chosen = {slot.activity: None for slot in slots}
    ordered = [activity for activity in engine.activities if activity in chosen]
    return access.gathered(engine, ordered, modify=modify)


def _slots(target: Target | Iterable[Target]) -> tuple[Engine, list[Slot]]:
    entries = [target] if isinstance(target, nn.Module | nn.Parameter) else list(target)
    wanted = [p for entry in entries for p in (entry.parameters() if isinstance(entry, nn.Module) else [entry])]
    found = [(engine, engine.slots().get(parameter)) for parameter in wanted for engine in _engines(parameter)]
    slots = [slot for _, slot in found if slot is not None]
    if not found or len(slots) < sum(parameter.is_floating_point() for parameter in wanted):
        raise ShardError("these are not parameters of a model that onenth.shard returned")
    return found[0][0], slots


def _engines(parameter: nn.Parameter) -> list[Engine]:
    engine = getattr(parameter, "_onenth", lambda: None)()
    return [] if engine is None else [engine]


def _slot(parameter: nn.Parameter) -> tuple[Engine, Slot]:
    engine, slots = _slots(parameter)
    return engine, slots[0]


def full_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The gradient that a step would use, before clipping, whole on every rank; None if there is none."""
    return access.whole_gradient(*_slot(parameter))


def set_full_gradient(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the gradient that the next step uses with a whole tensor, the same on every rank."""
    access.set_gradient(*_slot(parameter), value)


def full_optimizer_state(optimizer: ShardedOptimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """The optimizer's states of a parameter, whole on every rank: tensors of its shape, and scalars."""
    engine, slot = _slot(parameter)
    return access.whole_state(engine, optimizer.updater, slot)


def set_full_optimizer_state(optimizer: ShardedOptimizer, parameter: nn.Parameter, state: dict[str, Any]) -> None:
    """Replace the optimizer's states of a parameter with whole ones, the same on every rank."""
    access.set_state(optimizer.updater, _slot(parameter)[1], state)


def full_state_dict(
    model: nn.Module, *, dtype: torch.dtype | None = None, trainable_only: bool = False
) -> dict[str, torch.Tensor]:
    """Whole parameters (from the master copy) and buffers on the CPU at rank 0; `{}` on the others.

    dtype: cast floating-point tensors. trainable_only: parameters that require gradients, and no buffers.
    All ranks must call it. One tensor at a time is put together.
    """
    engine = engine_of(model)
    slots = engine.slots()
    done: dict[int, torch.Tensor] = {}
    result: dict[str, torch.Tensor] = {}
    for name, tensor in _state_items(model, trainable_only=trainable_only):
        if id(tensor) not in done:
            slot = slots.get(tensor) if isinstance(tensor, nn.Parameter) else None
            value = tensor.detach() if slot is None else access.whole_parameter(engine, slot, to=0)
            if engine.comm.rank == 0:
                wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
                done[id(tensor)] = value.to(device="cpu", dtype=wanted, copy=True)
            else:
                done[id(tensor)] = value.new_empty(0)
        result[name] = done[id(tensor)]
    return result if engine.comm.rank == 0 else {}


def _state_items(model: nn.Module, *, trainable_only: bool) -> Iterable[tuple[str, torch.Tensor]]:
    """What the unsharded model's `state_dict` would hold, in its order."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for key, parameter in module._parameters.items():
            if parameter is not None and (parameter.requires_grad or not trainable_only):
                yield dot + key, parameter
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set and not trainable_only:
                yield dot + key, buffer


def memory_report(model: nn.Module, optimizer: ShardedOptimizer | None = None) -> Breakdown:
    """Bytes that this rank holds now, by (state, tier), beside what the equations say (`costs.py`)."""
    return report(engine_of(model), None if optimizer is None else optimizer.updater)
