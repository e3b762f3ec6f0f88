"""Saves: whole or not there, read back bit by bit, and refused where they do not fit."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onenth.errors import CheckpointError, ConfigError
from onenth.train import save
from onenth.train.nested import join, split
from onenth.train.options import Options
from onenth.train.resume import check_same, plain, resumed


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, without a process group."""
    monkeypatch.setattr(save, "gather_objects", lambda value: [value])


def written(output: Path, step: int, options: Options, state: Any = None) -> Path:
    run = save.Run(step, 2, plain(options), {"hidden_size": 8}, "digest")
    return save.save(output, run, state or {}, rank=0)


def test_a_state_dict_comes_back_as_it_was() -> None:
    """Number keys, tuples, infinities, scalars, empty tensors, views: bit by bit, through JSON."""
    flat = torch.randn(10, dtype=torch.bfloat16)
    state = {
        0: {"exp_avg": flat[:4], "step": torch.tensor(3.0)},
        "groups": [{"betas": (0.9, 0.95), "foreach": None, "lr": 1e-3 / 3, "fused": True}],
        "scale": math.inf,
        "rest": flat[4:],
        "empty": torch.empty(0),
        "nothing": {},
    }
    tensors: dict[str, torch.Tensor] = {}
    rest = json.loads(json.dumps(split(state, tensors)))
    back = join(rest, tensors)
    assert back.keys() == state.keys()
    assert back["groups"] == state["groups"]
    assert back["scale"] == math.inf
    assert back["nothing"] == {}
    assert torch.equal(back[0]["exp_avg"], flat[:4])
    assert torch.equal(back["rest"], flat[4:])
    assert back[0]["step"].shape == ()
    assert back["empty"].shape == (0,)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.numel()}) == 3


def test_what_is_neither_tensor_nor_plain_is_named() -> None:
    """An object deep in a state dict is an error that says where, not a file that cannot be read."""
    with pytest.raises(CheckpointError, match="/groups/0/fn is a function"):
        split({"groups": [{"fn": wait}]}, {})


def wait() -> None:
    pass


def test_the_newest_save_is_found(tmp_path: Path) -> None:
    """By number, not by name; a save itself is found too, and its state is what was saved."""
    options = Options(output=tmp_path)
    written(tmp_path, 1_000_000, options, {"weights": torch.arange(3)})
    written(tmp_path, 999_999, options)
    found = save.find(tmp_path)
    assert found.name == "step-1000000"
    assert save.find(found) == found
    assert save.load(found, rank=0)["weights"].tolist() == [0, 1, 2]
    assert save.describe(found).step == 1_000_000


def test_a_full_disk_leaves_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the rank; the save from before is still there, whole, and nothing else."""
    options = Options(output=tmp_path)
    written(tmp_path, 1, options, {"weights": torch.ones(3)})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(save, "save_file", full)
    with pytest.raises(CheckpointError, match=r"rank 0 could not save: .*No space left on device"):
        written(tmp_path, 2, options)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000001"]
    assert save.load(save.find(tmp_path), rank=0)["weights"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["run.json", "rank-0000.json", "rank-0000.safetensors"])
def test_files_that_were_cut_are_refused(tmp_path: Path, name: str) -> None:
    """A file that lost its end is an error that names the directory, not a traceback or a wrong run."""
    directory = written(tmp_path, 1, Options(), {"weights": torch.ones(100)})
    path = directory / name
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match="is not what was saved"):
        _ = save.describe(directory), save.load(directory, rank=0)


def test_a_resumed_run_has_the_options_that_it_had(tmp_path: Path) -> None:
    """Without being told again; more steps may be asked for, and it goes on where its save lies."""
    before = Options(output=tmp_path, steps=10, lr=0.5, text=(tmp_path,), batch=6)
    directory = written(tmp_path, 10, before)
    after = resumed(Options(resume=tmp_path, steps=20), {"resume", "steps"})
    assert after == replace(before, resume=directory, steps=20, ranks=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.25}, "--lr was 0.5 and is 0.25"),
        ({"ranks": 3}, "--ranks was 2 and is 3"),
        ({"stage": 0, "seed": 1}, "--stage was 3 and is 0; --seed was 0 and is 1"),
        ({"steps": 10}, "is at step 10 of 10; give more --steps to go on"),
    ],
)
def test_a_resumed_run_cannot_become_another(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """An option that is given again with another value is refused, with both values."""
    written(tmp_path, 10, Options(steps=10, lr=0.5))
    with pytest.raises(ConfigError, match=message):
        resumed(replace(Options(resume=tmp_path), **changes), {"resume", *changes})


def test_another_number_of_ranks_model_or_text_is_refused() -> None:
    """All that changed is named at once."""
    run = save.Run(10, 2, {}, {"hidden_size": 8, "layers": 2}, "digest")
    check_same(run, ranks=2, model={"hidden_size": 8, "layers": 2}, text="digest")
    with pytest.raises(ConfigError, match=r"saved on 2 ranks, and these are 4.*changed: hidden_size.*the text changed"):
        check_same(run, ranks=4, model={"hidden_size": 16, "layers": 2}, text="another")
