"""Uncertain numbers: named draws, bands, and costs with their evidence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.projection.uncertain import DRAWS, Cost, Range, band, exact, shares, total

POSITIVE = st.floats(0.01, 100.0)


def ranges() -> st.SearchStrategy[Range]:
    return st.tuples(POSITIVE, POSITIVE, POSITIVE).map(lambda numbers: Range(*sorted(numbers)))


@given(ranges(), st.text(max_size=8))
@settings(deadline=None, max_examples=60)
def test_draws_are_named_positive_and_begin_with_the_nominal(given_range: Range, name: str) -> None:
    first, again = given_range.draws(name), given_range.draws(name)
    assert first.shape == (1 + DRAWS,)
    assert np.array_equal(first, again)
    assert first[0] == given_range.nominal
    assert (first > 0).all()


def test_equal_names_are_paired_and_other_names_are_not() -> None:
    wide, scaled = Range(1, 2, 8), Range(10, 20, 80)
    assert np.allclose(scaled.draws("a") / wide.draws("a"), 10), "what both are uncertain about cancels"
    assert not np.allclose(scaled.draws("b") / wide.draws("a"), 10), "negative control"


@given(ranges())
@settings(deadline=None, max_examples=60)
def test_nine_of_ten_draws_lie_inside(given_range: Range) -> None:
    found = np.concatenate([given_range.draws(f"input {n}")[1:] for n in range(60)])
    inside = ((found >= given_range.low * (1 - 1e-9)) & (found <= given_range.high * (1 + 1e-9))).mean()
    if given_range.low < given_range.nominal < given_range.high:
        assert abs(inside - 0.9) < 0.02
    assert inside > 0.88


@given(ranges(), ranges(), st.text(max_size=4))
@settings(deadline=None, max_examples=60)
def test_bands_hold_the_nominal_and_are_monotone(one: Range, other: Range, name: str) -> None:
    first = band(one.draws(name))
    assert first.low <= first.value <= first.high
    larger = band(one.draws(name) + other.draws("other"))
    assert larger.value > first.value
    assert larger.low >= first.low
    assert larger.high >= first.high


def test_a_band_of_a_certain_number_is_the_number() -> None:
    found = band(exact(3.0))
    assert (found.low, found.value, found.high) == (3.0, 3.0, 3.0)
    skewed = exact(1.0)
    skewed[1:] = 2.0  # every draw above the nominal: it still lies in its band
    assert band(skewed).low == 1.0


@pytest.mark.parametrize("numbers", [(0, 1, 2), (2, 1, 3), (1, 3, 2), (1, 2, float("inf")), (-1, 1, 2)])
def test_a_range_refuses_what_is_none(numbers: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="a range needs"):
        Range(*numbers)


@given(st.lists(st.tuples(POSITIVE, st.sampled_from("abc")), min_size=1, max_size=6))
@settings(deadline=None, max_examples=60)
def test_costs_add_up_and_so_do_their_sources(parts: list[tuple[float, str]]) -> None:
    costs = [Cost.of(exact(seconds), source) for seconds, source in parts]
    whole = total(costs)
    assert np.allclose(whole.seconds, sum(seconds for seconds, _ in parts))
    assert sum(whole.evidence.values()) == pytest.approx(1)
    for source in {s for _, s in parts}:
        mine = sum(seconds for seconds, s in parts if s == source)
        assert whole.evidence[source] == pytest.approx(mine / whole.seconds[0])
    doubled = whole.times(2)
    assert np.allclose(doubled.seconds, 2 * whole.seconds)
    assert doubled.evidence == whole.evidence


def test_nothing_costs_nothing_and_has_no_source() -> None:
    assert total([]).seconds.max() == 0
    both = Cost.nothing() + Cost.of(exact(1.0), "a")
    assert both.evidence == {"a": 1.0}
    assert shares([({"a": 1.0}, 0.0)]) == {"a": 0.0}
