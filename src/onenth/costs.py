"""The equations: bytes and traffic of each ZeRO stage, by the paper and to the byte.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
arXiv 1910.02054. Section numbers below are the paper's. Ψ stands for the number of parameters, N for the
number of data-parallel ranks, L for the elements of one rank's shard of a flat buffer, padding included.

The first half is the paper's arithmetic for a model of Ψ parameters under mixed-precision Adam. The second
half is the same for flat buffers as they are laid out, so that it equals what the engine allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from onenth.partition import Partition
from onenth.states import OPTIMIZER_STATES, STAGES, ModelState, ResidualState, Tier

if TYPE_CHECKING:
    from onenth.config import Precision

#: Bytes a parameter under mixed-precision Adam (section 3.1): 2 + 2 + K with K = 12, so 16 in all.
BYTES_PER_PARAMETER: dict[str, int] = {
    ModelState.PARAMETERS: 2,
    ModelState.GRADIENTS: 2,
    ModelState.MASTER: 4,
    ModelState.EXP_AVG: 4,
    ModelState.EXP_AVG_SQ: 4,
}
WIRE_BYTES = 2  # an element on the wire: gradients and parameters both travel in 16 bits

EXCHANGE = "exchange"  # gradients to the ranks that own them (a reduce-scatter)
GATHER = "gather"  # owned slices back to every rank (an all-gather)


def is_partitioned(state: str, stage: int) -> bool:
    """Whether `stage` splits `state` over the ranks; every optimizer state counts as one (section 5)."""
    whole = state in (ModelState.PARAMETERS, ModelState.GRADIENTS)
    return (state if whole else OPTIMIZER_STATES) in STAGES[stage]


def nominal_bytes(parameters: int, *, ranks: int = 1, stage: int = 0) -> dict[str, int]:
    """Bytes that one of `ranks` ranks holds of each model state, rounded up, without padding (section 5).

    Over all states: stage 0 16Ψ; stage 1 4Ψ + 12Ψ/N; stage 2 2Ψ + 14Ψ/N; stage 3 16Ψ/N.
    """
    return {
        state: _ceil(size * parameters, ranks if is_partitioned(state, stage) else 1)
        for state, size in BYTES_PER_PARAMETER.items()
    }


def nominal_redundancy(parameters: int, *, ranks: int, stage: int = 0) -> int:
    """Bytes that all ranks hold together beyond one copy of the model states (section 4.1)."""
    one_copy = sum(nominal_bytes(parameters).values())
    return max(ranks * sum(nominal_bytes(parameters, ranks=ranks, stage=stage).values()) - one_copy, 0)


def nominal_traffic(parameters: int, *, ranks: int, stage: int) -> dict[str, int]:
    """Elements that one rank sends in a step of one backward, by kind, rounded up (section 7).

    Each pass over the parameters sends Ψ(N-1)/N. Stages 0 to 2 make two: the gradients, and what was summed
    (stage 0) or updated (stages 1 and 2). Stage 3 makes three: it gathers for forward and again for backward.
    """
    once = _ceil(parameters * (ranks - 1), ranks)
    gathers = 2 if is_partitioned(ModelState.PARAMETERS, stage) else 1
    return {EXCHANGE: once, GATHER: gathers * once}


def _ceil(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


@dataclass(frozen=True)
class FlatBuffer:
    """Parameters that lie one after another in one buffer: of one dtype, all trainable or all frozen.

    numels: elements of each parameter, in flat order.
    parameter_itemsize, gradient_itemsize: bytes of an element.
    trainable: they get gradients.
    updated: the optimizer holds them.
    unused: numbers of parameters that no backward reached yet: the optimizer makes no states for them.
    """

    numels: tuple[int, ...]
    parameter_itemsize: int = 2
    gradient_itemsize: int = 2
    trainable: bool = True
    updated: bool = True
    unused: frozenset[int] = frozenset()

    @property
    def stepped(self) -> bool:
        """Whether steps change them, so that there is a master copy and there are moments."""
        return self.trainable and self.updated


@dataclass(frozen=True, kw_only=True)
class ItemSizes:
    """Bytes of an element of what lies beside parameters and gradients.

    sums: what gradients are added in.
    master: the copy that the optimizer updates; None: it updates the parameters themselves.
    moments: the optimizer's states of a parameter's shape, by name.
    scalars: the optimizer's states of one element a piece, by name; a piece: a parameter's range on a rank.
    """

    sums: int = 4
    master: int | None = 4
    moments: Mapping[str, int] = field(
        default_factory=lambda: {str(ModelState.EXP_AVG): 4, str(ModelState.EXP_AVG_SQ): 4}
    )
    scalars: Mapping[str, int] = field(default_factory=lambda: {"step": 4})

    @classmethod
    def of(
        cls,
        precision: Precision,
        moments: Iterable[str] = (ModelState.EXP_AVG, ModelState.EXP_AVG_SQ),
        scalars: Mapping[str, int] | None = None,
    ) -> ItemSizes:
        """The sizes under a dtype contract, with this optimizer's moments and scalars (default: Adam's)."""
        return cls(
            sums=precision.sums.itemsize,
            master=precision.master.itemsize if precision.master is not None else None,
            moments={str(name): precision.moments.itemsize for name in moments},
            scalars={"step": 4} if scalars is None else scalars,
        )


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which rank is asked about, of how many, at which stage."""

    stage: int
    ranks: int
    rank: int = 0

    def copies(self, state: str) -> int:
        """How many shards of `state` this rank holds: its own, or all of them."""
        return 1 if is_partitioned(state, self.stage) else self.ranks


