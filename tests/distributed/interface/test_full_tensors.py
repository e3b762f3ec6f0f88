"""Whole tensors out of and into a sharded model: gradients, optimizer states, parameters."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onenth
from tests.distributed.interface import toys
from tests.distributed.interface.compare import entries_that_differ, relative_distance
from tests.distributed.pool import Pool


def check_full_gradient(group: dist.ProcessGroup, stage: int) -> None:
    model, optimizer = toys.shard_toy(group, toys.sgd, stage=stage)
    optimizer.backward(toys.loss_of(model, toys.batch(0, group.rank())))
    plain = toys.toy()
    toys.plain_backward(plain, 0, group.size())
    for name, value in plain.named_parameters():
        gradient = onenth.full_gradient(toys.parameter(model, name))
        assert relative_distance({name: gradient}, {name: value.grad}) <= 1e-5

    for name, value in plain.named_parameters():
        onenth.set_full_gradient(toys.parameter(model, name), torch.full_like(value, 2.0))
    assert onenth.full_gradient(toys.parameter(model, "stem.weight")).unique().tolist() == [2.0]
    optimizer.step()
    state = onenth.full_state_dict(model)
    for name, value in plain.named_parameters() if state else ():
        assert relative_distance({name: state[name]}, {name: value.detach() - 0.1 * 2.0}) <= 1e-6


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_full_gradient_and_its_setter(pool: Pool, stage: int) -> None:
    """Every rank reads the mean gradient, whole; what is set is read again, and stepped with."""
    pool.run(2, check_full_gradient, stage)


def check_no_gradient(group: dist.ProcessGroup) -> None:
    model, optimizer = toys.shard_toy(group)
    weight = toys.parameter(model, "head.weight")
    assert onenth.full_gradient(weight) is None
    optimizer.backward(toys.loss_of(model, toys.batch(0, group.rank())))
    assert onenth.full_gradient(weight) is not None
    optimizer.zero_grad()
    assert onenth.full_gradient(weight) is None
    with pytest.raises(onenth.ShardError, match="shape"):
        onenth.set_full_gradient(weight, torch.zeros(3))
    with pytest.raises(onenth.ShardError):
        onenth.full_gradient(nn.Parameter(torch.zeros(3)))


def test_there_is_no_full_gradient_before_backward_and_after_zero_grad(pool: Pool) -> None:
    """It is None then, as `.grad`; a wrong shape and a parameter that isn't sharded are refused."""
    pool.run(2, check_no_gradient)


def check_full_optimizer_state(group: dist.ProcessGroup, stage: int, precision: str) -> None:
    model, optimizer = toys.shard_toy(group, stage=stage, precision=precision)
    toys.train(model, optimizer, group.rank())
    plain = toys.toy()
    plain_optimizer = toys.adamw(list(plain.parameters()))
    for step in range(toys.STEPS):
        toys.plain_backward(plain, step, group.size())
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    tolerance = 1e-5 if precision == "fp32" else 0.1
    for name, value in plain.named_parameters():
        states = onenth.full_optimizer_state(optimizer, toys.parameter(model, name))
        expected = plain_optimizer.state[value]
        assert states.keys() == expected.keys()
        assert float(states["step"]) == toys.STEPS
        for moment in ("exp_avg", "exp_avg_sq"):
            assert states[moment].dtype == torch.float32
            assert relative_distance({name: states[moment]}, {name: expected[moment]}) <= tolerance, moment

    weight = toys.parameter(model, "blocks.2.linear.weight")
    chosen = torch.arange(weight.numel(), dtype=torch.float32).view(weight.shape)
    untouched = onenth.full_optimizer_state(optimizer, weight)["exp_avg_sq"].clone()
    onenth.set_full_optimizer_state(optimizer, weight, {"exp_avg": chosen, "step": torch.tensor(7.0)})
    states = onenth.full_optimizer_state(optimizer, weight)
    assert torch.equal(states["exp_avg"], chosen)
    assert torch.equal(states["exp_avg_sq"], untouched)
    assert float(states["step"]) == 7


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (3, "fp32"), (3, "bf16")])
def test_full_optimizer_state_and_its_setter(pool: Pool, stage: int, precision: str) -> None:
    """Moments are plain PyTorch's, whole, fp32, on every rank; the setter changes what it names alone."""
    pool.run(2, check_full_optimizer_state, stage, precision)


def toy_with_frozen_stem(group: dist.ProcessGroup, **settings: Any) -> toys.Toy:
    model = toys.toy()
    model.stem.requires_grad_(False)
    trainable = [value for value in model.parameters() if value.requires_grad]
    return onenth.shard(model, toys.adamw(trainable), group=group, **settings)[0]


