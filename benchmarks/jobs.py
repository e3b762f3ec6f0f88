"""The jobs: one transformers Llama, its batch and its optimizer's settings, the same for every system."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

SEED = 0
VOCABULARY = 8192
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model and a batch of `batch` sequences of `sequence` tokens on each rank."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    batch: int
    sequence: int

    @property
    def config(self) -> LlamaConfig:
        """Llama with 64-wide heads, untied embedding and head, and PyTorch's fused attention."""
        return LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=self.hidden // 64,
            max_position_embeddings=self.sequence,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )

    @functools.cached_property
    def parameters(self) -> int:
        """Elements of the model's parameters, counted on the meta device."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in LlamaForCausalLM(self.config).parameters())

    @property
    def block_parameters(self) -> int:
        """Elements of one transformer block: four square projections, three of the MLP, two norms."""
        return 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden

    def model(self, dtype: torch.dtype) -> LlamaForCausalLM:
        """The model with the same weights for every system and rank, rounded to `dtype`."""
        torch.manual_seed(SEED)
        return LlamaForCausalLM(self.config).to(dtype).train()

    def tokens(self, rank: int) -> Tensor:
        """This rank's batch, (batch, sequence) int64. Every step trains on it again: the loss falls fast."""
        generator = torch.Generator().manual_seed(SEED + 1 + rank)
        return torch.randint(VOCABULARY, (self.batch, self.sequence), generator=generator)


JOBS = {
    job.name: job
    for job in (
        Job(name="A", hidden=512, intermediate=1344, layers=8, batch=2, sequence=256),
        Job(name="B", hidden=512, intermediate=1344, layers=8, batch=1, sequence=64),
        Job(name="C", hidden=1024, intermediate=2688, layers=12, batch=1, sequence=64),
    )
}
