"""What the model writes, and the model as transformers reads it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onenth.api import full_state_dict, gathered
from onenth.train.evaluation import evaluating

_TEMPERATURE = 0.8


def generate(model: Any, prompt: torch.Tensor, *, tokens: int, end: int, seed: int) -> torch.Tensor:
    """Up to `tokens` tokens after `prompt` (tokens,), by all ranks together: (tokens,) int64 on the CPU."""
    torch.manual_seed(seed)
    with gathered(model), evaluating(model), torch.no_grad():
        written = model.generate(
            input_ids=prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            max_new_tokens=tokens,
            do_sample=True,
            temperature=_TEMPERATURE,
            eos_token_id=end,
            pad_token_id=end,
        )
    new: torch.Tensor = written[0, len(prompt) :].cpu()
    return new


def export(model: nn.Module, directory: Path, *, dtype: torch.dtype, rank: int) -> None:
    """The whole model in `directory`, as transformers writes it; there in one piece or not at all."""
    state = full_state_dict(model, dtype=dtype)
    if rank:
        return
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with _without_warnings():
            model.save_pretrained(partial, state_dict=state)  # type: ignore[operator]
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Saving imports every training library that is installed, and some have something to say about it."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
