"""Optimizer step and efficiency over numbers of GPUs: the ``scaling`` experiment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from paper_figures import common, markdown, projected, style

GRIDS = {
    "dp": "More DP ranks, 4 sequences each, TP8",
    "dp-8b": "More DP ranks, 4 sequences each, TP8, Qwen3-8B",
    "tp": "TP against DP on 256 GPUs",
}


SHOWN = {
    "optimizer": ("Optimizer step, s", 3),
    "iteration": ("Iteration, s", 3),
    "exposed_communication": ("Exposed communication, s", 3),
    "mfu": ("MFU, %", 0),
}
"""Quantities of the tables, with heading and digits."""


def main_table(frame: pd.DataFrame) -> str:
    """Return the Markdown table of the optimizer step along the first sweep."""
    first = str(frame["grid"].iloc[0])
    return _sweep(common.where(frame, grid=first), "optimizer", 3)


def table(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown document of the experiment."""
    blocks = [
        "All times are **projected**: value and the band that 90 of 100 draws of the inputs lead to. "
        + projected.hardware_line(frame)
    ]
    for grid, title in GRIDS.items():
        rows = common.where(frame, grid=grid)
        if rows.empty:
            continue
        blocks += [f"## {title}", projected.note(rows)]
        for quantity, (label, digits) in SHOWN.items():
            blocks += [f"### {label}", _sweep(rows, quantity, digits)]
    blocks += [projected.evidence(frame), projected.reasons(frame)]
    return markdown.document("Scaling to 4096 GPUs", *blocks)


def figure(frame: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Return the figure: a panel per sweep and model for the optimizer step, and one for MFU below it."""
    style.apply()
    panels = [
        (grid, str(key["model_name"]), rows)
        for grid in GRIDS
        for key, rows in projected.rows_of(common.where(frame, grid=grid), "model_name")
    ]
    result = Figure(figsize=(style.TWO_COLUMNS_IN, 4.2), layout="constrained")
    axes = result.subplots(2, max(len(panels), 1), squeeze=False, sharey="row")
    colours = style.palette(common.systems(frame))
    for column, (grid, model, rows) in enumerate(panels):
        sweep = "tp" if grid == "tp" else "gpus"
        for line, (quantity, factor) in enumerate((("optimizer", 1.0), ("mfu", 100.0))):
            _draw(axes[line][column], rows, quantity, sweep, factor, colours)
        axes[0][column].set_title(model if sweep == "gpus" else f"{model}, 256 GPUs")
        if np.isfinite(common.numbers(common.where(rows, quantity="optimizer"), "value")).any():
            axes[0][column].set_yscale("log")  # an axis without any number cannot be logarithmic
        axes[1][column].set_xlabel("GPUs (TP8)" if sweep == "gpus" else "TP")
    axes[0][0].set_ylabel("optimizer step, s")
    axes[1][0].set_ylabel("MFU, %")
    axes[1][0].set_ylim(bottom=0)
    handles: list[Any] = [style.patch(name, colours[name]) for _, name in common.systems(frame)]
    handles += projected.numberless_handle(frame)
    result.legend(handles=handles, loc="outside lower center", ncols=4)
    result.suptitle("Projected; line: nominal, shade: band that 90 of 100 draws of the inputs lead to", fontsize=8)
    return result


def _sweep(frame: pd.DataFrame, quantity: str, digits: int) -> str:
    systems = [name for _, name in common.systems(frame)]
    rows = []
    for key, mine in projected.rows_of(frame, "model_name", "dp", "tp"):
        cells = [projected.cell(common.where(mine, system_name=name), quantity, digits) for name in systems]
        mesh = common.mesh_label(key["dp"], key["tp"])
        rows.append([str(key["model_name"]), str(key["dp"] * key["tp"]), mesh, *cells])
    return markdown.table(["model", "GPUs", "mesh", *systems], rows)


def _draw(
    axis: Axes, frame: pd.DataFrame, quantity: str, sweep: str, factor: float, colours: dict[str, style.Colour]
) -> None:
    for number, (_, name) in enumerate(common.systems(frame)):
        mine = common.where(frame, system_name=name)
        crosses = common.numbers(projected.numberless(mine), sweep)
        projected.mark_numberless(axis, list(crosses), colours[name], 0.03 + 0.045 * number)
        rows = common.where(mine, quantity=quantity)
        x = common.numbers(rows, sweep)
        value, low, high = (common.numbers(rows, column) * factor for column in ("value", "low", "high"))
        axis.plot(x, value, "o-", markersize=2.5, color=colours[name])
        axis.fill_between(x, low, high, color=colours[name], alpha=0.18, linewidth=0)
    axis.set_xscale("log", base=2)
    ticks = sorted({int(v) for v in common.numbers(frame, sweep)})
    shown = ticks if len(ticks) < 6 else ticks[::2]
    axis.set_xticks(shown, [str(t) for t in shown])
    axis.xaxis.set_minor_locator(NullLocator())
