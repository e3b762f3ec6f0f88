"""The run as a page of Markdown: a table for each job, the targets, every system's setting, the command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.jobs import JOBS, VOCABULARY
from benchmarks.results import Result, Results
from benchmarks.runner import Plan
from benchmarks.systems import SYSTEMS
from benchmarks.targets import TARGETS, Target

#: Systems that step times are divided by, if they ran.
REFERENCES = ("compute", "ddp", "zro", "fsdp2")
_PACKAGES = ("torch", "transformers", "deepspeed", "onenth")


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _row(name: str, results: dict[str, Result], parameters: int) -> list[str]:
    result = results[name]
    references = [reference for reference in REFERENCES if reference in results]
    if result.problem is not None:
        reason = result.problem.strip().splitlines()
        return [SYSTEMS[name].label, reason[0] if len(reason) == 1 else f"failed: {reason[-1]}"]
    return [
        SYSTEMS[name].label,
        _number(result.step and result.step * 1e3, ".0f"),
        *(_number(result.time_ratio(results[reference]), ".2f") for reference in references),
        _number(result.live_bytes and result.live_bytes / parameters, ".2f"),
        _number(result.resident_bytes / 2**20 or None, ".0f"),
        _number(result.loss if SYSTEMS[name].trains else None, ".3f"),
    ]


def _spread(results: dict[str, Result]) -> str:
    """How far the losses of the systems that train are apart."""
    losses = [result.loss for name, result in results.items() if result.loss is not None and SYSTEMS[name].trains]
    return f" Losses differ by at most {max(losses) - min(losses):.3f}." if losses else ""


def _job(name: str, results: dict[str, Result], ranks: int) -> str:
    job = JOBS[name]
    references = [SYSTEMS[reference].label for reference in REFERENCES if reference in results]
    header = ["system", "ms a step", *(f"÷ {reference}" for reference in references)]
    header += ["peak live B / parameter", "peak RSS, MiB", "loss"]
    rows = [_row(system, results, job.parameters) for system in results]
    return (
        f"## Job {name}: {job.parameters / 1e6:.1f} M parameters, {job.batch} x {job.sequence} tokens a rank"
        f"\n\nLlama with {job.layers} layers of width {job.hidden}, MLP {job.intermediate}, vocabulary "
        f"{VOCABULARY}, embedding and head untied: {job.parameters:,} parameters. {ranks} ranks, one thread "
        f"each.{_spread(results)}\n\n" + _table(header, [row + [""] * (len(header) - len(row)) for row in rows])
    )


def _target(target: Target, results: Results) -> list[str]:
    ratio = target.ratio(results)
    verdict = "not measured" if ratio is None else "yes" if round(ratio, 2) <= target.limit else "**no**"
    what = {"time": "step time", "bytes": "peak live bytes"}[target.what]
    labels = [SYSTEMS[name].label for name in (target.system, target.peer)]
    return [
        target.job,
        f"{what} of {labels[0]} ÷ {labels[1]}",
        f"≤ {target.limit:.2f}",
        _number(ratio, ".2f"),
        verdict,
    ]


def targets(results: Results) -> str:
    """The ratios that the run's jobs and systems are held to, with what was measured."""
    wanted = [
        _target(target, results)
        for target in TARGETS
        if target.system in results.get(target.job, {}) and target.peer in results[target.job]
    ]
    if not wanted:
        return "None for these jobs and systems."
    return _table(["job", "ratio", "target", "measured", "met"], wanted)


def _cpu() -> str:
    """The processor's name, where Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} not installed"


def _machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(_version(package) for package in _PACKAGES)
    python = f"Python {platform.python_version()}"
    return f"{_cpu()}, {os.cpu_count()} cores, {memory:.0f} GiB; {python}, {versions}."


_METHOD = """\
In a round every system trains {steps} steps in turn, each on its own processes. A step takes as long as its
slowest rank, and a round's figure is the median of its steps. "ms a step" is the median over the
{rounds} rounds. A ratio is the median over rounds of the ratio within a round, so a machine that slows down for
a while doesn't count against one system. All train the same weights on the same tokens, forward and backward in
bf16, with AdamW; the losses after the first round show that they do. "Compute alone" is no training:
its ranks share nothing.

Peak live bytes are those of all tensors during one step, storages that are resized in place included:
the allocator events of PyTorch's profiler, on the rank that has most. Peak RSS counts from the process's
start. All processes have the heap that `onenth.launch` gives its ranks, which helps every system."""


def page(plan: Plan, results: Results, command: str) -> str:
    """The whole page."""
    settings = _table(
        ["system", "holds", "setting"],
        [[SYSTEMS[name].label, SYSTEMS[name].holds, SYSTEMS[name].setting] for name in plan.systems],
    )
    sections = [
        "# Benchmarks",
        f"Written by `{command}` on {_machine()}",
        _METHOD.format(steps=plan.steps, rounds=plan.rounds),
        *(_job(job, systems, plan.ranks) for job, systems in results.items()),
        "## Targets\n\n" + targets(results),
        "## What each system holds and how it is set\n\n" + settings,
    ]
    return "\n\n".join(sections) + "\n"