def check_full_state_dict(group: dist.ProcessGroup, stage: int) -> None:
    model = toy_with_frozen_stem(group, stage=stage, precision="bf16")
    expected = toys.toy().state_dict()
    whole = onenth.full_state_dict(model)
    rounded = onenth.full_state_dict(model, dtype=torch.bfloat16)
    trainable = onenth.full_state_dict(model, trainable_only=True)
    if group.rank() != 0:
        assert whole == rounded == trainable == {}
        return
    assert list(whole) == list(expected)
    frozen = {"stem.weight", "stem.bias"}
    # frozen parameters alone have no fp32 master copy
    assert entries_that_differ(expected, whole) == sorted(frozen)
    assert {value.device.type for value in whole.values()} == {"cpu"}
    assert {value.dtype for value in rounded.values()} == {torch.bfloat16, torch.int64}
    assert all(torch.equal(rounded[name], value.to(rounded[name].dtype)) for name, value in expected.items())
    parameters = {name for name, _ in model.named_parameters()}
    assert trainable.keys() & parameters == parameters - frozen
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in whole.values())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_full_state_dict(pool: Pool, stage: int) -> None:
    """Rank 0 gets the unsharded model's keys with the master's bits, each in its own storage; others {}."""
    pool.run(2, check_full_state_dict, stage)


def outcome_of_load_state_dict(group: dist.ProcessGroup, stage: int) -> list[str] | str:
    """Entries of the loaded state that were lost, or the error's message; counts at rank 0."""
    model, _ = toys.shard_toy(group, stage=stage)
    full = {name: value + 1 for name, value in toys.toy().state_dict().items()}
    try:
        model.load_state_dict(full)
    except onenth.ShardError as error:
        return str(error)
    state = onenth.full_state_dict(model)
    return entries_that_differ(full, state) if state else []


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_load_state_dict_after_sharding(pool: Pool, stage: int) -> None:
    """A full state dict loads into the sharded model, all of it, or the error says what to call."""
    for outcome in pool.run(2, outcome_of_load_state_dict, stage):
        assert outcome == [] or "load" in outcome


def check_ways_around(group: dist.ProcessGroup) -> None:
    model, _ = toys.shard_toy(group)
    attempts = {
        "state_dict": lambda: model.state_dict(),
        "torch.save": lambda: torch.save(model, io.BytesIO()),
        "pickle": lambda: pickle.dumps(model),
        "deepcopy": lambda: copy.deepcopy(model),
        "to(dtype)": lambda: model.to(torch.bfloat16),
        "half": lambda: model.half(),
    }
    for name, attempt in attempts.items():
        with pytest.raises(onenth.ShardError) as raised:
            attempt()
        assert "onenth." in str(raised.value), f"{name} names no way out: {raised.value}"
    with onenth.gathered(model):
        assert entries_that_differ(model.state_dict(), toys.toy().state_dict()) == []


def test_what_would_write_released_parameters_raises(pool: Pool) -> None:
    """At stage 3 `state_dict`, pickling, copying and casting raise; inside `gathered` state_dict is right."""
    pool.run(2, check_ways_around)


def distance_with_forward_method(group: dist.ProcessGroup, stage: int) -> float:
    model, optimizer = toys.shard_toy(group, stage=stage)
    onenth.register_forward_method(model, "training_step")
    for step in range(toys.STEPS):
        optimizer.backward(model.training_step(toys.batch(step, group.rank())))
        optimizer.step()
        optimizer.zero_grad()
    state = onenth.full_state_dict(model)
    return relative_distance(state, toys.train_plain(group.size())) if state else 0.0


@pytest.mark.parametrize("stage", [1, 3])
def test_register_forward_method(pool: Pool, stage: int) -> None:
    """A method registered as forward trains as plain PyTorch."""
    assert pool.run(2, distance_with_forward_method, stage)[0] <= 1e-5


def check_bad_forward_method(group: dist.ProcessGroup) -> None:
    model, _ = toys.shard_toy(group)
    with pytest.raises(onenth.OnenthError, match="trainig_step"):
        onenth.register_forward_method(model, "trainig_step")


def test_register_forward_method_of_an_unknown_name_raises(pool: Pool) -> None:
    """A method that the model does not have is an error, not a silent no-op."""
    pool.run(2, check_bad_forward_method)


def check_unshard(group: dist.ProcessGroup, stage: int) -> None:
    model, optimizer = toys.shard_toy(group, stage=stage)
    toys.train(model, optimizer, group.rank())
    onenth.unshard(model)
    assert relative_distance(model.state_dict(), toys.train_plain(group.size())) <= 1e-5
    assert {type(value) for value in model.parameters()} == {nn.Parameter}
    assert entries_that_differ(copy.deepcopy(model).state_dict(), model.state_dict()) == []
    with pytest.raises(onenth.ShardError):
        optimizer.step()
    again = toys.sgd(list(model.parameters()))
    before = toys.snapshot(model)
    toys.loss_of(model, toys.batch(5, 0)).backward()
    again.step()
    moved = {name for name, _ in model.named_parameters()}
    assert entries_that_differ(before, model.state_dict()) == sorted(moved)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_unshard_gives_a_plain_model_back(pool: Pool, stage: int) -> None:
    """After `unshard` every rank holds the trained parameters, plain: they can be copied and trained."""
    pool.run(2, check_unshard, stage)
