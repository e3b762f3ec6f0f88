"""A released parameter at stage 3 is a placeholder: it has the parameter's looks and never its values."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onenth
from onenth.errors import ShardError
from tests.distributed.reports.harness import ALL_STAGES, Job, Stack, batch, message_of, shard_job

NAME = "blocks.1.up.weight"


def released(model: nn.Module) -> nn.Parameter:
    """The parameter `NAME`, without the attribute access that would gather it."""
    return dict(model.named_parameters())[NAME]


def step_once(model: nn.Module, optimizer: Any) -> None:
    optimizer.backward(model(batch(0, 0)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def look_of_placeholders(group: Any) -> dict[str, Any]:
    """Properties of all parameters before sharding, after it and after a step. Runs on ranks."""
    plain = Job().model()
    model, optimizer = shard_job(group, Job(), 3, precision="bf16")
    after_shard = look(model)
    step_once(model, optimizer)
    return {"plain": look(plain.bfloat16()), "after shard": after_shard, "after step": look(model)}


def look(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {
        name: (p.shape, p.dtype, p.device, p.numel(), p.element_size(), p.requires_grad, p.is_leaf, type(p))
        for name, p in model.named_parameters()
    }


def values_of_placeholders(group: Any) -> dict[str, bool]:
    """Whether each parameter and gradient reads as NaN and takes less memory than itself. Runs on ranks."""
    model, optimizer = shard_job(group, Job(), 3)
    optimizer.backward(model(batch(0, 0)).square().mean())
    found = {}
    for name, parameter in model.named_parameters():
        for kind, value in (("", parameter.detach()), (".grad", parameter.grad)):
            is_small = value.untyped_storage().nbytes() < value.nbytes
            found[name + kind] = is_small and bool(value.isnan().all())
    return found


def set_data(parameter: nn.Parameter) -> None:
    parameter.data = torch.zeros_like(parameter)


def convert_data(parameter: nn.Parameter) -> None:
    """What `.to(dtype)` of a single block does to each of its parameters."""
    parameter.data = parameter.data.to(torch.bfloat16)


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "fill": lambda parameter: parameter.fill_(0.5),
    "zero": lambda parameter: parameter.zero_(),
    "normal": lambda parameter: nn.init.normal_(parameter),
    "copy": lambda parameter: parameter.copy_(torch.ones(parameter.shape)),
    "scale": lambda parameter: parameter.mul_(0.9),
    "item": lambda parameter: parameter.__setitem__(0, 1.0),
    "data": set_data,
    "conversion": convert_data,
    "data.fill": lambda parameter: parameter.data.fill_(0.5),
}


def writes_into_placeholders(group: Any) -> dict[str, str]:
    """The message that each way to write raises, at once or in the next forward. Runs on ranks."""
    messages = {}
    for name, write in WRITES.items():
        model, _ = shard_job(group, Job(), 3)
        try:
            with torch.no_grad():
                write(released(model))
            messages[name] = f"lost: {model(batch(0, 0)).norm()}"
        except ShardError as error:
            messages[name] = str(error)
        except RuntimeError as error:
            messages[name] = f"at once: {error}"
    return messages


def reads_outside_forward(group: Any) -> list[str]:
    """Messages of reading a released parameter; inside `gathered` it is whole. Runs on ranks."""
    model, optimizer = shard_job(group, Job(), 3)
    messages = [message_of(ShardError, lambda: model.blocks[1].up.weight)]
    step_once(model, optimizer)
    messages.append(message_of(ShardError, lambda: model.blocks[1].up.weight))
    with onenth.gathered(model.blocks[1]):
        if not model.blocks[1].up.weight.isfinite().all():
            messages.append("NaN inside gathered")
    messages.append(message_of(ShardError, lambda: model.blocks[1].up.weight))
    return messages


class ReadsInForward(Stack):
    """The root's forward reads a block's weight that is released then, with and without a graph."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            norm = self.blocks[1].up.weight.norm()
        return super().forward(x) / norm


def reads_in_forward(group: Any) -> bool:
    """Whether the sharded forward's output is the plain one's. Runs on ranks."""
    job = Job(ReadsInForward)
    model, _ = shard_job(group, job, 3)
    return torch.allclose(model(batch(0, 0)), job.model()(batch(0, 0)))


def l2_penalty(group: Any) -> str:
    """What becomes of a loss over `model.parameters()`: an error, or a skipped step. Runs on ranks."""
    model, optimizer = shard_job(group, Job(), 3)
    before = onenth.full_state_dict(model)
    try:
        loss = model(batch(0, 0)).square().mean() + sum(p.square().sum() for p in model.parameters())
        optimizer.backward(loss)
        optimizer.step()
    except RuntimeError:
        return "raised"
    after = onenth.full_state_dict(model)
    unchanged = all(torch.equal(after[name], value) for name, value in before.items())
    return "skipped" if optimizer.skipped and unchanged else f"trained on: loss {loss.item()}"


