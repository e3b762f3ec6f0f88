"""What the ranks of a run tell each other beside the training itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def gather_numbers(numbers: list[float], device: torch.device) -> list[list[float]]:
    """Every rank's numbers, by rank; all ranks give equally many."""
    own = torch.tensor(numbers, dtype=torch.float64, device=device)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return [row.tolist() for row in rows]


def gather_objects(value: Any) -> list[Any]:
    """Every rank's picklable value, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def collect(value: Any) -> list[Any]:
    """Every rank's picklable value, by rank, on rank 0; nothing on the others."""
    rank = dist.get_rank()
    values: list[Any] = [None] * (dist.get_world_size() if rank == 0 else 0)
    dist.gather_object(value, values if rank == 0 else None, dst=0)
    return values


def leave() -> None:
    """Close the group that `onenth.init` made."""
    dist.destroy_process_group()
