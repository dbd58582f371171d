"""The statistics of the tables: medians with intervals, and paired ratios with a bootstrap interval."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import bootstrap

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
