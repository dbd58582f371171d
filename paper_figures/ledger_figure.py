"""The ledger of claims as a figure: ours over the published number, by claim."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from paper_figures import common, style, verdicts

MARKS = {verdicts.REPRODUCED: "o", verdicts.SAME: "s", verdicts.NOT: "X", verdicts.UNTESTED: "D"}
PLACES = {verdicts.REPRODUCED: 2, verdicts.SAME: 0, verdicts.NOT: 3, verdicts.UNTESTED: 7}
"""Of each verdict's colour in the palette: green, blue, vermilion, grey."""
TICKS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


def figure(frame: pd.DataFrame) -> Figure:
    """Return the forest plot of the claims with a number on both sides: ratio, interval, and the verdict as a mark.

    What is zero or negative, or its interval's end, is at the left edge; a number there is an arrow.
    """
    style.apply()
    rows = [row for row in common.records(frame) if math.isfinite(row["ratio"])]
    result = Figure(figsize=(style.ONE_COLUMN_IN, 1.3 + 0.16 * max(len(rows), 3)), layout="constrained")
    axis = result.subplots()
    colours = {word: sns.color_palette("colorblind")[place] for word, place in PLACES.items()}
    left = _scale(axis, rows)
    axis.axvspan(1 - verdicts.TOLERANCE, 1 + verdicts.TOLERANCE, color="0.9", zorder=0)
    axis.axvline(1, color="black", linewidth=0.6, zorder=1)
    for position, row in enumerate(rows):
        look = {"color": colours[row["verdict"]], "zorder": 3}
        low, high = row["ratio_low"], row["ratio_high"]
        if math.isfinite(low) and low < high:
            axis.plot([max(low, left), max(high, left)], [position] * 2, linewidth=1.2, **look)
        inside = row["ratio"] > left
        mark = {"marker": MARKS[row["verdict"]] if inside else "<", "markersize": 4.5, "mec": "white", "mew": 0.4}
        axis.plot(max(row["ratio"], left), position, clip_on=inside, **mark, **look)
    axis.set_yticks(range(len(rows)), [f"{row['id']}, {row['kind']}" for row in rows])
    axis.set_ylim(max(len(rows), 1) - 0.4, -0.6)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(f"ours / published ({len(rows)} of {len(frame)} claims have both)")
    found = [word for word in verdicts.VERDICTS if any(row["verdict"] == word for row in rows)]
    handles = [
        style.line(w, {"color": colours[w], "marker": MARKS[w], "linestyle": "", "markersize": 4.5}) for w in found
    ]
    if handles:
        result.legend(handles=handles, loc="outside upper center", ncols=2)
    else:
        axis.text(0.5, 0.5, "no number of ours yet", transform=axis.transAxes, ha="center", fontsize=7, style="italic")
    return result


def _scale(axis: Axes, rows: list[dict[str, Any]]) -> float:
    """Make the axis logarithmic over what is positive, down to the first tick at most; returns its left edge."""
    numbers = [row[name] for row in rows for name in ("ratio", "ratio_low", "ratio_high")]
    known = [x for x in numbers if math.isfinite(x) and x > TICKS[0]]
    left, right = min([0.4, *(x / 1.2 for x in known)]), max([2.5, *(1.2 * x for x in known)])
    axis.set_xscale("log")
    axis.set_xlim(left, right)
    axis.xaxis.set_major_locator(FixedLocator(TICKS))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return left
