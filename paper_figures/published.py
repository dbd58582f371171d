"""The papers' numbers, to stand beside ours as a kind of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from paper_figures import common, markdown

COLUMNS = ("id", "quantity", "model", "gpus", "baseline_system", "baseline_value", "value", "unit", "kind", "source")


def claim(published: pd.DataFrame, name: str) -> tuple[float, float]:
    """Return the baseline's and the system's value of one claim, NaN where nothing was published."""
    rows = common.where(published, id=name)
    if rows.empty:
        return math.nan, math.nan
    return float(common.numbers(rows, "baseline_value")[0]), float(common.numbers(rows, "value")[0])


def block(published: pd.DataFrame, names: Sequence[str], subject: str = "Canzona's") -> str:
    """Return the Markdown section that quotes the claims ``names``; empty if there are none.

    subject: whose value is set against the baseline's, as a heading.
    """
    rows = []
    for values in common.distinct(published, *COLUMNS):
        row = dict(zip(COLUMNS, values, strict=True))
        if row["id"] in names:
            setup = " on ".join(str(v) for v in (row["model"], _gpus(row["gpus"])) if v)
            numbers = [
                markdown.DASH if row["baseline_value"] is None else _text(row["baseline_value"], row["unit"]),
                _text(row["value"], row["unit"]),
            ]
            rows.append(
                [row["id"], row["quantity"], setup, row["baseline_system"] or markdown.DASH, *numbers, row["source"]]
            )
    if not rows:
        return ""
    header = ["claim", "quantity", "setup", "baseline", "baseline's", subject, "source"]
    return "## For comparison (published)\n\n" + markdown.table(header, rows)


def _gpus(count: float | None) -> str:
    return "" if count is None else f"{int(count)} GPUs"


def _text(value: float | None, unit: str | None) -> str:
    """A number with its unit; a claim without a number has its words in the unit's place."""
    return unit or markdown.DASH if value is None else f"{value:g} {unit or ''}".strip()
