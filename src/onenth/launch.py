"""Run a function on local ranks, through PyTorch's elastic launcher: values by rank, or the first failure.

Added to the launcher: the failure that came first is the one reported (a rank that dies takes its peers'
transfers with it, and they fail later, more noisily); Ctrl-C reaches the launching process alone, which then
stops the ranks; ranks do not outlive the process that launched them.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from onenth.anatomy.out_of_memory import explain_uncaught
from onenth.errors import ConfigError, OnenthError
from onenth.residual_states.heap import whole_blocks
from onenth.world import init

_LAUNCHERS = ("torch.distributed.elastic", "torch.multiprocessing")  # whose loggers they are
_POLL = 0.05  # seconds between two looks at the ranks
_STOP = 5  # seconds that ranks have to end after SIGTERM, before SIGKILL
_NOTICE = 1.0  # seconds that a failed rank stays, so that a peer that died in silence is noticed first
_HANDLED = ("SIGTERM", "SIGHUP", "SIGQUIT")  # on these, the launcher raises SignalException


class RankError(OnenthError, RuntimeError):
    """A rank failed.

    rank: which.
    summary: what happened, in one line.
    details: the rank's traceback; "" if it died without one.

    The rank's own exception is `__cause__` where it could be sent over.
    """

    def __init__(self, rank: int, summary: str, details: str = "") -> None:
        super().__init__(f"rank {rank}: {summary}" + (f"\n\n{details}" if details else ""))
        self.rank = rank
        self.summary = summary
        self.details = details


@dataclass(frozen=True)
class _Failure:
    """What a failed rank leaves for the launching process; `moment` in ns, of one clock for all ranks."""

    rank: int
    moment: int
    summary: str
    details: str
    exception: bytes | None

    def error(self) -> RankError:
        """The error to raise, the rank's own exception as its cause."""
        error = RankError(self.rank, self.summary, self.details)
        if self.exception is not None:
            with suppress(Exception):  # one that cannot be rebuilt is in `details`
                error.__cause__ = pickle.loads(self.exception)
        return error


def launch(fn: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Run `fn(*args)` on `ranks` local processes joined in one group, and return its values by rank.

    The group is the one of `onenth.init()`. `fn`, its arguments and its values must be picklable; `fn` is found
    by its name, so it must be at the top level of a module. Raises RankError for the first failure, with that
    rank's traceback; the other ranks are stopped.
    """
    if ranks < 1:
        raise ConfigError(f"launch: ranks={ranks!r}: at least 1 is meant")
    try:
        call = pickle.dumps((fn, args))
    except Exception as error:
        raise ConfigError(f"launch: fn must be a module's top-level function: {error}") from error
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="onenth-launch-"))
        stack.enter_context(_signals_kept())
        stack.enter_context(_launcher_quiet())
        stack.enter_context(_interrupts_here_only())
        stack.enter_context(whole_blocks())
        try:
            values = elastic_launch(_settings(ranks, directory), _rank_main)(call, directory)
            failure = None
        except ChildFailedError as error:
            failure = _first_failure(error, Path(directory))
    if failure is not None:
        raise failure
    return [pickle.loads(values[rank]) for rank in range(ranks)]


def _settings(ranks: int, directory: str) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=_POLL,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=directory),
        signals_to_handle=",".join(_HANDLED),
        shutdown_timeout=_STOP,
    )


@contextmanager
def _signals_kept() -> Iterator[None]:
    """The launcher leaves its signal handlers behind; put the caller's back."""
    numbers = [getattr(signal, name) for name in _HANDLED]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _launcher_quiet() -> Iterator[None]:
    """Silence the launcher's own account of failures and stops: `RankError` says it."""
    before = {
        entry: entry.level
        for name, entry in logging.root.manager.loggerDict.items()
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")) and isinstance(entry, logging.Logger)
    }
    for entry in before:
        entry.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for entry, level in before.items():
            entry.setLevel(level)


@contextmanager
def _interrupts_here_only() -> Iterator[None]:
    """Keep Ctrl-C, which a terminal sends to every process in the foreground, from the ranks.

    Ranks inherit the signal mask of the thread that starts them, so SIGINT is blocked in this one. A helper
    thread that does not block it takes the signal; Python then runs the handler in the main thread as always.
    """
    finished = threading.Event()
    helper = threading.Thread(target=finished.wait, name="onenth-interrupts", daemon=True)
    helper.start()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        finished.set()
        helper.join()


def _first_failure(error: ChildFailedError, directory: Path) -> RankError:
    rank, found = error.get_first_failure()
    failures = [pickle.loads(path.read_bytes()) for path in directory.glob("failure-*")]
    if any(failure.rank == rank for failure in failures):
        first: _Failure = min(failures, key=lambda failure: failure.moment)
        return first.error()
    if found.exitcode >= 0:
        return RankError(rank, f"ended with exit code {found.exitcode} and without an exception")
    name = signal.Signals(-found.exitcode).name
    why = " (often: the system ran out of memory)" if name == "SIGKILL" else ""
    return RankError(rank, f"died of {name}{why}")


def _rank_main(call: bytes, directory: str) -> bytes:
    """One rank's life: join, run, return the pickled value. A failure is noted before anything closes."""
    _follow_parent()
    try:
        _share_cores()
        fn, args = pickle.loads(call)
        _join()
        value = pickle.dumps(fn(*args))
    except BaseException as error:  # also SystemExit: every end but a returned value is a failure
        _write_failure(explain_uncaught(error) or error, Path(directory))
        time.sleep(_NOTICE)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # closing the group in order needs peers that may be gone
    dist.destroy_process_group()
    return value


def _follow_parent() -> None:
    """End this rank when the process that launched it ends, however that ended."""
    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="onenth-parent", daemon=True).start()


def _share_cores() -> None:
    """Split this machine's cores among its ranks, unless OMP_NUM_THREADS says how many threads a rank has."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))


def _join() -> None:
    """Make the group: the accelerators' if each local rank has one, else gloo on all ranks alike."""
    if torch.accelerator.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        dist.init_process_group("gloo")
    init()


def _write_failure(error: BaseException, directory: Path) -> None:
    """Leave `error` for the launching process; written whole or not at all."""
    try:
        exception = pickle.dumps(error)
    except Exception:
        exception = None
    rank = int(os.environ["RANK"])
    text = " ".join(str(error).split())
    failure = _Failure(
        rank=rank,
        moment=getattr(error, "moment", time.monotonic_ns()),
        summary=f"{type(error).__name__}: {text}" if text else type(error).__name__,
        details="".join(traceback.format_exception(error)),
        exception=exception,
    )
    partial = directory / f"partial-{rank}"
    partial.write_bytes(pickle.dumps(failure))
    partial.rename(directory / f"failure-{rank}")
