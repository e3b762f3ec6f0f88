"""Snapshots of CUDA memory: what they say, what would have fitted, and files that are none or mean harm."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onenth.anatomy.snapshot import Holder, Snapshot, load
from onenth.errors import AnatomyError
from onenth.residual_states.fragmentation import CachingAllocator, Settings, replay

MIB = 1024**2
EXPANDABLE = Settings(expandable_segments=True)

TORCH = {"filename": "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", "line": 134, "name": "forward"}
STDLIB = {"filename": "/usr/lib/python3.11/contextlib.py", "line": 81, "name": "inner"}
NATIVE = {"filename": "??", "line": 0, "name": "at::native::addmm"}
MODEL = {"filename": "/home/me/model.py", "line": 12, "name": "forward"}
MAIN = {"filename": "/home/me/train.py", "line": 40, "name": "main"}


def block(size: int, requested: int = 0, state: str = "active_allocated", frames: Any = ()) -> dict[str, Any]:
    """A block; its address follows from its place."""
    return {"size": size, "requested_size": requested or size, "state": state, "frames": list(frames)}


def segment(
    address: int, *blocks: dict[str, Any], device: int = 0, stream: int = 0, kind: str = "large", pool: Any = (0, 0)
) -> dict[str, Any]:
    """A segment around blocks, with the sums that PyTorch writes."""
    active = [found for found in blocks if found["state"] != "inactive"]
    at = address
    for found in blocks:
        found["address"] = at
        at += found["size"]
    return {
        "device": device,
        "address": address,
        "total_size": sum(found["size"] for found in blocks),
        "allocated_size": sum(found["size"] for found in active if found["state"] == "active_allocated"),
        "active_size": sum(found["size"] for found in active),
        "requested_size": sum(found["requested_size"] for found in active),
        "stream": stream,
        "segment_type": kind,
        "segment_pool_id": pool,
        "is_expandable": False,
        "frames": [],
        "blocks": list(blocks),
    }


def entry(action: str, address: int, size: int, stream: int = 0, **more: Any) -> dict[str, Any]:
    """A trace's entry; of an "oom", the address is what the device has left."""
    where = "device_free" if action == "oom" else "addr"
    return {"action": action, where: address, "size": size, "stream": stream, "time_us": 1, **more}


def snapshot(segments: Any = (), *traces: Any, **settings: Any) -> dict[str, Any]:
    """A whole snapshot."""
    return {
        "segments": list(segments),
        "device_traces": [list(trace) for trace in traces],
        "allocator_settings": settings,
        "external_annotations": [],
    }


@pytest.fixture
def read(tmp_path: Path) -> Callable[[object], Snapshot]:
    """Writes something as `_dump_snapshot` does, or bytes as they are, and loads it."""

    def write(content: object) -> Snapshot:
        path = tmp_path / "dump_snapshot.pickle"
        path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
        return load(path)

    return write


Read = Callable[[object], Snapshot]


# What a snapshot says.


def test_sums_by_device_pool_and_stream(read: Read) -> None:
    """Reserved, allocated and requested bytes, and what is reserved beyond, of each pool of each device and stream."""
    found = read(
        snapshot(
            [
                segment(0, block(6 * MIB, 5 * MIB), block(14 * MIB, state="inactive")),
                segment(64 * MIB, block(16 * MIB, state="active_pending_free")),
                segment(96 * MIB, block(512, 1), block(2 * MIB - 512, state="inactive"), kind="small", stream=7),
                segment(0, block(20 * MIB, state="inactive"), device=1),
                segment(128 * MIB, block(20 * MIB), pool=(1, 0)),
            ]
        )
    )
    common, small, other, private = (
        (0, "large", 0),
        (0, "small", 7),
        (1, "large", 0),
        (0, "large of private pool 1.0", 0),
    )
    assert found.reserved == {common: 36 * MIB, small: 2 * MIB, other: 20 * MIB, private: 20 * MIB}
    assert found.allocated == {common: 22 * MIB, small: 512, other: 0, private: 20 * MIB}
    assert found.requested == {common: 21 * MIB, small: 1, other: 0, private: 20 * MIB}
    assert found.fragmentation == {common: 14 * MIB, small: 2 * MIB - 512, other: 20 * MIB, private: 0}


