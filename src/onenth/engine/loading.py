"""Loading: every rank gets its part of rank 0's parameters, one unit at a time; nobody ever holds a second model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from onenth.comm import Communicator
from onenth.errors import ShardError
from onenth.model_states.unit import Flat, Unit
from onenth.residual_states import buffers

Init = Callable[[nn.Module], object]


@dataclass
class Materializer:
    """Fills modules that were built on the meta device, on rank 0; the other ranks receive what it made.

    init: fills one module's own parameters and buffers in place; None: the module's `reset_parameters`.
    """

    comm: Communicator
    init: Init | None

    def check(self, model: nn.Module) -> list[str]:
        """Modules with meta tensors that nothing would fill."""
        if self.init is not None or self.comm.simulated:
            return []
        return [
            name or "the model itself"
            for name, module in model.named_modules()
            if _meta(module) and not callable(getattr(module, "reset_parameters", None))
        ]

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Give the module's own meta parameters and buffers memory; on rank 0, values too."""
        if not _meta(module):
            return
        device = self.comm.device
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta:
                become(parameter, torch.empty_like(parameter, device=device))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
        if self.comm.rank == 0 and not self.comm.simulated:
            if self.init is not None:
                self.init(module)
            else:
                module.reset_parameters()  # type: ignore[operator]


def become(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Let a meta parameter hold `value`, as the same Python object: optimizers and modules refer to it."""
    other = nn.Parameter(value, requires_grad=parameter.requires_grad)
    try:
        torch.utils.swap_tensors(parameter, other)
    except RuntimeError as error:
        raise ShardError(
            f"a meta parameter cannot be given memory in place ({error}): build the model on the meta device without "
            "running it, or build it on rank 0's cpu"
        ) from error


def _meta(module: nn.Module) -> bool:
    own = [*module._parameters.values(), *module._buffers.values()]
    return any(tensor is not None and tensor.is_meta for tensor in own)


@torch.no_grad()
def distribute(flat: Flat, values: list[torch.Tensor | None], comm: Communicator, name: str) -> bool:
    """Give every rank its part of rank 0's `values` (by parameter, in its shape); returns whether this rank's differed.

    One flat buffer in the widest dtype that is kept exists meanwhile.
    """
    wide = flat.kind.dtype
    if flat.optimizer_states is not None and flat.optimizer_states.master is not None:
        wide = flat.optimizer_states.master.dtype
    whole = torch.zeros(flat.parameters.partition.flat_numel, dtype=wide, device=comm.device)
    views = flat.parameters.slices(whole)
    given = [value is not None and not value.is_meta for value in values]
    for view, value in zip(views, values, strict=True):
        if value is not None and not value.is_meta:
            view.copy_(value)
    own = whole.clone() if comm.size > 1 and all(given) and not comm.simulated else None
    comm.broadcast(whole, name)
    flat.store(whole)
    return own is not None and not buffers.equal(own, whole)


def place(flat: Flat) -> None:
    """Let the modules' parameters be what the stage keeps of them at rest."""
    for parameter in flat.parameters.parameters:
        if parameter.is_meta:
            become(parameter, flat.parameters.views[flat.parameters.parameters.index(parameter)])
    if flat.parameters.partitioned:
        flat.parameters.release()
    else:
        flat.parameters.expose()


def current_values(unit: Unit) -> list[list[torch.Tensor | None]]:
    """What the unit's parameters hold before they are sharded, by flat buffer."""
    return [[parameter.data for parameter in flat.parameters.parameters] for flat in unit.flats]
