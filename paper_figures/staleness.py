"""What delay costs AdamW: slowdown over pipeline stages, beside the published one (the ``staleness`` experiment)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from paper_figures import common, markdown, pipelines, statistics, style
from paper_figures.pipelines import Line
from paper_figures.published import block as published_block
from paper_figures.published import claim
from paper_figures.statistics import Paired

CLAIMS = ("R1",)
PUBLISHED_AT = 32
"""Stages of claim R1."""


def slowdown(line: Line, found: Sequence[Line], target: float) -> Paired:
    """Return iterations of ``line`` over those of the same method on one stage, paired by seed."""
    alone = pipelines.find(found, line.system, 1)
    if alone is None:
        return statistics.paired_quotient([], [])
    return pipelines.quotient(line, alone, target)


def slowdown_table(found: Sequence[Line], published: pd.DataFrame | None) -> str:
    """Return the Markdown table of one depth of model, the published slowdown in a column of its own if given."""
    target = pipelines.common_target(found)
    header = ["method", "P", "staleness of stage 0", "lr", pipelines.iterations_heading(target), "slowdown (measured)"]
    header += ["held-out loss", "n"] + (["slowdown (published)"] if published is not None else [])
    rows = []
    for line in found:
        taus = common.numbers(common.where(line.rows, quantity="staleness", stage=0), "value")
        cells = [
            str(line.stages),
            markdown.number(float(taus[0]), 0) if len(taus) else markdown.DASH,
            f"{line.lr:g}",
            pipelines.iterations_cell(line, target),
            markdown.estimate(slowdown(line, found, target).estimate) if line.stages > 1 else "1",
            markdown.estimate(statistics.mean(list(line.finals.values())), 3) if line.curves else line.status,
            line.n,
        ]
        if published is not None:
            cells.append(markdown.number(claim(published, "R1")[1] if line.stages == PUBLISHED_AT else math.nan))
        rows.append([line.name, *cells])
    if published is not None and all(line.stages != PUBLISHED_AT for line in found):
        cells = [str(PUBLISHED_AT), str(PUBLISHED_AT - 1), *["not run here"] * 2, *[markdown.DASH] * 3]
        rows.append([found[0].name, *cells, markdown.number(claim(published, "R1")[1])])
    return markdown.table(header, rows)


def main_table(frame: pd.DataFrame) -> str:
    """Return the Markdown tables of measured numbers."""
    groups = pipelines.depths(pipelines.lines(frame))
    return "\n\n".join(slowdown_table(group, None) for group in groups)


def table(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown document of the experiment from its tidy ``frame``."""
    blocks = [
        "What stale gradients cost AdamW when nothing is done about them. Iterations are updates until the held-out "
        "loss first is at or below the target, linearly interpolated; the target is what every run at the largest P "
        "still reaches. *Slowdown* is the geometric mean over seeds of iterations at P over those at P = 1 of the same "
        "seed, each at its own learning rate, with the 95 % t interval. The published value is of another model and "
        "text (95 million parameters, OpenWebText), so only the direction can be compared."
    ]
    groups = pipelines.depths(pipelines.lines(frame))
    for group in groups:
        blocks += [pipelines.heading(group, groups), slowdown_table(group, published)]
    blocks += [common.problems(frame), published_block(published, CLAIMS, "at the larger P"), common.provenance(frame)]
    return markdown.document("Slowdown of AdamW over pipeline stages", *blocks)


def figure(frame: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Return the figure: loss curves by P, and the slowdown over P."""
    style.apply()
    groups = pipelines.depths(pipelines.lines(frame))
    result = Figure(figsize=(style.TWO_COLUMNS_IN, 0.3 + 2.3 * len(groups)), layout="constrained")
    axes = result.subplots(len(groups), 2, squeeze=False)
    for (left, right), group in zip(axes, groups, strict=True):
        colours = sns.color_palette("viridis", len(group) + 1)
        look = {f"P = {line.stages}": {"color": colours[i], "dashes": (1, 0)} for i, line in enumerate(group)}
        pipelines.draw_curves(left, group, look, label="stages")
        target = pipelines.common_target(group)
        if math.isfinite(target):
            left.axhline(target, color="black", linewidth=0.6, linestyle=":")
            left.legend(title=f"dotted: target {target:.2f}")
        ratios = [(line.stages, slowdown(line, group, target).estimate) for line in group]
        known = [(p, e) for p, e in ratios if math.isfinite(e.value)]
        right.plot([p for p, _ in known], [e.value for _, e in known], marker="o", color="black", markersize=3.5)
        for p, e in known:
            right.plot([p, p], [e.low, e.high], color="black", linewidth=0.8)
        right.set(xlabel="pipeline stages P", ylabel="slowdown against P = 1")
        right.set_xticks(sorted({line.stages for line in group}))
    result.suptitle("Measured; mean over seeds, band: their range, strokes: 95 % interval", fontsize=8)
    return result
