"""Time, bytes and optimizer state of one step under each system: table and figure of the ``step_time`` experiment."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from paper_figures import common, markdown, style
from paper_figures.published import block as published_block
from paper_figures.statistics import MINIMUM_REPETITIONS as MINIMUM_N
from paper_figures.statistics import Estimate, median, paired_ratio, shortest

REFERENCE = "sc"
SUBJECT = "canzona"
GOLDEN = (math.sqrt(5) - 1) / 2  # spreads dots evenly without chance
CLAIMS = ("C3", "C4", "C5", "C12")
MAIN_PHASES = ("forward_backward", "optimizer_step", "iteration")
PHASES = {
    "forward_backward": "forward + backward",
    "grad_norm": "gradient norm",
    "optimizer_step": "optimizer step",
    "param_sync": "parameter sync",
    "iteration": "iteration",
}
AXES = {"dp": "DP", "tp": "TP"}
COMMUNICATION = ("grad_reduce", "grad_norm", "optimizer_step", "tp_exchange", "param_sync")
PLOTTED = ("optimizer_step", "iteration")
COLUMNS = 4
"""Meshes beside each other in the figure."""
TITLE_WIDTH = 30


def times(frame: pd.DataFrame, system: str, phase: str) -> dict[int, float]:
    """Return the seconds of ``phase`` of ``system`` by repetition; none of a job that is not done."""
    chosen = common.where(frame, system=system, quantity="time", phase=phase, status=common.DONE)
    pairs = zip(common.numbers(chosen, "repetition"), common.numbers(chosen, "value"), strict=True)
    return {int(r): float(v) for r, v in pairs if math.isfinite(r) and math.isfinite(v)}


def milliseconds(frame: pd.DataFrame, system: str, phase: str) -> np.ndarray:
    """Return the times of ``phase`` of ``system`` in milliseconds, one per repetition."""
    return 1e3 * np.array(list(times(frame, system, phase).values()), dtype=float)


def ratio(frame: pd.DataFrame, system: str, reference: str, phase: str) -> Estimate:
    """Return the paired ratio of ``phase`` between two systems over the repetitions that both have."""
    ours, theirs = times(frame, system, phase), times(frame, reference, phase)
    both = [r for r in ours if r in theirs]
    return paired_ratio([ours[r] for r in both], [theirs[r] for r in both])


def verdict(estimate: Estimate) -> str:
    """Return what a paired ratio of times shows about its numerator; *faster* in percent of the other's time."""
    if estimate.n < MINIMUM_N:
        return f"no verdict below n = {MINIMUM_N}"
    if estimate.low <= 1 <= estimate.high:
        return "no difference shown"
    return f"{abs(1 - estimate.value):.0%} {'faster' if estimate.value < 1 else 'slower'}"


def fastest(frame: pd.DataFrame, phase: str = "optimizer_step") -> str | None:
    """Return the system whose ``phase`` is clearly the shortest on one mesh, by :func:`statistics.shortest`, or None.

    None too where a system has no times.
    """
    ids = [system for system, _ in common.systems(frame)]
    best = shortest([times(frame, system, phase) for system in ids])
    return None if best is None else ids[best]


def count(rows: pd.DataFrame, found: int) -> str:
    """Return how many repetitions were found, of those that were asked for if the tidy table says."""
    asked = [n for (n,) in common.distinct(rows, "repetitions")] if "repetitions" in rows else []
    return f"{found}/{int(asked[0])}" if asked and asked[0] is not None else str(found)


def main_table(frame: pd.DataFrame) -> str:
    """Return the Markdown table of the times that matter most: one row per mesh and system."""
    return times_table(frame, MAIN_PHASES, against=REFERENCE)


