"""`onenth anatomy`: what a recording or a CUDA memory snapshot holds, as tables, as a page, and beside another one."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from onenth.anatomy.anatomy import Anatomy, compare
from onenth.anatomy.snapshot import Snapshot
from onenth.anatomy.snapshot import load as load_snapshot
from onenth.breakdown import format_bytes
from onenth.cli import parse
from onenth.errors import AnatomyError, ConfigError
from onenth.report.recordings import facts, largest, remarks, table

_HELP = """\
usage: onenth anatomy COMMAND [OPTIONS]

Where the bytes of a recorded step are.

commands:
  show FILE      tables of a recording (JSON) or of a CUDA memory snapshot (pickle)
  page FILE ...  one HTML page of the recordings of one or more ranks
  diff A B       two recordings, owner by owner

A recording comes from `onenth train --anatomy run.html`, or from `with onenth.record(model, optimizer) as anatomy` and
`anatomy.save("run.json")`; a snapshot from `torch.cuda.memory._dump_snapshot`.
"""
_PICKLE = b"\x80"  # how every pickle since protocol 2 begins
_ROWS = 10
_SAME = ("title", "stage", "rank", "ranks", "device")  # what two recordings that are compared should share


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Options of `onenth anatomy show`."""

    file: tyro.conf.Positional[Path]
    """The JSON of a recording, or the pickle of a CUDA memory snapshot."""
    json: bool = False
    """Print the same as JSON, in bytes."""


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """Options of `onenth anatomy page`."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """Recordings, one of each rank."""
    output: Path | None = None
    """Where the page goes; beside the first recording, with .html at the end, if not given."""


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """Options of `onenth anatomy diff`."""

    first: tyro.conf.Positional[Path]
    """A recording."""
    second: tyro.conf.Positional[Path]
    """Another one."""
    json: bool = False
    """Print the same as JSON, in bytes."""


def run(argv: Sequence[str]) -> int:
    """Run one of the subcommands; returns the exit code."""
    command, *rest = argv or [""]
    if command in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    if command in _COMMANDS:
        _COMMANDS[command](rest)
        return 0
    there_are = "the commands are show, page and diff, see onenth anatomy --help"
    if not command:
        raise ConfigError(f"onenth anatomy: no command given: {there_are}")
    close = difflib.get_close_matches(command, _COMMANDS, n=1)
    meant = f"did you mean {close[0]}?" if close else there_are
    raise ConfigError(f"onenth anatomy: no command {command!r}: {meant}")


def _show(argv: Sequence[str]) -> None:
    options = parse(ShowOptions, argv, prog="onenth anatomy show", description="What a recording or a snapshot holds.")
    found = _read(options.file)
    if options.json:
        print(json.dumps(_recording(found) if isinstance(found, Anatomy) else _snapshot(found), indent=2))
    elif isinstance(found, Anatomy):
        _print_recording(found, Console(highlight=False))
    else:
        _print_snapshot(found, Console(highlight=False))


def _page(argv: Sequence[str]) -> None:
    options = parse(PageOptions, argv, prog="onenth anatomy page", description="One HTML page of recordings.")
    from onenth.anatomy.view import page

    if not options.files:
        raise ConfigError("onenth anatomy page: name at least one recording")
    anatomies = [_recorded(file) for file in options.files]
    output = options.output or options.files[0].with_suffix(".html")
    if output.exists() and any(output.samefile(file) for file in options.files):
        raise ConfigError(f"--output {output}: is one of the recordings")
    output.write_text(page(anatomies), encoding="utf-8")
    print(output)


def _diff(argv: Sequence[str]) -> None:
    options = parse(DiffOptions, argv, prog="onenth anatomy diff", description="Two recordings, owner by owner.")
    first, second = _recorded(options.first), _recorded(options.second)
    rows = compare(first, second)
    if options.json:
        changes = {row.owner: {"first": row.first, "second": row.second, "change": row.change} for row in rows}
        print(json.dumps({"first": _about(first), "second": _about(second), "owners": changes}, indent=2))
        return
    console = Console(highlight=False)
    facts(console, [("A", f"{options.first}: {_what(first)}; {first.verdict()}")])
    facts(console, [("B", f"{options.second}: {_what(second)}; {second.verdict()}")])
    if differ := [name for name in _SAME if getattr(first, name) != getattr(second, name)]:
        facts(console, [("not alike", ", ".join(differ))])
    cells = [(row.owner, row.first, row.second, _change(row.change)) for row in rows]
    console.print()
    console.print(table("Each owner at its own peak", ["owner", "A", "B", "change"], cells[:-1], cells[-1]))


_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {"show": _show, "page": _page, "diff": _diff}


def _change(count: int) -> str:
    return f"+{format_bytes(count)}" if count > 0 else format_bytes(count)


def _read(path: Path) -> Anatomy | Snapshot:
    """What a file holds, told by its first byte."""
    try:
        if path.exists() and not path.is_file():
            raise AnatomyError(f"{path}: is no file")
        with path.open("rb") as file:
            first = file.read(1)
    except OSError as error:
        raise AnatomyError(f"{path}: {error.strerror}") from error
    if first not in (_PICKLE, b"{"):
        raise AnatomyError(f"{path}: neither the JSON of a recording nor a CUDA memory snapshot")
    return load_snapshot(path) if first == _PICKLE else Anatomy.load(path)


def _recorded(path: Path) -> Anatomy:
    found = _read(path)
    if isinstance(found, Snapshot):
        raise AnatomyError(f"{path}: is a CUDA memory snapshot, which `show` alone reads; a recording is meant")
    return found


def _what(anatomy: Anatomy) -> str:
    how = "plain PyTorch" if anatomy.stage is None else f"ZeRO stage {anatomy.stage}"
    return f"{anatomy.title or 'a model'}, {how}, rank {anatomy.rank} of {anatomy.ranks} on {anatomy.device}"


def _about(anatomy: Anatomy) -> dict[str, Any]:
    """Which recording it is, and its peak."""
    names = (*_SAME, "error", "peak_moment")
    return {name: getattr(anatomy, name) for name in names} | {"peak": anatomy.peak.total}


def _recording(anatomy: Anatomy) -> dict[str, Any]:
    """A recording's figures as data, in bytes."""
    replay = anatomy.reserved()
    return _about(anatomy) | {
        "owners": {
            row.owner: {
                "at_peak": row.at_peak,
                "peak": row.peak,
                "expected": row.expected,
                "difference": row.difference,
            }
            for row in anatomy.rows()
        },
        "modules": anatomy.by_module(),
        "reserved": replay.peak_reserved,
        "fragmentation": replay.fragmentation,
        "capacity": anatomy.capacity,
        "outside": dict(anatomy.outside),
        "findings": [
            {"owner": finding.owner, "bytes": finding.bytes, "text": finding.text} for finding in anatomy.findings()
        ],
    }