def _shard_numel(flat: FlatBuffer, at: Placement) -> int:
    return Partition(flat.numels, at.ranks).shard_numel


def parameter_bytes(flat: FlatBuffer, at: Placement, sizes: ItemSizes) -> int:
    """Bytes of parameters kept between steps. Stage 3 keeps none beside a master copy: a gather casts it."""
    from_master = flat.stepped and sizes.master is not None
    if is_partitioned(ModelState.PARAMETERS, at.stage) and from_master:
        return 0
    return at.copies(ModelState.PARAMETERS) * _shard_numel(flat, at) * flat.parameter_itemsize


def gradient_bytes(
    flat: FlatBuffer, at: Placement, sizes: ItemSizes, *, backwards: int, unexchanged: bool = False
) -> int:
    """Bytes of gradients held after `backwards` exchanges since they were cleared.

    unexchanged: local gradients of a backward that did not exchange are held too.
    Stages 0 and 1 always hold the whole local buffer, and one sum lies in it. Any further gradient moves the
    sum to a buffer of its own, in the dtype of sums: whole at stage 0, a shard at stage 1. Stages 2 and 3
    hold the shard of the sum only, in the gradients' dtype while it is a single one.
    """
    if not flat.trainable:
        return 0
    shard, local = _shard_numel(flat, at), at.ranks * _shard_numel(flat, at) * flat.gradient_itemsize
    if is_partitioned(ModelState.GRADIENTS, at.stage):
        held = (0, flat.gradient_itemsize, sizes.sums)[min(backwards, 2)] * shard
        return held + (local if unexchanged else 0)
    apart = backwards >= 2 or (backwards == 1 and unexchanged)
    return local + (at.copies(OPTIMIZER_STATES) * shard * sizes.sums if apart else 0)


def widening_bytes(flats: Sequence[FlatBuffer], at: Placement, sizes: ItemSizes) -> int:
    """Bytes beyond those in the end that gradients hold at most while a second backward widens their sums.

    flats: in unit order, the root's first. Stages 2 and 3 hold one backward's sum in the gradients' dtype. The second
    moves it to the dtype of sums, the last unit's first; while a buffer is moved, it is there in both.
    """
    most = to_come = 0
    for flat in flats:
        if flat.trainable and is_partitioned(ModelState.GRADIENTS, at.stage) and sizes.sums > flat.gradient_itemsize:
            numel = _shard_numel(flat, at)
            most = max(most, numel * flat.gradient_itemsize - to_come)
            to_come += numel * (sizes.sums - flat.gradient_itemsize)
    return most


def optimizer_bytes(flat: FlatBuffer, at: Placement, sizes: ItemSizes) -> dict[str, int]:
    """Bytes of the master copy, padding included, and of what the optimizer keeps for each piece, without."""
    if not flat.stepped:
        return {}
    held: dict[str, int] = {}
    if sizes.master is not None:
        held[ModelState.MASTER] = at.copies(OPTIMIZER_STATES) * _shard_numel(flat, at) * sizes.master
    owners = [at.rank] if is_partitioned(OPTIMIZER_STATES, at.stage) else range(at.ranks)
    partition = Partition(flat.numels, at.ranks)
    pieces = [piece for owner in owners for piece in partition.ranges(owner) if piece.parameter not in flat.unused]
    numel = sum(piece.stop - piece.start for piece in pieces)
    held |= {name: numel * itemsize for name, itemsize in sizes.moments.items()}
    return held | {name: len(pieces) * itemsize for name, itemsize in sizes.scalars.items()}


def model_state_bytes(
    flats: Sequence[FlatBuffer],
    at: Placement,
    sizes: ItemSizes,
    *,
    backwards: int = 0,
    unexchanged: bool = False,
) -> dict[tuple[str, Tier], int]:
    """Bytes of every model state that one rank holds between the phases of a step, to the byte.

    Optimizers make their states in the first step; before it, ask with no moments and no scalars in `sizes`.
    """
    held: dict[str, int] = {ModelState.PARAMETERS: 0, ModelState.GRADIENTS: 0}
    for flat in flats:
        held[ModelState.PARAMETERS] += parameter_bytes(flat, at, sizes)
        held[ModelState.GRADIENTS] += gradient_bytes(flat, at, sizes, backwards=backwards, unexchanged=unexchanged)
        for state, count in optimizer_bytes(flat, at, sizes).items():
            held[state] = held.get(state, 0) + count
    return {(str(state), Tier.DEVICE): count for state, count in held.items()}


