"""What a user can ask of `onenth train`: one frozen dataclass, parsed by tyro, checked as a whole."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from onenth.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `onenth train`."""

    model: Path | None = None
    """Directory of a model (its weights are used, if it has some), or a config.json, as of transformers."""
    text: tuple[Path, ...] = ()
    """Files, and directories of files, to train on; part of them is held out for evaluation."""
    tokenizer: Path | None = None
    """Directory of a tokenizer; without one, each byte is a token."""
    ranks: int | None = None
    """Local ranks to run: one for each accelerator, or 2 on CPUs, if not given."""
    stage: Literal[0, 1, 2, 3] = 3
    """What is partitioned: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """The dtype contract."""
    activations: Literal["keep", "recompute"] = "keep"
    """Keep activations for the backward pass, or recompute them there."""
    batch: int = 8
    """Sequences in a step, over all ranks."""
    micro_batch: int | None = None
    """Sequences that a rank runs at once; its whole share of the batch if not given."""
    sequence: int = 256
    """Tokens in a sequence."""
    steps: int = 300
    """Steps to train, those of a resumed run included."""
    lr: float = 3e-3
    """Peak learning rate; it falls to a tenth of it along a cosine."""
    warmup: int = 20
    """Steps in which the learning rate rises to its peak."""
    weight_decay: float = 0.1
    """AdamW's weight decay, on matrices only."""
    clip: float = 1.0
    """Largest global norm of the gradients; 0 for no clipping."""
    seed: int = 0
    """Decides the initial weights, the order of the text, dropout and the sample."""
    eval_interval: int = 50
    """Evaluate on held-out text every so many steps, and at the end."""
    save_interval: int = 0
    """Save every so many steps; 0: at the end only."""
    output: Path | None = None
    """Directory for metrics, saves and the model; a new one under runs/ if not given."""
    resume: Path | None = None
    """A run's directory, or one of its saves, to go on from; its options hold unless they are given again."""
    anatomy: Path | None = None
    """Record one step after warm-up on every rank, and write what held its memory: a page (.html), and JSON beside."""
    sample: int = 200
    """Tokens to generate at the end; 0 for none."""
    prompt: str | None = None
    """What the sample goes on from; the beginning of the held-out text if not given."""

    @property
    def max_grad_norm(self) -> float | None:
        """The clipping norm as the engine takes it."""
        return self.clip or None

    def rank_batch(self, ranks: int) -> int:
        """Sequences that one rank runs at once."""
        return self.micro_batch or self.batch // ranks

    def accumulation(self, ranks: int) -> int:
        """Backward passes of each rank in a step."""
        return self.batch // (self.rank_batch(ranks) * ranks)

    def check(self) -> None:
        """Raise ConfigError, naming every option that is out of range and every file that is missing."""
        _raise([*_out_of_range(self), *_missing(self)])

    def check_batch(self, ranks: int) -> None:
        """Raise ConfigError if the batch cannot be split evenly over `ranks`."""
        share = max(1, self.rank_batch(ranks)) * ranks
        if self.batch % share:
            _raise([f"batch {self.batch} is not a multiple of micro-batch {share // ranks} x {ranks} ranks"])


_RULES: tuple[tuple[Sequence[str], Callable[[Any], bool], str], ...] = (
    (("batch", "steps", "eval_interval"), lambda value: value >= 1, "at least 1"),
    (("ranks", "micro_batch"), lambda value: value is None or value >= 1, "at least 1"),
    (("sequence",), lambda value: value >= 2, "at least 2"),
    (("warmup", "save_interval", "sample", "seed"), lambda value: value >= 0, "0 or more"),
    (("lr",), lambda value: 0 < value < math.inf, "a positive number"),
    (("clip", "weight_decay"), lambda value: 0 <= value < math.inf, "0 or a positive number"),
)


def _raise(wrong: Sequence[str]) -> None:
    if wrong:
        raise ConfigError("; ".join(wrong))


def flag(name: str) -> str:
    """A field's name as it is typed."""
    return "--" + name.replace("_", "-")


def _out_of_range(options: Options) -> list[str]:
    values = {name: getattr(options, name) for names, _, _ in _RULES for name in names}
    return [
        f"{flag(name)} {values[name]}: {meant} is meant"
        for names, holds, meant in _RULES
        for name in names
        if not holds(values[name])
    ]


def _missing(options: Options) -> list[str]:
    given = [("model", options.model), ("tokenizer", options.tokenizer), ("resume", options.resume)]
    given += [("text", path) for path in options.text]
    wrong = [f"{flag(name)} {path}: no such file or directory" for name, path in given if path and not path.exists()]
    if options.output is not None and options.output.exists() and not options.output.is_dir():
        wrong.append(f"--output {options.output}: is a file, a directory is meant")
    wrong += [] if options.anatomy is None else _wrong_page(options.anatomy)
    return wrong


def _wrong_page(path: Path) -> list[str]:
    wrong = []
    if path.suffix != ".html" or path.is_dir():
        wrong.append(f"--anatomy {path}: the name of a page is meant, such as run.html")
    elif not path.parent.is_dir():
        wrong.append(f"--anatomy {path}: there is no directory {path.parent}")
    if importlib.util.find_spec("plotly") is None:
        wrong.append("--anatomy needs plotly: pip install 'onenth[page]'")
    return wrong


def given(argv: Sequence[str]) -> set[str]:
    """The fields that a command line sets, whatever it sets them to."""
    typed = {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    return typed & {field.name for field in fields(Options)}
