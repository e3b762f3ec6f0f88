"""onenth: training PyTorch models with the Zero Redundancy Optimizer, every byte accounted for."""

from __future__ import annotations

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
from onenth.errors import CheckpointError, ConfigError, OnenthError, PlanError, ShardError
from onenth.launch import launch
from onenth.world import World, init

__version__ = "0.1.0"

__all__ = [
    "Breakdown",
    "CheckpointError",
    "Config",
    "ConfigError",
    "LossScale",
    "OnenthError",
    "PlanError",
    "Precision",
    "ShardError",
    "ShardedOptimizer",
    "World",
    "full_gradient",
    "full_optimizer_state",
    "full_state_dict",
    "gathered",
    "init",
    "launch",
    "memory_report",
    "no_sync",
    "register_forward_method",
    "set_full_gradient",
    "set_full_optimizer_state",
    "shard",
    "unshard",
]
