"""DistributedDataParallel, with AdamW on every rank or ZeroRedundancyOptimizer's N-th of it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from benchmarks.jobs import ADAMW, Job
from benchmarks.systems.base import Step, System, loss_of


def _optimizer(model: nn.Module, sharded: bool) -> Optimizer:
    if not sharded:
        return AdamW(model.parameters(), **ADAMW)
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=AdamW, parameters_as_bucket_view=True, **ADAMW)


def build(job: Job, *, dtype: torch.dtype, sharded: bool) -> Step:
    """fp32 parameters compute under autocast and send bf16 gradients; bf16 parameters do so by themselves."""
    mixed = dtype == torch.float32
    model = DistributedDataParallel(job.model(dtype), gradient_as_bucket_view=True, static_graph=True)
    if mixed:
        # DDP refuses this hook by its name on gloo, where it works as well; a lambda has another name.
        model.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    optimizer = _optimizer(model, sharded)

    def step(tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
            loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


_MIXED = "autocast to bf16, bf16_compress_hook, gradient_as_bucket_view, static_graph, fused AdamW"
_PURE = "bf16 model, gradient_as_bucket_view, static_graph, fused AdamW on bf16 parameters: nothing in fp32"
_ZRO = "parameters_as_bucket_view"

SYSTEMS = (
    System(
        name="ddp",
        label="DDP",
        build=functools.partial(build, dtype=torch.float32, sharded=False),
        holds="fp32 parameters, gradients and moments",
        setting=_MIXED,
    ),
    System(
        name="ddp-bf16",
        label="DDP, all bf16",
        build=functools.partial(build, dtype=torch.bfloat16, sharded=False),
        holds="bf16 parameters, gradients and moments",
        setting=_PURE,
    ),
    System(
        name="zro",
        label="ZeroRedundancyOptimizer",
        build=functools.partial(build, dtype=torch.float32, sharded=True),
        holds="fp32 parameters and gradients; fp32 moments /N",
        setting=f"{_MIXED}, {_ZRO}",
    ),
    System(
        name="zro-bf16",
        label="ZeroRedundancyOptimizer, all bf16",
        build=functools.partial(build, dtype=torch.bfloat16, sharded=True),
        holds="bf16 parameters and gradients; bf16 moments /N",
        setting=f"{_PURE}, {_ZRO}",
    ),
)
