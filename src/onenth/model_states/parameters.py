"""Parameters: a unit's flat buffer, gathered before use and released after it.

Tensors (N ranks, L elements a shard, P parameters):
- full: (N·L,), the parameters' dtype. Parameters are views in it. Where parameters are not partitioned it is the state
  itself and lives as long as the model. Where they are (stage 3), its *storage* has zero bytes while released and is
  refilled in place, so that views which autograd saved see the data again.
- shard: (L,), the parameters' dtype; stage 3 without a master copy only. Otherwise the gather casts from the master.
- absent: (P,), NaN. While released, `parameter.data` is one element of it, expanded to the parameter's shape: shape,
  dtype, device and numel stay true, results computed from it are NaN, and most writes into it raise.
"""

from __future__ import annotations

import torch
from torch import nn

from onenth.comm import Communicator, Label, Transfer
from onenth.errors import ShardError
from onenth.ledger import Ledger
from onenth.partition import Partition
from onenth.states import ModelState, ResidualState


class Parameters:
    """The parameters of one flat buffer on this rank.

    parameters: the module's own `nn.Parameter` objects, in flat order.
    source: (L,) what a gather casts this rank's segment from: the shard, or the master (set by who owns it);
        None where nothing is partitioned.
    """

    def __init__(
        self,
        names: list[str],
        parameters: list[nn.Parameter],
        partition: Partition,
        dtype: torch.dtype,
        comm: Communicator,
        ledger: Ledger,
        *,
        partitioned: bool,
        keep_shard: bool,
    ) -> None:
        self.names, self.parameters, self.partition = names, parameters, partition
        self.comm, self.ledger, self.partitioned = comm, ledger, partitioned
        self.shapes = [parameter.shape for parameter in parameters]
        self.full = torch.empty(partition.flat_numel, dtype=dtype, device=comm.device)
        ledger.register(self.full, ResidualState.GATHERED if partitioned else ModelState.PARAMETERS)
        self.views = self.slices(self.full)
        self.absent = torch.full((len(parameters),), float("nan"), dtype=dtype, device=comm.device)
        ledger.register(self.absent, ResidualState.OTHER)
        self.placeholders = [self.absent[i].expand(shape) for i, shape in enumerate(self.shapes)]
        self.shard: torch.Tensor | None = None
        if partitioned and keep_shard:
            self.shard = torch.empty(partition.shard_numel, dtype=dtype, device=comm.device)
            ledger.register(self.shard, ModelState.PARAMETERS)
        self.source = self.shard
        self.is_whole = True

    def slices(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of a flat tensor (N·L,), in the parameter's shape."""
        offsets = zip(self.partition.offsets, self.partition.numels, self.shapes, strict=True)
        return [flat.narrow(0, start, numel).view(shape) for start, numel, shape in offsets]

    def segment(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """`rank`'s segment (L,) of a flat tensor (N·L,)."""
        length = self.partition.shard_numel
        return flat.narrow(0, rank * length, length)

    @property
    def own(self) -> torch.Tensor:
        """This rank's segment (L,) of the full buffer."""
        return self.segment(self.full, self.comm.rank)

    @torch.no_grad()
    def reserve(self) -> None:
        """Take the full buffer's bytes for a gather. Raises ShardError if a placeholder was written to."""
        assert self.partitioned
        assert not self.is_whole
        self._check_placeholders()
        self.full.untyped_storage().resize_(self.full.numel() * self.full.itemsize)

    def gather(self, label: Label) -> Transfer:
        """Start filling the full buffer, whose bytes are there, from every rank's shard."""
        assert self.source is not None
        self.own.copy_(self.source)
        return self.comm.gather(self.full, label)

    def expose(self) -> None:
        """Let the modules see the gathered values."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view
        self.is_whole = True

    @torch.no_grad()
    def adopt_replaced(self) -> None:
        """Take the values of parameters whose `data` was replaced while they were whole (`p.data = tensor`)."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.data)
                parameter.data = view

    def release(self) -> None:
        """Give the full buffer's bytes back; the parameters show NaN until the next gather."""
        for parameter, placeholder in zip(self.parameters, self.placeholders, strict=True):
            parameter.data = placeholder
        self.discard()

    def discard(self) -> None:
        """Give the bytes of a gathered buffer back that no module has seen."""
        if not self.full.untyped_storage().resizable():  # somebody made a NumPy array of it: leave them the memory
            self.full = torch.empty_like(self.full)
            self.ledger.register(self.full, ResidualState.GATHERED)
            self.views = self.slices(self.full)
        self.full.untyped_storage().resize_(0)
        self.is_whole = False

    @torch.no_grad()
    def store(self, flat: torch.Tensor) -> None:
        """Take this rank's part of `flat` (N·L,), any dtype, as the parameters' values."""
        if self.shard is not None:
            self.shard.copy_(self.segment(flat, self.comm.rank))
        if self.is_whole:
            self.full.copy_(flat)

    def _check_placeholders(self) -> None:
        if self.comm.simulated:
            return
        written = [
            name
            for name, parameter, placeholder in zip(self.names, self.parameters, self.placeholders, strict=True)
            if parameter.data_ptr() != placeholder.data_ptr() or parameter.dtype != placeholder.dtype
        ]
        intact = torch.isnan(self.absent).all()
        if self.absent.device.type != "cpu":  # looking at it would make an accelerator wait
            torch._assert_async(intact, "a released parameter was written to: use onenth.gathered(..., modify=True)")
        elif not written and not bool(intact):
            written = [name for name, lost in zip(self.names, ~torch.isnan(self.absent), strict=True) if lost]
        if not written:
            return
        raise ShardError(
            f"written to while released, so the values are lost: {', '.join(written)}. "
            "Write inside `with onenth.gathered(module, modify=True):`"
        )
