"""Joining the other ranks: the process group and the device of this one, from what torchrun or Slurm left behind."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from onenth.errors import ShardError


@dataclass(frozen=True)
class World:
    """The ranks of one job as this rank sees them. `rank`, `size` and `local_rank` count processes."""

    rank: int
    size: int
    local_rank: int
    device: torch.device


def init(group: Any = None) -> World:
    """Join the ranks that torchrun or Slurm started (nccl on CUDA, gloo on CPU); with none of them, be the one rank.

    group: a process group that exists already; None: the default one, made if nobody has made it.
    Raises ShardError where WORLD_SIZE announces several ranks and the group holds one.
    """
    if not dist.is_initialized():
        _join()
    group = group if group is not None else dist.group.WORLD
    size = dist.get_world_size(group)
    announced = int(os.environ.get("WORLD_SIZE", "1"))
    if group is dist.group.WORLD and size == 1 and announced > 1:
        raise ShardError(
            f"WORLD_SIZE={announced}, but the process group holds one rank, so every rank would train alone: "
            "call onenth.init() before anything else makes a process group, or unset WORLD_SIZE"
        )
    return World(dist.get_rank(group), size, _local_rank(), local_device(group))


def local_device(group: Any = None) -> torch.device:
    """This rank's accelerator, or the CPU where there is none (or the group moves CPU tensors only)."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or dist.get_backend(group) in ("gloo", "fake"):
        return torch.device("cpu")
    return torch.device(accelerator.type, _local_rank() % torch.accelerator.device_count())


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


def _join() -> None:
    if "RANK" not in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        os.environ.update(_slurm())
    enough = torch.accelerator.is_available() and torch.accelerator.device_count() > _local_rank()
    accelerator = torch.accelerator.current_accelerator() if enough else None
    backend = "gloo" if accelerator is None else dist.get_default_backend_for_device(accelerator.type)
    if accelerator is not None:
        torch.accelerator.set_device_index(_local_rank())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)


def _slurm() -> dict[str, str]:
    """torchrun's variables from Slurm's."""
    nodes = os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_NODELIST", "localhost"))
    port = 20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000
    return {
        "RANK": os.environ["SLURM_PROCID"],
        "WORLD_SIZE": os.environ["SLURM_NTASKS"],
        "LOCAL_RANK": os.environ.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", first_node(nodes)),
        "MASTER_PORT": os.environ.get("MASTER_PORT", str(port)),
    }


def first_node(nodes: str) -> str:
    """The first host of a Slurm node list: "gpu[007-010,12],login" is "gpu007"."""
    match = re.match(r"([^,\[]+)(?:\[([^\],\-]+))?", nodes)
    assert match is not None, nodes
    return match[1] + (match[2] or "")
