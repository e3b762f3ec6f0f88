"""`onenth anatomy`: tables whose numbers are the anatomy's, pages, differences, and files that are none."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onenth
from onenth import cli
from onenth.anatomy.anatomy import compare
from onenth.breakdown import format_bytes
from tests.anatomy.test_snapshot import MAIN, MIB, MODEL, NATIVE, block, segment, sixteens_then_32, snapshot
from tests.report.test_page import recording_of


def recorded(width: int, path: Path) -> onenth.Anatomy:
    model = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    with onenth.record(model, optimizer) as anatomy:
        model(torch.ones(512, 64)).square().mean().backward()
        optimizer.step()
    anatomy.save(path)
    return anatomy


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two recordings' files."""
    folder = tmp_path_factory.mktemp("runs")
    recorded(256, folder / "a.json")
    recorded(128, folder / "b.json")
    return folder / "a.json", folder / "b.json"


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    code = cli.main(["anatomy", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


def cells(text: str, label: str) -> list[str]:
    """The cells of the first line that starts with a label."""
    line = next(line for line in text.splitlines() if line.strip().startswith(label))
    return re.split(r"\s{2,}", line.strip())


@pytest.mark.parametrize("width", ["80", "120"])
def test_show_a_recording(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, runs: tuple[Path, Path], width: str
) -> None:
    """Verdict and every owner; "in all" is the peak; no line is wider than the terminal."""
    monkeypatch.setenv("COLUMNS", width)
    anatomy = onenth.Anatomy.load(runs[0])
    code, out, err = run(capsys, "show", runs[0])
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= int(width)
    assert anatomy.verdict() in " ".join(out.split())
    for row in anatomy.rows():
        shown = [row.owner, format_bytes(row.at_peak), format_bytes(row.peak)]
        assert cells(out, f"{row.owner} ")[:3] == shown
    assert cells(out, "in all")[1] == format_bytes(anatomy.peak.total)
    assert format_bytes(anatomy.reserved().peak_reserved) in out


def test_show_as_json(capsys: pytest.CaptureFixture[str], runs: tuple[Path, Path]) -> None:
    """The same numbers, in bytes; owners add up to the peak."""
    anatomy = onenth.Anatomy.load(runs[0])
    data = json.loads(run(capsys, "show", runs[0], "--json")[1])
    assert data["peak"] == anatomy.peak.total == sum(owner["at_peak"] for owner in data["owners"].values())
    assert {owner: found["peak"] for owner, found in data["owners"].items()} == anatomy.owner_peaks
    assert data["modules"] == anatomy.by_module()
    assert data["peak_moment"] == anatomy.peak_moment


def test_many_modules_are_summed_up(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Ten rows, and one for the rest; they add up."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(30)])
    with onenth.record(model) as anatomy:
        output = model(torch.ones(4, 8, requires_grad=True))
    del output
    anatomy.save(tmp_path / "many.json")
    out = run(capsys, "show", tmp_path / "many.json")[1]
    left = len(anatomy.by_module()) - 10
    assert cells(out, f"{left} more modules")[1] == format_bytes(sum(list(anatomy.by_module().values())[10:]))


def test_diff(capsys: pytest.CaptureFixture[str], runs: tuple[Path, Path]) -> None:
    """Each owner at its own peak with its sign, and the peaks of all in the last row."""
    rows = compare(*map(onenth.Anatomy.load, runs))
    code, out, _ = run(capsys, "diff", *runs)
    assert code == 0
    for row in rows:
        sign = "+" if row.change > 0 else ""
        expected = [row.owner, format_bytes(row.first), format_bytes(row.second), sign + format_bytes(row.change)]
        assert cells(out, f"{row.owner} ") == expected
    assert min(row.change for row in rows) < 0
    data = json.loads(run(capsys, "diff", *reversed(runs), "--json")[1])
    assert data["owners"]["in all"]["change"] == -rows[-1].change > 0
    assert data["first"]["peak_moment"] == onenth.Anatomy.load(runs[1]).peak_moment
    assert "not alike" not in out


def test_diff_says_what_differs(capsys: pytest.CaptureFixture[str], runs: tuple[Path, Path], tmp_path: Path) -> None:
    """Recordings of another stage, model or number of ranks can be compared, and should be known to be so."""
    other = onenth.Anatomy.load(runs[1])
    other.stage, other.ranks, other.title = 2, 8, "Other"
    other.save(tmp_path / "other.json")
    assert "not alike  title, stage, ranks" in run(capsys, "diff", runs[0], tmp_path / "other.json")[1]


def test_page(capsys: pytest.CaptureFixture[str], runs: tuple[Path, Path], tmp_path: Path) -> None:
    """Beside the first recording or where it is wanted; never over a recording."""
    code, out, _ = run(capsys, "page", *runs)
    assert (code, out) == (0, f"{runs[0].with_suffix('.html')}\n")
    assert len(recording_of(runs[0].with_suffix(".html").read_text())["ranks"]) == 2
    assert run(capsys, "page", runs[0], "--output", tmp_path / "x.html")[0] == 0
    assert (tmp_path / "x.html").exists()
    before = runs[0].read_text()
    code, _, err = run(capsys, "page", *runs, "--output", runs[1])
    assert code == 2
    assert "is one of the recordings" in err
    linked = tmp_path / "linked.html"
    linked.hardlink_to(runs[0])
    assert run(capsys, "page", runs[0], "--output", linked)[0] == 2
    assert runs[0].read_text() == before
    assert run(capsys, "page")[0] == 2


def dump(path: Path, content: object) -> Path:
    path.write_bytes(pickle.dumps(content))
    return path


def test_show_a_snapshot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Pools with their sum, holders by user code, and what expandable segments would have done."""
    frames = [NATIVE, MODEL, MAIN]
    held = [
        segment(0, block(6 * MIB, 5 * MIB, frames=frames), block(14 * MIB, state="inactive")),
        segment(64 * MIB, block(16 * MIB), stream=7),
    ]
    out = run(capsys, "show", dump(tmp_path / "held.pickle", snapshot(held)))[1]
    rows = [cells(out, label) for label in ("0, large, 0", "0, large, 7", "in all")]
    expected = [(20, 6, 5, 14), (16, 16, 16, 0), (36, 22, 21, 14)]
    assert [row[1:] for row in rows] == [[format_bytes(count * MIB) for count in row] for row in expected]
    assert cells(out, "/home/me/model.py:12")[-1] == format_bytes(6 * MIB)
    assert "no trace was recorded" in out

    path = dump(tmp_path / "failed.pickle", sixteens_then_32(failed=True))
    out = run(capsys, "show", path)[1]
    assert "both would have fitted" in " ".join(out.split())
    assert "out of memory on device 0" in out
    data: dict[str, Any] = json.loads(run(capsys, "show", path, "--json")[1])
    (replay,) = data["replays"]
    assert replay["fits_expandable"] is True
    assert replay["reserved"] > replay["reserved_expandable"]
    assert data["failures"]


def test_control_characters_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str], runs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Nor does markup: a file's text is text."""
    anatomy = onenth.Anatomy.load(runs[0])
    anatomy.title, anatomy.error, anatomy.outside = "\x1b[2J[bold]", "\x1b]0;x\x07[/nope]", {"[/x]": 5}
    anatomy.save(tmp_path / "hostile.json")
    code, out, _ = run(capsys, "show", tmp_path / "hostile.json")
    assert code == 0
    assert "\x1b" not in out
    assert "[bold]" in out


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("capacity",), "x"),
        (("outside",), {"n": "x"}),
        (("expected",), {"parameters": {"device": "x"}}),
        (("title",), [1]),
        (("error",), [1]),
        (("rank",), "x"),
        (("stage",), 1.5),
        (("storages", "bytes", 0), "x"),
        (("storages", "bytes", 0), -5),
        (("storages", "bytes", 0), 1.5),
        (("storages", "shape", 0), ["x"]),
    ],
)
def test_values_of_another_type_are_refused(
    capsys: pytest.CaptureFixture[str], runs: tuple[Path, Path], tmp_path: Path, where: tuple[Any, ...], value: object
) -> None:
    """One line; a page or a difference would fail in the same way."""
    data = json.loads(runs[0].read_text())
    place = data
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    (tmp_path / "bad.json").write_text(json.dumps(data))
    code, out, err = run(capsys, "show", tmp_path / "bad.json")
    assert (code, out, err.count("\n")) == (2, "", 1)


