"""The simulated CUDA allocator: hand-computed traces, one small trace for each rule, and properties of any trace."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onenth.errors import ConfigError, OnenthError
from onenth.residual_states.allocator_settings import DEFAULTS
from onenth.residual_states.fragmentation import (
    EMPTY_CACHE,
    CachingAllocator,
    Segment,
    Settings,
    SimulatedOutOfMemoryError,
    pinned_bytes,
    replay,
)

KIB, MIB, GIB = 1024, 1024**2, 1024**3
EXPANDABLE = Settings(expandable_segments=True)

Event = tuple[Hashable, int]


def holding(*mebibytes: int, settings: Settings = DEFAULTS, capacity: int | None = None) -> CachingAllocator:
    """An allocator that holds blocks of these sizes, under keys 0, 1, ...; capacity too in MiB."""
    allocator = CachingAllocator(settings, capacity=None if capacity is None else capacity * MIB)
    for key, size in enumerate(mebibytes):
        allocator.allocate(key, size * MIB)
    return allocator


def layout(segment: Segment) -> list[tuple[int, Hashable]]:
    """MiB and keys of a segment's blocks, "free" where they are free."""
    return [(block.size // MIB, "free" if block.free else block.key) for block in segment.blocks]


# Eight tensors of 16 MiB, freed, then four of 32 MiB.

SIXTEENS: list[Event] = [(f"a{i}", 16 * MIB) for i in range(8)] + [(f"a{i}", -16 * MIB) for i in range(8)]
THEN_32: list[Event] = [*SIXTEENS, *[(f"b{i}", 32 * MIB) for i in range(4)]]


def test_sixteens_then_thirty_twos_reserve_twice() -> None:
    """A 32 MiB tensor fits in no freed 16 MiB segment, and segments do not join: 8 x 16 + 4 x 32 = 256 MiB."""
    found = replay(THEN_32)
    assert found.reserved[:8] == [16 * MIB * (i + 1) for i in range(8)]
    assert found.reserved[15:] == [128 * MIB, 160 * MIB, 192 * MIB, 224 * MIB, 256 * MIB]
    assert found.peak_reserved == 256 * MIB
    assert found.peak_allocated == 128 * MIB
    assert found.fragmentation == 128 * MIB
    assert found.peak_event == len(THEN_32) - 1
    assert found.largest_free_at_peak == 16 * MIB


def test_expandable_sixteens_then_thirty_twos_fit_in_the_same_pages() -> None:
    """One segment: 128 MiB in pages of 20 MiB are 7 pages, and freed blocks join, so the 32 MiB tensors fit in them."""
    found = replay(THEN_32, EXPANDABLE)
    # 16 -> 1 page, 32 -> 2, 48 -> 3, 64 -> 4, 80 -> 4, 96 -> 5, 112 -> 6, 128 -> 7 pages.
    assert found.reserved[:8] == [20 * MIB * pages for pages in (1, 2, 3, 4, 4, 5, 6, 7)]
    assert found.reserved[8:] == [140 * MIB] * 12
    assert found.fragmentation == 12 * MIB  # the peak is first reached with all 128 MiB in use
    assert found.largest_free[15] == 140 * MIB
    assert found.largest_free[-1] == 12 * MIB


def test_capacity_makes_the_cache_go_before_anything_fails() -> None:
    """With 160 MiB the cache is given back before the second 32 MiB tensor, and everything fits."""
    found = replay(THEN_32, capacity=160 * MIB)
    assert found.out_of_memory_at is None
    # 128 + 32 = 160; the next does not fit, so eight segments go: 32 + 32 = 64; then 96 and 128.
    assert found.reserved[16:] == [160 * MIB, 64 * MIB, 96 * MIB, 128 * MIB]


# Rounding and pools.


@pytest.mark.parametrize(
    ("size", "block", "reserved", "pool"),
    [
        (1, 512, 2 * MIB, "small"),
        (512, 512, 2 * MIB, "small"),
        (513, 1024, 2 * MIB, "small"),
        (MIB, MIB, 2 * MIB, "small"),
        (MIB + 1, MIB + 512, 20 * MIB, "large"),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB, "large"),
        (10 * MIB - 511, 10 * MIB, 10 * MIB, "large"),  # rounded to 10 MiB, which gets its own segment
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB, "large"),  # 2 MiB - 512 are left: split off
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB, "large"),  # 1 MiB + 512 are left: split off
        (11 * MIB, 12 * MIB, 12 * MIB, "large"),  # 1 MiB is left: too little, the block is all of the segment
        (12 * MIB + 1, 12 * MIB + 512, 14 * MIB, "large"),
    ],
)
def test_one_allocation(size: int, block: int, reserved: int, pool: str) -> None:
    """The block, the segment that is taken for it, and the pool, on both sides of each threshold."""
    allocator = CachingAllocator()
    allocator.allocate("x", size)
    (segment,) = allocator.segments()
    assert (segment.blocks[0].size, segment.size, segment.pool) == (block, reserved, pool)
    assert (allocator.allocated, allocator.reserved, allocator.requested) == (block, reserved, size)
    assert allocator.largest_free == reserved - block


