"""Recordings and snapshots of memory in the terminal: tables from plain rows, which numbers never leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from onenth.breakdown import format_bytes

Cells = Sequence[str | int | None]  # numbers are bytes; None is an empty cell


def table(title: str, head: Sequence[str], rows: Sequence[Cells], total: Cells | None = None) -> Table:
    """A table whose first column is text that folds, and whose others are bytes; `total` is its last row."""
    made = Table(
        title=escape(title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    made.add_column(escape(head[0]), overflow="fold")
    for heading in head[1:]:
        made.add_column(escape(heading), justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*map(_cell, row))
    if total is not None:
        made.add_section()
        made.add_row(*map(_cell, total), style="bold")
    return made


def _cell(value: str | int | None) -> str:
    if value is None:
        return ""
    return plain(value) if isinstance(value, str) else format_bytes(value)


def plain(text: str) -> str:
    """Text from a file, without what a terminal or its markup would obey."""
    return escape("".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text))


def largest(counts: Mapping[str, int], count: int, *, rest: str) -> list[tuple[str, int]]:
    """The `count` largest of some bytes by name; what is left is one row more, named `rest` with how many they are."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    shown, left = ordered[:count], ordered[count:]
    if left:
        shown.append((f"{len(left)} {rest}", sum(held for _, held in left)))
    return shown


def facts(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Lines of a name and what is known of it."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, content in rows:
        grid.add_row(plain(name), plain(content))
    console.print(grid)


def remarks(console: Console, lines: Sequence[str]) -> None:
    """Lines under a table."""
    for line in lines:
        console.print(f"- {plain(line)}")
