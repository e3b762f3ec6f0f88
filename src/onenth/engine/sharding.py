"""Sharding: what `onenth.shard` does, in order: look, lay out, fill, hook."""

from __future__ import annotations

import hashlib
import logging
import weakref
from typing import Any

import torch
from torch import nn

from onenth.comm import Communicator
from onenth.config import Config, Precision
from onenth.engine import elementwise, guards, hooks, layout
from onenth.engine.engine import Engine
from onenth.engine.loading import Init, Materializer
from onenth.engine.optimizer import ShardedOptimizer, disarm, parameters_of
from onenth.engine.units import choose
from onenth.errors import ConfigError, ShardError
from onenth.ledger import Ledger
from onenth.model_states.gradients import Free
from onenth.model_states.scratch import Scratch
from onenth.model_states.unit import Terms
from onenth.residual_states import buffers
from onenth.residual_states.cap import put_cap
from onenth.states import STAGES, ResidualState

log = logging.getLogger("onenth")


def shard(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, comm: Communicator, init: Init | None
) -> tuple[nn.Module, ShardedOptimizer | None]:
    """Shard `model` in place. Every error is raised on all ranks alike, before anything was changed."""
    materializer = Materializer(comm, init)
    check_precision(config.dtypes, comm.device)
    _agree(model, optimizer, config, comm, materializer)
    layout.unify_ties(model, optimizer)
    terms = make_terms(config, comm, trains=optimizer is not None)
    updated = set(parameters_of(optimizer))
    choices = choose(model, config)
    replicated = layout.replicate(model, terms)
    units, differed = layout.build_units(model, choices, terms, updated, materializer)
    differed |= buffers.place(model, config.dtypes, comm, terms.ledger, materializer.unknown)
    engine = Engine(model, units, config, terms)
    _hook(engine)
    sharded = None if optimizer is None else _take_over(engine, optimizer)
    engine.updater = None if sharded is None else sharded.updater
    engine.refresh = _refresher(engine, optimizer, engine.updater)
    model.__dict__["_onenth"] = engine
    _announce(engine, replicated, any(comm.tell_all(differed)))
    engine.cap = put_cap(engine, config.max_bytes, comm, engine.ledger)
    return model, sharded


