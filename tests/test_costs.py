"""The equations: the paper's own table, the exact half against the nominal one, layouts worked by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onenth.config import PRECISIONS
from onenth.costs import (
    EXCHANGE,
    GATHER,
    FlatBuffer,
    ItemSizes,
    Placement,
    backward_peak,
    is_partitioned,
    model_state_bytes,
    nominal_bytes,
    nominal_redundancy,
    nominal_traffic,
    step_peak,
    traffic,
)
from onenth.partition import ALIGNMENT
from onenth.states import Tier

STAGES = (0, 1, 2, 3)
SIZES = ItemSizes()
NO_MASTER = ItemSizes(master=None)

#: Table 1 of the paper: GB per rank by parameters and stage, for these numbers of ranks.
TABLE_1_RANKS = (1, 4, 16, 64, 256, 1024)
TABLE_1 = {
    (7_500_000_000, 1): ("120", "52.5", "35.6", "31.4", "30.4", "30.1"),
    (7_500_000_000, 2): ("120", "41.3", "21.6", "16.6", "15.4", "15.1"),
    (7_500_000_000, 3): ("120", "30", "7.5", "1.88", "0.47", "0.12"),
    (128_000_000_000, 1): ("2048", "896", "608", "536", "518", "513"),
    (128_000_000_000, 2): ("2048", "704", "368", "284", "263", "257"),
    (128_000_000_000, 3): ("2048", "512", "128", "32", "8", "2"),
    (1_000_000_000_000, 1): ("16000", "7000", "4750", "4187", "4046", "4011"),
    (1_000_000_000_000, 2): ("16000", "5500", "2875", "2218", "2054", "2013"),
    (1_000_000_000_000, 3): ("16000", "4000", "1000", "250", "62.5", "15.6"),
}


@pytest.mark.parametrize(("parameters", "stage"), TABLE_1)
def test_table_1_of_the_paper(parameters: int, stage: int) -> None:
    """Each cell is reproduced to its last printed digit, which the paper rounds here and cuts there."""
    for ranks, printed in zip(TABLE_1_RANKS, TABLE_1[parameters, stage], strict=True):
        gigabytes = sum(nominal_bytes(parameters, ranks=ranks, stage=stage).values()) / 1e9
        last_digit = 10.0 ** -len(printed.partition(".")[2])
        assert abs(gigabytes - float(printed)) < last_digit, (ranks, gigabytes, printed)


@given(st.integers(1, 10**12), st.integers(1, 4096))
def test_closed_forms(parameters: int, ranks: int) -> None:
    """Per rank 16Ψ, 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N and 16Ψ/N bytes, rounded up by less than a byte a state."""
    for stage, whole in zip(STAGES, (16, 4, 2, 0), strict=True):
        exact = whole * parameters + (16 - whole) * parameters / ranks
        held = sum(nominal_bytes(parameters, ranks=ranks, stage=stage).values())
        assert -exact * 1e-12 <= held - exact <= 5 + exact * 1e-12


def test_seven_billion_parameters() -> None:
    """7e9 parameters: 14, 14, 28, 28 and 28 GB; over 256 ranks 28.672 TB, all but 112 GB of it redundant."""
    assert [count // 10**9 for count in nominal_bytes(7 * 10**9).values()] == [14, 14, 28, 28, 28]
    assert nominal_redundancy(7 * 10**9, ranks=256) == 28_672 * 10**9 - 112 * 10**9


@given(st.integers(1, 10**12), st.integers(1, 4096))
def test_redundancy_falls_with_each_stage(parameters: int, ranks: int) -> None:
    """Every stage holds no more redundant bytes than the one before; stage 3 none beyond rounding."""
    redundant = [nominal_redundancy(parameters, ranks=ranks, stage=stage) for stage in STAGES]
    assert redundant == sorted(redundant, reverse=True)
    assert redundant[0] == 16 * parameters * (ranks - 1)
    assert redundant[3] < 5 * ranks


@given(st.integers(1, 10**9), st.integers(1, 512))
def test_nominal_traffic(units: int, ranks: int) -> None:
    """Two passes of Ψ(N-1)/N elements at stages 0 to 2, three at stage 3."""
    parameters = units * ranks
    for stage, passes in zip(STAGES, (2, 2, 2, 3), strict=True):
        sent = sum(nominal_traffic(parameters, ranks=ranks, stage=stage).values())
        assert sent == passes * units * (ranks - 1)


numels = st.lists(st.integers(0, 5000), min_size=1, max_size=6).map(tuple)
flat_buffers = st.builds(
    FlatBuffer,
    numels,
    parameter_itemsize=st.sampled_from([2, 4]),
    gradient_itemsize=st.sampled_from([2, 4]),
    trainable=st.booleans(),
    updated=st.booleans(),
)
flat_lists = st.lists(flat_buffers, min_size=1, max_size=4)
any_ranks = st.integers(1, 6)
any_stage = st.sampled_from(STAGES)


def held(
    flats: list[FlatBuffer], stage: int, ranks: int, rank: int = 0, sizes: ItemSizes = SIZES, **phase: int
) -> dict[str, int]:
    """Bytes by state, without the tier, which is always the device."""
    counts = model_state_bytes(flats, Placement(stage=stage, ranks=ranks, rank=rank), sizes, **phase)
    assert {tier for _, tier in counts} == {Tier.DEVICE}
    return {state: count for (state, _), count in counts.items()}


@given(st.lists(st.integers(1, 8), min_size=1, max_size=4), any_ranks, any_stage)
def test_exact_equals_nominal_without_padding(multiples: list[int], ranks: int, stage: int) -> None:
    """Where nothing needs padding, bytes and traffic are the paper's, but for stage 3's parameter shard."""
    flat = FlatBuffer(tuple(multiple * ALIGNMENT * ranks for multiple in multiples))
    parameters = sum(flat.numels)
    expected = nominal_bytes(parameters, ranks=ranks, stage=stage)
    if stage == 3:
        expected["parameters"] = 0
    no_scalars = ItemSizes(scalars={})
    for rank in range(ranks):
        assert held([flat], stage, ranks, rank, no_scalars, backwards=1) == expected
    assert traffic([flat], stage=stage, ranks=ranks, gathers=[2]) == nominal_traffic(
        parameters, ranks=ranks, stage=stage
    )


@given(flat_lists, any_ranks, any_stage)
def test_moments_are_never_padded_and_never_lost(flats: list[FlatBuffer], ranks: int, stage: int) -> None:
    """Over all ranks, moments take 4 bytes an updated element: once if partitioned, else once a rank."""
    elements = sum(sum(flat.numels) for flat in flats if flat.trainable and flat.updated)
    copies = 1 if is_partitioned("exp_avg", stage) else ranks
    over_ranks = [held(flats, stage, ranks, rank).get("exp_avg", 0) for rank in range(ranks)]
    assert sum(over_ranks) == copies * 4 * elements


@given(flat_lists, any_ranks, st.integers(0, 3))
def test_a_higher_stage_never_holds_more(flats: list[FlatBuffer], ranks: int, backwards: int) -> None:
    """On rank 0, in every phase, each stage's bytes are at most those of the stage before."""
    totals = [sum(held(flats, stage, ranks, backwards=backwards).values()) for stage in STAGES]
    assert totals == sorted(totals, reverse=True)


