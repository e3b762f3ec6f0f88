"""Order and lifetime: late messages and poisoned memory change no bit, and nothing piles up."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onenth
from onenth.states import ResidualState
from tests.distributed.hazards import late_messages, poisoned_memory
from tests.distributed.live import LiveBytes, live_tensors
from tests.distributed.pool import Pool
from tests.distributed.sharded import ShardedResult, different_bits, start, step, train

SETTINGS = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, recomputed": {"stage": 3, "activations": "recompute"},
    "stage 3, no prefetch": {"stage": 3, "prefetch": False},
}

#: Bytes by which resident memory may grow. glibc before 2.38 reuses no freed blocks for aligned requests, which
#: are all of PyTorch's, so that its heap wanders by some megabytes though nothing is kept. What would leak
#: tensors shows exactly in their number and bytes; this bounds the rest: buffers of the transport, say.
NOISE = 32 * 2**20


def _train_under(
    group: dist.ProcessGroup, task: str, hazards: tuple[str, ...]
) -> dict[str, tuple[ShardedResult, set[str]]]:
    """Train at every setting under hazards; each result with the hazards that acted."""
    results = {}
    for label, settings in SETTINGS.items():
        with ExitStack() as stack:
            acts: dict[str, list[Any]] = {}
            if "late" in hazards:
                acts["late"] = stack.enter_context(late_messages(seed=dist.get_rank(group)))
            if "poison" in hazards:
                acts["poison"] = stack.enter_context(poisoned_memory())
            result = train(group, task, steps=3, backwards=2, precision="bf16", **settings)
            results[label] = result, {hazard for hazard, acted in acts.items() if acted}
    return results


def _message_read_late(group: dist.ProcessGroup) -> float:
    """Overwrite a tensor that is still being sent: the mistake that late messages are there to show."""
    tensor = torch.ones(4)
    with late_messages(seed=0, most_seconds=0.1):
        if dist.get_rank(group) == 0:
            work = dist.isend(tensor, group=group, group_dst=1, tag=5)
            tensor.fill_(2.0)
        else:
            work = dist.irecv(tensor, group=group, group_src=0, tag=5)
        work.wait()
    return tensor.sum().item()


def test_late_messages_show_a_write_too_early(pool: Pool) -> None:
    """The hazard itself: a tensor changed before its message was waited for arrives changed."""
    assert pool.run(2, _message_read_late)[1] == 8.0


def test_poison_shows_a_read_too_late() -> None:
    """The hazard itself: resized storages and new tensors are NaN until they are written."""
    tensor = torch.ones(1000)
    with poisoned_memory() as poisoned:
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(4000)
        assert tensor.isnan().all()
        assert torch.empty(100).isnan().all()
    assert poisoned == [4000, 4000]


@pytest.mark.parametrize(
    ("ranks", "hazards"),
    [
        (2, ("late", "poison")),
        *(
            pytest.param(ranks, hazards, marks=pytest.mark.slow)
            for ranks in (2, 3)
            for hazards in (("late",), ("poison",), ("late", "poison"))
            if (ranks, len(hazards)) != (2, 2)
        ),
    ],
    ids=lambda value: " and ".join(value) if isinstance(value, tuple) else None,
)
def test_hazards_change_no_bit(pool: Pool, ranks: int, hazards: tuple[str, ...]) -> None:
    """Messages that leave late, poisoned memory, and both: the bits of an undisturbed run, at every stage."""
    undisturbed = pool.run(ranks, _train_under, "untied", ())[0]
    disturbed = pool.run(ranks, _train_under, "untied", hazards)[0]
    for label, (result, acted) in disturbed.items():
        different = different_bits(result.parameters, undisturbed[label][0].parameters)
        assert not different, f"{label} differs in {different}"
        assert result.norms == undisturbed[label][0].norms, label
        missing = set(hazards) - acted
        assert not missing or not label.startswith("stage 3"), f"{label}: {missing} never acted"


def _what_is_left(group: dist.ProcessGroup) -> dict[str, list[tuple[int, int]]]:
    """At stage 3 and each phase: bytes gathered by the ledger, and the largest storage of any parameter."""
    left = {}
    for activations in ("keep", "recompute"):
        model, optimizer = start(group, "tied", stage=3, precision="bf16", activations=activations)
        moments = []
        for number in range(3):
            step(group, "tied", model, optimizer, number)
            optimizer.zero_grad()
            report = onenth.memory_report(model, optimizer)
            parameters = [p for settings in optimizer.param_groups for p in settings["params"]]
            largest = max(p.untyped_storage().nbytes() for p in parameters)
            passing = (ResidualState.GATHERED, ResidualState.LOCAL_GRADIENTS, ResidualState.RECEIVE)
            moments.append((sum(getattr(report, state) for state in passing), largest))
        left[activations] = moments
    return left


def test_nothing_stays_gathered(pool: Pool) -> None:
    """After a step at stage 3 no unit is whole: nothing gathered, parameters hold a placeholder's bytes."""
    for label, moments in pool.run(2, _what_is_left)[0].items():
        for gathered, largest in moments:
            assert gathered == 0, label
            assert largest <= 64 * 2, label  # one element of the unit's row of placeholders


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def _long_run(group: dist.ProcessGroup, stage: int) -> dict[str, tuple[int, int]]:
    """Before and after many steps: live tensors, live bytes, resident bytes."""
    model, optimizer = start(group, "tied", stage=stage, precision="bf16", max_grad_norm=1.0)

    def run(steps: int) -> None:
        for number in range(steps):
            step(group, "tied", model, optimizer, number)
            optimizer.zero_grad()

    run(20)
    tensors, resident = live_tensors(), _resident_bytes()
    run(100)
    tensors_after, resident_after = live_tensors(), _resident_bytes()
    with LiveBytes() as live:
        run(1)
        with live.phase("steps"):
            run(5)
    return {
        "tensors": (tensors, tensors_after),
        "bytes": (live.before("steps"), live.after("steps")),
        "resident": (resident, resident_after),
    }


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_memory_is_flat_over_100_steps(pool: Pool, stage: int) -> None:
    """Live tensors and live bytes are exactly the same after 100 steps; resident memory moves by noise."""
    for found in pool.run(2, _long_run, stage):
        assert found["tensors"][0] == found["tensors"][1]
        assert found["bytes"][0] == found["bytes"][1]
        assert found["resident"][1] - found["resident"][0] < NOISE
