"""The statistics of the tables: medians and means with intervals, paired comparisons, and which line is the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import bootstrap
from scipy.stats import t as student

RESAMPLES = 2000
LEVEL = 0.05
"""Of every test and interval."""
MINIMUM_SEEDS = 3
MINIMUM_REPETITIONS = 5
"""Below these no line of a table is called the best."""

Line = Mapping[int, float]
"""The finite observations of one line of a table, by seed or repetition."""


@dataclass(frozen=True)
class Estimate:
    """A number with its interval and the count of observations behind it."""

    value: float
    low: float
    high: float
    n: int


NOTHING = Estimate(math.nan, math.nan, math.nan, 0)


def median(values: ArrayLike) -> Estimate:
    """Return the median and the quartiles (interquartile interval) of the finite ``values``."""
    finite = np.asarray(values, dtype=float)
    finite = finite[np.isfinite(finite)]
    if finite.size == 0:
        return NOTHING
    low, middle, high = np.quantile(finite, (0.25, 0.5, 0.75))
    return Estimate(float(middle), float(low), float(high), int(finite.size))


def paired_ratio(values: ArrayLike, reference: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Return the median of ``values[i] / reference[i]`` with a percentile bootstrap interval of that median.

    Pair i holds two observations of the same repetition, so that a drift of the machine cancels; pairs that are not
    finite are left out.  Below three pairs the interval is NaN.  The resampling is seeded: equal input, equal output.
    Raises ValueError when the lengths differ.
    """
    top, bottom = np.asarray(values, dtype=float), np.asarray(reference, dtype=float)
    if top.shape != bottom.shape:
        raise ValueError(f"{top.size} values cannot be paired with {bottom.size} references")
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = top / bottom
    ratios = ratios[np.isfinite(ratios)]
    if ratios.size == 0:
        return NOTHING
    middle = float(np.median(ratios))
    if ratios.size < 3:
        return Estimate(middle, math.nan, math.nan, int(ratios.size))
    if np.ptp(ratios) == 0:
        return Estimate(middle, middle, middle, int(ratios.size))
    interval = bootstrap(
        (ratios,),
        np.median,
        n_resamples=RESAMPLES,
        confidence_level=confidence,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Estimate(middle, float(interval.low), float(interval.high), int(ratios.size))


@dataclass(frozen=True)
class Paired:
    """A paired comparison.

    estimate: the mean difference, or geometric mean of the ratios, with its interval; p: of the two-sided t-test that
    there is none, NaN below two pairs.
    """

    estimate: Estimate
    p: float


def mean(values: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Return the mean of the finite ``values`` with its t interval, which is NaN below two values."""
    finite = np.asarray(values, dtype=float)
    finite = finite[np.isfinite(finite)]
    if finite.size == 0:
        return NOTHING
    middle = float(finite.mean())
    if finite.size < 2:
        return Estimate(middle, math.nan, math.nan, 1)
    half = float(student.ppf((1 + confidence) / 2, finite.size - 1) * finite.std(ddof=1) / math.sqrt(finite.size))
    return Estimate(middle, middle - half, middle + half, int(finite.size))


def paired_difference(values: ArrayLike, reference: ArrayLike) -> Paired:
    """Return the mean of ``values[i] - reference[i]`` over finite pairs, with its 95 % t interval and paired t-test.

    Raises ValueError when the lengths differ.
    """
    ours, theirs = np.asarray(values, dtype=float), np.asarray(reference, dtype=float)
    if ours.shape != theirs.shape:
        raise ValueError(f"{ours.size} values cannot be paired with {theirs.size} references")
    differences = ours - theirs
    differences = differences[np.isfinite(differences)]
    found = mean(differences)
    if found.n < 2:
        return Paired(found, math.nan)
    error = float(differences.std(ddof=1)) / math.sqrt(found.n)
    if error == 0:
        return Paired(found, 1.0 if found.value == 0 else 0.0)
    return Paired(found, float(2 * student.sf(abs(found.value) / error, found.n - 1)))


def paired_quotient(values: ArrayLike, reference: ArrayLike) -> Paired:
    """Return the geometric mean of ``values[i] / reference[i]`` with interval and test of their logarithms."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = paired_difference(np.log(np.asarray(values, float)), np.log(np.asarray(reference, float)))
    e = found.estimate
    return Paired(Estimate(math.exp(e.value), math.exp(e.low), math.exp(e.high), e.n), found.p)


def holm(p: Sequence[float]) -> list[float]:
    """Return the p-values of as many tests as ``p`` has, corrected by Holm's method, in the same order."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    corrected, largest = [math.nan] * len(p), 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - place) * p[i]))
        corrected[i] = largest
    return corrected


def smallest(lines: Sequence[Line], minimum: int = MINIMUM_SEEDS) -> int | None:
    """Return which line has the smallest mean, None unless paired t-tests show it below every other line.

    All tests have at least ``minimum`` pairs and are significant at :data:`LEVEL` after Holm's correction.
    """
    best = _first(lines, minimum, np.mean)
    if best is None:
        return None
    found = [paired_difference(*_pairs(lines[best], other)) for i, other in enumerate(lines) if i != best]
    if any(test.estimate.n < minimum or not test.estimate.value < 0 for test in found):
        return None
    return best if max(holm([test.p for test in found])) < LEVEL else None


def shortest(lines: Sequence[Line], minimum: int = MINIMUM_REPETITIONS) -> int | None:
    """Return which line has the smallest median, None unless its paired ratio to every other line is below 1.

    That is: the whole bootstrap interval of the median ratio over at least ``minimum`` pairs, at a confidence of 1 less
    :data:`LEVEL` over the number of the other lines (Bonferroni's correction).
    """
    best = _first(lines, minimum, np.median)
    if best is None:
        return None
    confidence = 1 - LEVEL / (len(lines) - 1)
    found = [paired_ratio(*_pairs(lines[best], other), confidence) for i, other in enumerate(lines) if i != best]
    return best if all(ratio.n >= minimum and ratio.high < 1 for ratio in found) else None


def _first(lines: Sequence[Line], minimum: int, middle: Callable[[list[float]], Any]) -> int | None:
    """Return the line whose ``middle`` is smallest, None if there are fewer than two or one is shorter than allowed."""
    if len(lines) < 2 or any(len(line) < minimum for line in lines):
        return None
    return min(range(len(lines)), key=lambda i: float(middle(list(lines[i].values()))))


def _pairs(ours: Line, theirs: Line) -> tuple[list[float], list[float]]:
    both = sorted(ours.keys() & theirs.keys())
    return [ours[key] for key in both], [theirs[key] for key in both]