def _print_recording(anatomy: Anatomy, console: Console) -> None:
    data = _recording(anatomy)
    lost = f"{format_bytes(data['reserved'])}, {format_bytes(data['fragmentation'])} more than is allocated then"
    rows = [("recorded", _what(anatomy)), ("verdict", anatomy.verdict())]
    rows += [("ended by", anatomy.error)] if anatomy.error else []
    rows += [("reserved", f"{lost} (CUDA's caching allocator, simulated)")] if anatomy.peak.held else []
    rows += [("device", format_bytes(anatomy.capacity))] if anatomy.capacity is not None else []
    rows += [(name, format_bytes(count)) for name, count in anatomy.outside.items()]
    facts(console, rows)
    cells = [(row.owner, row.at_peak, row.peak, row.expected, row.difference) for row in anatomy.rows()]
    head = ["owner", "at the peak", "own peak", "equation", "difference"]
    console.print()
    console.print(table("Owners", head, cells, ("in all", sum(cell[1] for cell in cells), None, None, None)))
    if modules := {path or anatomy.title: count for path, count in data["modules"].items()}:
        shown = largest(modules, _ROWS, rest="more modules")
        total = ("in all", sum(modules.values()))
        console.print(table("Activations at the peak", ["module", "bytes"], shown, total))
    found = anatomy.findings()
    remarks(console, [str(finding) for finding in found[:_ROWS]])
    if len(found) > _ROWS:
        rest = sum(finding.bytes for finding in found[_ROWS:])
        remarks(console, [f"{len(found) - _ROWS} more findings, {format_bytes(rest)}"])


