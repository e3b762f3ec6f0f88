"""The command `onenth`: runs the subcommand, and turns what users do wrong into one line and an exit code.

Each command is a module of this package with `run(argv) -> exit code`, imported only when it is called.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import TypeVar

from onenth.errors import ConfigError, OnenthError

COMMANDS = {
    "plan": "what training holds in memory, on how many ranks",
    "train": "train a language model on text files",
    "anatomy": "where the bytes of a recorded step are",
}

_HELP = f"""\
usage: onenth COMMAND [OPTIONS]

Train PyTorch models with ZeRO on one N-th of the memory, every byte accounted for.

commands:
{chr(10).join(f"  {name:<9}{purpose}" for name, purpose in COMMANDS.items())}

examples:
  onenth plan --parameters 7e9 --ranks 256
  onenth train --ranks 2 --anatomy run.html
  onenth anatomy show run.rank0.json

`onenth COMMAND --help` lists a command's options, `onenth --version` prints the version.
"""
_MARGIN = 2  # columns that tyro's box takes on the left
_HELP_INDENT = " " * 8  # where tyro explains an option under its name
_BAD_INPUT = 2
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

Options = TypeVar("Options")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except OnenthError as error:
        return _fail(str(error), _BAD_INPUT)
    except BrokenPipeError:
        # Whoever read the output is gone (`onenth … | head`): what is flushed at exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), _BAD_INPUT)
    except KeyboardInterrupt:
        return _fail("interrupted", _INTERRUPTED)


def _dispatch(argv: list[str]) -> int:
    command, *rest = argv or [""]
    if command in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    if command == "--version":
        print(f"onenth {version('onenth')}")
        return 0
    if command in COMMANDS:
        module = importlib.import_module(f"onenth.cli.{command}")
        code: int = module.run(rest)
        return code
    *most, last = COMMANDS
    there_are = f"the commands are {', '.join(most)} and {last}, see onenth --help"
    if not command:
        raise ConfigError(f"no command given: {there_are}")
    close = difflib.get_close_matches(command, COMMANDS, n=1)
    raise ConfigError(f"no command {command!r}: " + (f"did you mean {close[0]}?" if close else there_are))


def _fail(message: str, code: int) -> int:
    print(f"onenth: {' '.join(message.split())}", file=sys.stderr)
    return code


def parse(options: type[Options], argv: Sequence[str], *, prog: str, description: str) -> Options:
    """`argv` as an instance of the dataclass `options`; bad input is a ConfigError of one line."""
    import tyro

    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(
                options,
                args=argv,
                prog=prog,
                description=description,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as exit_:
        if not exit_.code:
            raise
    raise ConfigError(f"{_without_box(box.getvalue())} (see {prog} --help)")


def _without_box(text: str) -> str:
    """What tyro says in a box, parted by rules, as one line: the first part, and what it thinks was meant."""
    parts: list[list[str]] = [[]]
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()[1:-1]:
        content = line[_MARGIN:].rstrip("│ ")
        if not content.strip("─-"):
            parts.append([])
        elif not content.startswith(_HELP_INDENT):
            parts[-1].append(content.strip())
    first, *others = (" ".join(part) for part in parts if part)
    return ". ".join([first.rstrip("."), *(part for part in others if part.startswith("Perhaps"))])
