"""Config, Precision and LossScale: what is accepted, and errors that list every offender."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from onenth.config import PRECISIONS, Config, LossScale, Precision
from onenth.errors import ConfigError, OnenthError

BAD_VALUES: dict[str, list[Any]] = {
    "stage": [4, -1, "3", True, 2.0, None],
    "precision": ["bfloat16", torch.bfloat16, None],
    "activations": ["drop", None],
    "units": ["automatic", [], int, [nn.Linear, int], None],
    "max_unit_bytes": [0, -1, 1.5, True],
    "keep_gathered": [None, [1], 3],
    "max_grad_norm": [0, -1.0, "1", float("nan"), True],
    "reduce": ["average", None],
    "cast_inputs": [1, "yes", None],
    "max_skipped": [0, 1.5, None],
    "prefetch": [0, "no"],
    "loss_scale": [0, -2.0, "dynamic", None],
    "timeout": [0, -1.0, timedelta(0), None, "1s"],
    "max_bytes": [0, -5, 1.5, "80GB"],
}
GOOD_VALUES: dict[str, list[Any]] = {
    "stage": [0, 1, 2, 3],
    "precision": ["bf16", "fp16", "fp32", PRECISIONS["bf16"]],
    "activations": ["keep", "recompute"],
    "units": ["auto", nn.Linear, [nn.Linear, nn.Conv2d], lambda name, module: True],
    "max_unit_bytes": [None, 1],
    "keep_gathered": [(), ["layers.0"], "head"],
    "max_grad_norm": [None, 1, 0.5],
    "reduce": ["mean", "sum"],
    "cast_inputs": [True, False],
    "max_skipped": [1],
    "prefetch": [True, False],
    "loss_scale": [LossScale(), 1024, 2.0**10],
    "timeout": [1, 0.5, timedelta(seconds=3)],
    "max_bytes": [None, 80 * 10**9],
}


def test_every_setting_is_covered() -> None:
    """The tables above name each field, so that a new setting is checked for good and bad values too."""
    fields = set(Config.__dataclass_fields__)
    assert set(BAD_VALUES) == fields
    assert set(GOOD_VALUES) == fields


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in BAD_VALUES.items() for v in vs])
def test_bad_value_is_named(name: str, value: Any) -> None:
    """A value out of range or of the wrong type is refused, with the setting's name and what is meant."""
    with pytest.raises(ConfigError, match=rf"{name}=.* meant"):
        Config(**{name: value})


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in GOOD_VALUES.items() for v in vs])
def test_good_value_is_accepted(name: str, value: Any) -> None:
    """Every documented value is accepted, by Config and as a setting on top of one."""
    Config(**{name: value})
    Config.resolve(Config(), {name: value})


def test_all_bad_values_in_one_error() -> None:
    """One error lists every bad value, not just the first."""
    with pytest.raises(ConfigError) as caught:
        Config(**{name: values[0] for name, values in BAD_VALUES.items()})
    for name in BAD_VALUES:
        assert f"{name}=" in str(caught.value)


def test_unknown_and_bad_settings_in_one_error() -> None:
    """Settings on top of a config: unknown names, with a guess, and bad values together in one error."""
    with pytest.raises(ConfigError) as caught:
        Config.resolve(None, {"stgae": 3, "wibble": 1, "reduce": "average", "stage": 7})
    message = str(caught.value)
    assert "stgae: did you mean stage?" in message
    assert "wibble: no such setting (there are stage, precision" in message
    assert "reduce='average'" in message
    assert "stage=7" in message


def test_unknown_fields_of_a_config() -> None:
    """Config itself names all unknown fields and guesses at each, instead of Python's TypeError for one."""
    with pytest.raises(ConfigError, match=r"prefetsch: did you mean prefetch\?; max_norm: did you mean") as caught:
        Config(prefetsch=True, max_norm=1.0)  # type: ignore[call-arg]
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, OnenthError)


def test_settings_override_the_config() -> None:
    """Given both, a setting wins over the config's field, other fields stay, and the config is unchanged."""
    config = Config(stage=1, max_grad_norm=1.0)
    resolved = Config.resolve(config, {"stage": 2})
    assert (resolved.stage, resolved.max_grad_norm) == (2, 1.0)
    assert config.stage == 1


