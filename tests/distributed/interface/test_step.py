"""backward, step and zero_grad: clipping, norms, skipping, loss scaling, accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onenth
from tests.distributed.interface import toys
from tests.distributed.interface.compare import relative_distance
from tests.distributed.pool import Pool

MAX_NORM = 0.1  # well under the toy's gradient norms, which are around 1


def check_clipping(group: dist.ProcessGroup, stage: int, by_hand: bool) -> float:
    """Distance to plain training clipped by torch; checks the reported norms on the way."""
    model, optimizer = toys.shard_toy(group, stage=stage, max_grad_norm=None if by_hand else MAX_NORM)
    plain = toys.toy()
    plain_optimizer = toys.adamw(list(plain.parameters()))
    for step in range(toys.STEPS):
        toys.plain_backward(plain, step, group.size())
        expected = float(nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM))
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        optimizer.backward(toys.loss_of(model, toys.batch(step, group.rank())))
        norms = [float(optimizer.clip_grad_norm_(MAX_NORM))] if by_hand else []
        optimizer.step()
        norms += [] if by_hand else [float(optimizer.grad_norm)]
        optimizer.zero_grad()
        assert expected > 2 * MAX_NORM, "clipping that does nothing proves nothing"
        assert norms == [pytest.approx(expected, rel=1e-5)]
    state = onenth.full_state_dict(model)
    return relative_distance(state, plain.state_dict()) if state else 0.0


@pytest.mark.parametrize("by_hand", [False, True], ids=["max_grad_norm", "clip_grad_norm_"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping(pool: Pool, stage: int, by_hand: bool) -> None:
    """Both ways to clip report the whole model's norm before clipping, and train as torch's own does."""
    assert pool.run(2, check_clipping, stage, by_hand)[0] <= 1e-5


def norm_without_clipping(group: dist.ProcessGroup) -> tuple[float, float]:
    model, optimizer = toys.shard_toy(group)
    optimizer.backward(toys.loss_of(model, toys.batch(0, group.rank())))
    optimizer.step()
    plain = toys.toy()
    toys.plain_backward(plain, 0, group.size())
    return float(optimizer.grad_norm), float(nn.utils.get_total_norm([value.grad for value in plain.parameters()]))


def test_grad_norm_is_there_without_clipping(pool: Pool) -> None:
    """`.grad_norm` is the whole model's on every rank, clipped or not."""
    for reported, expected in pool.run(3, norm_without_clipping):
        assert reported == pytest.approx(expected, rel=1e-5)


def distance_with_reduce_sum(group: dist.ProcessGroup, stage: int) -> float:
    model, optimizer = toys.shard_toy(group, stage=stage, reduce="sum")
    for step in range(toys.STEPS):
        optimizer.backward(toys.loss_of(model, toys.batch(step, group.rank())) / group.size())
        optimizer.step()
        optimizer.zero_grad()
    state = onenth.full_state_dict(model)
    return relative_distance(state, toys.train_plain(group.size())) if state else 0.0


@pytest.mark.parametrize("stage", [0, 3])
def test_reduce_sum(pool: Pool, stage: int) -> None:
    """With reduce="sum", losses that are divided already train on three ranks as plain PyTorch."""
    assert pool.run(3, distance_with_reduce_sum, stage)[0] <= 1e-5


def distance_of_sgd_step(group: dist.ProcessGroup, model: nn.Module, micro_batches: list[int]) -> float:
    """How far `model` is from one plain SGD step on these micro-batches, added up."""
    state = onenth.full_state_dict(model)
    plain = toys.toy()
    plain_optimizer = toys.sgd(list(plain.parameters()))
    for step in micro_batches:
        toys.plain_backward(plain, step, group.size())
    plain_optimizer.step()
    return relative_distance(state, plain.state_dict()) if state else 0.0


def distance_with_no_sync(group: dist.ProcessGroup, stage: int) -> float:
    model, optimizer = toys.shard_toy(group, toys.sgd, stage=stage)
    with onenth.no_sync(model):
        for step in (0, 1):
            optimizer.backward(toys.loss_of(model, toys.batch(step, group.rank())))
    optimizer.backward(toys.loss_of(model, toys.batch(2, group.rank())))
    optimizer.step()
    return distance_of_sgd_step(group, model, [0, 1, 2])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_sync_adds_up(pool: Pool, stage: int) -> None:
    """Two backwards inside `no_sync` and one outside step as their sum."""
    assert pool.run(2, distance_with_no_sync, stage)[0] <= 1e-5


