"""What the ``hessian`` experiment says about published claims (R8, R17a)."""

from __future__ import annotations

import pandas as pd

from paper_figures import common
from paper_figures import hessian as figures
from paper_figures.findings import About, Finding, inverse, joined, runs_of, why_not
from paper_figures.statistics import Estimate, median


def hessian(frame: pd.DataFrame) -> list[Finding]:
    """Return the findings on R8 (distance from diagonal, unrotated and rotated) and R17a (attention over MLP).

    n is the number of seeds, not of matrices: those of one seed share a training.
    """
    seeds = len(common.distinct(common.where(frame, status=common.DONE), "seed"))
    models = joined([model for (model,) in common.distinct(frame, "model")])
    updates = joined([f"{u} updates" for (u,) in common.distinct(frame, "updates")])
    about = About("measured", f"{models}, {updates}", runs_of(frame))
    return [*_norms(frame, about, seeds), *_scales(frame, about, seeds)]


def _norms(frame: pd.DataFrame, about: About, seeds: int) -> list[Finding]:
    before, after = (median(list(figures.values(frame, figures.NORM, b).values())) for b in ("before", "after"))
    ratio = figures.ratio(frame, "after")
    if not (before.n and after.n and ratio.n):
        return [about.missing("R8", why_not(frame, "the Hessian's norm"))]
    count, total = figures.lower(frame, "after")
    control = figures.ratio(frame, "random").value
    text = f"lower in {count} of {total} matrices; in random bases {control:.2f} times the unrotated norm"
    return [
        about.found("R8", "baseline", _of(before, seeds)),
        about.found("R8", "value", _of(after, seeds), note=text),
        about.found("R8", "effect", _of(inverse(ratio), seeds), "times"),
    ]


def _scales(frame: pd.DataFrame, about: About, seeds: int) -> list[Finding]:
    ratio = _of(figures.scale_ratio(frame), seeds)
    if not figures.scale_ratio(frame).n:
        return [about.missing("R17a", why_not(frame, "the largest eigenvalues"))]
    return [about.found("R17a", part, ratio, "times") for part in ("value", "effect")]


def _of(found: Estimate, seeds: int) -> Estimate:
    return Estimate(found.value, found.low, found.high, n=seeds)
