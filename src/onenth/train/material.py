"""What a run works with, the same on every rank: vocabulary, text, model configuration, directory."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onenth.errors import ConfigError
from onenth.train.model import configuration
from onenth.train.options import Options
from onenth.train.ranks import gather_objects
from onenth.train.text import Text, read
from onenth.train.vocabulary import Vocabulary, vocabulary

_NOT_THE_MODEL = (
    "transformers_version",
    "_name_or_path",
    "dtype",
)  # may change, and the model not


@dataclass(frozen=True)
class Material:
    """Everything that is read before training starts.

    model_config: the model's transformers configuration.
    output: the run's directory.
    """

    vocabulary: Vocabulary
    text: Text
    model_config: Any
    output: Path

    @property
    def model_values(self) -> dict[str, Any]:
        """The model's configuration as plain values, to tell whether it changed."""
        values: dict[str, Any] = json.loads(self.model_config.to_json_string(use_diff=False))
        return {name: value for name, value in values.items() if name not in _NOT_THE_MODEL}


def prepare(options: Options, *, rank: int) -> Material:
    """Read it all. Raises ConfigError for what cannot be used, and where ranks see different text."""
    words = vocabulary(options.tokenizer)
    text = read(options.text, words, sequence=options.sequence)
    config = configuration(options.model, vocabulary=words.size, sequence=options.sequence)
    seen = gather_objects((text.digest, str(options.output or time.strftime("runs/%Y%m%d-%H%M%S"))))
    if len({digest for digest, _ in seen}) > 1:
        raise ConfigError("the ranks see different text: every rank must read the same files")
    output = Path(seen[0][1])
    if rank == 0:
        _open_directory(output, resumed=options.resume is not None)
    return Material(words, text, config, output)


def _open_directory(output: Path, *, resumed: bool) -> None:
    if (output / "metrics.jsonl").exists() and not resumed:
        raise ConfigError(f"--output {output}: holds a run already; name another directory, or --resume {output}")
    output.mkdir(parents=True, exist_ok=True)
