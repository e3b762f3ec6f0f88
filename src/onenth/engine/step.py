"""The step: one agreement of all ranks about the gradients, then each rank updates its N-th.

The agreement is one small message a rank: squared norms by flat buffer, which parameters have gradients, and who holds
gradients that were not exchanged yet. All ranks read the same table, so all decide alike: the norm, whether to skip,
which parameters to leave alone (no gradient on any rank: the optimizer's own rule for `grad is None`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from onenth.engine.engine import Engine
from onenth.errors import ShardError
from onenth.model_states.unit import Flat


@dataclass(frozen=True)
class Agreement:
    """What all ranks know before a step.

    norm: the global norm of the gradients as they are stored (scaled, in fp16).
    has_gradient: by trainable flat buffer and parameter, whether any rank had one.
    culprit: where it is not finite: the first offending parameter and the rank its gradient came from.
    """

    norm: float
    has_gradient: list[list[bool]]
    culprit: str | None

    @property
    def finite(self) -> bool:
        """Whether the step may be taken."""
        return math.isfinite(self.norm)


def agree(engine: Engine) -> Agreement:
    """Exchange what was not exchanged yet on any rank, and agree on norm and presence of gradients."""
    engine.exchanger.settle()
    flats = [flat for flat in engine.flats() if flat.gradients is not None]
    table = _table(engine, flats)
    if engine.comm.simulated:  # no number can be read: all ranks are taken to be like this one, and finite
        return Agreement(0.0, [list(flat.gradients.seen) for flat in flats if flat.gradients is not None], None)
    late = [a for i, a in enumerate(engine.activities) if a.unit.trainable and bool(table[:, len(flats) + i].any())]
    if late:
        for activity in reversed(late):
            engine.exchanger.exchange(activity)
        engine.exchanger.settle()
        table = _table(engine, flats)
    norm = math.sqrt(float(table[:, : len(flats)].sum()))
    presence = table[:, len(flats) + len(engine.units) :].any(0).tolist()
    has_gradient = []
    for flat in flats:
        count = len(flat.parameters.parameters)
        has_gradient.append([bool(one) for one in presence[:count]])
        presence = presence[count:]
    if math.isfinite(norm):
        return Agreement(norm, has_gradient, None)
    return _look_closer(engine, flats, has_gradient)


def _table(engine: Engine, flats: list[Flat]) -> torch.Tensor:
    """(N, flats + units + parameters) fp64 on the CPU: squared norms, unexchanged units, gradients seen."""
    norms = [flat.gradients.squared_norm for flat in flats if flat.gradients is not None]
    marks = [float(unit.has_unexchanged) for unit in engine.units]
    marks += [float(seen) for flat in flats if flat.gradients is not None for seen in flat.gradients.seen]
    device = engine.comm.device
    rest = torch.tensor(marks, dtype=torch.float64, device=device)
    mine = torch.cat([torch.stack(norms), rest]) if norms else rest
    return engine.comm.agree(mine, "the gradients before a step").cpu()


def _look_closer(engine: Engine, flats: list[Flat], has_gradient: list[list[bool]]) -> Agreement:
    """The norm is not finite: find the first Inf or NaN and its sender, or a sum of squares that overflowed fp32."""
    squares, found = 0.0, (-1.0, -1.0, -1.0)
    for position, flat in enumerate(flats):
        assert flat.gradients is not None
        if flat.gradients.backwards == 0:
            continue
        part, bad = flat.gradients.recount()
        squares += part
        if bad is not None and found[0] < 0:
            sender = flat.gradients.sender_of_nonfinite()
            found = (float(position), float(bad), -1.0 if sender is None else float(sender))
    mine = torch.tensor([squares, *found], dtype=torch.float64, device=engine.comm.device)
    table = engine.comm.agree(mine, "the gradients that are not finite").cpu()
    offenders = [(int(row[1]), int(row[2]), int(row[3])) for row in table.tolist() if row[1] >= 0]
    if not offenders:
        return Agreement(math.sqrt(float(table[:, 0].sum())), has_gradient, None)
    position, parameter, sender = min(offenders)
    name = flats[position].parameters.names[parameter]
    origin = f"from rank {sender}" if sender >= 0 else "from the sum over ranks, which overflowed"
    return Agreement(float("nan"), has_gradient, f"{name} {origin}")


def check_synced(engine: Engine) -> None:
    """Raise ShardError if gradients were held back by `no_sync` and never exchanged."""
    if engine.unsynced:
        raise ShardError(
            "step() with gradients that were never exchanged: the last backward before a step must run outside "
            "`onenth.no_sync(model)`"
        )
