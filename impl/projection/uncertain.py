"""Numbers with an uncertainty, carried through a projection as draws.

A projection is evaluated for several draws of its inputs at once: arrays whose first axis has the nominal value at 0
and ``DRAWS`` draws after it.  An input is drawn from its own name, so every projection sees the same draws of it, and
ratios of two projections are paired: what both are uncertain about cancels.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 48
"""Draws after the nominal one."""
TAIL = 0.05
"""A range and a band leave out this share of the draws at either end."""
_SIGMAS = 1.6448536269514722  # of a normal distribution, to the 95th percentile
_QUARTILE = 0.6744897501960817  # and to its 75th

Samples = NDArray[np.float64]
"""``[1 + DRAWS, ...]``: the nominal value, then the draws."""


@dataclass(frozen=True)
class Range:
    """A positive number that lies between ``low`` and ``high`` in 90 of 100 cases; ``nominal`` is the best guess."""

    low: float
    nominal: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.nominal <= self.high or not math.isfinite(self.high):
            raise ValueError(f"a range needs 0 < low <= nominal <= high, not {self.low}, {self.nominal}, {self.high}")

    @classmethod
    def of_quartiles(cls, q25: float, median: float, q75: float) -> Range:
        """Return the 5th to 95th percentile of a log-normal distribution, either side by its own quartile."""
        wider = _SIGMAS / _QUARTILE
        return cls(median * (q25 / median) ** wider, median, median * (q75 / median) ** wider)

    def draws(self, name: str) -> Samples:
        """Return the samples ``[1 + DRAWS]`` of the input called ``name``: equal names, equal draws."""
        return self.nominal * np.exp(_deviations(name, math.log(self.high / self.nominal), self._down))

    @property
    def _down(self) -> float:
        return math.log(self.nominal / self.low)


@dataclass(frozen=True)
class Band:
    """A projected number and the interval that 90 of 100 draws of its inputs lead to."""

    value: float
    low: float
    high: float


def exact(value: float) -> Samples:
    """Return samples of a number that is certain."""
    return np.full(1 + DRAWS, float(value))


def band(samples: Samples) -> Band:
    """Return nominal value and band of ``samples [1 + DRAWS]``."""
    low, high = np.quantile(samples[1:], (TAIL, 1 - TAIL))
    value = float(samples[0])
    return Band(value, min(float(low), value), max(float(high), value))


def _deviations(name: str, up: float, down: float) -> Samples:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    z = np.random.default_rng(seed).standard_normal(DRAWS) / _SIGMAS
    return np.concatenate([[0.0], np.where(z > 0, z * up, z * down)])


@dataclass(frozen=True)
class Cost:
    """How long something takes, and how that is known.

    seconds: samples ``[1 + DRAWS]``.
    evidence: share of the nominal time by source, for example ``{"roofline: ...": 0.9, "link: ...": 0.1}``.
    """

    seconds: Samples
    evidence: dict[str, float]

    @classmethod
    def of(cls, seconds: Samples, evidence: str) -> Cost:
        """Return a cost with one source."""
        return cls(seconds, {evidence: 1.0})

    @classmethod
    def nothing(cls) -> Cost:
        """Return the cost of doing nothing."""
        return cls(exact(0.0), {})

    def __add__(self, other: Cost) -> Cost:
        return total([self, other])

    def times(self, factor: float) -> Cost:
        """Return the cost of doing this ``factor`` times."""
        return Cost(self.seconds * factor, self.evidence)


def total(costs: list[Cost]) -> Cost:
    """Return the cost of doing one after the other."""
    if not costs:
        return Cost.nothing()
    seconds = np.sum([cost.seconds for cost in costs], axis=0)
    return Cost(seconds, shares([(cost.evidence, float(cost.seconds[0])) for cost in costs]))


def shares(parts: list[tuple[dict[str, float], float]]) -> dict[str, float]:
    """Return the evidence of ``parts``, each weighted by its seconds; the shares add up to 1."""
    weights: dict[str, float] = {}
    for evidence, seconds in parts:
        for source, share in evidence.items():
            weights[source] = weights.get(source, 0.0) + share * seconds
    whole = sum(weights.values())
    return {source: weight / whole for source, weight in weights.items()} if whole > 0 else weights
