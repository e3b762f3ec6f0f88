"""The recorder on one process: every byte once, from the moment it is taken to the moment it is given back."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import onenth
from onenth.anatomy.recorder import running
from onenth.anatomy.timeline import Kind
from onenth.states import Tier
from tests.distributed.live import LiveBytes


def mlp(width: int = 256) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), fused=True)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Callable[[], None]:
    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def recorded(step: Callable[[], object], model: nn.Module, optimizer: torch.optim.Optimizer | None) -> onenth.Anatomy:
    with onenth.record(model, optimizer) as anatomy:
        step()
    return anatomy


def assert_sound(anatomy: onenth.Anatomy) -> None:
    """Owners add up to the total at every event, and no storage lives twice or ends before it began."""
    series, totals = anatomy.timeline.series(), anatomy.totals()
    assert [sum(line[at] for line in series.values()) for at in range(len(totals))] == totals
    assert min(min(line) for line in series.values()) >= 0
    held: set[int] = set()
    for event in anatomy.timeline:
        assert (event.storage in held) == (event.kind is not Kind.ALLOCATION)
        (held.discard if event.kind is Kind.RELEASE else held.add)(event.storage)


def test_owners_of_a_plain_step() -> None:
    """Model states equal their equations to the byte; what autograd keeps is found by the module that keeps it."""
    model = mlp()
    optimizer = adamw(model)
    step = step_of(model, optimizer, torch.randn(32, 64))
    step()
    anatomy = recorded(step, model, optimizer)
    assert_sound(anatomy)
    count = 4 * sum(parameter.numel() for parameter in model.parameters())
    peaks = anatomy.owner_peaks
    for state in ("parameters", "gradients", "exp_avg", "exp_avg_sq"):
        assert peaks[state] == count
    assert anatomy.differences == {}
    assert "unexplained" not in peaks
    at_forward_end = max(at for at, event in enumerate(anatomy.timeline) if event.phase.startswith("forward"))
    kept = [
        anatomy.timeline.storages[n] for n, o in anatomy.timeline.alive(at_forward_end).items() if o == "activations"
    ]
    assert sorted((s.module, s.bytes) for s in kept) == [("", 32 * 64 * 4), ("1", 32 * 256 * 4), ("2", 32 * 256 * 4)]


def test_phases_are_named() -> None:
    """Forward and backward by module, loss, step, and what lies between."""
    model = mlp()
    optimizer = adamw(model)
    anatomy = recorded(step_of(model, optimizer, torch.randn(8, 64)), model, optimizer)
    phases = dict.fromkeys(event.phase for event in anatomy.timeline)
    assert list(phases) == [
        "between",
        "forward of 0",
        "forward of 1",
        "forward of 2",
        "loss",
        "backward of loss",
        "backward of 2",
        "backward of 1",
        "backward of 0",
        "optimizer step",
    ]
    assert anatomy.peak_moment in phases


def test_the_same_step_twice_gives_the_same_events() -> None:
    """Nothing in the record depends on addresses or time."""
    model = mlp()
    optimizer = adamw(model)
    step = step_of(model, optimizer, torch.randn(8, 64))
    step()
    first, second = (recorded(step, model, optimizer) for _ in range(2))
    assert first.timeline == second.timeline
    assert first.timeline.storages == second.timeline.storages


def test_recording_changes_nothing() -> None:
    """The recorded run's parameters have the bits of the plain run's."""
    plain, watched, batch = mlp(), mlp(), torch.randn(8, 64)
    for model, record in ((plain, False), (watched, True)):
        optimizer = adamw(model)
        step = step_of(model, optimizer, batch)
        for _ in range(3):
            recorded(step, model, optimizer) if record else step()
        assert "step" not in vars(optimizer)
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("foreach", [False, True])
def test_totals_are_the_allocators(foreach: bool) -> None:
    """The peak above what is held before is the one that PyTorch's profiler counts, to the byte."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    step = step_of(model, optimizer, torch.randn(32, 64))
    step()
    anatomy = recorded(step, model, optimizer)
    with LiveBytes() as live, live.phase("step"):
        step()
    before = next(at for at, event in enumerate(anatomy.timeline) if event.phase != "between") - 1
    assert anatomy.peak.total - anatomy.totals()[before] == pytest.approx(live.peak("step"), rel=1e-3)


def test_views_resizes_and_releases() -> None:
    """A view adds nothing, a storage resized in place counts at its new size, a released one not at all."""
    model = mlp()
    with onenth.record(model) as anatomy:
        tensor = torch.zeros(1000)
        view = tensor.view(10, 100)[2:].t()
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(8000)
        torch.ones(5000, out=tensor)
        other = torch.ones(3)
        del tensor, view, other
    assert_sound(anatomy)
    storages = anatomy.timeline.storages  # those that were there before have no operator
    sizes = [(event.kind.name, event.bytes) for event in anatomy.timeline if storages[event.storage].operator]
    assert sizes == [
        ("ALLOCATION", 4000),
        ("ALLOCATION", 0),
        ("RELEASE", 4000),
        ("ALLOCATION", 8000),
        ("RELEASE", 0),
        ("ALLOCATION", 20000),
        ("RELEASE", 8000),
        ("ALLOCATION", 12),
        ("RELEASE", 20000),
        ("RELEASE", 12),
    ]


