"""Gradients: collected per unit, exchanged between ranks in the gradients' dtype, summed in rank order, kept by shard.

Tensors (N ranks, L elements a shard; g the gradients' dtype, s the dtype of sums):
- local: (N·L,) g, this rank's whole gradients. Where gradients are not partitioned (stages 0, 1) it lives as long as
  the model; otherwise it is taken from scratch at a unit's first gradient and given back when its exchange is summed.
- received: (N·L,) or ((N-1)·L,) g, what other ranks sent; from scratch, from the exchange's start until it is summed.
- shard: (L,) g, the sum after one backward. At stages 0 and 1 a view of local (at stage 0 all of it, (N·L,));
  at stages 2 and 3 a tensor of its own, freed by `zero`.
- sums: (L,) s, or (N·L,) at stage 0: from the second backward before a step on, until `zero`.
- scratch: (at most CHUNK,) s, while one exchange is summed.

Each backward's sum is formed in s in rank order, reduced, and rounded to g: what stage 0 sends on. Several backwards
add up in s. So every stage holds the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onenth.comm import Communicator, Label, Transfer
from onenth.config import Precision
from onenth.costs import SUM_CHUNK
from onenth.ledger import Ledger
from onenth.model_states.parameters import Parameters
from onenth.model_states.scratch import Scratch
from onenth.states import ModelState, ResidualState

CHUNK = 2**24  # elements summed at a time on an accelerator; on a CPU, SUM_CHUNK, which its cache holds


@dataclass(frozen=True)
class Free:
    """The scratch that all flat buffers of a model take turns with."""

    local: Scratch
    received: Scratch

    def clear(self) -> None:
        """Give the bytes that nobody uses back."""
        self.local.clear()
        self.received.clear()


class Gradients:
    """The gradients of one flat buffer on this rank.

    arrived: by parameter, whether this rank has a gradient of it that was not exchanged yet.
    seen: by parameter, whether this rank had any gradient of it since `zero`.
    is_open: whether local holds gradients that were not exchanged yet.
    backwards: exchanged backwards that the shard (or sums) holds.
    squared_norm: () fp64, of this rank's segment of what the shard (or sums) holds.
    """

    def __init__(
        self,
        parameters: Parameters,
        precision: Precision,
        comm: Communicator,
        ledger: Ledger,
        *,
        partitioned: bool,
        whole: bool,
        mean: bool,
        free: Free,
    ) -> None:
        self.parameters, self.precision, self.comm, self.ledger = parameters, precision, comm, ledger
        self.partitioned, self.whole = partitioned, whole
        self.scale = 1.0 / comm.size if mean else 1.0
        is_kept = parameters.full.dtype != precision.parameters  # parameters kept in fp32 send fp32 gradients
        self.dtype = parameters.full.dtype if is_kept else precision.gradients
        self.free = free
        self._local: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []
        self.gaps: list[torch.Tensor] = []
        if not partitioned:
            self._hold(torch.empty(parameters.partition.flat_numel, dtype=self.dtype, device=comm.device))
            ledger.register(self.local, ModelState.GRADIENTS)
        self.chunk = SUM_CHUNK if comm.device.type == "cpu" and not comm.native else CHUNK
        self.sharing: Transfer | None = None
        self._forget()

    @property
    def local(self) -> torch.Tensor:
        """The whole local gradients, (N·L,); they must exist."""
        assert self._local is not None
        return self._local

    def _hold(self, local: torch.Tensor) -> None:
        self._local = local
        self.views, self.gaps = self.parameters.slices(local), self._gaps(local)

    def _drop(self) -> None:
        """Give the local buffer back, where it is scratch."""
        if self.partitioned and self._local is not None:
            self.free.local.give(self._local)
            self._local, self.views, self.gaps = None, [], []

    def _forget(self) -> None:
        count = len(self.parameters.parameters)
        self.arrived, self.seen = [False] * count, [False] * count
        self.is_open = False
        self.backwards = 0
        self.shard: torch.Tensor | None = None
        self.sums: torch.Tensor | None = None
        self.received: torch.Tensor | None = None
        self.extremes: torch.Tensor | None = None
        self.squared_norm = torch.zeros((), dtype=torch.float64, device=self.comm.device)

    def _gaps(self, local: torch.Tensor) -> list[torch.Tensor]:
        """The padding behind parameters: no gradient ever arrives there, so it is zeroed before an exchange."""
        partition = self.parameters.partition
        ends = [start + numel for start, numel in zip(partition.offsets, partition.numels, strict=True)]
        starts = [*partition.offsets[1:], partition.flat_numel]
        return [local[end:start] for end, start in zip(ends, starts, strict=True) if start > end]

    @torch.no_grad()
    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Take parameter `index`'s gradient (its shape, any dtype) into the local buffer."""
        self.open()
        if self.arrived[index]:
            self.views[index].add_(gradient)
        else:
            self.views[index].copy_(gradient)
            self.arrived[index] = self.seen[index] = True

    def open(self) -> None:
        """Make the local buffer ready to be filled."""
        if self.is_open:
            return
        self.settle()
        if self.partitioned:
            self._hold(self.free.local.take(self.parameters.partition.flat_numel, self.dtype))
        elif self.backwards == 1:
            self._promote()
        self.is_open = True

    def _promote(self) -> None:
        """Move the sum of the first backward to the dtype of sums, and out of the local buffer."""
        assert self.shard is not None
        self.sums = self.shard.to(self.sums_dtype, copy=not self.partitioned)
        self.ledger.register(self.sums, ModelState.GRADIENTS)
        self.shard = None

    @property
    def sums_dtype(self) -> torch.dtype:
        """What sums are held in: the precision's dtype, or a wider gradient's."""
        wide = self.dtype.itemsize > self.precision.sums.itemsize
        return self.dtype if wide else self.precision.sums

    @torch.no_grad()
    def exchange(self, label: Label) -> Transfer:
        """Start sending this rank's gradients to their owners; missing ones are zeros."""
        self.open()
        missing = [view for view, arrived in zip(self.views, self.arrived, strict=True) if not arrived]
        for hole in self.gaps + missing:
            hole.zero_()
        numel = self.comm.received_numel(self.parameters.partition.shard_numel)
        self.received = self.free.received.take(numel, self.dtype)
        return self.comm.exchange(self.local, self.received, label)

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum what the exchange brought into this rank's shard; the exchange must have been waited for."""
        length, rank = self.parameters.partition.shard_numel, self.comm.rank
        own = self.parameters.segment(self.local, rank)
        target = own
        if self.partitioned and self.backwards == 0:
            target = torch.empty_like(own)
            self.ledger.register(target, ModelState.GRADIENTS)
        elif self.partitioned and self.backwards == 1:
            self._promote()
        sums = self.sums if self.sums is None or not self.whole else self.parameters.segment(self.sums, rank)
        size = min(self.chunk, length)
        scratch = torch.empty(size, dtype=self.sums_dtype, device=self.comm.device)
        rounded = torch.empty(size, dtype=self.dtype, device=self.comm.device)
        self.ledger.register(scratch, ResidualState.SUMS)
        self.ledger.register(rounded, ResidualState.SUMS)
        self.squared_norm = torch.zeros((), dtype=torch.float64, device=self.comm.device)
        for start in range(0, length, size):
            part = slice(start, min(start + size, length))
            result = rounded[: part.stop - start].copy_(self._sum(part, scratch[: part.stop - start]))
            total = scratch[: part.stop - start].copy_(result)
            if sums is not None:
                total = sums[part].add_(total)
            squares = torch.dot(total, total)
            self.squared_norm += squares
            self._note_extremes(part, squares)
            target[part].copy_(result)
        self._close(target)

    def _sum(self, part: slice, total: torch.Tensor) -> torch.Tensor:
        """`part` of every rank's slice, added up in rank order into `total`, then reduced."""
        if self.comm.native:
            assert self.received is not None
            table = self.received.view(self.comm.size, -1)
            torch.sum(table[:, part], 0, dtype=total.dtype, out=total)
        else:
            total.copy_(self._slice(0)[part])
            for rank in range(1, self.comm.size):
                total.add_(self._slice(rank)[part])
        return total if self.scale == 1.0 else total.mul_(self.scale)

    def _slice(self, sender: int) -> torch.Tensor:
        """What `sender` contributes to this rank's segment, (L,)."""
        if sender == self.comm.rank and not self.comm.native:
            return self.parameters.segment(self.local, sender)
        assert self.received is not None
        return self.parameters.segment(self.received, self.comm.slot(sender))

    def _note_extremes(self, part: slice, squares: torch.Tensor) -> None:
        """Keep each sender's largest magnitude where something is not finite: it tells whose gradient it was.

        Looking at `squares` would make an accelerator wait, so there the extremes are always kept.
        """
        if self.comm.native:
            assert self.received is not None
            table = self.received.view(self.comm.size, -1)[:, part]
            found = torch.linalg.vector_norm(table, float("inf"), dim=1)
            self.extremes = found if self.extremes is None else torch.maximum(self.extremes, found)
        elif self.extremes is None and not bool(torch.isfinite(squares)):
            slices = [self._slice(rank)[part].float() for rank in range(self.comm.size)]
            self.extremes = torch.stack([torch.linalg.vector_norm(one, float("inf")) for one in slices])

    def _close(self, target: torch.Tensor) -> None:
        assert self.received is not None
        self.free.received.give(self.received)
        self.received = None
        self.backwards += 1
        self.arrived = [False] * len(self.arrived)
        self.is_open = False
        if self.backwards == 1:
            self.shard = self.local if self.whole else target
        self._drop()

    def share(self, label: Label) -> None:
        """Start sending this rank's sums to all (stage 0), so that every rank holds all of them."""
        assert self.whole
        self.sharing = self.comm.gather(self.local, label)

    @torch.no_grad()
    def settle(self) -> None:
        """Finish what `share` started."""
        if self.sharing is None:
            return
        self.sharing.wait()
        self.sharing = None
        if self.sums is not None:
            for rank in range(self.comm.size):
                if rank != self.comm.rank:
                    into = self.parameters.segment(self.sums, rank)
                    into.add_(self.parameters.segment(self.local, rank))

    def segment(self, rank: int) -> torch.Tensor:
        """The sum (L,) over `rank`'s segment; this rank's own, or any rank's where sums are whole (stage 0)."""
        held = self.sums if self.sums is not None else self.shard
        assert held is not None
        assert self.whole or rank == self.comm.rank
        return self.parameters.segment(held, rank) if self.whole else held

    def ensure_shard(self) -> None:
        """Hold a sum, of zeros if no backward was exchanged yet."""
        if self.backwards:
            return
        if self.partitioned:
            length = self.parameters.partition.shard_numel
            self.shard = torch.zeros(length, dtype=self.dtype, device=self.comm.device)
            self.ledger.register(self.shard, ModelState.GRADIENTS)
        else:
            self.shard = self.local if self.whole else self.parameters.segment(self.local, self.comm.rank)
            self.shard.zero_()
        self.backwards = 1

    def remeasure(self) -> None:
        """Take the squared norm anew, after the sum was changed by hand."""
        self.squared_norm.fill_(self.recount()[0])

    @torch.no_grad()
    def recount(self) -> tuple[float, int | None]:
        """This segment's squared norm in fp64, and the first parameter with an Inf or NaN in it, if any."""
        held = self.segment(self.comm.rank)
        squares, bad = 0.0, None
        for owned in self.parameters.partition.ranges(self.comm.rank):
            low = self.parameters.partition.offsets[owned.parameter] + owned.start
            low -= self.comm.rank * self.parameters.partition.shard_numel
            values = held[low : low + owned.stop - owned.start]
            squares += float(torch.linalg.vector_norm(values.double())) ** 2
            if bad is None and not bool(torch.isfinite(values).all()):
                bad = owned.parameter
        return squares, bad

    def sender_of_nonfinite(self) -> int | None:
        """The first rank that sent an Inf or NaN; None if all parts were finite and their sum overflowed."""
        if self.extremes is None:
            return None
        bad = (~torch.isfinite(self.extremes)).nonzero()
        return int(bad[0]) if bad.numel() else None

    def zero(self) -> None:
        """Forget all gradients; bytes that exist only while there are gradients are given back."""
        self.settle()
        self._drop()
        self._forget()
