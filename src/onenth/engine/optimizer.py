"""ShardedOptimizer: the user's optimizer, its groups kept, its update run on this rank's N-th."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from onenth.engine import elementwise
from onenth.engine.engine import Engine
from onenth.engine.step import Agreement, agree, check_synced
from onenth.errors import ShardError
from onenth.model_states.optimizer_states import Updater
from onenth.model_states.unit import Flat

log = logging.getLogger("onenth")


class ShardedOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` that updates this rank's N-th of the parameters with the user's optimizer.

    param_groups: the user's own group dicts; they hold the model's parameters.
    grad_norm: () fp32, the global gradient norm before clipping, of the last step or `clip_grad_norm_`.
    skipped: whether the last step was skipped; skipped_steps: how many were.
    """

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        self.__dict__.update(  # what Optimizer.__init__ sets, around the user's own group dicts
            defaults=optimizer.defaults,
            state=defaultdict(dict),
            param_groups=optimizer.param_groups,
            _warned_capturable_if_run_uncaptured=True,
        )
        for name in (
            "_optimizer_step_pre_hooks",
            "_optimizer_step_post_hooks",
            "_optimizer_state_dict_pre_hooks",
            "_optimizer_state_dict_post_hooks",
            "_optimizer_load_state_dict_pre_hooks",
            "_optimizer_load_state_dict_post_hooks",
        ):
            self.__dict__[name] = optimizer.__dict__.get(name, OrderedDict())
        self._patch_step_function()
        self.engine = engine
        self.user = optimizer
        self.updater = Updater(optimizer, engine.config.dtypes, engine.ledger)
        self.scaler = engine.scaler
        self.skipped, self.skipped_steps, self._skipped_in_a_row = False, 0, 0
        self.grad_norm: torch.Tensor | None = None
        self._clip_to: float | None = None
        self._agreement: Agreement | None = None

    @property
    def loss_scale(self) -> float:
        """What fp16 losses are multiplied with; 1.0 in other precisions."""
        return self.scaler.scale

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """`loss.backward(**kwargs)`, scaled where gradients are fp16."""
        self.engine.scaling = True
        try:
            (loss * self.scaler.scale if self.scaler.active else loss).backward(**kwargs)
        except RuntimeError as error:
            self.engine.explain(error, "backward")
            explain_released(error)
            raise
        finally:
            self.engine.scaling = False
            self.engine.let_go()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip if configured, update, or skip on all ranks if any has an Inf or NaN.

        closure: evaluated once, before the update, as elementwise optimizers do; its result is returned.
        Raises ShardError for gradients held back by `no_sync`, for a plain `loss.backward()` in fp16, and, outside
        fp16, after `max_skipped` skips in a row.
        """
        try:
            return self._step(closure)
        except RuntimeError as error:
            self.engine.explain(error, "optimizer step")
            raise

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if self.engine.closed:
            raise ShardError("the model was made plain again by onenth.unshard: make a new optimizer")
        if any(activity.pins for activity in self.engine.activities):
            raise ShardError(
                "step() inside `onenth.gathered`: its copies of the parameters would be stale; leave it first"
            )
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if self.scaler.active and self.engine.unscaled:
            raise ShardError("gradients of a loss that was not scaled: in fp16 call optimizer.backward(loss)")
        agreement = self._agree()
        self.skipped = not agreement.finite
        if self.skipped:
            self._skip(agreement)
        else:
            self._skipped_in_a_row = 0
            with torch.no_grad():
                self._update(agreement, self._coefficient(agreement))
            self.scaler.update(overflowed=False)
        self._agreement, self._clip_to = None, None
        self.engine.rest()
        self.user._opt_called = True  # type: ignore[attr-defined]  # a scheduler made before `shard` looks here
        return result

    def _agree(self) -> Agreement:
        self.engine.honour_cleared()
        check_synced(self.engine)
        agreement = self._agreement = agree(self.engine)
        self.grad_norm = torch.tensor(agreement.norm / self.scaler.scale, device=self.engine.comm.device)
        return agreement

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip to this global norm at the coming step; returns the norm before clipping, () fp32."""
        self._agree()
        self._clip_to = float(max_norm)
        assert self.grad_norm is not None
        return self.grad_norm

    def _coefficient(self, agreement: Agreement) -> float:
        limit = self._clip_to if self._clip_to is not None else self.engine.config.max_grad_norm
        norm = agreement.norm / self.scaler.scale
        clip = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        return clip / self.scaler.scale

    def _skip(self, agreement: Agreement) -> None:
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        before = self.scaler.scale
        self.scaler.update(overflowed=True)
        scale = f"; loss scale {before:g} -> {self.scaler.scale:g}" if self.scaler.active else ""
        if self.engine.comm.rank == 0:
            log.warning("step skipped on all ranks: Inf or NaN in the gradient of %s%s", agreement.culprit, scale)
        if not self.scaler.active and self._skipped_in_a_row >= self.engine.config.max_skipped:
            raise ShardError(
                f"{self._skipped_in_a_row} steps in a row had Inf or NaN gradients, last in {agreement.culprit}: "
                "lower the learning rate, clip with max_grad_norm, or look at that parameter's inputs"
            )

    def _update(self, agreement: Agreement, coefficient: float) -> None:
        """Update this rank's segments, and give the others the new values where parameters are kept whole."""
        groups = {id(p): index for index, group in enumerate(self.param_groups) for p in group["params"]}
        trainable = [flat for flat in self.engine.flats() if flat.gradients is not None]
        presence = dict(zip(map(id, trainable), agreement.has_gradient, strict=True))
        share = not self.engine.partitions_parameters and self.engine.config.stage > 0
        transfers = []
        for unit in self.engine.units:
            for flat in unit.flats:
                if flat.optimizer_states is None or not any(presence[id(flat)]):
                    continue
                self._update_flat(flat, groups, presence[id(flat)], coefficient)
                if share:
                    transfers.append(self.engine.comm.gather(flat.parameters.full, unit.label("gather", flat)))
        for transfer in transfers:
            transfer.wait()
        self.updater.finish(self.param_groups)

    def _update_flat(self, flat: Flat, groups: dict[int, int], present: list[bool], coefficient: float) -> None:
        assert flat.optimizer_states is not None
        assert flat.gradients is not None
        parameters = flat.parameters.parameters
        group_of = [groups.get(id(parameter)) for parameter in parameters]
        self.updater.update(flat.optimizer_states, flat.gradients, self.param_groups, group_of, present, coefficient)
        flat.optimizer_states.write_back()
        torch.autograd.graph.increment_version(parameters)  # a backward through a graph from before must fail

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, on this rank and in its shard. `set_to_none=False` gives the same: none."""
        self.engine.zero_gradients()
        self._agreement = None
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Update more of the model's parameters from now on."""
        self.user.add_param_group(param_group)
        elementwise.check(self.user, self.engine.config.dtypes)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: what `load_state_dict` restores on the same rank of as many ranks at the same stage.

        Keys: "parameters" and "master" (flat tensors by unit and buffer), "states" (by the same, then by piece),
        "groups" (hyperparameters), "scaler".
        """
        flats: dict[str, Any] = {}
        for unit in self.engine.units:
            for number, flat in enumerate(unit.flats):
                flats[f"{unit.name}:{number}"] = self._flat_state(flat)
        groups = [{key: v for key, v in group.items() if key != "params"} for group in self.param_groups]
        scaler = {"scale": self.scaler.scale, "good": self.scaler.good, "bad": self.scaler.bad}
        return {"flats": flats, "groups": groups, "scaler": scaler, "skipped_steps": self.skipped_steps}

    def _flat_state(self, flat: Flat) -> dict[str, Any]:
        held: dict[str, Any] = {}
        parameters = flat.parameters.shard if flat.parameters.partitioned else flat.parameters.full
        if parameters is not None:
            held["parameters"] = parameters
        states = flat.optimizer_states
        if states is None:
            return held
        if states.master is not None:
            held["master"] = states.master
        held["states"] = {
            f"{rank}:{number}": dict(self.updater.inner.state.get(piece.tensor, {}))
            for rank, pieces in states.pieces.items()
            for number, piece in enumerate(pieces)
        }
        return held

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave on this rank. Raises ShardError if it came from another layout."""
        mine = self.state_dict()["flats"]
        if "flats" not in state_dict or state_dict["flats"].keys() != mine.keys():
            raise ShardError(
                "this state was not saved by a ShardedOptimizer with the same units: to go on at another number of "
                "ranks, stage or unit choice, take the weights with onenth.full_state_dict and load_state_dict"
            )
        for unit in self.engine.units:
            for number, flat in enumerate(unit.flats):
                self._load_flat(f"{unit.name}:{number}", flat, mine, state_dict["flats"])
        for group, saved in zip(self.param_groups, state_dict["groups"], strict=True):
            group.update(saved)
        scaler = state_dict["scaler"]
        self.scaler.scale, self.scaler.good, self.scaler.bad = scaler["scale"], scaler["good"], scaler["bad"]
        self.skipped_steps = state_dict["skipped_steps"]

    def _load_flat(self, key: str, flat: Flat, mine: dict[str, Any], saved: dict[str, Any]) -> None:
        for name in ("parameters", "master"):
            if (name in mine[key]) != (name in saved[key]):
                raise ShardError(f"unit {key} was saved at another stage or precision: {name} is on one side only")
            if name in mine[key]:
                if mine[key][name].shape != saved[key][name].shape:
                    raise ShardError(f"unit {key} was saved at another number of ranks or stage")
                mine[key][name].copy_(saved[key][name])
        states = flat.optimizer_states
        if states is None:
            return
        for rank, pieces in states.pieces.items():
            for number, piece in enumerate(pieces):
                loaded = saved[key]["states"].get(f"{rank}:{number}", {})
                self.updater.put(piece, loaded)

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.user!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise ShardError("a sharded optimizer cannot be pickled: save its state_dict() instead")


