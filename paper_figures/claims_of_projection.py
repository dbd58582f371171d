"""What the ``projection`` experiment says about published claims (C3 to C5, C8 to C10, C13)."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from paper_figures import common
from paper_figures.findings import About, Finding
from paper_figures.projected import SCALE
from paper_figures.projection import SAME
from paper_figures.statistics import Estimate

CLAIMS = ("C3", "C4", "C5", "C9", "C10", "C13")
SPEEDUPS = ("C9", "C10")
"""Published as factors, so that the factor is the value."""
ENOUGH = 512e6
"""Bytes that C8 calls enough."""


def projection(frame: pd.DataFrame) -> list[Finding]:
    """Return the findings on the claims that the experiment's file names, and on C8a, C8b (micro-group capacity)."""
    return [f for claim in CLAIMS for f in _claim(frame, claim)] + _capacity(frame)


def _claim(frame: pd.DataFrame, claim: str) -> list[Finding]:
    rows = common.records(common.where(frame, grid="claims", varied=claim))
    if not rows:
        return [About("projected", "").missing(claim, "not projected on this tier")]
    system = rows[-1]
    about = About(str(system["kind"]), _scale(frame, system), note=str(system["reason"]))
    if any(row["status"] != common.DONE for row in rows):
        return [about.missing(claim, ", ".join(f"{r['system_name']}: {r['status']}" for r in rows))]
    factor, unit = SCALE[str(system["unit"])]
    ratio = Estimate(*(float(system[k]) for k in ("ratio", "ratio_low", "ratio_high")), n=0)
    if claim in SPEEDUPS:
        return [about.found(claim, "value", ratio, "times"), about.found(claim, "effect", ratio, "times")]
    names = ("value",) if len(rows) == 1 else ("baseline", "value")
    found = [
        about.found(claim, name, Estimate(*(factor * float(row[k]) for k in ("value", "low", "high")), n=0), unit)
        for name, row in zip(names, rows, strict=True)
    ]
    return found + ([about.found(claim, "effect", ratio, "times")] if len(rows) > 1 else [])


def _scale(frame: pd.DataFrame, row: dict[str, Any]) -> str:
    cases = common.where(frame, model=row["model"], optimizer=row["optimizer"], dp=row["dp"], tp=row["tp"])
    cards = [str(h) for (h,) in common.distinct(cases, "hardware") if h]
    card = f", {cards[0].rpartition('x')[0]}" if cards else ""
    return f"{row['model']}, {row['optimizer']}, {common.mesh_label(row['dp'], row['tp'])}{card}"


def _capacity(frame: pd.DataFrame) -> list[Finding]:
    """Return whether a larger capacity than C8's is faster, and whether it needs more memory."""
    grid = common.where(frame, grid="capacity", status=common.DONE)
    steps, held = (_by_capacity(common.where(grid, quantity=q)) for q in ("optimizer", "memory/micro_groups"))
    about = About("projected", _grid_scale(grid))
    within = [c for c in steps if c <= 1.05 * ENOUGH]  # MB or MiB is not said
    larger = [c for c in steps if c > 1.05 * ENOUGH]
    if not within or not larger:
        why = "no capacities on both sides of 512 MB on this tier"
        return [about.missing("C8a", why), about.missing("C8b", why)]
    at = max(within)
    enough = min(c for c in steps if all(steps[c] <= (1 + SAME) * steps[d] for d in steps if d > c))
    text = (
        f"smallest of {len(steps)} capacities that no larger one beats by {SAME:.0%}, in fp32 gradient shards per host "
        f"and source; effect: {min(larger) / 1e6:.0f} MB, the next above 512 MB, over it"
    )
    found = [
        about.found("C8a", "value", enough / 1e6, "MB", text),
        about.found("C8a", "effect", min(larger) / enough, "times"),
    ]
    planned = About("planned", about.scale)
    if not all(c in held and held[c] > 0 for c in (at, max(larger))):
        return [*found, planned.missing("C8b", "no bytes of micro-groups in the table")]
    sizes = ", ".join(f"{held[c] / 1e9:.1f} GB at {c / 1e6:.0f} MB" for c in (min(held), at, max(larger)))
    if held[at] == held[max(larger)]:
        return [*found, planned.missing("C8b", f"from {at / 1e6:.0f} MB on one micro-group holds all here ({sizes})")]
    text = f"buffers of micro-groups: {sizes}"
    return [*found, planned.found("C8b", "effect", held[max(larger)] / held[at], "times", text)]


def _by_capacity(rows: pd.DataFrame) -> dict[float, float]:
    pairs = zip(rows["varied"], common.numbers(rows, "value"), strict=True)
    found = {float(str(varied).partition("=")[2]): float(value) for varied, value in pairs}
    return {c: v for c, v in sorted(found.items()) if math.isfinite(v)}


def _grid_scale(rows: pd.DataFrame) -> str:
    found = common.distinct(rows, "model_name", "optimizer_name", "dp", "tp", "hardware")
    return ", ".join(f"{m}, {o}, {common.mesh_label(dp, tp)}, {str(h).rpartition('x')[0]}" for m, o, dp, tp, h in found)
