"""What the plans of the ``balance`` experiment say about published claims (C1, C2, C7, C11)."""

from __future__ import annotations

import math

import pandas as pd

from paper_figures import balance as figures
from paper_figures import common
from paper_figures.findings import About, Finding, Part, why_not
from paper_figures.statistics import Estimate

ADVISED = 0.8
"""Smallest alpha that the advice of C7 allows."""
PROXY, EXACT = "numel", "flops"
MODEL = "qwen3-32b"
"""Of claim C11."""


def balance(frame: pd.DataFrame) -> list[Finding]:
    """Return the findings on C1, C2 (ratios of ASC and Canzona), C7a, C7b (alpha) and C11 (cost that is balanced)."""
    return [*_point(frame), *_alpha(frame), *_cost(frame)]


def _point(frame: pd.DataFrame) -> list[Finding]:
    plans = figures.at_point(frame)
    about = About("planned", _scale(plans))
    found: list[Finding] = []
    parts: tuple[tuple[str, Part], ...] = (("asc", "baseline"), ("canzona", "value"))
    for claim, column in figures.CLAIMS.items():
        for system, part in parts:
            rows = common.where(plans, system=system)
            number = _single(rows, column)
            if math.isnan(number):
                found.append(about.missing(claim, why_not(rows, f"a plan of {system}")))
            else:
                found.append(about.found(claim, part, number, "ratio", _whole(rows) if claim == "C1" else ""))
        values = {f.part: f.value for f in found if f.claim == claim and f.known}
        if len(values) == 2:
            found.append(about.found(claim, "effect", values["baseline"] / values["value"], "times"))
    return sorted(found, key=lambda f: not f.known)


def _whole(rows: pd.DataFrame) -> str:
    return f"{rows['system_name'].iloc[0]} {_single(rows, figures.WHOLE):.2f} on whole matrices, which is the work done"


def _alpha(frame: pd.DataFrame) -> list[Finding]:
    plans = common.where(frame, sweep="alpha", status=common.DONE)
    loads = dict(zip(common.numbers(plans, "alpha"), common.numbers(plans, figures.WHOLE), strict=True))
    loads = {float(a): float(v) for a, v in loads.items() if math.isfinite(v)}
    about = About("planned", f"{_scale(plans)}, without fallback")
    if len(loads) < 2 or 1.0 not in loads:
        return [
            about.missing(c, why_not(common.where(frame, sweep="alpha"), "plans over alpha")) for c in ("C7a", "C7b")
        ]
    best = max(loads, key=lambda a: (-loads[a], a))
    others = min(v for a, v in loads.items() if a < 1.0)
    text = "by whole-matrix FLOPs per DP rank; effect: the best other alpha over alpha = 1"
    found = [
        about.found("C7a", "value", best, "alpha", text),
        about.found("C7a", "effect", others / loads[1.0], "times"),
    ]
    if not any(a < ADVISED for a in loads):
        return [*found, about.missing("C7b", f"no plan with alpha below {ADVISED:g} on this tier")]
    kept, low = ([v for a, v in loads.items() if (a >= ADVISED) == side] for side in (True, False))
    text = f"the best alpha below {ADVISED:g} over the worst from {ADVISED:g} on; above 1 the advice holds"
    return [*found, about.found("C7b", "effect", min(low) / max(kept), "times", text)]


def _cost(frame: pd.DataFrame) -> list[Finding]:
    plans = common.where(frame, sweep="cost", model=MODEL)
    about = About("planned", _scale(plans))
    loads = {cost: _single(common.where(plans, cost=cost), figures.WHOLE) for cost in (PROXY, EXACT)}
    if not all(math.isfinite(v) for v in loads.values()):
        return [about.missing("C11", why_not(plans, "plans by numel and by FLOPs"))]
    text = "largest over mean FLOPs; both costs give this plan, as the smaller side of every matrix is the hidden size"
    if loads[PROXY] != loads[EXACT]:
        text = "largest over mean FLOPs"
    exactly = loads[EXACT] / loads[PROXY]
    return [
        about.found("C11", "value", loads[PROXY], "largest/mean", text),
        about.found("C11", "baseline", loads[EXACT], "largest/mean"),
        about.found("C11", "effect", Estimate(exactly, exactly, exactly, 0), "times"),
    ]


def _single(rows: pd.DataFrame, column: str) -> float:
    done = common.where(rows, status=common.DONE)
    return float(common.numbers(done, column)[0]) if len(done) else math.nan


def _scale(rows: pd.DataFrame) -> str:
    found = common.distinct(rows, "model_name", "dp", "tp")
    return ", ".join(f"{model}, {common.mesh_label(dp, tp)}" for model, dp, tp in found[:1])