def test_holders_name_the_innermost_frame_of_user_code(read: Read) -> None:
    """C++, PyTorch's and the standard library's frames stand back where a user's frame exists; largest first."""
    found = read(
        snapshot(
            [
                segment(
                    0,
                    block(4 * MIB, frames=[NATIVE, TORCH, STDLIB, MODEL, MAIN]),
                    block(9 * MIB, frames=[TORCH, MAIN]),
                    block(5 * MIB, frames=[TORCH, MODEL, MAIN]),
                    block(2 * MIB, state="inactive", frames=[MAIN]),
                ),
                segment(64 * MIB, block(3 * MIB, frames=[NATIVE, TORCH]), block(2 * MIB, frames=[NATIVE]), block(MIB)),
            ]
        )
    )
    assert found.holders(4) == [
        Holder("/home/me/model.py:12 forward", 9 * MIB, 2),
        Holder("/home/me/train.py:40 main", 9 * MIB, 1),
        Holder(f"{TORCH['filename']}:134 forward", 3 * MIB, 1),
        Holder("??:0 at::native::addmm", 2 * MIB, 1),
    ]
    assert found.holders()[-1] == Holder("unknown: no stack was recorded", MIB, 1)


def test_frames_in_pytorchs_own_repository_and_in_notebooks(read: Read) -> None:
    """A folder named torch is PyTorch only where PyTorch lies; what was typed in is user code."""
    sources = {"filename": "/src/pytorch/torch/nn/functional.py", "line": 1, "name": "f"}
    mine = {"filename": "/home/me/torch/model.py", "line": 2, "name": "g"}
    typed = {"filename": "<stdin>", "line": 3, "name": "<module>"}
    made = {"filename": "<eval_with_key>.1", "line": 4, "name": "forward"}
    frames = ([sources, mine], [made, typed, mine], [made, sources])
    found = read(snapshot([segment(0, *(block(size * MIB, frames=stack) for size, stack in zip((9, 8, 7), frames)))]))  # noqa: B905
    assert [holder.where for holder in found.holders()] == [
        "/home/me/torch/model.py:2 g",
        "<stdin>:3 <module>",
        "<eval_with_key>.1:4 forward",
    ]


def test_settings_that_were_recorded(read: Read) -> None:
    """As written: no limit is -1 or the largest number, divisions are by interval from 1 MiB on."""
    plain = {"max_split_size": -1, "garbage_collection_threshold": 0.0, "expandable_segments": False}
    none = {str(1 << at): 0 for at in range(16)}
    found = read(snapshot([], PYTORCH_CUDA_ALLOC_CONF="", roundup_power2_divisions=none, **plain))
    assert found.settings["max_split_size"] == -1
    assert found.recorded_settings == Settings()
    assert read(snapshot([], max_split_size=(1 << 63) - 1)).recorded_settings == Settings()
    steps = {**none, "64": 4}
    set_ = {"max_split_size": 64 * MIB, "garbage_collection_threshold": 0.5, "expandable_segments": True}
    found = read(snapshot([], roundup_power2_divisions=steps, **set_))
    recorded = found.recorded_settings
    assert recorded.divisions == (0,) * 6 + (4,) + (0,) * 9
    assert (recorded.max_split_size, recorded.garbage_collection_threshold) == (64 * MIB, 0.5)
    assert recorded.expandable_segments
    hostile = {"": 4, "0": 4, "x": 4, "9" * 5000: 4, "2": "4", "4": -1, "8": 1 << 40}
    odd = {"max_split_size": "64", "garbage_collection_threshold": float("nan"), "expandable_segments": 1}
    assert read(snapshot([], roundup_power2_divisions=hostile, **odd)).recorded_settings == Settings()