def test_something_else_for_a_config() -> None:
    """A dict in place of a Config is an error that names its type."""
    with pytest.raises(ConfigError, match="not dict"):
        Config.resolve({"stage": 3}, {})  # type: ignore[arg-type]


def test_frozen() -> None:
    """A config cannot change after it was checked."""
    config = Config()
    with pytest.raises(AttributeError):
        config.stage = 1  # type: ignore[misc]


def test_short_forms() -> None:
    """A single name, a number of seconds and a static loss scale stand for the longer forms."""
    config = Config(keep_gathered="head", timeout=2, loss_scale=1024)
    assert config.keep_gathered == ("head",)
    assert config.timeout_delta == timedelta(seconds=2)
    assert (config.scaling.initial, config.scaling.growth, config.scaling.backoff) == (1024.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "wide", "narrow"),
    [("bf16", torch.float32, torch.bfloat16), ("fp16", torch.float32, torch.float16)],
)
def test_sixteen_bit_presets(name: str, wide: torch.dtype, narrow: torch.dtype) -> None:
    """bf16 and fp16: parameters and gradients in 16 bits; sums, master and moments in fp32."""
    contract = Config(precision=name).dtypes
    assert (contract.parameters, contract.gradients) == (narrow, narrow)
    assert (contract.sums, contract.master, contract.moments) == (wide, wide, wide)
    assert contract.has_master


def test_fp32_has_no_master() -> None:
    """fp32: everything in fp32, and no copy for the optimizer."""
    contract = Config(precision="fp32").dtypes
    dtypes = {contract.parameters, contract.gradients, contract.sums, contract.moments}
    assert dtypes == {torch.float32}
    assert not contract.has_master


def precision(**changes: Any) -> Precision:
    """The bf16 contract with changes."""
    base: dict[str, Any] = {
        "parameters": torch.bfloat16,
        "gradients": torch.bfloat16,
        "sums": torch.float32,
        "master": torch.float32,
        "moments": torch.float32,
    }
    return Precision(**{**base, **changes})


def test_precision_lists_every_wrong_dtype() -> None:
    """All fields that are no floating-point dtype are named in one error."""
    with pytest.raises(ConfigError) as caught:
        precision(parameters="bf16", sums=torch.int32, master=torch.bool, keep_fp32=(3,))
    for part in ("parameters='bf16'", "sums=torch.int32", "master=torch.bool", "keep_fp32 holds 3"):
        assert part in str(caught.value)


def test_precision_refuses_narrow_sums() -> None:
    """Sums narrower than what they add are refused, with the way out."""
    with pytest.raises(ConfigError, match=r"sums=torch.bfloat16 is narrower .* sum in fp32"):
        precision(gradients=torch.float32, sums=torch.bfloat16)


def test_precision_without_master_ties_moments_to_parameters() -> None:
    """With no master copy, moments have the parameters' dtype; anything else is refused, with the way out."""
    with pytest.raises(ConfigError, match=r"give master=torch.float32 to keep moments in fp32"):
        precision(master=None)
    assert precision(master=None, moments=torch.bfloat16).moments is torch.bfloat16


def test_contract_as_printed() -> None:
    """The table names each dtype, and says in words what None means."""
    assert PRECISIONS["fp32"].table() == [
        ("parameters", "float32"),
        ("gradients", "float32"),
        ("sums", "float32"),
        ("master", "the parameters themselves"),
        ("moments", "float32"),
        ("buffers", "as the model has them"),
    ]
    kept = precision(keep_fp32=(nn.LayerNorm, "head")).table()
    assert kept[-1] == ("kept in fp32", "LayerNorm, head")


def test_loss_scale_lists_every_offender() -> None:
    """All numbers out of range are named in one error."""
    with pytest.raises(ConfigError) as caught:
        LossScale(initial=0, growth=0.5, backoff=2.0, growth_interval=0)
    for part in ("initial=0", "growth=0.5", "backoff=2.0", "growth_interval=0"):
        assert part in str(caught.value)
