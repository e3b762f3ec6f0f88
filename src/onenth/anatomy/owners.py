"""Owners: who says what a storage is. The engine's ledger where there is one; else model, optimizer and their hooks."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from onenth.anatomy.phases import Phases
from onenth.anatomy.recorder import Recorder
from onenth.engine.engine import Engine
from onenth.states import ModelState, ResidualState, Tier

_NODES_WITH_FORWARDS = ("CheckpointFunction", "NoopSaveInputs")  # looking at what they saved would run a forward


class Owners:
    """Labels what a recorder sees, for one model and its optimizer.

    engine: of a sharded model; its ledger is believed. None: parameters, gradients and states are the model's own.
    backwards: the most that a step had; the equations' gradients depend on it.
    """

    def __init__(self, recorder: Recorder, phases: Phases, model: nn.Module, optimizer: Any) -> None:
        self.recorder, self.phases, self.model, self.optimizer = recorder, phases, model, optimizer
        found = model.__dict__.get("_onenth")
        self.engine = found if isinstance(found, Engine) else None
        self.backwards = 1
        self._undo: list[Callable[[], None]] = []

    def open(self) -> None:
        """Label what exists, and from here on what comes."""
        gc.collect()  # what only a cycle still holds is no part of the step
        self._follow_ledger()
        self._label_model()
        self._label_optimizer()
        held = list(self._held())
        for tensor in held:
            self._label(tensor, ResidualState.OTHER)
        for tensor in _saved_behind(held):
            self.recorder.keep(tensor, "(a graph made before)")
        self._follow_inputs()
        self._follow_gradients()
        self._follow_steps()

    def close(self) -> None:
        """Label what has come last, and follow no more."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._label_model()
        self._label_optimizer()

    def _held(self) -> Iterator[torch.Tensor]:
        """The tensors that Python holds on the device; on fake tensors, the fake ones."""
        fake = any(isinstance(parameter, FakeTensor) for parameter in self.model.parameters())
        for one in gc.get_objects():
            kind = type(one)  # some objects warn when they are asked what they are an instance of
            if not issubclass(kind, torch.Tensor) or one.device.type != self.recorder.device:
                continue
            if isinstance(one, FakeTensor) == fake:
                yield one

    def _follow_ledger(self) -> None:
        if self.engine is None:
            return
        ledger, device = self.engine.ledger, self.engine.comm.device

        def registered(tensor: torch.Tensor, state: str, tier: Tier) -> None:
            self.recorder.note(tensor, str(state))

        for storage, state, _ in ledger.storages():
            self.recorder.note_storage(storage, str(state), device)
        ledger.observers.append(registered)
        self._undo.append(functools.partial(ledger.observers.remove, registered))

    def _label_model(self) -> None:
        for tensor in self.model.buffers():
            self._label(tensor, ResidualState.BUFFERS)
        if self.engine is not None:
            return
        for parameter in self.model.parameters():
            self._label(parameter, ModelState.PARAMETERS)
            if parameter.grad is not None:
                self._label(parameter.grad, ModelState.GRADIENTS)

    def _label_optimizer(self) -> None:
        if self.engine is not None or self.optimizer is None:
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:  # those that the model does not know are its master copies
                self._label(parameter, ModelState.MASTER)
                if parameter.grad is not None:
                    self._label(parameter.grad, ModelState.GRADIENTS)
        for state in self.optimizer.state.values():
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    self._label(value, str(name))

    def _count_backwards(self) -> None:
        flats = [] if self.engine is None else self.engine.flats()
        counts = [flat.gradients.backwards for flat in flats if flat.gradients is not None]
        self.backwards = max([self.backwards, *counts])

    def _label(self, tensor: torch.Tensor, state: str) -> None:
        if self.recorder.label(tensor) in (None, ResidualState.OTHER):
            self.recorder.note(tensor, str(state))

    def _follow_inputs(self) -> None:
        def called(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._label_model()
            for tensor in _within((args, kwargs)):
                if tensor.grad_fn is None:
                    self._label(tensor, ResidualState.INPUTS)

        handle = self.model.register_forward_pre_hook(called, with_kwargs=True, prepend=True)
        self._undo.append(handle.remove)

    def _follow_gradients(self) -> None:
        if self.engine is not None:
            return

        def accumulated(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self._label(parameter.grad, ModelState.GRADIENTS)

        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                self._undo.append(parameter.register_post_accumulate_grad_hook(accumulated).remove)

    def _follow_steps(self) -> None:
        if self.optimizer is None:
            return
        plain, own = self.optimizer.step, "step" in vars(self.optimizer)

        @functools.wraps(plain)
        def step(*args: Any, **kwargs: Any) -> Any:
            self._count_backwards()
            self._label_optimizer()
            self.phases.enter_step()
            try:
                return plain(*args, **kwargs)
            finally:
                self._label_optimizer()
                self.phases.leave_step()

        self.optimizer.step = step
        self._undo.append(
            functools.partial(setattr, self.optimizer, "step", plain)
            if own
            else functools.partial(delattr, self.optimizer, "step")
        )


def _within(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a batch: in tuples, lists, dicts, and what behaves like a dict."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _within(one)
    elif hasattr(value, "values") and callable(value.values):
        for one in value.values():
            yield from _within(one)


def _saved_behind(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What the graphs behind tensors keep for a backward that has not run."""
    seen: set[Any] = set()
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
        yield from _saved_by(node)


def _saved_by(node: Any) -> Iterator[torch.Tensor]:
    if any(name in node.name() for name in _NODES_WITH_FORWARDS):
        return
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                yield from _within(getattr(node, name))
            except RuntimeError:  # a backward has freed them
                return
