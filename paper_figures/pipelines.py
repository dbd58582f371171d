"""What tables and figures of pipeline experiments share: curves, the common target, iterations to it, comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from impl.harness.pipeline_results import iterations_to
from paper_figures import clear_lines, common, markdown, statistics, style
from paper_figures.published import block as published_block
from paper_figures.statistics import Estimate, Paired

Curve = list[tuple[float, float]]
DASHES = ((1, 0), (4, 1.5), (1, 1.2), (4, 1.2, 1, 1.2))
SHOWN_DIGITS = 2
"""Decimals of a target."""


@dataclass(frozen=True)
class Line:
    """One line of a table: a method with its settings at a number of stages, over its seeds.

    system: the experiment's id of the method, ``name`` its display name; ``rows`` of the tidy table.
    """

    stages: int
    layers: int | None
    system: str
    name: str
    lr: float
    settings: str
    steps: int
    rows: pd.DataFrame

    @cached_property
    def curves(self) -> dict[int, Curve]:
        """Held-out loss by update of each seed whose run is done."""
        done = common.where(self.rows, quantity="heldout_loss", status=common.DONE)
        found = {}
        for (seed,) in common.distinct(done, "seed"):
            rows = common.where(done, seed=seed)
            pairs = zip(common.numbers(rows, "update"), common.numbers(rows, "value"), strict=True)
            found[int(seed)] = sorted((float(u), float(v)) for u, v in pairs if math.isfinite(u) and math.isfinite(v))
        return {seed: curve for seed, curve in found.items() if curve}

    @property
    def seeds(self) -> int:
        """Number of seeds that were asked for."""
        return len(common.distinct(self.rows, "seed"))

    @property
    def status(self) -> str:
        """``done``, or what the runs that are not done are."""
        return common.status_of(self.rows)

    @property
    def finals(self) -> dict[int, float]:
        """Last held-out loss of each seed that is done."""
        return {seed: curve[-1][1] for seed, curve in self.curves.items()}

    def iterations(self, target: float) -> dict[int, float | None]:
        """Iterations to ``target`` of each seed that is done, None where it is never reached."""
        return {seed: iterations_to(target, curve) for seed, curve in self.curves.items()}

    def iterations_if_all(self, target: float) -> dict[int, float]:
        """Iterations to ``target`` of each seed; empty unless every seed that was asked for is done and reaches it."""
        found = {s: v for s, v in self.iterations(target).items() if v is not None}
        return found if len(found) == self.seeds else {}

    @property
    def complete(self) -> bool:
        """Whether every seed that was asked for is done."""
        return len(self.curves) == self.seeds

    @property
    def n(self) -> str:
        """How many of the seeds that were asked for are done, for a cell."""
        return f"{len(self.curves)}/{self.seeds}"


def lines(frame: pd.DataFrame) -> list[Line]:
    """Return the lines of ``frame`` by depth and stages, then in the experiment's order."""
    columns = ("layers", "stages", "system", "system_name", "lr", "settings", "steps")
    found = []
    for layers, stages, system, name, lr, settings, steps in common.distinct(frame, *columns):
        rows = common.where(frame, stages=stages, system=system, lr=lr, settings=settings, steps=steps)
        rows = rows.loc[rows["layers"].isna() if layers is None else rows["layers"] == layers]
        depth = None if layers is None else int(layers)
        found.append(Line(int(stages), depth, system, name, float(lr), settings, int(steps), rows))
    return sorted(found, key=lambda line: (line.layers or 0, line.stages))


def depths(found: Sequence[Line]) -> list[list[Line]]:
    """Return ``found`` in groups of models of one depth: only within one does a common target make sense."""
    return [[line for line in found if line.layers == d] for d in dict.fromkeys(line.layers for line in found)]


def common_target(found: Sequence[Line]) -> float:
    """Return the held-out loss that every finished run at the largest number of stages reaches, rounded up.

    NaN if none is finished.
    """
    deepest = max((line.stages for line in found if line.curves), default=0)
    lowest = [min(v for _, v in curve) for line in found if line.stages == deepest for curve in line.curves.values()]
    scale = 10**SHOWN_DIGITS
    return math.ceil(max(lowest) * scale) / scale if lowest else math.nan


def pairs(ours: dict[int, float], theirs: dict[int, float]) -> tuple[list[float], list[float]]:
    """Return the values of the seeds that both have, in the same order."""
    both = sorted(ours.keys() & theirs.keys())
    return [ours[s] for s in both], [theirs[s] for s in both]


def quotient(ours: Line, theirs: Line, target: float) -> Paired:
    """Return the ratio of iterations to ``target``, paired by seed; nothing if a seed of either never reaches it."""
    return statistics.paired_quotient(*pairs(ours.iterations_if_all(target), theirs.iterations_if_all(target)))


