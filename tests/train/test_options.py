"""Options: what is wrong is said in one line, all of it, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from onenth.cli import main
from onenth.errors import ConfigError
from onenth.train.options import Options, given


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank", "2"], "--rank"),
        (["--stage", "7"], "--stage"),
        (["--steps", "many"], "--steps"),
        (["--lr", "-1"], "--lr -1.0: a positive number is meant"),
        (["--lr", "nan"], "--lr nan: a positive number is meant"),
        (
            ["--batch", "0", "--sequence", "1"],
            "--batch 0: at least 1 is meant; --sequence 1: at least 2 is meant",
        ),
        (["--batch", "9", "--ranks", "2"], "batch 9 is not a multiple of micro-batch 4 x 2 ranks"),
        (["--batch", "1", "--ranks", "2"], "batch 1 is not a multiple of micro-batch 1 x 2 ranks"),
        (["--text", "missing.txt"], "--text missing.txt: no such file or directory"),
        (["--resume", "missing"], "--resume missing: no such file or directory"),
        (["--output", __file__], "is a file, a directory is meant"),
        (["--anatomy", "run.json"], "--anatomy run.json: the name of a page is meant, such as run.html"),
        (["--anatomy", "missing/run.html"], "--anatomy missing/run.html: there is no directory missing"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing on stdout, one line on stderr that names the option, no traceback."""
    assert main(["train", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_a_directory_without_a_save_cannot_be_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory that a rank was still writing when it stopped is no save."""
    (tmp_path / ".step-000010.partial").mkdir()
    (tmp_path / "step-000020").mkdir()
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert "holds no complete save" in capsys.readouterr().err


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0, an example that can be typed, and every option."""
    with pytest.raises(SystemExit) as end:
        main(["train", "--help"])
    assert not end.value.code
    out = capsys.readouterr().out
    assert "onenth train --ranks 4 --stage 2" in out
    assert "--micro-batch" in out


def test_the_batch_is_micro_batches_times_ranks_times_accumulation() -> None:
    """Without a micro-batch each rank runs its whole share at once."""
    options = Options(batch=24, micro_batch=3)
    assert (options.rank_batch(2), options.accumulation(2)) == (3, 4)
    assert (Options(batch=24).rank_batch(4), Options(batch=24).accumulation(4)) == (6, 1)
    with pytest.raises(ConfigError, match="batch 24 is not a multiple of micro-batch 3 x 5 ranks"):
        options.check_batch(5)


def test_given_sees_what_was_typed() -> None:
    """Also an option that is typed with its default value, and in each way that an option can be typed."""
    assert given(["--lr", "3e-3", "--micro-batch=2", "--eval_interval", "5", "x"]) == {
        "lr",
        "micro_batch",
        "eval_interval",
    }
