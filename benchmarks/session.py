"""The ranks of one system on one job, started together, told what to do over pipes, ended together."""

from __future__ import annotations

import multiprocessing
import tempfile
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeVar, cast

from benchmarks.worker import Failed, Skipped, Task, Timing, work
from onenth.residual_states.heap import whole_blocks

TIMEOUT = 600.0  # seconds that a rank may take to answer

_T = TypeVar("_T", int, Timing)


class StoppedError(Exception):
    """A system that was skipped or failed; says why."""


class Session:
    """Processes of one system; a context, and none of them outlives it."""

    def __init__(self, system: str, job: str, ranks: int, *, count_bytes: bool = False) -> None:
        # Ranks fork from a server that has done the imports and runs no thread: a start takes no seconds.
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload(["benchmarks.worker"])
        self._stack = ExitStack()
        directory = self._stack.enter_context(tempfile.TemporaryDirectory())
        task = Task(system=system, job=job, ranks=ranks, store=str(Path(directory) / "store"))
        self._pipes: list[Connection] = []
        for rank in range(ranks):
            pipe, theirs = processes.Pipe()
            process = processes.Process(target=work, args=(rank, task, theirs, count_bytes), daemon=True)
            with whole_blocks():  # the server is started with the first of them, and its children share its heap's ways
                process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._stack.callback(process.join)
            self._stack.callback(process.kill)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all ranks."""
        self._stack.close()

    def count_bytes(self) -> int:
        """Peak bytes of live tensors on the rank that has most, in a session made to count."""
        return max(self._answers(int))

    def steps(self, number: int) -> list[Timing]:
        """Train `number` steps; every rank's timing."""
        for pipe in self._pipes:
            pipe.send(number)
        return self._answers(Timing)

    def _answers(self, kind: type[_T]) -> list[_T]:
        """One answer of every rank, or StoppedError by the first that is none."""
        answers: dict[int, _T] = {}
        while len(answers) < len(self._pipes):
            ready = wait([pipe for rank, pipe in enumerate(self._pipes) if rank not in answers], TIMEOUT)
            if not ready:
                raise StoppedError(f"failed: no answer in {TIMEOUT:.0f} s")
            for pipe in cast(list[Connection], ready):
                try:
                    answer = pipe.recv()
                except EOFError:
                    answer = Failed("a rank died without an answer")
                if isinstance(answer, Skipped | Failed):
                    raise StoppedError(str(answer))
                answers[self._pipes.index(pipe)] = answer
        return [answers[rank] for rank in range(len(self._pipes))]