class Code:
    """A pickle that would write a file."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("touched"),))


@pytest.mark.parametrize("command", [["show"], ["page"], ["diff", "{file}"]])
@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"[1]",
        b"{",
        b'{"schema": ' + b"9" * 5000 + b"}",
        b'{"schema": "' + b"x" * 5000 + b'"}',
        b"\x80\x04",
        b"\xff\xfe",
        pickle.dumps(Code()),
        "folder",
    ],
)
def test_bad_files_are_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: list[str],
    content: bytes | str | None,
) -> None:
    """Exit code 2, the file's name, no traceback, and nothing in it runs."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "bad.bin"
    if content == "folder":
        file.mkdir()
    elif isinstance(content, bytes):
        file.write_bytes(content)
    code, out, err = run(capsys, *[word.format(file=file) for word in command], file)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert str(file) in err
    assert len(err) < 300 + len(str(file))
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("command", ["page", "diff"])
def test_a_snapshot_is_no_recording(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    """It can be shown only."""
    file = dump(tmp_path / "held.pickle", snapshot())
    code, _, err = run(capsys, command, *[file] * (2 if command == "diff" else 1))
    assert code == 2
    assert "is a CUDA memory snapshot" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no command given: the commands are show, page and diff"),
        (["sow"], "did you mean show?"),
        (["frobnicate"], "the commands are show, page and diff"),
        (["show"], "onenth anatomy show --help"),
        (["diff", "a.json"], "onenth anatomy diff --help"),
    ],
)
def test_bad_words_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    """What is meant instead."""
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Every subcommand, and where recordings come from."""
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for word in ("show", "page", "diff", "onenth train --anatomy", "_dump_snapshot"):
        assert word in out
