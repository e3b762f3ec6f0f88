"""Five classic leaks on a tiny model: each has its owner in the table, and the printed anatomy names the culprit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import onenth

BATCH = torch.ones(128, 64)
Step = Callable[[nn.Module, torch.optim.Optimizer, list[Tensor]], None]


def every_loss_in_a_list(model: nn.Module, optimizer: torch.optim.Optimizer, kept: list[Tensor]) -> None:
    loss = model(BATCH).square().mean()
    kept.append(loss + model(BATCH).mean())  # a second pass whose graph no backward frees
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def retain_graph(model: nn.Module, optimizer: torch.optim.Optimizer, kept: list[Tensor]) -> None:
    loss = model(BATCH).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()


def logits_for_metrics(model: nn.Module, optimizer: torch.optim.Optimizer, kept: list[Tensor]) -> None:
    logits = model(BATCH)
    kept.append(logits.detach())
    logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def foreach_temporaries(model: nn.Module, optimizer: torch.optim.Optimizer, kept: list[Tensor]) -> None:
    optimizer.defaults["foreach"] = optimizer.param_groups[0]["foreach"] = True
    optimizer.param_groups[0]["fused"] = False
    model(BATCH[:1]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def late_zero_grad(model: nn.Module, optimizer: torch.optim.Optimizer, kept: list[Tensor]) -> None:
    loss = model(BATCH).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("step", "owner", "words"),
    [
        (every_loss_in_a_list, "activations", "graphs of earlier forwards are still referenced"),
        (retain_graph, "activations", "retain_graph=True"),
        (logits_for_metrics, "outputs", "results of aten.addmm in forward of 2, held by the caller (logits"),
        (foreach_temporaries, "temporary", "_foreach_sqrt: fused=True, or foreach=False"),
        (late_zero_grad, "gradients", "alive during a forward though a step has used them: call zero_grad()"),
    ],
)
def test_the_culprit_is_named(step: Step, owner: str, words: str) -> None:
    """Two steps recorded after one that was not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    kept: list[Tensor] = []
    step(model, optimizer, kept)
    with onenth.record(model, optimizer) as anatomy:
        step(model, optimizer, kept)
        step(model, optimizer, kept)
    (line,) = [line for line in str(anatomy).splitlines() if words in line]
    assert line.startswith(f"- {owner}, ")


def test_a_sound_step_has_no_findings() -> None:
    """No line where nothing is wrong."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(BATCH).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with onenth.record(model, optimizer) as anatomy:
        step()
        step()
    assert anatomy.findings() == []
