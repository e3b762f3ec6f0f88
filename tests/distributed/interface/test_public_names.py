"""The names that training code is written against."""

from __future__ import annotations

import onenth

TRAIN = {
    "Config",
    "LossScale",
    "OnenthError",
    "ConfigError",
    "ShardError",
    "Precision",
    "ShardedOptimizer",
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
}


def test_names_for_training_are_public() -> None:
    """Every name that a training script needs is in `onenth.__all__`, and every name listed there exists."""
    assert set(onenth.__all__) >= TRAIN
    assert all(hasattr(onenth, name) for name in onenth.__all__)


def test_errors_are_built_in_errors_too() -> None:
    """Each error is also the ValueError or RuntimeError that callers of plain PyTorch catch."""
    assert issubclass(onenth.ConfigError, onenth.OnenthError)
    assert issubclass(onenth.ConfigError, ValueError)
    assert issubclass(onenth.ShardError, onenth.OnenthError)
    assert issubclass(onenth.ShardError, RuntimeError)
