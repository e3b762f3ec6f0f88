"""A unit: parameters that are gathered and released together, in one flat buffer for each kind of parameter."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from onenth.comm import Communicator, Label, Transfer
from onenth.config import Precision
from onenth.ledger import Ledger
from onenth.model_states.gradients import Free, Gradients
from onenth.model_states.optimizer_states import OptimizerStates
from onenth.model_states.parameters import Parameters
from onenth.partition import Partition
from onenth.states import OPTIMIZER_STATES, ModelState


@dataclass(frozen=True)
class Terms:
    """What every flat buffer of a model is built on.

    partitions: the model states that the stage partitions (`states.STAGES`).
    mean: whether gradients are averaged over ranks (otherwise summed).
    trains: whether there is an optimizer; without one, nothing is kept for gradients.
    free: the scratch that the units' gradients take turns with.
    """

    precision: Precision
    comm: Communicator
    ledger: Ledger
    partitions: frozenset[str]
    mean: bool
    trains: bool
    free: Free


@dataclass(frozen=True)
class Kind:
    """What the parameters of one flat buffer have in common."""

    dtype: torch.dtype
    trainable: bool
    updated: bool  # by the optimizer


class Flat:
    """One flat buffer of a unit: parameters, and what training keeps for them."""

    def __init__(self, kind: Kind, names: list[str], parameters: list[nn.Parameter], terms: Terms) -> None:
        self.kind, self.terms = kind, terms
        partition = Partition(tuple(parameter.numel() for parameter in parameters), terms.comm.size)
        precision = terms.precision
        updated = kind.trainable and kind.updated
        master = updated and precision.master is not None and precision.master != kind.dtype
        self.parameters = Parameters(
            names,
            parameters,
            partition,
            kind.dtype,
            terms.comm,
            terms.ledger,
            partitioned=ModelState.PARAMETERS in terms.partitions,
            keep_shard=not master,
        )
        self.gradients = self._gradients() if kind.trainable else None
        self.optimizer_states = (
            OptimizerStates(
                self.parameters,
                precision,
                terms.comm,
                terms.ledger,
                partitioned=OPTIMIZER_STATES in terms.partitions,
            )
            if updated
            else None
        )

    def _gradients(self) -> Gradients:
        terms = self.terms
        return Gradients(
            self.parameters,
            terms.precision,
            terms.comm,
            terms.ledger,
            partitioned=ModelState.GRADIENTS in terms.partitions,
            whole=OPTIMIZER_STATES not in terms.partitions,
            mean=terms.mean,
            free=terms.free,
        )

    def store(self, flat: torch.Tensor) -> None:
        """Take `flat` (N·L,), any dtype, as the parameters' values: this rank's part of every copy that it keeps."""
        if self.optimizer_states is not None:
            self.optimizer_states.store(flat)
        self.parameters.store(flat)


@dataclass(eq=False, repr=False)
class Unit:
    """Parameters gathered and released together.

    index: position in the unit list; the root is 0. name: for messages.
    modules: (name, module) whose forward needs the unit's parameters.
    """

    index: int
    name: str
    modules: list[tuple[str, nn.Module]]
    flats: list[Flat] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"unit {self.name}"

    @property
    def trainable(self) -> list[Flat]:
        """The flat buffers that gradients are exchanged for."""
        return [flat for flat in self.flats if flat.gradients is not None]

    def label(self, kind: str, flat: Flat) -> Label:
        """Names a transfer of one of the unit's flat buffers."""
        return Label(kind, self.index, self.flats.index(flat), f"unit {self.name}")

    def gather(self) -> list[Transfer]:
        """Start gathering the parameters. If they don't all fit in memory, nothing is under way."""
        try:
            for flat in self.flats:
                flat.parameters.reserve()
        except BaseException:
            self.discard()
            raise
        return [flat.parameters.gather(self.label("gather", flat)) for flat in self.flats]

    def expose(self) -> None:
        """Let the modules see the gathered parameters."""
        for flat in self.flats:
            flat.parameters.expose()

    def release(self) -> None:
        """Give the gathered parameters' bytes back."""
        for flat in self.flats:
            flat.parameters.release()

    def discard(self) -> None:
        """Give the bytes of a gather back that nothing has used."""
        for flat in self.flats:
            flat.parameters.discard()

    def exchange(self) -> list[Transfer]:
        """Start exchanging the gradients."""
        return [
            flat.gradients.exchange(self.label("exchange", flat)) for flat in self.flats if flat.gradients is not None
        ]

    def reduce(self) -> None:
        """Sum exchanged gradients; where every rank keeps all sums (stage 0), start sharing them."""
        for flat in self.flats:
            if flat.gradients is not None:
                flat.gradients.reduce()
                if flat.gradients.whole:
                    flat.gradients.share(self.label("sums", flat))

    @property
    def has_unexchanged(self) -> bool:
        """Whether this rank holds gradients that were not exchanged."""
        return any(flat.gradients is not None and flat.gradients.is_open for flat in self.flats)
