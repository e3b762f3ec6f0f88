"""The independent count of live bytes, on tensors whose bytes are known."""

from __future__ import annotations

import torch
from torch import nn

from tests.distributed.live import LiveBytes, live_tensors


def test_sees_storages_resized_in_place() -> None:
    """Bytes released and refilled with `resize_` count as freed and live again, as those of stage 3 must."""
    with LiveBytes() as live:
        x = torch.empty(1000)
        with live.phase("released"):
            x.untyped_storage().resize_(0)
        with live.phase("refilled"):
            x.untyped_storage().resize_(4000)
    assert (live.before("released"), live.after("released")) == (4000, 0)
    assert (live.before("refilled"), live.after("refilled")) == (0, 4000)


def test_sees_what_lives_for_a_moment() -> None:
    """A peak inside a phase counts, though nothing of it is left at the end."""
    with LiveBytes() as live:
        weight = torch.empty(500)
        with live.phase("temporary"):
            del weight
            torch.empty(2000).zero_()
    assert (live.before("temporary"), live.peak("temporary"), live.after("temporary")) == (2000, 8000, 0)


def test_counts_a_training_step() -> None:
    """One matrix: forward keeps the output, backward adds the gradient, releasing gives both back."""
    with LiveBytes() as live:
        layer, x = nn.Linear(64, 8, bias=False), torch.randn(16, 64)
        with live.phase("forward"):
            y = layer(x)
        with live.phase("backward"):
            y.backward(torch.ones(16, 8))
        with live.phase("release"):
            del y
            layer.zero_grad()
    held = 4 * (64 * 8 + 16 * 64)
    assert live.before("forward") == held
    assert live.after("forward") == held + 4 * 16 * 8
    assert live.after("backward") == held + 4 * 16 * 8 + 4 * 64 * 8
    assert live.after("release") == held


def test_counts_tensors() -> None:
    """The number of live tensors rises by those that are kept and falls when they go."""
    before = live_tensors()
    kept = [torch.empty(1) for _ in range(3)]
    assert live_tensors() == before + 3
    del kept
    assert live_tensors() == before
