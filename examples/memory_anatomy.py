"""The memory anatomy of the default job of `onenth train`: the tables of docs/anatomy.md.

    python examples/memory_anatomy.py

Three short runs on two ranks (stage 0, stage 3, stage 3 with recomputation), of each of which one step is recorded.
Takes about a minute on two cores; leaves nothing behind.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import onenth
from onenth.breakdown import format_bytes
from onenth.residual_states.fragmentation import Settings

RUNS = {
    "stage 0": ["--stage", "0"],
    "stage 3": ["--stage", "3"],
    "stage 3, recomputed": ["--stage", "3", "--activations", "recompute"],
}
SHORT = ["--steps", "3", "--sample", "0"]


def record(options: list[str]) -> onenth.Anatomy:
    """Rank 0's recording of the third step of the default job with these options."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "run.html")
        words = ["train", "--ranks", "2", *SHORT, *options, "--anatomy", str(page), "--output", f"{folder}/out"]
        subprocess.run([sys.executable, "-m", "onenth", *words], check=True, stdout=subprocess.DEVNULL)
        return onenth.Anatomy.load(page.with_suffix(".rank0.json"))


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown, its numbers to the right."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *rows])


def owners(anatomies: Mapping[str, onenth.Anatomy]) -> str:
    """Each owner's own peak in every run, with the equation of model states; the last row: the peak of all."""
    peaks = {name: anatomy.owner_peaks for name, anatomy in anatomies.items()}
    equations = {name: {row.owner: row.expected for row in one.rows()} for name, one in anatomies.items()}
    rows = []
    for owner in dict.fromkeys(row.owner for anatomy in anatomies.values() for row in anatomy.rows()):
        cells = []
        for name in anatomies:
            equation, held = equations[name].get(owner), peaks[name].get(owner, 0)
            mark = "" if equation is None else " =" if equation == held else f" (equation: {format_bytes(equation)})"
            cells.append(f"{format_bytes(held)}{mark}")
        rows.append([owner, *cells])
    rows.append(["**peak**", *(f"**{format_bytes(anatomy.peak.total)}**" for anatomy in anatomies.values())])
    moments = ["where", *(anatomy.peak_moment for anatomy in anatomies.values())]
    return table(["owner", *anatomies], [*rows, moments])


def kinds_of_modules(anatomy: onenth.Anatomy) -> str:
    """Activations at the peak by what the module is, summed over the layers."""
    sums: Counter[str] = Counter()
    for path, count in anatomy.by_module().items():
        sums[".".join(part for part in path.split(".") if not part.isdigit()) or "(the model itself)"] += count
    return table(["module", "bytes"], [[path, format_bytes(count)] for path, count in sums.most_common()])


def allocator(anatomies: Mapping[str, onenth.Anatomy]) -> str:
    """What CUDA's caching allocator would have reserved, by default and with expandable segments."""
    rows = []
    for name, anatomy in anatomies.items():
        plain = anatomy.reserved()
        expandable = anatomy.reserved(Settings(expandable_segments=True))
        cells = [plain.peak_allocated, plain.peak_reserved, plain.fragmentation, expandable.peak_reserved]
        rows.append([name, *map(format_bytes, cells)])
    return table(["run", "allocated", "reserved", "fragmentation then", "reserved, expandable segments"], rows)


def show() -> None:
    """Run the jobs and print every table."""
    anatomies = {name: record(options) for name, options in RUNS.items()}
    print("## Owners, each at its own peak\n", owners(anatomies), sep="\n")
    print("\n## Activations at the peak of stage 3\n", kinds_of_modules(anatomies["stage 3"]), sep="\n")
    print("\n## The caching allocator, simulated\n", allocator(anatomies), sep="\n")


if __name__ == "__main__":
    show()
