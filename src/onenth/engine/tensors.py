"""Tensors inside what modules take and return: tuples, lists, dicts, dataclasses, cache objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, type, nn.Module)


def find(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Every tensor reachable from `value`, each once: through containers, dataclasses and objects' attributes."""
    seen = set() if seen is None else seen
    if isinstance(value, _PLAIN) or (callable(value) and not isinstance(value, torch.Tensor)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    inner: list[Any] = []
    if isinstance(value, Mapping):
        inner += list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        inner += list(value)
    if is_dataclass(value):
        inner += [getattr(value, entry.name, None) for entry in fields(value)]
    elif hasattr(value, "__dict__"):
        inner += list(vars(value).values())
    for part in inner:
        yield from find(part, seen)


def replace(value: Any, change: Callable[[torch.Tensor], torch.Tensor], through: tuple[type, ...] = (tuple,)) -> Any:
    """`value` with its tensors changed, through containers of these types; what did not change is the same object.

    Everything else (caches, and by default lists and dicts) is handed on as it is: a module may write into it.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    is_named = isinstance(value, tuple) and hasattr(value, "_fields")
    if isinstance(value, list | tuple) and (is_named or type(value) in through):
        parts = [replace(part, change, through) for part in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if is_named else type(value)(parts)
    if type(value) is dict and dict in through:
        changed = {key: replace(part, change, through) for key, part in value.items()}
        return changed if any(changed[key] is not value[key] for key in value) else value
    return value
