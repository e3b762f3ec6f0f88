"""What a user can set: Precision (the dtype contract), LossScale and Config. Frozen, keyword-only, checked."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from onenth.errors import ConfigError
from onenth.states import STAGES

UnitRule: TypeAlias = "Literal['auto'] | type[nn.Module] | Sequence[type[nn.Module]] | Callable[[str, nn.Module], bool]"

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _raise(where: str, wrong: Sequence[str]) -> None:
    if wrong:
        raise ConfigError(f"{where}: {'; '.join(wrong)}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtype contract: what each model state is stored, summed and sent in.

    parameters: what forward and backward compute with.
    gradients: what the wire carries, and what is stored after a single backward.
    sums: what gradients are added in, over ranks and over several backwards.
    master: the copy that the optimizer updates; None: it updates the parameters themselves.
    moments: the optimizer's states of a parameter's shape.
    buffers: floating-point module buffers; None: they stay as they are.
    keep_fp32: module classes or names whose parameters stay fp32.
    """

    parameters: torch.dtype
    gradients: torch.dtype
    sums: torch.dtype
    master: torch.dtype | None
    moments: torch.dtype
    buffers: torch.dtype | None = None
    keep_fp32: tuple[type[nn.Module] | str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep_fp32", tuple(self.keep_fp32))
        wrong = [
            f"{name}={getattr(self, name)!r}: a floating-point torch.dtype is meant"
            for name in ("parameters", "gradients", "sums", "moments")
            if getattr(self, name) not in _FLOATS
        ]
        wrong += [
            f"{name}={getattr(self, name)!r}: a floating-point torch.dtype or None is meant"
            for name in ("master", "buffers")
            if getattr(self, name) is not None and getattr(self, name) not in _FLOATS
        ]
        wrong += [
            f"keep_fp32 holds {entry!r}: a module class or a module's name is meant"
            for entry in self.keep_fp32
            if not isinstance(entry, str) and not (inspect.isclass(entry) and issubclass(entry, nn.Module))
        ]
        if not wrong and self.sums.itemsize < self.gradients.itemsize:
            wrong.append(f"sums={self.sums} is narrower than gradients={self.gradients}: sum in fp32")
        if not wrong and self.master is None and self.moments != self.parameters:
            wrong.append(
                f"master=None updates the parameters themselves, so moments must be {self.parameters} as they are, "
                f"not {self.moments}; give master=torch.float32 to keep moments in fp32"
            )
        _raise("Precision", wrong)

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates a copy of its own."""
        return self.master is not None

    def table(self) -> list[tuple[str, str]]:
        """The contract as (what, dtype) rows, as printed at the start of every training."""
        name = {"master": "the parameters themselves", "buffers": "as the model has them"}
        rows = [
            (what, str(value).removeprefix("torch.") if (value := getattr(self, what)) is not None else name[what])
            for what in ("parameters", "gradients", "sums", "master", "moments", "buffers")
        ]
        kept = ", ".join(entry if isinstance(entry, str) else entry.__name__ for entry in self.keep_fp32)
        return rows + ([("kept in fp32", kept)] if kept else [])


_BF16 = Precision(
    parameters=torch.bfloat16,
    gradients=torch.bfloat16,
    sums=torch.float32,
    master=torch.float32,
    moments=torch.float32,
)
PRECISIONS: dict[str, Precision] = {
    "bf16": _BF16,
    "fp16": replace(_BF16, parameters=torch.float16, gradients=torch.float16),
    "fp32": replace(_BF16, parameters=torch.float32, gradients=torch.float32, master=None),
}


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Dynamic loss scaling for fp16 gradients (Micikevicius et al., 2018, arXiv 1710.03740, section 3.2).

    initial: the first scale.
    growth: factor after `growth_interval` steps in a row without an overflow; 1.0 keeps the scale static.
    backoff: factor on an overflow, once `hysteresis` overflows came in a row.
    minimum: the scale never falls below it.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    minimum: float = 1.0

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={value!r}: a number is meant"
            for name, value in vars(self).items()
            if not _is_number(value) or not math.isfinite(value)
        ]
        _raise("LossScale", wrong)
        if not self.initial > 0 or not self.minimum > 0:
            wrong.append(f"initial={self.initial!r}, minimum={self.minimum!r}: positive numbers are meant")
        if not self.growth >= 1:
            wrong.append(f"growth={self.growth!r}: a factor of at least 1 is meant")
        if not 0 < self.backoff <= 1:
            wrong.append(f"backoff={self.backoff!r}: a factor above 0 and at most 1 is meant")
        if self.growth_interval < 1 or self.hysteresis < 1:
            wrong.append(
                f"growth_interval={self.growth_interval!r}, hysteresis={self.hysteresis!r}: at least 1 is meant"
            )
        _raise("LossScale", wrong)


def _unknown(cls: type, settings: dict[str, Any]) -> list[str]:
    known = list(cls.__dataclass_fields__)  # type: ignore[attr-defined]
    guesses = {name: difflib.get_close_matches(name, known, n=1) for name in settings if name not in known}
    return [
        f"{name}: did you mean {close[0]}?" if close else f"{name}: no such setting (there are {', '.join(known)})"
        for name, close in guesses.items()
    ]


def _one_of(name: str, allowed: Sequence[Any], meant: str) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        matches = any(type(value) is type(entry) and value == entry for entry in allowed)
        return None if matches else f"{name}={value!r}: {meant} is meant"

    return check


def _that(name: str, holds: Callable[[Any], bool], meant: str) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        return None if holds(value) else f"{name}={value!r}: {meant} is meant"

    return check


def _is_rule(value: Any) -> bool:
    if isinstance(value, str):
        return value == "auto"
    if inspect.isclass(value):
        return issubclass(value, nn.Module)
    if isinstance(value, Sequence | set | frozenset):
        return bool(value) and all(inspect.isclass(entry) and issubclass(entry, nn.Module) for entry in value)
    return callable(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, Sequence | set | frozenset) and all(isinstance(entry, str) for entry in value)
    )


_CHECKS: dict[str, Callable[[Any], str | None]] = {
    "stage": _one_of("stage", tuple(STAGES), "0, 1, 2 or 3"),
    "precision": _that(
        "precision",
        lambda value: isinstance(value, Precision) or (isinstance(value, str) and value in PRECISIONS),
        '"bf16", "fp16", "fp32" or an onenth.Precision',
    ),
    "activations": _one_of("activations", ("keep", "recompute"), '"keep" or "recompute"'),
    "units": _that("units", _is_rule, '"auto", module classes, or a function (name, module) -> bool'),
    "max_unit_bytes": _that(
        "max_unit_bytes", lambda v: v is None or (_is_int(v) and v > 0), "a positive number of bytes or None"
    ),
    "keep_gathered": _that("keep_gathered", _is_names, "a sequence of unit names"),
    "max_grad_norm": _that(
        "max_grad_norm", lambda v: v is None or (_is_number(v) and v > 0), "a positive number or None"
    ),
    "reduce": _one_of("reduce", ("mean", "sum"), '"mean" or "sum"'),
    "cast_inputs": _one_of("cast_inputs", (True, False), "True or False"),
    "max_skipped": _that("max_skipped", lambda v: _is_int(v) and v >= 1, "a whole number of at least 1"),
    "prefetch": _one_of("prefetch", (True, False), "True or False"),
    "loss_scale": _that(
        "loss_scale",
        lambda v: isinstance(v, LossScale) or (_is_number(v) and v > 0),
        "an onenth.LossScale or a positive number",
    ),
    "timeout": _that(
        "timeout",
        lambda v: (_is_number(v) and 0 < v <= 10**8) or (isinstance(v, timedelta) and v > timedelta()),
        "a positive number of seconds or a timedelta",
    ),
    "max_bytes": _that(
        "max_bytes", lambda v: v is None or (_is_int(v) and v > 0), "a positive number of bytes or None"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a model is sharded and trained.

    stage: 0, 1, 2 or 3: which model states are partitioned (`states.STAGES`).
    precision: "bf16", "fp16", "fp32" or a `Precision`.
    activations: "keep", or "recompute" (every unit but the root recomputes its forward during backward).
    units: "auto", module classes, or a function (name, module) -> bool.
    max_unit_bytes: units with more bytes of parameters are split into their children.
    keep_gathered: names of units that stay whole between forward and backward (stage 3).
    max_grad_norm: clip to this global norm in every step; None: no clipping.
    reduce: "mean" over ranks, or "sum" (for losses already divided by the global number of tokens).
    cast_inputs: cast floating-point inputs to the parameters' dtype at each unit's boundary.
    max_skipped: outside fp16, raise after this many steps in a row were skipped for Inf or NaN.
    prefetch: gather the next unit while the current one computes.
    loss_scale: a `LossScale`, or a number for a static scale; it acts with fp16 gradients only.
    timeout: seconds (or a timedelta) that a transfer may wait for another rank.
    max_bytes: bytes that this rank may hold in model states and gathered units; None: no cap.
    """

    stage: int = 3
    precision: str | Precision = "bf16"
    activations: Literal["keep", "recompute"] = "keep"
    units: UnitRule = "auto"
    max_unit_bytes: int | None = None
    keep_gathered: Sequence[str] = ()
    max_grad_norm: float | None = None
    reduce: Literal["mean", "sum"] = "mean"
    cast_inputs: bool = True
    max_skipped: int = 5
    prefetch: bool = True
    loss_scale: LossScale | float = LossScale()
    timeout: float | timedelta = 300.0
    max_bytes: int | None = None

    def __new__(cls, **settings: Any) -> Config:
        """Refuse unknown names before the dataclass does, with a guess at what was meant."""
        known = [(name, value) for name, value in settings.items() if name in _CHECKS]
        _raise("Config", _unknown(cls, settings) + [bad for name, value in known if (bad := _CHECKS[name](value))])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _raise("Config", [problem for name, check in _CHECKS.items() if (problem := check(getattr(self, name)))])
        if isinstance(self.keep_gathered, str):
            object.__setattr__(self, "keep_gathered", (self.keep_gathered,))

    @property
    def dtypes(self) -> Precision:
        """The dtype contract, presets resolved."""
        return PRECISIONS[self.precision] if isinstance(self.precision, str) else self.precision

    @property
    def scaling(self) -> LossScale:
        """The loss-scaling rule; a number stands for a static scale."""
        if isinstance(self.loss_scale, LossScale):
            return self.loss_scale
        return LossScale(initial=float(self.loss_scale), growth=1.0, backoff=1.0)

    @property
    def timeout_delta(self) -> timedelta:
        """How long a transfer may wait."""
        return self.timeout if isinstance(self.timeout, timedelta) else timedelta(seconds=self.timeout)

    @classmethod
    def resolve(cls, config: Config | None, settings: dict[str, Any]) -> Config:
        """`config` with `settings` on top; unknown names are an error that guesses what was meant."""
        if config is not None and not isinstance(config, Config):
            raise ConfigError(f"config must be an onenth.Config, not {type(config).__name__}: {config!r}")
        wrong = _unknown(cls, settings)
        usable = {name: value for name, value in settings.items() if name in _CHECKS}
        wrong += [problem for name, value in usable.items() if (problem := _CHECKS[name](value))]
        _raise("shard", wrong)
        return replace(config, **usable) if config is not None else cls(**usable)