def test_small_pool_splits_down_to_512_bytes() -> None:
    """2 MiB hold 4096 blocks of 512 bytes; the next one takes another segment."""
    allocator = CachingAllocator()
    for key in range(4096):
        allocator.allocate(key, 1)
    assert (allocator.reserved, allocator.allocated, allocator.requested) == (2 * MIB, 2 * MIB, 4096)
    assert allocator.largest_free == 0
    allocator.allocate("next", 1)
    assert allocator.reserved == 4 * MIB


def test_large_requests_do_not_use_the_small_pool() -> None:
    """A free small segment of 2 MiB serves no request of 1.5 MiB: that one takes 20 MiB of its own."""
    allocator = CachingAllocator()
    allocator.allocate("small", MIB)
    allocator.release("small")
    allocator.allocate("large", MIB + MIB // 2)
    assert [(segment.pool, segment.size) for segment in allocator.segments()] == [
        ("small", 2 * MIB),
        ("large", 20 * MIB),
    ]


def test_best_fit_takes_the_smallest_block_that_is_large_enough() -> None:
    """Of free segments of 40, 14 and 24 MiB, a request of 16 MiB gets the one of 24, and splits 8 off."""
    allocator = holding(40, 14, 24)
    for key in range(3):
        allocator.release(key)
    allocator.allocate("x", 16 * MIB)
    assert [layout(segment) for segment in allocator.segments()] == [
        [(40, "free")],
        [(14, "free")],
        [(16, "x"), (8, "free")],
    ]


def test_of_equal_blocks_the_lowest_address_is_taken() -> None:
    """Two free segments of 16 MiB: the first one taken from the device is used first."""
    allocator = holding(16, 16)
    allocator.release(1)
    allocator.release(0)
    allocator.allocate("x", 16 * MIB)
    assert [layout(segment) for segment in allocator.segments()] == [[(16, "x")], [(16, "free")]]


def test_freed_neighbours_join() -> None:
    """Four blocks of 5 MiB fill 20 MiB; freed ones only serve 8 MiB once they touch."""
    allocator = holding(5, 5, 5, 5)
    allocator.release(0)
    allocator.release(2)
    assert (allocator.reserved, allocator.largest_free) == (20 * MIB, 5 * MIB)
    allocator.release(1)
    assert allocator.largest_free == 15 * MIB
    allocator.allocate("x", 8 * MIB)
    (segment,) = allocator.segments()
    assert layout(segment) == [(8, "x"), (7, "free"), (5, 3)]


def test_streams_do_not_share_blocks() -> None:
    """A block that stream 0 freed serves stream 0 only."""
    allocator = holding(16)
    allocator.release(0)
    allocator.allocate("other", 16 * MIB, stream=1)
    assert allocator.reserved == 32 * MIB
    allocator.allocate("same", 16 * MIB)
    assert allocator.reserved == 32 * MIB
    assert [segment.stream for segment in allocator.segments()] == [0, 1]
    found = replay([("a", 16 * MIB), ("a", -1), ("b", 16 * MIB)], streams={"b": 7})
    assert found.reserved == [16 * MIB, 16 * MIB, 32 * MIB]


def test_empty_cache_returns_only_whole_segments() -> None:
    """A segment goes back if nothing of it is used: the one of 16 MiB does, the 20 MiB around 5 used ones do not."""
    allocator = holding(5, 16)
    allocator.release(1)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB
    allocator.release(0)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.segments()) == (0, [])


