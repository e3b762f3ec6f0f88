"""What every system offers: its settings in words, and one function that builds its training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, cast

from torch import Tensor, nn

from benchmarks.jobs import Job

#: Trains on (batch, sequence) token ids once, update included, and returns this rank's loss.
Step: TypeAlias = "Callable[[Tensor], Tensor]"


@dataclass(frozen=True, kw_only=True)
class System:
    """One way to train a job.

    build: makes the training step; called on each rank, after the gloo process group is there.
    holds: the dtypes of what it keeps from one step to the next, "/N" where ranks share it.
    setting: how it is set up.
    module: what must be importable for it to run.
    trains: False where the ranks don't form one model, so that its loss isn't comparable.
    """

    name: str
    label: str
    build: Callable[[Job], Step]
    holds: str
    setting: str
    module: str = "torch"
    trains: bool = True


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean cross-entropy of predicting each of the (batch, sequence) tokens from those before it."""
    return cast(Tensor, model(input_ids=tokens, labels=tokens).loss)
