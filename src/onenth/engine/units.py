"""Choosing units: which parameters are gathered and released together."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from torch import nn

from onenth.config import Config
from onenth.errors import ShardError

SHARE = 0.02  # of the model's elements: a module outside the blocks that holds this much is a unit of its own
ROOT_SHARE = 0.1  # a root that holds more than this much is worth a warning

Choice = tuple[str, list[tuple[str, nn.Module]]]
Rule = Callable[[str, nn.Module], bool]


def choose(model: nn.Module, config: Config) -> list[Choice]:
    """The units as (name, [(module's name, module)]), the root first, the others in registration order.

    Raises ShardError if a rule of the user's finds nothing, or `keep_gathered` names no unit.
    """
    names = {module: name for name, module in model.named_modules()}
    if config.units == "auto":
        chosen = _blocks(model) + _large(model, _blocks(model))
    else:
        rule = _rule(config.units)
        chosen = [module for name, module in model.named_modules() if module is not model and rule(name, module)]
        missing = _unmatched(model, config.units) or ([] if chosen else [str(config.units)])
        if missing:
            raise ShardError(f"units: no module of {type(model).__name__} is matched by {', '.join(missing)}")
    if config.max_unit_bytes is not None:
        chosen = [part for module in chosen for part in _split(module, config)]
    chosen = [module for module in names if module in set(chosen) and any(True for _ in module.parameters())]
    units: list[Choice] = [("root", [("", model)])]
    units += [(names[module], [(names[module], module)]) for module in chosen]
    units = _merge_tied(units)
    _check(model, units, config)
    return units


def owned(units: list[Choice]) -> dict[nn.Parameter, int]:
    """Which unit owns each parameter: the innermost one; the root owns what units share."""
    nested = {module: index for index, (_, modules) in enumerate(units) for _, module in modules}
    users: dict[nn.Parameter, set[int]] = {}

    def walk(module: nn.Module, index: int, seen: set[nn.Module]) -> None:
        index = nested.get(module, index)
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(parameter, set()).add(index)
        for child in module._modules.values():
            if child is not None and child not in seen:
                walk(child, index, seen | {child})

    walk(units[0][1][0][1], 0, set())
    return {parameter: next(iter(found)) if len(found) == 1 else 0 for parameter, found in users.items()}


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The children of the outermost repeated containers."""
    if _repeats(model):
        return [child for child in model.children() if _numel(child)]
    return [block for name, child in model.named_children() if not _is_expert(name, child) for block in _blocks(child)]


def _repeats(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    kinds = Counter(type(child) for name, child in module.named_children() if _numel(child))
    return any(count > 1 for count in kinds.values()) and not any(
        _is_expert(name, child) for name, child in module.named_children()
    )


def _is_expert(name: str, module: nn.Module) -> bool:
    """Experts are never units: which of them run differs by rank, and all ranks must gather alike."""
    return "expert" in name.lower() or "expert" in type(module).__name__.lower()


def _large(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Modules outside the blocks that hold a good share of the model themselves: embedding and head, usually."""
    inside = {module for block in blocks for module in block.modules()}
    least = SHARE * _numel(model)

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        for name, child in module.named_children():
            if child in inside or _is_expert(name, child):
                continue
            direct = any(parameter is not None for parameter in child._parameters.values())
            if direct and _numel(child) >= least:
                yield child
            else:
                yield from walk(child)

    return list(dict.fromkeys(walk(model)))


def _rule(units: object) -> Rule:
    if inspect.isclass(units):
        return lambda _, module: isinstance(module, units)
    if isinstance(units, Iterable):
        classes = tuple(units)
        return lambda _, module: isinstance(module, classes)
    assert callable(units)
    return units


def _unmatched(model: nn.Module, units: object) -> list[str]:
    """Module classes of a rule that no module is an instance of."""
    kinds = [units] if inspect.isclass(units) else list(units) if isinstance(units, Iterable) else []
    return [kind.__name__ for kind in kinds if not any(isinstance(module, kind) for module in model.modules())]


def _split(module: nn.Module, config: Config) -> list[nn.Module]:
    """The module, or, while it is too large, its children as units of their own beside what it keeps itself."""
    assert config.max_unit_bytes is not None
    children = [child for child in module.children() if _numel(child)]
    if _numel(module) * config.dtypes.parameters.itemsize <= config.max_unit_bytes or not children:
        return [module]
    return [module, *(part for child in children for part in _split(child, config))]


def _merge_tied(units: list[Choice]) -> list[Choice]:
    """Units that share all their parameters become one: an embedding and the head tied to it."""
    merged: dict[frozenset[nn.Parameter] | int, Choice] = {}
    for index, (name, modules) in enumerate(units):
        key = frozenset(modules[0][1].parameters()) if index else index
        if key in merged:
            merged[key][1].extend(modules)
        else:
            merged[key] = (name, list(modules))
    return list(merged.values())


def _check(model: nn.Module, units: list[Choice], config: Config) -> None:
    known = [name for name, _ in units]
    unknown = [name for name in config.keep_gathered if name not in known]
    if unknown:
        raise ShardError(f"keep_gathered names no units: {', '.join(unknown)}; units are {', '.join(known)}")
    total = sum(parameter.numel() for parameter in model.parameters())
    rest = sum(parameter.numel() for parameter, index in owned(units).items() if index == 0)
    if rest > ROOT_SHARE * total and len(units) > 1:
        warnings.warn(
            f"the root holds {rest / total:.0%} of the parameters, which stay gathered from forward to backward: "
            "name units of your own with units=(ModuleClass, ...) or a function",
            stacklevel=4,
        )
