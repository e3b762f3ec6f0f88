"""State dicts as files: the tensors in a safetensors file, the rest as JSON beside it, nothing pickled.

JSON knows neither tensors, nor tuples, nor keys that are numbers; these stand in it as objects of one entry:
{"tensor": name in the other file}, {"tuple": [...]}, {"pairs": [[key, value], ...]}.
"""

from __future__ import annotations

from typing import Any

import torch

from onenth.errors import CheckpointError

_PLAIN = (str, int, float, bool, type(None))


def split(value: Any, tensors: dict[str, torch.Tensor], name: str = "") -> Any:
    """`value` as plain JSON; its tensors go to `tensors` by their place, on the CPU, storages unshared."""
    if isinstance(value, torch.Tensor):
        own = value.detach().cpu().contiguous()
        shared = own.untyped_storage().nbytes() != own.nbytes
        tensors[name] = own.clone() if shared else own
        return {"tensor": name}
    if isinstance(value, dict):
        pairs = [[key, split(entry, tensors, f"{name}/{key}")] for key, entry in value.items()]
        return {"pairs": pairs}
    if isinstance(value, list | tuple):
        entries = [split(entry, tensors, f"{name}/{place}") for place, entry in enumerate(value)]
        return {"tuple": entries} if isinstance(value, tuple) else entries
    if isinstance(value, _PLAIN):
        return value
    raise CheckpointError(f"{name or 'the state'} is a {type(value).__name__}: tensors and plain values can be saved")


def join(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The inverse of `split`."""
    if isinstance(value, list):
        return [join(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(join(entry, tensors) for entry in content)
    return {key: join(entry, tensors) for key, entry in content}
