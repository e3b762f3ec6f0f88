"""Activations: what autograd keeps for backward, and recomputing it instead (Chen et al., 2016, arXiv 1604.06174)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` that keeps only its inputs for backward and runs again there, with the same random numbers."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=False)

    return run
