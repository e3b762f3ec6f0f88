"""A shortage: what was asked for when memory ran out, where, and what held the bytes then.

With a recording that is the record. Without one the ledger knows model states, gathered units and scratch to the byte;
activations, and all that is not the engine's, are what is left of the bytes in use.
"""

from __future__ import annotations

import resource
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from onenth.anatomy.anatomy import Anatomy
from onenth.anatomy.attribution import attribute
from onenth.anatomy.recorder import Recorder
from onenth.engine.engine import Engine
from onenth.residual_states.out_of_memory import asked_bytes
from onenth.states import ResidualState, Tier


@dataclass(frozen=True)
class Shortage:
    """Why an allocation failed. Bytes are those on the device that the model trains on.

    asked: bytes; None: the allocator didn't say. where: part of the step, and module.
    held: bytes in use by owner. capacity: bytes that there are; None: unknown. limit: what says so.
    modules: activation bytes by the module that keeps them, where a recording says so.
    how: how activations are known: "recorded", or by subtraction from what.
    """

    asked: int | None
    where: str
    held: dict[str, int]
    capacity: int | None
    limit: str
    how: str
    modules: dict[str, int] = field(default_factory=dict)

    @property
    def in_use(self) -> int:
        """Bytes in use."""
        return sum(self.held.values())

    @property
    def missing(self) -> int:
        """Bytes that were missing for the allocation."""
        asked = self.asked or 0
        return asked if self.capacity is None else max(0, self.in_use + asked - self.capacity)


def find(error: BaseException, part: str, model: nn.Module, recorder: Recorder | None) -> Shortage:
    """What can be known about an out-of-memory error, as long as its traceback keeps the tensors of the step alive.

    part: of the step that the error ended: "forward", "backward", "optimizer step".
    """
    engine = model.__dict__.get("_onenth")
    if recorder is not None:
        return _recorded(error, part, model, engine, recorder)
    where = _place(error, part, model, engine)
    held = {} if engine is None else _known(engine)
    total, how = _in_use(engine, model)
    held[str(ResidualState.ACTIVATIONS)] = max(0, total - sum(held.values()))
    return Shortage(asked_bytes(error), where, held, *_capacity(engine), how)


def _recorded(error: BaseException, part: str, model: nn.Module, engine: Engine | None, recorder: Recorder) -> Shortage:
    failure, phases = recorder.failure, recorder.phases
    position = len(recorder.tape.marks) if failure is None else failure.position
    where = _place(error, part, model, engine) if failure is None else failure.phase
    anatomy = Anatomy(attribute(recorder.tape.until(position), phases.known, phases.parts))
    last = len(anatomy.timeline) - 1
    held = {state: count for (state, _), count in anatomy.at(last if last >= 0 else None).items()}
    modules: Counter[str] = Counter()
    for number, owner in (anatomy.timeline.alive(last) if last >= 0 else {}).items():
        storage = anatomy.timeline.storages[number]
        if owner == ResidualState.ACTIVATIONS and storage.tier is Tier.DEVICE:
            modules[storage.module] += storage.bytes
    return Shortage(asked_bytes(error), where, held, *_capacity(engine), "recorded", dict(modules))


def _known(engine: Engine) -> dict[str, int]:
    return {state: count for (state, tier), count in engine.ledger.held().items() if tier is Tier.DEVICE}


def _in_use(engine: Engine | None, model: nn.Module) -> tuple[int, str]:
    """Bytes in use, and how that is known."""
    if engine is not None and engine.cap is not None:
        return engine.cap.held, "what max_bytes counts, less the other rows"
    if _device(engine, model).type != "cpu":
        return int(torch.accelerator.memory_allocated()), "what the allocator has given out, less the other rows"
    return _resident(), "resident memory less the other rows: the rest of the process counts too"


def _device(engine: Engine | None, model: nn.Module) -> torch.device:
    if engine is not None:
        return engine.comm.device
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _capacity(engine: Engine | None) -> tuple[int | None, str]:
    if engine is not None and engine.config.max_bytes is not None:
        return engine.config.max_bytes, "max_bytes"
    if engine is not None and engine.comm.device.type == "cuda":  # not yet run on a GPU
        free, _ = torch.cuda.mem_get_info(engine.comm.device)
        return int(torch.cuda.memory_reserved(engine.comm.device)) + int(free), "what the device leaves to PyTorch"
    return None, ""


def _resident() -> int:
    """Bytes of this process in memory; where the system doesn't say, the most that it ever had."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _place(error: BaseException, part: str, model: nn.Module, engine: Engine | None) -> str:
    """The part of the step and the innermost module of the model that the traceback leads through, or the units."""
    names = {module: name for name, module in model.named_modules()}
    found = None
    for frame_self in _selves(error.__traceback__):
        if isinstance(frame_self, nn.Module) and frame_self in names:
            found = names[frame_self]
    if engine is not None and engine.in_backward:
        running = [activity.unit.name for activity in engine.activities if activity.running]
        found = found or ", ".join(running[-1:])
        part = "backward"
    return part if found is None else f"{part} of {found or type(model).__name__}"


def _selves(traceback: TracebackType | None) -> list[Any]:
    found = []
    while traceback is not None:
        found.append(traceback.tb_frame.f_locals.get("self"))
        traceback = traceback.tb_next
    return found
