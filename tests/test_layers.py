"""The package is built in layers: a module imports lower layers, or its own without a cycle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "onenth"
LAYERS = {
    "states": 0,
    "errors": 0,
    "config": 1,
    "breakdown": 1,
    "costs": 1,
    "partition": 1,
    "ledger": 2,
    "comm": 2,
    "world": 2,
    "model_states": 3,
    "residual_states": 3,
    "engine": 4,
    "report": 4,
    "checkpoint": 5,
    "anatomy": 5,
    "plan": 5,
    "api": 6,
    "launch": 6,
    "train": 6,
    "cli": 6,
    "__init__": 7,
    "__main__": 7,
}


def part_of(path: Path) -> str:
    """The part of the package that a file belongs to: a module of its own, or a directory."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(source: str) -> Iterator[str]:
    """The parts of the package that a source imports, wherever in the file, for types only too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, *rest = name.split(".")
            if package == "onenth":
                yield rest[0] if rest and rest[0] in LAYERS else "__init__"


def imports() -> dict[str, set[str]]:
    """Part -> the other parts that its files import."""
    graph: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        part = part_of(path)
        graph.setdefault(part, set()).update(set(imported(path.read_text())) - {part})
    return graph


def test_every_file_has_a_layer() -> None:
    """A new module is given its layer here before anything imports it."""
    assert {part_of(path) for path in PACKAGE.rglob("*.py")} <= set(LAYERS)


def test_nothing_imports_a_higher_layer() -> None:
    """No import points upwards, not even one inside a function or for types only."""
    upwards = [
        f"{part} [{LAYERS[part]}] imports {other} [{LAYERS[other]}]"
        for part, others in imports().items()
        for other in others
        if LAYERS[other] > LAYERS[part]
    ]
    assert upwards == []


def test_no_cycles() -> None:
    """Parts of one layer import each other in one direction only."""
    TopologicalSorter(imports()).prepare()


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("import torch\nfrom typing import Any", []),
        ("from onenth.comm import Comm", ["comm"]),
        ("from onenth import comm, ledger", ["comm", "ledger"]),
        ("from onenth.engine.machine import Machine", ["engine"]),
        ("def f():\n    import onenth.api", ["api"]),
        ("from onenth import shard", ["__init__"]),
    ],
)
def test_the_reader_of_imports(source: str, parts: list[str]) -> None:
    """Every way to write an import is seen, so that the tests above cannot pass by reading nothing."""
    assert list(imported(source)) == parts
