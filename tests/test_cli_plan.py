"""The command line: `onenth plan`, and what every command does with bad input."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from onenth import cli
from onenth.cli.plan import equations, parse_count
from onenth.errors import PlanError
from onenth.report.terminal import print_equations
from onenth.states import ModelState


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command in this process."""
    code = cli.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def printed(parameters: int, ranks: int, width: int) -> str:
    """The tables as a terminal of this width shows them."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_equations(parameters, ranks, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def cells(text: str, label: str) -> list[str]:
    """The words of the first line that starts with a label."""
    return next(line.split() for line in text.splitlines() if line.strip().startswith(label))


def test_model_states_of_seven_billion_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    """The model states take 14, 14, 28, 28 and 28 GB, 112 GB in all; 256 ranks hold 28.6 TB too much."""
    code, out, err = run(capsys, "plan", "--parameters", "7e9", "--ranks", "256")
    assert (code, err) == (0, "")
    assert [cells(out, f"{state} ")[2:4] for state in ModelState] == [
        [count, "GB"] for count in ("14", "14", "28", "28", "28")
    ]
    assert cells(out, "in all") == ["in", "all", "16", "112", "GB"]
    assert "28.7 TB over 256 data-parallel ranks, 28.6 TB of it redundant" in out


def test_seventy_billion_parameters_are_terabytes(capsys: pytest.CaptureFixture[str]) -> None:
    """70e9 parameters take 1.12 TB."""
    _, out, _ = run(capsys, "plan", "--parameters", "70e9")
    assert cells(out, "in all")[-2:] == ["1.12", "TB"]


def test_what_each_stage_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    """Per rank over 64 ranks 120, 31.4, 16.6 and 1.88 GB, as in the paper's figure 1, and what is sent."""
    _, out, _ = run(capsys, "plan", "--parameters", "7.5e9", "--ranks", "64")
    totals = [" ".join(cells(out, f"{stage} ")[-4:]) for stage in range(4)]
    assert totals == ["120 GB 29.5 GB", "31.4 GB 29.5 GB", "16.6 GB 29.5 GB", "1.88 GB 44.3 GB"]


@given(st.integers(1, 10**13), st.integers(1, 2048))
def test_json_says_the_same(parameters: int, ranks: int) -> None:
    """The data adds up: states to totals, ranks to the whole, kinds of traffic to what is sent."""
    data = json.loads(json.dumps(equations(parameters, ranks)))
    assert data["bytes"]["total"] == 16 * parameters
    assert data["bytes_over_all_ranks"] - data["redundant_bytes"] == 16 * parameters
    for stage in data["stages"]:
        for figures in (stage["bytes_per_rank"], stage["sent_elements_per_rank"]):
            assert figures.pop("total") == sum(figures.values())
    assert [stage["stage"] for stage in data["stages"]] == [0, 1, 2, 3]


def test_json_from_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints the data and nothing else."""
    code, out, err = run(capsys, "plan", "--parameters", "7B", "--ranks", "256", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == equations(7 * 10**9, 256)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("parameters", [1, 7_500_000_000, 999_400_000_000])
def test_tables_fit(width: int, parameters: int) -> None:
    """No line is wider than the terminal, and no name or figure is cut."""
    text = printed(parameters, 1024, width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    states = [str(state) for state in ModelState]
    assert cells(text, "stage") == ["stage", *states, "in", "all", "sent"]


def test_no_colour_when_piped() -> None:
    """Output to a file has no escape sequences."""
    assert "\x1b" not in printed(10**9, 8, 80)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7e9", 7 * 10**9),
        ("7B", 7 * 10**9),
        ("70b", 70 * 10**9),
        ("1.1B", 1_100_000_000),
        ("1.5T", 1_500_000_000_000),
        ("350M", 350 * 10**6),
        ("7_000", 7000),
        ("1", 1),
    ],
)
def test_counts_as_people_write_them(text: str, count: int) -> None:
    """Suffixes and exponents are exact, without the rounding of floats."""
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "B", "seven", "0", "-7e9", "0.5", "nan", "inf", "1e19", "1e999999999", "7G"])
def test_counts_that_are_none(text: str) -> None:
    """What is no number of parameters is refused, with an example of one."""
    with pytest.raises(PlanError, match="7e9, 7B or 350M"):
        parse_count(text)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "plan, train and anatomy"),
        (("trian",), "did you mean train?"),
        (("xyzzy",), "no command 'xyzzy'"),
        (("plan",), "--parameters"),
        (("plan", "--parameters"), "--parameters"),
        (("plan", "--parameters", "many"), "--parameters many"),
        (("plan", "--parameters", "7e9", "--ranks", "0"), "--ranks 0"),
        (("plan", "--parameters", "7e9", "--ranks", "x"), "--ranks"),
        (("plan", "--parameters", "7e9", "--rnks", "3"), "--rnks, 3. Perhaps you meant: --ranks"),
        (("plan", "--parameters", "7e9", "extra"), "extra"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], says: str) -> None:
    """Bad input: exit code 2, nothing on stdout, and on stderr one line that names what is wrong."""
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("onenth: ")
    assert says in err


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (PlanError("two\n  lines"), 2, "onenth: two lines\n"),
        (
            FileNotFoundError(2, "No such file or directory", "a.txt"),
            2,
            "onenth: a.txt: No such file or directory\n",
        ),
        (OSError(28, "No space left on device"), 2, "onenth: [Errno 28] No space left on device\n"),
        (KeyboardInterrupt(), 130, "onenth: interrupted\n"),
    ],
)
def test_what_a_command_raises_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    says: str,
) -> None:
    """Errors on purpose, files that fail and Ctrl-C end in one line and an exit code, without a traceback."""

    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr("onenth.cli.plan.run", fail)
    assert run(capsys, "plan") == (code, "", says)


def test_mistakes_in_the_code_keep_their_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody raised on purpose is not dressed up as bad input."""

    def fail(argv: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("onenth.cli.plan.run", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["plan"])


@pytest.mark.parametrize("argv", [("--help",), ("plan", "--help")])
def test_help_shows_an_example(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]) -> None:
    """--help exits with 0 and shows a command that can be copied."""
    try:
        code = cli.main(argv)
    except SystemExit as exit_:
        code = exit_.code
    assert code == 0
    assert "onenth plan --parameters 7e9 --ranks 256" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints the name and the installed version."""
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.split()[0] == "onenth"
    assert out.split()[1][0].isdigit()


def test_plan_runs_without_torch() -> None:
    """The installed command plans without importing torch, which would take it from 0.2 s to seconds."""
    probe = (
        "import sys; from onenth.cli import main;"
        "code = main(['plan', '--parameters', '7B']); sys.exit(code or ('torch' in sys.modules) * 3)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_leaves_early() -> None:
    """Output that nobody reads (`onenth plan … | head`) ends without a traceback."""
    probe = "import sys; from onenth.cli import main; sys.exit(main(['plan', '--parameters', '7B', '--json']))"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-c", probe],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
