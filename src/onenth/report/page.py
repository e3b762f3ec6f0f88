"""The page of a memory recording: one HTML file that needs no network, for a browser and for people without charts.

What the charts draw is in the page once, as JSON (`<script id="recording">`), bytes throughout; `page.js` draws it with
plotly.js, which comes with the Python package of that name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

from onenth.breakdown import format_bytes
from onenth.errors import AnatomyError

#: One colour for each owner, in every chart; neighbours differ for colour-blind readers too.
COLORS: Mapping[str, str] = {
    "parameters": "#0072B2",
    "gradients": "#D55E00",
    "master": "#009E73",
    "exp_avg": "#56B4E9",
    "exp_avg_sq": "#CC79A7",
    "activations": "#E69F00",
    "gathered": "#3F51B5",
    "local_gradients": "#A04030",
    "receive": "#44AA99",
    "sums": "#999933",
    "step_gradient": "#AA4499",
    "temporary": "#E8D44D",
    "inputs": "#2E8B57",
    "outputs": "#9FC5E8",
    "buffers": "#7A4A2B",
    "other": "#8A8F98",
    "unexplained": "#E53935",
}
_OF_AN_OPTIMIZER = ("#6A5ACD", "#5F9EA0", "#BC8F8F", "#708090")  # states that it names itself
_MODULES = 50  # rows in the table of modules


@dataclass(frozen=True)
class Owner:
    """One owner: bytes at the peak of all, at its own peak, by the equation (None: there is none), and over time."""

    owner: str
    at_peak: int
    peak: int
    expected: int | None
    series: Sequence[int]


@dataclass(frozen=True)
class Turn:
    """One forward, loss, backward or step, from its first event to its last."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Peak:
    """The most bytes that are held, the event after which they are, and what ran then."""

    bytes: int
    at: int
    moment: str


@dataclass(frozen=True)
class Rank:
    """What one rank holds at its own peak, by owner, in bytes."""

    rank: int
    owners: Mapping[str, int]


@dataclass(frozen=True)
class PageData:
    """Everything that a page shows. Series run along `positions`, numbers of events of which there are `events`.

    facts: model, stage, ranks, device in words. error: what ended the recording early. peak: None if nothing was
    recorded. phases: what ran at each position. totals: bytes held. reserved, allocated: bytes of the simulated
    allocator. capacity: bytes of the device. outside: bytes of the device that the allocator doesn't know of, by name.
    modules: activation bytes at the peak, by module path. ranks: all that recorded.
    """

    title: str
    facts: str
    verdict: str
    error: str | None
    findings: Sequence[str]
    peak: Peak | None
    events: int
    positions: Sequence[int]
    phases: Sequence[str]
    turns: Sequence[Turn]
    totals: Sequence[int]
    owners: Sequence[Owner]
    reserved: Sequence[int]
    allocated: Sequence[int]
    capacity: int | None
    modules: Mapping[str, int]
    ranks: Sequence[Rank]
    outside: Mapping[str, int] = field(default_factory=dict)


def render(data: PageData) -> str:
    """The page. Raises AnatomyError if plotly is not installed."""
    body = _charts(data) if data.peak is not None else ""
    drawing = f"<script>{_plotly()}</script>\n<script>{_read('page.js')}</script>" if data.peak is not None else ""
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>Memory of {escape(data.title)}</title>
<style>{_read("page.css")}</style>
</head>
<body>
{_header(data)}
{body}
<script type="application/json" id="recording">{_json(_recording(data))}</script>
{drawing}
</body>
</html>
"""


def _read(name: str) -> str:
    return files("onenth.report").joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise AnatomyError("a page needs plotly: pip install 'onenth[page]'") from None
    return str(get_plotlyjs())


def _json(value: Any) -> str:
    """JSON that no text in it can end early: a script element ends at the first "</script"."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _recording(data: PageData) -> dict[str, Any]:
    spare = iter(_OF_AN_OPTIMIZER * len(data.owners))
    owners = [asdict(owner) | {"color": COLORS.get(owner.owner) or next(spare)} for owner in data.owners]
    return asdict(data) | {"owners": owners, "tree": tree(data.modules, data.title)}


