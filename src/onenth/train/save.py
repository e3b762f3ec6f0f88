"""The save of a run: one directory a step, one pair of files a rank, complete or not there.

    step-000300/run.json                what the run was started with
    step-000300/rank-0000.safetensors   a rank's part of the optimizer (parameters and masters in it), module
    step-000300/rank-0000.json          buffers and random state: the tensors, and the rest

Ranks write into a directory of another name, and rank 0 renames it once all of them are done.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from onenth.errors import CheckpointError
from onenth.train.files import flush_directory, write_whole
from onenth.train.nested import join, split
from onenth.train.ranks import gather_objects

FORMAT = 1
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Run:
    """What a save tells about its run.

    step: steps done.
    options: the run's options, as plain values.
    model: the model's configuration, as plain values.
    text: digest of the text.
    """

    step: int
    ranks: int
    options: dict[str, Any]
    model: dict[str, Any]
    text: str


def save(output: Path, run: Run, state: dict[str, Any], *, rank: int) -> Path:
    """Write this rank's `state`, all ranks together; raises CheckpointError on all if one could not."""
    final = output / f"step-{run.step:06d}"
    partial = output / f".{final.name}.partial"
    _together(lambda: _fresh(partial) if rank == 0 else None)
    try:
        _together(lambda: _write_rank(partial, rank, state))
        _together(lambda: _finish(partial, final, run) if rank == 0 else None)
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def find(path: Path) -> Path:
    """The save at `path`, or the newest one in it."""
    if (path / "run.json").is_file():
        return path
    saves = [entry for entry in path.glob("step-*") if _NAME.fullmatch(entry.name) and (entry / "run.json").is_file()]
    if not saves:
        raise CheckpointError(f"{path}: holds no complete save (a directory step-… with run.json)")
    return max(saves, key=lambda entry: int(entry.name.removeprefix("step-")))


def describe(directory: Path) -> Run:
    """What the save in `directory` tells about its run."""
    try:
        content = json.loads((directory / "run.json").read_bytes())
        if content.pop("format") != FORMAT:
            raise CheckpointError(f"{directory}: was saved in another format")
        return Run(**content)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory}/run.json: is not what was saved ({error})") from error


def load(directory: Path, *, rank: int) -> dict[str, Any]:
    """This rank's state, tensors on the CPU."""
    tensors, rest = _files(directory, rank)
    try:
        state: dict[str, Any] = join(json.loads(rest.read_bytes()), load_file(tensors))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: rank {rank}'s part is not what was saved ({error})") from error
    return state


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The random generators of this rank: the CPU's, and its accelerator's."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """The inverse of `random_state`."""
    torch.set_rng_state(state["cpu"])
    if device.type in state and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state[device.type], device)


def rank_state(model: nn.Module, optimizer: Any, device: torch.device) -> dict[str, Any]:
    """All that this rank needs to go on bit by bit: its part of the optimizer, buffers, random generators."""
    return {
        "optimizer": optimizer.state_dict(),
        "buffers": dict(model.named_buffers()),
        "random": random_state(device),
    }


def set_rank_state(state: dict[str, Any], model: nn.Module, optimizer: Any, device: torch.device) -> None:
    """The inverse of `rank_state`."""
    optimizer.load_state_dict(state["optimizer"])
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(state["buffers"][name])
    set_random_state(state["random"], device)


def _together(act: Callable[[], None]) -> None:
    """Act on every rank, and raise on every rank what went wrong on the first of them."""
    try:
        act()
        problem = None
    except (OSError, SafetensorError) as error:
        problem = str(error)
    problems = gather_objects(problem)
    for rank, found in enumerate(problems):
        if found is not None:
            raise CheckpointError(f"rank {rank} could not save: {found}")


def _fresh(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _files(directory: Path, rank: int) -> tuple[Path, Path]:
    return directory / f"rank-{rank:04d}.safetensors", directory / f"rank-{rank:04d}.json"


def _write_rank(partial: Path, rank: int, state: dict[str, Any]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    rest = split(state, tensors)
    data, plain = _files(partial, rank)
    save_file(tensors, data)
    with data.open("rb") as file:
        os.fsync(file.fileno())
    write_whole(plain, json.dumps(rest).encode())


def _finish(partial: Path, final: Path, run: Run) -> None:
    content = {"format": FORMAT, **vars(run)}
    write_whole(partial / "run.json", json.dumps(content, indent=2).encode())
    if final.exists():  # a save of the same step, by a run that this one repeats
        shutil.rmtree(final)
    partial.rename(final)
    flush_directory(final.parent)
