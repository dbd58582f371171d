from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impl.canzona.norm import clip_scale, limbs_value, square_limbs

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def exact(values: list[float]) -> Fraction:
    return sum((Fraction(v) ** 2 for v in values), Fraction(0))


@given(st.lists(floats, max_size=40))
def test_square_sum_is_exact(values: list[float]) -> None:
    limbs = square_limbs(torch.tensor(values, dtype=torch.float32))
    assert sum((Fraction(t) for t in limbs_value(limbs)), Fraction(0)) == exact(values)


@given(st.lists(floats, min_size=1, max_size=40), st.data())
def test_any_cut_gives_the_same_limbs_after_the_sum(values: list[float], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(values)))
    tensor = torch.tensor(values, dtype=torch.float32)
    parts = square_limbs(tensor[:cut]) + square_limbs(tensor[cut:])
    whole = square_limbs(tensor)
    assert math.fsum(limbs_value(parts)) == math.fsum(limbs_value(whole))


def test_a_plain_float64_sum_would_depend_on_the_cut() -> None:
    """Negative control: the property above is not free."""
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(10_001, generator=generator) * torch.logspace(-8, 0, 10_001)
    squares = tensor.double().square()
    sums = {float(squares[:cut].sum() + squares[cut:].sum()) for cut in range(0, 10_000, 37)}
    assert len(sums) > 1
    exact_sums = {
        math.fsum(limbs_value(square_limbs(tensor[:cut]) + square_limbs(tensor[cut:]))) for cut in range(0, 10_000, 997)
    }
    assert len(exact_sums) == 1


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_elements_give_nan(bad: float) -> None:
    assert math.isnan(math.fsum(limbs_value(square_limbs(torch.tensor([1.0, bad])))))


def test_extremes() -> None:
    smallest, largest = 2.0**-149, torch.finfo(torch.float32).max
    for values in ([smallest], [largest] * 3, [smallest, largest], [0.0], []):
        limbs = square_limbs(torch.tensor(values, dtype=torch.float32))
        assert sum((Fraction(t) for t in limbs_value(limbs)), Fraction(0)) == exact(values)


def test_clip_scale() -> None:
    assert clip_scale(0.5, 1.0) == 1.0
    assert clip_scale(4.0, 1.0) == pytest.approx(0.25, rel=1e-5)
    assert clip_scale(4.0, 0.0) == 1.0