def tree(modules: Mapping[str, int], title: str) -> dict[str, list[Any]]:
    """Modules as a tree: ids, labels, parents and values (bytes with all below) of its nodes, the model first.

    A node's own bytes are what its value has beyond those of its children.
    """
    values: dict[str, int] = {"": 0}
    for path, count in modules.items():
        parts = path.split(".") if path else []
        for depth in range(len(parts) + 1):
            node = ".".join(parts[:depth])
            values[node] = values.get(node, 0) + count
    name = title or "the model"
    return {
        "ids": [node or name for node in values],
        "labels": [node.rpartition(".")[2] or name for node in values],
        "parents": ["" if not node else node.rpartition(".")[0] or name for node in values],
        "values": list(values.values()),
    }


def _header(data: PageData) -> str:
    ended = "" if data.error is None else f'<p class="ended">The recording ended early: {escape(data.error)}</p>'
    found = "".join(f"<li>{escape(finding)}</li>" for finding in data.findings)
    return f"""<h1>Memory of {escape(data.title)}</h1>
<p class="facts">{escape(data.facts)}</p>
<p class="verdict">{escape(data.verdict)}</p>
{ended}
{f'<ul class="findings">{found}</ul>' if found else ""}"""


def _section(title: str, note: str, content: str) -> str:
    return f'<h2>{title}</h2>\n<p class="note">{note}</p>\n{content}\n'


def _chart(name: str, what: str, kind: str = "chart") -> str:
    return f'<div class="{kind}" id="{name}" role="img" aria-label="{what}; the tables below have its numbers"></div>'


def _charts(data: PageData) -> str:
    outside = ", ".join(f"{escape(name)} {format_bytes(count)}" for name, count in data.outside.items())
    known = f" Beside them on the device: {outside}." if outside else ""
    limit = "" if data.capacity is None else f" Dashed: the device's {format_bytes(data.capacity)}."
    sections = [
        _section(
            "Bytes over the step",
            "By owner, after each allocation and release. Click a name to leave an owner out; drag to look "
            "closer, and double-click to go back.",
            _chart("area", "Bytes by owner over the step"),
        ),
        _section(
            "Reserved on a GPU",
            f"Simulated: what CUDA's caching allocator would reserve for these events.{limit}{known}",
            _chart("reserved", "Bytes reserved and allocated", "chart low"),
        ),
        _section(
            "Measured against the equations",
            "Each owner at its own peak; the equations speak of model states.",
            _chart("bars", "Bytes by owner beside the equations", "bars"),
        ),
    ]
    if data.modules:
        note = "What autograd keeps for the backward pass at the peak, by the module that keeps it."
        sections.append(_section("Activations by module", note, _chart("treemap", "Activations by module")))
    if len(data.ranks) > 1:
        note = "Each rank at its own peak."
        sections.append(_section("Ranks", note, _chart("ranks", "Bytes by owner of every rank", "chart low")))
    return "".join([*sections, _owners_table(data), _modules_table(data)])


def _owners_table(data: PageData) -> str:
    rows = [
        [owner.owner, f"{owner.at_peak:,}", f"{owner.peak:,}", *_against(owner)]
        for owner in data.owners
        if owner.peak or owner.expected
    ]
    total = "" if data.peak is None else f"{data.peak.bytes:,}"
    head = ["owner", "at the peak", "own peak", "equation", "difference"]
    table = _table("owners", head, rows, ["in all", total, "", "", ""])
    return _section("Owners in bytes", "Model states, then all else. The column “at the peak” adds up.", table)


def _against(owner: Owner) -> list[str]:
    if owner.expected is None:
        return ["", ""]
    beyond = owner.peak - owner.expected
    return [f"{owner.expected:,}", f"{beyond:+,}" if beyond else "0"]


def _modules_table(data: PageData) -> str:
    if not data.modules:
        return ""
    shown = list(data.modules.items())[:_MODULES]
    left = len(data.modules) - len(shown)
    rows = [[path or data.title, f"{count:,}"] for path, count in shown]
    note = f"The {len(shown)} largest; {left} more hold less." if left else "At the peak."
    total = ["in all", f"{sum(data.modules.values()):,}"]
    return _section("Activations in bytes", note, _table("modules", ["module", "bytes"], rows, total))


def _table(name: str, head: Sequence[str], rows: Sequence[Sequence[str]], foot: Sequence[str]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return (
        f'<div class="scroll"><table id="{name}"><thead>{line(head, "th")}</thead>'
        f"<tbody>{body}</tbody><tfoot>{line(foot, 'td')}</tfoot></table></div>"
    )
