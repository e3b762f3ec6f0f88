"""How far two state dicts are apart."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def relative_distance(state: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Norm of the difference over norm of the reference, both over all floating-point entries together."""
    assert state.keys() == reference.keys(), sorted(state.keys() ^ reference.keys())
    floating = [name for name, value in reference.items() if value.is_floating_point()]
    differences = [state[name].double() - reference[name].double() for name in floating]
    whole = [reference[name].double() for name in floating]
    return float(nn.utils.get_total_norm(differences) / nn.utils.get_total_norm(whole))


def entries_that_differ(state: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names whose bits differ, or that only one of the two has."""
    shared = state.keys() & other.keys()
    changed = {name for name in shared if not same_bits(state[name], other[name])}
    return sorted((state.keys() ^ other.keys()) | changed)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
