"""How the model is cut into units, and the limits on what one rank holds."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import onenth
from tests.distributed.interface import toys
from tests.distributed.interface.compare import entries_that_differ, relative_distance
from tests.distributed.pool import Pool


def is_linear(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and name != "head"


def every_module(name: str, module: nn.Module) -> bool:
    return True


RULES: dict[str, dict[str, Any]] = {
    "auto": {},
    "a class": {"units": toys.Block},
    "classes": {"units": (nn.LayerNorm, nn.Linear)},
    "a function": {"units": is_linear},
    "every module": {"units": every_module},
    "split": {"max_unit_bytes": 700},
    "kept gathered": {"keep_gathered": ("blocks.0", "blocks.2")},
}


def results_by_rule(group: dist.ProcessGroup, stage: int) -> tuple[float, dict[str, list[str]]]:
    """(distance of "auto" to plain training, entries in which each rule's bits differ from it); at rank 0."""
    states = {rule: toys.trained_state(group, stage=stage, **settings) for rule, settings in RULES.items()}
    if group.rank() != 0:
        return 0.0, {}
    auto = states["auto"]
    distance = relative_distance(auto, toys.train_plain(group.size()))
    return distance, {rule: entries_that_differ(auto, state) for rule, state in states.items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_how_a_model_is_cut_changes_no_bit(pool: Pool, stage: int) -> None:
    """Units by class, by function, split or kept gathered train to the bits of "auto", which are right."""
    distance, differences = pool.run(2, results_by_rule, stage)[0]
    assert distance <= 1e-5
    assert differences == {rule: [] for rule in RULES}


def check_rules_without_effect(group: dist.ProcessGroup) -> None:
    with pytest.raises(onenth.OnenthError, match="Conv2d"):
        toys.shard_toy(group, units=nn.Conv2d)
    with pytest.raises(onenth.OnenthError) as raised:
        toys.shard_toy(group, keep_gathered=("blocks.0", "blocks.9", "haed"))
    assert "blocks.9" in str(raised.value)
    assert "haed" in str(raised.value)


def test_rules_that_match_nothing_are_errors(pool: Pool) -> None:
    """A unit class or a kept unit's name that the model doesn't have is named, all of them at once."""
    pool.run(2, check_rules_without_effect)


def gathered_elements(group: dist.ProcessGroup, keep_gathered: tuple[str, ...]) -> int:
    """Elements that this rank sent to gather parameters in one forward and backward at stage 3."""
    model, optimizer = toys.shard_toy(group, keep_gathered=keep_gathered)
    counters = model.__dict__["_onenth"].comm.counters
    before = counters["gather"]
    optimizer.backward(toys.loss_of(model, toys.batch(0, group.rank())))
    return int(counters["gather"] - before)


def test_kept_units_are_gathered_once(pool: Pool) -> None:
    """A kept unit isn't gathered again in backward: traffic falls by just its elements and padding."""
    usual = pool.run(2, gathered_elements, ())[0]
    kept = pool.run(2, gathered_elements, ("blocks.1",))[0]
    # two norm vectors, a weight and a bias, each in multiples of 64 elements; half of it is this rank's
    assert usual - kept == (64 + 64 + 448 + 64) // 2


LAYERS = 16


class Deep(nn.Module):
    """One big container of Linears."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(LAYERS)))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs)


LINEAR_BYTES = 64 * 64 * 4


def is_body(name: str, module: nn.Module) -> bool:
    return name == "body"


def losses_of_deep(group: dist.ProcessGroup, **settings: Any) -> tuple[list[float], int]:
    """Two steps' losses, and the most bytes that were held in them, but for those of other tests in this process."""
    with onenth.record(nn.Linear(1, 1)) as before:
        pass
    strangers = before.owner_peaks.get("other", 0)
    model: nn.Module = Deep()
    optimizer = toys.sgd(list(model.parameters()))
    model, sharded = onenth.shard(model, optimizer, group=group, stage=3, precision="fp32", units=is_body, **settings)
    losses = []
    with onenth.record(model, sharded) as anatomy:
        for step in range(2):
            source = torch.Generator().manual_seed(10 * step + group.rank())
            loss = F.mse_loss(model(torch.randn(2, 64, generator=source)), torch.ones(2, 64))
            sharded.backward(loss)
            sharded.step()
            sharded.zero_grad()
            losses.append(loss.item())
    return losses, anatomy.peak.total - strangers


def refusal_of_deep(group: dist.ProcessGroup, **settings: Any) -> str:
    """The error's text; nothing of the model is left, nor its cap."""
    with pytest.raises(onenth.OutOfMemoryError) as caught:
        losses_of_deep(group, **settings)
    text = str(caught.value)
    del caught
    gc.collect()  # the frames of the traceback, which held the graph
    gc.collect()  # the model, which the graph held
    return text


def check_max_bytes(group: dist.ProcessGroup) -> None:
    split = {"max_unit_bytes": LINEAR_BYTES}
    free, peak = losses_of_deep(group, **split)
    assert losses_of_deep(group, max_bytes=peak, **split)[0] == free
    gc.collect()
    for settings in ({"max_bytes": peak - 1, **split}, {"max_bytes": peak}):  # the body as one unit is more
        text = refusal_of_deep(group, **settings)
        assert "(max_bytes)" in text, text
        assert "All ranks ran out" in text, text
    text = refusal_of_deep(group, max_bytes=1000)
    assert "states do not fit" in text, text
    assert "max_bytes is 1000" in text, text
    assert losses_of_deep(group, **split)[0] == free  # the group is still of use


def test_max_bytes_and_max_unit_bytes(pool: Pool) -> None:
    """A cap of what the job holds at its peak lets it run, one byte less does not; larger units need more."""
    pool.run(2, check_max_bytes)
