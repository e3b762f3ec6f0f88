"""`gathered`: whole parameters for a while, to read or to change."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import onenth
from tests.distributed.interface import toys
from tests.distributed.interface.compare import entries_that_differ, relative_distance
from tests.distributed.pool import Pool


def whole_values(model: torch.nn.Module) -> dict[str, Tensor]:
    with onenth.gathered(model):
        return {name: value.detach().clone() for name, value in model.named_parameters()}


def check_values(group: dist.ProcessGroup, stage: int) -> None:
    expected = {name: value.detach() for name, value in toys.toy().named_parameters()}
    model, _ = toys.shard_toy(group, stage=stage)
    assert entries_that_differ(whole_values(model), expected) == []
    with onenth.gathered(model.blocks[1]):
        assert torch.equal(model.blocks[1].linear.weight, expected["blocks.1.linear.weight"])
    with onenth.gathered(toys.parameter(model, "head.bias")):
        assert torch.equal(model.head.bias, expected["head.bias"])
    with onenth.gathered([toys.parameter(model, "stem.bias"), toys.parameter(model, "blocks.0.norm.weight")]):
        assert torch.equal(model.stem.bias, expected["stem.bias"])
        with onenth.gathered(model):
            assert torch.equal(model.head.weight, expected["head.weight"])
        assert torch.equal(model.blocks[0].norm.weight, expected["blocks.0.norm.weight"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_are_whole_inside(pool: Pool, stage: int) -> None:
    """A module, one parameter, a list, or nested: inside, every rank reads the plain model's values."""
    pool.run(2, check_values, stage)


def check_release(group: dist.ProcessGroup) -> None:
    model, _ = toys.shard_toy(group)
    with onenth.gathered(model.blocks[0]), pytest.raises(onenth.ShardError, match="head"):
        torch.sum(model.head.weight)
    with pytest.raises(KeyError, match="the user's"), onenth.gathered(model):
        raise KeyError("the user's")
    with pytest.raises(onenth.ShardError, match=r"stem\.weight"):
        torch.sum(model.stem.weight)


def test_only_what_was_asked_for_is_gathered_and_only_inside(pool: Pool) -> None:
    """At stage 3 other parameters stay released, and leaving by the user's exception releases all again."""
    pool.run(2, check_release)


def check_read_only(group: dist.ProcessGroup) -> list[str]:
    model, _ = toys.shard_toy(group)
    with onenth.gathered(model), torch.no_grad():
        model.head.weight.fill_(7.0)
    state = onenth.full_state_dict(model)
    return entries_that_differ(state, toys.toy().state_dict()) if state else []


def test_without_modify_changes_are_dropped(pool: Pool) -> None:
    """At stage 3, what was written without modify=True is gone after the block."""
    assert pool.run(2, check_read_only)[0] == []


def changes_by_rank_0(group: dist.ProcessGroup, stage: int, precision: str) -> tuple[list[str], int, set[float]]:
    """Entries of the full state that changed, how many elements of them, their new values; at rank 0."""
    model, optimizer = toys.shard_toy(group, stage=stage, precision=precision)
    toys.train(model, optimizer, group.rank())
    before = onenth.full_state_dict(model)
    with onenth.gathered(model, modify=True), torch.no_grad():
        model.blocks[1].linear.weight[3, 4:6] = 2.0 + group.rank()
    seen = whole_values(model)["blocks.1.linear.weight"]
    assert set(seen[3, 4:6].tolist()) == {2.0}, "rank 0's change is meant to be on every rank"
    after = onenth.full_state_dict(model)
    if group.rank() != 0:
        return [], 0, set()
    changed = after["blocks.1.linear.weight"] != before["blocks.1.linear.weight"]
    values = after["blocks.1.linear.weight"][changed]
    return entries_that_differ(before, after), int(changed.sum()), set(values.tolist())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_modify_keeps_the_changes_of_rank_0_and_nothing_else(pool: Pool, stage: int, precision: str) -> None:
    """Rank 0's change is kept on every rank; all other master elements keep bits that bf16 can't hold."""
    assert pool.run(2, changes_by_rank_0, stage, precision)[0] == (["blocks.1.linear.weight"], 2, {2.0})


def distance_after_modify(group: dist.ProcessGroup) -> float:
    model, optimizer = toys.shard_toy(group, toys.sgd)
    with onenth.gathered(model, modify=True), torch.no_grad():
        model.head.weight.zero_()
    toys.train(model, optimizer, group.rank())
    state = onenth.full_state_dict(model)

    plain = toys.toy()
    torch.nn.init.zeros_(plain.head.weight)
    plain_optimizer = toys.sgd(list(plain.parameters()))
    for step in range(toys.STEPS):
        toys.plain_backward(plain, step, group.size())
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    return relative_distance(state, plain.state_dict()) if state else 0.0


def test_training_goes_on_from_modified_parameters(pool: Pool) -> None:
    """After modify=True training continues as plain PyTorch does from the changed parameters."""
    assert pool.run(2, distance_after_modify)[0] <= 1e-5


def check_forward_at_rank_0(group: dist.ProcessGroup, stage: int) -> None:
    model, optimizer = toys.shard_toy(group, stage=stage)
    inputs, _ = toys.batch(9, 0)
    with onenth.gathered(model), torch.no_grad():
        if group.rank() == 0:
            for _ in range(2):
                assert torch.equal(model(inputs), toys.toy()(inputs))
    toys.train(model, optimizer, group.rank())
    state = onenth.full_state_dict(model)
    if state:
        assert relative_distance(state, toys.train_plain(group.size())) <= 1e-5


@pytest.mark.parametrize("stage", [1, 3])
def test_one_rank_alone_may_run_forward_inside(pool: Pool, stage: int) -> None:
    """Inside, rank 0 evaluates alone while others wait; training afterwards is plain PyTorch's."""
    pool.run(2, check_forward_at_rank_0, stage)