def test_older_and_shorter_snapshots_are_read(read: Read) -> None:
    """Frames, times, settings, private pools and requested sizes need not be there."""
    found = read(
        {
            "segments": [
                {
                    "device": 0,
                    "address": 0,
                    "total_size": 12 * MIB,
                    "stream": 0,
                    "segment_type": "large",
                    "blocks": [{"size": 12 * MIB, "state": "active_allocated"}],
                }
            ],
            "device_traces": [],
        }
    )
    assert found.requested == {(0, "large", 0): 12 * MIB}
    assert found.recorded_settings == Settings()
    assert found.replay().peak_reserved == 12 * MIB


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_binary_protocol_is_read(read: Read, protocol: int) -> None:
    """Shared stacks, large numbers and long strings come through."""
    stack = [dict(MODEL, filename="/home/" + "x" * 300 + ".py")]
    written = snapshot(
        [segment(1 << 47, block(20 * MIB, frames=stack), stream=-(1 << 40))],
        [entry("alloc", 1 << 47, 20 * MIB, frames=stack)],
        expandable_segments=None,
    )
    found = read(pickle.dumps(written, protocol=protocol))
    assert found.segments[0].blocks[0].frames == found.traces[0][0].frames
    assert found.segments[0].address == found.traces[0][0].address == 1 << 47
    assert found.segments[0].stream == -(1 << 40)


# Replays.


def sixteens_then_32(failed: bool = False) -> dict[str, Any]:
    """Eight tensors of 16 MiB, freed, then four of 32 MiB; the last one fails if asked to, with 10 MiB left."""
    trace = []
    for at in range(8):
        trace += [entry("segment_alloc", at * 16 * MIB, 16 * MIB), entry("alloc", at * 16 * MIB, 16 * MIB)]
    for action in ("free_requested", "free_completed"):
        trace += [entry(action, at * 16 * MIB, 16 * MIB) for at in range(8)]
    for at in range(4, 7 if failed else 8):
        trace += [entry("segment_alloc", at * 32 * MIB, 32 * MIB), entry("alloc", at * 32 * MIB, 32 * MIB)]
    if failed:
        trace.append(entry("oom", 10 * MIB, 32 * MIB))
    trace.append(entry("snapshot", 0, 0))
    held = [segment(at * 16 * MIB, block(16 * MIB, state="inactive")) for at in range(8)]
    held += [segment(at * 32 * MIB, block(32 * MIB)) for at in range(4, 7 if failed else 8)]
    return snapshot(held, trace)


def test_a_trace_is_replayed_as_it_was(read: Read) -> None:
    """Without expandable segments the replay reserves what the segments add up to: 256 MiB; with them 140."""
    found = read(sixteens_then_32())
    assert found.replay().peak_reserved == sum(found.reserved.values()) == 256 * MIB
    assert found.replay(EXPANDABLE).peak_reserved == 140 * MIB


def test_whether_a_run_would_have_fitted(read: Read) -> None:
    """32 MiB failed at 224 reserved and 10 free, so 234 were in reach: with its cache given back it fits in 160."""
    found = read(sixteens_then_32(failed=True))
    (failure,) = found.failures
    assert (failure.size, failure.device_free, failure.address) == (32 * MIB, 10 * MIB, 0)
    assert found.reach() == 234 * MIB
    assert found.replay().peak_allocated == 128 * MIB  # the request that failed is part of it
    assert found.would_fit(234 * MIB)
    assert found.would_fit(140 * MIB, EXPANDABLE)
    assert not found.would_fit(127 * MIB)
    assert not found.would_fit(139 * MIB, EXPANDABLE)


def test_reach_counts_segments_as_they_were(read: Read) -> None:
    """What was taken after the failure does not count, what was given back does; without a failure there is none."""
    trace = [
        entry("oom", 5 * MIB, 32 * MIB),
        entry("segment_free", 0, 20 * MIB),
        entry("segment_map", 64 * MIB, 40 * MIB),
        entry("segment_unmap", 64 * MIB, 20 * MIB),
    ]
    found = read(snapshot([segment(84 * MIB, block(20 * MIB))], trace))
    assert found.reach() == (20 + 20 - 40 + 20 + 5) * MIB
    assert read(snapshot([], trace[1:])).reach() is None


