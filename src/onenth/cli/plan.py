"""`onenth plan`: what training holds in memory, by the equations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any

import tyro

from onenth.cli import parse
from onenth.costs import WIRE_BYTES, nominal_bytes, nominal_redundancy, nominal_traffic
from onenth.errors import PlanError
from onenth.report.terminal import print_equations
from onenth.states import STAGES

_DESCRIPTION = """\
What mixed-precision Adam holds in memory for a model of this size, and what each ZeRO stage leaves per rank.

example:
  onenth plan --parameters 7e9 --ranks 256
"""
_SCALES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_MOST = 10**18  # parameters; beyond it a typing error is likelier than a model


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `onenth plan`."""

    parameters: Annotated[str, tyro.conf.arg(metavar="COUNT")]
    """Parameters of the model, as 7e9 or 7B."""
    ranks: int = 1
    """Data-parallel ranks."""
    json: bool = False
    """Print the same as JSON, in bytes and elements."""


def run(argv: Sequence[str]) -> int:
    """Print the model states, their redundancy and each stage's share; returns the exit code."""
    options = parse(PlanOptions, argv, prog="onenth plan", description=_DESCRIPTION)
    parameters = parse_count(options.parameters)
    if options.ranks < 1:
        raise PlanError(f"--ranks {options.ranks}: at least 1 is meant")
    if options.json:
        print(json.dumps(equations(parameters, options.ranks), indent=2))
    else:
        print_equations(parameters, options.ranks)
    return 0


def parse_count(text: str) -> int:
    """A number of parameters as people write it: 7000000000, 7_000_000_000, 7e9, 7B, 350M."""
    scale = _SCALES.get(text[-1:].lower())
    try:
        number = Decimal(text[:-1] if scale else text) * (scale or 1)
        if 1 <= number <= _MOST and number == int(number):
            return int(number)
    except ArithmeticError:
        pass
    raise PlanError(f"--parameters {text}: a whole number of parameters is meant, such as 7e9, 7B or 350M")


def equations(parameters: int, ranks: int) -> dict[str, Any]:
    """The figures of the table as data: bytes of one copy, of all ranks together, and by stage per rank."""
    one_copy = nominal_bytes(parameters)
    total = sum(one_copy.values())
    return {
        "parameters": parameters,
        "ranks": ranks,
        "bytes": {**one_copy, "total": total},
        "bytes_over_all_ranks": ranks * total,
        "redundant_bytes": nominal_redundancy(parameters, ranks=ranks),
        "stages": [_stage(parameters, ranks, stage) for stage in STAGES],
    }


def _stage(parameters: int, ranks: int, stage: int) -> dict[str, Any]:
    held = nominal_bytes(parameters, ranks=ranks, stage=stage)
    sent = nominal_traffic(parameters, ranks=ranks, stage=stage)
    return {
        "stage": stage,
        "bytes_per_rank": {**held, "total": sum(held.values())},
        "redundant_bytes": nominal_redundancy(parameters, ranks=ranks, stage=stage),
        "sent_elements_per_rank": {**sent, "total": sum(sent.values())},
        "sent_bytes_per_rank": WIRE_BYTES * sum(sent.values()),
    }
