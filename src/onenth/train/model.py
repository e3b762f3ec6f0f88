"""The model and its optimizer: a small Llama, or what a configuration or model directory describes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onenth.errors import ConfigError

_HIDDEN, _LAYERS, _HEADS = 256, 4, 4  # of the default model: 3.3 M parameters with bytes as tokens
_BETAS = (0.9, 0.95)
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")  # what a directory with weights holds


def configuration(path: Path | None, *, vocabulary: int, sequence: int) -> Any:
    """The transformers configuration in `path` (a directory or a config.json), or the small Llama's.

    Raises ConfigError if it cannot be read, or is too small for the vocabulary or the sequence.
    """
    if path is None:
        return _small_llama(vocabulary, sequence)
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--model {path}: {str(error).splitlines()[0]}") from error
    text = config.get_text_config()
    if text.vocab_size < vocabulary:
        raise ConfigError(f"--model {path}: {text.vocab_size} tokens, fewer than the vocabulary's {vocabulary}")
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and sequence > limit:
        raise ConfigError(f"--sequence {sequence}: --model {path} has {limit} positions")
    return config


def _small_llama(vocabulary: int, sequence: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=_HIDDEN,
        intermediate_size=_HIDDEN * 8 // 3 // 32 * 32,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        max_position_embeddings=max(2048, sequence),
        bos_token_id=None,
        eos_token_id=vocabulary - 1,
        pad_token_id=None,
    )


def build(config: Any, path: Path | None, *, seed: int, rank: int) -> nn.Module:
    """The model in fp32: with weights from `path` where it has some, else initialised; on meta but at rank 0.

    Rank 0's parameters are what all ranks get when the model is sharded.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    weights = path is not None and path.is_dir() and any(any(path.glob(pattern)) for pattern in _WEIGHTS)
    try:
        with torch.device("meta") if rank else contextlib.nullcontext():
            if weights and not rank:
                model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, local_files_only=True)
            else:
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {path}: {str(error).splitlines()[0]}") from error
    return model.train()  # type: ignore[no-any-return]


def adamw(model: nn.Module, *, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices, none on vectors (norms, biases)."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=_BETAS, fused=True)
