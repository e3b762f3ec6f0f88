"""Same traffic: the elements that each rank sends are those of the equations, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch.distributed as dist

from onenth.costs import nominal_traffic, traffic
from tests.distributed.layout import Wide, input_of, shard_wide, units_of
from tests.distributed.pool import Pool

FROZEN = (2,)
VARIANTS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, no prefetch": {"stage": 3, "prefetch": False},
    "stage 3, recomputed": {"stage": 3, "activations": "recompute"},
    "stage 3, kept": {"stage": 3, "keep_gathered": ("blocks.0", "blocks.4")},
}


def _count(group: dist.ProcessGroup, backwards: int) -> dict[str, list[dict[str, int]]]:
    """Elements that this rank sends in each of three steps, by kind, for every variant."""
    counted = {}
    for label, settings in VARIANTS.items():
        model, optimizer = shard_wide(group, FROZEN, precision="bf16", **settings)
        counters = model.__dict__["_onenth"].comm.counters
        steps = []
        for number in range(3):
            before = dict(counters)
            for backward in range(backwards):
                optimizer.backward(model(input_of(10 * number + backward)) / backwards)
            optimizer.step()
            optimizer.zero_grad()
            steps.append({kind: sent - before.get(kind, 0) for kind, sent in counters.items()})
        counted[label] = steps
    return counted


def _expected(label: str, ranks: int, backwards: int) -> Mapping[str, int]:
    """The equation's traffic. At stage 3 the root is gathered once a pass, kept units once, others twice."""
    settings, units = VARIANTS[label], units_of(Wide(FROZEN), "bf16")
    kept = {f"blocks.{index}": index + 1 for index in range(len(units) - 1)}
    once = {0} | {kept[name] for name in settings.get("keep_gathered", ())}
    gathers = [(1 if index in once else 2) * backwards for index, unit in enumerate(units) for _ in unit]
    flats = [flat for unit in units for flat in unit]
    return traffic(flats, stage=settings["stage"], ranks=ranks, backwards=backwards, gathers=gathers)


@pytest.mark.parametrize(("ranks", "backwards"), [(1, 1), (2, 1), (3, 2), (4, 1)])
def test_counted_elements_equal_the_equations(pool: Pool, ranks: int, backwards: int) -> None:
    """Each rank, step and setting: gradients once a backward, parameters as often as they are gathered."""
    for counted in pool.run(ranks, _count, backwards):
        for label, steps in counted.items():
            for number, sent in enumerate(steps):
                found = {
                    "exchange": sent.get("exchange", 0),
                    "gather": sent.get("gather", 0) + sent.get("sums", 0),  # stage 0 gathers the sums
                }
                assert found == _expected(label, ranks, backwards), f"{label}, step {number}"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_equations_are_the_papers(stage: int) -> None:
    """Everything trainable and gathered twice: the exact equations exceed the paper's by padding alone."""
    units, ranks = units_of(Wide(), "bf16"), 4
    flats = [flat for unit in units for flat in unit]
    parameters = sum(sum(flat.numels) for flat in flats)
    exact = traffic(flats, stage=stage, ranks=ranks, gathers=[2] * len(flats))
    for kind, elements in nominal_traffic(parameters, ranks=ranks, stage=stage).items():
        assert elements <= exact[kind] <= elements * 1.01
