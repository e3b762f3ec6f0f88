"""onenth: training PyTorch models with the Zero Redundancy Optimizer, every byte accounted for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onenth.anatomy.anatomy import Anatomy
    from onenth.anatomy.record import record
    from onenth.api import (
        full_gradient,
        full_optimizer_state,
        full_state_dict,
        gathered,
        memory_report,
        no_sync,
        register_forward_method,
        set_full_gradient,
        set_full_optimizer_state,
        shard,
        unshard,
    )
    from onenth.breakdown import Breakdown
    from onenth.config import Config, LossScale, Precision
    from onenth.engine.optimizer import ShardedOptimizer
    from onenth.errors import (
        AnatomyError,
        CheckpointError,
        ConfigError,
        OnenthError,
        PlanError,
        ShardError,
        TransferError,
    )
    from onenth.launch import launch
    from onenth.residual_states.out_of_memory import OutOfMemoryError
    from onenth.world import World, init

__version__ = "0.1.0"

# Where each public name lives. Modules are imported when a name is first used: the equations on the command line need
# no PyTorch, whose import takes seconds.
_HOMES = {
    "onenth.api": (
        "full_gradient",
        "full_optimizer_state",
        "full_state_dict",
        "gathered",
        "memory_report",
        "no_sync",
        "register_forward_method",
        "set_full_gradient",
        "set_full_optimizer_state",
        "shard",
        "unshard",
    ),
    "onenth.anatomy.anatomy": ("Anatomy",),
    "onenth.anatomy.record": ("record",),
    "onenth.breakdown": ("Breakdown",),
    "onenth.config": ("Config", "LossScale", "Precision"),
    "onenth.engine.optimizer": ("ShardedOptimizer",),
    "onenth.errors": (
        "AnatomyError",
        "CheckpointError",
        "ConfigError",
        "OnenthError",
        "PlanError",
        "ShardError",
        "TransferError",
    ),
    "onenth.launch": ("launch",),
    "onenth.residual_states.out_of_memory": ("OutOfMemoryError",),
    "onenth.world": ("World", "init"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Anatomy",
    "AnatomyError",
    "Breakdown",
    "CheckpointError",
    "Config",
    "ConfigError",
    "LossScale",
    "OnenthError",
    "OutOfMemoryError",
    "PlanError",
    "Precision",
    "ShardError",
    "ShardedOptimizer",
    "TransferError",
    "World",
    "full_gradient",
    "full_optimizer_state",
    "full_state_dict",
    "gathered",
    "init",
    "launch",
    "memory_report",
    "no_sync",
    "record",
    "register_forward_method",
    "set_full_gradient",
    "set_full_optimizer_state",
    "shard",
    "unshard",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'onenth' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
