"""Recording a step: `with record(model, optimizer) as anatomy`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from onenth.anatomy.anatomy import Anatomy
from onenth.anatomy.attribution import attribute
from onenth.anatomy.expected import expected
from onenth.anatomy.out_of_memory import raise_explained
from onenth.anatomy.owners import Owners
from onenth.anatomy.phases import Phases
from onenth.anatomy.recorder import Recorder, running, set_running
from onenth.errors import AnatomyError
from onenth.residual_states.out_of_memory import is_out_of_memory


@contextmanager
def record(
    model: nn.Module, optimizer: Any = None, *, on_oom: Callable[[Anatomy], None] | None = None
) -> Iterator[Anatomy]:
    """Record what happens to memory inside: any number of steps, sharded or plain, on real or on fake tensors.

    model: its modules name phases and activations. optimizer: its `step` is a phase; its states are owners.
    on_oom: called with the anatomy if what is inside runs out of memory; the error goes on, explained.

    The anatomy is complete when the block ends, by an exception too: then it holds what came before it.
    Raises AnatomyError inside another recording.
    """
    if running() is not None:
        raise AnatomyError("a recording runs already, and recordings do not nest")
    device = _device(model)
    phases = Phases(model)
    recorder = Recorder(phases, device)
    owners = Owners(recorder, phases, model, optimizer)
    anatomy = Anatomy(device=device, title=phases.title)
    anatomy.stage = None if owners.engine is None else owners.engine.config.stage
    if dist.is_initialized():
        anatomy.rank, anatomy.ranks = dist.get_rank(), dist.get_world_size()
    try:
        with ExitStack() as stack:
            stack.callback(_finish, anatomy, recorder, phases)
            set_running(recorder)
            stack.callback(set_running, None)
            stack.callback(
                lambda: setattr(anatomy, "expected", expected(owners.engine, model, optimizer, owners.backwards))
            )
            recorder.open()
            stack.callback(recorder.close)
            phases.open()
            stack.callback(phases.close)
            stack.callback(owners.close)
            owners.open()
            yield anatomy
    except BaseException as error:
        anatomy.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if on_oom is not None and is_out_of_memory(error):
            on_oom(anatomy)
        raise_explained(error, "a part of the step", model, recorder)
        raise


def _finish(anatomy: Anatomy, recorder: Recorder, phases: Phases) -> None:
    anatomy.timeline = attribute(recorder.tape, phases.known, phases.parts)


def _device(model: nn.Module) -> str:
    """The device type that the model trains on."""
    engine = model.__dict__.get("_onenth")
    if engine is not None:
        return str(engine.comm.device.type)
    found = [tensor.device.type for tensor in (*model.parameters(), *model.buffers())]
    return next((kind for kind in found if kind != "meta"), "cpu")
