"""`onenth.launch`: values by rank, the first failure by name, and nothing left running."""

from __future__ import annotations

import os
import platform
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onenth
from onenth.errors import ConfigError
from onenth.launch import RankError, launch
from tests.train.conftest import Command, wait_until


def total(addend: int) -> tuple[int, int, torch.Tensor]:
    value = torch.tensor([dist.get_rank() + addend])
    dist.all_reduce(value)
    return dist.get_rank(), dist.get_world_size(), value


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ConfigError("wrong on one rank")
    dist.all_reduce(torch.ones(1))


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def leave_on_one() -> None:
    if dist.get_rank() == 1:
        sys.exit(0)
    dist.all_reduce(torch.ones(1))


def page_faults() -> int:
    """Pages faulted in during 16 steps at stage 3, over units of several sizes, once the first 8 are taken."""
    torch.manual_seed(0)
    widths = [512 + 64 * (number % 3) for number in range(4)]
    whole = nn.Sequential(*[nn.Sequential(nn.Linear(512, width), nn.Linear(width, 512)) for width in widths])
    model, optimizer = onenth.shard(whole, torch.optim.AdamW(whole.parameters()), stage=3, units={nn.Sequential})
    assert optimizer is not None
    faults = []
    for _ in range(24):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        optimizer.backward(model(torch.randn(4, 512)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return sum(faults[8:])


def hang(started: str) -> None:
    Path(started, str(dist.get_rank())).touch()
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def test_values_come_by_rank() -> None:
    """Each rank's own value, from a group that all have joined; signals are handled as before."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert launch(total, 2, 10) == [(0, 2, torch.tensor([21])), (1, 2, torch.tensor([21]))]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_the_failure_that_came_first_is_raised(capfd: pytest.CaptureFixture[str]) -> None:
    """The rank whose exception broke the others' transfers, with its traceback, and nothing printed."""
    with pytest.raises(RankError, match="rank 1: ConfigError: wrong on one rank") as caught:
        launch(fail_on_one, 2)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ConfigError)
    assert "in fail_on_one" in caught.value.details
    assert capfd.readouterr().err == ""


def test_a_rank_that_dies_is_named() -> None:
    """Not the rank that was waiting for it, though only that one could raise anything."""
    with pytest.raises(RankError, match="rank 1: died of SIGKILL"):
        launch(die_on_one, 2)


def test_leaving_early_is_a_failure() -> None:
    """A rank that exits, even with success, does not leave the launcher waiting for its value."""
    with pytest.raises(RankError, match="rank 1: SystemExit: 0"):
        launch(leave_on_one, 2)


def test_bad_calls_are_refused_before_anything_starts() -> None:
    """No ranks, and a function that other processes cannot find."""
    with pytest.raises(ConfigError, match="ranks=0"):
        launch(total, 0)
    with pytest.raises(ConfigError, match="top-level function"):
        launch(lambda: None, 2)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
def test_ranks_end_with_the_launching_process(tmp_path: Path) -> None:
    """Killed outright, it cannot stop them: ranks that sleep or wait for each other are gone soon after."""
    look = Command(tmp_path)
    call = f"launch(hang, 2, {str(tmp_path)!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", f"from tests.train.test_launch import hang, launch; {call}"],
        stderr=subprocess.DEVNULL,
        env=os.environ | {"MARK_OF_THE_TEST": look.mark},
    )
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    assert len(look.processes()) >= 3
    process.kill()
    process.wait()
    wait_until(lambda: not look.processes())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's heap")
def test_gathered_units_find_their_pages_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heap of launched ranks reuses its blocks; the launching process keeps its own settings."""
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=3")
    assert max(launch(page_faults, 2)) < 1000
    assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=3"
