"""Cap: a device that counts as a card of `max_bytes`. An allocation beyond that fails as it would on such a card.

On CUDA the caching allocator itself is told; cached and fragmented bytes count, as on a card. (Not yet run on a GPU.)
Elsewhere the bytes of all live storages that computation touches are counted. That sees every operator, which costs
a step some time and keeps torch.compile from compiling: it is meant for tests and for shared machines.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _pop_mode, _push_mode

from onenth.comm import Communicator
from onenth.ledger import Ledger
from onenth.residual_states.out_of_memory import OutOfMemoryError
from onenth.residual_states.storages import StorageWatch, watch_resizes


class Cap(StorageWatch[list[int]]):
    """Counts the storages on one device type, and refuses what would be more than `max_bytes`.

    held: bytes counted now. An entry is [bytes].
    """

    def __init__(self, max_bytes: int, device: torch.device) -> None:
        super().__init__()
        self.max_bytes, self.device, self.held = max_bytes, device.type, 0
        self._end_resizes: Callable[[], None] = lambda: None

    def open(self, ledger: Ledger) -> None:
        """Count what the ledger knows, and from here on what computation touches. Raises torch.OutOfMemoryError."""
        self.is_open = True
        for storage, _, _ in ledger.storages():
            self._check(storage.nbytes())
            self.held += storage.nbytes()
            self.enter(storage, [storage.nbytes()])
        self._end_resizes = watch_resizes(self.resized)
        self.__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Count no more. Modes that were entered later stay in force."""
        self.is_open = False
        self._end_resizes()
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)

    def retire(self) -> None:
        """The model is gone, maybe in the midst of an operator: stop counting, and leave the modes as they are."""
        self.is_open = False
        self._end_resizes()

    def made(self, storage: torch.UntypedStorage, like: torch.Tensor, operator: str | None) -> list[int] | None:
        """Count a new storage; one that is too much is refused, and goes as its tensor does."""
        if like.device.type != self.device:
            return None
        self._check(storage.nbytes())
        self.held += storage.nbytes()
        return [storage.nbytes()]

    def freed(self, entry: list[int]) -> None:
        """Its bytes are there again."""
        self.held -= entry[0]

    def grown(self, entry: list[int], storage: torch.UntypedStorage) -> list[int]:
        """Count a storage at its new size; one that grew too much gets no bytes at all."""
        more = storage.nbytes() - entry[0]
        try:
            self._check(more)
        except torch.OutOfMemoryError:
            self.held -= entry[0]
            entry[0] = 0
            storage.resize_(0)
            raise
        self.held += more
        return [storage.nbytes()]

    def _check(self, asked: int) -> None:
        if asked > 0 and self.is_open and self.held + asked > self.max_bytes:
            raise torch.OutOfMemoryError(
                f"out of memory. Tried to allocate {asked} bytes; max_bytes is {self.max_bytes}, "
                f"of which {self.held} are in use"
            )


def put_cap(owner: Any, max_bytes: int | None, comm: Communicator, ledger: Ledger) -> Cap | None:
    """Let the device count as a card of `max_bytes` as long as `owner` lives; the Cap where one counts, or None.

    Raises OutOfMemoryError if more is held already.
    """
    if max_bytes is None:
        return None
    device = comm.device
    if device.type == "cuda":  # not yet run on a GPU
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, max_bytes / whole), device)
        return None
    cap = Cap(max_bytes, device)
    try:
        cap.open(ledger)
    except torch.OutOfMemoryError as error:
        cap.is_open = False
        raise OutOfMemoryError(
            f"rank {comm.rank}: the model's states do not fit: {error}. Use a higher stage or more ranks", comm.rank
        ) from error
    weakref.finalize(owner, cap.retire)
    return cap
