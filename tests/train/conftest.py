"""A small job for the command line, and a look at the processes that it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
}


def wait_until(holds: Callable[[], bool], seconds: float = 240) -> None:
    """Return once `holds()`; fail after some seconds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


@dataclass
class Command:
    """`onenth train` in a process of its own, whose descendants can be told from all others."""

    directory: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self, *words: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """Start it in a session of its own, as a shell starts a job."""
        script = self.directory / "command.py"
        script.write_text(
            "import sys\n\nfrom onenth.cli import main\n\n"
            'if __name__ == "__main__":\n    sys.exit(main(sys.argv[1:]))\n'
        )
        return subprocess.Popen(
            [sys.executable, *launcher, str(script), "train", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.directory,
            env=os.environ | {"MARK_OF_THE_TEST": self.mark, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
            start_new_session=True,
        )

    def run(
        self, *words: str, launcher: tuple[str, ...] = (), seconds: float = 240
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        process = self.start(*words, launcher=launcher)
        out, err = process.communicate(timeout=seconds)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def processes(self) -> list[int]:
        """Process ids of what it started and what those started, dead parents or not."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # gone, or another user's
                continue
        return found


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    """The command, in a directory with a small model's config.json and a text."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    command = Command(tmp_path)
    yield command
    for process in command.processes():
        os.kill(process, 9)