def test_blocks_from_before_the_trace_are_there_first(read: Read) -> None:
    """Of the three blocks that were live, one is freed within the trace, one is reused, one is there at the end."""
    trace = [
        entry("free_requested", 16 * MIB, 15 * MIB),
        entry("free_completed", 16 * MIB, 15 * MIB),
        entry("alloc", 16 * MIB, 16 * MIB, 3),
        entry("free_requested", 48 * MIB, 12 * MIB),
        entry("free_completed", 48 * MIB, 12 * MIB),
    ]
    held = [
        segment(0, block(16 * MIB, 14 * MIB)),
        segment(16 * MIB, block(16 * MIB), stream=3),
        segment(48 * MIB, block(12 * MIB, state="inactive")),
    ]
    events, streams = read(snapshot(held, trace)).events()
    before = [("before", address * MIB) for address in (0, 16, 48)]
    assert events == [
        *zip(before, (14 * MIB, 15 * MIB, 12 * MIB), strict=True),
        (before[1], -1),
        (2, 16 * MIB),
        (before[2], -1),
    ]
    assert streams == {before[0]: 0, before[1]: 0, before[2]: 0, 2: 3}


def test_a_block_that_waits_for_a_stream_is_held_until_it_is_free(read: Read) -> None:
    """Requested to be freed is not free: 16 MiB more take a segment of their own."""
    trace = [entry("alloc", 0, 16 * MIB), entry("free_requested", 0, 16 * MIB), entry("alloc", 16 * MIB, 16 * MIB)]
    done = [*trace, entry("free_completed", 0, 16 * MIB), entry("free_completed", 16 * MIB, 16 * MIB)]
    held = [segment(0, block(32 * MIB, state="inactive"))]
    assert read(snapshot(held, done)).replay().peak_reserved == 32 * MIB
    # Where completions were not recorded, requests stand for them.
    assert (
        read(snapshot(held, [*trace, entry("free_requested", 16 * MIB, 16 * MIB)])).replay().peak_reserved == 16 * MIB
    )


def test_segments_that_went_back_unasked_are_an_emptied_cache(read: Read) -> None:
    """A run of them with nothing taken behind is one empty_cache; one before a new segment is the allocator's own."""
    went = [entry("segment_free", 0, 16 * MIB), entry("segment_unmap", 64 * MIB, 20 * MIB)]
    emptied = read(snapshot([], [*went, entry("alloc", 96 * MIB, MIB)])).events()[0]
    assert [size for _, size in emptied] == [0, MIB]
    for following in ("segment_alloc", "segment_map", "oom"):
        own = read(snapshot([], [*went, entry(following, 0, 16 * MIB)])).events()[0]
        assert 0 not in [size for _, size in own]


def test_entries_of_no_bytes_do_nothing(read: Read) -> None:
    """PyTorch writes none: a file that does is replayed without them."""
    trace = [entry("alloc", 0, 0), entry("oom", 0, 0), entry("free_completed", 0, 0), entry("free_completed", 512, 0)]
    assert read(snapshot([], trace)).replay().reserved == []


def test_traces_of_devices_are_apart(read: Read) -> None:
    """The first device with a trace is replayed, or the one that is named, with its own segments."""
    held = [segment(0, block(16 * MIB)), segment(0, block(20 * MIB), device=1)]
    found = read(snapshot(held, [], [entry("alloc", 0, 20 * MIB)]))
    assert found.replay().peak_allocated == found.replay(device=1).peak_allocated == 20 * MIB
    assert found.replay(device=0).peak_allocated == 16 * MIB
    assert found.replay(device=2).peak_allocated == 0


def recorded(
    seed: int, settings: Settings, steps: int
) -> tuple[list[tuple[int, int]], dict[str, Any], CachingAllocator]:
    """A random run of the simulated allocator, as events and as the snapshot that PyTorch would have written of it."""
    chance = random.Random(seed)
    allocator = CachingAllocator(settings)
    events: list[tuple[int, int]] = []
    trace = []
    held: dict[int, tuple[int, int]] = {}
    for key in range(steps):
        if held and chance.random() < 0.45:
            gone = chance.choice(list(held))
            allocator.release(gone)
            events.append((gone, -1))
            trace += [entry(action, *held[gone]) for action in ("free_requested", "free_completed")]
            del held[gone]
            continue
        size = chance.choice(
            [chance.randrange(1, 4096), chance.randrange(1, 1 << 20), chance.randrange(1 << 20, 40 << 20)]
        )
        allocator.allocate(key, size)
        events.append((key, size))
        address = next(b.address for s in allocator.segments() for b in s.blocks if not b.free and b.key == key)
        held[key] = address, size
        trace.append(entry("alloc", address, size))
    written = snapshot(
        [
            segment(
                found.address,
                *(
                    block(
                        b.size,
                        0 if b.free else held[b.key][1],  # type: ignore[index]
                        "inactive" if b.free else "active_allocated",
                    )
                    for b in found.blocks
                ),
                kind=found.pool,
            )
            for found in allocator.segments()
        ],
        trace,
    )
    return events, written, allocator


