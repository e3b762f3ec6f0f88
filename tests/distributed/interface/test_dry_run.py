"""The engine on fake tensors, in a fake group far larger than this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.interface import dry_run

# Of one rank: what Decoder has, counted by hand.
PARAMETERS = (
    2 * dry_run.VOCABULARY * dry_run.WIDTH
    + dry_run.LAYERS * (12 * dry_run.WIDTH**2 + 2 * dry_run.WIDTH)
    + dry_run.WIDTH
)


@pytest.fixture(scope="module")
def dry() -> dict[str, Any]:
    """What two steps at each stage held, from a process of its own, where no real group is."""
    command = [sys.executable, "-m", dry_run.__name__]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_two_steps_at_1024_ranks_take_seconds(dry: dict[str, Any]) -> None:
    """Shard and two steps of stages 1 and 3 at world size 1024: no loop over ranks makes them slow."""
    assert dry["seconds"] < 10


@pytest.mark.parametrize("stage", ["1", "3"])
def test_fake_bytes_equal_the_equations(dry: dict[str, Any], stage: str) -> None:
    """On fake tensors the ledger counts real bytes: state by state, what the equations say."""
    report = dry["reports"][stage]
    assert {state: size for state, size in report["held"].items() if state != "other"} == report["expected"]


def test_a_rank_holds_one_1024th_of_the_master_copy(dry: dict[str, Any]) -> None:
    """Over 1024 ranks, stages 1 and 3 alike, masters take 4 bytes a parameter, and padding."""
    master = {stage: report["held"]["master"] for stage, report in dry["reports"].items()}
    assert 4 * PARAMETERS <= master["1"] * 1024 < 4 * PARAMETERS + 1024 * 64 * 4 * (dry_run.LAYERS + 3)
    assert master["3"] == master["1"]