COPIES: dict[str, Callable[[nn.Module], object]] = {
    "copy.deepcopy": copy.deepcopy,
    "pickle.dumps": pickle.dumps,
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
    "state_dict": lambda model: model.state_dict(),
    "state_dict of a block": lambda model: model.blocks[0].state_dict(),
    "to(dtype)": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
}


def copies(group: Any) -> dict[str, str]:
    """The message that each way to copy or convert a sharded model raises. Runs on ranks."""
    model, optimizer = shard_job(group, Job(), 3)
    messages = {name: message_of(ShardError, lambda call=call: call(model)) for name, call in COPIES.items()}
    step_once(model, optimizer)
    return messages


def clip_by_torch(group: Any) -> list[str]:
    """Messages of `torch.nn.utils.clip_grad_norm_` by stage, and what a step makes of it. Runs on ranks."""
    messages = []
    for stage in ALL_STAGES:
        model, optimizer = shard_job(group, Job(), stage)
        optimizer.backward(model(batch(0, 0)).square().mean())
        messages.append(message_of(RuntimeError, lambda m=model: nn.utils.clip_grad_norm_(m.parameters(), 1e-3)))
        optimizer.step()
        if optimizer.skipped or not optimizer.grad_norm > 1e-2:
            messages.append(f"stage {stage}: the gradients did not survive: norm {optimizer.grad_norm}")
        optimizer.zero_grad()
        messages += [f"stage {stage}: {n} keeps a gradient" for n, p in model.named_parameters() if p.grad is not None]
    return messages


def test_look_of_placeholders(pool):
    """Shape, dtype, device, size and type of a released parameter stay true: code all over reads them."""
    for found in pool.run(2, look_of_placeholders):
        assert found["after shard"] == found["after step"] == found["plain"]


def test_values_of_placeholders(pool):
    """A released parameter, and any gradient after backward, reads as NaN and takes next to no memory."""
    for found in pool.run(2, values_of_placeholders):
        assert all(found.values()), found


def test_writes_into_placeholders(pool):
    """A write that would be lost is an error that names the parameter, at the latest in the next forward."""
    for messages in pool.run(2, writes_into_placeholders):
        assert messages.keys() == WRITES.keys()
        unnamed = {n: text for n, text in messages.items() if not text.startswith("at once") and NAME not in text}
        assert not unnamed


def test_reads_outside_forward(pool):
    """Reading a released parameter raises naming it and `gathered`, inside of which it is whole."""
    for messages in pool.run(2, reads_outside_forward):
        assert len(messages) == 3
        assert all(NAME in message and "gathered" in message for message in messages), messages


def test_reads_in_the_roots_forward(pool):
    """A released parameter that the root's forward reads is gathered."""
    assert pool.run(2, reads_in_forward) == [True, True]


def test_a_penalty_over_all_parameters_is_never_silently_wrong(pool):
    """An L2 term over placeholders raises or is NaN, so that the step is skipped; it never trains on."""
    assert set(pool.run(2, l2_penalty)) <= {"raised", "skipped"}


def test_copies_and_conversions(pool):
    """Whatever would copy, write or convert placeholders raises and names what to call instead."""
    for messages in pool.run(2, copies):
        ways_out = ("full_state_dict", "unshard", "gathered", "precision")
        assert all(any(way in message for way in ways_out) for message in messages.values()), messages


def test_clipping_by_torch(pool):
    """`torch.nn.utils.clip_grad_norm_` raises at every stage and clips nothing; gradients survive."""
    for messages in pool.run(2, clip_by_torch):
        assert len(messages) == len(ALL_STAGES), messages


@pytest.mark.parametrize("stage", ALL_STAGES)
def test_state_dict_inside_gathered(pool, stage):
    """Inside `gathered`, the model's own `state_dict` is whole on every rank."""
    plain = Job().model().state_dict()
    for state in pool.run(2, state_inside_gathered, stage):
        assert all(torch.equal(state[name], value) for name, value in plain.items())


def state_inside_gathered(group: Any, stage: int) -> dict[str, Tensor]:
    """A copy of `state_dict()` made while everything is whole. Runs on ranks."""
    model, _ = shard_job(group, Job(), stage)
    with onenth.gathered(model):
        return {name: value.clone() for name, value in model.state_dict().items()}