# Settings.


@pytest.mark.parametrize(
    ("divisions", "size", "rounded"),
    [
        (4, 5000, 5120),  # between 4096 and 8192 in steps of 1024
        (4, 4096, 4096),  # a power of two stays
        (4, 2048, 2048),  # not more than 4 x 512: in steps of 512
        (4, 1100, 1536),  # likewise
        (4, 10 * MIB + 1, 12 * MIB),  # between 8 and 16 in steps of 2
        (1, 5000, 5120),  # one division is no rounding: a multiple of 512
        ({64: 8, 128: 2}, 65 * MIB, 72 * MIB),  # from 64 MiB in steps of 8
        ({64: 8, 128: 2}, 33 * MIB + 1, 36 * MIB),  # below the first interval as in it: from 32 in steps of 4
        ({64: 8, 128: 2}, 129 * MIB, 192 * MIB),  # from 128 in steps of 64
        ({64: 8, 128: 2}, 257 * MIB, 257 * MIB),  # not named: no rounding
    ],
)
def test_rounding_between_powers_of_two(divisions: int | Mapping[int, int], size: int, rounded: int) -> None:
    """Sizes go up to the next of `divisions` steps between two powers of two."""
    assert Settings(roundup_power2_divisions=divisions).rounded(size) == rounded


@pytest.mark.parametrize(
    ("text", "divisions"),
    [  # as torch 2.13's c10::CachingAllocator::AcceleratorAllocatorConfig::roundup_power2_divisions answers
        ("4", [4] * 16),
        ("[64:8,128:2,256:4,512:2,1024:4,>:1]", [8] * 7 + [2, 4, 2, 4] + [1] * 5),
        ("[256:1,1024:4]", [1] * 9 + [0, 4] + [0] * 5),
        ("[512:2,256:8,>:16]", [2] * 8 + [8] + [16] * 7),
        ("[131072:8]", [8] * 16),
        ("[>:8]", [0] + [8] * 15),
    ],
)
def test_divisions_by_interval_are_read_as_torch_reads_them(text: str, divisions: list[int]) -> None:
    """Sizes below the first interval are rounded as in it, > is all that follow, others are not rounded."""
    assert list(Settings.parse(f"roundup_power2_divisions:{text}").divisions) == divisions


def test_settings_are_read() -> None:
    """Sizes are in MiB, blanks and empty entries do not matter, and what moves no block is left out."""
    text = " max_split_size_mb : 128, garbage_collection_threshold:0.8,,expandable_segments:True,backend:native,"
    assert Settings.parse(text + "pinned_num_register_threads:8,roundup_power2_divisions:4") == Settings(
        max_split_size=128 * MIB,
        garbage_collection_threshold=0.8,
        expandable_segments=True,
        roundup_power2_divisions=4,
    )
    assert Settings.parse("") == Settings()
    assert Settings.parse("max_split_size_mb:64,large_segment_size_mb:32,max_non_split_rounding_mb:40") == Settings(
        max_split_size=64 * MIB, large_segment_size=32 * MIB, max_non_split_rounding=40 * MIB
    )


@pytest.mark.parametrize(
    "entry",
    [
        "max_split_size_mb:19",  # below a large segment
        "max_split_size_mb:x",
        "max_split_size_mb",
        "expandable_segments:true",
        "garbage_collection_threshold:1.0",
        "garbage_collection_threshold:0",
        "large_segment_size_mb:10",
        "max_non_split_rounding_mb:10",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[3:2]",
        "roundup_power2_divisions:[64:3]",
        "roundup_power2_divisions:[64:8",
        "backend:cudaMallocAsync",
        "expandable_segment:True",
    ],
)
def test_settings_that_cannot_be_read_are_named(entry: str) -> None:
    """Torch refuses these too, but for the other backend and the misspelt name: the error names each of them."""
    with pytest.raises(ConfigError) as error:
        Settings.parse(f"expandable_segments:True,{entry}")
    assert repr(entry) in str(error.value)


