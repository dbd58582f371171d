"""Times, exposed communication and memory at full scale: the ``projection`` experiment."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import common, markdown, projected, style
from paper_figures.published import claim

POINT = {"model": "qwen3-32b", "optimizer": "muon"}
"""Of the published times."""
TIMES = {
    "forward_backward": "forward + backward, s",
    "optimizer": "optimizer step, s",
    "parameter_gather": "of it blocking parameter gather, s",
    "exposed_communication": "exposed communication, s",
    "iteration": "iteration, s",
}
SAME = 0.01
"""Optimizer steps that differ by less are as fast."""
SWEEPS = {
    "few": "Fewer GPUs (C9, C10)",
    "a100": "On A100s",
    "capacity": "Micro-group capacity (C8)",
    "alpha": "Alpha (C7)",
    "uneven": "Uneven collectives: rooted calls, or padded to the largest segment",
    "split": "Fused matrices split",
}


def main_table(frame: pd.DataFrame) -> str:
    """Return the Markdown table of every system at the published point."""
    rows = common.where(frame, grid="main", **POINT)
    return _times(rows, ("system_name",), ["system"])


def table(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown document of the experiment, the published claims beside ours."""
    main = common.where(frame, grid="main")
    reference = str(main["reference"].iloc[0])
    name = markdown.literal(dict(common.systems(main)).get(reference, reference))
    blocks = [
        "Times are **projected** from the plans that the engine executes: value and, in brackets, the band that 90 of "
        f"100 draws of the inputs lead to. Memory is **planned**: exact shapes, activations by formula. `/ {name}` "
        "compares the optimizer step with the same draws on both sides. The optimizer step of the slowest rank "
        "contains the exchange over TP and, where it blocks, the gather of parameters. "
        + projected.hardware_line(main),
        "## The published point: Qwen3-32B, Muon\n",
        projected.note(main),
        main_table(frame),
        projected.claims(frame, published),
    ]
    for optimizer, rows in common.optimizers(main):
        times = _times(rows, ("model_name", "system_name"), ["model", "system"])
        blocks += [f"## All models, {markdown.literal(optimizer)}", times]
    blocks += [
        "## Memory at the published point, GB on the fullest rank (planned)",
        _memory(common.where(main, **POINT)),
    ]
    for grid, title in SWEEPS.items():
        rows = common.where(frame, grid=grid)
        if len(rows):
            keys = ("model_name", "optimizer_name", "dp", "tp", "system_name", "varied")
            header = ["model", "optimizer", "DP", "TP", "system", "setting"]
            words = [projected.note(rows), _capacity(rows) if grid == "capacity" else ""]
            blocks += [f"## {title}", *words, _times(rows, keys, header)]
    blocks += [projected.evidence(main), projected.reasons(frame)]
    return markdown.document("What a step costs on 256 GPUs", *blocks)