def times_table(frame: pd.DataFrame, phases: Sequence[str], against: str | None = None) -> str:
    """Return the Markdown table of the times of ``phases``, and the optimizer step's ratio to system ``against``."""
    header = ["mesh", "system", *(f"{PHASES[phase]}, ms" for phase in phases)]
    header += ["optimizer step / SC", "n"] if against else ["n"]
    rows = []
    for mesh, on_mesh in common.meshes(frame):
        first = fastest(on_mesh)
        for system, name in common.systems(on_mesh):
            mine = common.where(on_mesh, system=system)
            status = common.status_of(mine)
            cells = [median(milliseconds(on_mesh, system, phase)) for phase in phases]
            texts = [markdown.estimate(cell, 1) for cell in cells]
            if system == first:
                texts = [
                    markdown.bold(text) if phase == "optimizer_step" else text
                    for phase, text in zip(phases, texts, strict=True)
                ]
            if against:
                texts.append(markdown.estimate(ratio(on_mesh, system, against, "optimizer_step")))
            texts = texts if status == common.DONE else [status] * len(texts)
            rows.append([mesh, name, *texts, count(mine, cells[0].n)])
    return markdown.table(header, rows)


def comparison_table(frame: pd.DataFrame) -> str:
    """Return the Markdown table of Canzona's optimizer step against every other system."""
    rows = []
    for mesh, on_mesh in common.meshes(frame):
        for system, name in common.systems(on_mesh):
            if system == SUBJECT:
                continue
            both = on_mesh.loc[on_mesh["system"].isin([SUBJECT, system])]
            against, status = ratio(on_mesh, SUBJECT, system, "optimizer_step"), common.status_of(both)
            cells = [markdown.estimate(against), count(both, against.n), verdict(against)]
            rows.append([mesh, name, *(cells if status == common.DONE else [status, cells[1], status])])
    return markdown.table(["mesh", "Canzona against", "time ratio", "n", "Canzona is"], rows)


def bytes_table(frame: pd.DataFrame) -> str:
    """Return the Markdown table of the logical bytes per step by phase and mesh axis, on the rank that has most.

    The engine counts every collective, so a phase that a system's count does not name moved nothing.
    """
    counted = common.where(frame, quantity="bytes")
    found = [phase for (phase,) in common.distinct(counted, "phase")]
    phases = [*COMMUNICATION, *(phase for phase in found if phase not in COMMUNICATION)]
    rows = []
    for mesh, on_mesh in common.meshes(counted):
        for system, name in common.systems(on_mesh):
            mine = common.where(on_mesh, system=system)
            rows.append([mesh, name, *(_by_axis(common.where(mine, phase=phase)) for phase in phases)])
    return markdown.table(["mesh", "system", *phases], rows) if rows else ""


def state_table(frame: pd.DataFrame) -> str:
    """Return the Markdown table of fp32 masters and optimizer state: the fullest rank and the sum over ranks."""
    counted = common.where(frame, quantity="state")
    rows = []
    for mesh, on_mesh in common.meshes(counted):
        for system, name in common.systems(on_mesh):
            mine = common.where(on_mesh, system=system)
            cells = []
            for part in ("master", "state"):
                values = common.numbers(common.where(mine, phase=part), "value")
                cells += [markdown.size(values.max(initial=0)), markdown.size(values.sum())]
            rows.append([mesh, name, *cells])
    header = ["mesh", "system", "master, fullest rank", "all ranks", "state, fullest rank", "all ranks"]
    return markdown.table(header, rows) if rows else ""


