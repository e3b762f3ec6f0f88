"""The page as text: whole without a network, its numbers once as JSON and once as tables, hostile names harmless."""

from __future__ import annotations

import html
import json
import re
import sys
from dataclasses import replace
from typing import Any

import pytest

from onenth.errors import AnatomyError
from onenth.report.page import COLORS, Owner, PageData, Peak, Rank, Turn, render, tree
from onenth.states import ModelState, ResidualState

HOSTILE = "</script><script>alert(1)</script>"
DATA = PageData(
    title="Model",
    facts="ZeRO stage 3, rank 0 of 2, on cpu; 3 events",
    verdict="peak 30 B in forward of a; parameters hold 20 B of it",
    error=None,
    findings=["gradients, 10 B: call zero_grad()"],
    peak=Peak(30, 1, "forward of a"),
    events=3,
    positions=[0, 1, 2],
    phases=["forward of a"] * 3,
    turns=[Turn("forward", 0, 2)],
    totals=[20, 30, 20],
    owners=[Owner("parameters", 20, 20, 20, [20, 20, 20]), Owner("momentum", 10, 12, 10, [0, 10, 0])],
    reserved=[512, 1024, 1024],
    allocated=[512, 1024, 512],
    capacity=2048,
    modules={"a.b": 7, "": 2, "a": 1},
    ranks=[Rank(0, {"parameters": 20, "momentum": 10}), Rank(1, {"parameters": 20})],
    outside={"context": 100},
)


def recording_of(page: str) -> dict[str, Any]:
    """The JSON in a page, as a reader finds it."""
    found = re.search(r'<script type="application/json" id="recording">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_tables_and_json_have_the_same_numbers() -> None:
    """Every owner and module, and the sum."""
    page = render(DATA)
    data = recording_of(page)
    assert data["peak"] == {"bytes": 30, "at": 1, "moment": "forward of a"}
    assert [(owner["owner"], owner["peak"], owner["expected"]) for owner in data["owners"]] == [
        ("parameters", 20, 20),
        ("momentum", 12, 10),
    ]
    assert "<tr><td>parameters</td><td>20</td><td>20</td><td>20</td><td>0</td></tr>" in page
    assert "<tr><td>momentum</td><td>10</td><td>12</td><td>10</td><td>+2</td></tr>" in page
    assert "<tr><td>in all</td><td>30</td><td></td><td></td><td></td></tr>" in page
    assert "<tr><td>Model</td><td>2</td></tr>" in page
    assert "context 100 B" in page
    assert "call zero_grad()" in page


def test_a_page_needs_no_network() -> None:
    """Nothing is loaded from anywhere, and the browser is told to refuse it."""
    page = render(DATA)
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert "http://" not in own
    assert "https://" not in own
    assert "default-src 'none'" in own
    assert len(page.encode()) < 10e6


def test_hostile_names_are_text() -> None:
    """In the tables and in the JSON; what was a name comes back as it was."""
    owners = [replace(DATA.owners[0], owner=HOSTILE)]
    page = render(replace(DATA, title=HOSTILE, verdict=HOSTILE, error=HOSTILE, modules={HOSTILE: 5}, owners=owners))
    assert "<script>alert" not in page
    assert html.escape(HOSTILE) in page
    data = recording_of(page)
    assert data["title"] == data["error"] == data["owners"][0]["owner"] == HOSTILE
    assert list(data["modules"]) == [HOSTILE]


def test_the_tree_of_modules_adds_up() -> None:
    """A parent's value is its own bytes and its children's."""
    found = tree(DATA.modules, "Model")
    assert dict(zip(found["ids"], found["values"], strict=True)) == {"Model": 10, "a": 8, "a.b": 7}
    assert dict(zip(found["ids"], found["parents"], strict=True)) == {"Model": "", "a": "Model", "a.b": "a"}
    assert found["labels"] == ["Model", "a", "b"]


def test_every_state_has_a_color_of_its_own() -> None:
    """And so has what an optimizer names itself."""
    assert set(COLORS) == {*map(str, ModelState), *map(str, ResidualState)}
    assert len(set(COLORS.values())) == len(COLORS)
    assert recording_of(render(DATA))["owners"][1]["color"] not in COLORS.values()


def test_nothing_recorded_is_a_page_too() -> None:
    """It says so, and draws nothing."""
    empty = replace(DATA, peak=None, verdict="nothing was recorded", events=0, positions=[], owners=[], modules={})
    page = render(empty)
    assert "nothing was recorded" in page
    assert "Plotly" not in page


def test_without_plotly_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line."""
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(AnatomyError, match=r"pip install 'onenth\[page\]'"):
        render(DATA)
