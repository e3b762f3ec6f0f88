"""The recorder: writes down every storage being made, resized and freed, and what autograd keeps of it.

The storages are seen by `residual_states/storages.py`. Kept: hooks on what autograd saves, which last until the graph
lets go. Changes of saved tensors in place, which PyTorch reports without these hooks, go unnoticed while a step is
recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from onenth.anatomy.phases import Part, Phases
from onenth.anatomy.tape import Mark, Seen, Tape
from onenth.residual_states.out_of_memory import is_out_of_memory
from onenth.residual_states.storages import StorageWatch, watch_resizes
from onenth.states import ResidualState, Tier


@dataclass(frozen=True)
class Failure:
    """Where an operator ran out of memory. position: on the tape. operator: its name."""

    position: int
    phase: str
    operator: str


class _Saved:
    """A tensor that autograd has saved; its end is that of the save."""

    __slots__ = ("recorder", "seen", "tensor")

    def __init__(self, tensor: torch.Tensor, seen: Seen, recorder: Recorder) -> None:
        self.tensor, self.seen, self.recorder = tensor, seen, recorder

    def __del__(self) -> None:
        self.recorder.unsaved(self.seen)


class Recorder(StorageWatch[Seen]):
    """Writes the tape of the storages on one device type, and of the host's.

    device: the type of the device that the model trains on ("cuda"); its storages are on Tier.DEVICE.
    failure: where an operator ran out of memory last.
    """

    def __init__(self, phases: Phases, device: str) -> None:
        super().__init__()
        self.phases, self.device = phases, device
        self.tape = Tape()
        self.failure: Failure | None = None
        self._hooks: Any = saved_tensors_hooks(self._pack, lambda saved: saved.tensor)
        self._end_resizes: Callable[[], None] = lambda: None
        self._run = 0

    def open(self) -> None:
        """Start to record."""
        self.is_open = True
        self._end_resizes = watch_resizes(self.resized)
        torch.get_rng_state = _watched_random_state(self)
        self._hooks.__enter__()
        self.__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Stop recording."""
        self._end_run()
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._hooks.__exit__()
        self._end_resizes()
        torch.get_rng_state = torch.random.get_rng_state
        self.is_open = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        phase = self._phase()
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except RuntimeError as error:
            if self.failure is None and is_out_of_memory(error):
                self.failure = Failure(len(self.tape.marks), self.phases.known[phase].name, str(func))
            raise

    def _phase(self) -> int:
        """The running phase; a recomputation that it is not part of any more has ended."""
        phase = self.phases.now()
        run = self.phases.run if self.phases.recomputing else 0
        if run != self._run:
            self._end_run()
            self._run = run
        return phase

    def _end_run(self) -> None:
        if self._run:
            self.tape.runs_end[self._run] = len(self.tape.marks)
            self._run = 0

    def random_state(self, state: torch.Tensor) -> None:
        """A generator's state was copied, which no operator does: checkpointing keeps it to draw the numbers again."""
        phase = self._phase()
        seen = self.see(state, "get_rng_state")
        if seen is not None and self.phases.known[phase].part is Part.FORWARD:
            seen.keeper = seen.module

    def note(self, tensor: torch.Tensor, label: str | None = None) -> None:
        """A tensor was found; `label`: the state that it belongs to. An earlier label gives way."""
        seen = self.see(tensor)
        if seen is not None and label is not None:
            seen.label = label

    def label(self, tensor: torch.Tensor) -> str | None:
        """The state that somebody has said the tensor's storage belongs to."""
        found = self.entry(tensor.untyped_storage())
        return None if found is None else found.label

    def keep(self, tensor: torch.Tensor, keeper: str) -> None:
        """A graph that was made before the recording keeps the tensor."""
        seen = self.see(tensor)
        if seen is not None and seen.label in (None, ResidualState.OTHER):
            seen.label, seen.keeper = None, keeper

    def note_storage(self, storage: torch.UntypedStorage, label: str, like: torch.device) -> None:
        """A storage was found, of which no tensor is at hand."""
        seen = self.entry(storage)
        if seen is None and (seen := self._add(storage, like.type, (storage.nbytes(),), "", None)) is not None:
            self.enter(storage, seen)
        if seen is not None:
            seen.label = label

    def made(self, storage: torch.UntypedStorage, like: torch.Tensor, operator: str | None) -> Seen | None:
        """Write the allocation of a new storage."""
        dtype = str(like.dtype).removeprefix("torch.")
        return self._add(storage, like.device.type, tuple(like.shape), dtype, operator)

    def _add(
        self, storage: torch.UntypedStorage, device: str, shape: tuple[int, ...], dtype: str, operator: str | None
    ) -> Seen | None:
        if device != self.device and device != "cpu":
            return None  # meta tensors hold nothing; another accelerator is not this rank's
        phase = self._phase()
        known = self.phases.known[phase]
        number = len(self.tape.seen)
        made = self.tape.write(Mark.ALLOCATION, number, phase, self.phases.turn)
        seen = Seen(
            number,
            storage.nbytes(),
            Tier.DEVICE if device == self.device else Tier.HOST,
            tuple(int(size) for size in shape),
            dtype,
            operator,
            known.module,
            phase,
            self.phases.turn,
            self._run if known.part is Part.RECOMPUTE else 0,
            made,
        )
        self.tape.seen.append(seen)
        return seen

    def freed(self, entry: Seen) -> None:
        """Write the release of a storage."""
        entry.gone = self.tape.write(Mark.RELEASE, entry.number, self._phase(), self.phases.turn)
        entry.gone_turn = self.phases.turn

    def grown(self, entry: Seen, storage: torch.UntypedStorage) -> Seen:
        """Under a new size a storage goes on under a new number."""
        if storage.nbytes() == entry.bytes:
            return entry
        phase, number = self._phase(), len(self.tape.seen)
        new = replace(
            entry,
            number=number,
            bytes=storage.nbytes(),
            phase=phase,
            turn=self.phases.turn,
            run=self._run,
            made=self.tape.write(Mark.ALLOCATION, number, phase, self.phases.turn),
            unneeded=None,
        )
        self.tape.seen.append(new)
        self.freed(entry)
        return new

    def _pack(self, tensor: torch.Tensor) -> Any:
        seen = self.see(tensor)
        if seen is None:
            return _Unseen(tensor if tensor.grad_fn is None else tensor.detach())
        seen.saves += 1
        seen.unneeded = None
        if seen.keeper is None:
            seen.keeper = self.phases.known[self.phases.now()].module
        # An operator's own output, kept as it is, would hold the node that holds it: a cycle that nothing ever breaks.
        return _Saved(tensor if tensor.grad_fn is None else tensor.detach(), seen, self)

    def unsaved(self, seen: Seen) -> None:
        """Autograd has dropped one of the saves of a storage."""
        seen.saves -= 1
        if self.is_open and seen.saves == 0 and seen.gone is None:
            seen.unneeded = self.tape.write(Mark.UNNEEDED, seen.number, self._phase(), self.phases.turn)


class _Unseen:
    """A saved tensor that no storage of the recording belongs to."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


_running: list[Recorder] = []


def running() -> Recorder | None:
    """The recorder that is recording, if one is."""
    return _running[0] if _running else None


def set_running(recorder: Recorder | None) -> None:
    """Say which recorder is recording."""
    _running[:] = [] if recorder is None else [recorder]


def _watched_random_state(recorder: Recorder) -> Callable[[], torch.Tensor]:
    """`torch.get_rng_state` that tells the recorder while there is one; others may keep the function for good."""
    reference = weakref.ref(recorder)

    def get_rng_state() -> torch.Tensor:
        state = torch.random.get_rng_state()
        found = reference()
        if found is not None and found.is_open:
            found.random_state(state)
        return state

    return get_rng_state