def traffic(
    flats: Sequence[FlatBuffer],
    *,
    stage: int,
    ranks: int,
    backwards: int = 1,
    gathers: Sequence[int] = (),
) -> dict[str, int]:
    """Elements that one rank sends in a step of `backwards` exchanged backwards, by kind, padding included.

    gathers: at stage 3, how many times each of `flats` was gathered: once for each forward, and once more for
    each backward if it was released in between.
    """
    at = Placement(stage=stage, ranks=ranks)
    once = [_shard_numel(flat, at) * (ranks - 1) for flat in flats]
    exchanged = sum(sent for flat, sent in zip(flats, once, strict=True) if flat.trainable)
    if is_partitioned(ModelState.PARAMETERS, stage):
        gathered = sum(times * sent for times, sent in zip(gathers, once, strict=True))
    elif is_partitioned(OPTIMIZER_STATES, stage):
        gathered = sum(sent for flat, sent in zip(flats, once, strict=True) if flat.stepped)
    else:
        gathered = backwards * exchanged  # every rank gets every sum, as an all-reduce would give it
    return {EXCHANGE: backwards * exchanged, GATHER: gathered}


Unit = Sequence[FlatBuffer]
SUM_CHUNK = 2**18  # elements summed at a time on a CPU (on an accelerator, 2**24)


def backward_peak(units: Sequence[Unit], at: Placement, sizes: ItemSizes) -> dict[str, int]:
    """Bytes by state at the worst moment of a step's only backward, without activations and buffers.

    units: the root first, then in forward order. Two moments of each unit k compete. While it computes: the
    states, the root whole, unit k and unit k - 1 gathered, the local gradients that are being filled, those of
    unit k + 1 in flight with what other ranks sent, and the largest single gradient on its way from autograd to
    its buffer. When it is done: unit k is released and unit k + 1 is summed, which takes the shard of the sum
    and the scratch that it is formed in.
    """
    last = len(units) - 1
    positions = range(min(1, last), last + 1)
    moments = [moment for k in positions for moment in _backward_moments(units, at, sizes, k)]
    return max(moments, key=lambda items: sum(items.values()))


def _backward_moments(
    units: Sequence[Unit], at: Placement, sizes: ItemSizes, k: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by state while unit k computes its gradients, and while the unit after it is summed."""

    def whole(unit: Unit, itemsize: Callable[[FlatBuffer], int]) -> int:
        return sum(at.ranks * _shard_numel(flat, at) * itemsize(flat) for flat in unit)

    def local(unit: Unit) -> int:
        trained = [flat for flat in unit if flat.trainable]
        return whole(trained, lambda flat: flat.gradient_itemsize)

    flats = [flat for unit in units for flat in unit]
    flying = units[k + 1] if k + 1 < len(units) else []
    common = {str(state): count for (state, _), count in model_state_bytes(flats, at, sizes).items()}
    if is_partitioned(ModelState.GRADIENTS, at.stage):
        common[ModelState.GRADIENTS] += sum(local(unit) // at.ranks for unit in units[k + 2 :])
        common[ResidualState.LOCAL_GRADIENTS] = sum(map(local, [units[0], *([units[k]] if k else []), flying]))
    common[ResidualState.RECEIVE] = local(flying) * (at.ranks - 1) // at.ranks
    computing, summing = dict(common), dict(common)
    if is_partitioned(ModelState.PARAMETERS, at.stage):
        ahead = [units[0], *units[max(k - 1, 1) : k]]
        summing[ResidualState.GATHERED] = sum(whole(unit, lambda flat: flat.parameter_itemsize) for unit in ahead)
        own = whole(units[k], lambda flat: flat.parameter_itemsize) if k else 0
        computing[ResidualState.GATHERED] = summing[ResidualState.GATHERED] + own
    singles = [numel * flat.gradient_itemsize for flat in units[k] if flat.trainable for numel in flat.numels]
    computing[ResidualState.OTHER] = max(singles, default=0)
    if is_partitioned(ModelState.GRADIENTS, at.stage):
        summing[ModelState.GRADIENTS] += local(flying) // at.ranks
    summing[ResidualState.SUMS] = max((_sum_scratch(flat, at, sizes) for flat in flying if flat.trainable), default=0)
    return computing, summing


def _sum_scratch(flat: FlatBuffer, at: Placement, sizes: ItemSizes) -> int:
    """Bytes in which a chunk is added up and rounded; adding a narrower slice, PyTorch widens a copy of it."""
    widened = sizes.sums if at.ranks > 1 and flat.gradient_itemsize < sizes.sums else 0
    return min(_shard_numel(flat, at), SUM_CHUNK) * (sizes.sums + flat.gradient_itemsize + widened)


def step_peak(units: Sequence[Unit], at: Placement, sizes: ItemSizes) -> dict[str, int]:
    """Bytes by state while the optimizer updates: the states, and the largest segment's fp32 gradient."""
    flats = [flat for unit in units for flat in unit]
    held = model_state_bytes(flats, at, sizes, backwards=1)
    segments = [_shard_numel(flat, at) * sizes.sums for flat in flats if flat.stepped]
    items = {state: count for (state, _), count in held.items()}
    items[ResidualState.STEP] = items.get(ResidualState.STEP, 0) + max(segments, default=0)
    return {str(state): count for state, count in items.items()}
