"""The recorder: sees every storage being made, resized and freed, and what autograd keeps of it.

Made: a dispatch mode sees the results of every operator, below autograd. Freed: a storage's Python object lives exactly
as long as the storage, so a weak reference to it tells the moment. Resized: through `UntypedStorage.resize_`, or by an
operator that writes. Kept: hooks on what autograd saves, which last until the graph lets go.

Not seen: what kernels allocate and free inside one operator; changes of saved tensors in place, which PyTorch reports
without these hooks, go unnoticed while a step is recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from onenth.anatomy.phases import Part, Phases
from onenth.anatomy.tape import Mark, Seen, Tape
from onenth.states import ResidualState, Tier

_FRESH = torch.ops.aten.lift_fresh.default  # what `torch.tensor` passes its new tensor through


class _Saved:
    """A tensor that autograd has saved; its end is that of the save."""

    __slots__ = ("recorder", "seen", "tensor")

    def __init__(self, tensor: torch.Tensor, seen: Seen, recorder: Recorder) -> None:
        self.tensor, self.seen, self.recorder = tensor, seen, recorder

    def __del__(self) -> None:
        self.recorder.unsaved(self.seen)


class Recorder(TorchDispatchMode):
    """Writes the tape of the storages on one device type, and of the host's.

    device: the type of the device that the model trains on ("cuda"); its storages are on Tier.DEVICE.
    """

    def __init__(self, phases: Phases, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phases, self.device = phases, device
        self.tape = Tape()
        self.is_open = False
        self._live: dict[int, tuple[Seen, weakref.ref[torch.UntypedStorage]]] = {}
        self._writes: dict[Any, bool] = {}
        self._hooks: Any = saved_tensors_hooks(self._pack, lambda saved: saved.tensor)
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_
        self._run = 0

    def open(self) -> None:
        """Start to record."""
        self.is_open = True
        recorder, plain = self, self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            plain(storage, size)
            recorder.resized(storage)
            return storage

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        torch.get_rng_state = _watched_random_state(self)
        self._hooks.__enter__()
        self.__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Stop recording."""
        self._end_run()
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._hooks.__exit__()
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        torch.get_rng_state = torch.random.get_rng_state
        self.is_open = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of others: what it does with them is seen
        kwargs = kwargs or {}
        phase = self._phase()
        given = [*_tensors(args), *_tensors(kwargs.values())]
        for tensor in given:
            self._note(tensor, func if func is _FRESH else None, phase)
        result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            self._note(tensor, func, phase)
        if self._is_writing(func):
            for tensor in given:
                self.resized(tensor.untyped_storage())
        return result

    def _is_writing(self, func: Any) -> bool:
        known = self._writes.get(func)
        if known is None:
            known = self._writes[func] = bool(func._schema.is_mutable)
        return known

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
        seen = self._note(state, "get_rng_state", phase)
        if seen is not None and self.phases.known[phase].part is Part.FORWARD:
            seen.keeper = seen.module

    def note(self, tensor: torch.Tensor, label: str | None = None) -> None:
        """A tensor was found; `label`: the state that it belongs to. An earlier label gives way."""
        seen = self._note(tensor, None, self._phase())
        if seen is not None and label is not None:
            seen.label = label

    def label(self, tensor: torch.Tensor) -> str | None:
        """The state that somebody has said the tensor's storage belongs to."""
        found = self._live.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[0].label

    def keep(self, tensor: torch.Tensor, keeper: str) -> None:
        """A graph that was made before the recording keeps the tensor."""
        seen = self._note(tensor, None, self._phase())
        if seen is not None and seen.label in (None, ResidualState.OTHER):
            seen.label, seen.keeper = None, keeper

    def note_storage(self, storage: torch.UntypedStorage, label: str, like: torch.device) -> None:
        """A storage was found, of which no tensor is at hand."""
        found = self._live.get(storage._cdata)
        seen = found[0] if found else self._add(storage, like.type, (storage.nbytes(),), "", None, self._phase())
        if seen is not None:
            seen.label = label

    def _note(self, tensor: torch.Tensor, func: Any, phase: int) -> Seen | None:
        """What is known about the tensor's storage; an unknown one is new, made by `func` (None: out of sight)."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse and opaque tensors have none of their own
            return None
        found = self._live.get(storage._cdata)
        if found is not None:
            return found[0]
        made_by = None if func is None else str(func).removesuffix(".default")
        dtype = str(tensor.dtype).removeprefix("torch.")
        return self._add(storage, tensor.device.type, tuple(tensor.shape), dtype, made_by, phase)

    def _add(
        self,
        storage: torch.UntypedStorage,
        device: str,
        shape: tuple[int, ...],
        dtype: str,
        made_by: str | None,
        phase: int,
    ) -> Seen | None:
        if device != self.device and device != "cpu":
            return None  # meta tensors hold nothing; another accelerator is not this rank's
        tier = Tier.DEVICE if device == self.device else Tier.HOST
        tape, key = self.tape, storage._cdata
        known = self.phases.known[phase]
        number = len(tape.seen)
        made = tape.write(Mark.ALLOCATION, number, phase, self.phases.turn)
        seen = Seen(
            number,
            storage.nbytes(),
            tier,
            tuple(int(size) for size in shape),
            dtype,
            made_by,
            known.module,
            phase,
            self.phases.turn,
            self._run if known.part is Part.RECOMPUTE else 0,
            made,
        )
        tape.seen.append(seen)
        self._live[key] = (seen, weakref.ref(storage, lambda _: self._freed(key)))
        return seen

    def _freed(self, key: int) -> None:
        seen, _ = self._live.pop(key)
        if self.is_open:
            self._release(seen)

    def _release(self, seen: Seen) -> None:
        seen.gone = self.tape.write(Mark.RELEASE, seen.number, self._phase(), self.phases.turn)
        seen.gone_turn = self.phases.turn

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage may have another size now: what it held is gone, what it holds is new."""
        found = self._live.get(storage._cdata)
        if found is None or not self.is_open or storage.nbytes() == found[0].bytes:
            return
        old, reference = found
        phase, number = self._phase(), len(self.tape.seen)
        made = self.tape.write(Mark.ALLOCATION, number, phase, self.phases.turn)
        new = Seen(
            number,
            storage.nbytes(),
            old.tier,
            old.shape,
            old.dtype,
            old.operator,
            old.module,
            phase,
            self.phases.turn,
            self._run,
            made,
            label=old.label,
            keeper=old.keeper,
            saves=old.saves,
        )
        self.tape.seen.append(new)
        self._live[storage._cdata] = (new, reference)
        self._release(old)

    def _pack(self, tensor: torch.Tensor) -> Any:
        seen = self._note(tensor, None, self._phase())
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


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments or results; lists of them included."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
