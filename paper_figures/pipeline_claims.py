"""Published numbers on pipelines beside ours (the ``pipeline_projection`` experiment)."""

from __future__ import annotations

import math

import pandas as pd

from paper_figures import common, markdown


def claims_table(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown table of published numbers with ours, their ratio, and why they need not agree."""
    rows = common.where(frame, sweep="claim")
    if rows.empty:
        return ""
    header = ["claim", "what", "part", "published", "ours", "ours / published", "of", "what to know"]
    out = []
    for row in rows.to_dict("records"):
        claimed = common.where(published, id=row["claim"], quantity=row["quantity"])
        column = "baseline_value" if row["part"] == "baseline" else "value"
        value = float(common.numbers(claimed, column)[0]) if len(claimed) else math.nan
        unit = str(claimed["unit"].iloc[0]) if len(claimed) else ""
        words = markdown.DASH if row["part"] == "baseline" else unit or markdown.DASH
        comparable = row["unit"] == unit and math.isfinite(row["value"]) and value > 0
        setup = ", ".join(str(row[k]) for k in ("case_name", "method_name", "policy_name") if _is_text(row[k]))
        cells = [
            f"{value:g} {unit}" if math.isfinite(value) else words,
            _ours(row),
            f"{row['value'] / value:.2f}" if comparable else markdown.DASH,
            setup or markdown.DASH,
            str(row["reason"]),
        ]
        out.append([row["claim"], row["quantity"], row["part"], *cells])
    return markdown.table(header, out)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _ours(row: dict[str, object]) -> str:
    value, low, high = (float(str(row[k])) for k in ("value", "low", "high"))
    if row["status"] != common.DONE:
        return str(row["status"])
    if not math.isfinite(value):
        return "see what to know"
    band = "" if not low < high else f" [{low:.3g}, {high:.3g}]"
    return f"{value:.3g}{band} {row['unit']} [{row['kind']}]"
