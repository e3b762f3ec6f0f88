"""Autograd beyond one backward per graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import onenth
from tests.distributed.reports.harness import (
    ALL_STAGES,
    Job,
    Stack,
    assert_same_training,
    batch,
    gathered_names,
    message_of,
    shard_job,
)


class ReadsOtherWeights(Stack):
    """The root reads two blocks' weights by itself, one before that block ran and one after."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(self.embed(x), self.blocks[2].up.weight)[:, :8]
        x = self.run_blocks(x)
        x = x @ self.blocks[0].down.weight @ self.blocks[0].up.weight
        return self.head(x) + self.blocks[1].up.bias.sum()


def gradient_penalty(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    """The norm of the gradient by the input is part of the loss, as in WGAN-GP."""
    x = batch(step, rank).requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    yield output.square().mean() + (slope.norm(dim=-1) - 1).square().mean()


def penalty_on_interpolates(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    """A second forward makes the penalty, and each loss has a backward of its own."""
    yield model(batch(step, rank)).square().mean()
    x = batch(step + 50, rank).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    yield slope.square().sum()


def two_losses_on_one_graph(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    output = model(batch(step, rank))
    yield output.square().mean()
    yield output.sin().sum()


def norm_of_a_weight(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    """A loss that reads weights outside of any forward: right while they are whole, hence below stage 3."""
    yield model(batch(step, rank)).square().mean() + model.head.weight.norm() + model.blocks[0].up.bias.sum()


def gradients_by_autograd_grad(group: Any) -> list[str]:
    """What went wrong with `autograd.grad` by inputs and parameters, by stage. Runs on ranks."""
    problems = []
    for stage in ALL_STAGES:
        model, optimizer = shard_job(group, Job(), stage)
        before = onenth.full_state_dict(model)
        # Only rank 0 asks where forward needs no transfer: an exchange would wait for the others.
        if stage == 3 or dist.get_rank(group) == 0:
            plain = Job().model()
            x = batch(0, 0).requires_grad_()
            expected = torch.autograd.grad(plain(x).square().sum(), [x, *plain.parameters()])
            found = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
            if not all(map(torch.allclose, found, expected)):
                problems.append(f"stage {stage}: gradients differ from plain PyTorch's")
        if any(parameter.grad is not None for parameter in model.parameters()):
            problems.append(f"stage {stage}: a gradient was accumulated")
        optimizer.step()
        after = onenth.full_state_dict(model)
        if not all(torch.equal(after[name], value) for name, value in before.items()):
            problems.append(f"stage {stage}: the step changed parameters")
    return problems


def backward_through_an_old_graph(group: Any) -> list[str]:
    """Messages of a backward through a graph from before the step, by stage. Runs on ranks."""
    messages = []
    for stage in ALL_STAGES:
        model, optimizer = shard_job(group, Job(), stage)
        old = model(batch(0, 0)).square().mean()
        optimizer.backward(model(batch(0, 1)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        messages.append(message_of(RuntimeError, old.backward))
        optimizer.zero_grad()
        optimizer.backward(model(batch(1, 0)).square().mean())
        optimizer.step()
        if not optimizer.grad_norm > 0:
            messages.append(f"stage {stage}: no gradient in the step after the error")
        if stage == 3 and (left := gathered_names(model)):
            messages.append(f"left gathered: {left}")
    return messages


def backward_that_raises(group: Any) -> list[str]:
    """Parameters left gathered after an error inside backward and a good step. Runs on ranks."""
    model, optimizer = shard_job(group, Job(), 3)
    hook = model.blocks[1].register_full_backward_pre_hook(raise_in_backward)
    message_of(ArithmeticError, model(batch(0, 0)).square().mean().backward)
    hook.remove()
    optimizer.zero_grad()
    optimizer.backward(model(batch(1, 0)).square().mean())
    optimizer.step()
    return gathered_names(model)


def raise_in_backward(module: nn.Module, gradients: object) -> None:
    raise ArithmeticError("as told")


def create_graph_in_backward(group: Any) -> list[dict[str, Tensor]]:
    """Rank 0's parameters after a step whose backward was asked for a graph, and without; stages 0 and 3."""
    states = []
    for stage in (0, 3):
        for create_graph in (False, True):
            model, optimizer = shard_job(group, Job(), stage)
            optimizer.backward(model(batch(0, dist.get_rank(group))).square().mean(), create_graph=create_graph)
            optimizer.step()
            optimizer.zero_grad()
            states.append(onenth.full_state_dict(model))
    return states


@pytest.mark.parametrize("losses", [gradient_penalty, penalty_on_interpolates])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_gradient_penalty(pool, losses, activations):
    """Double backward: weights are needed again after the first gradient was computed."""
    assert_same_training(pool, Job(losses=losses), activations=activations)


def test_two_backwards_through_one_graph(pool):
    """`retain_graph=True`: the second backward gathers again and adds its gradients."""
    assert_same_training(pool, Job(losses=two_losses_on_one_graph, retain_graph=True))


def test_autograd_grad_accumulates_and_exchanges_nothing(pool):
    """`torch.autograd.grad` returns this rank's own gradients; no exchange, no `.grad`, no step."""
    assert pool.run(2, gradients_by_autograd_grad) == [[], []]


def test_backward_through_a_graph_from_before_the_step(pool):
    """Raises as in plain PyTorch at every stage, instead of using new weights; training goes on."""
    for messages in pool.run(2, backward_through_an_old_graph):
        assert len(messages) == len(ALL_STAGES)
        assert all("modified by an inplace operation" in message for message in messages), messages


def test_training_goes_on_after_an_exception_in_backward(pool):
    """An error raised inside backward on all ranks: the next step is a normal one and releases everything."""
    assert pool.run(2, backward_that_raises) == [[], []]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_backward_with_create_graph(pool):
    """A backward that records its own graph gives the same step as one that does not."""
    states = pool.run(2, create_graph_in_backward)[0]
    for state in states[1:]:
        assert all(torch.equal(state[name], value) for name, value in states[0].items())


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_weights_read_by_the_root(pool, activations):
    """A released weight that the root's forward reads is gathered, and its gradient is added."""
    assert_same_training(pool, Job(ReadsOtherWeights), activations=activations)


def test_weights_read_outside_of_any_forward_below_stage_3(pool):
    """Weight norms in the loss train as in plain PyTorch wherever parameters are whole."""
    assert_same_training(pool, Job(losses=norm_of_a_weight), stages=(0, 1, 2))


def test_gradient_penalty_with_units_of_one_layer(pool):
    """The smaller the units, the more often the second backward meets one that was released."""
    assert_same_training(pool, Job(losses=gradient_penalty), units=nn.Linear)
