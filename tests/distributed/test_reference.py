"""The reference trainer and the comparison that the proofs rest on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.distributed.models import TASKS, sgd
from tests.distributed.reference import micro_batch, relative_difference, train


@pytest.mark.parametrize("name", TASKS)
def test_every_task_learns(name: str) -> None:
    """Each task moves its parameters by far more than the proofs' tolerance, so equality means something."""
    task = TASKS[name]
    start = {name: p.detach().clone() for name, p in task.model().named_parameters()}
    assert relative_difference(train(task, ranks=2).parameters, start) > 1e-3


def test_averages_over_ranks_as_one_large_batch() -> None:
    """Four ranks with one micro-batch each equal one process that sees the four as one batch."""
    task, rows = TASKS["uneven"], 3
    model = task.model()
    optimizer = sgd(model)
    for step in range(2):
        numbers = [micro_batch(step, rank) for rank in range(4)]
        torch.stack([task.loss(model, number, rows) for number in numbers]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = dict(model.named_parameters())
    assert relative_difference(train(task, ranks=4, steps=2, make_optimizer=sgd).parameters, whole) < 1e-6


def test_difference_sees_one_parameter() -> None:
    """The relative norm catches a change in a single small parameter and is zero for equal bits."""
    values = {name: p.detach() for name, p in nn.Linear(8, 8).named_parameters()}
    changed = values | {"bias": values["bias"] * 1.001}
    assert relative_difference(values, values) == 0.0
    assert relative_difference(changed, values) > 1e-4
