"""Optimizer states: the master copy and the moments, and the update of one rank's N-th of the parameters.

The user's own optimizer class updates *pieces*: for each parameter, the range of it that lies in a segment of the flat
buffer, as an ordinary 1-D tensor. Every stage cuts the same N segments and updates them one by one; a stage only
decides which of them this rank holds (stage 0: all, otherwise its own). So all stages compute the same bits.

Tensors (N ranks, L elements a shard):
- master: (L,) or (N·L,) at stage 0, the master's dtype; none where the parameters themselves are updated. Lives as
  long as the optimizer. Pieces are views in it (or in the parameters' shard or full buffer).
- moments: the optimizer's own, per piece, (elements of the piece,) and scalars; allocated at the first step.
- step gradient: (L,) in the pieces' dtype, from the sum of one segment; lives while that segment is updated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onenth.comm import Communicator
from onenth.config import Precision
from onenth.ledger import Ledger
from onenth.model_states.gradients import Gradients
from onenth.model_states.parameters import Parameters
from onenth.partition import Range
from onenth.states import ModelState, ResidualState

Groups = list[dict[str, Any]]


@dataclass
class Piece:
    """One parameter's range in one segment. offset: where it starts in its segment. tensor: (stop - start,)."""

    range: Range
    offset: int
    tensor: nn.Parameter


class OptimizerStates:
    """What the optimizer holds for one flat buffer on this rank.

    segments: the ranks whose segments this rank updates.
    pieces: by segment, in flat order.
    """

    def __init__(
        self,
        parameters: Parameters,
        precision: Precision,
        comm: Communicator,
        ledger: Ledger,
        *,
        partitioned: bool,
    ) -> None:
        self.parameters, self.precision, self.comm, self.ledger = parameters, precision, comm, ledger
        self.segments = [comm.rank] if partitioned else list(range(comm.size))
        self.master: torch.Tensor | None = None
        if precision.master is not None and parameters.full.dtype != precision.master:
            numel = parameters.partition.shard_numel * len(self.segments)
            self.master = torch.empty(numel, dtype=precision.master, device=comm.device)
            ledger.register(self.master, ModelState.MASTER)
            if parameters.partitioned:
                parameters.source = self.master
        self.pieces = {rank: self._cut(rank) for rank in self.segments}

    def segment(self, rank: int) -> torch.Tensor:
        """What is updated of `rank`'s segment, (L,): the master, or the parameters where there is none."""
        if self.master is not None:
            length = self.parameters.partition.shard_numel
            return self.master.narrow(0, self.segments.index(rank) * length, length)
        shard = self.parameters.shard
        return shard if shard is not None else self.parameters.segment(self.parameters.full, rank)

    def _cut(self, rank: int) -> list[Piece]:
        partition, held = self.parameters.partition, self.segment(rank)
        pieces = []
        for owned in partition.ranges(rank):
            offset = partition.offsets[owned.parameter] + owned.start - rank * partition.shard_numel
            part = held.narrow(0, offset, owned.stop - owned.start)
            pieces.append(Piece(owned, offset, nn.Parameter(part)))
        return pieces

    @torch.no_grad()
    def store(self, flat: torch.Tensor) -> None:
        """Take this rank's part of `flat` (N·L,), any dtype, as the master's values."""
        if self.master is not None:
            for rank in self.segments:
                self.segment(rank).copy_(self.parameters.segment(flat, rank))

    @torch.no_grad()
    def write_back(self) -> None:
        """Cast the updated segments into the parameters' full buffer, where that is kept (stages 0 to 2)."""
        if self.master is not None and not self.parameters.partitioned:
            for rank in self.segments:
                self.parameters.segment(self.parameters.full, rank).copy_(self.segment(rank))