def check_step_inside_no_sync(group: dist.ProcessGroup, stage: int) -> None:
    model, optimizer = toys.shard_toy(group, toys.sgd, stage=stage)
    with onenth.no_sync(model):
        optimizer.backward(toys.loss_of(model, toys.batch(0, group.rank())))
    with pytest.raises(onenth.ShardError, match="no_sync"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(toys.loss_of(model, toys.batch(1, group.rank())))
    optimizer.step()
    assert distance_of_sgd_step(group, model, [1]) <= 1e-5


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_step_with_gradients_never_exchanged_raises(pool: Pool, stage: int) -> None:
    """`step()` after only `no_sync` backwards raises; `zero_grad` drops those and training goes on."""
    pool.run(2, check_step_inside_no_sync, stage)


def distance_after_zero_grad(group: dist.ProcessGroup, stage: int) -> float:
    distances = []
    for clear in ("optimizer", "optimizer, kept", "model", "model, kept"):
        model, optimizer = toys.shard_toy(group, toys.sgd, stage=stage)
        optimizer.backward(toys.loss_of(model, toys.batch(0, group.rank())))
        owner = optimizer if clear.startswith("optimizer") else model
        owner.zero_grad(set_to_none=not clear.endswith("kept"))
        optimizer.backward(toys.loss_of(model, toys.batch(1, group.rank())))
        optimizer.step()
        distances.append(distance_of_sgd_step(group, model, [1]))
    return max(distances)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_grad_drops_gradients(pool: Pool, stage: int) -> None:
    """The optimizer's `zero_grad` and the model's, kept or set to None, both forget the last backward."""
    assert pool.run(2, distance_after_zero_grad, stage)[0] <= 1e-5


def distance_without_zero_grad(group: dist.ProcessGroup) -> float:
    model, optimizer = toys.shard_toy(group, toys.sgd)
    for step in (0, 1):
        optimizer.backward(toys.loss_of(model, toys.batch(step, group.rank())))
    optimizer.step()
    return distance_of_sgd_step(group, model, [0, 1])


def test_without_zero_grad_gradients_add_up(pool: Pool) -> None:
    """Several backwards before a step add up, as in plain PyTorch."""
    assert pool.run(2, distance_without_zero_grad)[0] <= 1e-5


def check_skipping(group: dist.ProcessGroup, precision: str) -> list[float]:
    """The loss scale before, after a good step, and after a step that overflowed."""
    model, optimizer = toys.shard_toy(group, precision=precision, loss_scale=onenth.LossScale(initial=256.0))
    scales = [optimizer.loss_scale]
    assert (optimizer.skipped, optimizer.skipped_steps) == (False, 0)
    toys.train(model, optimizer, group.rank(), range(1))
    assert (optimizer.skipped, optimizer.skipped_steps) == (False, 0)
    scales.append(optimizer.loss_scale)
    before = onenth.full_state_dict(model)
    factor = float("inf") if group.rank() == 1 else 1.0
    optimizer.backward(factor * toys.loss_of(model, toys.batch(1, group.rank())))
    optimizer.step()
    optimizer.zero_grad()
    assert (optimizer.skipped, optimizer.skipped_steps) == (True, 1)
    scales.append(optimizer.loss_scale)
    after = onenth.full_state_dict(model)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    toys.train(model, optimizer, group.rank(), range(2, 3))
    assert (optimizer.skipped, optimizer.skipped_steps) == (False, 1)
    return scales


@pytest.mark.parametrize(
    ("precision", "scales"),
    [("fp16", [256.0, 256.0, 128.0]), ("bf16", [1.0, 1.0, 1.0]), ("fp32", [1.0, 1.0, 1.0])],
)
def test_an_overflow_skips_one_step(pool: Pool, precision: str, scales: list[float]) -> None:
    """An Inf on one rank: all ranks skip, count it, keep their parameters; fp16 alone halves its scale."""
    assert pool.run(2, check_skipping, precision) == [scales, scales]


def scales_of_fp16(group: dist.ProcessGroup, loss_scale: Any) -> list[float]:
    model, optimizer = toys.shard_toy(group, precision="fp16", loss_scale=loss_scale)
    scales = []
    for step in range(4):
        optimizer.backward(toys.loss_of(model, toys.batch(step, group.rank())))
        optimizer.step()
        optimizer.zero_grad()
        scales.append(optimizer.loss_scale)
    return scales


def test_loss_scale_grows_or_stays_as_set(pool: Pool) -> None:
    """The fp16 scale grows after `growth_interval` good steps; a plain number stays as it is."""
    growing = onenth.LossScale(initial=64.0, growth=4.0, growth_interval=2)
    assert pool.run(2, scales_of_fp16, growing)[0] == [64.0, 256.0, 256.0, 1024.0]
    assert pool.run(2, scales_of_fp16, 32.0)[0] == [32.0] * 4


def check_plain_backward(group: dist.ProcessGroup) -> None:
    model, optimizer = toys.shard_toy(group, precision="fp16")
    toys.loss_of(model, toys.batch(0, group.rank())).backward()
    with pytest.raises(onenth.ShardError, match=r"optimizer\.backward"):
        optimizer.step()
    for precision in ("bf16", "fp32"):
        model, optimizer = toys.shard_toy(group, toys.sgd, precision=precision)
        toys.loss_of(model, toys.batch(0, group.rank())).backward()
        optimizer.step()
        assert distance_of_sgd_step(group, model, [0]) <= (1e-5 if precision == "fp32" else 1e-2)


def test_plain_backward_is_an_error_in_fp16_alone(pool: Pool) -> None:
    """`loss.backward()` trains in bf16 and fp32; in fp16 the step after it says what to use instead."""
    pool.run(2, check_plain_backward)


def check_backward_keywords(group: dist.ProcessGroup) -> None:
    model, optimizer = toys.shard_toy(group, toys.sgd)
    loss = toys.loss_of(model, toys.batch(0, group.rank()))
    optimizer.backward(loss, retain_graph=True)
    optimizer.backward(loss)
    optimizer.step()
    assert distance_of_sgd_step(group, model, [0, 0]) <= 1e-5


def test_backward_passes_keywords_on(pool: Pool) -> None:
    """`backward(loss, retain_graph=True)` keeps the graph for a second backward, and both add up."""
    pool.run(2, check_backward_keywords)


def check_step_without_backward(group: dist.ProcessGroup) -> None:
    model, optimizer = toys.shard_toy(group)
    optimizer.step()
    toys.train(model, optimizer, group.rank())
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    state = onenth.full_state_dict(model)
    if state:
        assert relative_distance(state, toys.train_plain(group.size())) <= 1e-5


def test_step_without_gradients_changes_nothing(pool: Pool) -> None:
    """A step without gradients updates and counts nothing, as in plain PyTorch, and leaves groups alone."""
    pool.run(2, check_step_without_backward)