@given(st.integers(0, 1 << 32), st.booleans(), st.integers(0, 40))
def test_a_whole_trace_replays_to_the_same_numbers(
    tmp_path_factory: pytest.TempPathFactory, seed: int, expandable: bool, steps: int
) -> None:
    """A snapshot whose trace is complete says the same as the run itself, to the byte."""
    settings = Settings(expandable_segments=expandable)
    events, written, allocator = recorded(seed, settings, steps)
    path = tmp_path_factory.getbasetemp() / "recorded.pickle"
    path.write_bytes(pickle.dumps(written))
    found = load(path)
    assert sum(found.reserved.values()) == allocator.reserved
    assert sum(found.allocated.values()) == allocator.allocated
    assert sum(found.requested.values()) == allocator.requested
    assert found.replay(settings) == replay(events, settings)
    # Of a trace whose start was overwritten, what was live then is found again.
    cut = steps // 2
    entries = written["device_traces"][0]
    live: dict[int, int] = {}
    for made in entries[:cut]:
        if made["action"] == "alloc":
            live[made["addr"]] = made["size"]
        elif made["action"] == "free_completed":
            del live[made["addr"]]
    tail = Snapshot(found.segments, (found.traces[0][cut:],))
    if tail.traces[0]:
        assert {key[1]: size for key, size in tail.events()[0] if isinstance(key, tuple) and size > 0} == live


# What is no snapshot.


def refusal(read: Read, content: object) -> str:
    """The one line that says why something is not read."""
    with pytest.raises(AnatomyError) as error:
        read(content)
    message = str(error.value)
    assert "\n" not in message
    return message.partition("dump_snapshot.pickle: ")[2]


class Command:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("place", ["alone", "within", "as a key"])
def test_pickled_code_is_refused_and_does_not_run(tmp_path: Path, read: Read, protocol: int, place: str) -> None:
    """A command in place of a snapshot, deep within one, or as a key: nothing happens."""
    mark = tmp_path / "ran"
    command = Command(f"touch {mark}")
    content: Any = command
    if place == "within":
        content = snapshot([segment(0, block(2 * MIB, frames=[command]))])
    if place == "as a key":
        content = snapshot(**{"a": {command: 1}})
    message = refusal(read, pickle.dumps(content, protocol=protocol))
    assert ("pickled code" in message) or (protocol < 2 and "not a binary pickle" in message)
    assert not mark.exists()


@pytest.mark.parametrize(
    "opcodes",
    [
        b"\x80\x04cos\nsystem\n.",  # GLOBAL
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",  # STACK_GLOBAL
        b"\x80\x02(S'ls'\nios\nsystem\n.",  # a string's old opcode before INST
        b"\x80\x02(ios\nsystem\n.",  # INST
        b"\x80\x02(o.",  # OBJ
        b"\x80\x02\x82\x01.",  # EXT1
        b"\x80\x02P1\n.",  # PERSID
        b"\x80\x02NQ.",  # BINPERSID
        b"\x80\x02}}b.",  # BUILD
        b"\x80\x02))R.",  # REDUCE
        b"\x80\x02))\x81.",  # NEWOBJ
    ],
)
def test_opcodes_that_call_or_import_are_refused(read: Read, opcodes: bytes) -> None:
    """Each of them, before it acts."""
    assert refusal(read, opcodes).startswith(("refused", "not a snapshot"))


