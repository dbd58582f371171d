"""Do the systems compute the same thing?  Loss curves and their difference to SC: the ``precision`` experiment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import common, markdown, style
from paper_figures.published import block as published_block

CLAIMS = ("C6",)
DASHES = ((1, 0), (4, 1.5), (1, 1.2), (4, 1.2, 1, 1.2), (6, 2), (2, 1))


@dataclass(frozen=True)
class Difference:
    """How far a system's losses are from the reference's, over the seeds and steps that both have.

    largest: maximum of the absolute difference; first: the first step where it is not zero, None if there is none.
    equal_parameters: whether the final parameters have the same digest, None if one is unknown.
    """

    largest: float
    first: int | None
    equal_parameters: bool | None
    seeds: int


def difference(frame: pd.DataFrame, system: str, reference: str) -> Difference:
    """Return the difference of ``system`` to ``reference`` on one mesh."""
    largest, firsts, equal, seeds = math.nan, [], [], 0
    for (seed,) in common.distinct(frame, "seed"):
        rows = common.where(frame, seed=seed)
        steps, gap = gaps(rows, system, reference)
        if not len(gap):
            continue
        seeds += 1
        largest = float(np.nanmax([largest, gap.max()]))
        firsts += [int(steps[gap > 0][0])] if (gap > 0).any() else []
        ours, theirs = (common.distinct(common.where(rows, system=s), "params_digest") for s in (system, reference))
        known = len(ours) == len(theirs) == 1 and None not in (ours[0][0], theirs[0][0])
        equal.append(ours == theirs if known else None)
    verdict = None if not equal or None in equal else all(equal)
    return Difference(largest, min(firsts) if firsts else None, verdict, seeds)


def gaps(rows: pd.DataFrame, system: str, reference: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and absolute loss differences of two systems of one seed, where both losses are finite."""
    ours, theirs = (curve(common.where(rows, system=s)) for s in (system, reference))
    steps = [s for s in ours if s in theirs]
    return np.array(steps, dtype=int), np.array([abs(ours[s] - theirs[s]) for s in steps])


def curve(rows: pd.DataFrame) -> dict[int, float]:
    """Return the finite losses of one run by step, in order."""
    pairs = zip(common.numbers(rows, "step"), common.numbers(rows, "loss"), strict=True)
    return {int(s): float(v) for s, v in sorted(pairs) if math.isfinite(s) and math.isfinite(v)}


def main_table(frame: pd.DataFrame) -> str:
    """Return the Markdown table: one row per mesh and system."""
    header = ["mesh", "system", "seeds", "last loss", "held-out loss", "max difference", "first at step", "parameters"]
    rows = []
    for mesh, on_mesh in common.meshes(frame):
        reference = str(on_mesh["reference"].iloc[0])
        for system, name in common.systems(on_mesh):
            mine = common.where(on_mesh, system=system)
            done = common.where(mine, status=common.DONE)
            seeds = f"{len(common.distinct(done, 'seed'))}/{len(common.distinct(mine, 'seed'))}"
            cells = _loss_cells(mine, done) + _difference_cells(on_mesh, system, reference)
            rows.append([mesh, name, seeds, *cells])
    return markdown.table(header, rows)


