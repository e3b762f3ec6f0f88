"""DeepSpeed's ZeRO stages 1, 2 and 3 (an optional dependency)."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from benchmarks.jobs import ADAMW, Job
from benchmarks.systems.base import Step, System, loss_of

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported


def _config(job: Job, stage: int) -> dict[str, Any]:
    """Defaults but for the buckets: by default they hold 5e8 elements, more than the model; here one block.

    At stage 3, blocks are released after their forward (by default a model below 1e9 elements is never).
    """
    return {
        "train_micro_batch_size_per_gpu": job.batch,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,  # the default clips to 1.0, and no other system clips
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": job.block_parameters,
            "stage3_prefetch_bucket_size": job.block_parameters,
            "stage3_max_live_parameters": 2 * job.block_parameters,
            "stage3_max_reuse_distance": 0,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def build(job: Job, *, stage: int) -> Step:
    """A bf16 engine; the client's optimizer, PyTorch's fused AdamW, runs on its fp32 partitions."""
    import deepspeed  # type: ignore[import-untyped, import-not-found, unused-ignore]

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo")
    model = job.model(torch.float32)
    optimizer = AdamW(model.parameters(), **ADAMW)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_config(job, stage))

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(engine, tokens)
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
        setting="bf16; no clipping; reduce buckets of one block"
        + ("; prefetch of one block, blocks released after forward" if stage == 3 else "")
        + "; fused AdamW of PyTorch as client optimizer",
        module="deepspeed",
    )
    for stage, holds in _HOLDS.items()
)
