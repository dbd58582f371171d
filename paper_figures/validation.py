"""Predicted beside measured, on the machine at hand: the ``validation`` experiment."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from impl.harness import validation_verdict
from paper_figures import common, markdown, projected, style

QUANTITIES = {
    "iteration": "iteration",
    "forward_backward": "forward + backward",
    "optimizer_step": "optimizer step",
    "update": "pipeline update",
}


def main_table(frame: pd.DataFrame) -> str:
    """Return the Markdown table of the errors by experiment and quantity."""
    rows = []
    for key, mine in projected.rows_of(frame, "experiment", "method", "quantity"):
        if key["quantity"] not in QUANTITIES:
            continue
        errors = _errors(mine)
        own = _errors(mine.loc[~_shared(mine)])
        name = f"{QUANTITIES[str(key['quantity'])]}{' (replay)' if key['method'] == 'replay' else ''}"
        rows.append([str(key["experiment"]), name, str(len(errors)), *_summary(errors), *_summary(own)[:1]])
    for method, name, what in (
        ("timeline", "all of the timeline", "iteration, optimizer step, update"),
        ("replay", "all replays", "optimizer step"),
    ):
        judged = validation_verdict.judged_errors(frame, method)
        if len(judged):
            own = _errors(judged.loc[~_shared(judged)])
            rows.append([name, what, str(len(judged)), *_summary(_errors(judged)), *_summary(own)[:1]])
    header = ["experiment", "quantity", "configurations", "median |error|", "largest |error|", "median error"]
    return markdown.table([*header, "median |error|, own cores"], rows)


def verdicts(frame: pd.DataFrame) -> str:
    """Return in words whether the limits hold."""
    lines = []
    for method, name in (("timeline", "Timeline"), ("replay", "Rank replay")):
        verdict = validation_verdict.verdict(frame, method)
        if verdict is not None:
            text = "within" if verdict.holds else "**outside**"
            lines.append(f"- {name}: {verdict}: {text} {verdict.limit:.0%}.")
    agreed, pairs = order(frame)
    if pairs:
        lines.append(f"- Order of the systems: {agreed} of {pairs} pairs whose measured intervals do not overlap.")
    return "\n".join(lines)


def order(frame: pd.DataFrame) -> tuple[int, int]:
    """Return in how many of the pairs of systems with measured intervals apart the projection has the same order."""
    agreed = pairs = 0
    rows = common.where(frame, method="timeline", status=common.DONE)
    for key, mine in projected.rows_of(rows, "run", "quantity"):
        if key["quantity"] not in ("optimizer_step", "iteration"):
            continue
        for a, b in combinations(common.records(mine), 2):
            first, second = (a, b) if a["measured"] < b["measured"] else (b, a)
            if first["measured_high"] < second["measured_low"]:
                pairs += 1
                agreed += bool(first["predicted"] < second["predicted"])
    return agreed, pairs


def table(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown document of the experiment; nothing published is about it."""
    blocks = [
        "Predicted times are **projected** from kernel times that were measured on this machine with as many busy "
        "processes as the run has; measured times are those of the runs, median (pipelines: mean) and quartiles. "
        "Error: predicted over measured, less 1. Brackets of predictions: the band that 90 of 100 draws of the "
        "kernels' spread lead to. Where ranks share cores (*shared*), communication and computation of several "
        "ranks compete, which kernels measured side by side only approximate.",
        verdicts(frame),
        main_table(frame),
        "## Every configuration\n",
        _all(frame),
        _left_out(frame),
    ]
    return markdown.document("Projection against measurement", *blocks)


