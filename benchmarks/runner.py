"""The run: bytes of every system first, then rounds in which every system trains some steps in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from benchmarks.jobs import JOBS
from benchmarks.results import Result, Results
from benchmarks.session import Session, StoppedError

_PROCESS_BYTES = 256 * 2**20  # of a rank beside live tensors: interpreter, code, the allocator's slack

_MOST_PER_PARAMETER = 24  # bytes: fp32 parameters, gradients, moments, their bf16 copies, and the activations


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run: every system on every job, `rounds` times `steps` timed steps, on `ranks` processes.

    memory: bytes that all processes together may take.
    count_bytes: whether to count live bytes before the rounds.
    """

    jobs: Sequence[str]
    systems: Sequence[str]
    rounds: int
    steps: int
    ranks: int
    memory: int
    count_bytes: bool


class _JobRun:
    """One job on all systems. Sessions stay open from round to round if all fit in memory together."""

    def __init__(self, plan: Plan, job: str, results: dict[str, Result], say: Callable[[str], None]) -> None:
        self._plan, self._job, self._results, self._say = plan, job, results, say
        self._open: dict[str, Session] = {}

    def run(self) -> None:
        for name in self._plan.systems if self._plan.count_bytes else ():
            self._attempt(name, "bytes", partial(self._count, name))
        keep = self._needed() <= self._plan.memory
        with ExitStack() as sessions:
            for round_ in range(self._plan.rounds):
                for name in self._turns(round_):
                    self._attempt(name, f"round {round_ + 1}", partial(self._time, name, round_, sessions))
                    if not keep:
                        sessions.close()
                        self._open.clear()

    def _turns(self, round_: int) -> list[str]:
        """The systems that still run, starting elsewhere in every round, so that no place favours one."""
        start = round_ % len(self._plan.systems)
        rotated = [*self._plan.systems[start:], *self._plan.systems[:start]]
        return [name for name in rotated if self._results[name].problem is None]

    def _needed(self) -> int:
        """Bytes that all systems take together; those that weren't counted: as much as the largest might."""
        most = _MOST_PER_PARAMETER * JOBS[self._job].parameters
        running = [result for result in self._results.values() if result.problem is None]
        return self._plan.ranks * sum((result.live_bytes or most) + _PROCESS_BYTES for result in running)

    def _attempt(self, name: str, moment: str, measure: Callable[[], str]) -> None:
        """Measure; a system that breaks takes no part from there on, and the run goes on."""
        try:
            outcome = measure()
        except StoppedError as stopped:
            outcome = self._results[name].problem = str(stopped)
        self._say(f"{self._job} {moment} {name}: {outcome}")

    def _count(self, name: str) -> str:
        with Session(name, self._job, self._plan.ranks, count_bytes=True) as session:
            live = self._results[name].live_bytes = session.count_bytes()
        return f"{live / 2**20:.0f} MiB of live tensors at the peak of a step"

    def _time(self, name: str, round_: int, sessions: ExitStack) -> str:
        if name not in self._open:
            self._open[name] = sessions.enter_context(Session(name, self._job, self._plan.ranks))
        result = self._results[name]
        result.add(round_, self._open[name].steps(self._plan.steps))
        return f"{result.seconds[round_] * 1e3:.0f} ms a step"


def run(plan: Plan, say: Callable[[str], None]) -> Results:
    """Measure everything in the plan; `say` gets one line for each measurement."""
    results: Results = {job: {system: Result() for system in plan.systems} for job in plan.jobs}
    for job, systems in results.items():
        _JobRun(plan, job, systems, say).run()
    return results
