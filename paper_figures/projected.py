"""What the tables and figures of projections share: cells with bands, published values beside ours, evidence."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from paper_figures import common, markdown, style
from paper_figures.published import claim

DONE = "done"
SCALE = {"s": (1.0, "s"), "tokens/s": (1e-3, "k tokens/s"), "share": (100.0, "%"), "B": (1e-9, "GB")}
"""Factor and unit in which a quantity is shown, by its own unit."""


def rows_of(frame: pd.DataFrame, *keys: str) -> list[tuple[dict[str, Any], pd.DataFrame]]:
    """Return each distinct combination of ``keys`` with its rows, in order of first appearance."""
    found = []
    for values in common.distinct(frame, *keys):
        mine = frame
        for key, value in zip(keys, values, strict=True):
            column = mine[key]
            mine = mine.loc[column.isna() if value is None else (column == value).fillna(False).astype(bool)]
        found.append((dict(zip(keys, values, strict=True)), mine))
    return found


def cell(rows: pd.DataFrame, quantity: str, digits: int = 3, *, ratio: bool = False) -> str:
    """Return a value with its band; instead of one the status of the case."""
    mine = common.where(rows, quantity=quantity)
    bad = [status for (status,) in common.distinct(rows, "status") if status != DONE]
    without = bad[0] if bad else markdown.DASH
    if mine.empty:
        return without
    row = common.records(mine)[0]
    names = ("ratio", "ratio_low", "ratio_high") if ratio else ("value", "low", "high")
    factor = 1.0 if ratio else SCALE[str(row["unit"])][0]
    value, low, high = (float(row[name]) * factor for name in names)
    if not math.isfinite(value):
        return without
    if not math.isfinite(low):
        return markdown.number(value, digits)
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def note(rows: pd.DataFrame) -> str:
    """Return what the experiment's file says about the grid of ``rows``; empty if that is nothing."""
    found = [str(text) for (text,) in common.distinct(rows, "note") if not common.is_missing(text)]
    return found[0] if found else ""


def gigabytes(rows: pd.DataFrame, quantity: str) -> str:
    """Return planned bytes in decimal GB."""
    values = common.numbers(common.where(rows, quantity=quantity), "value")
    return markdown.number(values[0] / 1e9, 1) if values.size else markdown.DASH


def reasons(frame: pd.DataFrame) -> str:
    """Return one line per case without times, with its reason; empty if there is none."""
    bad = frame.loc[~frame["status"].isin([DONE]) & (frame["grid"] != "claims")]
    keys = ("model_name", "optimizer_name", "system_name", "dp", "tp", "hardware", "status", "reason")
    lines = []
    for values in common.distinct(bad, *keys):
        row = dict(zip(keys, values, strict=True))
        mesh = common.mesh_label(row["dp"], row["tp"])
        named = f"{row['model_name']}, {row['optimizer_name']}, {row['system_name']}, {mesh}, {row['hardware']}"
        lines.append(common.bullet(markdown.literal(named), row["status"], row["reason"]))
    return "\n".join(["## Cells without a number\n", *lines]) if lines else ""


