"""Activations of a Transformer block against Korthikanti et al. (2022), arXiv 2205.05198, equations 1 and 2.

A block in fp16 without flash attention keeps s b h (34 + 5 a s / h) bytes for backward, dropout masks at one byte an
element; with full recomputation it keeps its input, 2 s b h.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import onenth
from onenth.residual_states.activations import recomputed

SEQUENCE, BATCH, HIDDEN, HEADS, LAYERS = 64, 2, 128, 4, 3


class Dropout(nn.Module):
    """Dropout that keeps its mask as booleans, as CUDA's does; the CPU's default keeps it in the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, 0.1, True)[0]


class Block(nn.Module):
    """A pre-norm block as the paper draws it (figure 2): attention with separate scores, GELU, three dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.gelu = nn.GELU()
        self.score_dropout, self.attention_dropout, self.mlp_dropout = Dropout(), Dropout(), Dropout()

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(SEQUENCE, BATCH * HEADS, HIDDEN // HEADS).transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        query, key, value = (self._heads(project(normed)) for project in (self.query, self.key, self.value))
        scores = torch.bmm(query, key.transpose(1, 2)) / math.sqrt(HIDDEN // HEADS)
        weights = self.score_dropout(scores.softmax(-1))
        mixed = torch.bmm(weights, value).transpose(0, 1).reshape(SEQUENCE, BATCH, HIDDEN)
        x = x + self.attention_dropout(self.out(mixed))
        return x + self.mlp_dropout(self.down(self.gelu(self.up(self.mlp_norm(x)))))


def kept_by_layer(model: nn.Module) -> list[int]:
    """Activation bytes of each layer when the forward ends."""
    batch = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=torch.float16).requires_grad_()
    with onenth.record(model) as anatomy:
        output = model(batch * 1)  # an activation like every other layer's input
    timeline = anatomy.timeline
    last = max(at for at, event in enumerate(timeline) if event.phase.startswith("forward"))
    held = [timeline.storages[n] for n, owner in timeline.alive(last).items() if owner == "activations"]
    del output
    return [sum(s.bytes for s in held if s.module.split(".")[0] == str(layer)) for layer in range(LAYERS)]


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(LAYERS)]).half()


def test_a_block_keeps_what_the_equation_says() -> None:
    """To 2 %; and to the byte once the statistics of the two norms are added, which the paper leaves out."""
    tokens = SEQUENCE * BATCH
    equation = tokens * HIDDEN * (34 + 5 * HEADS * SEQUENCE / HIDDEN)
    statistics = 2 * 2 * tokens * 2  # mean and reciprocal deviation of each token, fp16 on a CPU, in two norms
    for kept in kept_by_layer(stack()):
        assert kept == pytest.approx(equation, rel=0.02)
        assert kept == equation + statistics


def test_a_recomputed_block_keeps_its_input() -> None:
    """2 s b h bytes, and the state of the random numbers that dropout will draw again."""
    model = stack()
    for block in model:
        block.forward = recomputed(block.forward)
    random_state = torch.get_rng_state().nbytes
    for kept in kept_by_layer(model):
        assert kept == 2 * SEQUENCE * BATCH * HIDDEN + random_state