def find(found: Sequence[Line], system: str, stages: int) -> Line | None:
    """Return the line of ``system`` at ``stages``, None if there is none."""
    return next((line for line in found if line.system == system and line.stages == stages), None)


def iterations_heading(target: float) -> str:
    """Return the heading of a column of iterations to ``target``, which is NaN while no run is done."""
    return f"iterations to {target:.{SHOWN_DIGITS}f}" if math.isfinite(target) else "iterations to the target"


def iterations_cell(line: Line, target: float) -> str:
    """Return mean iterations with the interval; ``> N`` with how many seeds reach the target unless all do."""
    if not line.curves:
        return line.status
    by_seed = line.iterations(target)
    reached = [v for v in by_seed.values() if v is not None]
    if len(reached) == len(by_seed):
        return markdown.estimate(statistics.mean(reached), 0)
    return f"> {line.steps}" + (f" ({len(reached)} of {len(by_seed)} reach it)" if reached else "")


def comparison_table(found: Sequence[Line], reference: str, target: float) -> str:
    """Return the Markdown table of every line: iterations to ``target`` and final held-out loss, both with their pairs.

    reference: the method that the others at the same number of stages are paired with.
    """
    header = ["method", "P", "lr", "settings", iterations_heading(target), "ratio", "held-out loss", "difference", "n"]
    rows, first, best = [], clear_lines.fewest(found, target), clear_lines.lowest(found)
    for line in found:
        against = find(found, reference, line.stages)
        final = markdown.estimate(statistics.mean(list(line.finals.values())), 3) if line.curves else line.status
        if against is None or against is line:
            ratio = difference = markdown.DASH if against is None else "reference"
        else:
            ratio = markdown.paired(quotient(line, against, target))
            difference = markdown.paired(statistics.paired_difference(*pairs(line.finals, against.finals)), 3)
        iterations = iterations_cell(line, target)
        iterations = markdown.bold(iterations) if any(line is other for other in first) else iterations
        final = markdown.bold(final) if any(line is other for other in best) else final
        cells = [f"{line.lr:g}", common.settings_text(line.settings), iterations, ratio, final, difference]
        rows.append([line.name, str(line.stages), *cells, line.n])
    return markdown.table(header, rows)


def intro(frame: pd.DataFrame, reference: str) -> str:
    """Return what the columns of :func:`comparison_table` mean."""
    models = ", ".join(sorted(str(v) for (v,) in common.distinct(frame, "model")))
    return (
        f"Model {models}. All numbers are **measured** in this run. Held-out loss is that of the newest weights of all "
        "stages. *Iterations* are updates until it first is at or below the target, linearly interpolated; the target "
        "is what every run at the largest P still reaches, and `> N` means not within N updates. Cells are means over "
        f"n seeds with their 95 % t interval. *Ratio* (of iterations, geometric mean) and *difference* (of the final "
        f"loss) are to {markdown.literal(reference)} at the same P, paired by seed, with the p-value of the paired "
        "t-test; below 1 and below 0 is better. With three seeds such a test has little power, and these p-values are "
        "not corrected for the number of rows. In **bold**: clearly the fewest iterations, or the lowest loss, at one "
        f"P. There every line has all its seeds, at least {statistics.MINIMUM_SEEDS}, and paired t-tests against every "
        "other line (of the logarithms of iterations; a seed that does not reach the target counts with its N updates) "
        f"are significant at {statistics.LEVEL:.0%} after Holm's correction. n: seeds that are done, of those asked."
    )


def name_of(frame: pd.DataFrame, system: str) -> str:
    """Return the display name of ``system``."""
    return str(dict(common.distinct(frame, "system", "system_name")).get(system, system))


def heading(group: Sequence[Line], groups: Sequence[Sequence[Line]]) -> str:
    """Return the heading of one of several groups of lines, empty if there is only one."""
    return f"## {group[0].layers or 'Default number of'} layers (measured)" if len(groups) > 1 else ""


def comparison_blocks(frame: pd.DataFrame) -> list[str]:
    """Return the intro and a table for each depth of model."""
    reference = str(frame["reference"].iloc[0])
    blocks = [intro(frame, name_of(frame, reference))]
    groups = depths(lines(frame))
    for group in groups:
        blocks += [heading(group, groups), comparison_table(group, reference, common_target(group))]
    return blocks


def main_table(frame: pd.DataFrame) -> str:
    """Return the comparison tables alone."""
    return "\n\n".join(block for block in comparison_blocks(frame)[1:] if block)


