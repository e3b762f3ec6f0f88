"""What one rank of one system does: join the others, build the step, and time it or count its bytes."""

from __future__ import annotations

import importlib
import os
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from benchmarks.jobs import JOBS
from benchmarks.memory import peak_live_bytes, peak_resident_bytes
from benchmarks.systems import SYSTEMS

WARMUP = 2  # steps in which DDP's static graph, FSDP2 and prefetching engines settle


@dataclass(frozen=True, kw_only=True)
class Task:
    """A system on a job, over `ranks` processes that find each other through the file `store`."""

    system: str
    job: str
    ranks: int
    store: str


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Some steps on one rank: seconds of each, the loss of the last, the most bytes resident so far."""

    seconds: tuple[float, ...]
    loss: float
    resident_bytes: int


@dataclass(frozen=True)
class Skipped:
    """A system that isn't installed here."""

    reason: str

    def __str__(self) -> str:
        return f"skipped: {self.reason}"


@dataclass(frozen=True)
class Failed:
    """A system that broke, with its traceback or what else is known."""

    reason: str

    def __str__(self) -> str:
        return f"failed: {self.reason}"


#: A rank's answer: to "bytes" the peak bytes of live tensors, to a number of steps their timing.
Answer: TypeAlias = int | Timing | Skipped | Failed


def _count_bytes(build: Callable[[], Callable[[], Tensor]], pipe: Connection) -> None:
    pipe.send(peak_live_bytes(build, WARMUP))


def _time_steps(build: Callable[[], Callable[[], Tensor]], pipe: Connection) -> None:
    """Answer every number of steps that arrives with their timing, until the pipe closes."""
    step = build()
    for _ in range(WARMUP):
        step()
    while steps := pipe.recv():
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            loss = step()
            seconds.append(time.perf_counter() - start)
        pipe.send(Timing(seconds=tuple(seconds), loss=loss.item(), resident_bytes=peak_resident_bytes()))


def _build(task: Task) -> Callable[[], Tensor]:
    """The system's step on this rank's batch."""
    job = JOBS[task.job]
    step = SYSTEMS[task.system].build(job)
    tokens = job.tokens(dist.get_rank())
    return lambda: step(tokens)


def work(rank: int, task: Task, pipe: Connection, count_bytes: bool) -> None:
    """Serve one rank until its pipe closes."""
    warnings.simplefilter("ignore")  # peers' deprecation notes, repeated by every rank
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(task.ranks)}
    torch.set_num_threads(1)
    try:
        importlib.import_module(SYSTEMS[task.system].module)
        store = FileStore(task.store, task.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=task.ranks)
        serve = _count_bytes if count_bytes else _time_steps
        serve(lambda: _build(task), pipe)
    except ImportError as error:
        pipe.send(Skipped(str(error)))
    except EOFError:
        pass  # the run is over
    except Exception:
        pipe.send(Failed(traceback.format_exc()))
