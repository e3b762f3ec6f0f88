"""The learning rate by step."""

from __future__ import annotations

import pytest

from onenth.train.schedule import learning_rate


def test_rises_to_the_peak_and_falls_to_a_tenth() -> None:
    """The warm-up's last step has the peak, the run's last step a tenth of it, half way lies half way."""
    rates = [learning_rate(step, steps=111, peak=1.0, warmup=10) for step in range(111)]
    assert rates[:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert rates[10] == pytest.approx(1.0)
    assert rates[60] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_runs_shorter_than_the_warm_up_and_steps_past_the_end() -> None:
    """No length of run divides by zero, and the floor holds after the end."""
    assert learning_rate(0, steps=1, peak=1.0, warmup=0) == pytest.approx(1.0)
    assert learning_rate(2, steps=3, peak=1.0, warmup=10) == pytest.approx(0.3)
    assert learning_rate(500, steps=100, peak=1.0, warmup=10) == pytest.approx(0.1)