def _snapshot(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot's figures as data, in bytes."""
    reserved, allocated, requested = snapshot.reserved, snapshot.allocated, snapshot.requested
    return {
        "pools": [
            {
                "where": "{}, {}, {}".format(*key),
                "reserved": reserved[key],
                "allocated": allocated[key],
                "requested": requested[key],
            }
            for key in reserved
        ],
        "holders": [
            {"where": holder.where, "bytes": holder.bytes, "count": holder.count} for holder in snapshot.holders(_ROWS)
        ],
        "failures": [
            {"device": device, "asked": entry.size, "device_free": entry.device_free}
            for device, trace in enumerate(snapshot.traces)
            for entry in trace
            if entry.action == "oom"
        ],
        "replays": [_replayed(snapshot, device) for device, trace in enumerate(snapshot.traces) if trace],
    }


def _replayed(snapshot: Snapshot, device: int) -> dict[str, Any]:
    """What a device's trace reserves as it ran and with expandable segments, and whether that would have fitted."""
    reach, recorded = snapshot.reach(device), snapshot.recorded_settings
    expandable = replace(recorded, expandable_segments=True)
    return {
        "device": device,
        "expandable": recorded.expandable_segments,
        "reserved": snapshot.replay(recorded, device=device).peak_reserved,
        "reserved_expandable": snapshot.replay(expandable, device=device).peak_reserved,
        "reach": reach,
        "fits": None if reach is None else snapshot.would_fit(reach, recorded, device=device),
        "fits_expandable": None if reach is None else snapshot.would_fit(reach, expandable, device=device),
    }


def _print_snapshot(snapshot: Snapshot, console: Console) -> None:
    data = _snapshot(snapshot)
    names = ("reserved", "allocated", "requested")
    cells = [
        (pool["where"], *(pool[name] for name in names), pool["reserved"] - pool["allocated"]) for pool in data["pools"]
    ]
    totals = ("in all", *(sum(cell[column] for cell in cells) for column in range(1, 5)))
    console.print(table("Pools", ["device, pool, stream", *names, "fragmentation"], cells, totals))
    held = [(holder["where"], str(holder["count"]), holder["bytes"]) for holder in data["holders"]]
    console.print(table("Largest holders", ["where", "blocks", "bytes"], held))
    for failure in data["failures"]:
        free = "" if failure["device_free"] is None else f", {format_bytes(failure['device_free'])} were free"
        asked = format_bytes(failure["asked"])
        remarks(console, [f"out of memory on device {failure['device']}: {asked} asked for{free}"])
    remarks(console, [_advice(replay) for replay in data["replays"]])
    if not data["replays"]:
        remarks(console, ["no trace was recorded, so it cannot be replayed with other settings"])


def _advice(replay: dict[str, Any]) -> str:
    what = f"device {replay['device']}, its trace replayed: {format_bytes(replay['reserved'])} reserved"
    if replay["expandable"]:
        return f"{what}; expandable segments were on"
    what = f"{what}, {format_bytes(replay['reserved_expandable'])} with expandable_segments:True"
    if replay["fits_expandable"] is None:
        return f"{what}; it never ran out"
    if replay["fits"]:  # what lay between the blocks before the trace is not known, and the replay has no gaps there
        return f"{what}; both would have fitted, so the run may have failed for what came before the trace"
    return f"{what}; with them it would {'' if replay['fits_expandable'] else 'not '}have fitted"
