"""The documentation: its code runs, its links lead somewhere, and it speaks of everything that is public."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import onenth

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def name_of(page: Path) -> str:
    """A page's path in the repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[int, str]]:
    """The Python blocks of a page, each with the number of its first line."""
    text = page.read_text()
    return [(text.count("\n", 0, found.start(1)) + 1, found[1]) for found in BLOCK.finditer(text)]


def broken_links(page: Path) -> list[str]:
    """Links to files that do not exist, or to headings that their page does not have."""
    broken = []
    for target in LINK.findall(page.read_text()):
        path, _, anchor = target.partition("#")
        if target.startswith("http"):
            continue
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


def anchors(page: Path) -> set[str]:
    """What links to a page's headings say after the hash."""
    headings = HEADING.findall(page.read_text())
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process of its own, as a reader starts it: no group before, none left over, the same random numbers."""
    had = dist.is_initialized()
    torch.manual_seed(0)
    yield
    if dist.is_initialized() and not had:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name_of)
def test_blocks_run(page: Path) -> None:
    """The Python blocks of a page run one after another in one namespace, on one rank."""
    namespace: dict[str, object] = {"__name__": page.stem}
    for line, block in blocks(page):
        source = "\n" * (line - 1) + block  # so that a traceback names the line of the page
        exec(compile(source, str(page), "exec", dont_inherit=True), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Every link to a file or a heading in the repository has its target."""
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    """A missing file and a missing heading are reported, and what exists is not."""
    page = tmp_path / "page.md"
    page.write_text("# One, two\n[a](page.md#one-two) [b](#three) [c](gone.md) [d](https://example.org)\n")
    assert broken_links(page) == ["#three", "gone.md"]


def test_everything_public_is_described() -> None:
    """The page on the interface speaks of each public name and each field of `Config`, `Precision` and `LossScale`."""
    text = (ROOT / "docs" / "interface.md").read_text()
    settings = [field.name for cls in (onenth.Config, onenth.Precision, onenth.LossScale) for field in fields(cls)]
    missing = [name for name in onenth.__all__ if f"onenth.{name}" not in text]
    missing += [name for name in settings if f"`{name}" not in text]
    assert missing == []


def test_defaults_are_as_described() -> None:
    """The table of `Config` on that page gives each field's default."""
    text = (ROOT / "docs" / "interface.md").read_text()
    described = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text, re.MULTILINE))
    default = onenth.Config()
    actual = {field.name: getattr(default, field.name) for field in fields(onenth.Config)}
    told = {name: eval(value, {"LossScale": onenth.LossScale}) for name, value in described.items()}
    assert told == actual


def test_pictures_show_the_last_drawing() -> None:
    """Of a line drawn several times a picture shows the last drawing, and nothing of what `script` adds."""
    shown = runpy.run_path(str(ROOT / "docs" / "figures" / "terminal.py"))["shown"]
    recording = "Script started on A\n\x1b[?25lstep 1\r\x1b[2Kstep 2\r\n\x1b[?25hdone\r\n\nScript done on B\n"
    assert shown(recording) == ["step 2", "done"]
