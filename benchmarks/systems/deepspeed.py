"""DeepSpeed's ZeRO stages 1, 2 and 3 (an optional dependency)."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from benchmarks.jobs import ADAMW, Job
from benchmarks.systems.base import Step, System


def _config(job: Job, stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": job.batch,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
    }


def build(job: Job, *, stage: int) -> Step:
    """A bf16 engine with the fused AdamW of PyTorch on fp32 partitions."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    model = job.model(torch.float32)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=AdamW(model.parameters(), **ADAMW), config=_config(job, stage)
    )

    def step(tokens: Tensor) -> Tensor:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


_HOLDS = {
    1: "bf16 parameters and gradients; fp32 master and moments /N",
    2: "bf16 parameters; bf16 gradients, fp32 master and moments /N",
    3: "bf16 parameters and gradients, fp32 master and moments /N",
}

SYSTEMS = tuple(
    System(
        name=f"deepspeed{stage}",
        label=f"DeepSpeed, stage {stage}",
        build=functools.partial(build, stage=stage),
        holds=holds,
        setting="bf16, overlap_comm, contiguous_gradients, fused AdamW of PyTorch as client optimizer",
        module="deepspeed",
    )
    for stage, holds in _HOLDS.items()
)
