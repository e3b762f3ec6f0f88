"""onenth, stages 0 to 3, through its public interface."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.optim import AdamW

from benchmarks.jobs import ADAMW, Job
from benchmarks.systems.base import Step, System, loss_of


def build(job: Job, *, stage: int) -> Step:
    """The default settings in bf16: units, prefetch and the NaN check as every user has them."""
    import onenth

    whole = job.model(torch.float32)
    model, optimizer = onenth.shard(whole, AdamW(whole.parameters(), **ADAMW), stage=stage, precision="bf16")
    assert optimizer is not None, "shard returns an optimizer where it got one"

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model, tokens)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


_HOLDS = {
    0: "bf16 parameters and gradients; fp32 master and moments",
    1: "bf16 parameters and gradients; fp32 master and moments /N",
    2: "bf16 parameters; bf16 gradients, fp32 master and moments /N",
    3: "bf16 gradients, fp32 master and moments /N; parameters from the master",
}

SYSTEMS = tuple(
    System(
        name=f"onenth{stage}",
        label=f"onenth, stage {stage}",
        build=functools.partial(build, stage=stage),
        holds=holds,
        setting='precision="bf16", everything else by default, fused AdamW',
        module="onenth",
    )
    for stage, holds in _HOLDS.items()
)
