"""The engine: what happens to units when their forward runs, when their gradients are computed, when backward ends.

Hooks call in (`hooks.py`); residency, exchange and the units do the work. One code path for every stage and any number
of ranks: at stages 0 to 2 a gather has nothing to move, on one rank a transfer is no message.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onenth.config import Config
from onenth.engine.exchanger import Exchanger
from onenth.engine.machine import Activity, Call, UnitState
from onenth.engine.residency import Residency
from onenth.engine.scaling import LossScaler
from onenth.errors import ShardError
from onenth.model_states.optimizer_states import Updater
from onenth.model_states.unit import Flat, Terms, Unit
from onenth.residual_states.cap import Cap
from onenth.residual_states.heap import HeapTrimmer
from onenth.states import STAGES, ModelState


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies: its unit, flat buffer, and number in that buffer."""

    activity: Activity
    flat: Flat
    index: int

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter itself."""
        return self.flat.parameters.parameters[self.index]

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return self.flat.parameters.names[self.index]


class Engine:
    """The units of one sharded model and what is under way with them.

    generation: counts forwards of the root; calls of one generation belong to one graph.
    root_depth: forwards of the root (or methods that count as one) that are running, one in another.
    in_backward: whether a backward runs; accumulated: whether it has produced a gradient yet.
    unsynced: whether gradients wait, since `no_sync`, for a backward outside it.
    scaling: whether the running backward was started by `ShardedOptimizer.backward`.
    unscaled: whether a backward ran that was not.
    refresh: lays units out anew whose parameters were unfrozen (`layout.refresh`).
    closed: whether the model was made plain again.
    heap: keeps resident memory near what is live, on a CPU.
    updater: runs the optimizer on this rank's N-th; None without an optimizer.
    cap: counts what `max_bytes` caps, where the allocator cannot.
    batch: the size of the first dimension of what the model's forward was last called with.
    explain: called with an error and the part of the step that it ends; raises a better one where there is one.
    """

    def __init__(self, model: nn.Module, units: list[Unit], config: Config, terms: Terms) -> None:
        self.model, self.units, self.config, self.terms = model, units, config, terms
        self.comm, self.ledger = terms.comm, terms.ledger
        kept = set(config.keep_gathered)
        self.activities = [
            Activity(
                unit, kept=unit.index == 0 or unit.name in kept, reads_in_backward=_reads_in_backward(unit, config)
            )
            for unit in units
        ]
        self.partitions_parameters = ModelState.PARAMETERS in STAGES[config.stage]
        self.residency = Residency(self.activities, partitioned=self.partitions_parameters, prefetch=config.prefetch)
        self.exchanger = Exchanger(self.activities, terms.free)
        self.generation = 0
        self.root_depth = 0
        self.in_backward = self.accumulated = False
        self.unsynced = False
        self.scaling = self.unscaled = False
        self.scaler = LossScaler(config.scaling, active=config.dtypes.gradients == torch.float16)
        self.refresh: Callable[[], None] = lambda: None
        for parameter in self.slots():
            parameter._onenth = weakref.ref(self)  # type: ignore[attr-defined]
        self.closed = False
        self.heap = HeapTrimmer(self.comm.device)
        self.updater: Updater | None = None
        self.cap: Cap | None = None
        self.batch: int | None = None
        self.explain: Callable[[BaseException, str], None] = lambda error, part: None

    @property
    def root(self) -> Activity:
        """The unit of what no other unit has."""
        return self.activities[0]

    # Forward

    def enter_root(self) -> None:
        """The model's forward starts."""
        if self.root_depth == 0 and not in_graph_task():
            self._recover()
            self.refresh()
            self.generation += 1
            self.residency.order.begin((torch.is_grad_enabled(), self.model.training))
        self.root_depth += 1

    def leave_root(self) -> None:
        """The model's forward is over, or failed: what no backward will come for is released."""
        self.root_depth -= 1
        if self.root_depth or in_graph_task():
            return
        graph = any(activity.has_outstanding for activity in self.activities)
        if not graph:
            self.residency.cancel()
        for activity in self.activities:
            activity.held = activity.held and graph
            waits = activity.kept and activity.has_outstanding
            if activity.state is UnitState.GATHERED and not waits:
                self.residency.release(activity)
        if not graph:
            self.residency.order.end()

    def enter(self, activity: Activity) -> None:
        """A forward of the unit starts."""
        activity.ran = True
        self.residency.need(activity)
        activity.depth += 1
        if activity.state is UnitState.GATHERED:
            activity.move(UnitState.FORWARD)

    def leave(self, activity: Activity) -> None:
        """A forward of the unit is over, or failed."""
        activity.depth -= 1
        if activity.depth or activity.state is not UnitState.FORWARD:
            return
        if activity.kept or in_graph_task():  # recomputed inside a backward: its gradients come next
            activity.move(UnitState.GATHERED)
        else:
            self.residency.release(activity)

    def read(self, activity: Activity, name: str) -> None:
        """A released parameter is read outside its unit's forward: gather it in the model's, refuse it elsewhere."""
        if not self.root_depth and not in_graph_task():
            raise ShardError(
                f"parameter {name} is released: this rank keeps its share of it only. Read it inside "
                "`with onenth.gathered(module):`, or call it from the model's forward (another method that counts as "
                "one: onenth.register_forward_method)"
            )
        activity.ran = activity.held = True
        self.residency.need(activity)

    def _recover(self) -> None:
        """A backward that raised left things under way: finish them, so that training can go on."""
        if self.in_backward:
            self.exchanger.settle()
            self.end_of_backward(exchange=False)
        if not any(activity.has_outstanding for activity in self.activities):
            for activity in self.activities:
                activity.held = False

    # Backward

    def begin_backward(self) -> None:
        """The first sign of a backward: its end is queued behind it."""
        if self.in_backward:
            return
        self.honour_cleared()
        self.in_backward, self.accumulated = True, False
        self.unscaled = self.unscaled or not self.scaling
        self.exchanger.order.begin()
        torch.autograd.Variable._execution_engine.queue_callback(self.end_of_backward)

    def before_backward(self, call: Call) -> None:
        """Gradients of a call's outputs are there: its unit is needed whole."""
        self.begin_backward()
        activity = call.activity
        if call not in activity.running:
            activity.running.add(call)
            will_run = torch._C._will_engine_execute_node
            call.pending = {i for i, node in enumerate(call.inputs) if will_run(node)}
        if activity.reads_in_backward:
            self.residency.need(activity)
        if activity.state is UnitState.GATHERED:
            activity.move(UnitState.BACKWARD)

    def input_done(self, call: Call, position: int) -> None:
        """The gradient of one of a call's inputs is computed."""
        call.pending.discard(position)
        if call in call.activity.running and not call.pending and call.all_watched:
            self._call_done(call)

    def _call_done(self, call: Call) -> None:
        activity = call.activity
        activity.finish(call)
        if not activity.running and not activity.awaits(call.generation):
            self._unit_done(activity)

    def _unit_done(self, activity: Activity) -> None:
        """No call of the unit in this graph is left: its parameters are not needed, its gradients are complete."""
        activity.sticky = activity.sticky or torch.is_grad_enabled()  # create_graph: a second backward may follow
        if activity.state is UnitState.BACKWARD and activity is not self.root:
            self.residency.release(activity)
        if not activity.held and activity is not self.root:
            self.exchanger.done(activity)
        if self.accumulated:
            self.exchanger.advance()

    def take_gradient(self, activity: Activity, flat: Flat, index: int, parameter: nn.Parameter) -> None:
        """A parameter's gradient was accumulated: it goes to the unit's buffer, and a placeholder takes its place."""
        assert flat.gradients is not None
        assert parameter.grad is not None
        if in_graph_task():
            self.begin_backward()
        if self.exchanger.in_flight is activity:
            self.exchanger.finish()
        gradient, parameter.grad = parameter.grad, None
        flat.gradients.add(index, gradient.detach())
        parameter.grad = flat.parameters.placeholders[index]
        self.accumulated = True
        if activity.running and not any(call.inputs or not call.all_watched for call in activity.running):
            arrived = all(all(one.gradients.arrived) for one in activity.unit.trainable if one.gradients)
            if arrived:
                for call in list(activity.running):
                    self._call_done(call)

    def end_of_backward(self, *, exchange: bool = True) -> None:
        """Backward is over: exchange what is left, release what is whole."""
        self.residency.cancel()
        sticky = torch.is_grad_enabled() and exchange
        for activity in reversed(self.activities):
            activity.sticky = activity.sticky or (sticky and activity.is_whole)
            for call in list(activity.running):
                activity.finish(call)
            activity.held = activity.ran = False
            if activity.state in (UnitState.BACKWARD, UnitState.GATHERED):
                self.residency.release(activity)
        if self.accumulated and exchange:
            self.exchanger.advance(force=True)
            self.exchanger.settle()
            self.unsynced = not self.exchanger.enabled
        self.in_backward = self.accumulated = False
        self.residency.order.end()

    def let_go(self) -> None:
        """A backward has ended or failed: calls of it that still count as running would keep its graph alive."""
        for activity in self.activities:
            for call in list(activity.running):
                activity.finish(call)

    # Between steps

    def rest(self) -> None:
        """After a step: graphs from before it are void, so nothing is kept for them."""
        for activity in self.activities:
            activity.sticky = False
            if activity.state is UnitState.GATHERED:
                self.residency.release(activity)
        self.heap.step()

    def zero_gradients(self) -> None:
        """Forget all gradients."""
        self.exchanger.settle()
        for flat in self.flats():
            if flat.gradients is not None:
                flat.gradients.zero()
            for parameter in flat.parameters.parameters:
                parameter.grad = None
        self.terms.free.clear()
        for activity in self.activities:
            if activity.state is UnitState.EXCHANGING:
                activity.move(UnitState.SHARDED)
        self.unsynced = self.unscaled = False

    def honour_cleared(self) -> None:
        """A loop that sets every `p.grad = None` by hand has forgotten the gradients, as it would in plain PyTorch."""
        held = [flat for flat in self.flats() if flat.gradients is not None and any(flat.gradients.seen)]
        parameters = [
            parameter
            for flat in held
            for parameter, seen in zip(
                flat.parameters.parameters, flat.gradients.seen if flat.gradients else (), strict=True
            )
            if seen
        ]
        if parameters and all(parameter.grad is None for parameter in parameters):
            self.zero_gradients()

    def flats(self) -> list[Flat]:
        """Every flat buffer, in the order of the unit list."""
        return [flat for unit in self.units for flat in unit.flats]

    def slots(self) -> dict[nn.Parameter, Slot]:
        """Where each sharded parameter lies, in the order of the unit list."""
        return {
            parameter: Slot(activity, flat, index)
            for activity in self.activities
            for flat in activity.unit.flats
            for index, parameter in enumerate(flat.parameters.parameters)
        }


def _reads_in_backward(unit: Unit, config: Config) -> bool:
    """Whether gradients of the unit need its parameters: those of a lookup need its indices only."""
    lookups = all(type(module) is nn.Embedding for _, module in unit.modules)
    return not lookups or config.activations == "recompute"


def in_graph_task() -> bool:
    """Whether this thread is inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def engine_of(model: nn.Module) -> Engine:
    """The engine of a sharded model. Raises ShardError for another one."""
    found: Any = model.__dict__.get("_onenth")
    if not isinstance(found, Engine):
        raise ShardError(f"{type(model).__name__} is not sharded: call onenth.shard(model, ...) first")
    return found
