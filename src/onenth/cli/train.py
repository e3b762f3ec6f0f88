"""`onenth train`: train a language model, on ranks of its own or on those that torchrun or Slurm started."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from torch.distributed.elastic.multiprocessing import SignalException

from onenth.cli import parse
from onenth.errors import ConfigError, OnenthError
from onenth.launch import RankError, launch
from onenth.residual_states.out_of_memory import OutOfMemoryError
from onenth.train.options import Options, given
from onenth.train.ranks import leave
from onenth.train.resume import resumed

_DESCRIPTION = """\
Train a causal language model under ZeRO, on local ranks or on those that torchrun or Slurm started.
Without options: a small Llama on the Python standard library's own sources, on 2 ranks at stage 3.

examples:
  onenth train --ranks 4 --stage 2 --text notes/ book.txt --steps 1000 --output runs/book
  onenth train --resume runs/book --steps 2000
  torchrun --nproc-per-node 8 -m onenth train --model path/to/model
"""
_FAILED = 1
_BAD_INPUT = 2
_SIGNALLED = 128  # plus the signal's number, as shells report it
_RANKS = 2  # on CPUs


def run(argv: Sequence[str]) -> int:
    """Train as the options say; returns the exit code. Bad input raises ConfigError."""
    options = parse(Options, argv, prog="onenth train", description=_DESCRIPTION)
    options.check()
    options = resumed(options, given(argv))
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("onenth train needs transformers: pip install 'onenth[train]'")
    return _join(options) if _started() else _launch(options)


def _started() -> bool:
    """Whether torchrun or Slurm started this process as one of several ranks."""
    return "RANK" in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) > 1


def _launch(options: Options) -> int:
    """Run local ranks, and say in one line what went wrong with them."""
    ranks = options.ranks or torch.accelerator.device_count() or _RANKS
    options.check_batch(ranks)
    from onenth.train.job import train

    try:
        launch(train, ranks, options)
        return 0
    except RankError as error:
        _leave_bar()
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        if isinstance(error.__cause__, OutOfMemoryError):
            return _explain(error.__cause__)
        return _fail(f"rank {error.rank}: {error.summary}", _FAILED)
    except SignalException as error:
        _leave_bar()
        return _fail(f"stopped by {error.sigval.name}", _SIGNALLED + error.sigval)
    except KeyboardInterrupt:
        _leave_bar()
        raise


def _join(options: Options) -> int:
    """Be one of the ranks that were started; an error that all of them see is told by one on each machine."""
    from onenth.train.job import train

    world = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1")))
    if options.ranks not in (None, world):
        raise ConfigError(f"--ranks {options.ranks}: {world} ranks were started; leave --ranks out")
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    try:
        train(options)
    except ConfigError:
        if local_rank == "0":
            raise
        return _BAD_INPUT
    except OutOfMemoryError as error:
        return _explain(error)
    except (OnenthError, OSError, RuntimeError) as error:
        rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
        return _fail(f"rank {rank}: {error}", _FAILED)
    leave()
    return 0


def _leave_bar() -> None:
    """A rank that was stopped leaves its progress bar as it was, and the cursor hidden."""
    console = Console()
    if console.is_terminal:
        console.show_cursor(True)
        console.print()


def _explain(error: OutOfMemoryError) -> int:
    """A step that does not fit is worth more than one line."""
    print(f"onenth: {error}", file=sys.stderr)
    return _FAILED


def _fail(message: str, code: int) -> int:
    print(f"onenth: {' '.join(message.split())}", file=sys.stderr)
    return code
