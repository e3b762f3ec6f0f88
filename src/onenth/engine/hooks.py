"""Hooks: how forward and backward of ordinary modules reach the engine.

A unit's `forward` is wrapped on the instance, so that whatever calls the module (other hooks, a checkpoint, a compiled
caller) runs through it, and errors come back through it. What backward reaches is seen at nodes of the graph:

- a pre-hook on the node of each output, and of its base if it is a view, says that the unit is needed. Node hooks
  survive in-place changes to the outputs, where tensor hooks are lost silently. Only nodes that this forward made
  count: a unit may hand on what another one returned.
- each differentiable input enters through a view of itself; the view's node runs when the gradient of that input, as
  far as this unit is concerned, is complete.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import nn

from onenth.engine import guards, tensors
from onenth.engine.engine import Engine, in_graph_task
from onenth.engine.machine import Activity, Call, UnitState
from onenth.errors import ShardError
from onenth.residual_states.activations import recomputed
from onenth.residual_states.buffers import explain_dtype_error

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """`function`, which torch.compile runs as it is, with all that it calls."""
    return cast("Function", torch.compiler.disable(function))


@dataclass
class Pass:
    """One forward of a unit, from `before` to `after`.

    inputs: the graph nodes of the views that differentiable inputs came in through.
    mark: the sequence number of the first graph node that the forward makes.
    recomputes: whether a backward runs it again, its unit gathered already.
    all_watched: whether every differentiable input came in through a view; those in lists or caches do not.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Any]
    mark: int
    recomputes: bool
    all_watched: bool = True


class UnitForward:
    """What surrounds one module's forward: the unit is gathered before it and released after it."""

    def __init__(self, engine: Engine, activity: Activity) -> None:
        self.engine, self.activity = engine, activity
        self.dtype = _compute_dtype(engine, activity)
        self.is_root = activity is engine.root
        self.parts = [part for _, module in activity.unit.modules for part in module.modules()]

    @uncompiled
    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pass:
        """The module was called."""
        if self.is_root:
            self.engine.enter_root()
        if self.dtype is not None:
            through = (tuple, list, dict) if self.is_root else (tuple,)  # a batch; or what a block may write into
            args = tensors.replace(args, self._cast, through)
            kwargs = {key: tensors.replace(value, self._cast, through) for key, value in kwargs.items()}
        if self.activity.state is UnitState.BACKWARD:
            return Pass(args, kwargs, [], 0, recomputes=True)
        inputs: list[Any] = []
        if torch.is_grad_enabled() and not self.is_root:
            enter = functools.partial(_through_view, inputs)
            args = tensors.replace(args, enter)
            kwargs = {key: tensors.replace(value, enter) for key, value in kwargs.items()}
        try:
            self.engine.enter(self.activity)
        except BaseException:
            if self.is_root:
                self.engine.leave_root()
            raise
        entered = Pass(args, kwargs, inputs, torch._C._autograd._get_sequence_nr(), recomputes=False)
        if torch.is_grad_enabled():
            given = list(tensors.find((args, kwargs)))
            entered.all_watched = sum(tensor.requires_grad for tensor in given) <= len(inputs)
            self._note_size(given)
        return entered

    def _note_size(self, given: list[torch.Tensor]) -> None:
        """What an explanation of an out-of-memory error asks for."""
        self.activity.input_bytes = sum(tensor.nbytes for tensor in given)
        if self.is_root:
            self.engine.batch = next((len(tensor) for tensor in given if tensor.dim()), None)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    @uncompiled
    def after(self, forward: Pass, output: Any) -> None:
        """The module returned."""
        recomputes = forward.recomputes or (in_graph_task() and self.activity.has_outstanding)
        if torch.is_grad_enabled() and not recomputes:
            watch(self.engine, self.activity, (output, forward.args, forward.kwargs, self._kept()), forward)
        if self.engine.partitions_parameters and any(self._is_parameter(tensor) for tensor in tensors.find(output)):
            self.activity.held = True  # whoever gets a parameter may use it any time
        if torch.is_autocast_enabled():  # its cache keeps the cast copy of every weight alive
            torch.clear_autocast_cache()

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is a parameter of the unit, or a view of one."""
        storages = {flat.parameters.full.untyped_storage()._cdata for flat in self.activity.unit.flats}
        return tensor.untyped_storage()._cdata in storages

    def _kept(self) -> list[Any]:
        """What modules of the unit keep as attributes (`self.auxiliary_loss`): outputs too, if they are new."""
        containers = (torch.Tensor, list, tuple, dict)
        return [
            value
            for part in ([] if self.is_root else self.parts)
            for key, value in part.__dict__.items()
            if isinstance(value, containers) and key[0] != "_"
        ]

    @uncompiled
    def leave(self, forward: Pass) -> None:
        """The module returned or raised."""
        if not forward.recomputes:
            self.engine.leave(self.activity)
        if self.is_root:
            self.engine.leave_root()


def wrap(engine: Engine, activity: Activity, module: nn.Module, name: str = "forward") -> None:
    """Surround `module.<name>`, on this instance."""
    original = getattr(module, name)
    surround = UnitForward(engine, activity)
    recompute = engine.config.activations == "recompute" and not surround.is_root
    run = recomputed(original) if recompute else original

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        entered = surround.before(args, kwargs)
        try:
            output = run(*entered.args, **entered.kwargs)
            surround.after(entered, output)
        except RuntimeError as error:
            if surround.is_root:
                engine.explain(error, "forward")
                explain_dtype_error(engine.model, error)
            raise
        finally:
            surround.leave(entered)
        return output

    forward = torch.compiler.disable(forward, recursive=False)  # what it calls may be compiled
    guards.put_methods(module, {name: forward})


def watch(engine: Engine, activity: Activity, outputs: Any, forward: Pass) -> None:
    """Tell the engine when a backward reaches this call, and when it is through with it."""
    nodes = {node: None for tensor in tensors.find(outputs) for node in _nodes(tensor, forward.mark)}
    if not nodes:
        return
    call = Call(activity, engine.generation, forward.inputs, all_watched=forward.all_watched)
    activity.note(call)
    for node in nodes:
        node.register_prehook(lambda _: engine.before_backward(call))
    known = weakref.ref(call)

    def done(position: int, *_: Any) -> None:
        if (reached := known()) is not None:
            engine.input_done(reached, position)

    for position, node in enumerate(forward.inputs):
        node.register_hook(functools.partial(done, position))


def watch_gradients(engine: Engine, activity: Activity) -> None:
    """Move every gradient of the unit's parameters into its buffer as it is accumulated."""
    known = weakref.ref(engine)
    for undo in activity.undo:
        undo()
    handles: list[Any] = []
    if not engine.terms.trains:
        held = [parameter for flat in activity.unit.flats for parameter in flat.parameters.parameters]
        handles = [p.register_post_accumulate_grad_hook(_refuse) for p in held if p.requires_grad]
    for number, flat in enumerate(activity.unit.flats):
        for index, parameter in enumerate(flat.parameters.parameters if flat.gradients is not None else ()):
            owner = weakref.ref(parameter)
            handles.append(parameter.register_hook(functools.partial(_make_room, owner)))
            take = functools.partial(_take, known, activity.unit.index, number, index)
            handles.append(parameter.register_post_accumulate_grad_hook(take))
    activity.undo = [handle.remove for handle in handles]


