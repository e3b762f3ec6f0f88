"""Guards: what would read or copy a released parameter by a side door gathers it, or raises and names the way out.

Every module that holds sharded parameters gets a `_parameters` dict that sees attribute access, and a few methods on
the instance that stand before PyTorch's own. `remove` takes all of it away again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from onenth.engine.engine import Engine
from onenth.engine.machine import Activity
from onenth.errors import ShardError

_OURS = "_onenth_methods"  # names of the methods on the instance that are not the module's own


def put_methods(module: nn.Module, methods: dict[str, Callable[..., Any]]) -> None:
    """Set methods on one instance, remembered so that `remove` and copies leave them out."""
    module.__dict__.setdefault(_OURS, set()).update(methods)
    module.__dict__.update(methods)


class GuardedParameters(dict[str, nn.Parameter | None]):
    """A module's `_parameters`: reading a released one by name gathers it inside the model's forward, else raises.

    Iterating does not: shapes and dtypes of released parameters are true.
    """

    def __init__(self, engine: Engine, prefix: str, parameters: dict[str, Any], owner: dict[str, Activity]) -> None:
        super().__init__(parameters)
        self.engine, self.prefix, self.owner = engine, prefix, owner
        self.describing = False

    def __getitem__(self, name: str) -> nn.Parameter | None:
        activity = self.owner.get(name)
        if activity is not None and not self.describing and self.engine.partitions_parameters and not activity.is_whole:
            self.engine.read(activity, self.prefix + name)
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        if name in self.owner and value is not super().__getitem__(name):
            raise ShardError(
                f"parameter {self.prefix}{name} is sharded and cannot be replaced: write into it inside "
                "`with onenth.gathered(module, modify=True):`, or replace it before onenth.shard"
            )
        super().__setitem__(name, value)

    def released(self) -> list[str]:
        """Names of the parameters that are not whole."""
        if not self.engine.partitions_parameters:
            return []
        return [self.prefix + name for name, activity in self.owner.items() if not activity.is_whole]

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        refuse_released(self, "copy.deepcopy")
        return {name: copy.deepcopy(value, memo) for name, value in self.items()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_released(self, "pickling")
        return dict, (dict(self),)


def refuse_released(parameters: GuardedParameters, what: str) -> None:
    """Raise ShardError if `what` would see released parameters."""
    if names := parameters.released():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ShardError(
            f"{what} would see placeholders, not values: {', '.join(names[:3])}{more} are released. Use it inside "
            "`with onenth.gathered(model):`; for whole weights call onenth.full_state_dict(model), for a plain model "
            "onenth.unshard(model)"
        )


def install(engine: Engine) -> None:
    """Guard every module that holds sharded parameters, and the model."""
    owner = {
        id(parameter): activity
        for activity in engine.activities
        for flat in activity.unit.flats
        for parameter in flat.parameters.parameters
    }
    wrapped = {module for unit in engine.units for _, module in unit.modules}
    for name, module in engine.model.named_modules():
        held = {key: owner[id(p)] for key, p in module._parameters.items() if p is not None and id(p) in owner}
        if not held and module not in wrapped:
            continue
        prefix = f"{name}." if name else ""
        parameters = GuardedParameters(engine, prefix, module._parameters, held)
        module.__dict__["_parameters"] = parameters
        put_methods(module, Guard(module, parameters).methods())


def remove(model: nn.Module) -> None:
    """Take the guards, and every other method on the instances, away."""
    for module in model.modules():
        if isinstance(module._parameters, GuardedParameters):
            module.__dict__["_parameters"] = dict(module._parameters)
        for name in module.__dict__.pop(_OURS, ()):
            module.__dict__.pop(name, None)


class Guard:
    """What stands before PyTorch's own methods of one module."""

    def __init__(self, module: nn.Module, parameters: GuardedParameters) -> None:
        self.module, self.parameters, self.kind = module, parameters, type(module)

    def methods(self) -> dict[str, Callable[..., Any]]:
        """By the name that PyTorch or Python calls."""
        return {
            "_apply": self.apply,
            "extra_repr": self.extra_repr,
            "_save_to_state_dict": self.save_to_state_dict,
            "_load_from_state_dict": self.load_from_state_dict,
            "__deepcopy__": self.deepcopy,
            "__reduce_ex__": self.reduce_ex,
        }

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """`.to()` and its kind: buffers follow; parameters must stay what they are."""
        for parameter in self.parameters.values():
            if parameter is not None:
                _refuse_change(parameter, fn)
        for child in self.module.children() if recurse else ():
            child._apply(fn)
        for key, buffer in self.module._buffers.items():
            if buffer is not None:
                self.module._buffers[key] = fn(buffer)
        return self.module

    def extra_repr(self) -> str:
        """Printing a module asks whether there is a bias, not what it is."""
        self.parameters.describing = True
        try:
            return self.kind.extra_repr(self.module)
        finally:
            self.parameters.describing = False

    def save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """`state_dict()` of whole parameters only."""
        refuse_released(self.parameters, "state_dict()")
        self.kind._save_to_state_dict(self.module, *args, **kwargs)

    def load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """`load_state_dict()` goes through the model, which knows the master copies."""
        if self.parameters.owner:
            raise ShardError(
                f"load_state_dict() of a part of a sharded model ({self.parameters.prefix.rstrip('.') or 'the model'}) "
                "would not reach the master copy: call load_state_dict on the model that onenth.shard returned"
            )
        self.kind._load_from_state_dict(self.module, *args, **kwargs)

    def deepcopy(self, memo: dict[int, Any]) -> nn.Module:
        """A deep copy is a plain module."""
        return plain_copy(self.module, memo)

    def reduce_ex(self, protocol: Any) -> Any:
        """A pickle is a plain module's."""
        refuse_released(self.parameters, "pickling")
        return plain_copy(self.module, {}).__reduce_ex__(protocol)


def _refuse_change(parameter: nn.Parameter, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    probe = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    result = fn(probe)
    if result.dtype != probe.dtype or result.device != probe.device or not torch.equal(result, probe):
        raise ShardError(
            f"a sharded model cannot be changed from {probe.dtype} on {probe.device} to {result.dtype} on "
            f"{result.device}: call onenth.shard(..., precision=..., device=...), or onenth.unshard(model) first"
        )


def plain_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy that is a plain module: nothing of onenth is copied."""
    if isinstance(module._parameters, GuardedParameters):
        refuse_released(module._parameters, "copy.deepcopy")
    copied = type(module).__new__(type(module))
    memo[id(module)] = copied
    ours = {*module.__dict__.get(_OURS, ()), _OURS, "_onenth"}
    state = {key: value for key, value in module.__dict__.items() if key not in ours}
    copied.__dict__.update(copy.deepcopy(state, memo))
    return copied
