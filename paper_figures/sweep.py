"""Final loss over learning rates: which is each method's best (the ``sweep`` experiment)."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from paper_figures import common, markdown, pipelines, statistics, style


def main_table(frame: pd.DataFrame) -> str:
    """Return the Markdown table of final held-out losses: one row per method and P, one column per learning rate."""
    rates = sorted({float(lr) for (lr,) in common.distinct(frame, "lr")})
    found = pipelines.lines(frame)
    rows = []
    for key in dict.fromkeys((line.layers, line.stages, line.system) for line in found):
        mine = {line.lr: line for line in found if (line.layers, line.stages, line.system) == key}
        finals = {lr: statistics.mean(list(line.finals.values())).value for lr, line in mine.items() if line.curves}
        best = min(finals, key=lambda lr: finals[lr]) if len(finals) > 1 else None
        cells = []
        for lr in rates:
            text = markdown.number(finals[lr], 3) if lr in finals else mine[lr].status if lr in mine else ""
            if lr in mine and mine[lr].seeds > 1:
                text += f" ({mine[lr].n})"
            cells.append(f"{text}, lowest" if lr == best else text)
        first = next(iter(mine.values()))
        rows.append([first.name, str(first.stages), common.settings_text(first.settings), *cells])
    return markdown.table(["method", "P", "settings", *(f"lr {lr:g}" for lr in rates)], rows)


def table(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown document of the experiment from its tidy ``frame``."""
    intro = (
        "Held-out loss after the last update, **measured**, of the newest weights of all stages. *Lowest* says which "
        "is of a row's, without a test that it is better. At the edge of a row it may not be the method's best. "
        "`python -m impl tuned` writes the best of each method to `experiments/learning_rates.yaml`, which the other "
        "pipeline experiments run with."
    )
    blocks = [intro, main_table(frame), common.problems(frame), common.provenance(frame)]
    return markdown.document("Learning rates and momentum", *blocks)


def figure(frame: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Return the figure: final held-out loss over the learning rate, one panel per P."""
    style.apply()
    found, look = pipelines.lines(frame), pipelines.looks(frame)
    panels = list(dict.fromkeys((line.layers, line.stages) for line in found))
    result = Figure(figsize=(style.TWO_COLUMNS_IN, 3.4), layout="constrained")
    axes = result.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (layers, stages) in zip(axes, panels, strict=True):
        here = [line for line in found if (line.layers, line.stages) == (layers, stages)]
        for name in dict.fromkeys(line.name for line in here):
            mine = sorted((line for line in here if line.name == name and line.curves), key=lambda line: line.lr)
            finals = [statistics.mean(list(line.finals.values())).value for line in mine]
            axis.plot([line.lr for line in mine], finals, marker="o", markersize=3, **look[name])
        pipelines.statuses(axis, here)
        axis.set_xscale("log", base=2)
        rates = sorted({line.lr for line in here})
        axis.set_xticks(rates, [f"{1e3 * lr:g}" for lr in rates])
        axis.set(xlabel="learning rate, 1e-3", title=f"P = {stages}" + (f", {layers} layers" if layers else ""))
    axes[0].set_ylabel("final held-out loss, nats")
    handles = [style.line(name, look[name]) for _, name in common.systems(frame)]
    result.legend(handles=handles, loc="outside upper center", ncols=4, title="Measured, one seed")
    return result
