"""Real models, plain and sharded: owners add up, model states equal the equations, nothing stays unexplained."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import onenth
from onenth.states import Tier
from tests.anatomy.test_recorder import assert_sound
from tests.distributed.live import LiveBytes
from tests.distributed.pool import Pool
from tests.distributed.real_models.cases import CASES, Case

STAGES = (None, 0, 1, 2, 3)  # None: plain PyTorch

#: What operators allocate and free inside, by the size of these tiny models: attention's, 16-bit matrix products'.
KERNELS = 32 * 1024


def _run(case: Case, group: dist.ProcessGroup, stage: int | None) -> tuple[onenth.Anatomy, int]:
    """The third step's anatomy, and the fourth's peak above rest by the profiler."""
    model = case.build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    if stage is not None:
        model, optimizer = onenth.shard(model, optimizer, stage=stage, precision="bf16", group=group)

    def step(number: int) -> None:
        loss = model(**case.batch(number, dist.get_rank(group))).loss
        loss.backward() if stage is None else optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    step(1)
    with onenth.record(model, optimizer) as anatomy:
        step(2)
    with LiveBytes() as live, live.phase("step"):
        step(3)
    return anatomy, live.peak("step")


def _check(group: dist.ProcessGroup, name: str) -> None:
    for stage in STAGES:
        anatomy, allocated = _run(CASES[name], group, stage)
        where = f"{name}, stage {stage}"
        assert_sound(anatomy)
        assert anatomy.differences == {}, where
        assert set(anatomy.expected) >= {(state, Tier.DEVICE) for state in ("gradients", "exp_avg", "exp_avg_sq")}
        unexplained = anatomy.owner_peaks.get("unexplained", 0)
        assert unexplained < 1e-3 * anatomy.peak.total, f"{where}: {unexplained} bytes unexplained"
        rest = next(at for at, event in enumerate(anatomy.timeline) if event.phase != "between") - 1
        recorded = anatomy.peak.total - anatomy.totals()[rest]
        assert abs(recorded - allocated) <= KERNELS, f"{where}: {recorded} recorded, {allocated} allocated"


@pytest.mark.parametrize("name", CASES)
def test_every_model_at_every_stage(pool: Pool, name: str) -> None:
    """Two ranks, each its own record."""
    pool.run(2, _check, name, timeout=120)
