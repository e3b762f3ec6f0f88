"""The figures of examples/why_fp32.py: what 16-bit numbers lose where the dtype contract asks for 32."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parent.parent / "examples" / "why_fp32.py"
    spec = importlib.util.spec_from_file_location("why_fp32", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("dtype", "lr", "share"),
    [
        (torch.bfloat16, 2e-5, 0.70),
        (torch.bfloat16, 1e-6, 0.98),
        (torch.float16, 2e-5, 0.002),
        (torch.float16, 1e-6, 0.84),
        (torch.float32, 1e-6, 0.0),
    ],
)
def test_share_of_weights_that_a_step_cannot_move(
    example: ModuleType, dtype: torch.dtype, lr: float, share: float
) -> None:
    """Small steps leave most 16-bit weights from N(0, 0.02) where they were, and move every fp32 weight."""
    assert example.unmoved_share(dtype, lr) == pytest.approx(share, abs=0.005 if share > 0.01 else 0.0005)


@pytest.mark.parametrize(("fused", "mean"), [(True, 2.3), (False, 3.33)])
def test_second_moment_in_bf16_only_goes_up(example: ModuleType, fused: bool, mean: float) -> None:
    """AdamW's bf16 second moment of unit gradients ends far above 1, and stays there without gradients."""
    end, after_silence = example.second_moment(torch.bfloat16, fused=fused, marks=(20_000,), silent=500, elements=256)
    assert end == pytest.approx(mean, abs=0.1)
    assert after_silence == end


def test_second_moment_in_fp32_follows_the_gradients(example: ModuleType) -> None:
    """In fp32 the same second moment reaches 1, and decays by beta2 a step once gradients are zero."""
    end, after_silence = example.second_moment(torch.float32, fused=True, marks=(8_000,), silent=500, elements=256)
    assert end == pytest.approx(1.0, abs=0.01)
    assert after_silence == pytest.approx(end * 0.999**500, rel=1e-3)


@pytest.mark.parametrize(("dtype", "stalls_at"), [(torch.bfloat16, 256), (torch.float16, 2048), (torch.float32, 4096)])
def test_running_sum_of_ones_stalls(example: ModuleType, dtype: torch.dtype, stalls_at: int) -> None:
    """Ones added to a 16-bit total stop counting where numbers are 2 apart; the fp32 total counts on."""
    assert example.running_sum_of_ones(dtype, terms=4096) == stalls_at


def test_fp32_master_and_moments_train_as_fp32_does(example: ModuleType) -> None:
    """The language model learns as fast with fp32 master and moments as in fp32, and slower in bf16 alone."""
    losses = {
        name: torch.tensor(example.train_in(precision, steps=40)).mean().item()
        for name, precision in example.CONTRACTS.items()
    }
    fp32, master, bf16 = losses.values()
    assert master == pytest.approx(fp32, abs=0.005)
    assert bf16 > master + 0.008
