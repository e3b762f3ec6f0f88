"""Phases: which part of a step runs now, and for which module.

In a forward it is the innermost module that was called. In a backward it is the module whose forward made the graph
node that runs: nodes are numbered in the order in which a thread makes them, and every call of a module notes which
numbers it used. A forward that runs inside a backward, with gradients enabled there, is a recomputation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

_NO_NUMBER = 2**63  # nodes that accumulate gradients have the largest number of all


class Part(StrEnum):
    """The parts of a step."""

    BETWEEN = "between"
    FORWARD = "forward"
    LOSS = "loss"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    STEP = "optimizer step"


@dataclass(frozen=True)
class Phase:
    """A part of a step, and the module it works for (its path in the model; "" outside of any)."""

    part: Part
    module: str
    name: str


class Phases:
    """Follows a step through the calls of modules, the graph and the optimizer.

    parts: of the turns so far. A turn is one forward of the model, loss, backward, step, or what lies between; 0: the
        time before all.
    run: counts recomputations: what one unpacked activation makes run again.
    """

    def __init__(self, model: nn.Module) -> None:
        self.paths = {module: path for path, module in model.named_modules()}
        self.model, self.title = model, type(model).__name__
        self.known: list[Phase] = []
        self._numbers: dict[tuple[Part, str], int] = {}
        self._stack: list[str] = []
        self._roots = 0
        self._steps = 0
        self._idle = Part.BETWEEN
        self._part = Part.BETWEEN
        self.parts = [Part.BETWEEN]
        self.run = 0
        self._starts: list[int] = [0]  # numbers of the first node, by call or return, and whose nodes follow
        self._owners: list[str | None] = [None]
        self._last: str | None = None
        self._base = 0
        self._node: Any = None
        self._undo: list[Callable[[], None]] = []

    def open(self) -> None:
        """Start to follow."""
        handles = [
            module_hooks.register_module_forward_pre_hook(self._called),
            module_hooks.register_module_forward_hook(self._returned, always_call=True),
        ]
        self._undo = [handle.remove for handle in handles]

    def close(self) -> None:
        """Stop following."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._node = None  # it holds its graph

    def _called(self, module: nn.Module, _: Any) -> None:
        path = self.paths.get(module)
        if path is None:
            path = f"({type(module).__name__})" if not self._stack else self._stack[-1]
        if module is self.model:
            self._roots += 1
            if not self._in_backward() and self._roots == 1:
                self._begin(Part.FORWARD)
        self._stack.append(path)
        self._mark(path)

    def _returned(self, module: nn.Module, _: Any, output: Any) -> None:
        self._stack.pop()
        if module is self.model:
            self._roots -= 1
            self._idle = Part.LOSS if torch.is_grad_enabled() else Part.BETWEEN
        self._mark(self._stack[-1] if self._stack else None)

    def _begin(self, part: Part) -> None:
        self.parts.append(Part.BACKWARD if part is Part.RECOMPUTE else part)
        self._part = part

    @property
    def turn(self) -> int:
        """The number of the running turn."""
        return len(self.parts) - 1

    def _mark(self, path: str | None) -> None:
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._owners.append(path)

    def enter_step(self) -> None:
        """The optimizer's step starts."""
        self._steps += 1

    def leave_step(self) -> None:
        """The optimizer's step is over."""
        self._steps -= 1
        self._idle = Part.BETWEEN

    @staticmethod
    def _in_backward() -> bool:
        return torch._C._current_graph_task_id() != -1

    @property
    def recomputing(self) -> bool:
        """Whether the running backward runs a forward again."""
        return self._part is Part.RECOMPUTE

    def now(self) -> int:
        """The running phase, as an index into `known`."""
        part, path = self._backward() if self._in_backward() else self._outside()
        if part is not self._part:
            if part is Part.RECOMPUTE:
                self.run += 1
            if {part, self._part} == {Part.BACKWARD, Part.RECOMPUTE}:
                self._part = part
            else:
                self._begin(part)
        return self._number(part, path)

    def _outside(self) -> tuple[Part, str]:
        if self._part in (Part.BACKWARD, Part.RECOMPUTE):
            self._idle, self._node = Part.BETWEEN, None
        self._base = len(self._stack)
        if self._steps:
            return Part.STEP, ""
        if self._roots and self._stack:
            return Part.FORWARD, self._stack[-1]
        return self._idle, self._stack[-1] if self._stack else ""

    def _backward(self) -> tuple[Part, str]:
        node = torch._C._current_autograd_node()
        if node is not None:
            number = node._sequence_nr()
            if number < _NO_NUMBER:
                self._last = self._owners[bisect_right(self._starts, number) - 1]
            if self._part is Part.RECOMPUTE and node is not self._node:
                self._part = Part.BACKWARD  # another node: another recomputation, if it is one
            self._node = node
        if torch.is_grad_enabled():
            return Part.RECOMPUTE, self._stack[-1] if len(self._stack) > self._base else self._last or ""
        return Part.BACKWARD, "loss" if self._last is None else self._last

    def _number(self, part: Part, path: str) -> int:
        found = self._numbers.get((part, path))
        if found is None:
            found = self._numbers[(part, path)] = len(self.known)
            self.known.append(Phase(part, path, self._name(part, path)))
        return found

    def _name(self, part: Part, path: str) -> str:
        if part in (Part.STEP, Part.BETWEEN, Part.LOSS):
            return str(part)
        return f"{part} of {path or self.title}"