def _refuse(parameter: nn.Parameter) -> None:
    parameter.grad = None
    raise ShardError(
        "backward through a model that was sharded without an optimizer, which only runs forward: run it under "
        "torch.no_grad(), freeze it with model.requires_grad_(False), or give onenth.shard its optimizer"
    )


def _make_room(owner: weakref.ref[nn.Parameter], _: torch.Tensor) -> None:
    """A gradient is about to be accumulated: into nothing, not onto the placeholder."""
    if (parameter := owner()) is not None:
        parameter.grad = None


def _take(known: weakref.ref[Engine], unit: int, flat: int, index: int, parameter: nn.Parameter) -> None:
    """By numbers, not objects: Python's collector sees no cycle that leads through a parameter's hooks."""
    if (engine := known()) is not None:
        activity = engine.activities[unit]
        engine.take_gradient(activity, activity.unit.flats[flat], index, parameter)


def _nodes(tensor: torch.Tensor, mark: int) -> list[Any]:
    """The graph nodes of a tensor and of its base, if the forward that started at `mark` made them."""
    both = [tensor, tensor._base] if tensor._is_view() else [tensor]
    found = [one.grad_fn for one in both if one is not None and one.grad_fn is not None]
    return [node for node in found if node._sequence_nr() >= mark]


def _through_view(inputs: list[Any], tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.requires_grad:
        return tensor
    view = tensor.view_as(tensor)
    inputs.append(view.grad_fn)
    return view


def _compute_dtype(engine: Engine, activity: Activity) -> torch.dtype | None:
    """What floating-point inputs are cast to: the parameters' dtype; None: they stay as they are."""
    dtypes = {flat.kind.dtype for flat in activity.unit.flats}
    if not engine.config.cast_inputs or not dtypes:
        return None
    wanted = engine.config.dtypes.parameters
    return wanted if wanted in dtypes or len(dtypes) > 1 else dtypes.pop()


def cast_around(module: nn.Module, inside: torch.dtype, outside: torch.dtype) -> None:
    """Let a module that is kept in another dtype compute in it: inputs are cast on the way in, outputs back."""

    def convert(values: Any, dtype: torch.dtype) -> Any:
        return tensors.replace(values, lambda t: t.to(dtype) if t.is_floating_point() else t, (tuple, dict))

    module.register_forward_pre_hook(
        lambda _, args, kwargs: convert((args, kwargs), inside), with_kwargs=True, prepend=True
    )
    module.register_forward_hook(lambda _, __, output: convert(output, outside))