@given(flat_lists)
def test_one_rank_has_nothing_to_partition(flats: list[FlatBuffer]) -> None:
    """At N = 1 stages 1 and 2 hold the same bytes as stage 0 after a backward: nothing is redundant."""
    unsharded = held(flats, 0, 1, backwards=1)
    assert held(flats, 1, 1, backwards=1) == unsharded
    assert held(flats, 2, 1, backwards=1) == unsharded


FLAT = FlatBuffer((100, 0, 65))  # over two ranks: shards of 128, so 256 elements; 100 on rank 0, 65 on rank 1
FROZEN = FlatBuffer((10,), trainable=False)  # over two ranks: shards of 64
STRAY = FlatBuffer((10,), updated=False)  # trainable, but no optimizer holds it


@pytest.mark.parametrize(
    ("stage", "rank", "expected"),
    [
        (0, 0, (512 + 256 + 256, 512 + 256, 1024, 660, 660, 8)),
        (1, 0, (512 + 256 + 256, 512 + 256, 512, 400, 400, 4)),
        (1, 1, (512 + 256 + 256, 512 + 256, 512, 260, 260, 4)),
        (2, 1, (512 + 256 + 256, 0, 512, 260, 260, 4)),
        (3, 1, (128 + 128, 0, 512, 260, 260, 4)),
    ],
)
def test_bytes_worked_by_hand(stage: int, rank: int, expected: tuple[int, ...]) -> None:
    """Two ranks, 16 bits: whole or shard of each state, nothing beside the master, frozen flats kept."""
    states = ("parameters", "gradients", "master", "exp_avg", "exp_avg_sq", "step")
    assert held([FLAT, FROZEN, STRAY], stage, 2, rank) == dict(zip(states, expected, strict=True))


def test_without_a_master_the_parameter_shard_is_kept() -> None:
    """With no master copy, stage 3 holds the shard of the parameters and no state named master."""
    assert held([FLAT], 3, 2, sizes=NO_MASTER)["parameters"] == 128 * 2
    assert "master" not in held([FLAT], 3, 2, sizes=NO_MASTER)


@pytest.mark.parametrize(
    ("stage", "by_backwards"),
    [
        (0, (512, 512, 512 + 1024, 512 + 1024)),
        (1, (512, 512, 512 + 512, 512 + 512)),
        (2, (0, 256, 512, 512)),
        (3, (0, 256, 512, 512)),
    ],
)
def test_gradients_over_several_backwards(stage: int, by_backwards: tuple[int, ...]) -> None:
    """Gradients after 0, 1, 2 and 3 backwards: 16 bits for a single one, sums in fp32 from the second on."""
    counts = [held([FLAT], stage, 2, backwards=backwards)["gradients"] for backwards in range(4)]
    assert tuple(counts) == by_backwards


