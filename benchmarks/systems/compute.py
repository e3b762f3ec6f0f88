"""The limit: forward, backward and 1/N of the update on a bf16 model, without any communication."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.jobs import ADAMW, Job
from benchmarks.systems.base import Step, System, loss_of


def _own_slice(tensor: Tensor | None) -> Tensor:
    """This rank's N-th of a tensor, as a flat view."""
    assert tensor is not None, "every parameter has a gradient"
    return tensor.view(-1).tensor_split(dist.get_world_size())[dist.get_rank()]


def build(job: Job) -> Step:
    """Each rank updates fp32 master copies of its N-th of every parameter and writes them back in bf16."""
    model = job.model(torch.bfloat16)
    parameters = list(model.parameters())
    own = [_own_slice(parameter.detach()) for parameter in parameters]
    masters = [piece.float() for piece in own]
    optimizer = torch.optim.AdamW(masters, **ADAMW)

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = _own_slice(parameter.grad).float()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        torch._foreach_copy_(own, masters)
        return loss.detach()

    return step


SYSTEMS = (
    System(
        name="compute",
        label="compute alone",
        build=build,
        holds="bf16 parameters and gradients; fp32 master and moments /N",
        setting="forward, backward and this rank's 1/N of the update; nothing is sent: the limit",
        trains=False,
    ),
)