def table(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown document of the experiment from its tidy ``frame``, the published claims quoted below."""
    intro = (
        f"{common.subject(frame)}, the same data, seed and learning rates in every run. All numbers are "
        "**measured**. `max difference` is the largest absolute difference of the training loss to SC's on the same "
        "mesh over all steps and all seeds that both have finished, `first at step` where it first appears; "
        "`parameters` compares the digests of the final parameters. Losses are means over the finished seeds; *seeds*: "
        "those, of the ones that were asked for."
    )
    blocks = [
        intro,
        main_table(frame),
        common.problems(frame),
        published_block(published, CLAIMS),
        common.provenance(frame),
    ]
    return markdown.document("Loss curves of the systems on the same data", *blocks)


def figure(frame: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Return the figure: loss curves above, absolute difference to the reference below, one column per mesh.

    Each optimizer has rows of its own.
    """
    style.apply()
    optimizers = [(name, common.meshes(rows)) for name, rows in common.optimizers(frame)]
    names = [name for _, name in common.systems(frame)]
    colours = style.palette(common.systems(frame))
    columns = max(len(groups) for _, groups in optimizers)
    width = style.TWO_COLUMNS_IN if columns > 1 else style.ONE_COLUMN_IN
    result = Figure(figsize=(width, 3.6 * len(optimizers)), layout="constrained")
    parts = result.subfigures(len(optimizers), 1, squeeze=False)[:, 0]
    for part, (name, groups) in zip(parts, optimizers, strict=True):
        axes = part.subplots(2, columns, squeeze=False, sharex="col", sharey="row", height_ratios=(2, 1))
        largest = 0.0
        for axis in axes[:, len(groups) :].flat:
            axis.set_visible(False)
        for column, (mesh, on_mesh) in enumerate(groups):
            seed = common.distinct(on_mesh, "seed")[0][0]
            gap = _draw(axes[0][column], axes[1][column], common.where(on_mesh, seed=seed), names, colours)
            largest = max(largest, gap)
            axes[0][column].set_title(mesh if len(optimizers) == 1 else f"{name}, {mesh}")
            axes[1][column].set_xlabel("step")
        _scale_differences(list(axes[1][: len(groups)]), largest)
        axes[0][0].set_ylabel("training loss, nats")
        axes[1][0].set_ylabel("|difference\nto SC|, nats")
    result.suptitle("Measured, first seed", fontsize=8)
    return result


def _draw(top: Axes, bottom: Axes, frame: pd.DataFrame, names: list[str], colours: dict[str, style.Colour]) -> float:
    """Draw the curves of one mesh and seed; returns the largest difference."""
    reference, largest = str(frame["reference"].iloc[0]), 0.0
    for i, name in enumerate(names):
        mine = common.where(frame, system_name=name)
        if mine.empty:
            continue
        look: dict[str, Any] = {
            "color": colours[name],
            "dashes": DASHES[i % len(DASHES)],
            "linewidth": 2.8 if i == 0 else 1.1,
            "alpha": 0.45 if i == 0 else 1.0,
        }
        losses = curve(mine)
        status = common.status_of(mine)
        label = name if status == common.DONE else f"{name} ({status})"
        top.plot(list(losses), list(losses.values()), label=label, **look)
        steps, gap = gaps(frame, str(mine["system"].iloc[0]), reference)
        largest = max(largest, float(gap.max(initial=0.0)))
        bottom.plot(steps, gap, **look)
    if top.lines:
        top.legend()
    return largest


def _scale_differences(axes: list[Axes], largest: float) -> None:
    """Give the lower panels, which share their scale, a logarithmic one that still shows zero."""
    if largest > 0:
        exponents = range(-8, max(-7, math.ceil(math.log10(largest))) + 1)
        axes[0].set_yscale("symlog", linthresh=1e-8)
        axes[0].set_yticks([0.0, *(10.0**e for e in list(exponents)[:: max(1, len(exponents) // 3)])])
        axes[0].minorticks_off()
        return
    axes[0].set_ylim(-1, 1)
    axes[0].set_yticks([0])
    for axis in axes:
        if axis.lines and any(len(line.get_xdata()) for line in axis.lines):  # pyright: ignore[reportArgumentType]
            axis.text(0.5, 0.75, "zero at every step", transform=axis.transAxes, ha="center", va="center", fontsize=7)


def _loss_cells(mine: pd.DataFrame, done: pd.DataFrame) -> list[str]:
    if done.empty:
        return [common.status_of(mine)] * 2
    last, heldout = [], []
    for (seed,) in common.distinct(done, "seed"):
        rows = common.where(done, seed=seed)
        losses = list(curve(rows).values())
        last.append(losses[-1] if losses else math.nan)
        heldout.append(common.numbers(rows, "heldout_loss")[0])
    return [markdown.number(float(np.mean(values)), 4) for values in (last, heldout)]


def _difference_cells(frame: pd.DataFrame, system: str, reference: str) -> list[str]:
    if system == reference:
        return ["reference"] * 3
    found = difference(common.where(frame, status=common.DONE), system, reference)
    if found.seeds == 0:
        status = common.status_of(frame.loc[frame["system"].isin([system, reference])])
        return [markdown.DASH if status == common.DONE else status] * 3
    largest = "0" if found.largest == 0 else f"{found.largest:.1e}"
    first = "never" if found.first is None else str(found.first)
    equal = {None: markdown.DASH, True: "equal", False: "differ"}[found.equal_parameters]
    return [largest, first, equal]
