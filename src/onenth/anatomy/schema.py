"""A recording as JSON: columns of numbers and a table of texts, under a schema number, so that any version can tell."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onenth.anatomy.timeline import Kind, Storage, Timeline
from onenth.errors import AnatomyError
from onenth.states import Tier

SCHEMA = 1

_EVENTS = ("kind", "storage", "owner", "former", "phase", "turn")
_STORAGES = ("bytes", "tier", "operator", "module", "phase", "turn", "shape", "dtype")
_TIERS = list(Tier)


def pack(timeline: Timeline) -> dict[str, Any]:
    """A timeline as plain data."""
    names = Timeline(names=list(timeline.names))
    for index, text in enumerate(timeline.names):
        names._index[text] = index
    storages: dict[str, list[Any]] = {column: [] for column in _STORAGES}
    for storage in timeline.storages:
        storages["bytes"].append(storage.bytes)
        storages["tier"].append(_TIERS.index(storage.tier))
        storages["turn"].append(storage.turn)
        storages["shape"].append(list(storage.shape))
        for column in ("operator", "module", "phase", "dtype"):
            storages[column].append(names.name(getattr(storage, column)))
    columns = (
        timeline.kinds,
        timeline.numbers,
        timeline.owners,
        timeline.formers,
        timeline.phases,
        timeline.turns,
    )
    events = {name: list(column) for name, column in zip(_EVENTS, columns, strict=True)}
    return {"names": names.names, "storages": storages, "events": events, "parts": list(timeline.parts)}


_FACTS: dict[str, type | tuple[type, ...]] = {
    "title": str,
    "stage": (int, type(None)),
    "device": str,
    "rank": int,
    "ranks": int,
    "capacity": (int, type(None)),
    "error": (str, type(None)),
    "outside": dict,
    "expected": dict,
}


def check_facts(data: Mapping[str, Any]) -> None:
    """Raise AnatomyError, naming all offenders, if what stands beside the timeline is of another type than written."""
    wrong = [name for name, kind in _FACTS.items() if not isinstance(data[name], kind) or isinstance(data[name], bool)]
    counts = [*data["outside"].values()] if "outside" not in wrong else []
    for tiers in data["expected"].values() if "expected" not in wrong else ():
        counts += tiers.values()
    if not all(type(count) is int for count in counts):
        wrong.append("outside or expected")
    if wrong:
        raise AnatomyError(f"not the JSON of a recording: {', '.join(wrong)} of another type than it writes")


def unpack(data: Mapping[str, Any]) -> Timeline:
    """The inverse of `pack`. Raises AnatomyError where the data contradict themselves."""
    names, storages, events = data["names"], data["storages"], data["events"]
    _check_columns(storages, _STORAGES)
    _check_columns(events, _EVENTS)
    timeline = Timeline(names=[str(name) for name in names], parts=[str(part) for part in data["parts"]])
    timeline._index.update({name: index for index, name in enumerate(timeline.names)})
    for row in zip(*(storages[column] for column in _STORAGES), strict=True):
        count, tier, operator, module, phase, turn, shape, dtype = row
        if type(count) is not int or count < 0 or type(turn) is not int or not all(type(size) is int for size in shape):
            raise AnatomyError("a storage's bytes, turn or shape are no whole numbers")
        texts = [timeline.names[index] for index in (operator, module, phase, dtype)]
        timeline.storages.append(
            Storage(count, _TIERS[tier], texts[0], texts[1], texts[2], turn, tuple(shape), texts[3])
        )
    kinds, *rest = (array("l", events[column]) for column in _EVENTS)
    timeline.kinds = array("b", kinds)
    timeline.numbers, timeline.owners, timeline.formers, timeline.phases, timeline.turns = rest
    _check_lives(timeline)
    return timeline


def _check_columns(table: Mapping[str, Sequence[Any]], columns: Sequence[str]) -> None:
    if len({len(table[column]) for column in columns}) > 1:
        raise AnatomyError(f"columns {', '.join(columns)} are not of one length")


def _check_lives(timeline: Timeline) -> None:
    """Every index leads somewhere, and every storage is made once, before it is released."""
    for column, limit in (
        (timeline.numbers, len(timeline.storages)),
        (timeline.owners, len(timeline.names)),
        (timeline.formers, len(timeline.names)),
        (timeline.phases, len(timeline.names)),
        (timeline.kinds, len(Kind)),
        (timeline.turns, len(timeline.parts)),
    ):
        if len(column) and not 0 <= min(column) <= max(column) < limit:
            raise AnatomyError("an event refers to a storage, a name, a kind or a turn that is not there")
    held: set[int] = set()
    made: set[int] = set()
    for position, (kind, number) in enumerate(zip(timeline.kinds, timeline.numbers, strict=True)):
        if (kind == Kind.ALLOCATION and number in made) or (kind != Kind.ALLOCATION and number not in held):
            raise AnatomyError(f"event {position} does not fit the life of storage {number}")
        if kind == Kind.RELEASE:
            held.discard(number)
        elif kind == Kind.ALLOCATION:
            made.add(number)
            held.add(number)


def read(path: str | Path) -> dict[str, Any]:
    """The JSON object of a recording. Raises AnatomyError, one line, for anything else."""
    try:
        data = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise AnatomyError(f"{path}: there is no such file") from None
    except OSError as error:
        raise AnatomyError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise AnatomyError(f"{path}: not the JSON of a recording") from error
    if not isinstance(data, dict) or "schema" not in data:
        raise AnatomyError(f"{path}: not the JSON of a recording")
    if data["schema"] != SCHEMA:
        raise AnatomyError(f"{path}: schema {repr(data['schema'])[:20]}, this version of onenth reads {SCHEMA}")
    return data
