"""StorageWatch: sees every storage on a device type being made, resized and freed, whatever made it.

Made: a dispatch mode sees the results of every operator, below autograd; a storage that an operator is given and that
was not seen before counts from then on. Freed: a storage's Python object lives exactly as long as the storage, so a
weak reference to it tells the moment. Resized: through `UntypedStorage.resize_`, or by an operator that writes.

Not seen: what kernels allocate and free inside one operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_FRESH = torch.ops.aten.lift_fresh.default  # what `torch.tensor` passes its new tensor through

Entry = TypeVar("Entry")


class StorageWatch(TorchDispatchMode, Generic[Entry]):
    """Keeps an entry for each storage that is alive. What an entry is, and what happens to it, subclasses say.

    is_open: whether what happens is still of interest.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_open = False
        self._live: dict[int, tuple[Entry, weakref.ref[torch.UntypedStorage]]] = {}
        self._writes: dict[Any, bool] = {}

    def made(self, storage: torch.UntypedStorage, like: torch.Tensor, operator: str | None) -> Entry | None:
        """A storage is new; its entry, or None if it is none of ours.

        like: a tensor in it. operator: what made it; None: it was made out of sight.
        """
        raise NotImplementedError

    def freed(self, entry: Entry) -> None:
        """A storage is gone."""
        raise NotImplementedError

    def grown(self, entry: Entry, storage: torch.UntypedStorage) -> Entry:
        """A storage may have another size now; its entry from here on."""
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of others: what it does with them is seen
        kwargs = kwargs or {}
        if not self.is_open:
            return func(*args, **kwargs)
        given = [*_tensors(args), *_tensors(kwargs.values())]
        for tensor in given:
            self.see(tensor, func if func is _FRESH else None)
        result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            self.see(tensor, func)
        if self._is_writing(func):
            for tensor in given:
                self.resized(tensor.untyped_storage())
        return result

    def _is_writing(self, func: Any) -> bool:
        known = self._writes.get(func)
        if known is None:
            known = self._writes[func] = bool(func._schema.is_mutable)
        return known

    def see(self, tensor: torch.Tensor, func: Any = None) -> Entry | None:
        """The entry of the tensor's storage; an unknown one is new, made by `func` (None: out of sight)."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse and opaque tensors have none of their own
            return None
        found = self._live.get(storage._cdata)
        if found is not None:
            return found[0]
        entry = self.made(storage, tensor, None if func is None else str(func).removesuffix(".default"))
        if entry is not None:
            self.enter(storage, entry)
        return entry

    def entry(self, storage: torch.UntypedStorage) -> Entry | None:
        """What is known of a storage."""
        found = self._live.get(storage._cdata)
        return None if found is None else found[0]

    def enter(self, storage: torch.UntypedStorage, entry: Entry) -> None:
        """Keep an entry as long as its storage lives."""
        key = storage._cdata
        self._live[key] = (entry, weakref.ref(storage, lambda _: self._gone(key)))

    def _gone(self, key: int) -> None:
        entry, _ = self._live.pop(key)
        if self.is_open:
            self.freed(entry)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage may have another size now."""
        found = self._live.get(storage._cdata)
        if found is not None and self.is_open:
            self._live[storage._cdata] = (self.grown(found[0], storage), found[1])


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments or results; lists of them included."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def watch_resizes(told: Callable[[torch.UntypedStorage], None]) -> Callable[[], None]:
    """Have `told` called after every `UntypedStorage.resize_`; returns what ends it, in any order with others."""
    _told.append(told)
    if len(_told) == 1:
        torch.UntypedStorage.resize_ = _resize_  # type: ignore[method-assign, assignment]

    def end() -> None:
        _told.remove(told)
        if not _told:
            torch.UntypedStorage.resize_ = _plain_resize_  # type: ignore[method-assign]

    return end


_told: list[Callable[[torch.UntypedStorage], None]] = []
_plain_resize_: Callable[..., Any] = torch.UntypedStorage.resize_


def _resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    _plain_resize_(storage, size)
    for told in tuple(_told):
        told(storage)
    return storage
