"""Draw what a terminal shows at the end of a recorded run, as an SVG.

Record a run with `script`, in a terminal of `--width` columns, and draw it:

    script -qc 'onenth train' train.log
    python docs/figures/terminal.py train.log docs/figures/train.svg --title 'onenth train'

Nothing is changed but what a terminal forgets: of a line that was drawn again and again (a progress bar), the
last drawing stays.
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

_HEADER, _FOOTER = "Script started on", "Script done on"  # what `script` writes around a run
_ERASE = "\x1b[2K"  # the whole line
_CURSOR = re.compile(r"\x1b\[\?25[lh]")  # hidden, and shown again


def shown(recording: str) -> list[str]:
    """The lines that a terminal shows in the end, with their colours; blank ones around them are left out."""
    written = [line for line in recording.split("\n") if not line.startswith((_HEADER, _FOOTER))]
    lines = [_last_drawing(_CURSOR.sub("", line)) for line in written]
    return "\n".join(lines).strip("\n").split("\n")


def _last_drawing(line: str) -> str:
    """What stays of a line: each drawing starts after a carriage return, and covers the one before."""
    drawings = [drawing for drawing in line.rstrip("\r").split("\r") if drawing]
    return drawings[-1].removeprefix(_ERASE).rstrip() if drawings else ""


def draw(recording: str, *, title: str, width: int) -> str:
    """The SVG of a recorded run in a terminal of `width` columns."""
    console = Console(record=True, file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor")
    for line in shown(recording):
        console.print(Text.from_ansi(line), no_wrap=True, crop=True, highlight=False)
    return console.export_svg(title=title)


def main() -> None:
    """Read a recording, write its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path, help="what script wrote")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    parser.add_argument("--title", default="", help="in the window's title bar")
    parser.add_argument("--width", type=int, default=88, help="columns of the recorded terminal")
    options = parser.parse_args()
    recording = options.recording.read_bytes().decode("utf-8", errors="replace")  # carriage returns as they are
    options.picture.write_text(draw(recording, title=options.title, width=options.width), encoding="utf-8")


if __name__ == "__main__":
    main()
