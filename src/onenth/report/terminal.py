"""Tables in the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from onenth.breakdown import format_bytes
from onenth.costs import (
    BYTES_PER_PARAMETER,
    WIRE_BYTES,
    is_partitioned,
    nominal_bytes,
    nominal_redundancy,
    nominal_traffic,
)
from onenth.states import STAGES, ModelState

_MEANING = {
    ModelState.PARAMETERS: "16-bit",
    ModelState.GRADIENTS: "16-bit",
    ModelState.MASTER: "fp32 parameters",
    ModelState.EXP_AVG: "fp32 first moment",
    ModelState.EXP_AVG_SQ: "fp32 second moment",
}


def print_equations(parameters: int, ranks: int, console: Console | None = None) -> None:
    """What mixed-precision Adam holds for this many parameters, and what each stage leaves of it per rank."""
    console = console or Console(highlight=False)
    one_copy = sum(nominal_bytes(parameters).values())
    redundant = nominal_redundancy(parameters, ranks=ranks)
    console.print(_model_states(parameters))
    console.print(
        f"{format_bytes(ranks * one_copy)} over {ranks:,} data-parallel rank{'s' * (ranks > 1)}, "
        f"{format_bytes(redundant)} of it redundant\n"
    )
    console.print(_stages(parameters, ranks))
    console.print(
        "Sent: by one rank in a step of one backward, in 16 bits. Padding, activations and temporary "
        "buffers come on top. Rajbhandari et al., 2020, arXiv 1910.02054, sections 3, 5 and 7.",
        style="dim",
    )


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _model_states(parameters: int) -> Table:
    table = _table(f"Model states of {parameters:,} parameters under mixed-precision Adam")
    table.add_column("state")
    table.add_column("bytes each", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("partitioned from", justify="right")
    table.add_column("what it is")
    for state, count in nominal_bytes(parameters).items():
        first = next(stage for stage in STAGES if is_partitioned(state, stage))
        each = str(BYTES_PER_PARAMETER[state])
        table.add_row(state, each, format_bytes(count), f"stage {first}", _MEANING[ModelState(state)])
    table.add_section()
    total = format_bytes(sum(nominal_bytes(parameters).values()))
    table.add_row("in all", str(sum(BYTES_PER_PARAMETER.values())), total, style="bold")
    return table


def _stages(parameters: int, ranks: int) -> Table:
    table = _table(f"What each stage leaves per rank, over {ranks:,} rank{'s' * (ranks > 1)}")
    table.add_column("stage")
    for state in (*BYTES_PER_PARAMETER, "in all", "sent"):
        table.add_column(state, justify="right", style="bold" if state == "in all" else None)
    for stage in STAGES:
        held = nominal_bytes(parameters, ranks=ranks, stage=stage)
        sent = WIRE_BYTES * sum(nominal_traffic(parameters, ranks=ranks, stage=stage).values())
        cells = [*held.values(), sum(held.values()), sent]
        table.add_row(str(stage), *map(format_bytes, cells))
    return table
