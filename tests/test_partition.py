"""Properties of the 1/N arithmetic, for any parameter sizes and any number of ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from onenth.partition import ALIGNMENT, Partition, align

numels = st.lists(st.one_of(st.integers(0, 300), st.sampled_from([0, 1, 63, 64, 65, 4096])), min_size=1, max_size=12)
ranks = st.one_of(st.integers(1, 9), st.just(256))
partitions = st.builds(lambda sizes, n: Partition(tuple(sizes), n), numels, ranks)


@given(st.integers(0, 10**13))
def test_align_is_the_next_multiple(numel: int) -> None:
    """An aligned size is a multiple of the alignment and wastes less than one alignment."""
    assert align(numel) % ALIGNMENT == 0
    assert 0 <= align(numel) - numel < ALIGNMENT


@given(partitions)
def test_every_element_has_one_owner(partition: Partition) -> None:
    """The ranges of all ranks cover each element of each parameter exactly once."""
    owned = [[0] * numel for numel in partition.numels]
    for rank in range(partition.ranks):
        for piece in partition.ranges(rank):
            assert piece.rank == rank
            for element in range(piece.start, piece.stop):
                owned[piece.parameter][element] += 1
    assert all(count == 1 for counts in owned for count in counts)


@given(partitions)
def test_ranges_lie_in_their_ranks_segment(partition: Partition) -> None:
    """What a rank owns lies within its own segment of the flat buffer, in flat order, and is never empty."""
    for rank in range(partition.ranks):
        position = rank * partition.shard_numel
        for piece in partition.ranges(rank):
            offset = partition.offsets[piece.parameter]
            assert piece.start < piece.stop
            assert position <= offset + piece.start
            position = offset + piece.stop
        assert position <= (rank + 1) * partition.shard_numel


@given(partitions)
def test_owners_are_the_inverse_of_ranges(partition: Partition) -> None:
    """Asking who owns a parameter gives the same ranges as asking every rank what it owns."""
    by_rank = [piece for rank in range(partition.ranks) for piece in partition.ranges(rank)]
    for parameter in range(len(partition.numels)):
        expected = [piece for piece in by_rank if piece.parameter == parameter]
        assert partition.owners(parameter) == expected


@given(partitions)
def test_starts_and_cuts_are_aligned(partition: Partition) -> None:
    """Parameters start, segments end, and parameters are cut at multiples of the alignment only."""
    assert all(offset % ALIGNMENT == 0 for offset in partition.offsets)
    assert partition.shard_numel % ALIGNMENT == 0
    for parameter, numel in enumerate(partition.numels):
        for piece in partition.owners(parameter):
            assert piece.start % ALIGNMENT == 0
            assert piece.stop == numel or piece.stop % ALIGNMENT == 0


@given(partitions)
def test_offsets_leave_room_and_no_gaps(partition: Partition) -> None:
    """Each parameter starts where the one before ends, rounded up; the last one fits into the flat buffer."""
    ends = [offset + numel for offset, numel in zip(partition.offsets, partition.numels, strict=True)]
    assert partition.offsets[0] == 0
    assert list(partition.offsets[1:]) == [align(end) for end in ends[:-1]]
    assert ends[-1] <= partition.flat_numel


@given(partitions)
def test_padding_is_bounded(partition: Partition) -> None:
    """A flat buffer wastes less than one alignment a parameter and one a rank."""
    assert partition.flat_numel == partition.ranks * partition.shard_numel
    wasted = partition.flat_numel - sum(partition.numels)
    assert 0 <= wasted < ALIGNMENT * (len(partition.numels) + partition.ranks)


def test_a_layout_worked_by_hand() -> None:
    """Sizes 100, 0 and 65 over two ranks: starts 0, 128, 128; 256 elements, cut at 128."""
    partition = Partition((100, 0, 65), 2)
    assert partition.offsets == (0, 128, 128)
    assert (partition.shard_numel, partition.flat_numel) == (128, 256)
    assert [(p.parameter, p.start, p.stop) for p in partition.ranges(0)] == [(0, 0, 100)]
    assert [(p.parameter, p.start, p.stop) for p in partition.ranges(1)] == [(2, 0, 65)]
    assert partition.owners(1) == []
