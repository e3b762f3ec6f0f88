"""Whether an optimizer is elementwise: the same on a whole parameter and on pieces of it.

Only then may each rank update its own pieces. It is tried out, not looked up: a class is run on a small parameter whole
and cut, and the results are compared. The verdict is kept by class and hyperparameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from onenth.config import Precision
from onenth.errors import ShardError
from onenth.model_states.optimizer_states import bare_copy

_SHAPE, _STEPS = (32, 24), 3
_verdicts: dict[Any, str | None] = {}


def check(optimizer: torch.optim.Optimizer, precision: Precision) -> None:
    """Raise ShardError, with the reason, if the optimizer cannot be run on pieces under this precision."""
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        key = (type(optimizer), repr(sorted(settings.items(), key=str)), precision)
        if key not in _verdicts:
            with _disable_current_modes():  # the trial needs real numbers, in a dry run too
                _verdicts[key] = _try(optimizer, settings, precision)
        if (reason := _verdicts[key]) is not None:
            raise ShardError(f"{type(optimizer).__name__} cannot be sharded: {reason}")


def _try(optimizer: torch.optim.Optimizer, settings: dict[str, Any], precision: Precision) -> str | None:
    dtype = precision.master or precision.parameters
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_SHAPE, generator=generator).to(dtype)
    gradients = [torch.randn(_SHAPE, generator=generator).to(dtype) for _ in range(_STEPS)]
    half = start.numel() // 2
    try:
        whole, states = _run(optimizer, settings, [start], [[gradient] for gradient in gradients])
        cut, _ = _run(
            optimizer,
            settings,
            [start.view(-1)[:half], start.view(-1)[half:]],
            [[gradient.view(-1)[:half], gradient.view(-1)[half:]] for gradient in gradients],
        )
    except Exception as error:  # an optimizer may fail on flat pieces in any way: the reason is handed to the user
        return (
            f"it does not run on flat pieces of parameters ({type(error).__name__}: {str(error).splitlines()[:1]}). "
            "Sharding needs an elementwise optimizer, such as AdamW, SGD or RMSprop"
        )
    if not torch.allclose(whole.view(-1).float(), cut.float(), rtol=1e-5, atol=1e-7):
        return (
            "it is not elementwise: cutting a parameter changes its result. Sharding needs an optimizer that treats "
            "each element by itself, such as AdamW, SGD or RMSprop"
        )
    return _narrow_states(states, start, precision)


def _narrow_states(states: dict[str, Any], start: torch.Tensor, precision: Precision) -> str | None:
    wrong = {
        f"{name} ({value.dtype})"
        for name, value in states.items()
        if isinstance(value, torch.Tensor)
        and value.numel() > 1
        and (
            value.numel() != start.numel()
            or value.dtype.itemsize < min(start.dtype.itemsize, precision.moments.itemsize)
        )
    }
    if not wrong:
        return None
    return (
        f"it keeps {', '.join(sorted(wrong))}, the precision says {precision.moments}: small updates vanish in narrow "
        "states. Use an optimizer that keeps them in the parameters' dtype; onenth.Precision(moments=...) says what "
        "they are stored in"
    )


def _run(
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    start: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The parameter after some steps, each piece in a call of its own as in the engine, and the first piece's state."""
    runner = bare_copy(optimizer)
    pieces = [nn.Parameter(part.clone()) for part in start]
    for piece in pieces:
        for had in list(optimizer.state.values())[:1]:  # states that a class makes when it is built
            runner.state[piece] = {name: _like(value, piece) for name, value in had.items()}
    for step in gradients:
        for piece, gradient in zip(pieces, step, strict=True):
            piece.grad = gradient.clone()
            runner.param_groups = [{**settings, "params": [piece]}]
            type(optimizer).step(runner)
        settings = {key: value for key, value in runner.param_groups[0].items() if key != "params"}
    return torch.cat([piece.detach().view(-1) for piece in pieces]), dict(runner.state.get(pieces[0], {}))


def _like(value: Any, piece: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.full_like(piece, 0.1) if value.numel() > 1 else torch.zeros(value.shape, dtype=value.dtype)