def test_recomputed_activations_belong_to_the_backward_that_asked() -> None:
    """Under checkpointing only inputs are kept in between; what runs again is an activation until it is used."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([mlp() for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model = Checkpointed()
    anatomy = recorded(step_of(model, adamw(model), torch.randn(32, 64)), model, None)
    assert_sound(anatomy)
    forward = max(at for at, event in enumerate(anatomy.timeline) if event.phase.startswith("forward"))
    owners = anatomy.timeline.series()
    inputs, random_states = 2 * 32 * 64 * 4, 3 * torch.get_rng_state().nbytes
    last = 32 * 64 * 4  # the output, which the loss saves
    assert owners["activations"][forward + 1] == inputs + last + random_states
    recomputed = [event for event in anatomy.timeline if event.phase.startswith("recompute")]
    assert {event.owner for event in recomputed if event.bytes == 32 * 256 * 4} == {"activations"}


def test_autocast_copies_are_activations() -> None:
    """The 16-bit copies of weights that autocast makes are what autograd keeps."""
    model = mlp()
    optimizer = adamw(model)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(4, 64)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    anatomy = recorded(step, model, optimizer)
    assert_sound(anatomy)
    assert anatomy.differences == {}
    weight = 2 * 64 * 256  # of the second layer: the first one's input needs no gradient
    kept = [
        s for s in anatomy.timeline.storages if s.dtype == "bfloat16" and s.bytes == weight and s.shape == (64, 256)
    ]
    owners = {event.owner for event in anatomy.timeline if anatomy.timeline.storages[event.storage] in kept}
    assert kept
    assert "activations" in owners


def test_fake_tensors_give_the_real_step() -> None:
    """No byte is allocated, and the events are those of the real step."""
    real = mlp()
    optimizer = adamw(real)
    step = step_of(real, optimizer, torch.randn(32, 64))
    step()
    expected = recorded(step, real, optimizer)
    with FakeTensorMode():
        fake = mlp()
        optimizer = adamw(fake)
        step = step_of(fake, optimizer, torch.randn(32, 64))
        step()
        anatomy = recorded(step, fake, optimizer)
    elsewhere = ("other", Tier.DEVICE)  # real tensors that other modules of this process hold
    assert anatomy.peak.held == {key: count for key, count in expected.peak.held.items() if key != elsewhere}
    assert anatomy.peak_moment == expected.peak_moment
    assert anatomy.owner_peaks == {owner: count for owner, count in expected.owner_peaks.items() if owner != "other"}


def test_the_record_outlives_an_exception_and_a_file(tmp_path: Path) -> None:
    """What was recorded until an error is there, and comes back from JSON as it was."""
    model, recordings = mlp(), []

    def broken_step() -> None:
        with onenth.record(model) as anatomy:
            recordings.append(anatomy)
            model(torch.ones(4, 64))[100]

    with pytest.raises(IndexError):
        broken_step()
    (anatomy,) = recordings
    assert anatomy.error == "IndexError: index 100 is out of bounds for dimension 0 with size 4"
    assert anatomy.peak.activations > 0
    anatomy.save(tmp_path / "run.json")
    again = onenth.Anatomy.load(tmp_path / "run.json")
    assert again == anatomy
    assert str(again) == str(anatomy)
    assert again.by_module() == anatomy.by_module()


def test_a_recording_keeps_nothing_alive() -> None:
    """Model, graph and recorder end with the block, though no backward freed what the forward saved."""
    gone: list[weakref.ref[Any]] = []

    def step(model: nn.Module) -> None:
        output = model(torch.ones(2, 8))
        gone.append(weakref.ref(output.untyped_storage()))

    def run() -> Callable[[], Tensor]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Dropout())  # softmax saves its own output
        gone.extend(weakref.ref(parameter) for parameter in model.parameters())
        with onenth.record(model):
            gone.append(weakref.ref(running()))
            step(model)
            return torch.get_rng_state  # as torch._dynamo does that is imported meanwhile

    kept = run()
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)
    assert torch.equal(kept(), torch.get_rng_state())


def test_recordings_do_not_nest() -> None:
    """The inner one is refused, and the outer one goes on."""
    model = mlp()
    with onenth.record(model) as outer:
        with pytest.raises(onenth.AnatomyError, match="runs already"), onenth.record(model):
            pass
        model(torch.ones(4, 64))
    assert len(outer.timeline) > 4
    assert recorded(lambda: None, copy.deepcopy(model), None).peak.parameters == outer.peak.parameters


def test_host_memory_is_another_tier() -> None:
    """On a CPU everything is the training device's; the peak speaks of that tier alone."""
    model = mlp()
    anatomy = recorded(lambda: model(torch.ones(4, 64)), model, None)
    assert {tier for _, tier in anatomy.peak.held} == {Tier.DEVICE}
    assert anatomy.at(anatomy.peak_position, Tier.HOST) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not the JSON"),
        ("[]", "not the JSON"),
        ('{"schema": 99}', "schema 99"),
        ('{"schema": 1}', "'names'|'storages'|'events'|KeyError"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    """One line that names the file."""
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(onenth.AnatomyError, match=words) as caught:
        onenth.Anatomy.load(path)
    assert str(path) in str(caught.value)
