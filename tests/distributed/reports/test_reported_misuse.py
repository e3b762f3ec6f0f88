"""Loops that work otherwise than the engine expects: right, or a clear error, never silently wrong. One rank each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onenth
from tests.distributed.pool import Pool

WIDTH = 8
INPUTS = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def sharded(group: dist.ProcessGroup, model: nn.Module, stage: int = 3, **settings: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return onenth.shard(model, optimizer, group=group, stage=stage, precision="fp32", **settings)


def check_refused_models(group: dist.ProcessGroup) -> None:
    graded = stack()
    graded(INPUTS).sum().backward()
    refused = {
        "not floating point": nn.Linear(WIDTH, WIDTH, dtype=torch.complex64),
        "gradients from before": graded,
        "sparse": nn.Embedding(WIDTH, WIDTH, sparse=True),
        "not initialized": nn.LazyLinear(WIDTH),
        "sharded already": nn.ModuleList([sharded(group, stack())[0]]),
    }
    for reason, model in refused.items():
        with pytest.raises(onenth.ShardError, match=reason):
            sharded(group, model)


def check_step_inside_gathered(group: dist.ProcessGroup) -> None:
    model, optimizer = sharded(group, stack())
    with onenth.gathered(model, modify=True):
        optimizer.backward(model(INPUTS).square().mean())
        with pytest.raises(onenth.ShardError, match="inside"):
            optimizer.step()


def check_replaced_data(group: dist.ProcessGroup) -> None:
    for stage in range(4):
        model, _ = sharded(group, stack(), stage)
        with onenth.gathered([model[0], model[2]], modify=True):
            model[0].weight.data = torch.full((WIDTH, WIDTH), 0.25)
        assert (onenth.full_state_dict(model)["0.weight"] == 0.25).all(), stage


def check_gradients_cleared_by_hand(group: dist.ProcessGroup) -> None:
    for stage in range(4):
        model, optimizer = sharded(group, stack(), stage)
        norms = []
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = None
            optimizer.backward(model(INPUTS).square().mean())
            norms.append(float(optimizer.clip_grad_norm_(1e9)))
        assert norms[0] == norms[1] == norms[2], stage


class ReturnsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(hidden).tanh(), self.linear.weight.t()


class Regularized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReturnsWeight() for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        penalty = hidden.new_zeros(())
        for block in self.blocks:
            hidden, weight = block(hidden)
            penalty = penalty + weight.square().mean()
        return hidden.square().mean() + penalty


def check_returned_weight(group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    plain = Regularized()
    model, optimizer = sharded(group, copy.deepcopy(plain))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.backward(model(INPUTS))
        optimizer.step()
        optimizer.zero_grad()
        plain(INPUTS).backward()
        reference.step()
        reference.zero_grad()
    whole = onenth.full_state_dict(model)
    assert all(torch.equal(whole[name], value) for name, value in plain.state_dict().items())


def check_captured_activation(group: dist.ProcessGroup) -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
    )
    seen: list[Tensor] = []
    model[1][0].register_forward_hook(lambda _, __, output: seen.append(output))
    model, optimizer = sharded(group, model)
    model(INPUTS)
    with pytest.raises(onenth.ShardError, match="another way"):
        optimizer.backward(seen[0].square().mean())


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden


def check_checkpoint_around_recompute(group: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    plain = Checkpointed()
    model, optimizer = sharded(group, copy.deepcopy(plain), activations="recompute")
    plain(INPUTS).square().mean().backward()
    optimizer.backward(model(INPUTS).square().mean())
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(onenth.full_gradient(parameter), expected.grad)


def check_failed_start_of_forward(group: dist.ProcessGroup) -> None:
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    model, _ = sharded(group, model, units=(nn.Linear,))
    dict(model.named_parameters())["0.weight"].data.zero_()
    with pytest.raises(onenth.ShardError, match="written to"):
        model(INPUTS)
    with pytest.raises(onenth.ShardError, match="released"):
        _ = model[1].weight


CHECKS = {
    "models that cannot be sharded": check_refused_models,
    "a step inside gathered": check_step_inside_gathered,
    "data replaced inside gathered": check_replaced_data,
    "gradients cleared by hand": check_gradients_cleared_by_hand,
    "a block that returns its weight": check_returned_weight,
    "an activation captured by a hook": check_captured_activation,
    "a forward that could not start": check_failed_start_of_forward,
    "a checkpoint around a recomputed block": check_checkpoint_around_recompute,
}


@pytest.mark.parametrize("what", CHECKS)
def test_misuse_is_right_or_refused(pool: Pool, what: str) -> None:
    """What users do beside the documented loop gives plain PyTorch's result or an error that says what to do."""
    pool.run(1, CHECKS[what])