def claims(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown table of published values beside ours, with the ratio of the two and why they may differ."""
    mine = common.where(frame, grid="claims")
    rows = []
    for key, found in rows_of(mine, "varied", "quantity"):
        name = str(key["varied"])
        baseline, value = claim(published, name)
        system = common.records(found)[-1]
        theirs = baseline / value if math.isfinite(baseline) and value else math.nan
        if "times" in [unit for (unit,) in common.distinct(common.where(published, id=name), "unit")]:
            theirs = value  # published as a speed-up
        unit = str(system["unit"])
        factor = SCALE[unit][0]
        shown = " -> ".join(_value(row, factor) for row in common.records(found))
        texts = [_pair(baseline, value), markdown.number(theirs, 2), f"{shown} {SCALE[unit][1]} [{system['kind']}]"]
        ours = float(system["ratio"])
        if math.isfinite(ours):
            texts.append(f"{ours:.2f} [{system['ratio_low']:.2f}, {system['ratio_high']:.2f}]")
            texts.append(markdown.number(ours / theirs if math.isfinite(theirs) else math.nan, 2))
        else:
            single = float(system["value"]) * factor / value if value else math.nan
            texts += [markdown.DASH, markdown.number(single, 2)]
        if not system["comparable"]:
            texts[-1] = "not comparable"
        quantity = {"rest": "iteration less optimizer"}.get(str(key["quantity"]), str(key["quantity"]))
        what = f"{quantity}, {system['model']}, {system['optimizer']}, DP{system['dp']} x TP{system['tp']}"
        rows.append([name, what.replace("_", " "), *texts, str(system["reason"])])
    header = [
        "claim",
        "what",
        "published",
        "ratio",
        "ours",
        "ratio",
        "ours / published",
        "why they may differ",
    ]
    return "## Beside the published values\n\n" + markdown.table(header, rows) if rows else ""


def evidence(frame: pd.DataFrame, quantity: str = "iteration") -> str:
    """Return the Markdown table of what the projected times rest on: the share of ``quantity`` by source."""
    shares: dict[tuple[str, str], list[float]] = {}
    cases = 0
    for row in common.records(common.where(frame, quantity=quantity)):
        if common.is_missing(row["evidence"]) or common.is_missing(row["hardware"]):
            continue
        cases += 1
        kind = str(row["hardware"]).rpartition("x")[0]
        for source, share in json.loads(str(row["evidence"])).items():
            shares.setdefault((kind, source), []).append(100 * share)
    rows = [
        [kind, source, f"{min(found):.0f} to {max(found):.0f} %", str(len(found))]
        for (kind, source), found in sorted(shares.items(), key=lambda item: (item[0][0], -max(item[1])))
    ]
    header = ["hardware", "source", f"share of the {quantity.replace('_', ' ')}", "projections"]
    return f"## What the times rest on ({cases} projections)\n\n" + markdown.table(header, rows) if rows else ""


def errors(rows: pd.DataFrame, factor: float = 1.0, *, ratio: bool = False) -> tuple[list[float], list[list[float]]]:
    """Return values and the distances to the ends of their bands ``[2, n]``, as matplotlib's error bars take them."""
    names = ("ratio", "ratio_low", "ratio_high") if ratio else ("value", "low", "high")
    value, low, high = (common.numbers(rows, name) * factor for name in names)
    return list(value), [list(value - low), list(high - value)]


def numberless(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the cases without a number: one each, with the status."""
    return frame.loc[frame["status"] != DONE]


def mark_numberless(axis: Axes, places: Sequence[float], colour: style.Colour, height: float = 0.03) -> None:
    """Draw a small cross for each case without a number at ``height``, a share of the axis from its lower edge."""
    axis.plot(
        places,
        [height] * len(places),
        "x",
        markersize=3.5,
        color=colour,
        transform=axis.get_xaxis_transform(),
        zorder=4,
    )


def numberless_handle(frame: pd.DataFrame) -> list[Line2D]:
    """Return the legend's entry of the crosses, which says what they stand for; none if ``frame`` has no such case."""
    found = [str(status) for (status,) in common.distinct(numberless(frame), "status")]
    look = {"marker": "x", "linestyle": "", "markersize": 3.5, "color": "0.3"}
    return [style.line("at the lower edge: " + " or ".join(found), look)] if found else []


def subtitle(frame: pd.DataFrame) -> str:
    """Return what a figure's marks are."""
    return "Projected; marks: nominal, lines: band that 90 of 100 draws of the inputs lead to"


def hardware_line(frame: pd.DataFrame) -> str:
    """Return sequence, batch and hardware of the projections as a sentence."""
    kinds = sorted({str(h).rpartition("x")[0] for (h,) in common.distinct(frame, "hardware") if h is not None})
    sequences = sorted({int(s) for (s,) in common.distinct(frame, "sequence") if s is not None})
    return f"Hardware {', '.join(kinds)} (experiments/hardware/), {', '.join(map(str, sequences))} tokens a sequence."


def _value(row: dict[str, Any], factor: float) -> str:
    if row["status"] != DONE:
        return str(row["status"])
    if not math.isfinite(row["value"]):
        return markdown.DASH
    return f"{row['value'] * factor:.3f} [{row['low'] * factor:.3f}, {row['high'] * factor:.3f}]"


def _pair(baseline: float, value: float) -> str:
    texts = [f"{number:g}" for number in (baseline, value) if math.isfinite(number)]
    return " -> ".join(texts) or markdown.DASH


def order(names: Sequence[str]) -> list[str]:
    """Return distinct names in order of first appearance."""
    return list(dict.fromkeys(names))
