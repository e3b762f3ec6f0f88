"""Which optimizers `shard` takes: elementwise ones, with plain PyTorch's result; others are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import onenth
from tests.distributed.interface import toys
from tests.distributed.interface.compare import entries_that_differ, relative_distance
from tests.distributed.pool import Pool

Params = Sequence[nn.Parameter]


class SignMomentum(optim.Optimizer):
    """Like Lion: the sign of an average. As some optimizers do, it counts its steps in the group."""

    def __init__(self, params: Params, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            rate = group["lr"] * min(1.0, group["step"] / 2)
            for param in group["params"]:
                if param.grad is None:
                    continue
                average = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                param.sub_(rate * torch.lerp(average, param.grad, 0.1).sign_())
                average.lerp_(param.grad, 0.01)


class LayerwiseRate(optim.Optimizer):
    """Like LARS: the step of a tensor depends on the whole tensor's norm."""

    def __init__(self, params: Params, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    trust = param.norm() / param.grad.norm().clamp_min(1e-12)
                    param.sub_(group["lr"] * trust * param.grad)


ELEMENTWISE: dict[str, Callable[[Params], optim.Optimizer]] = {
    "SGD": lambda params: optim.SGD(params, lr=0.1),
    "SGD momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda params: optim.Adam(params, lr=1e-2),
    "AdamW": lambda params: optim.AdamW(params, lr=1e-2),
    "AdamW amsgrad": lambda params: optim.AdamW(params, lr=1e-2, amsgrad=True),
    "AdamW fused": lambda params: optim.AdamW(params, lr=1e-2, fused=True),
    "AdamW foreach": lambda params: optim.AdamW(params, lr=1e-2, foreach=True),
    "AdamW maximize": lambda params: optim.AdamW(params, lr=1e-2, maximize=True),
    "Adagrad": lambda params: optim.Adagrad(params, lr=1e-2),
    "RMSprop": lambda params: optim.RMSprop(params, lr=1e-3, momentum=0.9, centered=True),
    "NAdam": lambda params: optim.NAdam(params, lr=1e-2),
    "RAdam": lambda params: optim.RAdam(params, lr=1e-2),
    "Adamax": lambda params: optim.Adamax(params, lr=1e-2),
    "Adadelta": lambda params: optim.Adadelta(params, lr=1.0),
    "ASGD": lambda params: optim.ASGD(params, lr=1e-2, t0=1),
    "Rprop": lambda params: optim.Rprop(params, lr=1e-3),
    "SignMomentum": SignMomentum,
}


def distances_to_plain(group: dist.ProcessGroup, name: str) -> tuple[float, list[float]]:
    """How far plain training moved, and how far each stage ended from it; counts at rank 0."""
    build = ELEMENTWISE[name]
    states = [toys.trained_state(group, build, stage=stage) for stage in (0, 1, 3)]
    if group.rank() != 0:
        return 0.0, []
    final = toys.train_plain(group.size(), build)
    moved = relative_distance(toys.toy().state_dict(), final)
    return moved, [relative_distance(state, final) for state in states]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_train_as_in_plain_pytorch(pool: Pool, name: str) -> None:
    """An elementwise optimizer is taken as it is; stages 0, 1 and 3 end at plain PyTorch's parameters."""
    moved, distances = pool.run(2, distances_to_plain, name)[0]
    assert moved > 1e-4, "training that moves nothing compares nothing"
    assert len(distances) == 3
    assert max(distances) <= 1e-5


def build_muon(model: nn.Module) -> optim.Optimizer:
    return optim.Muon([value for value in model.parameters() if value.dim() == 2], lr=1e-2)


REFUSED: dict[str, tuple[Callable[[nn.Module], optim.Optimizer], str]] = {
    "LBFGS": (lambda model: optim.LBFGS(model.parameters()), "elementwise"),
    "SparseAdam": (lambda model: optim.SparseAdam(model.parameters()), "sparse"),
    "Adafactor": (lambda model: optim.Adafactor(model.parameters()), "elementwise"),
    "Muon": (build_muon, "elementwise"),
    "LayerwiseRate": (lambda model: LayerwiseRate(list(model.parameters())), "elementwise"),
}


def error_of_shard(group: dist.ProcessGroup, name: str) -> str:
    model = toys.toy()
    optimizer = REFUSED[name][0](model)
    with pytest.raises(onenth.ShardError) as raised:
        onenth.shard(model, optimizer, group=group, stage=3, precision="fp32")
    assert torch.equal(model.stem.weight, toys.toy().stem.weight), "refused, yet the model is sharded"
    return str(raised.value)


@pytest.mark.parametrize("name", REFUSED)
def test_other_optimizers_are_refused_with_the_reason(pool: Pool, name: str) -> None:
    """An optimizer that isn't elementwise is refused by name and reason, and the model stays plain."""
    for message in pool.run(2, error_of_shard, name):
        assert name in message
        assert REFUSED[name][1] in message.lower()


def check_state_dict_round_trip(group: dist.ProcessGroup, settings: dict[str, Any]) -> list[str]:
    """Entries in which a run restored halfway differs from one that just went on; counts at rank 0."""
    model, optimizer = toys.shard_toy(group, **settings)
    toys.train(model, optimizer, group.rank(), range(2))
    saved, weights = optimizer.state_dict(), onenth.full_state_dict(model)
    restored = toys.toy()
    if group.rank() == 0:
        restored.load_state_dict(weights)  # shard broadcasts rank 0's values
    restored, restarted = onenth.shard(
        restored, toys.adamw(list(restored.parameters())), group=group, **({"precision": "fp32"} | settings)
    )
    restarted.load_state_dict(saved)
    for continued, its_optimizer in ((model, optimizer), (restored, restarted)):
        toys.train(continued, its_optimizer, group.rank(), range(2, 4))
    first, second = onenth.full_state_dict(model), onenth.full_state_dict(restored)
    return entries_that_differ(first, second)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_state_dict_round_trip(pool: Pool, stage: int) -> None:
    """`state_dict` of each rank, loaded into a new sharded optimizer, continues with the same bits."""
    assert pool.run(2, check_state_dict_round_trip, {"stage": stage})[0] == []


def distance_with_closure(group: dist.ProcessGroup) -> tuple[float, bool]:
    """(distance to plain training, whether step() returned the closure's loss)"""
    model, optimizer = toys.shard_toy(group)
    returned = True
    for step in range(toys.STEPS):
        losses = []

        def closure(step: int = step, losses: list[float] = losses) -> torch.Tensor:
            optimizer.zero_grad()
            loss = toys.loss_of(model, toys.batch(step, group.rank()))
            optimizer.backward(loss)
            losses.append(loss.item())
            return loss

        returned = returned and float(optimizer.step(closure)) == losses[0] and len(losses) == 1
    state = onenth.full_state_dict(model)
    return (relative_distance(state, toys.train_plain(group.size())) if state else 0.0), returned


def test_step_takes_a_closure(pool: Pool) -> None:
    """`step(closure)` runs forward and backward once, trains as plain PyTorch, and returns the loss."""
    for distance, returned in pool.run(2, distance_with_closure):
        assert distance <= 1e-5
        assert returned


def calls_of_step_hooks(group: dist.ProcessGroup) -> list[str]:
    model, optimizer = toys.shard_toy(group)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    toys.train(model, optimizer, group.rank(), range(2))
    return calls


def test_step_hooks_run_once_a_step(pool: Pool) -> None:
    """PyTorch's own optimizer hooks run around each step of a sharded optimizer."""
    assert pool.run(2, calls_of_step_hooks) == [["before", "after"] * 2] * 2


def outcome_of_add_param_group(group: dist.ProcessGroup) -> tuple[str | float, int]:
    """(distance to plain training with the added group, or the error's message; groups afterwards)"""
    model = toys.toy()
    head = list(model.head.parameters())
    rest = [value for name, value in model.named_parameters() if not name.startswith("head")]
    model, optimizer = onenth.shard(model, toys.adamw(rest), group=group, stage=3, precision="fp32")
    try:
        optimizer.add_param_group({"params": head, "lr": 3e-3})
    except onenth.ShardError as error:
        return str(error), len(optimizer.param_groups)
    toys.train(model, optimizer, group.rank())
    state = onenth.full_state_dict(model)

    def build(params: Params) -> optim.Optimizer:
        return optim.AdamW([{"params": params[:-2]}, {"params": params[-2:], "lr": 3e-3}], lr=1e-2)

    return (relative_distance(state, toys.train_plain(group.size(), build)) if state else 0.0), 2


def test_add_param_group_works_or_says_what_to_do(pool: Pool) -> None:
    """A group added after `shard` trains as in plain PyTorch, or is refused with the way out."""
    for outcome, groups in pool.run(2, outcome_of_add_param_group):
        if isinstance(outcome, str):
            assert "shard" in outcome
            assert groups == 1
        else:
            assert outcome <= 1e-5
