"""Breakdown: totals, access by state and tier, the table, JSON."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onenth.breakdown import Breakdown, format_bytes
from onenth.states import ModelState, ResidualState, Tier

states = st.sampled_from([*map(str, ModelState), *map(str, ResidualState), "momentum_buffer"])
counts = st.dictionaries(st.tuples(states, st.sampled_from(list(Tier))), st.integers(0, 10**15), max_size=6)
breakdowns = st.builds(Breakdown, counts, counts, st.dictionaries(states, st.text(max_size=4), max_size=2))


@given(breakdowns)
def test_json_round_trip(breakdown: Breakdown) -> None:
    """What is written to JSON reads back as an equal Breakdown."""
    assert Breakdown.from_dict(json.loads(json.dumps(breakdown.to_dict()))) == breakdown


@given(breakdowns)
def test_states_and_tiers_add_up(breakdown: Breakdown) -> None:
    """The total is the sum over states, and over tiers, and over rows."""
    held_states = {state for state, _ in breakdown.held}
    assert sum(getattr(breakdown, state) for state in held_states) == breakdown.total
    assert sum(breakdown.by_tier.values()) == breakdown.total
    assert sum(row.held for row in breakdown.rows()) == breakdown.total


@given(breakdowns)
def test_differences_name_what_misses_its_equation(breakdown: Breakdown) -> None:
    """Keys with an equation are listed with held minus expected if and only if the two differ."""
    for key, expected in breakdown.expected.items():
        held = breakdown.held.get(key, 0)
        assert breakdown.differences.get(key, 0) == held - expected
        assert (key in breakdown.differences) == (held != expected)
    assert set(breakdown.differences) <= set(breakdown.expected)


def test_access_by_state() -> None:
    """A state is an attribute summed over tiers: 0 if nobody holds it, an error if there is no such state."""
    breakdown = Breakdown({("master", Tier.DEVICE): 1, ("master", Tier.HOST): 2, ("momentum_buffer", Tier.DEVICE): 4})
    assert breakdown.master == 3
    assert breakdown.momentum_buffer == 4
    assert breakdown.exp_avg == 0
    assert breakdown.activations == 0
    with pytest.raises(AttributeError, match="masterr"):
        _ = breakdown.masterr


def test_copies_and_pickles() -> None:
    """Attribute access by state does not get in the way of copy and pickle."""
    breakdown = Breakdown({("master", Tier.DEVICE): 1})
    assert copy.deepcopy(breakdown) == breakdown
    assert pickle.loads(pickle.dumps(breakdown)) == breakdown


def test_table_shows_the_equation_and_the_difference() -> None:
    """Rows stand in the order of the states, with the equation's figure, the difference and the note."""
    breakdown = Breakdown(
        held={
            ("receive", Tier.DEVICE): 5,
            ("momentum_buffer", Tier.HOST): 28_000_000_000,
            ("gradients", Tier.DEVICE): 14_000_000_000,
            ("parameters", Tier.DEVICE): 0,
        },
        expected={("gradients", Tier.DEVICE): 14_000_001_000, ("parameters", Tier.DEVICE): 0},
        notes={"parameters": "from the master"},
    )
    lines = [line.split() for line in str(breakdown).splitlines()]
    assert lines == [
        ["held", "equation", "difference"],
        ["parameters", "0", "B", "0", "B", "0", "B", "from", "the", "master"],
        ["gradients", "14", "GB", "14", "GB", "-1", "kB"],
        ["momentum_buffer", "(host)", "28", "GB"],
        ["receive", "5", "B"],
        ["in", "all", "42", "GB"],
    ]


def test_table_is_aligned() -> None:
    """Numbers end in the same column in every row."""
    breakdown = Breakdown({("master", Tier.DEVICE): 1, ("gradients", Tier.DEVICE): 123_456})
    first, *rows = str(breakdown).splitlines()
    assert {len(row) for row in rows} == {len(first)}


def test_table_totals_the_equations_if_every_row_has_one() -> None:
    """The last row compares the totals, but only where nothing is left out of the comparison."""
    held = {("master", Tier.DEVICE): 3000, ("exp_avg", Tier.DEVICE): 1000}
    assert str(Breakdown(held, held)).splitlines()[-1].split() == [
        "in",
        "all",
        "4",
        "kB",
        "4",
        "kB",
        "0",
        "B",
    ]
    partly = Breakdown(held, {("master", Tier.DEVICE): 3000})
    assert str(partly).splitlines()[-1].split() == ["in", "all", "4", "kB"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (14 * 10**9, "14 GB"),
        (1_120_000_000_000, "1.12 TB"),
        (-54_700_000, "-54.7 MB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    """Three digits, decimal units, and no rounding up to four digits."""
    assert format_bytes(count) == text
