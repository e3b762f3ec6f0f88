"""Out of memory, explained: the error of a step that didn't fit says where, what held the bytes, and what would fit."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import nn

from onenth.anatomy.recorder import Recorder, running
from onenth.anatomy.remedies import Remedies, remedies
from onenth.anatomy.shortage import Shortage, find
from onenth.breakdown import Breakdown, aligned, format_bytes
from onenth.engine.engine import Engine
from onenth.residual_states.out_of_memory import OutOfMemoryError, is_out_of_memory
from onenth.states import Tier

_ROWS = 6  # owners that the message has room for; the rest is summed up

_sharded: list[weakref.ref[nn.Module]] = []  # models whose steps are explained, the last one sharded last


def explain_steps(model: nn.Module, engine: Engine) -> None:
    """From now on, an out-of-memory error in a step of the model is raised as an OutOfMemoryError.

    One that leaves the program from outside the engine's calls (a loss of the user's own, a plain `loss.backward()`)
    is explained below its traceback.
    """
    reference = weakref.ref(model)

    def explain(error: BaseException, part: str) -> None:
        found = reference()
        if found is not None:
            raise_explained(error, part, found, running())

    engine.explain = explain
    if not _sharded:
        sys.excepthook = _explaining(sys.excepthook)
    _sharded[:] = [*(one for one in _sharded if one() is not None), reference]


def raise_explained(error: BaseException, part: str, model: nn.Module, recorder: Recorder | None) -> None:
    """Raise an OutOfMemoryError if `error` is an allocator's, on every rank that it concerns; else do nothing."""
    if is_out_of_memory(error) and not isinstance(error, OutOfMemoryError):
        raise explained(error, part, model, recorder) from error


def explained(error: BaseException, part: str, model: nn.Module, recorder: Recorder | None) -> OutOfMemoryError:
    """The error that says all that is known; the other ranks are told. Call it while `error` has its traceback."""
    engine = model.__dict__.get("_onenth")
    if recorder is not None and recorder.phases.model is not model:
        recorder = None
    shortage = find(error, part, model, recorder)
    raised = OutOfMemoryError("", 0 if engine is None else engine.comm.rank, shortage.asked)
    who = "" if engine is None else f"rank {engine.comm.rank} of {engine.comm.size}: "
    what = "" if shortage.asked is None else f" asked for {_exactly(shortage.asked)}"
    headline = f"{who}out of memory. {_sentence(shortage.where)}{what or ' did not fit'}"
    everywhere = engine is None or engine.comm.fail(headline)
    lines = [headline, *_breakdown(shortage), *_remedies(remedies(shortage, engine))]
    if engine is not None and engine.comm.size > 1:
        lines.append("All ranks ran out." if everywhere else f"Only rank {engine.comm.rank} ran out, all are stopped.")
    raised.args = ("\n".join(lines),)
    return raised


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _exactly(count: int) -> str:
    return f"{format_bytes(count)} ({count:,} bytes)"


def _breakdown(shortage: Shortage) -> list[str]:
    of = "" if shortage.capacity is None else f" of {format_bytes(shortage.capacity)} ({shortage.limit})"
    rows = [(row.state, row.held) for row in Breakdown({(s, Tier.DEVICE): n for s, n in shortage.held.items()}).rows()]
    largest = sorted((row for row in rows if row[1]), key=lambda row: -row[1])
    shown, rest = largest[:_ROWS], sum(count for _, count in largest[_ROWS:])
    note = {"activations": "" if shortage.how == "recorded" else shortage.how}
    table = [[f"  {state}", format_bytes(count), note.get(state, "")] for state, count in shown]
    if rest:
        table.append(["  the rest", format_bytes(rest), ""])
    return [f"{format_bytes(shortage.in_use)}{of} were in use:", *aligned(table).splitlines()]


def _remedies(found: Remedies) -> list[str]:
    if not found.found:
        return []
    needed = format_bytes(found.needed)
    title = f"{needed} less would have fitted:" if found.fits else f"{needed} less were needed; not even this saves it:"
    return [title, *(f"- {remedy.text}: saves {format_bytes(remedy.saves)}" for remedy in found.found)]


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _explaining(hook: Hook) -> Hook:
    """An excepthook that goes on to explain an error that nobody has explained."""

    def explain(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        hook(kind, error, traceback)
        better = explain_uncaught(error)
        if better is not None:
            print(better, file=sys.stderr)

    return explain


def explain_uncaught(error: BaseException) -> OutOfMemoryError | None:
    """The explanation of an error that left the program, if it is an allocator's and a model is being trained."""
    model = next((model for one in reversed(_sharded) if (model := one()) is not None), None)
    if model is None or not is_out_of_memory(error) or isinstance(error, OutOfMemoryError):
        return None
    return explained(error, "a part of the step", model, running())
