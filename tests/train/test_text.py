"""Which text is read, what is held out, and in which order a run sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onenth.errors import ConfigError
from onenth.train.batches import Batches
from onenth.train.evaluation import Evaluation, unigram_loss
from onenth.train.text import Text, is_held_out, read
from onenth.train.vocabulary import Bytes


def files(directory: Path, count: int) -> Path:
    for index in range(count):
        (directory / f"{index:03}.txt").write_text(f"file number {index} " * 5)
    return directory


def test_the_split_depends_on_names_alone(tmp_path: Path) -> None:
    """Twice the same; a file more moves no other between the parts; about a twentieth is held out."""
    first = read([files(tmp_path, 200)], Bytes(), sequence=8)
    again = read([tmp_path], Bytes(), sequence=8)
    assert first.digest == again.digest
    assert torch.equal(first.training, again.training)
    assert torch.equal(first.held_out, again.held_out)
    held = sum(is_held_out(f"{index:03}.txt") for index in range(200))
    assert 2 <= held <= 20
    assert int((first.held_out == Bytes.end).sum()) == held
    assert int((first.training == Bytes.end).sum()) == 200 - held
    (tmp_path / "200.txt").write_text("one more")
    more = read([tmp_path], Bytes(), sequence=8)
    assert more.digest != first.digest
    assert abs(more.training.numel() - first.training.numel()) in (0, 9)


def test_one_file_has_its_end_held_out(tmp_path: Path) -> None:
    """Where no whole file can be held out, the last twentieth of the tokens is, and nothing is twice."""
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(200)) * 10)
    text = read([path], Bytes(), sequence=50)
    assert (text.training.numel(), text.held_out.numel()) == (1901, 100)
    row = torch.cat([text.training, text.held_out])
    assert row.tolist() == [*list(range(200)) * 10, Bytes.end]


def test_directories_give_text_files_only(tmp_path: Path) -> None:
    """Hidden and binary files are left out, others are found at any depth, whatever they are called."""
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "notes").write_text("a" * 100)
    (tmp_path / ".hidden").write_text("b" * 100)
    (tmp_path / "binary").write_bytes(b"c\0" * 100)
    text = read([tmp_path], Bytes(), sequence=2)
    assert text.files == 1
    assert set(torch.cat([text.training, text.held_out]).tolist()) == {ord("a"), Bytes.end}


def test_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    """The error says how much there is and how much is needed."""
    path = tmp_path / "a.txt"
    path.write_text("short")
    with pytest.raises(ConfigError, match=r"6 tokens in 1 files; sequences of 64 need at least 1280"):
        read([path], Bytes(), sequence=64)


def test_the_standard_library_is_the_default() -> None:
    """Every Python has some megabytes of it, without its tests and without what was installed beside it."""
    text = read([], Bytes(), sequence=256)
    assert text.training.numel() > 1_000_000
    assert text.held_out.numel() > 10_000


def batches(rank: int, ranks: int = 2, micro_batch: int = 2, accumulation: int = 2, seed: int = 0) -> Batches:
    return Batches(torch.arange(1000, dtype=torch.int32), 10, seed, ranks, rank, micro_batch, accumulation)


def starts(batches: Batches, step: int) -> list[int]:
    return [int(row[0]) // 10 for micro in batches.of(step) for row in micro]


def test_an_epoch_has_every_sequence_once() -> None:
    """Over ranks, micro-batches and steps each window comes once an epoch; the next has another order."""
    by_step = [[starts(batches(rank), step) for rank in (0, 1)] for step in range(26)]
    row = [start for step in by_step for ranks in step for start in ranks]
    assert sorted(row[:96]) == sorted(set(row[:96]))
    epoch = [start for step in range(25) for start in starts(batches(0, ranks=1, micro_batch=4, accumulation=1), step)]
    after = [
        start for step in range(25, 50) for start in starts(batches(0, ranks=1, micro_batch=4, accumulation=1), step)
    ]
    assert sorted(epoch) == sorted(after) == list(range(100))
    assert epoch != after


def test_a_step_is_the_same_from_anywhere() -> None:
    """A run that starts at step 30 sees what a run that went there saw; another seed sees something else."""
    gone = batches(1)
    for step in range(30):
        starts(gone, step)
    assert starts(gone, 30) == starts(batches(1), 30)
    assert starts(batches(1, seed=1), 30) != starts(batches(1), 30)


def test_the_global_batch_does_not_depend_on_how_it_is_split() -> None:
    """2 ranks x 2 x 2, 1 rank x 8 and 4 ranks x 2: the same 8 sequences in a step."""
    whole = starts(batches(0, ranks=1, micro_batch=8, accumulation=1), 3)
    assert sorted(whole) == sorted(starts(batches(0), 3) + starts(batches(1), 3))
    assert sorted(whole) == sorted(start for rank in range(4) for start in starts(batches(rank, 4, 2, 1), 3))


def test_unigram_loss_is_the_cross_entropy_of_frequencies() -> None:
    """Two tokens, three to one (with the one that is added to each count): by hand."""
    text = Text(torch.tensor([0, 0, 0, 0, 0, 1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), 1, "")
    expected = -(torch.tensor(6 / 8).log() + torch.tensor(2 / 8).log()) / 2
    assert unigram_loss(text, 2) == pytest.approx(float(expected))


@pytest.mark.parametrize("tokens", [20, 650, 10_000])
def test_every_rank_evaluates_as_many_sequences(tokens: int) -> None:
    """Ranks go through a sharded model in step, so none may have more; text is not read past its end."""
    for ranks in (1, 2, 3):
        row = torch.arange(tokens, dtype=torch.int32)
        shapes = {Evaluation(row, 10, ranks, rank, 4).windows().shape for rank in range(ranks)}
        assert len(shapes) == 1
        ((count, length),) = shapes
        assert count >= 1
        assert length == 10
