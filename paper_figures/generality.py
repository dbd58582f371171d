"""One engine, any optimizer: step time and equality of the systems, the ``generality`` experiment."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from paper_figures import common, markdown, precision, step_time, style
from paper_figures.published import block as published_block
from paper_figures.published import claim
from paper_figures.statistics import Estimate, median, paired_ratio

PHASE = "optimizer_step"
SUBJECT = "canzona"
CLAIMS = {"C6": None, "C9": "shampoo", "C10": "soap"}
"""Published claims, and the optimizer whose speed-up they are about."""
SPREAD = 0.8
"""Part of an optimizer's row in the figure that its systems share."""

Group = tuple[str, str, pd.DataFrame]
"""Display name of an optimizer, label of a mesh, and their rows."""


def groups(frame: pd.DataFrame) -> list[Group]:
    """Return every optimizer on every mesh."""
    return [(name, mesh, rows) for name, own in common.optimizers(frame) for mesh, rows in common.meshes(own)]


def losses(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the losses of a timing job in the columns of the ``precision`` experiment."""
    return common.where(frame, quantity="loss").rename(columns={"value": "loss"})


def equality(frame: pd.DataFrame, system: str, reference: str) -> tuple[str, str]:
    """Return how the losses and the final parameters of ``system`` compare with the reference's."""
    if system == reference:
        return "reference", "reference"
    rows = losses(frame)
    mine = common.numbers(common.where(rows, system=system), "loss")
    if mine.size and not np.isfinite(mine).all():
        return "not finite", markdown.DASH
    found = precision.difference(rows, system, reference)
    if not found.seeds:
        return markdown.DASH, markdown.DASH
    differ = f"differ by up to {found.largest:.1e}, first at step {found.first}"
    parameters = {None: markdown.DASH, True: "equal", False: "differ"}[found.equal_parameters]
    return "equal" if found.largest == 0 else differ, parameters


def main_table(frame: pd.DataFrame) -> str:
    """Return the Markdown table: one row per optimizer, mesh and system."""
    header = ["optimizer", "mesh", "system", "optimizer step, ms", "optimizer step / SC", "n"]
    header += ["state, fullest rank", "losses", "parameters"]
    rows = []
    for optimizer, mesh, group in groups(frame):
        reference, first = str(group["reference"].iloc[0]), step_time.fastest(group)
        for system, name in common.systems(group):
            mine = common.where(group, system=system)
            status, time = common.status_of(mine), median(step_time.milliseconds(group, system, PHASE))
            cells = [markdown.estimate(time, 1), markdown.estimate(step_time.ratio(group, system, reference, PHASE))]
            cells[0] = markdown.bold(cells[0]) if system == first else cells[0]
            cells = [*(cells if status == common.DONE else [status] * 2), step_time.count(mine, time.n)]
            held = common.numbers(common.where(mine, quantity="state", phase="state"), "value")
            size = markdown.size(held.max()) if held.size else markdown.DASH
            rows.append([optimizer, mesh, name, *cells, size, *equality(group, system, reference)])
    return markdown.table(header, rows)


def speedup(group: pd.DataFrame, system: str = SUBJECT) -> Estimate:
    """Return how many times faster the optimizer step of ``system`` is than the reference's, paired by repetition."""
    reference = str(group["reference"].iloc[0])
    ours, theirs = (step_time.times(group, s, PHASE) for s in (system, reference))
    both = [r for r in ours if r in theirs]
    return paired_ratio([theirs[r] for r in both], [ours[r] for r in both])


def speedup_table(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown table of Canzona's speed-up over SC, the published one beside it."""
    claimed = {optimizer: claim(published, name)[1] for name, optimizer in CLAIMS.items() if optimizer}
    rows = []
    for name, mesh, group in groups(frame):
        optimizer, dp, tp = common.distinct(group, "optimizer", "dp", "tp")[0]
        value = claimed.get(optimizer, math.nan)
        found = markdown.estimate(speedup(group))
        rows.append([name, mesh, found, str(dp * tp), markdown.number(value, 0)])
    header = ["optimizer", "mesh", "SC / Canzona (measured)", "ranks", "published, Qwen3-32B"]
    return markdown.table(header, rows)


def table(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown document of the experiment from its tidy ``frame``, the published claims quoted below."""
    model = ", ".join(sorted(str(v) for (v,) in common.distinct(frame, "model")))
    intro = (
        f"Model {model}. All numbers are **measured** in this run. Times are medians over n repetitions with the "
        "interquartile interval; a repetition is the mean of as many steps as the longest refresh period, and the "
        "systems alternate within one job per optimizer. `optimizer step / SC` is the median of the ratios to SC of "
        "the same repetition, with its 95 % bootstrap interval; below 1 is faster. `losses` compares the training loss "
        "of every step with SC's, `parameters` the digests of the parameters after the last step. In **bold**: clearly "
        f"the shortest optimizer step of a mesh. There every system has at least {step_time.MINIMUM_N} repetitions, "
        "and the interval of the ratio to every other system, at 95 % for all of them together (Bonferroni), is below "
        "1. n: repetitions, of those that were asked for."
    )
    blocks = [intro, main_table(frame)]
    if any(shared for (shared,) in common.distinct(frame, "shared_cores")):
        blocks.append("*shared cores*: more ranks than CPU cores, so these times say nothing about scaling.")
    blocks += [
        "## Canzona's speed-up over SC (claims C9, C10)",
        "SC updates every matrix on every rank, so an even division of the work gives the number of ranks; more than "
        "that is not the division's, for example a smaller state that fits the caches better.",
        speedup_table(frame, published),
        common.problems(frame),
        published_block(published, list(CLAIMS)),
        common.provenance(frame),
    ]
    return markdown.document("The optimizer step of every optimizer under each system", *blocks)


def figure(frame: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Return the figure: for each mesh the optimizer step of every optimizer and system, and its ratio to SC."""
    style.apply()
    meshes = list(dict.fromkeys(mesh for _, mesh, _ in groups(frame)))
    systems = common.systems(frame)
    colours = style.palette(systems)
    rows = max(len([1 for _, m, _ in groups(frame) if m == mesh]) for mesh in meshes)
    height = 0.9 + len(meshes) * (0.5 + 0.13 * rows * (len(systems) + 1))
    result = Figure(figsize=(style.TWO_COLUMNS_IN, height), layout="constrained")
    axes = result.subplots(len(meshes), 2, squeeze=False, sharey="row", width_ratios=(1.2, 1))
    for mesh, (left, right) in zip(meshes, axes, strict=True):
        here = [(name, rows) for name, m, rows in groups(frame) if m == mesh]
        for position, (_, rows_) in enumerate(here):
            _draw(left, right, rows_, position, systems, colours)
        _label(left, right, [name for name, _ in here], mesh)
    handles = [style.line(name, {"color": colours[name], "marker": "o", "linestyle": ""}) for _, name in systems]
    title = "Measured; left: median and quartiles, small dots: repetitions; right: median and 95 % interval"
    result.legend(handles=handles, loc="outside upper center", ncols=len(systems), title=title)
    return result


def _draw(
    left: Axes,
    right: Axes,
    frame: pd.DataFrame,
    position: int,
    systems: list[tuple[str, str]],
    colours: dict[str, style.Colour],
) -> None:
    """Draw one optimizer on one mesh: absolute times on the left, ratios to the reference on the right."""
    reference = str(frame["reference"].iloc[0])
    for number, (system, name) in enumerate(systems):
        y = position + ((number + 0.5) / len(systems) - 0.5) * SPREAD
        values = step_time.milliseconds(frame, system, PHASE)
        if not values.size:
            rows = common.where(frame, system=system)
            text = "not run here" if rows.empty else common.status_of(rows)
            place = left.get_yaxis_transform()
            left.text(0.02, y, f"{name}: {text}", transform=place, va="center", fontsize=6, style="italic")
            continue
        sns.scatterplot(x=values, y=y, s=5, alpha=0.5, color=colours[name], ax=left, legend=False)
        _point(left, median(values), y, colours[name])
        _point(right, step_time.ratio(frame, system, reference, PHASE), y, colours[name])


def _point(axis: Axes, value: Estimate, y: float, colour: style.Colour) -> None:
    look: dict[str, Any] = {"color": colour}
    axis.plot([value.value], [y], marker="o", markersize=4, **look)
    if math.isfinite(value.low):
        axis.plot([value.low, value.high], [y, y], linewidth=1.2, **look)


def _label(left: Axes, right: Axes, names: list[str], mesh: str) -> None:
    if left.lines:  # a logarithmic axis without data has nothing to show
        left.set_xscale("log")
        left.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        left.xaxis.set_minor_locator(NullLocator())
    left.set_yticks(range(len(names)), names)
    left.set_ylim(len(names) - 0.5, -0.5)
    left.set(xlabel="optimizer step, ms", ylabel="", title=mesh)
    right.axvline(1.0, color="black", linewidth=0.6)
    right.set_xlim(left=0)
    right.set(xlabel="optimizer step / SC", title=mesh)
    for axis in (left, right):
        axis.grid(axis="y", visible=False)
        for boundary in range(1, len(names)):
            axis.axhline(boundary - 0.5, color="0.85", linewidth=0.6)