@contextmanager
def no_sync(engine: Engine) -> Iterator[None]:
    """Hold whole local gradients instead of exchanging them."""
    before, engine.exchanger.enabled = engine.exchanger.enabled, False
    try:
        yield
    finally:
        engine.exchanger.enabled = before


def explain_released(error: RuntimeError) -> None:
    """If backward met the empty storage of a released unit, say how that comes."""
    if re.search(r"storage of size 0|not allocated", str(error)):
        raise ShardError(
            "backward needs the parameters of a unit that was released: it reached the unit by another way than the "
            "outputs of its forward (an activation captured by a hook, an iterator). Return what the loss uses from "
            "the unit's forward, name it in keep_gathered, or use stage 2"
        ) from error


def disarm(optimizer: torch.optim.Optimizer, sharded: ShardedOptimizer) -> None:
    """The user's own optimizer no longer steps: its parameters are not there to be stepped."""

    def step(*_: Any, **__: Any) -> Any:
        raise ShardError("this optimizer was sharded: call step() on the optimizer that onenth.shard returned")

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else schedulers made before warn
    optimizer.step = step  # type: ignore[method-assign]
    optimizer.zero_grad = sharded.zero_grad  # type: ignore[method-assign]
    optimizer.state.clear()


def parameters_of(optimizer: torch.optim.Optimizer | None) -> list[nn.Parameter]:
    """Every parameter that the optimizer updates."""
    return [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
