"""Run the benchmarks: `python -m benchmarks --jobs A B C --rounds 5`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

# Before torch is imported, here and in the ranks: one thread each, and no notes from peers about deprecation.
os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

from benchmarks.jobs import JOBS
from benchmarks.report import page
from benchmarks.runner import Plan, run
from benchmarks.systems import SYSTEMS


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="The same Llama job on several systems, interleaved over rounds.",
        epilog="While tuning: python -m benchmarks --jobs A --rounds 3 --skip-bytes --systems fsdp2 zro onenth3",
    )
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS), help="(all)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="(all)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each system (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps in a turn (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="processes of a system (%(default)s)")
    parser.add_argument(
        "--memory-gib",
        type=float,
        default=12.0,
        help="processes stay from turn to turn while those of all systems fit in this (%(default)s)",
    )
    parser.add_argument("--skip-bytes", action="store_true", help="time only; live bytes aren't counted")
    parser.add_argument("--out", type=Path, help="write the page here, too")
    return parser.parse_args()


def main() -> int:
    """Measure, print the page, and fail if a system broke."""
    arguments = _arguments()
    plan = Plan(
        jobs=arguments.jobs,
        systems=arguments.systems,
        rounds=arguments.rounds,
        steps=arguments.steps,
        ranks=arguments.ranks,
        memory=int(arguments.memory_gib * 2**30),
        count_bytes=not arguments.skip_bytes,
    )
    results = run(plan, lambda line: print(line, file=sys.stderr, flush=True))
    text = page(plan, results, shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]))
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)
    problems = [result.problem or "" for systems in results.values() for result in systems.values()]
    return int(any(problem.startswith("failed") for problem in problems))


if __name__ == "__main__":
    sys.exit(main())
