"""Same bytes: what a rank holds between the phases of a step is what the equations say, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onenth
from onenth.breakdown import Breakdown
from onenth.costs import FlatBuffer, Placement, model_state_bytes
from onenth.states import ModelState, ResidualState, Tier
from tests.distributed.layout import Wide, input_of, shard_wide, sizes_of, units_of
from tests.distributed.models import TASKS
from tests.distributed.pool import Pool
from tests.distributed.reference import micro_batch
from tests.distributed.sharded import start

STAGES = (0, 1, 2, 3)
PRECISIONS = ("bf16", "fp16", "fp32")
FROZEN = (2,)


@dataclass(frozen=True)
class Moment:
    """A report, and how far the step was when it was made.

    stepped: the optimizer has made its states. backwards: exchanged since gradients were cleared.
    unexchanged: a backward under `no_sync` came last.
    """

    report: Breakdown
    stepped: bool
    backwards: int
    unexchanged: bool = False

    def __str__(self) -> str:
        return f"stepped={self.stepped}, backwards={self.backwards}, unexchanged={self.unexchanged}"


def _moments(model: Any, optimizer: Any, loss: Callable[[int], torch.Tensor]) -> list[Moment]:
    """A report at every phase of two steps of three backwards, and around `no_sync`; `loss(micro-batch)`."""

    def moment(stepped: bool, backwards: int, unexchanged: bool = False) -> Moment:
        return Moment(onenth.memory_report(model, optimizer), stepped, backwards, unexchanged)

    moments = [moment(False, 0)]
    for stepped in (False, True):
        for backward in range(3):
            optimizer.backward(loss(backward))
            moments.append(moment(stepped, backward + 1))
        optimizer.step()
        moments.append(moment(True, 3))
        optimizer.zero_grad()
        moments.append(moment(True, 0))
    for backward in range(2):
        with onenth.no_sync(model):
            optimizer.backward(loss(3))
        moments.append(moment(True, backward, unexchanged=True))
        optimizer.backward(loss(4))
        moments.append(moment(True, backward + 1))
    return moments


def _moments_of_task(group: dist.ProcessGroup, task: str, precisions: Sequence[str]) -> dict[str, list[Moment]]:
    found = {}
    for stage in STAGES:
        for precision in precisions:
            model, optimizer = start(group, task, stage=stage, precision=precision)

            def loss(number: int, model: Any = model) -> torch.Tensor:
                return TASKS[task].loss(model, micro_batch(number, dist.get_rank(group)))

            found[f"stage {stage}, {precision}"] = _moments(model, optimizer, loss)
    return found


@pytest.mark.parametrize(
    ("task", "ranks", "precisions"),
    [
        ("odd", 2, PRECISIONS),
        ("nested", 3, PRECISIONS),
        ("tied", 2, PRECISIONS),
        ("uneven", 4, ("bf16",)),
        pytest.param("uneven", 4, ("fp16", "fp32"), marks=pytest.mark.slow),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else None,
)
def test_reports_equal_their_equations(pool: Pool, task: str, ranks: int, precisions: Sequence[str]) -> None:
    """Every rank, stage, precision and phase: each state's held bytes equal the equation's figure."""
    for rank, by_setting in enumerate(pool.run(ranks, _moments_of_task, task, precisions)):
        for setting, moments in by_setting.items():
            for moment in moments:
                where = f"rank {rank}, {setting}, {moment}"
                assert not moment.report.differences, f"{where}:\n{moment.report}"
                states = {state for state, _ in moment.report.held} - set(ResidualState)
                assert states <= {state for state, _ in moment.report.expected}, where


def _moments_of_wide(group: dist.ProcessGroup, precisions: Sequence[str]) -> dict[tuple[int, str], list[Moment]]:
    found = {}
    for stage in STAGES:
        for precision in precisions:
            model, optimizer = shard_wide(group, FROZEN, stage=stage, precision=precision)
            found[stage, precision] = _moments(model, optimizer, lambda n, m=model: m(input_of(n)))
    return found


@pytest.mark.parametrize(
    ("ranks", "precisions"),
    [
        *((ranks, PRECISIONS) for ranks in (1, 2, 3)),
        (4, ("bf16",)),
        pytest.param(4, ("fp16", "fp32"), marks=pytest.mark.slow),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else None,
)
def test_ledger_equals_equations_on_a_known_layout(pool: Pool, ranks: int, precisions: Sequence[str]) -> None:
    """The ledger against the equations over units that the test cut itself, padding and frozen ones too."""
    for rank, by_setting in enumerate(pool.run(ranks, _moments_of_wide, precisions)):
        for (stage, precision), moments in by_setting.items():
            at = Placement(stage=stage, ranks=ranks, rank=rank)
            for moment in moments:
                for (state, tier), expected in _equation(at, precision, moment).items():
                    where = f"rank {rank}, stage {stage}, {precision}, {moment}: {state}"
                    assert _held(moment, state, tier) == expected, where


@cache
def _flats(precision: str) -> list[FlatBuffer]:
    return [flat for unit in units_of(Wide(FROZEN), precision) for flat in unit]


def _equation(at: Placement, precision: str, moment: Moment) -> dict[tuple[str, Tier], int]:
    """What a rank holds of the wide model, from the sizes of its parameters alone."""
    return model_state_bytes(
        _flats(precision),
        at,
        sizes_of(precision, stepped=moment.stepped),
        backwards=moment.backwards,
        unexchanged=moment.unexchanged,
    )


def _held(moment: Moment, state: str, tier: Tier) -> int:
    """Bytes of a state; local gradients that were not exchanged count as gradients."""
    held = moment.report.held
    local = held.get((ResidualState.LOCAL_GRADIENTS, tier), 0) if state == ModelState.GRADIENTS else 0
    return held.get((state, tier), 0) + local
