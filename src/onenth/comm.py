"""Communication: the only caller of `torch.distributed`. Every transfer is counted, tagged, bounded and owned here.

Two paths move the same slices. Backends with good collectives (nccl) use them; gloo's are several times slower than
point-to-point messages of the same slices, so on gloo each pair of ranks exchanges its slices directly. A tag made of
(kind, unit, call) keeps a rank that went another way from swapping messages of equal size: it times out by name.

Tensors (N ranks, L elements a shard):
- flat: (N·L,), the caller's; a gather fills it, an exchange reads it. Untouchable until the transfer was waited for.
- received: (N·L,) with collectives, ((N-1)·L,) point-to-point (this rank's own slice stays where it is), in the
  gradients' dtype. Allocated at the exchange, dies once it was summed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from onenth.errors import TransferError

_KINDS = {"gather": 0, "exchange": 1, "sums": 2, "control": 3}
_CALLS, _UNITS, _FLATS = 2**12, 2**13, 2**4  # with 4 kinds: 31 bits, what a gloo tag holds

_MOMENT = 0.5  # seconds that a rank which failed gives the others to fail as well, before it stops their waiting
_FAILURES: Counter[str] = Counter()  # of this rank that were told to the others, by group
_NEVER_SENT = 2**31 - 1  # a tag that no message has

NATIVE = frozenset({"nccl", "xccl", "hccl", "mccl", "fake"})  # backends whose collectives are worth using


@dataclass(frozen=True)
class Label:
    """What a transfer is for: names it in errors and, as numbers, in its tag."""

    kind: str
    unit: int
    flat: int
    name: str


@dataclass
class Transfer:
    """Messages under way and the tensors that they use, which stay alive and untouched until `wait` returns."""

    what: str
    works: list[tuple[Any, int | None]]
    tensors: tuple[torch.Tensor, ...]
    rank: int
    timeout: timedelta
    failed: Callable[[], str | None]
    done: bool = field(default=False)

    def wait(self) -> None:
        """Wait for all messages. Raises TransferError, naming the rank that did not come, after the timeout."""
        if self.done:
            return
        for work, peer in self.works:
            try:
                work.wait(self.timeout)
            except RuntimeError as error:
                raise TransferError(self._failure(peer, error)) from error
        self.works, self.tensors, self.done = [], (), True

    def _failure(self, peer: int | None, error: RuntimeError) -> str:
        if (why := self.failed()) is not None:
            return f"rank {self.rank}, {self.what}: {why}"
        other = "the other ranks" if peer is None else f"rank {peer}"
        text = str(error)
        if "closed by peer" in text or "reset by peer" in text or "pair closure" in text:
            reason = f"{other} is gone or gave up"
        elif "imed out" in text or "imeout" in text:
            reason = f"{other} did not come within {self.timeout.total_seconds():g} s"
        else:
            reason = f"{other}: {text.splitlines()[0] if text else type(error).__name__}"
        return (
            f"rank {self.rank}, {self.what}: {reason}. All ranks must run the same units in the same order, "
            "and step together; look at the first rank that failed"
        )


class Communicator:
    """Transfers between the ranks of one group.

    group: a process group; None is the default one.
    device: where the tensors of transfers live.
    timeout: how long a wait may take.
    native: use the backend's collectives; None: where they are good.
    counters: elements that this rank sent, by kind ("gather", "exchange", "sums").
    """

    def __init__(self, group: Any, device: torch.device, timeout: timedelta, *, native: bool | None = None) -> None:
        self.group: Any = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self.device = device
        self.timeout = timeout
        self.simulated = dist.get_backend(self.group) == "fake"
        self.native = dist.get_backend(self.group) in NATIVE if native is None else native
        self.is_default = self.group is dist.group.WORLD
        self.counters: Counter[str] = Counter()
        self._calls: Counter[tuple[str, int, int]] = Counter()
        self._peers = [rank for rank in range(self.size) if rank != self.rank]

    def gather(self, flat: torch.Tensor, label: Label) -> Transfer:
        """Fill `flat` (N·L,) with every rank's segment; this rank's own segment must be in place already."""
        length = flat.numel() // self.size
        own = flat.narrow(0, self.rank * length, length)
        self.counters[label.kind] += length * len(self._peers)
        if self.size == 1:
            return self._transfer(label, [], ())
        if self.native:
            work = dist.all_gather_single(flat, own, group=self.group, async_op=True)
            return self._transfer(label, [(work, None)], (flat,))
        return self._swap(label, lambda _: own, lambda peer: flat.narrow(0, peer * length, length), (flat,))

    def received_numel(self, length: int) -> int:
        """Elements of the receive buffer that an exchange of segments of `length` elements needs."""
        return length * (self.size if self.native else self.size - 1)

    def exchange(self, flat: torch.Tensor, received: torch.Tensor, label: Label) -> Transfer:
        """Send segment r of `flat` (N·L,) to rank r; this rank's segment of every other rank arrives in `received`."""
        length = flat.numel() // self.size
        self.counters[label.kind] += length * len(self._peers)
        if self.size == 1 and not self.native:
            return self._transfer(label, [], ())
        if self.native:
            work = dist.all_to_all_single(received, flat, group=self.group, async_op=True)
            return self._transfer(label, [(work, None)], (flat, received))
        return self._swap(
            label,
            lambda peer: flat.narrow(0, peer * length, length),
            lambda peer: received.narrow(0, self.slot(peer) * length, length),
            (flat, received),
        )

    def slot(self, sender: int) -> int:
        """Which segment of the receive buffer `sender`'s slice arrives in (point-to-point leaves this rank's out)."""
        return sender if self.native or sender < self.rank else sender - 1

    def agree(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Every rank's `values` (K,), as (N, K); the wait names `name`."""
        table = torch.empty(self.size, values.numel(), dtype=values.dtype, device=values.device)
        table[self.rank] = values
        self.gather(table.view(-1), Label("control", 0, 0, name)).wait()
        return table

    def assemble(self, whole: torch.Tensor, parts: list[tuple[int, int, int]], name: str, to: int | None) -> None:
        """Complete `whole` (1-D) from `parts`, (owner, start, stop) each; `to`: only that rank receives; None: all.

        An owner's part must be in place in its own `whole`.
        """
        receivers = range(self.size) if to is None else [to]
        works: list[tuple[Any, int | None]] = []
        for owner, start, stop in parts:
            part = whole[start:stop]
            if owner == self.rank:
                works += [(self._send(part, peer, 0), peer) for peer in receivers if peer != owner]
            elif self.rank in receivers:
                works.append((self._receive(part, owner, 0), owner))
        self._transfer(Label("control", 0, 0, name), works, (whole,)).wait()

    def broadcast(self, tensor: torch.Tensor, name: str) -> None:
        """Rank 0's `tensor` on every rank, in place."""
        if self.size == 1:
            return
        work = dist.broadcast(tensor, group_src=0, group=self.group, async_op=True)
        self._transfer(Label("control", 0, 0, name), [(work, None)], (tensor,)).wait()

    def tell_all(self, value: Any) -> list[Any]:
        """Every rank's `value` (picklable, small), by rank. In a dry run: this rank's, once."""
        if self.size == 1 or self.simulated:
            return [value]
        # The object collective waits as long as the group allows; meeting first says in time who is missing.
        self.agree(torch.zeros(1, device=self.device), "what ranks tell each other")
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def fail(self, why: str) -> bool:
        """Tell the others that this rank cannot finish its step; returns whether all ranks say so of theirs.

        why: names this rank. If not all ranks fail within a moment, those that wait for this one are let go: their
        transfers fail at once, with `why`, and the group is of no further use.
        """
        if self.size == 1 or self.simulated:
            return True
        store, key = self.group.get_group_store(), self._failure_key()
        store.compare_set(key, "", why)
        failed = store.add(f"{key}/ranks", 1)
        until = time.monotonic() + _MOMENT
        while failed < self.size and time.monotonic() < until:
            time.sleep(_MOMENT / 50)
            failed = store.add(f"{key}/ranks", 0)
        _FAILURES[self.group.group_name] += 1
        if failed < self.size:
            self._let_go()
        return bool(failed >= self.size)

    def _let_go(self) -> None:
        if self.native:  # not yet run on a GPU
            self.group.abort()
            return
        # gloo closes all connections of a group when one wait runs out of time; there is no other way to ask for it.
        nothing = torch.empty(1, device=self.device)
        with suppress(RuntimeError):
            work: Any = dist.irecv(nothing, group=self.group, tag=_NEVER_SENT, group_src=self._peers[0])
            work.wait(timedelta(milliseconds=1))

    def _failure_key(self) -> str:
        return f"onenth/failure/{_FAILURES[self.group.group_name]}"

    def why_failed(self) -> str | None:
        """What a rank that could not finish its step has told; None: none has told anything."""
        with suppress(RuntimeError):  # the store may be gone with the rank that held it
            store, key = self.group.get_group_store(), self._failure_key()
            if store.check([key]):
                return str(store.get(key).decode())
        return None

    def _swap(
        self,
        label: Label,
        outgoing: Callable[[int], torch.Tensor],
        incoming: Callable[[int], torch.Tensor],
        tensors: tuple[torch.Tensor, ...],
    ) -> Transfer:
        key = (label.kind, label.unit, label.flat)
        call = self._calls[key]
        self._calls[key] = call + 1
        number = (_KINDS[label.kind] * _UNITS + label.unit % _UNITS) * _FLATS + label.flat % _FLATS
        tag = number * _CALLS + call % _CALLS
        works: list[tuple[Any, int | None]] = [(self._receive(incoming(p), p, tag), p) for p in self._peers]
        works += [(self._send(outgoing(peer), peer, tag), peer) for peer in self._peers]
        return self._transfer(label, works, tensors, call)

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return self._start(dist.isend, tensor, peer, tag, "group_dst")

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return self._start(dist.irecv, tensor, peer, tag, "group_src")

    def _start(self, call: Callable[..., Any], tensor: torch.Tensor, peer: int, tag: int, side: str) -> Any:
        try:
            return call(tensor, group=self.group, tag=tag, **{side: peer})
        except RuntimeError as error:
            why = self.why_failed() or f"rank {peer} is gone or gave up ({error})"
            raise TransferError(f"rank {self.rank}: {why}") from error

    def _transfer(
        self,
        label: Label,
        works: list[tuple[Any, int | None]],
        tensors: tuple[torch.Tensor, ...],
        call: int | None = None,
    ) -> Transfer:
        what = f"{label.kind} of {label.name}" + ("" if call is None else f", call {call + 1}")
        return Transfer(what, works, tensors, self.rank, self.timeout, self.why_failed)
