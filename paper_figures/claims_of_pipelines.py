"""What the ``pipeline_projection`` experiment says about published claims (R6b, R11 to R13, R16, R21)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from paper_figures import common
from paper_figures.findings import About, Finding, joined
from paper_figures.statistics import Estimate

Row = dict[str, Any]
COMPARED = {"time per iteration": "R6b", "memory of a card": "R11", "throughput": "R12", "fewer iterations": "R13"}
COMPARED |= {"memory saved": "R16a", "computation added": "R16b"}
"""Start of a quantity, as in the published table, and the claim that it is about."""
TABLES = {
    "R21a": ("rtx3090", "llama-7b", (4, 8), 8),
    "R21b": ("a100-40", "llama-13b", (8, 16), 16),
    "R21c": ("a100-80", "llama-65b", (16, 32), 32),
}
"""Card, model, numbers of stages and batch of a row of the article's table."""
SYNCHRONOUS, ROTATION = "1f1b-flush", "rotation"


def pipeline_projection(frame: pd.DataFrame) -> list[Finding]:
    """Return the findings on the claims that the experiment's file names, in its order, and on R21 (what fits)."""
    found = [*_named(frame), *(f for claim in TABLES for f in _largest(frame, claim))]
    missing = [c for c in COMPARED.values() if c not in {f.claim for f in found}]
    return found + [About("projected", "").missing(c, "not projected on this tier") for c in missing]


def _named(frame: pd.DataFrame) -> Iterator[Finding]:
    rows = common.records(common.where(frame, sweep="claim"))
    pairs: list[list[Row]] = []
    for row in rows:  # a claim's baseline stands before its value
        follows = pairs and pairs[-1][-1]["part"] == "baseline" and row["part"] == "value"
        if follows and pairs[-1][-1]["quantity"] == row["quantity"]:
            pairs[-1].append(row)
        else:
            pairs.append([row])
    for pair in pairs:
        claim = next((c for start, c in COMPARED.items() if str(pair[-1]["quantity"]).startswith(start)), None)
        if claim is not None:
            yield from _compared(frame, claim, pair)


def _compared(frame: pd.DataFrame, claim: str, pair: list[Row]) -> Iterator[Finding]:
    ours = pair[-1]
    scale = ", ".join(str(ours[k]) for k in ("case_name", "method_name", "policy_name") if isinstance(ours[k], str))
    about = About(str(ours["kind"]), scale, note=str(ours["reason"]))
    if any(row["status"] != common.DONE or not math.isfinite(float(row["value"])) for row in pair):
        yield about.missing(
            claim, f"{joined([row['status'] for row in pair if row['status'] != common.DONE])}; {about.note}"
        )
        return
    numbers = [Estimate(*(float(row[k]) for k in ("value", "low", "high")), n=0) for row in pair]
    for row, number in zip(pair, numbers, strict=True):
        yield about.found(claim, "baseline" if row["part"] == "baseline" else "value", number, str(row["unit"]))
    if (effect := _effect(frame, claim, pair, numbers)) is not None:
        yield about.found(claim, "effect", effect, "times")


def _effect(frame: pd.DataFrame, claim: str, pair: list[Row], numbers: list[Estimate]) -> Estimate | None:
    ours = numbers[-1]
    if claim == "R6b":
        return ours
    if claim == "R11":  # what the card has over what rotation needs: above 1 it fits
        own = common.where(frame, sweep="case", case=pair[-1]["case"], quantity="card")
        cards = common.numbers(own, "value")
        return Estimate(float(cards[0]) / 1e9 / ours.value, math.nan, math.nan, 0) if cards.size else None
    if claim == "R12" and len(pair) == 2:
        return Estimate(numbers[0].value / ours.value, math.nan, math.nan, 0)
    if claim == "R16a":  # bytes without recomputing over those with it
        return Estimate(100 / (100 - ours.value), math.nan, math.nan, 0) if ours.value < 100 else None
    if claim == "R16b":
        return Estimate(*(1 + x / 100 for x in (ours.value, ours.low, ours.high)), n=0)
    return None


def _largest(frame: pd.DataFrame, claim: str) -> Iterator[Finding]:
    """Return the largest microbatch of rotation at the larger number of stages; no sequence fits if it is 0."""
    card, model, stages, batch = TABLES[claim]
    rows = common.where(frame, sweep="largest", hardware=card, model=model)
    cells = common.distinct(rows, "method", "stages", "value")
    sizes = {(str(m), int(p)): float(v) for m, p, v in cells if v is not None}
    about = About("planned", f"{model}, {card}, P = {stages[-1]}")
    if not all((ROTATION, p) in sizes for p in stages):
        yield about.missing(claim, "not planned on this tier")
        return
    words = [
        f"P = {p}: rotation {sizes[ROTATION, p]:.0f}, 1F1B with flush {sizes.get((SYNCHRONOUS, p), 0):.0f}"
        for p in stages
    ]
    sequence = joined([s for (s,) in common.distinct(rows, "sequence")])
    text = f"largest microbatch in sequences of {sequence} tokens, stage recomputed, bfloat16; {'; '.join(words)}"
    most = sizes[ROTATION, stages[-1]]
    yield about.found(claim, "value", most, "sequences", text)
    yield about.found(claim, "effect", most / batch, "times", f"effect: over the article's batch of {batch}")
