"""The ledger: which storage belongs to which state. Whoever allocates registers; nobody guesses.

Labels are kept per storage, not per tensor, so views never count twice, and bytes are read from the storage when asked,
so a buffer that was resized to zero counts as zero and one that was freed does not count at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from onenth.states import Tier


class Ledger:
    """Labels of live storages: (state's name, tier) by storage.

    observers: called with (tensor, state, tier) at every registration.
    """

    def __init__(self) -> None:
        self.observers: list[Callable[[torch.Tensor, str, Tier], None]] = []
        self._labels: dict[int, tuple[StorageWeakRef, str, Tier]] = {}
        self._sweep_at = 1024

    def register(self, tensor: torch.Tensor, state: str, tier: Tier = Tier.DEVICE) -> torch.Tensor:
        """Label `tensor`'s storage; returns the tensor. A storage that is registered again takes the new label."""
        reference = StorageWeakRef(tensor.untyped_storage())
        self._labels[reference.cdata] = (reference, state, tier)
        if len(self._labels) > self._sweep_at:
            self._sweep()
            self._sweep_at = 2 * len(self._labels) + 1024
        for observer in self.observers:
            observer(tensor, state, tier)
        return tensor

    def label(self, tensor: torch.Tensor) -> tuple[str, Tier] | None:
        """The (state, tier) of `tensor`'s storage, or None where nobody registered it."""
        found = self._labels.get(StorageWeakRef(tensor.untyped_storage()).cdata)
        return None if found is None or found[0].expired() else found[1:]

    def held(self) -> dict[tuple[str, Tier], int]:
        """Bytes of the live registered storages, by (state, tier); states that hold nothing are left out."""
        total: Counter[tuple[str, Tier]] = Counter()
        for storage, state, tier in self.storages():
            total[(state, tier)] += storage.nbytes()
        return {key: count for key, count in total.items() if count}

    def storages(self) -> Iterator[tuple[torch.UntypedStorage, str, Tier]]:
        """The live registered storages, those of no bytes too, with their states and tiers."""
        self._sweep()
        for reference, state, tier in list(self._labels.values()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                yield storage, state, tier

    def _sweep(self) -> None:
        self._labels = {key: entry for key, entry in self._labels.items() if not entry[0].expired()}
