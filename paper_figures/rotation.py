"""Every method under delay: iterations to a common target, loss curves, and what of the claims holds at this scale."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from paper_figures import common, markdown, pipelines, style
from paper_figures.pipelines import Line
from paper_figures.published import block as published_block
from paper_figures.statistics import NOTHING, Estimate

CLAIMS = ("R1", "R2", "R3", "R5", "R6")
ADAMW, ROTATION = "adamw", "rotation"
RIVALS = ("pipedream-lr", "nesterov")
PANELS = 3
"""Panels in a row of the figure."""

main_table = pipelines.main_table


def checks(found: Sequence[Line]) -> list[tuple[str, Estimate, float]]:
    """Return what was expected of the largest P: a sentence, the measured ratio of iterations, and its limit.

    A ratio must not exceed its limit.  It is NaN where a seed of either side is missing or never reaches the target.
    """
    target, deepest = pipelines.common_target(found), max(line.stages for line in found)
    lines = {(line.system, line.stages): line for line in found}

    def ratio(ours: tuple[str, int], theirs: tuple[str, int]) -> Estimate:
        if ours not in lines or theirs not in lines:
            return NOTHING
        return pipelines.quotient(lines[ours], lines[theirs], target).estimate

    rotated, at = (ROTATION, deepest), f"at P = {deepest}"
    expected = [
        (f"AdamW at P = 1 / AdamW {at} (expected: AdamW {at} needs at least 3 times the iterations)",
         ratio((ADAMW, 1), (ADAMW, deepest)), 1 / 3),
        (f"basis rotation / AdamW, both {at} (expected: at most half)", ratio(rotated, (ADAMW, deepest)), 0.5),
    ]  # fmt: skip
    for rival in RIVALS:
        if (rival, deepest) in lines:
            name = lines[rival, deepest].name
            expected.append(
                (f"basis rotation / {name}, both {at} (expected: fewer)", ratio(rotated, (rival, deepest)), 1)
            )
    return expected


def verdict(ratio: Estimate, limit: float) -> str:
    """Return what a measured ratio says of a claim; an interval on both sides of the limit, or none, leaves doubt."""
    if math.isnan(ratio.value):
        return "not decided"
    text = "holds" if ratio.value <= limit else "does not hold at this scale"
    if ratio.low <= limit < ratio.high:
        return f"{text}, within the uncertainty"
    return text if math.isfinite(ratio.low) else f"{text}, n = {ratio.n}"


def checks_table(found: Sequence[Line]) -> str:
    """Return the Markdown table of what was expected and what was measured."""
    rows = [
        [sentence, markdown.estimate(ratio), f"{limit:.2f}", verdict(ratio, limit)]
        for sentence, ratio, limit in checks(found)
    ]
    return markdown.table(["ratio of iterations to the target", "measured", "limit", "so the claim"], rows)


def crossings(found: Sequence[Line]) -> str:
    """Return the Markdown table of iterations to several targets at the largest P: the target decides who is first."""
    deepest = max(line.stages for line in found)
    here = [line for line in found if line.stages == deepest]
    target = pipelines.common_target(here)
    if not math.isfinite(target):
        return ""
    lowest = min(min(v for _, v in curve) for line in here for curve in line.curves.values())
    targets = [target + (lowest - target) * part for part in (0, 0.25, 0.5, 0.75)]
    rows = [[line.name, *(pipelines.iterations_cell(line, t) for t in targets), line.n] for line in here]
    return markdown.table([f"method, P = {deepest}", *(f"to {t:.2f}" for t in targets), "n"], rows)


def table(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown document of the experiment from its tidy ``frame``."""
    blocks = pipelines.comparison_blocks(frame)
    groups = pipelines.depths(pipelines.lines(frame))
    for group in groups:
        blocks += ["## Other targets (measured)", crossings(group)] if crossings(group) else []
        blocks += ["## What was expected (measured)", checks_table(group)]
    blocks += [
        "Learning rates, and Muon's momentum, are the best of a recorded sweep on one seed, which may be among these "
        "(`experiments/learning_rates.yaml`).",
        common.problems(frame),
        published_block(published, CLAIMS, "at the larger P, or rotation's"),
        common.provenance(frame),
    ]
    return markdown.document("Methods under delay", *blocks)


def figure(frame: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Return the figure: loss curves at each P, and iterations against the target at the largest."""
    style.apply()
    groups = pipelines.depths(pipelines.lines(frame))
    look = pipelines.looks(frame)
    panels = [(group, stages) for group in groups for stages in [*dict.fromkeys(line.stages for line in group), None]]
    rows = math.ceil(len(panels) / PANELS)
    result = Figure(figsize=(style.TWO_COLUMNS_IN, 0.7 + 2.3 * rows), layout="constrained")
    axes = result.subplots(rows, PANELS, squeeze=False).flat
    for axis, (group, stages) in zip(axes, panels, strict=False):
        deepest = max(line.stages for line in group)
        if stages is None:
            pipelines.draw_targets(axis, [line for line in group if line.stages == deepest], look)
            axis.set_title(f"P = {deepest}")
        else:
            pipelines.draw_curves(axis, [line for line in group if line.stages == stages], look)
            axis.set_title(f"P = {stages}")
    for axis in list(axes):
        axis.set_visible(False)
    names = [name for _, name in common.systems(frame)]
    handles = [style.line(name, look[name]) for name in names]
    title = "Measured; mean over seeds, band: their range"
    result.legend(handles=handles, loc="outside upper center", ncols=4, title=title)
    return result