def figure(frame: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Return the figure: parts of an iteration at the published point, and the optimizer step over the models."""
    style.apply()
    main = common.where(frame, grid="main")
    point = common.where(main, **POINT)
    names = [name for _, name in common.systems(main)]
    colours = style.palette(common.systems(main))
    optimizers = common.optimizers(main)
    result = Figure(figsize=(style.TWO_COLUMNS_IN, 5.4), layout="constrained")
    upper, lower = cast(Any, result.subfigures(2, 1, height_ratios=(1.0, 1.15)))
    left, right = upper.subplots(1, 2, sharey=True)
    for axis, quantity, number in ((left, "iteration", 1), (right, "optimizer", 0)):
        _bars(axis, point, quantity, names, colours)
        label = {"iteration": "iteration, s", "optimizer": "optimizer step, s"}[quantity]
        axis.set_xlabel(label)
        for system, value in zip(("nv-ping-pong", "canzona"), claim(published, ("C3", "C4")[number]), strict=True):
            row = dict(common.systems(main)).get(system)
            if row in names:
                axis.plot(value, names.index(row), "D", color="black", markerfacecolor="white", markersize=4, zorder=4)
    left.set_title("Qwen3-32B, Muon, DP32 x TP8; diamonds: published", loc="left")
    axes = lower.subplots(1, len(optimizers), squeeze=False, sharey=True)[0]
    for axis, (optimizer, rows) in zip(axes, optimizers, strict=True):
        _models(axis, rows, colours)
        axis.set_title(optimizer)
    axes[0].set_ylabel("optimizer step, s")
    handles: list[Any] = [style.patch(name, colours[name]) for name in names]
    handles += projected.numberless_handle(main)
    lower.legend(handles=handles, loc="outside lower center", ncols=2)
    result.suptitle(projected.subtitle(frame), fontsize=8)
    return result


def _times(frame: pd.DataFrame, keys: tuple[str, ...], header: list[str]) -> str:
    reference = str(frame["reference"].iloc[0]) if len(frame) else ""
    name = dict(common.systems(frame)).get(reference, reference)
    rows = []
    for key, mine in projected.rows_of(frame, *keys):
        if [status for (status,) in common.distinct(mine, "status")] == ["not possible"]:  # said below, with the reason
            continue
        labels = ["" if value is None else str(value) for value in key.values()]
        cells = [projected.cell(mine, quantity) for quantity in TIMES]
        ratio = projected.cell(mine, "optimizer", 2, ratio=True)
        mfu = projected.cell(mine, "mfu", 0)
        rows.append([*labels, *cells, ratio, mfu, projected.gigabytes(mine, "memory")])
    return markdown.table([*header, *TIMES.values(), f"optimizer step / {name}", "MFU, %", "memory, GB"], rows)


def _capacity(frame: pd.DataFrame) -> str:
    """Return in words from which micro-group capacity on the optimizer step is as fast as it gets."""
    steps = common.records(common.where(frame, quantity="optimizer"))
    if not steps:
        return ""
    fastest = min(float(row["value"]) for row in steps)
    enough = next(row for row in steps if float(row["value"]) <= (1 + SAME) * fastest)
    held = common.where(frame, quantity="memory/micro_groups")
    sizes = dict(zip(held["varied"], common.numbers(held, "value"), strict=True))
    capacity = int(str(enough["varied"]).partition("=")[2])
    return (
        f"From {capacity / 2**20:.0f} MiB on (fp32 gradient shards per host and source) the step is within {SAME:.0%} "
        f"of its fastest; the buffers of its micro-groups take {sizes[enough['varied']] / 1e9:.1f} GB there and "
        f"{max(sizes.values()) / 1e9:.1f} GB at the largest capacity. Published: 512 MB is enough, more only costs "
        "memory (which bytes are counted is not said)."
    )


def _memory(frame: pd.DataFrame) -> str:
    quantities = [q for (q,) in common.distinct(frame, "quantity") if q is not None and str(q).startswith("memory/")]
    parts = [str(q) for q in quantities if q != "memory/device"]
    rows = []
    for key, mine in projected.rows_of(frame, "system_name"):
        cells = [projected.gigabytes(mine, quantity) for quantity in (*parts, "memory", "memory/device")]
        rows.append([str(key["system_name"]), *cells])
    names = [part.removeprefix("memory/").replace("_", " ") for part in parts]
    return markdown.table(["system", *names, "together", "the card has"], rows)


def _bars(axis: Axes, frame: pd.DataFrame, quantity: str, names: list[str], colours: dict[str, Any]) -> None:
    largest = 0.0
    for position, name in enumerate(names):
        mine = common.where(frame, system_name=name)
        rows = common.where(mine, quantity=quantity)
        if rows.empty:
            text = projected.cell(mine, quantity)
            axis.text(
                0.02, position, text, transform=axis.get_yaxis_transform(), va="center", fontsize=7, style="italic"
            )
            continue
        value, error = projected.errors(rows)
        axis.barh(position, value, height=0.7, color=colours[name], alpha=0.6)
        axis.errorbar(value, [position], xerr=error, color="black", linewidth=1.0, capsize=2, zorder=3)
        largest = max(largest, value[0] + error[1][0])
    axis.set_xlim(0, 1.08 * largest if largest else 1)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)


def _models(axis: Axes, frame: pd.DataFrame, colours: dict[str, Any]) -> None:
    models = [str(name) for (name,) in common.distinct(frame, "model_name")]
    systems = [name for _, name in common.systems(frame)]
    for number, name in enumerate(systems):
        mine = common.where(frame, system_name=name)
        shift = 0.6 * ((number + 0.5) / len(systems) - 0.5)
        rows, missing = common.where(mine, quantity="optimizer"), projected.numberless(mine)
        places, crosses = (
            np.array([models.index(str(model)) for model in some["model_name"]]) + shift for some in (rows, missing)
        )
        value, error = projected.errors(rows)
        axis.errorbar(places, value, yerr=error, fmt="o", markersize=3, linewidth=0.9, color=colours[name])
        projected.mark_numberless(axis, list(crosses), colours[name])
    if np.isfinite(common.numbers(common.where(frame, quantity="optimizer"), "value")).any():
        axis.set_yscale("log")  # an axis without any number cannot be logarithmic
    axis.set_xticks(range(len(models)), [name.removeprefix("Qwen3-") for name in models])
    axis.set_xlabel("Qwen3")