def test_limits_follow_the_size_of_large_segments_wherever_that_stands() -> None:
    """32 MiB are enough with segments of 20, and too few with segments of 64, though these come later."""
    with pytest.raises(ConfigError, match="'max_split_size_mb:32': must be a whole number of MiB, 64 or more"):
        Settings.parse("max_split_size_mb:32,large_segment_size_mb:64")


def test_all_wrong_settings_are_named_at_once() -> None:
    """One error for two entries."""
    with pytest.raises(ConfigError, match=r"'a:1': no such setting; 'b:2': no such setting"):
        Settings.parse("a:1,b:2")


def test_large_segments_of_another_size() -> None:
    """Requests below 10 MiB share segments, and expandable ones grow, in steps of the given size."""
    settings = Settings(large_segment_size=32 * MIB)
    assert holding(5, settings=settings).reserved == 32 * MIB
    expandable = Settings(large_segment_size=32 * MIB, expandable_segments=True)
    assert holding(5, 30, settings=expandable).reserved == 64 * MIB


# Blocks that are too large to split.

OVERSIZE = Settings(max_split_size=64 * MIB)


@pytest.mark.parametrize(
    ("size", "reserved", "used"),
    [
        (32, 160, 32),  # a small request does not get the block of 128
        (108, 236, 108),  # 128 is 20 more than that: too large
        (109, 128, 128),  # 128 is less than 20 more: given whole
        (128, 128, 128),
    ],
)
def test_oversize_blocks_are_not_split(size: int, reserved: int, used: int) -> None:
    """A free block of 128 MiB, over the limit of 64, serves only requests that are nearly as large."""
    allocator = holding(128, settings=OVERSIZE)
    allocator.release(0)
    allocator.allocate("x", size * MIB)
    # A request of 109 MiB is rounded to a segment of 110 only where a new one is taken.
    assert (allocator.reserved // MIB, allocator.allocated // MIB) == (reserved, used)


@pytest.mark.parametrize("size", [32, 50])
def test_blocks_at_the_limit_serve_no_smaller_request(size: int) -> None:
    """A free block of just the limit, 64 MiB, is kept from 32 MiB, and from 50, which is nearly as large."""
    allocator = holding(64, settings=OVERSIZE)
    allocator.release(0)
    allocator.allocate("x", size * MIB)
    assert allocator.reserved == (64 + size) * MIB


def test_requests_below_the_limit_split_blocks_below_it() -> None:
    """A free block of 60 MiB, under the limit of 64, is split as ever."""
    allocator = holding(60, settings=OVERSIZE)
    allocator.release(0)
    allocator.allocate("x", 30 * MIB)
    assert (allocator.reserved, allocator.allocated) == (60 * MIB, 30 * MIB)


def test_requests_at_the_limit_are_not_split_from_their_own_segment() -> None:
    """64 MiB + 512 take a segment of 66, and the nearly 2 MiB beyond are not split off."""
    allocator = CachingAllocator(OVERSIZE)
    allocator.allocate("x", 64 * MIB + 1)
    assert allocator.allocated == 66 * MIB
    plain = CachingAllocator()
    plain.allocate("x", 64 * MIB + 1)
    assert plain.allocated == 64 * MIB + 512


def test_one_oversize_block_is_given_back_first() -> None:
    """Where 80 MiB do not fit, the cached 128 MiB go, and the cached 32 MiB stay: 32 + 80 of 200."""
    allocator = holding(32, 128, settings=OVERSIZE, capacity=200)
    allocator.release(0)
    allocator.release(1)
    allocator.allocate("x", 80 * MIB)
    assert allocator.reserved == 112 * MIB


def test_several_oversize_blocks_are_given_back_from_the_largest() -> None:
    """120 MiB in 240: no cached block is as large; 90, then 70 go, which is enough; 66 and 12 stay."""
    allocator = holding(66, 70, 90, 12, settings=OVERSIZE, capacity=240)
    for key in range(4):
        allocator.release(key)
    allocator.allocate("x", 120 * MIB)
    assert [segment.size // MIB for segment in allocator.segments()] == [66, 12, 120]


def test_all_cached_blocks_go_where_oversize_ones_do_not_suffice() -> None:
    """150 MiB in 180: the 70 MiB are not enough, so that the cached 30 go too."""
    allocator = holding(70, 30, 20, settings=OVERSIZE, capacity=180)
    allocator.release(0)
    allocator.release(1)
    allocator.allocate("x", 150 * MIB)
    assert allocator.reserved == 170 * MIB


def test_oversize_blocks_that_do_not_add_up_bring_all_cached_ones_down() -> None:
    """120 MiB in 170: 90 go, 40 are below the limit and do not count, so that the small pool's 2 go as well."""
    allocator = holding(90, 40, 1, settings=OVERSIZE, capacity=170)
    for key in range(3):
        allocator.release(key)
    assert allocator.reserved == 132 * MIB
    allocator.allocate("x", 120 * MIB)
    assert allocator.reserved == 120 * MIB


# Garbage collection.


def test_old_segments_go_above_the_threshold() -> None:
    """At 90 of 160 MiB, above half, the older of two cached segments goes: 90 - 12 + 20 = 98."""
    allocator = CachingAllocator(Settings(garbage_collection_threshold=0.5), capacity=160 * MIB)
    for key, size in (("a", 12), ("b", 14), ("live", 30)):
        allocator.allocate(key, size * MIB)  # three lookups, 56 MiB
    allocator.release("a")  # after lookup 3
    allocator.allocate("c", 16 * MIB)  # lookup 4; 72 MiB
    allocator.release("b")  # after lookup 4
    allocator.allocate("d", 18 * MIB)  # lookup 5; 72 MiB are not above 80, so 90 MiB now
    assert allocator.reserved == 90 * MIB
    allocator.allocate("e", 20 * MIB)  # lookup 6: ages 3 and 2, average 2.5: a goes, and 78 are below 80
    assert [layout(segment) for segment in allocator.segments()] == [
        [(14, "free")],
        [(30, "live")],
        [(16, "c")],
        [(18, "d")],
        [(20, "e")],
    ]


def test_collection_goes_on_until_below_the_threshold() -> None:
    """The same with both segments needed: after the older one, 85 MiB are still above 80, so the other goes."""
    allocator = CachingAllocator(Settings(garbage_collection_threshold=0.5), capacity=160 * MIB)
    for key, size in (("a", 12), ("b", 14), ("live", 32)):
        allocator.allocate(key, size * MIB)  # 58 MiB
    allocator.release("a")
    allocator.allocate("c", 22 * MIB)  # 80 MiB, not above 80
    allocator.release("b")
    allocator.allocate("d", 18 * MIB)  # 98 MiB
    assert allocator.reserved == 98 * MIB
    allocator.allocate("e", 20 * MIB)  # a goes: 86; b goes: 72; then 92
    assert allocator.reserved == 92 * MIB


def test_nothing_is_collected_without_capacity() -> None:
    """The threshold is a fraction of the capacity: without one, cached segments stay."""
    allocator = holding(12, 40, settings=Settings(garbage_collection_threshold=0.01))
    allocator.release(0)
    allocator.allocate("x", 16 * MIB)
    assert allocator.reserved == 68 * MIB


# Expandable segments.


def test_expandable_segments_use_the_rest_of_a_page() -> None:
    """15 MiB leave 5 of a page; 25 more need those and one more page."""
    allocator = holding(15, 25, settings=EXPANDABLE)
    (segment,) = allocator.segments()
    assert layout(segment) == [(15, 0), (25, 1)]
    assert (allocator.reserved, segment.expandable) == (40 * MIB, True)


def test_expandable_segments_one_for_each_pool_and_stream() -> None:
    """Small blocks lie in pages of 2 MiB of a segment of their own, and so does each stream."""
    allocator = CachingAllocator(EXPANDABLE)
    for key, (size, stream) in enumerate([(MIB, 0), (MIB, 0), (MIB, 0), (21 * MIB, 0), (MIB, 1)]):
        allocator.allocate(key, size, stream)
    assert [(found.pool, found.stream, found.size // MIB) for found in allocator.segments()] == [
        ("small", 0, 4),
        ("large", 0, 40),
        ("small", 1, 2),
    ]


def test_expandable_large_blocks_split_down_to_512_bytes() -> None:
    """Of 20 MiB, all but 1 MiB are used, and the rest is free: without, it would belong to the block."""
    assert holding(19, settings=EXPANDABLE).largest_free == MIB
    assert holding(19).allocated == 20 * MIB


def test_expandable_holes_are_filled_before_the_end() -> None:
    """22 MiB go into the hole of 30 rather than the 25 free at the end, which can grow."""
    allocator = holding(30, 5, 25, settings=EXPANDABLE)  # 60 MiB: three pages
    allocator.release(0)
    allocator.release(2)
    allocator.allocate("x", 22 * MIB)
    (segment,) = allocator.segments()
    assert layout(segment) == [(22, "x"), (8, "free"), (5, 1), (25, "free")]


def test_expandable_pages_that_are_wholly_free_are_unmapped_and_filled_again() -> None:
    """Of 80 MiB, 20 to 60 are free: two pages go back; 30 MiB then map both again, at the lowest addresses."""
    allocator = holding(*[10] * 8, settings=EXPANDABLE)
    for key in range(2, 6):
        allocator.release(key)
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB
    assert [layout(segment) for segment in allocator.segments()] == [[(10, 0), (10, 1)], [(10, 6), (10, 7)]]
    allocator.allocate("x", 30 * MIB)
    assert allocator.reserved == 80 * MIB
    (segment,) = allocator.segments()
    assert layout(segment) == [(10, 0), (10, 1), (30, "x"), (10, "free"), (10, 6), (10, 7)]


def test_expandable_pages_in_part_used_stay() -> None:
    """10 to 50 MiB of 80 are free: one whole page, from 20 to 40, goes; its neighbours' free halves stay."""
    allocator = holding(*[10] * 8, settings=EXPANDABLE)
    for key in range(1, 5):
        allocator.release(key)
    allocator.empty_cache()
    assert allocator.reserved == 60 * MIB
    assert [layout(segment) for segment in allocator.segments()] == [
        [(10, 0), (10, "free")],
        [(10, "free"), (10, 5), (10, 6), (10, 7)],
    ]
    allocator.allocate("x", 40 * MIB)  # the free half, the page, and the other free half: 10 + 20 + 10
    assert allocator.reserved == 80 * MIB
    assert [layout(segment) for segment in allocator.segments()] == [[(10, 0), (40, "x"), (10, 5), (10, 6), (10, 7)]]


def test_expandable_pages_move_where_memory_runs_out() -> None:
    """60 MiB in 100 beside 40 in use that lie apart: free pages in between go back, and are mapped at the end."""
    allocator = holding(20, 20, 20, 20, 20, settings=EXPANDABLE, capacity=100)
    for key in (1, 3, 4):
        allocator.release(key)  # 20 free, and 40 free at the end: 60, but not in one piece
    allocator.allocate("x", 60 * MIB)
    assert (allocator.reserved, allocator.allocated) == (100 * MIB, 100 * MIB)


def test_expandable_segments_run_out_too() -> None:
    """Of 30 MiB one page can be mapped: 25 MiB do not fit, and the page that 5 MiB need does."""
    allocator = CachingAllocator(EXPANDABLE, capacity=30 * MIB)
    with pytest.raises(SimulatedOutOfMemoryError):
        allocator.allocate("x", 25 * MIB)
    assert allocator.reserved == 0
    allocator.allocate("x", 5 * MIB)
    assert allocator.reserved == 20 * MIB


def test_without_expandable_segments_they_can_move_too_if_whole() -> None:
    """The same trace with segments of 20 MiB: three free ones are given back, and 60 MiB are taken."""
    allocator = holding(20, 20, 20, 20, 20, capacity=100)
    for key in (1, 3, 4):
        allocator.release(key)
    allocator.allocate("x", 60 * MIB)
    assert allocator.reserved == 100 * MIB


# Running out.


def test_out_of_memory_says_what_was_there() -> None:
    """50 MiB beside 60 in 100 do not fit: the cached 20 went back in vain, and the allocator goes on working."""
    allocator = holding(60, 20, capacity=100)
    allocator.release(1)
    with pytest.raises(SimulatedOutOfMemoryError, match=str(50 * MIB)) as raised:
        allocator.allocate("x", 50 * MIB)
    error = raised.value
    assert isinstance(error, OnenthError)
    assert (error.requested, error.reserved, error.allocated, error.capacity) == (
        50 * MIB,
        60 * MIB,
        60 * MIB,
        100 * MIB,
    )
    allocator.allocate("x", 40 * MIB)
    assert allocator.reserved == 100 * MIB


def test_split_segments_cannot_be_given_back() -> None:
    """Four segments of 20 MiB, each with 2 used, hold 72 free: 30 more take 110 MiB, and 100 if they are expandable."""
    events: list[Event] = []
    for row in range(4):
        events += [((row, "kept"), 2 * MIB), ((row, "a"), 9 * MIB), ((row, "b"), 9 * MIB)]
    events += [((row, name), -9 * MIB) for row in range(4) for name in "ab"]
    events.append(("x", 30 * MIB))
    assert replay(events, capacity=109 * MIB).out_of_memory_at == len(events) - 1
    assert replay(events, capacity=110 * MIB).out_of_memory_at is None
    # In one segment the last 18 MiB are at its end: one more page makes them 38. No page is wholly free.
    assert replay(events, EXPANDABLE, capacity=99 * MIB).out_of_memory_at == len(events) - 1
    assert replay(events, EXPANDABLE, capacity=100 * MIB).out_of_memory_at is None


def test_replay_stops_at_the_event_that_did_not_fit() -> None:
    """The lists end with it."""
    found = replay([("a", 60 * MIB), ("b", 60 * MIB), ("a", -1)], capacity=100 * MIB)
    assert found.out_of_memory_at == 1
    assert found.reserved == [60 * MIB, 60 * MIB]


def test_replay_counts_events_that_do_nothing() -> None:
    """Events of 0 bytes keep their place; one of them empties the cache."""
    found = replay([("a", 16 * MIB), ("nothing", 0), ("a", -1), (EMPTY_CACHE, 0), ("a", 512)])
    assert found.reserved == [16 * MIB, 16 * MIB, 16 * MIB, 0, 2 * MIB]
    assert found.allocated == [16 * MIB, 16 * MIB, 0, 0, 512]
    assert found.largest_free == [0, 0, 16 * MIB, 0, 2 * MIB - 512]


def test_replay_of_nothing() -> None:
    """No events, no bytes, and no event at the peak."""
    found = replay([])
    assert (found.peak_reserved, found.peak_allocated, found.fragmentation, found.largest_free_at_peak) == (0, 0, 0, 0)
    assert found.peak_event is None
    assert found.out_of_memory_at is None


def test_keys_name_one_allocation() -> None:
    """A key in use cannot be allocated again, one that is not cannot be released; 0 bytes take nothing."""
    allocator = holding(1)
    with pytest.raises(ValueError, match="allocated already"):
        allocator.allocate(0, 1)
    with pytest.raises(ValueError, match="bytes"):
        allocator.allocate("x", -1)
    with pytest.raises(KeyError):
        allocator.release("x")
    allocator.allocate("empty", 0)
    assert allocator.allocated == MIB
    allocator.release("empty")


@pytest.mark.parametrize(
    ("size", "pinned"), [(0, 0), (1, 1), (2, 2), (3, 4), (MIB, MIB), (MIB + 1, 2 * MIB), (3 * GIB, 4 * GIB)]
)
def test_pinned_memory_is_a_power_of_two(size: int, pinned: int) -> None:
    """Page-locked memory is rounded up to a power of two: up to twice what was asked for."""
    assert pinned_bytes(size) == pinned


def test_pinned_memory_of_less_than_nothing() -> None:
    """A negative size is an error."""
    with pytest.raises(ValueError, match="-1"):
        pinned_bytes(-1)


# Properties.

sizes = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 90 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 2 * MIB, 10 * MIB, 20 * MIB, 64 * MIB]),
)
steps = st.lists(st.tuples(st.integers(0, 5), sizes, st.integers(0, 99), st.sampled_from([0, 0, 3])), max_size=60)
all_settings = st.builds(
    Settings,
    max_split_size=st.sampled_from([None, 20 * MIB, 64 * MIB]),
    roundup_power2_divisions=st.sampled_from([None, 4, {1: 8, 16: 2}]),
    garbage_collection_threshold=st.sampled_from([0.0, 0.4]),
    expandable_segments=st.booleans(),
)
capacities = st.sampled_from([None, 1 * GIB, 300 * MIB])