@pytest.mark.parametrize(
    ("stage", "after_none", "after_one"),
    [(0, 512, 512 + 1024), (1, 512, 512 + 512), (2, 512, 768), (3, 512, 768)],
)
def test_unexchanged_gradients_are_whole(stage: int, after_none: int, after_one: int) -> None:
    """Without an exchange every stage holds this rank's whole gradients, beside the sum of earlier ones."""
    assert held([FLAT], stage, 2, backwards=0, unexchanged=True)["gradients"] == after_none
    assert held([FLAT], stage, 2, backwards=1, unexchanged=True)["gradients"] == after_one


def test_moments_and_scalars_of_other_optimizers() -> None:
    """States are counted under the names that the optimizer gives them."""
    sizes = ItemSizes.of(PRECISIONS["bf16"], moments=["momentum_buffer"], scalars={})
    assert set(held([FLAT], 1, 2, sizes=sizes)) == {"parameters", "gradients", "master", "momentum_buffer"}


def test_item_sizes_of_a_precision() -> None:
    """bf16 has the paper's sizes; fp32 has no master copy."""
    assert ItemSizes.of(PRECISIONS["bf16"]) == SIZES
    assert ItemSizes.of(PRECISIONS["fp32"]) == NO_MASTER


@pytest.mark.parametrize(
    ("stage", "backwards", "gathers", "exchanged", "gathered"),
    [
        (0, 1, [], 128 + 64, 128 + 64),
        (0, 3, [], 3 * 192, 3 * 192),
        (1, 3, [], 3 * 192, 128),
        (2, 1, [], 192, 128),
        (3, 1, [2, 1, 2], 192, 2 * 128 + 64 + 2 * 64),
    ],
)
def test_traffic_worked_by_hand(stage: int, backwards: int, gathers: list[int], exchanged: int, gathered: int) -> None:
    """Two ranks: trainable flats exchange in each backward; stages 1 and 2 gather the updated ones only."""
    sent = traffic([FLAT, FROZEN, STRAY], stage=stage, ranks=2, backwards=backwards, gathers=gathers)
    assert sent == {EXCHANGE: exchanged, GATHER: gathered}


@given(flat_lists, any_stage)
def test_one_rank_sends_nothing(flats: list[FlatBuffer], stage: int) -> None:
    """At N = 1 there is nobody to send to."""
    assert traffic(flats, stage=stage, ranks=1, gathers=[2] * len(flats)) == {EXCHANGE: 0, GATHER: 0}


def test_stage_3_wants_the_gathers_of_every_flat() -> None:
    """A list of gathers that misses a flat is an error, not a smaller sum."""
    with pytest.raises(ValueError, match="zip"):
        traffic([FLAT, FROZEN], stage=3, ranks=2, gathers=[2])


ROOT = [FlatBuffer((64,))]  # over two ranks: shards of 64, padding included
BLOCK = [FlatBuffer((1024, 256))]  # over two ranks: shards of 640


def test_backward_peak_worked_by_hand() -> None:
    """Stage 3, two ranks, root and three blocks: the worst moment is when one is done and the next is summed."""
    items = backward_peak([ROOT, BLOCK, BLOCK, BLOCK], Placement(stage=3, ranks=2), SIZES)
    assert items == {
        "parameters": 0,
        "gradients": 640 * 2,  # the shard that the third block's sum goes to
        "master": (64 + 3 * 640) * 4,
        "exp_avg": (64 + 3 * 640) * 4,
        "exp_avg_sq": (64 + 3 * 640) * 4,
        "step": 4 * 4,  # a piece of the root, and the first parameter of each block, lie on rank 0
        "gathered": 2 * (64 + 640) * 2,  # the root, and the first block ahead of its use
        "local_gradients": 2 * (64 + 640 + 640) * 2,
        "receive": 640 * 2,
        "sums": 640 * (4 + 2 + 4),  # as it is formed, rounded to 16 bits, and a slice widened to be added
    }


def test_backward_peak_of_lower_stages() -> None:
    """Stages 0 to 2 gather nothing, and stages 0 and 1 have their local gradients in the states already."""
    for stage in (0, 1, 2):
        items = backward_peak([ROOT, BLOCK, BLOCK], Placement(stage=stage, ranks=2), SIZES)
        assert "gathered" not in items
        assert ("local_gradients" in items) == (stage == 2)


def test_step_peak_adds_one_segment() -> None:
    """The step holds the states with all gradients, and the fp32 gradient of its largest segment."""
    at = Placement(stage=2, ranks=2)
    states = held([*ROOT, *BLOCK], 2, 2, backwards=1)
    items = step_peak([ROOT, BLOCK], at, SIZES)
    assert sum(items.values()) == sum(states.values()) + 640 * 4
