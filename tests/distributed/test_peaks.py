"""Live bytes, counted by the allocator alone: at rest they are the ledger's, at the peak the itemised sum."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch.distributed as dist

import onenth
from onenth.costs import FlatBuffer, Placement, Unit, backward_peak, model_state_bytes, step_peak
from onenth.partition import Partition
from tests.distributed.layout import Wide, input_of, shard_wide, sizes_of, units_of
from tests.distributed.live import LiveBytes
from tests.distributed.pool import Pool

STAGES = (0, 1, 2, 3)
PHASES = ("forward", "backward", "step", "zero_grad")

#: Bytes that no equation speaks of: one row of activations, what 16-bit kernels need in passing, scalars.
SMALL = 72 * 1024

Counts = dict[int, dict[str, tuple[int, int, int]]]


def _shard_and_warm_up(group: dist.ProcessGroup, stage: int, precision: str) -> tuple[Any, Any]:
    """The wide model after two steps: moments are there, and the order of gathers is known."""
    model, optimizer = shard_wide(group, stage=stage, precision=precision)
    for number in range(2):
        optimizer.backward(model(input_of(number)))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _count(group: dist.ProcessGroup, precision: str) -> Counts:
    """By stage and phase of a third step: the peak, what is left, and what the ledger holds then."""
    found = {}
    for stage in STAGES:
        model, optimizer = _shard_and_warm_up(group, stage, precision)
        rest, held = onenth.memory_report(model, optimizer).total, {}
        loss: list[Any] = []
        calls = {
            "forward": lambda model=model, loss=loss: loss.append(model(input_of(2))),
            "backward": lambda optimizer=optimizer, loss=loss: optimizer.backward(loss.pop()),
            "step": optimizer.step,
            "zero_grad": optimizer.zero_grad,
        }
        with LiveBytes() as live:
            for phase in PHASES:
                with live.phase(phase):
                    calls[phase]()
                held[phase] = onenth.memory_report(model, optimizer).total
        found[stage] = {phase: (rest + live.peak(phase), rest + live.after(phase), held[phase]) for phase in PHASES}
    return found


def _count_from_birth(group: dist.ProcessGroup, precision: str) -> dict[int, tuple[int, int]]:
    """By stage: live bytes of a sharded model from its making on, and what the ledger holds."""
    found = {}
    for stage in STAGES:
        with LiveBytes() as live:
            model, optimizer = _shard_and_warm_up(group, stage, precision)
            with live.phase("at rest"):
                held = onenth.memory_report(model, optimizer).total
        found[stage] = live.before("at rest"), held
        del model, optimizer
    return found


_cached: dict[tuple[int, str], list[Counts]] = {}


def _counts(pool: Pool, ranks: int, precision: str) -> list[Counts]:
    """One measured run for all tests here."""
    if (ranks, precision) not in _cached:
        _cached[ranks, precision] = pool.run(ranks, _count, precision)
    return _cached[ranks, precision]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_nothing_survives_but_what_the_ledger_holds(pool: Pool, precision: str) -> None:
    """Counted from the model's making on: the weights that it was made with are gone, its states are all."""
    for stage, (live, held) in pool.run(1, _count_from_birth, precision)[0].items():
        assert 0 <= live - held <= SMALL, f"stage {stage}: {live - held}"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_allocator_and_ledger_agree(pool: Pool, ranks: int, precision: str) -> None:
    """Measured twice: after every phase, live bytes by the allocator are the ledger's and activations."""
    for rank, by_stage in enumerate(_counts(pool, ranks, precision)):
        for stage, phases in by_stage.items():
            for phase, (_, left, held) in phases.items():
                assert abs(left - held) <= SMALL, f"rank {rank}, stage {stage}, {phase}: {left - held}"


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
def _wide_units(precision: str) -> list[Unit]:
    return units_of(Wide(), precision)


def _items(at: Placement, precision: str) -> dict[str, dict[str, int]]:
    """By phase: the items alive at its peak, in bytes."""
    units = _wide_units(precision)
    return {
        "forward": _forward_items(at, precision),
        "backward": backward_peak(units, at, sizes_of(precision)),
        "step": step_peak(units, at, sizes_of(precision)),
    }


def _shard(flat: FlatBuffer, at: Placement) -> int:
    return Partition(flat.numels, at.ranks).shard_numel


def _states(at: Placement, precision: str) -> int:
    flats = [flat for unit in _wide_units(precision) for flat in unit]
    return sum(model_state_bytes(flats, at, sizes_of(precision)).values())


def _whole(unit: Unit, at: Placement) -> int:
    """Bytes of a gathered unit: none beside the states where parameters are not partitioned."""
    return sum(at.ranks * _shard(flat, at) * flat.parameter_itemsize for flat in unit) if at.stage == 3 else 0


def _forward_items(at: Placement, precision: str) -> dict[str, int]:
    """The states; at stage 3 also the root and two units whole: one computes while the next arrives."""
    root, *blocks = [_whole(unit, at) for unit in _wide_units(precision)]
    two = max(one + following for one, following in pairwise(blocks))
    return {"states": _states(at, precision), "root": root, "two gathered units": two}
