"""Loading: every rank gets its part of rank 0's parameters, one unit at a time; nobody ever holds a second model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from onenth.comm import Communicator
from onenth.errors import ShardError
from onenth.model_states.unit import Flat
from onenth.residual_states import buffers

Init = Callable[[nn.Module], object]


@dataclass
class Materializer:
    """Fills modules that were built on the meta device, on rank 0; the other ranks receive what it made.

    init: fills one module's own parameters and buffers in place; None: the module's `reset_parameters`.
    made: the tensors that were on meta; on other ranks than 0 they hold no values of their own.
    """

    comm: Communicator
    init: Init | None
    made: set[torch.Tensor] = field(default_factory=set)

    @property
    def unknown(self) -> set[torch.Tensor]:
        """Tensors that this rank has no values of."""
        return self.made if self.comm.rank else set()

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
                become(parameter, torch.empty(parameter.shape, dtype=parameter.dtype, device=device))
                self.made.add(parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = made = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
                self.made.add(made)
        if self.comm.rank == 0 and not self.comm.simulated:
            if self.init is not None:
                self.init(module)
            else:
                module.reset_parameters()  # type: ignore[operator]


def become(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Let a meta parameter hold `value`, as the same Python object: optimizers and modules refer to it."""
    trainable = parameter.requires_grad
    if isinstance(parameter, FakeTensor):  # a dry run refers weakly to all its tensors, which swap_tensors refuses
        parameter.__dict__, value.__dict__ = value.__dict__, parameter.__dict__
        torch._C._swap_tensor_impl(parameter, value)
        parameter._is_param = True
        parameter.requires_grad_(trainable)
        return
    # A fake value is marked as a parameter: made by nn.Parameter, it could not be swapped.
    other = value if isinstance(value, FakeTensor) else nn.Parameter(value)
    other._is_param = True
    other.requires_grad_(trainable)
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

    values: None for a parameter that this rank has no values of. One flat buffer in the widest dtype that is kept
    exists meanwhile.
    """
    wide = flat.kind.dtype
    if flat.optimizer_states is not None and flat.optimizer_states.master is not None:
        wide = flat.optimizer_states.master.dtype
    whole = torch.zeros(flat.parameters.partition.flat_numel, dtype=wide, device=comm.device)
    views = flat.parameters.slices(whole)
    for view, value in zip(views, values, strict=True):
        if value is not None:
            view.copy_(value)
    own = whole.clone() if comm.size > 1 and None not in values and not comm.simulated else None
    comm.broadcast(whole, name)
    flat.store(whole)
    return own is not None and not buffers.equal(own, whole)


def place(flat: Flat) -> None:
    """Let the modules' parameters be what the stage keeps of them at rest."""
    if flat.parameters.partitioned:
        flat.parameters.release()
    else:
        flat.parameters.expose()