def run(steps: list[tuple[int, int, int, int]], allocator: CachingAllocator) -> Iterator[dict[Hashable, int]]:
    """Run steps: of six, three allocate, two release some block, one empties the cache; yields what is held."""
    held: dict[Hashable, int] = {}
    for key, (action, size, which, stream) in enumerate(steps):
        if action < 3:
            try:
                allocator.allocate(key, size, stream)
            except SimulatedOutOfMemoryError:
                continue
            held[key] = size
        elif action < 5 and held:
            chosen = list(held)[which % len(held)]
            allocator.release(chosen)
            del held[chosen]
        else:
            allocator.empty_cache()
        yield held


@given(steps, all_settings, capacities)
def test_blocks_tile_their_segments(
    steps: list[tuple[int, int, int, int]], settings: Settings, capacity: int | None
) -> None:
    """After each step blocks lie end to end, segments are apart, every key has its block, and the sums agree."""
    allocator = CachingAllocator(settings, capacity=capacity)
    for held in run(steps, allocator):
        segments = allocator.segments()
        end = 0
        for segment in segments:
            assert segment.address >= end
            end = segment.address
            for block, following in zip(segment.blocks, [*segment.blocks[1:], None], strict=True):
                assert block.address == end
                assert block.size >= 512
                assert not (block.free and following is not None and following.free)  # free neighbours join
                end += block.size
            assert end == segment.address + segment.size
        blocks = [block for segment in segments for block in segment.blocks]
        assert {block.key for block in blocks if not block.free} == set(held)
        assert all(block.free or block.size >= held[block.key] for block in blocks)
        assert allocator.reserved == sum(segment.size for segment in segments)
        assert allocator.allocated == sum(block.size for block in blocks if not block.free)
        assert allocator.requested == sum(held.values())
        assert allocator.largest_free == max((block.size for block in blocks if block.free), default=0)
        assert allocator.requested <= allocator.allocated <= allocator.reserved
        assert capacity is None or allocator.reserved <= capacity


