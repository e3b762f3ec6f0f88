"""Module buffers: moved and cast as the precision says, alike on every rank, and the errors that their dtype causes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import TracebackType

import torch
from torch import nn

from onenth.comm import Communicator
from onenth.config import Precision
from onenth.errors import ShardError
from onenth.ledger import Ledger
from onenth.states import ResidualState


@torch.no_grad()
def place(
    model: nn.Module, precision: Precision, comm: Communicator, ledger: Ledger, unknown: set[torch.Tensor]
) -> bool:
    """Move every buffer to the device, cast it, and give every rank rank 0's; returns whether this rank's differed.

    A buffer that several modules share stays shared. unknown: buffers that this rank has no values of.
    """
    placed: dict[torch.Tensor, torch.Tensor] = {}
    differed = False
    for name, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer not in placed:
                placed[buffer] = _cast(buffer, precision, comm.device)
                own = placed[buffer].clone()
                comm.broadcast(placed[buffer], f"buffer {name}.{key}".replace(" .", " "))
                differed |= buffer not in unknown and not comm.simulated and not equal(own, placed[buffer])
                ledger.register(placed[buffer], ResidualState.BUFFERS)
            module._buffers[key] = placed[buffer]
    return differed


def _cast(buffer: torch.Tensor, precision: Precision, device: torch.device) -> torch.Tensor:
    cast = precision.buffers if precision.buffers is not None and buffer.is_floating_point() else buffer.dtype
    if buffer.is_meta:
        return torch.empty_like(buffer, device=device, dtype=cast)
    return buffer.detach().to(device=device, dtype=cast).contiguous()


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, NaN included."""
    return bool(torch.all((one == other) | ((one != one) & (other != other))))


def explain_dtype_error(model: nn.Module, error: RuntimeError) -> None:
    """If `error` is a clash of dtypes inside the model, raise one that names the module and the way out."""
    if isinstance(error, ShardError) or not re.search(r"dtype|scalar type|BFloat16|Half", str(error)):
        return
    module = _innermost_module(error.__traceback__)
    if module is None:
        return
    name = next((name for name, one in model.named_modules() if one is module), "") or "the model itself"
    tables: list[tuple[str, Mapping[str, torch.Tensor | None]]] = [
        ("parameter", module._parameters),
        ("buffer", module._buffers),
    ]
    held = [
        f"{what} {key} is {str(value.dtype).removeprefix('torch.')}"
        for what, table in tables
        for key, value in table.items()
        if value is not None and value.is_floating_point()
    ]
    kind = type(module).__name__
    raise ShardError(
        f"module {name} ({kind}): {str(error).splitlines()[0]}. {'; '.join(held) or 'it holds no tensors of its own'}. "
        "Cast floating-point buffers with Precision(buffers=...), keep the module in fp32 with "
        f"Precision(keep_fp32=({kind},)), or cast the tensor in the module's forward"
    ) from error


def _innermost_module(traceback: TracebackType | None) -> nn.Module | None:
    found = None
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        found = owner if isinstance(owner, nn.Module) else found
        traceback = traceback.tb_next
    return found
