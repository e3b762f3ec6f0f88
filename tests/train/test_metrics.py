"""Metrics: one whole line for each record, whatever the disk does."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from onenth.train.files import write_whole
from onenth.train.metrics import JsonLines, TensorBoard


def test_each_record_is_a_line(tmp_path: Path) -> None:
    """What is written is there at once, before the file is closed."""
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.write({"step": 1, "loss": 2.5})
    sink.write({"step": 2, "loss": None})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    sink.close()
    assert [json.loads(line) for line in lines] == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None}]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes half a line, then no more: the half is taken back, the error names the file."""
    path, write = tmp_path / "metrics.jsonl", os.write
    sink = JsonLines(path)
    sink.write({"step": 1})

    def full(file: int, data: bytes) -> int:
        if len(data) < 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[: len(data) - 5])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        sink.write({"step": 2})
    monkeypatch.undo()
    sink.close()
    assert caught.value.filename == str(path)
    assert path.read_text() == '{"step": 1}\n'


def test_going_on_drops_what_came_after_the_save(tmp_path: Path) -> None:
    """Steps that are done again are not there twice; a new run does not write into an old one's file."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3, 4)))
    sink = JsonLines(path, after=2)
    sink.write({"step": 3, "again": True})
    sink.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    with pytest.raises(FileExistsError):
        JsonLines(path)


def test_a_file_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full, the old content is still there, and nothing beside it."""
    path = tmp_path / "file"
    write_whole(path, b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    """Numbers by name and step, nothing else; steps that a resumed run does again replace those from before."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = TensorBoard(tmp_path)
    for step in (1, 2, 3):
        first.write({"step": step, "loss": 0.5 * step, "held": [1, 2], "grad_norm": None})
    first.close()
    second = TensorBoard(tmp_path, after=2)
    second.write({"step": 3, "loss": 7.0})
    second.close()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 1.0), (3, 7.0)]
