"""Time, idle time and memory of pipelines on real processes (the ``pipeline_time`` experiment)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from impl.harness.pipeline_results import FILLING
from paper_figures import common, markdown, pipelines, style
from paper_figures.pipelines import Line
from paper_figures.published import block as published_block
from paper_figures.statistics import Estimate, median

CLAIMS = ("R6",)


def seconds(line: Line) -> np.ndarray:
    """Return the time between the ends of two updates on the last stage, the first ones of every run left out."""
    rows = common.where(line.rows, quantity="elapsed", status=common.DONE)
    runs = [common.where(rows, seed=seed).sort_values("update") for (seed,) in common.distinct(rows, "seed")]
    gaps = np.concatenate([np.empty(0), *(np.diff(common.numbers(run, "value"))[FILLING:] for run in runs)])
    return gaps[gaps > 0]


def rate(line: Line) -> Estimate:
    """Return samples per second: median and quartiles over updates."""
    batch = float(common.numbers(line.rows, "batch")[0])
    return median(batch / seconds(line))


def per_stage(line: Line, quantity: str) -> list[float]:
    """Return a planned number of every stage, in order; it does not depend on the seed."""
    rows = common.where(line.rows, quantity=quantity).drop_duplicates("stage")
    return [float(v) for v in common.numbers(rows.sort_values("stage"), "value")]


def main_table(frame: pd.DataFrame) -> str:
    """Return the Markdown table: measured rates beside planned idle time and bytes."""
    header = ["method", "P", "samples/s (measured)", "ms per update", "mean ms", "n", "runs", "bubble (planned)"]
    header += ["stash, fullest stage (planned)", "optimizer state, fullest stage"]
    rows = []
    for line in pipelines.lines(frame):
        times, bubble = 1e3 * seconds(line), per_stage(line, "bubble")
        done = times.size > 0
        shared = any(v for (v,) in common.distinct(line.rows, "shared_cores"))
        cells = [
            f"{line.stages}{' (shared cores)' if shared else ''}",
            markdown.estimate(rate(line), 1) if done else line.status,
            markdown.estimate(median(times), 1) if done else line.status,
            markdown.number(float(times.mean()) if done else math.nan, 1),
            str(times.size),
            f"{len(common.distinct(common.where(line.rows, status=common.DONE), 'seed'))}/{line.seeds}",
            f"{bubble[0]:.1%}" if bubble else markdown.DASH,
            *(markdown.size(max(per_stage(line, q), default=math.nan)) for q in ("stash_bytes", "state_bytes")),
        ]
        rows.append([line.name, *cells])
    return markdown.table(header, rows)


def stages_table(found: Sequence[Line]) -> str:
    """Return the Markdown table of bytes of every stage at the largest number of stages."""
    deepest = max(line.stages for line in found)
    rows = []
    for line in (line for line in found if line.stages == deepest):
        for name, quantity in (("stash", "stash_bytes"), ("optimizer state", "state_bytes")):
            rows.append([line.name, name, *(markdown.size(v) for v in per_stage(line, quantity))])
    return markdown.table([f"method, P = {deepest}", "what", *(f"stage {k}" for k in range(deepest))], rows)


def table(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown document of the experiment from its tidy ``frame``."""
    found = pipelines.lines(frame)
    models = ", ".join(sorted(str(v) for (v,) in common.distinct(frame, "model")))
    blocks = [
        f"Model {models}. Rates and times are **measured**: time between the ends of two updates on the last stage, "
        f"median and quartiles over n updates of all runs that are done, the first {FILLING} of each left out. *Runs*: "
        "those that are done, of the ones that were asked for. The mean shows what refreshes of bases cost, which a "
        "median hides. Every update has the same number of samples. *Bubble* is **planned**: the share "
        "of the whole run in which stages wait by the schedule, if a backward takes twice and an update half of a "
        "forward's time and messages none. Bytes are **planned** from shapes: versions of weights kept beside the "
        "newest, and the optimizers' state without the fp32 weights.",
        main_table(frame),
    ]
    if any(v for (v,) in common.distinct(frame, "shared_cores")):
        blocks.append("*shared cores*: more processes than CPU cores, so these times say nothing about scaling.")
    blocks += ["## Bytes by stage (planned)", stages_table(found)]
    blocks += [common.problems(frame), published_block(published, CLAIMS, "rotation's"), common.provenance(frame)]
    return markdown.document("Time of one update on real processes", *blocks)


def figure(frame: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Return the figure: measured samples per second, and planned bytes of the fullest stage."""
    style.apply()
    found = pipelines.lines(frame)
    labels = [f"{line.name}, P = {line.stages}" for line in found]
    result = Figure(figsize=(style.TWO_COLUMNS_IN, 0.9 + 0.22 * len(found)), layout="constrained")
    left, right = result.subplots(1, 2, sharey=True)
    colours = style.palette(common.systems(frame), ())
    for position, line in enumerate(found):
        value = rate(line)
        if value.n:
            pipelines.estimate_bar(left, position, value, colours[line.name])
        else:
            place = left.get_yaxis_transform()
            left.text(0.02, position, line.status, transform=place, va="center", fontsize=7, style="italic")
        stash, state = (max(per_stage(line, q), default=0.0) / 2**20 for q in ("stash_bytes", "state_bytes"))
        right.barh(position, stash, height=0.6, color=colours[line.name])
        right.barh(position, state, left=stash, height=0.6, color=colours[line.name], alpha=0.4)
    left.set_yticks(range(len(found)), labels)
    left.set_ylim(len(found) - 0.5, -0.5)
    left.set_xlim(left=0)
    left.set_xlabel("samples/s (measured; median, quartiles)")
    right.set_xlabel("MiB on the fullest stage (planned)\nfull colour: stash, light: optimizer state")
    return result