def comparison_document(title: str, frame: pd.DataFrame, published: pd.DataFrame, claims: Sequence[str]) -> str:
    """Return the Markdown document of an experiment that only compares, the published ``claims`` quoted below."""
    blocks = [*comparison_blocks(frame), common.problems(frame), published_block(published, claims, "value")]
    return markdown.document(title, *blocks, common.provenance(frame))


# figures


def looks(frame: pd.DataFrame) -> dict[str, dict[str, object]]:
    """Return colour and dashes by display name."""
    colours = style.palette(common.systems(frame), style.METHODS)
    return {name: {"color": c, "dashes": DASHES[i % len(DASHES)]} for i, (name, c) in enumerate(colours.items())}


def draw_curves(axis: Axes, found: Sequence[Line], look: dict[str, dict[str, object]], label: str = "name") -> None:
    """Draw the mean held-out loss over seeds of each line, with the range of the seeds."""
    for line in found:
        curves = list(line.curves.values())
        if not curves:
            continue
        updates = sorted(set.intersection(*({u for u, _ in curve} for curve in curves)))
        values = np.array([[dict(curve)[u] for u in updates] for curve in curves])
        text = line.name if label == "name" else f"P = {line.stages}"
        axis.plot(updates, values.mean(axis=0), label=text, **look[text])  # pyright: ignore[reportArgumentType]
        axis.fill_between(updates, values.min(axis=0), values.max(axis=0), color=look[text]["color"], alpha=0.15, lw=0)  # pyright: ignore[reportArgumentType]
    statuses(axis, found)
    axis.set(xlabel="update", ylabel="held-out loss, nats")


def statuses(axis: Axes, found: Sequence[Line]) -> None:
    """Say in the panel which lines have no curve, and why."""
    missing = [f"{line.name} (P = {line.stages}): {line.status}" for line in found if not line.curves]
    if missing:
        text = "\n".join([*missing[:3], *(["..."] if len(missing) > 3 else [])])
        axis.text(0.97, 0.97, text, transform=axis.transAxes, ha="right", va="top", fontsize=6, style="italic")


def draw_targets(axis: Axes, found: Sequence[Line], look: dict[str, dict[str, object]]) -> None:
    """Draw mean iterations against the target, as far as all seeds of a line reach it."""
    first = [curve[0][1] for line in found for curve in line.curves.values()]
    if not first:
        return
    top = min(first)
    bottom = min(min(v for _, v in curve) for line in found for curve in line.curves.values())
    targets = np.linspace(top, bottom, 60)
    for line in found:
        values = [statistics.mean(list(line.iterations_if_all(float(t)).values())).value for t in targets]
        axis.plot(targets, values, label=line.name, **look[line.name])  # pyright: ignore[reportArgumentType]
    axis.invert_xaxis()
    axis.set(xlabel="target (held-out loss, nats)", ylabel="iterations to target")


def estimate_bar(axis: Axes, position: float, value: Estimate, colour: object) -> None:
    """Draw a mean with its interval as a horizontal bar."""
    axis.plot(value.value, position, marker="o", color=colour, markersize=4)  # pyright: ignore[reportArgumentType]
    if math.isfinite(value.low):
        axis.plot([value.low, value.high], [position] * 2, color=colour, linewidth=1.0)  # pyright: ignore[reportArgumentType]


def finals_figure(frame: pd.DataFrame) -> Figure:
    """Return a figure of an experiment that only compares: loss curves, and final loss of every line."""
    style.apply()
    found = lines(frame)
    many = len({line.stages for line in found}) > 1
    labels = [f"{line.name}, P = {line.stages}" if many else line.name for line in found]
    colours = style.palette([(label, label) for label in labels], ())
    result = Figure(figsize=(style.TWO_COLUMNS_IN, 0.9 + max(0.2 * len(found), 1.6)), layout="constrained")
    left, right = result.subplots(1, 2)
    for line, label in zip(found, labels, strict=True):
        draw_curves(left, [line], {line.name: {"color": colours[label]}})
    for position, (line, label) in enumerate(zip(found, labels, strict=True)):
        if line.curves:
            estimate_bar(right, position, statistics.mean(list(line.finals.values())), colours[label])
            right.plot(list(line.finals.values()), [position] * len(line.finals), ".", color=colours[label], alpha=0.5)
        else:
            place = right.get_yaxis_transform()
            right.text(0.02, position, line.status, transform=place, va="center", fontsize=7, style="italic")
    right.set_yticks(range(len(found)), labels)
    right.set_ylim(len(found) - 0.5, -0.5)
    right.set_xlabel("final held-out loss, nats")
    result.suptitle(
        "Measured; curves: mean over seeds, band: their range; right: mean, 95 % interval, seeds", fontsize=8
    )
    return result
