"""What a user sees of a run: its contract, a progress bar, evaluations, the table of states, the sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich import box, text
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from onenth.breakdown import Breakdown, format_bytes
from onenth.config import Precision
from onenth.states import Tier
from onenth.train.material import Material
from onenth.train.options import Options
from onenth.world import World

_NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "master": "master copy",
    "exp_avg": "first moment",
    "exp_avg_sq": "second moment",
    "step": "step counts",
}


class Display:
    """Writes to the terminal on rank 0, and nothing on the others."""

    def __init__(self, world: World) -> None:
        self._console = Console(quiet=world.rank != 0, highlight=False)
        self._progress: Progress | None = None

    def contract(self, options: Options, precision: Precision, world: World) -> None:
        """The first lines: what is stored, summed and sent in which dtype, the global batch, the ranks."""
        ranks, accumulation = world.size, options.accumulation(world.size)
        rows = [f"{what} {dtype}" for what, dtype in precision.table()]
        self._line("precision", ", ".join(rows[:3]) + ",\n" + ", ".join(rows[3:]))
        self._line(
            "batch",
            f"{options.batch * options.sequence:,} tokens = {ranks} ranks x {options.rank_batch(ranks)} "
            f"sequences x {options.sequence} tokens" + (f" x {accumulation} backwards" if accumulation > 1 else ""),
        )
        self._line("ranks", f"{ranks} on {world.device.type}, ZeRO stage {options.stage}")

    def material(self, model: nn.Module, material: Material) -> None:
        """What is trained, on what, and where it goes."""
        words, parameters = material.text, sum(parameter.numel() for parameter in model.parameters())
        self._line("model", f"{material.model_config.model_type}, {parameters:,} parameters")
        self._line(
            "text",
            f"{words.training.numel():,} tokens and {words.held_out.numel():,} held out, of {words.files:,} files",
        )
        self._line("output", str(material.output))

    def _line(self, what: str, content: str) -> None:
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=9, style="bold")
        grid.add_row(what, escape(content))
        self._console.print(grid)

    @contextmanager
    def progress(self, start: int, steps: int) -> Iterator[None]:
        """A bar over the steps, where there is a terminal to draw it in."""
        self._console.print()
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            expand=True,
            disable=self._console.quiet or not self._console.is_terminal,
        )
        self._progress.add_task("", total=steps, completed=start)
        with self._progress:
            yield

    def step(self, *, done: int, loss: float, tokens_per_second: float, held: int) -> None:
        """Move the bar; `held`: bytes of model states on the rank that holds most."""
        if self._progress is not None:
            what = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  {format_bytes(held)}/rank"
            self._progress.update(self._progress.task_ids[0], completed=done, description=what)

    def evaluation(self, *, done: int, loss: float, held_out: float, lr: float) -> None:
        """One line for an evaluation."""
        self._console.print(f"step {done:>6}   loss {loss:.3f}   held-out {held_out:.3f}   lr {lr:.2e}")

    def anatomy(self, path: Path, step: int, verdict: str) -> None:
        """Where the page of a recorded step is, and what it says first."""
        self._line("anatomy", f"{path} of step {step}; {verdict}")

    def outcome(self, held_out: float, unigram: float) -> None:
        """The held-out loss beside the one to beat."""
        self._console.print(f"\nheld-out loss {held_out:.3f} nats a token (unigram: {unigram:.3f})")

    def states(self, report: Breakdown, unsharded: Mapping[str, int], world: World, stage: int) -> None:
        """The table: for each model state, bytes held by this rank, the equation's figure, and unsharded."""
        table = Table(
            title=f"Model states of rank {world.rank} of {world.size}, stage {stage}",
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        table.add_column("model state")
        for heading in ("held by this rank", "the equation", "unsharded"):
            table.add_column(heading, justify="right")
        table.add_column()
        expected = [row for row in report.rows() if row.expected is not None]
        for row in expected:
            tier = "" if row.tier is Tier.DEVICE else f" ({row.tier})"
            figures = [row.held, row.expected or 0, unsharded.get(row.state, 0)]
            name = _NAMES.get(row.state, row.state) + tier
            table.add_row(name, *(f"{figure:,}" for figure in figures), row.note)
        totals = [sum(row.held for row in expected), sum(row.expected or 0 for row in expected)]
        totals.append(sum(unsharded.values()))
        table.add_section()
        table.add_row("bytes in all", *(f"{total:,}" for total in totals), style="bold")
        self._console.print(table)

    def sample(self, prompt: str, generated: str) -> None:
        """The prompt, dim, and what the model made of it."""
        self._console.print("Sample", style="bold")
        self._console.print(text.Text.assemble((_printable(prompt), "dim"), _printable(generated)), "")

    def written(self, output: Path) -> None:
        """Where the results are."""
        self._line("model", f"{output / 'model'}, as transformers reads it")
        self._line("go on", f"onenth train --resume {output} --steps MORE")


def _printable(written: str) -> str:
    """Without the control characters that a model may write, and a terminal obey."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in written
    )