@pytest.mark.parametrize(
    "content",
    [{1, 2}, b"bytes", bytearray(b"x"), 1 + 2j, frozenset(), {(1, 2): 3}, {None: 1}, {1: 2}],
    ids=repr,
)
def test_what_snapshots_do_not_hold_is_refused(read: Read, content: object) -> None:
    """Sets, bytes and keys that are not strings are not plain containers, numbers and strings."""
    dumped = pickle.dumps({"segments": [content]})
    assert refusal(read, dumped).startswith(("not a snapshot: its pickle", "refused"))


@pytest.mark.parametrize("content", [[], "text", 3, None, True, ({},)], ids=repr)
def test_pickles_of_something_else(read: Read, content: object) -> None:
    """A snapshot is a dict."""
    assert refusal(read, pickle.dumps(content)) == f"not a snapshot: a {type(content).__name__}, not a dict"


@pytest.mark.parametrize("content", [b"", b"segments", b"{}", b"\x1f\x8b\x08\x00", b"PK\x03\x04"], ids=repr)
def test_files_of_another_kind(read: Read, content: bytes) -> None:
    """Text, compressed files and nothing at all are no pickles."""
    assert refusal(read, content) == "not a snapshot: not a binary pickle"


def test_files_that_are_not_there(tmp_path: Path) -> None:
    """A missing file and a folder are one line as well."""
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(AnatomyError, match="there is no such file"):
            load(path)


def test_files_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file beyond the limit is not even opened."""
    path = tmp_path / "large"
    path.write_bytes(pickle.dumps(snapshot()))
    monkeypatch.setattr("onenth.anatomy.snapshot_file.LARGEST", 10)
    with pytest.raises(AnatomyError, match="larger than the 10 bytes"):
        load(path)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_file_cut_short_anywhere_is_refused(read: Read, protocol: int) -> None:
    """Every beginning of a snapshot is said to be cut short."""
    data = pickle.dumps(sixteens_then_32(), protocol=protocol)
    messages = {refusal(read, data[:length]) for length in range(1, len(data), 7)}
    assert messages == {"the file is cut short"}


def test_damaged_files_never_raise_anything_else(read: Read) -> None:
    """Bytes changed at random: a snapshot or a clear line, nothing else."""
    data = pickle.dumps(sixteens_then_32(failed=True))
    chance = random.Random(5)
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(2, len(data))] = chance.randrange(256)
        try:
            read(bytes(damaged)).replay(EXPANDABLE)
        except AnatomyError:
            refused += 1
    assert refused > 100


NESTED = {
    "lists": b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "dicts": b"\x80\x04" + b"}\x8c\x01a" * 200_000 + b"N" + b"s" * 200_000 + b".",
    "tuples as a key": b"\x80\x04}" + b")" + b"\x85" * 200_000 + b"Ns.",
    "marks": b"\x80\x04" + b"(" * 200_000 + b".",
    "itself": b"\x80\x04]\x94h\x00a.",
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_bombs_do_no_harm(read: Read, name: str) -> None:
    """Containers in containers in containers: one line, and the process goes on."""
    assert "not a snapshot" in refusal(read, NESTED[name]) or "missing" in refusal(read, NESTED[name])


@pytest.mark.parametrize(
    "opcodes",
    [
        b"\x80\x02]r\xff\xff\xff\xff.",  # the C unpickler would ask for 64 GiB to remember one list
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",  # a string of 8 EiB
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",  # a frame of 8 EiB
        b"\x80\x02\x8b\xff\xff\xff\x7f.",  # a number of 2 GiB
        b"\x80\x02X\xff\xff\xff\xff.",  # a string of 4 GiB
    ],
)
def test_a_few_bytes_cannot_ask_for_gigabytes(read: Read, opcodes: bytes) -> None:
    """Sizes that the file only claims are not believed."""
    assert refusal(read, opcodes)


def test_lists_that_hold_one_another_many_times_over(read: Read) -> None:
    """A thousand times the same segment of a thousand times the same block is a million blocks in 20 kB: refused."""
    one = block(512)
    shared = dict(segment(0, one), blocks=[one] * 1000, total_size=512_000)
    assert refusal(read, snapshot([shared] * 1000)) == "not a snapshot: its lists hold one another"
    traced = [entry("alloc", 0, 1)] * 1000
    assert "hold one another" in refusal(read, {"segments": [], "device_traces": [traced] * 1000})


def test_stacks_may_be_shared(read: Read) -> None:
    """PyTorch writes each stack once: a thousand blocks of one stack of a thousand frames are no bomb."""
    stack = [dict(MODEL, line=line) for line in range(1000)]
    found = read(snapshot([segment(0, *[dict(block(512), frames=stack) for _ in range(1000)])]))
    assert found.holders() == [Holder("/home/me/model.py:0 forward", 512_000, 1000)]


@pytest.mark.parametrize("key", ["segments", "device_traces"])
def test_a_missing_part_is_named(read: Read, key: str) -> None:
    """Of the snapshot as a whole."""
    found = snapshot()
    del found[key]
    assert refusal(read, found) == f"the snapshot: '{key}' is missing"


@pytest.mark.parametrize("key", ["device", "address", "total_size", "stream", "segment_type", "blocks"])
def test_a_missing_key_of_a_segment_is_named(read: Read, key: str) -> None:
    """With the segment's place."""
    found = snapshot([segment(0, block(512)), segment(512, block(512))])
    del found["segments"][1][key]
    assert refusal(read, found) == f"segments[1]: '{key}' is missing"


