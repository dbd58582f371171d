"""The statistics of the tables: medians with intervals, and paired ratios with a bootstrap interval."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import bootstrap
from scipy.stats import t as student

RESAMPLES = 2000


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
