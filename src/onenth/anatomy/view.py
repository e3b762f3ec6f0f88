"""What a page shows of recordings: the rank that holds most in detail, its timeline thinned without losing a peak."""

from __future__ import annotations

from collections.abc import Sequence

from onenth.anatomy.anatomy import Anatomy
from onenth.anatomy.timeline import Timeline
from onenth.report.page import Owner, PageData, Peak, Rank, Turn, render

POINTS = 4000  # of a line that a page draws, about; a screen has fewer columns


def page(anatomies: Sequence[Anatomy]) -> str:
    """The page of one recording, or of those of several ranks. Raises AnatomyError without plotly."""
    shown = max(anatomies, key=lambda anatomy: anatomy.peak.total)
    return render(describe(shown, anatomies))


def describe(anatomy: Anatomy, anatomies: Sequence[Anatomy]) -> PageData:
    """The page's data: `anatomy` in detail, and the peaks of all."""
    series, totals, replay = anatomy.timeline.series(), anatomy.totals(), anatomy.reserved()
    turns = turns_of(anatomy.timeline)
    ends = [at for turn in turns for at in (turn.start, turn.end)]
    kept = positions(totals, [*series.values(), replay.reserved], ends)
    at = anatomy.peak_position
    rows = anatomy.rows()
    return PageData(
        title=anatomy.title or "a model",
        facts=_facts(anatomy),
        verdict=anatomy.verdict(),
        error=anatomy.error,
        findings=[str(finding) for finding in anatomy.findings()],
        peak=None if at is None else Peak(totals[at], at, anatomy.peak_moment),
        events=len(totals),
        positions=kept,
        phases=[anatomy.timeline[position].phase for position in kept],
        turns=turns,
        totals=[totals[position] for position in kept],
        owners=[
            Owner(row.owner, row.at_peak, row.peak, row.expected, [series[row.owner][p] for p in kept])
            if row.owner in series
            else Owner(row.owner, row.at_peak, row.peak, row.expected, [0] * len(kept))
            for row in rows
        ],
        reserved=[replay.reserved[position] for position in kept],
        allocated=[replay.allocated[position] for position in kept],
        capacity=anatomy.capacity,
        modules=anatomy.by_module(),
        ranks=[
            Rank(one.rank, {state: count for (state, _), count in one.peak.held.items()})
            for one in sorted(anatomies, key=lambda one: one.rank)
        ],
        outside=anatomy.outside,
    )


def _facts(anatomy: Anatomy) -> str:
    how = "plain PyTorch" if anatomy.stage is None else f"ZeRO stage {anatomy.stage}"
    ranks = f"rank {anatomy.rank} of {anatomy.ranks}" if anatomy.ranks > 1 else "one rank"
    return f"{how}, {ranks}, on {anatomy.device}; {len(anatomy.timeline):,} events"


def turns_of(timeline: Timeline) -> list[Turn]:
    """The turns that have events, each from its first to its last."""
    found: dict[int, tuple[int, int]] = {}
    for position, turn in enumerate(timeline.turns):
        first, _ = found.get(turn, (position, position))
        found[turn] = (first, position)
    return [Turn(timeline.parts[turn], first, last) for turn, (first, last) in found.items()]


def positions(totals: Sequence[int], lines: Sequence[Sequence[int]], marks: Sequence[int]) -> list[int]:
    """Which points to draw, about POINTS at most: of each stretch the first and those where the total is extreme.

    Each line's own peak is among them, the total's too, and so are `marks`.
    """
    length = len(totals)
    if length <= POINTS:
        return list(range(length))
    kept = {0, length - 1, *marks, *(line.index(max(line)) for line in (totals, *lines))}
    stretch = -(-3 * length // POINTS)
    for start in range(0, length, stretch):
        part = range(start, min(start + stretch, length))
        kept |= {start, max(part, key=totals.__getitem__), min(part, key=totals.__getitem__)}
    return sorted(kept)