def table(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown document of the experiment from its tidy ``frame``, the published claims quoted below."""
    blocks = [
        f"{common.subject(frame)}. All numbers are **measured** in this run. Times are medians over n "
        "repetitions with the interquartile interval; the systems alternate within one job. The optimizer step "
        "includes the exchange over TP. `optimizer step / SC` is the median of the ratios to SC of the same "
        "repetition, with its 95 % bootstrap interval; below 1 is faster. In **bold**: clearly the shortest optimizer "
        f"step of a mesh. There every system has at least {MINIMUM_N} repetitions, and the interval of the ratio to "
        "every other system, at 95 % for all of them together (Bonferroni), is below 1. n: repetitions, of those that "
        "were asked for.",
        main_table(frame),
    ]
    if any(shared for (shared,) in common.distinct(frame, "shared_cores")):
        blocks.append("*shared cores*: more ranks than CPU cores, so these times say nothing about scaling.")
    blocks += ["## All phases (measured)", times_table(frame, list(PHASES))]
    blocks += ["## Canzona's optimizer step against the others (measured, paired)", comparison_table(frame)]
    bytes_ = bytes_table(frame)
    if bytes_:
        blocks += ["## Logical bytes per step on the rank that has most, by axis of the mesh (measured, C12)", bytes_]
    state = state_table(frame)
    if state:
        blocks += ["## Masters and optimizer state (measured)", state]
    blocks += [common.problems(frame), published_block(published, CLAIMS), common.provenance(frame)]
    return markdown.document("Time of one step", *blocks)


def figure(frame: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Return the figure: optimizer step and iteration per mesh and system, every repetition as a dot.

    Each optimizer has rows of its own.
    """
    style.apply()
    each = [(name, common.meshes(rows)) for name, rows in common.optimizers(frame)]
    optimizers = [(name, found[i : i + COLUMNS]) for name, found in each for i in range(0, len(found), COLUMNS)]
    names = [name for _, name in common.systems(frame)]
    colours = style.palette(common.systems(frame))
    lines = [(phase, name, groups) for name, groups in optimizers for phase in PLOTTED]
    height = 0.5 + len(lines) * (0.7 + 0.2 * len(names))
    result = Figure(figsize=(style.TWO_COLUMNS_IN, height), layout="constrained")
    columns = max(len(groups) for _, groups in optimizers)
    axes = result.subplots(len(lines), columns, squeeze=False, sharey=True)
    for row, (phase, name, groups) in enumerate(lines):
        for axis in axes[row][len(groups) :]:
            axis.set_visible(False)
        for column, (mesh, on_mesh) in enumerate(groups):
            axis = axes[row][column]
            _draw(axis, on_mesh, phase, names, colours)
            axis.set_xlabel(f"{PHASES[phase]}, ms")
            axis.set_ylabel("")
            if row % len(PLOTTED) == 0:
                title = mesh if len(each) == 1 else f"{name}, {mesh}"
                axis.set_title(textwrap.fill(title, TITLE_WIDTH))
    result.suptitle("Measured; bar: median, line: quartiles, dots: repetitions", fontsize=8)
    return result


def _draw(axis: Axes, frame: pd.DataFrame, phase: str, names: list[str], colours: dict[str, style.Colour]) -> None:
    present = {name: system for system, name in common.systems(frame)}
    largest = 0.0
    for position, name in enumerate(names):
        values = milliseconds(frame, present[name], phase) if name in present else np.array([])
        middle = median(values)
        if middle.n == 0:
            text = common.status_of(common.where(frame, system_name=name)) if name in present else "not run here"
            axis.text(
                0.02, position, text, transform=axis.get_yaxis_transform(), va="center", fontsize=7, style="italic"
            )
            continue
        axis.barh(position, middle.value, height=0.7, color=colours[name], alpha=0.55)
        axis.plot([middle.low, middle.high], [position] * 2, color="black", linewidth=1.0, zorder=3)
        largest = max(largest, float(values.max()))
        spread = 0.5 * (np.arange(middle.n) * GOLDEN % 1 - 0.5)
        sns.scatterplot(x=values, y=position + spread, s=6, color=colours[name], ax=axis, zorder=2, legend=False)
    axis.set_xlim(0, 1.05 * largest if largest else 1)
    axis.xaxis.set_major_locator(MaxNLocator(4, prune="upper") if largest else NullLocator())
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)


def _by_axis(rows: pd.DataFrame) -> str:
    parts = []
    for (axis,) in common.distinct(rows, "axis"):
        count = float(common.numbers(common.where(rows, axis=axis), "value").sum())
        parts += [f"{AXES.get(axis, axis)} {markdown.size(count)}"] if count else []
    return " + ".join(parts) or "0"