class Updater:
    """The user's optimizer, run over pieces. One for a ShardedOptimizer.

    optimizer: the user's; its class and attributes are used, its own state and groups are not touched.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, precision: Precision, ledger: Ledger) -> None:
        self.kind = type(optimizer)
        self.precision, self.ledger = precision, ledger
        self.inner = bare_copy(optimizer)
        self._registered: set[torch.Tensor] = set()

    def update(
        self,
        states: OptimizerStates,
        gradients: Gradients,
        groups: Groups,
        group_of: Sequence[int | None],
        has_gradient: Sequence[bool],
        coefficient: float,
    ) -> None:
        """One step over all segments that this rank holds of one flat buffer.

        groups: the user's parameter groups, read for hyperparameters; what a step writes into them is written back
            by `finish`. group_of, has_gradient: by parameter; pieces without a gradient are left alone, moments too.
        coefficient: what gradients are multiplied with (clipping and loss scale).
        """
        for rank, pieces in states.pieces.items():
            chosen = [p for p in pieces if has_gradient[p.range.parameter] and group_of[p.range.parameter] is not None]
            if chosen:
                self._lend_gradients(chosen, states.segment(rank), gradients.segment(rank), coefficient)
                self._step(groups, group_of, chosen)
                for piece in chosen:
                    piece.tensor.grad = None

    def _lend_gradients(
        self, chosen: list[Piece], updated: torch.Tensor, summed: torch.Tensor, coefficient: float
    ) -> None:
        """Give the pieces of one segment their gradients, as views of one tensor that dies with the last of them."""
        gradient = torch.empty_like(updated)
        self.ledger.register(gradient, ResidualState.STEP)
        gradient.copy_(summed)
        if coefficient != 1.0:
            gradient.mul_(coefficient)
        for piece in chosen:
            piece.tensor.grad = gradient.narrow(0, piece.offset, piece.tensor.numel())

    def _step(self, groups: Groups, group_of: Sequence[int | None], chosen: list[Piece]) -> None:
        members: list[list[nn.Parameter]] = [[] for _ in groups]
        for piece in chosen:
            index = group_of[piece.range.parameter]
            assert index is not None
            members[index].append(piece.tensor)
        tensors = [piece.tensor for piece in chosen]
        self.inner.param_groups = [
            fused({**group, "params": held}) for group, held in zip(groups, members, strict=True)
        ]
        self._widen(tensors)
        self.kind.step(self.inner)
        self._narrow(tensors)

    def _widen(self, tensors: list[nn.Parameter]) -> None:
        """Moments to the pieces' dtype, which the optimizer computes in; a copy only where they are stored narrower."""
        for tensor in tensors:
            for name, value in _moments(self.inner.state.get(tensor, {}), tensor):
                self.inner.state[tensor][name] = value.to(tensor.dtype)

    def _narrow(self, tensors: list[nn.Parameter]) -> None:
        """Moments back to the dtype that the contract stores them in; new ones are registered."""
        for tensor in tensors:
            state = self.inner.state.get(tensor, {})
            for name, value in _moments(state, tensor):
                state[name] = value.to(self.stored_dtype(tensor))
            if tensor not in self._registered or tensor.dtype != self.stored_dtype(tensor):
                self._registered.add(tensor)
                for name, value in state.items():
                    if isinstance(value, torch.Tensor):
                        self.ledger.register(value, name)

    def stored_dtype(self, piece: torch.Tensor) -> torch.dtype:
        """The dtype that the moments of `piece` are kept in: the contract's, or fp32 for parameters kept in fp32."""
        kept = self.precision.master is None and piece.dtype != self.precision.parameters
        return piece.dtype if kept else self.precision.moments

    def adopt(self, states: OptimizerStates, had: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Cut what the user's optimizer holds already, by parameter, for the pieces."""
        for pieces in states.pieces.values():
            for piece in pieces:
                whole = states.parameters.parameters[piece.range.parameter]
                if whole in had:
                    self.put(piece, {name: cut(value, whole.shape, piece) for name, value in had[whole].items()})

    def put(self, piece: Piece, state: Mapping[str, Any]) -> None:
        """Let the optimizer hold `state` (tensors of the piece's shape, and scalars) for a piece."""
        copied = {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        self._registered.discard(piece.tensor)
        if not copied:
            self.inner.state.pop(piece.tensor, None)
            return
        self.inner.state[piece.tensor] = copied
        self._narrow([piece.tensor])

    def finish(self, groups: Groups) -> None:
        """Write what the step changed in its copies of the groups (counters, say) into the user's groups."""
        if not self.inner.param_groups:  # a rank that holds no piece counts steps all the same
            self._step(groups, (), [])
        copies, self.inner.param_groups = self.inner.param_groups, []
        for group, copy in zip(groups, copies, strict=True):
            group.update({key: value for key, value in copy.items() if key not in ("params", "fused")})

    def forget(self, states: OptimizerStates) -> None:
        """Drop the moments of a flat buffer's pieces."""
        for pieces in states.pieces.values():
            for piece in pieces:
                self.inner.state.pop(piece.tensor, None)
                self._registered.discard(piece.tensor)


def bare_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same class and attributes, with no state, no groups and no hooks of its own."""
    copy = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.__dict__.pop("step", None)
    copy.state = defaultdict(dict)
    copy.param_groups = []
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        copy.__dict__[hooks] = type(optimizer.__dict__[hooks])()
    return copy


def fused(group: dict[str, Any]) -> dict[str, Any]:
    """The group, with the fused kernel chosen where the class offers one and the user chose nothing."""
    offered = "fused" in group and group["fused"] is None and not group.get("foreach")
    plain = not group.get("differentiable") and not group.get("capturable")
    # Adagrad's fused kernel exists on the CPU alone; `lr_decay` is what tells its groups from the others'.
    runs = all(t.is_floating_point() and (t.device.type == "cpu" or "lr_decay" not in group) for t in group["params"])
    return {**group, "fused": True} if offered and plain and runs else group


def cut(value: Any, shape: torch.Size, piece: Piece) -> Any:
    """The part of an optimizer's state that belongs to a piece: its range of what has the parameter's `shape`."""
    if not isinstance(value, torch.Tensor) or value.shape != shape or value.numel() == 0:
        return value
    part = value.detach().reshape(-1)[piece.range.start : piece.range.stop]
    return part.to(device=piece.tensor.device, dtype=piece.tensor.dtype)


def _moments(state: dict[str, Any], piece: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The states of a piece that have one element for each of its own."""
    return [
        (name, value)
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.shape == piece.shape and value.is_floating_point()
    ]
