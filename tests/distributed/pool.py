"""A pool of ranks: worker processes joined by gloo, started once and reused by every test of the session.

    def sizes(group, factor):                # at module level: workers import it by name
        return factor * dist.get_world_size(group)

    def test_sizes(pool):
        assert pool.run(2, sizes, 10) == [20, 20]

Workers import functions from the modules that define them, with the parent's `sys.path`. An `assert` inside
a worker shows its line but not its values: give it a message, or return the values and compare them in the
test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_HOST = "127.0.0.1"
_START_SECONDS = 120.0  # importing torch on a busy machine
_GRACE_SECONDS = 3.0  # for ranks that still run once another has failed

# Workers are forked from a server that has imported what takes long to import, and has started no threads: it
# is imported once, and a pool that ended with a failure is back within a fraction of a second. An optimizer's
# first step imports torch._dynamo; transformers and peft are imported where this process has them already.
_CONTEXT = multiprocessing.get_context("forkserver")
_LARGE = ("transformers", "peft")


class RankError(RuntimeError):
    """A function failed on some rank: it raised, died, or did not answer in time."""


@dataclass
class _Worker:
    """The parent's end of one rank."""

    rank: int
    process: BaseProcess
    pipe: Connection
    stacks: Path  # where the worker writes its stack when it crashes or is asked to

    def send(self, *message: Any) -> None:
        self.pipe.send_bytes(pickle.dumps(message))

    def receive(self) -> tuple[Any, str | None]:
        """The answer: (value, None), or (None, why there is none)."""
        try:
            value, error = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(_GRACE_SECONDS)
            return None, f"died with exit code {self.process.exitcode}\n{self.stacks.read_text()}"
        return value, error

    def stack(self) -> str:
        """What the worker is doing right now."""
        before = len(self.stacks.read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
        time.sleep(0.2)
        return self.stacks.read_text()[before:]


class Pool:
    """`size` ranks in one gloo group, and a group of the first n for every n."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._workers: list[_Worker] = []
        self._store: dist.TCPStore | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()
        self._folder.cleanup()

    def run(
        self, n: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, breaks_group: bool = False
    ) -> list[Any]:
        """`fn(group, *args)` on ranks 0 to n-1; results by rank, or one `RankError` for all failures.

        timeout: seconds for all ranks; those that do not answer are named with their stacks, and killed.
        breaks_group: `fn` leaves unanswered transfers behind; the next run of n ranks gets a new group.
        """
        if not self._workers:
            self._start()
        workers = self._workers[:n]
        for worker in workers:
            worker.send("run", sys.path, n, pickle.dumps((fn, args)))
        results = self._collect(workers, timeout, f"{fn.__module__}.{fn.__qualname__}")
        if breaks_group:
            for worker in self._workers:
                worker.send("regroup", sys.path, n, b"")
            self._collect(self._workers, timeout, "making a new group")
        return results

    def _collect(self, workers: Sequence[_Worker], timeout: float, what: str) -> list[Any]:
        """One answer of each worker; on any failure the whole pool ends, to start afresh at the next run."""
        results: dict[int, Any] = {}
        failures: list[str] = []
        waiting = {worker.pipe: worker for worker in workers}
        deadline = time.monotonic() + timeout
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for worker in [waiting.pop(pipe) for pipe in ready]:  # type: ignore[index]
                results[worker.rank], error = worker.receive()
                if error is not None:
                    failures.append(f"rank {worker.rank} {error}")
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        failures += [f"rank {worker.rank} did not answer; it is here:\n{worker.stack()}" for worker in waiting.values()]
        if failures:
            self._stop()
            raise RankError(f"{what} on {len(workers)} ranks, {timeout:g} s:\n" + "\n".join(failures))
        return [results[worker.rank] for worker in workers]

    def _start(self) -> None:
        large = [name for name in _LARGE if name in sys.modules]
        _CONTEXT.set_forkserver_preload([__name__, "torch._dynamo", *large])  # read when the server starts
        self._store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        for rank in range(self.size):
            ours, theirs = _CONTEXT.Pipe()
            stacks = Path(self._folder.name, f"rank{rank}")
            stacks.write_text("")
            process = _CONTEXT.Process(
                target=_serve, args=(rank, self.size, self._store.port, theirs, stacks), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append(_Worker(rank, process, ours, stacks))
        self._collect(self._workers, _START_SECONDS, "starting")

    def _stop(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers = []
        self._store = None


def _serve(rank: int, size: int, port: int, pipe: Connection, stacks: Path) -> None:
    """A worker's life: join the group, then answer one request after another until the parent hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    stack_file = stacks.open("a")
    faulthandler.enable(stack_file)
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=False)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore(_HOST, port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    groups = {n: dist.new_group(range(n)) for n in range(1, size + 1)}
    pipe.send_bytes(pickle.dumps((None, None)))
    modules = 0
    while True:
        if len(sys.modules) > modules:  # what modules keep need not be walked again by the collection after each call
            modules = len(sys.modules)
            gc.freeze()
        try:
            kind, path, n, call = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        sys.path.extend(entry for entry in path if entry not in sys.path)
        if kind == "regroup":
            groups[n] = dist.new_group(range(n))
            pipe.send_bytes(pickle.dumps((None, None)))
        else:
            pipe.send_bytes(_answer(groups[n], call))
            gc.collect()


def _answer(group: Any, call: bytes) -> bytes:
    """The pickled (value, error) of one call."""
    try:
        torch.manual_seed(0)
        fn, args = pickle.loads(call)
        return pickle.dumps((fn(group, *args), None))
    except BaseException as error:
        return pickle.dumps((None, f"raised {type(error).__name__}: {error}\n{traceback.format_exc()}"))