def figure(frame: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Return the figure: predicted against measured, a panel per quantity, both with their intervals."""
    style.apply()
    rows = common.where(frame, status=common.DONE)
    rows = rows.loc[rows["quantity"].isin(list(QUANTITIES))]
    rows = rows.loc[np.isfinite(common.numbers(rows, "measured")) & np.isfinite(common.numbers(rows, "predicted"))]
    names = [name for name in QUANTITIES if name in set(rows["quantity"])]
    names = [name for name in QUANTITIES if name in set(rows["quantity"])]
    limit = float(frame["limit"].iloc[0])
    result = Figure(figsize=(style.TWO_COLUMNS_IN, 2.5), layout="constrained")
    axes = result.subplots(1, max(len(names), 1), squeeze=False)[0]
    experiments = projected.order([str(v) for v in rows["experiment"]])
    colours = style.palette([(name, name) for name in experiments], known=())
    for axis, name in zip(axes, names, strict=False):  # without any there is one empty panel
        mine = common.where(rows, quantity=name)
        ends = [v for c in ("measured", "predicted") for v in common.numbers(mine, c)]
        low, high = 0.7 * min(ends), 1.4 * max(ends)
        span = np.array([low, high])
        axis.fill_between(span, span * (1 - limit), span * (1 + limit), color="0.9", linewidth=0, zorder=0)
        axis.plot(span, span, color="0.5", linewidth=0.8, zorder=1)
        for key, own in projected.rows_of(mine, "experiment", "method", "shared_cores"):
            _points(axis, own, key, colours)
        axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), xlabel="measured, s")
        axis.set_title(QUANTITIES[name])
        for line in (axis.xaxis, axis.yaxis):
            line.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            line.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            line.set_minor_locator(NullLocator())
        axis.set_aspect("equal")
    axes[0].set_ylabel("predicted, s")
    handles: list[Any] = [
        style.line(name, {"marker": "o", "linestyle": "", "color": colours[name]}) for name in experiments
    ]
    handles.append(style.line("ranks share cores", {"marker": "o", "linestyle": "", "color": "0.4", "mfc": "white"}))
    handles.append(style.line("replay", {"marker": "x", "linestyle": "", "color": "0.4"}))
    handles.append(style.patch(f"within {limit:.0%}", (0.9, 0.9, 0.9)))
    result.legend(handles=handles, loc="outside lower center", ncols=6)
    return result


def _points(axis: Any, rows: pd.DataFrame, key: dict[str, Any], colours: dict[str, style.Colour]) -> None:
    measured, low, high = (common.numbers(rows, c) for c in ("measured", "measured_low", "measured_high"))
    value, below = projected.errors(rows.assign(value=rows["predicted"]))
    colour = colours[str(key["experiment"])]
    replay = key["method"] == "replay"
    axis.errorbar(
        measured,
        value,
        xerr=[np.maximum(measured - low, 0), np.maximum(high - measured, 0)],
        yerr=np.maximum(below, 0),
        fmt="x" if replay else "o",
        markersize=3.5,
        linewidth=0.6,
        color=colour,
        markerfacecolor="white" if key["shared_cores"] else colour,
        zorder=3 if replay else 2,
    )


def _all(frame: pd.DataFrame) -> str:
    rows = []
    for row in common.records(common.where(frame, status=common.DONE)):
        where = "" if common.is_missing(row["dp"]) else common.mesh_label(int(row["dp"]), int(row["tp"]))
        where = where or f"P = {int(row['stages'])}"
        shared = " (shared)" if not common.is_missing(row["shared_cores"]) and row["shared_cores"] else ""
        what = QUANTITIES.get(str(row["quantity"]), str(row["quantity"]))
        rows.append(
            [
                str(row["experiment"]),
                f"{row['optimizer']}, {row['system_name']}, {where}{shared}",
                f"{what}{' (replay)' if row['method'] == 'replay' else ''}",
                _milliseconds(row, "measured", "measured_low", "measured_high"),
                _milliseconds(row, "predicted", "low", "high"),
                f"{row['error']:+.0%}" if math.isfinite(row["error"]) else markdown.DASH,
            ]
        )
    return markdown.table(["experiment", "configuration", "what", "measured, ms", "predicted, ms", "error"], rows)


def _left_out(frame: pd.DataFrame) -> str:
    bad = frame.loc[frame["status"] != common.DONE]
    lines = [
        common.bullet(markdown.literal(f"{run}, {system}"), status, reason)
        for run, system, status, reason in common.distinct(bad, "run", "system_name", "status", "reason")
    ]
    return "\n".join(["## Without a comparison\n", *lines]) if lines else ""


def _errors(rows: pd.DataFrame) -> np.ndarray:
    values = common.numbers(rows, "error")
    return values[np.isfinite(values)]


def _summary(errors: np.ndarray) -> list[str]:
    if not errors.size:
        return [markdown.DASH] * 3
    size = np.abs(errors)
    return [f"{np.median(size):.1%}", f"{size.max():.1%}", f"{np.median(errors):+.1%}"]


def _shared(rows: pd.DataFrame) -> np.ndarray:
    return rows["shared_cores"].fillna(False).to_numpy(dtype=bool)


def _milliseconds(row: dict[str, Any], *names: str) -> str:
    value, low, high = (1e3 * float(row[name]) for name in names)
    if not math.isfinite(low):
        return markdown.number(value, 1)
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"
