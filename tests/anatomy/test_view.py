"""The page of real and of long recordings, in a browser where there is one."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onenth
from onenth.anatomy.timeline import Kind, Storage, Timeline
from onenth.anatomy.view import POINTS, describe, page
from onenth.states import Tier
from tests.report.test_page import HOSTILE, recording_of

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
EVENTS = 200_000


class Hostile(nn.Sequential):
    """A model whose modules have names that a page must not take for its own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.add_module(HOSTILE.replace(".", ""), nn.Linear(64, 64))


def recorded() -> onenth.Anatomy:
    model = Hostile()
    optimizer = torch.optim.AdamW(model.parameters())
    with onenth.record(model, optimizer) as anatomy:
        for _ in range(2):
            model(torch.ones(512, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return anatomy


def long_recording(events: int = EVENTS) -> onenth.Anatomy:
    """Storages of many owners that come and go; each owner has one peak of a single event."""
    source, timeline, held = random.Random(0), Timeline(parts=["between", "forward", "backward"]), []
    owners = [timeline.name(owner) for owner in ("parameters", "activations", "temporary", "other", "momentum")]
    phase = timeline.name("forward of layer")

    def allocate(size: int, owner: int, turn: int) -> int:
        timeline.storages.append(
            Storage(size, Tier.DEVICE, "aten.mm", "layer", "forward of layer", turn, (size,), "u8")
        )
        timeline.add(Kind.ALLOCATION, len(timeline.storages) - 1, owner, owner, phase, turn)
        return len(timeline.storages) - 1

    while len(timeline) < events:
        turn = 3 * len(timeline) // events
        owner = owners[source.randrange(len(owners))]
        if len(timeline) % 39_989 == 0:  # a spike of the owner whose turn it is
            owner = owners[len(timeline) // 39_989 % len(owners)]
            number = allocate(10**9, owner, turn)
            timeline.add(Kind.RELEASE, number, owner, owner, phase, turn)
        elif held and source.random() < 0.5:
            number, owner = held.pop(source.randrange(len(held)))
            timeline.add(Kind.RELEASE, number, owner, owner, phase, turn)
        else:
            held.append((allocate(source.randrange(1, 10**6), owner, turn), owner))
    return onenth.Anatomy(timeline, title="Long")


@pytest.fixture(scope="module")
def long() -> onenth.Anatomy:
    return long_recording()


def test_thinning_loses_no_peak(long: onenth.Anatomy) -> None:
    """Every owner's, the total's and the simulated allocator's are points of the page, and the turns' ends are."""
    data = describe(long, [long])
    assert len(data.positions) <= 1.02 * POINTS
    assert max(data.totals) == long.peak.total
    assert {owner.owner: max(owner.series) for owner in data.owners} == long.owner_peaks
    assert max(data.reserved) == long.reserved().peak_reserved
    assert {at for turn in data.turns for at in (turn.start, turn.end)} <= set(data.positions)
    for at, total in zip(data.positions, data.totals, strict=True):
        assert total == long.totals()[at]
    assert [sum(column) for column in zip(*(owner.series for owner in data.owners), strict=True)] == data.totals


def test_a_page_of_ranks_shows_the_one_that_holds_most() -> None:
    """The others are in the spread."""
    small, large = recorded(), recorded()
    large.rank = 1
    with onenth.record(Hostile()) as nothing:
        pass
    nothing.rank = 2
    data = recording_of(page([large, small, nothing]))
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1, 2]
    assert sum(data["ranks"][1]["owners"].values()) == large.peak.total
    assert data["peak"]["bytes"] == large.peak.total


def test_the_method_writes_the_page(tmp_path: Path) -> None:
    """`anatomy.page(path)`; the numbers are the anatomy's."""
    anatomy = recorded()
    anatomy.page(tmp_path / "run.html")
    data = recording_of((tmp_path / "run.html").read_text())
    assert {owner["owner"]: owner["peak"] for owner in data["owners"]} == anatomy.owner_peaks
    assert data["modules"] == anatomy.by_module()
    assert data["verdict"] == anatomy.verdict()
    onenth.Anatomy().page(tmp_path / "empty.html")
    assert "nothing was recorded" in (tmp_path / "empty.html").read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no chromium with its chromedriver on this machine")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def test_a_browser_shows_the_page(browser: Any, tmp_path: Path) -> None:
    """No error, no request, no name taken for a script; hover and toggles work; tables have the JSON's numbers."""
    anatomy = recorded()
    anatomy.page(tmp_path / "run.html")
    browser.get((tmp_path / "run.html").as_uri())
    run = browser.execute_script
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    asked = [
        entry["message"]
        for entry in browser.get_log("performance")
        if '"Network.requestWillBeSent"' in entry["message"]
    ]
    assert [message for message in asked if '"url":"http' in message] == []
    for chart in ("area", "reserved", "bars", "treemap"):
        assert run(f"return document.querySelectorAll('#{chart} .main-svg').length"), chart
    run("Plotly.Fx.hover('area', [{curveNumber: 0, pointNumber: 5}])")
    time.sleep(0.3)
    assert run("return document.querySelectorAll('#area .hoverlayer text').length")
    entry = "document.querySelector('#area .legendtoggle')"
    run(f"for (const kind of ['mousedown', 'mouseup']) {entry}.dispatchEvent(new MouseEvent(kind, {{bubbles: true}}))")
    time.sleep(0.7)
    assert run("return document.getElementById('area').data.map(trace => trace.visible)").count("legendonly") == 1
    rows = run("return [...document.querySelectorAll('#owners tr')].map(r => [...r.cells].map(c => c.textContent))")
    shown = {row[0]: int(row[2].replace(",", "")) for row in rows[1:-1]}
    assert shown == {owner: count for owner, count in anatomy.owner_peaks.items() if count}
    assert rows[-1][:2] == ["in all", f"{anatomy.peak.total:,}"]
    assert sum(int(row[1].replace(",", "")) for row in rows[1:-1]) == anatomy.peak.total


def test_a_long_recording_opens_at_once(browser: Any, long: onenth.Anatomy, tmp_path: Path) -> None:
    """Under 10 MB, and drawn within 3 s, for 200,000 events."""
    path = tmp_path / "long.html"
    long.page(path)
    assert path.stat().st_size < 10e6
    seconds = []
    for _ in range(3):  # the machine may be busy with something else
        began = time.monotonic()
        browser.get(path.as_uri())
        assert browser.execute_script("return document.querySelectorAll('#area .main-svg').length")
        seconds.append(time.monotonic() - began)
    assert min(seconds) < 3
