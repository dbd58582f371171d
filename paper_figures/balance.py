"""How even the plans are: ratios at the published point, over models and meshes, and the sweeps of ``balance``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import common, markdown, style
from paper_figures.published import claim

LOCAL, WHOLE, MEMORY, GPU = "flops_ratio_tp_local", "flops_ratio", "memory_ratio", "per_gpu_flops_ratio"
NAMES = {
    LOCAL: "FLOPs, TP-local",
    WHOLE: "FLOPs, whole",
    MEMORY: "state memory",
    GPU: "busiest GPU",
}
CLAIMS = {"C1": LOCAL, "C2": MEMORY}
"""Published claims, and the column that plans the same quantity."""


def at_point(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the plans of every system at the model and mesh of the sweeps."""
    sweep = common.where(frame, sweep="alpha")
    if sweep.empty:
        return sweep
    model, dp, tp = common.distinct(sweep, "model", "dp", "tp")[0]
    return common.where(frame, sweep="mesh", model=model, dp=dp, tp=tp)


def main_table(frame: pd.DataFrame) -> str:
    """Return the Markdown table of every system at the published point."""
    header = ["model", "mesh", "system", *NAMES.values(), "lower bound"]
    rows = []
    for row in common.records(at_point(frame)):
        values = [cell(row, column) for column in (*NAMES, "lower_bound_gpu")]
        rows.append([row["model_name"], common.mesh_label(row["dp"], row["tp"]), row["system_name"], *values])
    return markdown.table(header, rows)


