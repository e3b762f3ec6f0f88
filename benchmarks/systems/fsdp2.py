"""FSDP2: `fully_shard` on every block, the embedding, the norm with the head, and the root."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.jobs import ADAMW, Job
from benchmarks.systems.base import Step, System, loss_of


def build(job: Job) -> Step:
    """fp32 shards; gathers, computation and reduce-scatter in bf16; head and root stay after forward."""
    model = job.model(torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model.model.embed_tokens, mesh=mesh, mp_policy=policy)
    fully_shard([model.model.norm, model.lm_head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


SYSTEMS = (
    System(
        name="fsdp2",
        label="FSDP2",
        build=build,
        holds="fp32 parameters, gradients and moments /N",
        setting="units: blocks, embedding, norm with head, root; param_dtype, reduce_dtype bf16; fused AdamW",
    ),
)
