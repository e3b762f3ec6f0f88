"""From bytes to tokens and back: every byte a token, or a tokenizer from transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from onenth.errors import ConfigError


class Vocabulary(Protocol):
    """A numbering of pieces of text.

    size: how many numbers there are.
    end: the number that stands between two texts.
    """

    size: int
    end: int

    def encode(self, text: bytes) -> torch.Tensor:
        """Tokens of `text`: (tokens,) int32."""

    def decode(self, tokens: torch.Tensor) -> str:
        """The text of `tokens`; what is no text reads as a replacement character."""


class Bytes:
    """256 bytes and an end of text."""

    size = 257
    end = 256

    def encode(self, text: bytes) -> torch.Tensor:
        """Each byte by its value."""
        if not text:
            return torch.empty(0, dtype=torch.int32)
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int32)

    def decode(self, tokens: torch.Tensor) -> str:
        """The bytes, read as UTF-8."""
        return bytes(token for token in tokens.tolist() if token < 256).decode(errors="replace")


class Tokenizer:
    """A tokenizer's directory, as transformers writes it."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--tokenizer {directory}: {str(error).splitlines()[0]}") from error
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(f"--tokenizer {directory}: it has no end-of-text token (eos_token)")
        self.size = len(self._tokenizer)
        self.end = int(self._tokenizer.eos_token_id)

    def encode(self, text: bytes) -> torch.Tensor:
        """Tokens without the special ones that some tokenizers add."""
        ids = self._tokenizer(text.decode(errors="replace"), add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int32)

    def decode(self, tokens: torch.Tensor) -> str:
        """The text, special tokens left out."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))


def vocabulary(tokenizer: Path | None) -> Vocabulary:
    """Bytes, or the tokenizer in a directory."""
    return Bytes() if tokenizer is None else Tokenizer(tokenizer)
