"""`onenth train` from the command line to its end: two ranks, real steps, a resumed run, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import onenth
from tests.report.test_page import recording_of
from tests.train.conftest import Command, wait_until

TINY = ("--model=config.json", "--text=text.txt", "--sequence=32", "--batch=4", "--micro-batch=1")
INTERVALS = ("--steps=10", "--eval-interval=5", "--save-interval=5")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")


def records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses(output: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records(output) if "loss" in record}


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "run.json"}


def test_a_run_and_the_same_run_resumed(command: Command) -> None:
    """Ten steps on ranks of its own, then from the save at five under torchrun: same losses, same bits.

    The run shows its contract, the bytes that it holds, which are the equation's, and a sample.
    """
    whole, resumed = command.directory / "whole", command.directory / "resumed"
    anatomy = ("--anatomy", "run.html")
    first = command.run(*TINY, *INTERVALS, *anatomy, "--ranks", "2", "--output", "whole", "--sample", "8")
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    assert re.search(r"^precision .*parameters bfloat16", first.stdout)
    assert "128 tokens = 2 ranks x 1 sequences x 32 tokens x 2 backwards" in first.stdout
    table = re.search(r"bytes in all\s+([\d,]+)\s+([\d,]+)\s+([\d,]+)", first.stdout)
    assert table is not None
    held, equation, unsharded = (int(figure.replace(",", "")) for figure in table.groups())
    assert held == equation < 0.7 * unsharded
    assert "Sample" in first.stdout
    assert {entry.name for entry in whole.iterdir()} >= {
        "metrics.jsonl",
        "step-000005",
        "step-000010",
        "model",
    }
    assert not list(whole.glob(".*"))
    assert sorted(losses(whole)) == list(range(1, 11))
    assert "run.html of step 3; rank" in first.stdout
    check_anatomy(command.directory)
    assert [record["step"] for record in records(whole) if "held_out_loss" in record] == [5, 10]

    second = command.run("--resume", "whole/step-000005", "--output", "resumed", "--sample", "0", launcher=TORCHRUN)
    assert second.returncode == 0, second.stderr
    assert losses(resumed) == {step: loss for step, loss in losses(whole).items() if step > 5}
    assert files(resumed / "step-000010") == files(whole / "step-000010")
    assert files(whole / "step-000005") != files(whole / "step-000010")


def check_anatomy(directory: Path) -> None:
    """The page, and a recording of each rank whose model states are the equations' to the byte."""
    recordings = [onenth.Anatomy.load(directory / f"run.rank{rank}.json") for rank in range(2)]
    assert [(one.rank, one.ranks, one.stage) for one in recordings] == [(0, 2, 3), (1, 2, 3)]
    assert [one.differences for one in recordings] == [{}, {}]
    page = recording_of((directory / "run.html").read_text())
    assert [sum(rank["owners"].values()) for rank in page["ranks"]] == [one.peak.total for one in recordings]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
def test_ctrl_c_is_one_line_and_leaves_nothing(command: Command) -> None:
    """All processes get the signal, as from a terminal: exit code 130, no orphan, whole files only."""
    process = command.start(*TINY, "--steps", "100000", "--save-interval", "3", "--output", "run")
    output = command.directory / "run"
    wait_until(lambda: (output / "step-000003").exists())
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert err == "onenth: interrupted\n"
    wait_until(lambda: not command.processes())
    for directory in output.glob("step-*"):
        assert (directory / "run.json").exists()
    assert records(output)[0]["step"] == 1
