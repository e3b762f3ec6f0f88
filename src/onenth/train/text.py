"""The text of a run: which files, which of them are held out, and their tokens in one row.

All of it depends on the files alone (in the order of their paths, whose hashes decide what is held out), so
that every rank and every resumed run reads the same text.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from onenth.errors import ConfigError
from onenth.train.vocabulary import Vocabulary

HELD_OUT = 1 / 20  # of the files; of the tokens, where there are too few files
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_HEAD = 8192  # bytes in which a file that is not text shows a zero byte


@dataclass(frozen=True)
class Text:
    """Tokens to train on and tokens held out, (tokens,) int32 each, texts separated by the vocabulary's end.

    files: how many were read.
    digest: of all files and their names; equal digests mean equal text.
    """

    training: torch.Tensor
    held_out: torch.Tensor
    files: int
    digest: str


def read(paths: Sequence[Path], vocabulary: Vocabulary, *, sequence: int) -> Text:
    """The text in `paths`, or the standard library's own sources if there are none.

    Raises ConfigError if a part is shorter than one sequence, and OSError for a file that cannot be read.
    """
    training: list[torch.Tensor] = []
    held_out: list[torch.Tensor] = []
    digest, files = hashlib.sha256(str(vocabulary.size).encode()), 0
    for name, path in sorted(_named(paths), key=lambda entry: entry[0]):
        content = path.read_bytes()
        digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
        (held_out if is_held_out(name) else training).append(_tokens(content, vocabulary))
        files += 1
    rows = _row(training), _row(held_out)
    if _shorter(rows) < sequence:
        rows = _cut(torch.cat(rows))
    if _shorter(rows) < sequence:
        raise ConfigError(
            f"the text is too short: {sum(row.numel() for row in rows)} tokens in {files} files; "
            f"sequences of {sequence} need at least {round(sequence / HELD_OUT)} (a part is held out)"
        )
    return Text(*rows, files, digest.hexdigest())


def is_held_out(name: str) -> bool:
    """Whether the file of this name is held out; its hash decides, so other files do not matter."""
    return hashlib.sha256(name.encode()).digest()[0] < 256 * HELD_OUT


def _named(paths: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """(name, path) of every file of text; a name is the path below the directory that was given."""
    if not paths:
        library = Path(sysconfig.get_paths()["stdlib"])
        sources = (path for path in library.rglob("*.py") if not _LEFT_OUT & {*path.relative_to(library).parts})
        yield from _below(library, sources)
    for path in paths:
        if path.is_dir():
            yield from _below(path, path.rglob("*"))
        else:
            yield path.name, path


def _below(directory: Path, paths: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    for path in paths:
        name = path.relative_to(directory)
        if path.is_file() and not any(part.startswith(".") for part in name.parts) and _is_text(path):
            yield name.as_posix(), path


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(_HEAD)


def _tokens(content: bytes, vocabulary: Vocabulary) -> torch.Tensor:
    end = torch.tensor([vocabulary.end], dtype=torch.int32)
    return torch.cat([vocabulary.encode(content), end])


def _row(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=torch.int32)


def _shorter(rows: Sequence[torch.Tensor]) -> int:
    return min(row.numel() for row in rows)


def _cut(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Too few files to hold whole ones out: the end of the row instead."""
    training = tokens.numel() - round(tokens.numel() * HELD_OUT)
    return tokens[:training], tokens[training:]
