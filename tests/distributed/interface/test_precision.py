"""The dtype contract: what each state's dtype is, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn, optim

import onenth
from tests.distributed.interface import toys
from tests.distributed.pool import Pool

BF16 = onenth.Precision(
    parameters=torch.bfloat16,
    gradients=torch.bfloat16,
    sums=torch.float32,
    master=torch.float32,
    moments=torch.float32,
)
ALL_BF16 = replace(BF16, master=None, moments=torch.bfloat16)


class HalfMomentum(optim.Optimizer):
    """SGD whose momentum is bf16, whatever it is given."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                fresh = torch.zeros_like(param, dtype=torch.bfloat16)
                momentum = self.state[param].setdefault("momentum", fresh)
                momentum.mul_(0.9).add_(param.grad)
                param.sub_(group["lr"] * momentum)


def one_step(group: dist.ProcessGroup, **settings: object) -> dict[str, torch.dtype]:
    """Trains one step; returns the dtypes of the head's optimizer state."""
    model, optimizer = toys.shard_toy(group, **settings)
    toys.train(model, optimizer, group.rank(), range(1))
    states = onenth.full_optimizer_state(optimizer, toys.parameter(model, "head.weight"))
    return {name: value.dtype for name, value in states.items()}


def check_moments(group: dist.ProcessGroup) -> None:
    for stage in (0, 3):
        assert one_step(group, stage=stage, precision=BF16)["exp_avg"] == torch.float32
        assert one_step(group, stage=stage, precision=ALL_BF16)["exp_avg_sq"] == torch.bfloat16
        with pytest.raises(onenth.ShardError) as raised:
            one_step(group, build_optimizer=HalfMomentum, stage=stage, precision="bf16")
        for part in ("HalfMomentum", "momentum", "bfloat16", "moments"):
            assert part in str(raised.value), part
        accepted = replace(BF16, moments=torch.bfloat16)
        assert one_step(group, stage=stage, precision=accepted)["exp_avg"] == torch.bfloat16
        states = one_step(group, build_optimizer=HalfMomentum, stage=stage, precision=accepted)
        assert states == {"momentum": torch.bfloat16}


def test_16_bit_moments_only_where_the_precision_says_so(pool: Pool) -> None:
    """Moments are fp32; 16-bit ones are refused, with state and setting named, unless they are asked for."""
    pool.run(2, check_moments)


def parameter_dtypes(group: dist.ProcessGroup, keep_fp32: tuple[object, ...], stage: int) -> set[str]:
    """Names of the parameters that train in fp32; all others are checked to be bf16."""
    model, optimizer = toys.shard_toy(group, stage=stage, precision=replace(BF16, keep_fp32=keep_fp32))
    toys.train(model, optimizer, group.rank())
    with onenth.gathered(model):
        dtypes = {name: value.dtype for name, value in model.named_parameters()}
    assert set(dtypes.values()) == {torch.bfloat16, torch.float32}
    return {name for name, dtype in dtypes.items() if dtype == torch.float32}


@pytest.mark.parametrize("stage", [1, 3])
def test_keep_fp32(pool: Pool, stage: int) -> None:
    """Modules named or of a named class keep fp32 parameters, and the model trains with both dtypes."""
    norms = {f"blocks.{index}.norm.{name}" for index in range(3) for name in ("weight", "bias")}
    assert pool.run(2, parameter_dtypes, (nn.LayerNorm,), stage) == [norms, norms]
    head = {"head.weight", "head.bias"}
    assert pool.run(2, parameter_dtypes, ("head", nn.LayerNorm), stage) == [head | norms] * 2


def check_keep_fp32_of_nothing(group: dist.ProcessGroup) -> None:
    with pytest.raises(onenth.OnenthError) as raised:
        toys.shard_toy(group, precision=replace(BF16, keep_fp32=("haed", nn.Conv2d)))
    assert "haed" in str(raised.value)
    assert "Conv2d" in str(raised.value)


def test_keep_fp32_that_matches_nothing_is_an_error(pool: Pool) -> None:
    """A name or class that the model doesn't have is named, all of them at once."""
    pool.run(2, check_keep_fp32_of_nothing)


def buffer_dtypes(group: dist.ProcessGroup) -> list[set[torch.dtype]]:
    dtypes = []
    for buffers in (None, torch.bfloat16):
        model, optimizer = toys.shard_toy(group, precision=replace(BF16, buffers=buffers))
        toys.train(model, optimizer, group.rank())
        dtypes.append({value.dtype for value in model.buffers()})
    return dtypes


def test_buffers_are_left_or_cast_as_told(pool: Pool) -> None:
    """Floating-point buffers stay as they are, or take Precision.buffers; integer buffers are never cast."""
    left, cast = pool.run(2, buffer_dtypes)[0]
    assert left == {torch.float32, torch.int64}
    assert cast == {torch.bfloat16, torch.int64}


class Positions(nn.Module):
    """Adds an fp32 buffer inside a unit: what it returns is fp32 again, and a bf16 Linear after it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(toys.WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.table


class WithInner(nn.Module):
    """[BATCH, INPUT] -> [BATCH, OUTPUT], with `make_inner()` in every block."""

    def __init__(self, make_inner: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(toys.INPUT, toys.WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(make_inner(), nn.Linear(toys.WIDTH, toys.WIDTH)) for _ in range(2))
        self.head = nn.Linear(toys.WIDTH, toys.OUTPUT)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.stem(inputs)
        for block in self.blocks:
            hidden = F.relu(block(hidden))
        return self.head(hidden)


def batch_norm() -> nn.Module:
    return nn.BatchNorm1d(toys.WIDTH)


def train_with_inner(group: dist.ProcessGroup, make_inner: Callable[[], nn.Module], precision: object) -> None:
    model: nn.Module = WithInner(make_inner)
    optimizer = toys.adamw(list(model.parameters()))
    model, sharded = onenth.shard(model, optimizer, group=group, stage=3, precision=precision)
    toys.train(model, sharded, group.rank())


def check_buffer_message(group: dist.ProcessGroup, make_inner: Callable[[], nn.Module], module: str) -> None:
    with pytest.raises(onenth.ShardError) as raised:
        train_with_inner(group, make_inner, BF16)
    assert module in str(raised.value), f"{module} isn't named: {raised.value}"
    assert "buffers=" in str(raised.value), f"the fix isn't named: {raised.value}"
    train_with_inner(group, make_inner, replace(BF16, buffers=torch.bfloat16))


@pytest.mark.parametrize(("make_inner", "module"), [(Positions, "blocks.0."), (batch_norm, "blocks.0.0")])
def test_an_fp32_buffer_in_a_bf16_model_fails_with_help(
    pool: Pool, make_inner: Callable[[], nn.Module], module: str
) -> None:
    """Where an fp32 buffer breaks a bf16 forward, the error names module and fix, and the fix works."""
    pool.run(2, check_buffer_message, make_inner, module)


def check_cast_inputs(group: dist.ProcessGroup) -> None:
    model, _ = toys.shard_toy(group, precision="bf16", cast_inputs=True)
    inputs, _ = toys.batch(0, group.rank())
    assert model(inputs).dtype == torch.bfloat16
    model, _ = toys.shard_toy(group, precision="bf16", cast_inputs=False)
    with pytest.raises(RuntimeError):
        model(inputs)
    assert model(inputs.bfloat16()).dtype == torch.bfloat16


def test_cast_inputs(pool: Pool) -> None:
    """fp32 inputs are cast at the boundary, or left alone (and refused by the Linear)."""
    pool.run(2, check_cast_inputs)
