"""Out of memory: the error says what was asked, where, what held the bytes, and what would have fitted; that fits."""

from __future__ import annotations

import contextlib
import gc
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onenth
from tests.distributed.pool import Pool

LAYERS, WIDTH, BATCH = 6, 64, 16
TOO_MUCH = 1 << 50


class Block(nn.Module):
    """Keeps ten times its input for backward. greedy: asks for more than there is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.greedy = False

    def forward(self, x: Tensor) -> Tensor:
        if self.greedy:
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def sharded(group: Any = None, **settings: Any) -> tuple[Model, onenth.ShardedOptimizer]:
    model = Model()
    shard: Any = onenth.shard
    wrapped: tuple[Model, onenth.ShardedOptimizer] = shard(
        model, torch.optim.AdamW(model.parameters()), group=group, **{"precision": "fp32", **settings}
    )
    return wrapped


def train(model: nn.Module, optimizer: Any, batch: int = BATCH, steps: int = 2) -> None:
    for _ in range(steps):
        for _ in range(BATCH // batch):
            optimizer.backward(model(torch.ones(batch, 64, WIDTH)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def failure_of(run: Callable[[], object]) -> str | None:
    """The text of an out-of-memory error, if there is one; nothing of the run is left."""
    try:
        run()
        return None
    except onenth.OutOfMemoryError as error:
        return str(error)
    finally:
        gc.collect()  # frames of the traceback, which hold the graph
        gc.collect()  # the model, which the graph holds


def text_of(run: Callable[[], object]) -> str:
    """The text of the out-of-memory error."""
    text = failure_of(run)
    assert text is not None
    return text


@pytest.mark.parametrize("recorded", [False, True])
def test_the_allocators_own_error_is_explained(recorded: bool) -> None:
    """A real failure of the CPU's allocator; what it raised is the cause, and handlers of torch's error see it."""
    model, optimizer = sharded(stage=0)
    train(model, optimizer)
    model.blocks[3].greedy = True
    watch = onenth.record(model, optimizer) if recorded else contextlib.nullcontext()
    with pytest.raises(torch.OutOfMemoryError) as caught, watch:
        train(model, optimizer)
    error = caught.value
    assert isinstance(error, onenth.OutOfMemoryError)
    assert isinstance(error, onenth.OnenthError)
    assert error.asked == TOO_MUCH
    assert "DefaultCPUAllocator" in str(error.__cause__)
    lines = str(error).splitlines()
    assert len(lines) < 15
    assert "rank 0 of 1: out of memory. Forward of blocks.3 asked for 1.13 PB (1,125,899,906,842,624 bytes)" in lines[0]
    assert any(line.split()[0] == "parameters" for line in lines[2:])
    by_subtraction = next(line for line in lines if line.split()[0] == "activations")
    assert ("less the other rows" in by_subtraction) != recorded


def test_plain_pytorch_under_a_recording() -> None:
    """Without shard the recording explains; `on_oom` gets what was recorded."""
    model, seen = Model(), []
    optimizer = torch.optim.AdamW(model.parameters())
    model.blocks[2].greedy = True

    def run() -> None:
        with onenth.record(model, optimizer, on_oom=seen.append):
            model(torch.ones(4, WIDTH))

    text = text_of(run)
    assert text.startswith("out of memory. Forward of blocks.2 asked for 1.13 PB")
    assert "activations" in text
    (anatomy,) = seen
    assert anatomy.peak.activations > 0


def test_other_errors_pass() -> None:
    """What is no lack of memory stays what it is."""
    model, _ = sharded(stage=0)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 3))
    assert not isinstance(caught.value, torch.OutOfMemoryError)


def check_one_rank_fails(group: dist.ProcessGroup) -> tuple[str, float, str]:
    model, optimizer = sharded(group, stage=3, timeout=50)
    train(model, optimizer)
    model.blocks[3].greedy = group.rank() == 1
    began = time.monotonic()
    with pytest.raises(onenth.OnenthError) as caught:
        train(model, optimizer)
    return type(caught.value).__name__, time.monotonic() - began, str(caught.value)


def test_every_rank_names_the_one_that_failed(pool: Pool) -> None:
    """At once: long before the transfers' time-out."""
    others = pool.run(3, check_one_rank_fails, breaks_group=True)
    assert [kind for kind, _, _ in others] == ["TransferError", "OutOfMemoryError", "TransferError"]
    assert max(seconds for _, seconds, _ in others) < 10
    for _, _, text in others:
        assert "rank 1 of 3: out of memory. Forward of blocks.3 asked for 1.13 PB" in text
    assert others[1][2].endswith("Only rank 1 ran out, all are stopped.")


CHANGES: dict[str, Callable[[str], dict[str, Any]]] = {
    r"micro-batch (\d+) ": lambda found: {"batch": int(found)},
    r"stage=(\d)": lambda found: {"stage": int(found)},
    r'activations="(\w+)"': lambda found: {"activations": found},
}


def peak_of(group: dist.ProcessGroup, **settings: Any) -> int:
    model, optimizer = sharded(group, **settings)
    train(model, optimizer, steps=1)
    with onenth.record(model, optimizer) as anatomy:
        train(model, optimizer, steps=1)
    return anatomy.peak.total


def check_remedies(group: dist.ProcessGroup, stage: int, shares: list[float]) -> list[str]:
    wrong = []
    peak = peak_of(group, stage=stage)
    for share in shares:
        cap = int(share * peak)

        def run(batch: int = BATCH, **settings: Any) -> None:
            train(*sharded(group, **settings), batch=batch)

        text = text_of(lambda: run(stage=stage, max_bytes=cap))  # noqa: B023
        lines = [line for line in text.splitlines() if line.startswith("- ")]
        assert lines, text
        assert len(text.splitlines()) < 15, text
        if "would have fitted" not in text:
            continue
        for line in lines:
            settings: dict[str, Any] = {"stage": stage, "max_bytes": cap}
            for pattern, setting in CHANGES.items():
                found = re.search(pattern, line)
                settings |= setting(found[1]) if found else {}
            if (failed := failure_of(lambda: run(**settings))) is not None:  # noqa: B023
                wrong.append(f"stage {stage}, {share} of {peak}: {line}\n{text}\n---\n{failed}")
    return wrong


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_would_have_fitted_does(pool: Pool, stage: int) -> None:
    """Each remedy of errors at caps from little too small to far too small, tried."""
    for wrong in pool.run(2, check_remedies, stage, [0.97, 0.8, 0.6, 0.4], timeout=120):
        assert wrong == []


UNCAUGHT = """
import torch, onenth
from tests.anatomy.test_out_of_memory import sharded
model, optimizer = sharded(stage=0)
output = model(torch.ones(2, 64))
torch.empty(1 << 50, dtype=torch.uint8)  # a loss of the user's own
"""


def test_an_error_that_nobody_catches_is_explained_below_its_traceback() -> None:
    """From outside the engine's calls too."""
    done = subprocess.run([sys.executable, "-c", UNCAUGHT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    _, below = done.stderr.split("DefaultCPUAllocator", 1)
    assert "rank 0 of 1: out of memory. A part of the step asked for 1.13 PB" in below
