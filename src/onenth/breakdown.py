"""Breakdown: bytes by (state, tier), the one type that equations, ledger, plan and account answer with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onenth.states import Tier


@dataclass(frozen=True)
class Breakdown:
    """Bytes that one rank holds, by (state, tier).

    held: bytes by (state's name, tier).
    expected: what the equations say, by the same keys; empty where no equation applies.
    notes: remarks by state ("from the master": gathered from the master copy, nothing kept beside it).

    A state is an attribute too: `breakdown.master` is its bytes over all tiers, 0 for a state that nobody holds.
    """

    held: Mapping[tuple[str, Tier], int]
    expected: Mapping[tuple[str, Tier], int] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