@given(steps, all_settings, capacities)
def test_all_memory_comes_back(
    steps: list[tuple[int, int, int, int]], settings: Settings, capacity: int | None
) -> None:
    """With everything released and the cache emptied, nothing is reserved, and no segment is left."""
    allocator = CachingAllocator(settings, capacity=capacity)
    held: dict[Hashable, int] = {}
    for held in run(steps, allocator):  # noqa: B007 - the last one is what is held at the end
        pass
    for key in list(held):
        allocator.release(key)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.allocated, allocator.requested, allocator.largest_free) == (0, 0, 0, 0)
    assert allocator.segments() == []


def events_of(steps: list[tuple[int, int, int, int]]) -> list[Event]:
    """The same steps as events of a replay."""
    held: list[int] = []
    events: list[Event] = []
    for key, (action, size, which, _) in enumerate(steps):
        if action < 3:
            held.append(key)
            events.append((key, size))
        elif action < 5 and held:
            events.append((held.pop(which % len(held)), -1))
        else:
            events.append((EMPTY_CACHE, 0))
    return events


@given(steps, all_settings, capacities)
def test_a_replay_has_one_result(
    steps: list[tuple[int, int, int, int]], settings: Settings, capacity: int | None
) -> None:
    """The same events give the same numbers, one of each for each event that was run."""
    events = events_of(steps)
    found = replay(events, settings, capacity=capacity)
    assert found == replay(iter(events), settings, capacity=capacity)
    run_events = len(events) if found.out_of_memory_at is None else found.out_of_memory_at + 1
    assert len(found.reserved) == len(found.allocated) == len(found.largest_free) == run_events


@given(steps)
def test_what_was_reserved_fits(steps: list[tuple[int, int, int, int]]) -> None:
    """A trace fits in the peak that it reserves where memory is plenty, with the very same numbers."""
    events = events_of(steps)
    for settings in (DEFAULTS, EXPANDABLE):
        free = replay(events, settings)
        bound = replay(events, settings, capacity=free.peak_reserved)
        assert bound == free
