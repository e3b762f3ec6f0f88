"""Live bytes, counted by the allocator alone: at rest they are the ledger's, at the peak the itemised sum."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch.distributed as dist

import onenth
from onenth.costs import Placement, backward_peak, model_state_bytes, step_peak
from onenth.partition import Partition
from tests.distributed.layout import Wide, input_of, shard_wide, sizes_of, units_of
from tests.distributed.live import LiveBytes
from tests.distributed.pool import Pool

STAGES = (0, 1, 2, 3)
PHASES = ("forward", "backward", "step", "zero_grad")

#: Bytes that no equation speaks of: one row of activations through the wide model, and scalars.
SMALL = 24 * 1024

Counts = dict[int, dict[str, tuple[int, int, int]]]


def _count(group: dist.ProcessGroup, precision: str) -> Counts:
    """By stage and phase of a third step: the allocator's peak, what is left, what the ledger holds then."""
    found = {}
    for stage in STAGES:
        held = {}
        with LiveBytes() as live:
            model, optimizer = shard_wide(group, stage=stage, precision=precision)
            for number in range(2):
                optimizer.backward(model(input_of(number)))
                optimizer.step()
                optimizer.zero_grad()
            loss: list[Any] = []
            calls = {
                "forward": lambda model=model, loss=loss: loss.append(model(input_of(2))),
                "backward": lambda optimizer=optimizer, loss=loss: optimizer.backward(loss.pop()),
                "step": optimizer.step,
                "zero_grad": optimizer.zero_grad,
            }
            for phase in PHASES:
                with live.phase(phase):
                    calls[phase]()
                held[phase] = onenth.memory_report(model, optimizer).total
        found[stage] = {phase: (live.peak(phase), live.after(phase), held[phase]) for phase in PHASES}
    return found


_cached: dict[tuple[int, str], list[Counts]] = {}


def _counts(pool: Pool, ranks: int, precision: str) -> list[Counts]:
    """One measured run for all tests here."""
    if (ranks, precision) not in _cached:
        _cached[ranks, precision] = pool.run(ranks, _count, precision)
    return _cached[ranks, precision]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_allocator_and_ledger_agree(pool: Pool, ranks: int, precision: str) -> None:
    """Measured twice: after every phase, live bytes by the allocator are the ledger's and a few scalars."""
    for rank, by_stage in enumerate(_counts(pool, ranks, precision)):
        for stage, phases in by_stage.items():
            for phase, (_, left, held) in phases.items():
                assert 0 <= left - held <= SMALL, f"rank {rank}, stage {stage}, {phase}: {left - held}"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_peaks_are_the_itemised_sums(pool: Pool, stage: int, ranks: int, precision: str) -> None:
    """The peaks of forward, backward and step are the sums of their items, but for one row of activations."""
    for rank, by_stage in enumerate(_counts(pool, ranks, precision)):
        at = Placement(stage=stage, ranks=ranks, rank=rank)
        for phase, items in _items(at, precision).items():
            excess = by_stage[stage][phase][0] - sum(items.values())
            assert abs(excess) <= SMALL, f"rank {rank}, {phase}: {excess} beyond {items}"


@cache
def _wide_units(precision: str) -> Any:
    return units_of(Wide(), precision)


def _items(at: Placement, precision: str) -> dict[str, dict[str, int]]:
    """By phase: the items alive at its peak, in bytes."""
    units, sizes = _wide_units(precision), sizes_of(precision)
    return {
        "forward": _forward_items(at, precision),
        "backward": backward_peak(units, at, sizes),
        "step": step_peak(units, at, sizes),
    }


def _forward_items(at: Placement, precision: str) -> dict[str, int]:
    """The states; at stage 3 also the root and two units whole: one computes while the next arrives."""
    units = _wide_units(precision)
    states = model_state_bytes([flat for unit in units for flat in unit], at, sizes_of(precision))
    whole = [
        sum(Partition(flat.numels, at.ranks).flat_numel * flat.parameter_itemsize for flat in unit)
        for unit in units
    ]
    two = max(one + following for one, following in pairwise(whole[1:]))
    return {
        "states": sum(states.values()),
        "root": whole[0] if at.stage == 3 else 0,
        "two gathered units": two if at.stage == 3 else 0,
    }
