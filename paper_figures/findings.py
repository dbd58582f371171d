"""What a tidy table says about a published claim: one number with its interval, kind, scale and runs.

The functions that find them (``claims_of_*``) are pure: a table in, findings out.  They do not judge; the rules do
(:mod:`paper_figures.verdicts`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd

from paper_figures import common
from paper_figures.statistics import Estimate

Part = Literal["value", "baseline", "effect"]
EXACT = ("planned", "projected")
"""Kinds of numbers that repeating changes nothing about."""


@dataclass(frozen=True)
class Finding:
    """One number of ours on a claim.

    claim: id in ``experiments/claims.yaml``.
    part: ``value`` and ``baseline`` as in the published table, or ``effect``: how many times better, larger or more,
        above 1 in the direction of the claim.
    low, high: its interval (95 % or the table's own) or the band of a projection; NaN without one.
    n: seeds, repetitions or runs that a measured number rests on, 0 for planned and projected ones.
    scale: what it was found on.  note: what to know of it; where ``value`` is NaN, why.  runs: ids.
    """

    claim: str
    part: Part
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    unit: str = ""
    n: int = 0
    kind: str = ""
    scale: str = ""
    note: str = ""
    runs: tuple[str, ...] = ()

    @property
    def known(self) -> bool:
        """Whether there is a number."""
        return not math.isnan(self.value)


@dataclass(frozen=True)
class About:
    """What the findings of one table share; :meth:`found` and :meth:`missing` make them."""

    kind: str
    scale: str
    runs: tuple[str, ...] = ()
    note: str = ""

    def found(self, claim: str, part: Part, number: Estimate | float, unit: str = "", note: str = "") -> Finding:
        """Return the finding of a number; an estimate brings its interval and n."""
        e = number if isinstance(number, Estimate) else Estimate(number, math.nan, math.nan, 0)
        n = 0 if self.kind in EXACT else e.n
        text = "; ".join(t for t in (note, self.note) if t)
        return Finding(claim, part, e.value, e.low, e.high, unit, n, self.kind, self.scale, text, self.runs)

    def missing(self, claim: str, why: str) -> Finding:
        """Return the finding that there is no number, and why."""
        return Finding(claim, "value", kind=self.kind, scale=self.scale, note=why, runs=self.runs)


@dataclass(frozen=True)
class Answer:
    """What one experiment says of one claim at one scale.

    setup: how ours compares to the published setup (:data:`paper_figures.verdicts.SETUPS`).
    """

    experiment: str
    setup: str
    value: Finding | None = None
    baseline: Finding | None = None
    effect: Finding | None = None

    @property
    def known(self) -> bool:
        """Whether there is any number."""
        return any(part.known for part in self.parts)

    @property
    def parts(self) -> tuple[Finding, ...]:
        """The findings that there are."""
        return tuple(part for part in (self.value, self.baseline, self.effect) if part is not None)

    @property
    def main(self) -> Finding | None:
        """The finding that the ledger shows as ours: the value, else the effect."""
        known = [part for part in (self.value, self.effect, self.baseline) if part is not None and part.known]
        return known[0] if known else next(iter(self.parts), None)

    @property
    def scale(self) -> str:
        """What the numbers were found on."""
        return next((part.scale for part in self.parts if part.scale), "")

    @property
    def note(self) -> str:
        """What to know of the numbers, each said once."""
        return "; ".join(dict.fromkeys(part.note for part in self.parts if part.note))

    @property
    def runs(self) -> tuple[str, ...]:
        """Ids of the runs behind the numbers."""
        return tuple(dict.fromkeys(run for part in self.parts for run in part.runs))


def answers(found: Iterable[Finding], claim: str, experiment: str, setup: str) -> list[Answer]:
    """Return the answers of ``found`` to ``claim``: one for each scale, in order of first appearance."""
    groups: dict[str, dict[str, Finding]] = {}
    for finding in found:
        if finding.claim == claim:
            groups.setdefault(finding.scale, {}).setdefault(finding.part, finding)
    return [
        Answer(experiment, setup, parts.get("value"), parts.get("baseline"), parts.get("effect"))
        for parts in groups.values()
    ]


def runs_of(*frames: pd.DataFrame) -> tuple[str, ...]:
    """Return the distinct ids of runs, in order; none where a table has no runs."""
    ids = [str(run) for frame in frames if "run" in frame for (run,) in common.distinct(frame, "run") if run]
    return tuple(dict.fromkeys(ids))


def why_not(rows: pd.DataFrame, what: str) -> str:
    """Return why there is no number of ``what``: not run here, the statuses of its runs, or not known."""
    if rows.empty:
        return f"no run of {what} on this tier"
    bad = sorted({str(status) for (status,) in common.distinct(rows, "status")} - {common.DONE})
    if not bad:
        return f"{what}: the runs are done but do not have the number"
    reasons = [str(error) for (error,) in common.distinct(rows, "error") if error] if "error" in rows else []
    return f"{what}: {', '.join(bad)}" + (f" ({reasons[0]})" if reasons else "")


def scaled(found: Estimate, factor: float) -> Estimate:
    """Return an estimate in another unit."""
    return replace(found, value=factor * found.value, low=factor * found.low, high=factor * found.high)


def inverse(found: Estimate) -> Estimate:
    """Return one over an estimate of something positive."""
    with_ends = [1 / x if x else math.nan for x in (found.value, found.high, found.low)]
    return Estimate(*with_ends, n=found.n)


def saving(ratio: Estimate) -> Estimate:
    """Return ``100 (1 - ratio)``: percent less."""
    return Estimate(*(100 * (1 - x) for x in (ratio.value, ratio.high, ratio.low)), n=ratio.n)


def joined(names: Sequence[object]) -> str:
    """Return distinct names in order as a list in words."""
    return ", ".join(dict.fromkeys(str(name) for name in names))