def claims_table(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown table of published against planned ratios, ASC and Canzona."""
    rows = []
    for name, column in CLAIMS.items():
        for system, value in zip(("asc", "canzona"), claim(published, name), strict=True):
            plans = common.where(at_point(frame), system=system)
            planned = float(common.numbers(plans, column)[0]) if len(plans) else float("nan")
            quotient = planned / value if value else float("nan")
            label = plans["system_name"].iloc[0] if len(plans) else system
            rows.append(
                [
                    name,
                    NAMES[column],
                    label,
                    *(markdown.number(v, d) for v, d in ((value, 2), (planned, 4), (quotient, 3))),
                ]
            )
    return markdown.table(["claim", "largest / mean", "system", "published", "planned", "planned / published"], rows)


def models_table(frame: pd.DataFrame) -> str:
    """Return the Markdown table of every model on the point's mesh: FLOPs ratio over DP ranks, busiest GPU."""
    point = at_point(frame)
    if point.empty:
        return ""
    dp, tp = common.distinct(point, "dp", "tp")[0]
    plans = common.where(frame, sweep="mesh", dp=dp, tp=tp)
    systems = common.systems(plans)
    rows = []
    for model, name in common.distinct(plans, "model", "model_name"):
        mine = common.where(plans, model=model)
        cells = []
        for system, _ in systems:
            found = common.records(common.where(mine, system=system))
            cells.append(f"{cell(found[0], WHOLE)} / {cell(found[0], GPU)}" if found else markdown.DASH)
        bound = common.records(mine)[0]
        rows.append([name, *cells, f"{cell(bound, 'lower_bound_dp')} / {cell(bound, 'lower_bound_gpu')}"])
    return markdown.table(["model", *(name for _, name in systems), "lower bound"], rows)


def sweep_table(frame: pd.DataFrame, sweep: str, keys: dict[str, str], columns: Sequence[str]) -> str:
    """Return the Markdown table of one sweep: its ``keys`` (column to heading), then the ``columns``."""
    headings = {**NAMES, "micro_groups": "micro-groups", "lower_bound_gpu": "lower bound"}
    plans = common.where(frame, sweep=sweep)
    rows = [
        [*(key_text(row[key]) for key in keys), *(cell(row, column) for column in columns)]
        for row in common.records(plans)
    ]
    return markdown.table([*keys.values(), *(headings[c] for c in columns)], rows) if rows else ""


def table(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown document of the experiment from its tidy ``frame``."""
    mesh = {"dp": "DP", "tp": "TP"}
    sections = {
        "The published point (planned)": main_table(frame),
        "Published against planned (claims C1, C2)": claims_table(frame, published),
        "Every model on that mesh: FLOPs over DP ranks / busiest GPU (planned)": models_table(frame),
        "Alpha, without fallback (planned, claim C7)": sweep_table(
            frame, "alpha", {"model_name": "model", **mesh, "alpha": "alpha"}, (*NAMES,)
        ),
        "Micro-group capacity (planned, claim C8)": sweep_table(
            frame,
            "capacity",
            {"model_name": "model", **mesh, "tp_mode": "mode", "capacity_bytes": "bytes"},
            ("micro_groups", GPU),
        ),
        "Cost that the plan is accepted and hosted by (planned, claim C11)": sweep_table(
            frame, "cost", {"model_name": "model", **mesh, "cost": "cost"}, (WHOLE, MEMORY, GPU)
        ),
        "Other optimizers on that mesh (planned)": sweep_table(
            frame,
            "optimizer",
            {"optimizer": "optimizer", "model_name": "model", **mesh, "system_name": "system"},
            (*NAMES, "lower_bound_gpu"),
        ),
    }
    intro = (
        "Every ratio is the largest load over the mean, matrices only, and **planned**: exact arithmetic on shapes. "
        "*TP-local* is the papers' convention, cost of the TP shard; the work that is done is that of whole matrices. "
        "*Busiest GPU* has a barrier after each micro-group, over an even share of all GPUs; no plan of whole matrices "
        "is below the lower bound. Every model and mesh is in the CSV beside this file."
    )
    blocks = [part for title, text in sections.items() if text for part in (f"## {title}", text)]
    skipped = [r for (r,) in common.distinct(common.where(frame, status="skipped"), "reason")]
    notes = "## Not planned\n\n" + "\n".join(f"- {markdown.literal(reason)}" for reason in skipped) if skipped else ""
    return markdown.document("Balance of plans", intro, *blocks, notes)


def figure(frame: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Return the figure: the point with the published values, DP sweep, models, alpha and capacity."""
    style.apply()
    result = Figure(figsize=(style.TWO_COLUMNS_IN, 7.2), layout="constrained")
    axes = result.subplots(3, 2)
    colours = style.palette(common.systems(common.where(frame, sweep="mesh")))
    point = at_point(frame)
    _point(axes[0][0], point, published, colours)
    _models(axes[0][1], frame, point, colours)
    _dp(axes[1][0], frame, point, WHOLE, colours)
    _dp(axes[1][1], frame, point, GPU, colours)
    _alpha(axes[2][0], common.where(frame, sweep="alpha"))
    _capacity(axes[2][1], common.where(frame, sweep="capacity"))
    handles = [style.patch(name, colour) for name, colour in colours.items()]
    result.legend(handles=handles, loc="outside upper center", ncols=3, title="Planned; diamonds: published")
    return result


def _point(axis: Axes, point: pd.DataFrame, published: pd.DataFrame, colours: dict[str, style.Colour]) -> None:
    long = point.melt(id_vars=["system", "system_name"], value_vars=[LOCAL, WHOLE, MEMORY], value_name="ratio")
    long["variable"] = long["variable"].map(lambda name: NAMES[str(name)].replace(", ", ",\n"))
    if len(long):
        sns.barplot(
            long, x="variable", y="ratio", hue="system_name", palette=colours, ax=axis, legend=False, errorbar=None
        )
        names = [system for system, _ in common.systems(point)]
        for name, column in CLAIMS.items():
            for system, value in zip(("asc", "canzona"), claim(published, name), strict=True):
                if system in names:
                    x = [LOCAL, WHOLE, MEMORY].index(column) + ((names.index(system) + 0.5) / len(names) - 0.5) * 0.8
                    axis.plot(
                        x, value, marker="D", color="black", markersize=3.5, markerfacecolor="white", linestyle=""
                    )
        model, dp, tp = common.distinct(point, "model_name", "dp", "tp")[0]
        axis.set_title(f"{model}, {common.mesh_label(dp, tp)}")
    axis.set(xlabel="", ylabel="largest / mean")


def _models(axis: Axes, frame: pd.DataFrame, point: pd.DataFrame, colours: dict[str, style.Colour]) -> None:
    if len(point):
        dp, tp = common.distinct(point, "dp", "tp")[0]
        plans = common.where(frame, sweep="mesh", dp=dp, tp=tp)
        models = [name for (name,) in common.distinct(plans, "model_name")]
        sns.scatterplot(plans, x=GPU, y="model_name", hue="system_name", palette=colours, ax=axis, legend=False)
        bounds = [common.numbers(common.where(plans, model_name=name), "lower_bound_gpu")[0] for name in models]
        sns.scatterplot(x=bounds, y=models, marker="|", s=120, color="black", linewidth=1.2, ax=axis, legend=False)
        axis.margins(y=0.12)
        _log2(axis, "x")
        axis.set_title(f"every model, {common.mesh_label(dp, tp)} (strokes: lower bound)")
    axis.set(xlabel="busiest GPU / even share (FLOPs)", ylabel="")


def _dp(axis: Axes, frame: pd.DataFrame, point: pd.DataFrame, column: str, colours: dict[str, style.Colour]) -> None:
    if len(point):
        model, name, tp = common.distinct(point, "model", "model_name", "tp")[0]
        plans = common.where(frame, sweep="mesh", model=model, tp=tp, status=common.DONE)
        axis.set_title(f"{name}, TP{tp}")
    else:
        plans = point
    if len(plans):
        sns.lineplot(plans, x="dp", y=column, hue="system_name", style="system_name", palette=colours, markers=True,
                     dashes=False, markersize=5, ax=axis, legend=False, errorbar=None)  # fmt: skip
        bound = "lower_bound_gpu" if column == GPU else "lower_bound_dp"
        sns.lineplot(plans, x="dp", y=bound, color="black", linestyle=":", ax=axis, label="lower bound", errorbar=None)
        _log2(axis, "xy")
    axis.set(xlabel="DP ranks", ylabel=f"{NAMES[column]}\nlargest / mean")


def _alpha(axis: Axes, plans: pd.DataFrame) -> None:
    looks = zip((LOCAL, WHOLE, MEMORY, GPU), ((1, 0), (4, 1.5), (1, 1), (4, 1, 1, 1)), "osD^", strict=True)
    for column, dashes, marker in looks:
        axis.plot(common.numbers(plans, "alpha"), common.numbers(plans, column), dashes=dashes, color="black",
                  marker=marker, markersize=3.5, label=NAMES[column])  # fmt: skip
    if len(plans):
        axis.legend()
        model, dp, tp = common.distinct(plans, "model_name", "dp", "tp")[0]
        axis.set_title(f"Canzona, {model}, {common.mesh_label(dp, tp)}")
    axis.set(xlabel="alpha (without fallback)", ylabel="largest / mean", ylim=(0.9, None))


def _capacity(axis: Axes, plans: pd.DataFrame) -> None:
    if len(plans):
        dp = min(size for (size,) in common.distinct(plans, "dp"))
        chosen = common.where(plans, dp=dp)
        data = chosen.assign(mib=common.numbers(chosen, "capacity_bytes") / 2**20)
        sns.lineplot(data, x="mib", y=GPU, hue="tp_mode", style="tp_mode", palette="dark:0.6", markers=True,
                     markersize=5, ax=axis, errorbar=None)  # fmt: skip
        _log2(axis, "x")
        model, tp = common.distinct(chosen, "model_name", "tp")[0]
        axis.legend(title="micro-groups")
        axis.set_title(f"Canzona, {model}, {common.mesh_label(dp, tp)}")
    axis.set(xlabel="micro-group capacity, MiB", ylabel="busiest GPU / even share")


def _log2(axis: Axes, which: str) -> None:
    """Scale the axes ``which`` by powers of two, with plain numbers and a tick at least at every second power."""
    for name in which:
        line = axis.xaxis if name == "x" else axis.yaxis
        if math.isfinite(line.get_minpos()):  # a logarithmic axis without any number cannot be drawn
            getattr(axis, f"set_{name}scale")("log", base=2)
            line.set_major_formatter(lambda value, _: f"{value:g}")
    axis.minorticks_off()


def cell(row: dict[str, Any], column: str) -> str:
    """Return the text of one planned number, or the row's status where there is none."""
    value = row[column]
    if common.is_missing(value):
        status = str(row["status"])
        return markdown.DASH if status == common.DONE else status
    return str(int(value)) if column == "micro_groups" else markdown.number(float(value), 3)


def key_text(value: object) -> str:
    """Return a setting as a cell."""
    return f"{value:g}" if isinstance(value, float) else str(value)