def make_terms(config: Config, comm: Communicator, *, trains: bool) -> Terms:
    """What all flat buffers of the model are built on."""
    ledger = Ledger()
    free = Free(
        Scratch(comm.device, ledger, ResidualState.LOCAL_GRADIENTS), Scratch(comm.device, ledger, ResidualState.RECEIVE)
    )
    return Terms(config.dtypes, comm, ledger, STAGES[config.stage], config.reduce == "mean", trains, free)


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raise ConfigError for a dtype that the device emulates at best."""
    if device.type != "cuda" or torch.bfloat16 not in (precision.parameters, precision.gradients):
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(f"{torch.cuda.get_device_name(device)} has no native bf16: use precision='fp16' or 'fp32'")


def _agree(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    comm: Communicator,
    materializer: Materializer,
) -> None:
    """Raise ShardError, on every rank, for what cannot work on one, or differs between two."""
    problems = _problems(model, optimizer, config)
    on_meta = materializer.check(model)
    shapes = [
        (name, tuple(p.shape), p.requires_grad)
        for name, p in (model.named_parameters(remove_duplicate=False) if not problems else ())
    ]
    groups = [] if optimizer is None else [len(group["params"]) for group in optimizer.param_groups]
    settings = (config.stage, str(config.dtypes), config.activations, config.reduce, config.max_grad_norm)
    digest = hashlib.sha256(repr((shapes, groups, settings)).encode()).hexdigest()
    told = comm.tell_all((problems, digest))
    found = [f"rank {rank}: {problem}" for rank, (wrong, _) in enumerate(told) for problem in wrong]
    others = [rank for rank, (_, other) in enumerate(told) if other != told[0][1]]
    if others:
        found.append(
            f"ranks {', '.join(map(str, others))} have another model, optimizer or configuration than rank 0 "
            "(parameter names, shapes, requires_grad, group sizes, stage, precision)"
        )
    if not found and comm.tell_all(on_meta)[0]:
        found.append(
            f"on the meta device, and nothing fills them: {', '.join(on_meta or comm.tell_all(on_meta)[0])}. Give "
            "onenth.shard(init=fn), which fills one module's parameters and buffers in place, or build rank 0's model "
            "on the cpu"
        )
    if found:
        raise ShardError("; ".join(dict.fromkeys(found)))


def _obstacles(model: nn.Module) -> list[str]:
    """What in the model cannot be sharded, or would be lost."""
    named = list(model.named_parameters())
    lazy = [name for name, p in named if isinstance(p, nn.parameter.UninitializedParameter)]
    odd = [name for name, p in named if name not in lazy and p.requires_grad and not p.is_floating_point()]
    graded = [name for name, p in named if p.grad is not None]
    inner = [name for name, module in model.named_modules() if "_onenth" in module.__dict__]
    sparse = [name for name, module in model.named_modules() if getattr(module, "sparse", False) is True]
    found = {
        "parameters not initialized yet (run one forward first)": lazy,
        "trainable parameters that are not floating point (complex ones, say)": odd,
        "parameters with gradients from before, which would be lost (call zero_grad first)": graded,
        "modules that are sharded already": inner,
        "modules with sparse gradients (set sparse=False)": sparse,
    }
    return [f"{what}: {', '.join(names)}" for what, names in found.items() if names]


def _problems(model: object, optimizer: object, config: Config) -> list[str]:
    if not isinstance(model, nn.Module):
        return [f"model is a {type(model).__name__}, an nn.Module is meant"]
    if "_onenth" in model.__dict__:
        return ["the model is sharded already"]
    problems = _obstacles(model)
    problems += [f"keep_fp32 names no module: {entry}" for entry in layout.check_kept(model, config.dtypes)]
    if optimizer is None:
        return problems
    if not isinstance(optimizer, torch.optim.Optimizer):
        return [f"optimizer is a {type(optimizer).__name__}, a torch.optim.Optimizer is meant"]
    if isinstance(optimizer, ShardedOptimizer):
        return ["the optimizer is sharded already"]
    known = {id(parameter) for parameter in model.parameters()}
    foreign = [
        f"group {index}, parameter {position} of shape {tuple(parameter.shape)}"
        for index, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
        if id(parameter) not in known
    ]
    if foreign:
        problems.append(f"the optimizer holds parameters that are not the model's: {'; '.join(foreign)}")
    try:
        elementwise.check(optimizer, config.dtypes)
    except ShardError as error:
        problems.append(str(error))
    return problems


def _hook(engine: Engine) -> None:
    guards.install(engine)
    for activity in engine.activities:
        for _, module in activity.unit.modules:
            hooks.wrap(engine, activity, module)
        hooks.watch_gradients(engine, activity)
    if engine.config.activations == "recompute":
        _forbid_cache(engine.model)
    for module in layout.kept_modules(engine.model, engine.config.dtypes, theirs=False):
        hooks.cast_around(module, torch.float32, engine.config.dtypes.parameters)


def _forbid_cache(model: nn.Module) -> None:
    """A block that is run again must not find what its first run put into a cache (transformers' `use_cache`)."""
    settings = {id(one): one for module in model.modules() if (one := getattr(module, "config", None)) is not None}
    for one in settings.values():
        if getattr(one, "use_cache", False):
            one.use_cache = False
            log.info("activations='recompute': use_cache of %s is off now", type(one).__name__)


def _take_over(engine: Engine, optimizer: torch.optim.Optimizer) -> ShardedOptimizer:
    sharded = ShardedOptimizer(engine, optimizer)
    for flat in engine.flats():
        if flat.optimizer_states is not None:
            sharded.updater.adopt(flat.optimizer_states, optimizer.state)
    disarm(optimizer, sharded)
    return sharded


def _refresher(engine: Engine, optimizer: torch.optim.Optimizer | None, updater: Any) -> Any:
    known = weakref.ref(engine)

    def refresh() -> None:
        if (found := known()) is not None:
            layout.refresh(found, set(parameters_of(optimizer)), updater)

    return refresh


def _announce(engine: Engine, replicated: list[str], differed: bool) -> None:
    """The dtype contract and the shape of the job, once, on rank 0."""
    if engine.comm.rank:
        return
    contract = ", ".join(f"{what} {dtype}" for what, dtype in engine.config.dtypes.table())
    log.info("stage %d over %d ranks, %d units; %s", engine.config.stage, engine.comm.size, len(engine.units), contract)
    if replicated:
        log.warning("kept whole on every rank, since they are not floating point: %s", ", ".join(replicated))
    if differed:
        log.warning("ranks had different parameters or buffers; all use rank 0's now")
