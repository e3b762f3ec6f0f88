"""How well a model predicts held-out text, and how well single tokens' frequencies do: the loss to beat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from onenth.train.ranks import gather_numbers
from onenth.train.text import Text

_SEQUENCES = 64  # that an evaluation reads, spread evenly over the held-out text


def unigram_loss(text: Text, vocabulary: int) -> float:
    """Cross-entropy in nats a token of the held-out text under the training text's token frequencies.

    Counts start at one, so that a token seen only in the held-out text has a finite loss.
    """
    counts = torch.bincount(text.training, minlength=vocabulary).double() + 1
    log_shares = counts.log() - counts.sum().log()
    seen = torch.bincount(text.held_out, minlength=vocabulary).double()
    return float(-(seen * log_shares).sum() / seen.sum())


@dataclass(frozen=True)
class Evaluation:
    """The held-out text, shared among the ranks: each evaluates as many sequences, in step with the others.

    tokens: (tokens,) int32.
    """

    tokens: torch.Tensor
    sequence: int
    ranks: int
    rank: int
    micro_batch: int

    def windows(self) -> torch.Tensor:
        """This rank's sequences: (sequences, sequence) int64."""
        total = self.tokens.numel() // self.sequence
        each = max(1, min(_SEQUENCES, total) // self.ranks)
        places = [(each * self.rank + row) * total // (each * self.ranks) for row in range(each)]
        rows = [self.tokens[place * self.sequence :][: self.sequence] for place in places]
        return torch.stack(rows).long()

    def loss(self, model: nn.Module, device: torch.device) -> float:
        """Mean cross-entropy in nats a token over all ranks' sequences."""
        windows, total = self.windows(), 0.0
        with evaluating(model), torch.no_grad():
            for batch in torch.split(windows, self.micro_batch):
                total += float(causal_loss(model, batch.to(device))) * len(batch)
        sums = gather_numbers([total, float(len(windows))], device)
        return sum(row[0] for row in sums) / sum(row[1] for row in sums)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, and the mode that the model was in afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def causal_loss(model: Callable[..., object], tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each token given those before it; tokens: (sequences, sequence) int64."""
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss  # type: ignore[attr-defined]
    return loss