@pytest.mark.parametrize("key", ["size", "state"])
def test_a_missing_key_of_a_block_is_named(read: Read, key: str) -> None:
    """With the block's place."""
    found = snapshot([segment(0, block(512), block(512))])
    del found["segments"][0]["blocks"][1][key]
    assert refusal(read, found) == f"segments[0].blocks[1]: '{key}' is missing"


@pytest.mark.parametrize(
    ("action", "key"), [("alloc", "addr"), ("alloc", "size"), ("oom", "device_free"), ("x", "action")]
)
def test_a_missing_key_of_an_entry_is_named(read: Read, action: str, key: str) -> None:
    """With the entry's place; an "oom" must say what was free."""
    found = snapshot([], [], [entry("snapshot", 0, 0), entry(action, 0, 512)])
    del found["device_traces"][1][1][key]
    assert refusal(read, found) == f"device_traces[1][1]: '{key}' is missing"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["segments"].append(3), "segments[1]: a int, not a dict"),
        (lambda s: s.update(segments={}), "the snapshot: 'segments' is a dict, not a list"),
        (lambda s: s["device_traces"].append({}), "device_traces[1]: a dict, not a list"),
        (lambda s: s["segments"][0].update(total_size="1"), "segments[0]: 'total_size' is a str, not a int"),
        (lambda s: s["segments"][0].update(address=True), "segments[0]: 'address' is a bool, not a int"),
        (lambda s: s["segments"][0].update(address=-1), "segments[0]: 'address' is out of range"),
        (lambda s: s["segments"][0].update(stream=1 << 70), "segments[0]: 'stream' is out of range"),
        (lambda s: s["segments"][0].update(total_size=7), "segments[0]: its blocks do not add up to its total_size"),
        (
            lambda s: s["segments"][0].update(segment_pool_id=("a",)),
            "segments[0]: 'segment_pool_id' is no pair of numbers",
        ),
        (
            lambda s: s["segments"][0]["blocks"][0].update(size=1 << 20000),
            "segments[0].blocks[0]: 'size' is out of range",
        ),
        (
            lambda s: s["segments"][0]["blocks"][0].update(frames=[{"filename": "x", "line": 1}]),
            "segments[0].blocks[0].frames: 'name' is missing",
        ),
        (lambda s: s["device_traces"][0][0].update(size=-1), "device_traces[0][0]: 'size' is out of range"),
        (lambda s: s.update(allocator_settings=[]), "the snapshot: 'allocator_settings' is a list, not a dict"),
    ],
)
def test_wrong_values_are_named(read: Read, change: Callable[[dict[str, Any]], None], message: str) -> None:
    """Types and ranges, with the place, and without the value: it may be gigabytes."""
    found = snapshot([segment(0, block(512))], [entry("alloc", 0, 512)])
    change(found)
    assert refusal(read, found) == message
