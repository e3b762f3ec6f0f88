"""DistributedDataParallel, with AdamW on every rank or ZeroRedundancyOptimizer's N-th of it."""

from __future__ import annotations

import functools
from typing import Any

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


def build(job: Job, *, dtype: torch.dtype, sharded: bool, hook: bool = False) -> Step:
    """fp32 parameters compute under autocast; bf16 ones compute and send bf16 by themselves.

    hook: fp32 gradients travel in bf16. DDP refuses this hook on gloo by its name; a lambda has another name.
    """
    mixed = dtype == torch.float32
    model = DistributedDataParallel(job.model(dtype), gradient_as_bucket_view=True, static_graph=True)
    if hook:
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


_COMMON = "gradient_as_bucket_view, static_graph, fused AdamW"
_MIXED = f"autocast to bf16, fp32 gradients on the wire, {_COMMON}"
_HOOK = f"autocast to bf16, bf16 gradients on the wire by a hook that DDP refuses on gloo, {_COMMON}"
_PURE = f"bf16 model, {_COMMON} on bf16 parameters: nothing in fp32"
_STATES = {False: "fp32 parameters, gradients and moments", True: "fp32 parameters and gradients; fp32 moments /N"}


def _system(name: str, label: str, suffix: str, sharded: bool, holds: str, setting: str, **how: Any) -> System:
    return System(
        name=name + suffix,
        label=label,
        build=functools.partial(build, sharded=sharded, **how),
        holds=holds,
        setting=f"{setting}, parameters_as_bucket_view" if sharded else setting,
    )


SYSTEMS = tuple(
    system
    for name, label, sharded in (("ddp", "DDP", False), ("zro", "ZeroRedundancyOptimizer", True))
    for system in (
        _system(name, label, "", sharded, _STATES[sharded], _MIXED, dtype=torch.float32),
        _system(name, f"{label}, bf16 hook", "-hook", sharded, _STATES[sharded], _HOOK, dtype=torch.float32, hook=True),
        _system(
            name,
            f"{label}, all bf16",
            "-bf16",
            sharded,
            _STATES[sharded].replace("fp32", "bf16"),
            _PURE,
            dtype=torch.bfloat16,
        ),
    )
)
