"""Tied parameters, wherever they are: owned once, and their gradients added up once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.reports.harness import WIDTH, Block, Job, Stack, assert_same_training, batch

VOCABULARY = 13  # divisible by no number of ranks here


class Language(Stack):
    """Tokens in, logits out; embedding and head are not tied yet."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)


class FunctionalHead(Language):
    """The embedding's weight is read outside its own forward, by the root."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.run_blocks(self.embed(tokens)), self.embed.weight)


class RootParameter(Stack):
    """A parameter of the root that is a block's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = self.blocks[1].down.bias

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


def tied_head() -> nn.Module:
    model = Language()
    model.head.weight = model.embed.weight
    return model


def functional_head() -> nn.Module:
    return FunctionalHead()


def tied_blocks() -> nn.Module:
    model = Stack()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


def tied_within_a_block() -> nn.Module:
    model = Stack()
    for block in model.blocks:
        block.down.bias = nn.Parameter(torch.zeros(WIDTH))
        block.gate = nn.Linear(WIDTH, WIDTH)
        block.gate.bias = block.down.bias
        block.register_forward_hook(gate)
    return model


def gate(block: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return output * torch.sigmoid(block.gate(inputs[0]))


def root_parameter() -> nn.Module:
    return RootParameter()


def one_module_in_two_places() -> nn.Module:
    model = Stack()
    model.blocks[2] = model.blocks[0]
    return model


def tied_by_storage() -> nn.Module:
    model = Language()
    model.head.weight = nn.Parameter(model.embed.weight.data)
    return model


def language_loss(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    tokens = batch(step, rank, 2, 6).mul(100).long().abs() % VOCABULARY
    logits = model(tokens[:, :-1])
    yield F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_embedding_and_head_with_an_uneven_vocabulary(pool, ranks):
    """The usual tie, at a vocabulary that no number of ranks divides; one gradient arrives per use."""
    assert_same_training(pool, Job(tied_head, language_loss), ranks=[ranks])


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_head_that_reads_the_embedding_weight(pool, activations):
    """The embedding's weight is used again after its forward, and its gradient comes first from there."""
    assert_same_training(pool, Job(functional_head, language_loss), activations=activations)


@pytest.mark.parametrize("build", [tied_blocks, tied_within_a_block, root_parameter])
def test_ties_between_units(pool, build):
    """A parameter of two blocks, of two modules in a block, and of the root and a block."""
    assert_same_training(pool, Job(build))


def test_one_module_in_two_places(pool):
    """The same block twice in a list: one unit, called twice."""
    assert_same_training(pool, Job(one_module_in_two_places))


def test_two_parameters_on_one_storage(pool):
    """Two `Parameter` objects over the same memory stay tied (plain SGD adds up both of their updates)."""
    assert_same_training(pool, Job(tied_by_storage, language_loss, plain_sgd))


def test_ties_across_block_and_head_at_other_unit_sizes(pool):
    """The same tie with every linear layer as its own unit."""
    assert_same_training(pool, Job(tied_blocks), units=nn.Linear)
    assert_same_training(pool, Job(tied_blocks), units=Block)
