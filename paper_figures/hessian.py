"""The Hessian of single matrices: how far from diagonal before and after rotation, and its largest eigenvalue."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from paper_figures import common, markdown, style
from paper_figures.published import block as published_block
from paper_figures.published import claim
from paper_figures.statistics import Estimate, median, paired_ratio

CLAIMS = ("R8", "R17")
BASES = {"before": "unrotated", "after": "rotated", "random": "random bases"}
GROUPS = ("attention", "MLP")
NORM, EIGENVALUE = "normalised", "largest_eigenvalue"
TITLE = "Hessian of single matrices"
INTRO = (
    "All numbers are **measured**, in weights and bases at the end of the training, on sequences that it has not seen. "
    "`normalised (1,1)-norm` is `sum_ij |H_ij| / (d |H|_F)` of the Hessian of the loss in one matrix of `d` elements, "
    "all other weights fixed: 1 if all entries have the same size, `1 / sqrt(d)` for a multiple of the identity. "
    "`rotated` is in the bases of the optimizer, `random bases` are random orthogonal ones, a control. Medians over "
    "layers and seeds with the interquartile interval; ratios are medians over the same matrices with the 95 % "
    "bootstrap interval of that median."
)

Cell = tuple[int, str]


def values(frame: pd.DataFrame, quantity: str, basis: str | None = None) -> dict[Cell, float]:
    """Return one quantity by seed and matrix, NaN where it is missing."""
    rows = common.where(frame, quantity=quantity)
    rows = common.where(rows, basis=basis) if basis else rows
    return {(int(s), str(m)): float(v) for (s, m), v in zip(_cells(rows), common.numbers(rows, "value"), strict=True)}


def ratio(frame: pd.DataFrame, basis: str) -> Estimate:
    """Return the (1,1)-norm in ``basis`` over the unrotated one of the same matrix."""
    ours, before = values(frame, "entry_sum", basis), values(frame, "entry_sum", "before")
    both = [cell for cell in before if cell in ours]
    return paired_ratio([ours[c] for c in both], [before[c] for c in both])


def lower(frame: pd.DataFrame, basis: str) -> tuple[int, int]:
    """Return in how many matrices the (1,1)-norm is lower in ``basis`` than unrotated, and of how many."""
    ours, before = values(frame, "entry_sum", basis), values(frame, "entry_sum", "before")
    pairs = [(ours.get(c, math.nan), b) for c, b in before.items()]
    finite = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    return sum(a < b for a, b in finite), len(finite)


def scale_ratio(frame: pd.DataFrame) -> Estimate:
    """Return the largest eigenvalue of a layer's attention matrices over that of its MLP matrices, over layers."""
    largest: dict[tuple[int, int, str], float] = {}
    rows = common.where(frame, quantity=EIGENVALUE)
    for (seed, layer, group), value in zip(
        rows.loc[:, ["seed", "layer", "group"]].itertuples(index=False, name=None),
        common.numbers(rows, "value"),
        strict=True,
    ):
        key = int(seed), int(layer), str(group)
        largest[key] = float(np.fmax(largest.get(key, math.nan), value))
    layers = sorted({(seed, layer) for seed, layer, _ in largest})
    ours, theirs = ([largest.get((*place, group), math.nan) for place in layers] for group in GROUPS)
    return paired_ratio(ours, theirs)


def main_table(frame: pd.DataFrame) -> str:
    """Return the Markdown table: the normalised (1,1)-norm of each kind of matrix in every basis."""
    header = ["matrix", "part", *BASES.values(), "rotated / unrotated", "random / unrotated", "n"]
    rows = []
    for role, group in common.distinct(frame, "role", "group"):
        mine = common.where(frame, role=role)
        cells = [median(list(values(mine, NORM, basis).values())) for basis in BASES]
        ratios = [ratio(mine, basis) for basis in ("after", "random")]
        texts = [markdown.estimate(cell, 4) for cell in cells] + [markdown.estimate(r) for r in ratios]
        if cells[0].n == 0:
            texts = [common.status_of(mine)] * len(texts)
        rows.append([role, group, *texts, _count(cells[0].n, mine)])
    return markdown.table(header, rows)


def eigenvalue_table(frame: pd.DataFrame) -> str:
    """Return the Markdown table of the largest eigenvalue by magnitude of each kind of matrix."""
    rows = []
    for role, group in common.distinct(frame, "role", "group"):
        mine = common.where(frame, role=role)
        cell = median(list(values(mine, EIGENVALUE).values()))
        text = markdown.estimate(cell, 4) if cell.n else common.status_of(mine)
        rows.append([role, group, text, _count(cell.n, mine)])
    return markdown.table(["matrix", "part", "largest eigenvalue by magnitude, nats", "n"], rows)


def claims_table(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown table that sets R8 and R17 beside what was measured here."""
    before, after = claim(published, "R8")
    quotient = after / before if before else math.nan
    header = ["claim", "quantity", "published", "measured", "matrices where lower"]
    rows = []
    for basis, text in (("after", markdown.number(quotient, 3)), ("random", markdown.DASH)):
        count, total = lower(frame, basis)
        what = f"(1,1)-norm, {BASES[basis]} / unrotated"
        name = "R8, direction only" if basis == "after" else "control"
        rows.append([name, what, text, markdown.estimate(ratio(frame, basis)), f"{count} of {total}"])
    found = markdown.estimate(scale_ratio(frame))
    quoted = "10 to 100" if len(common.where(published, id="R17")) else markdown.DASH
    rows.append(["R17", "largest eigenvalue, attention / MLP of a layer", quoted, found, markdown.DASH])
    return markdown.table(header, rows)


def details_table(frame: pd.DataFrame) -> str:
    """Return the Markdown table of every matrix: (1,1)-norms with standard errors, eigenvalue, Frobenius norm."""
    header = ["matrix", "seed", "shape", *(f"{name}, sum of entries" for name in BASES.values())]
    header += ["Frobenius norm", "largest eigenvalue"]
    rows = []
    for layer, role, seed in common.distinct(frame, "layer", "role", "seed"):
        mine = common.where(frame, layer=layer, role=role, seed=seed)
        ((height, width),) = common.distinct(mine, "rows", "columns")
        shape = f"{int(height)} x {int(width)}" if height and width else markdown.DASH
        sums = [_with_error(mine, "entry_sum", basis) for basis in BASES]
        others = [_with_error(mine, "frobenius"), _with_error(mine, EIGENVALUE)]
        status = common.status_of(mine)
        texts = [*sums, *others] if status == common.DONE else [status] * 5
        rows.append([f"layer {layer} {role}", str(seed), shape, *texts])
    return markdown.table(header, rows)


def trust(frame: pd.DataFrame) -> str:
    """Return a sentence on the errors of products, probes and power iterations; empty if nothing was measured."""
    steps, residuals = (median(list(values(frame, name).values())) for name in ("step_error", "eigen_residual"))
    sums = common.where(frame, quantity="entry_sum")
    relative = median(common.numbers(sums, "standard_error") / common.numbers(sums, "value"))
    if steps.n == 0:
        return ""
    return (
        f"Halving the step of the differences changes a product by {steps.value:.0e} of its length (median). Cauchy "
        f"probes leave a standard error of {relative.value:.0%} of the (1,1)-norm, which the bases of a matrix partly "
        f"share; power iterations end at a residual of {residuals.value:.0e} of the eigenvalue."
    )


def table(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """Return the Markdown document of the experiment from its tidy ``frame``, the published claims quoted below."""
    model, method, settings = (
        ", ".join(sorted(str(v) for (v,) in common.distinct(frame, k))) for k in ("model", "method", "settings")
    )
    updates = ", ".join(str(v) for (v,) in common.distinct(frame, "updates"))
    note = (
        "The published pair of R8 has a normaliser that no text states, so only its direction can be compared. The "
        "text behind R17 names neither model nor numbers of its own."
    )
    blocks = [
        f"Model {model}, {updates} updates with {method} ({settings}). {INTRO}",
        main_table(frame),
        "## Largest eigenvalue (measured)",
        eigenvalue_table(frame),
        "## The claims at this scale (measured beside published)",
        claims_table(frame, published),
        note,
        "## Every matrix (measured; standard error over probes)",
        details_table(frame),
        trust(frame),
        common.problems(frame),
        published_block(published, CLAIMS, "basis rotation's"),
        common.provenance(frame),
    ]
    return markdown.document(TITLE, *blocks)


def figure(frame: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Return the figure: normalised (1,1)-norm by basis, and largest eigenvalue, of each kind of matrix."""
    style.apply()
    result = Figure(figsize=(style.TWO_COLUMNS_IN, 2.6), layout="constrained")
    left, right = result.subplots(1, 2, width_ratios=(3, 2))
    colours = style.palette([(b, b) for b in BASES.values()], known=list(BASES.values()))
    norms = _plotted(common.where(frame, quantity=NORM))
    norms["basis"] = [BASES.get(str(b), str(b)) for b in norms["basis"]]
    _strip(left, norms, frame, hue="basis", palette=colours)
    left.set_ylabel("normalised (1,1)-norm")
    scales = _plotted(common.where(frame, quantity=EIGENVALUE))
    parts = style.palette([(g, g) for g in GROUPS], known=["", "", "", *GROUPS])
    _strip(right, scales, frame, hue="group", palette=parts)
    right.set_ylabel("largest |eigenvalue|, nats")
    result.suptitle("Measured; dots: matrices of all layers and seeds, bar: median", fontsize=8)
    return result


def _strip(axis: Axes, rows: pd.DataFrame, frame: pd.DataFrame, *, hue: str, palette: dict[str, style.Colour]) -> None:
    """Draw one dot a matrix and a bar at the median; a kind of matrix without numbers says why."""
    roles = [str(role) for (role,) in common.distinct(frame, "role")]
    by_hue = len(common.distinct(frame, "basis")) > 1 and hue == "basis"
    if len(rows):
        shared = {"data": rows, "x": "role", "y": "value", "hue": hue, "order": roles, "ax": axis}
        shared |= {"hue_order": [h for h in palette if h in set(rows[hue])], "palette": palette, "dodge": by_hue}
        sns.stripplot(**shared, size=2.5, alpha=0.8, jitter=0.12, legend="auto")
        bars = {"linestyle": "none", "errorbar": None, "marker": "_", "markersize": 12, "markeredgewidth": 1.5}
        dodge = 0.8 - 0.8 / len(shared["hue_order"]) if by_hue else False
        sns.pointplot(**(shared | {"dodge": dodge}), estimator="median", legend=False, **bars)
        axis.set_yscale("log")
        axis.legend(loc="best", title=None)
    else:
        axis.set_xlim(-0.5, len(roles) - 0.5)
        axis.set_xticks(range(len(roles)), roles)
        axis.yaxis.set_major_locator(NullLocator())
    measured = {str(role) for (role,) in common.distinct(rows, "role")}
    for position, role in enumerate(roles):
        if role not in measured:
            text = common.status_of(common.where(frame, role=role))
            axis.text(
                position,
                0.5,
                text,
                transform=axis.get_xaxis_transform(),
                ha="center",
                va="center",
                rotation=90,
                fontsize=7,
                style="italic",
            )
    axis.set_xlabel("matrix")
    axis.tick_params(axis="x", labelsize=6)


def _plotted(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that a logarithmic axis can show."""
    value = common.numbers(rows, "value")
    return rows.loc[np.isfinite(value) & (value > 0)].copy()


def _cells(rows: pd.DataFrame) -> list[tuple[int, str]]:
    return list(rows.loc[:, ["seed", "matrix"]].itertuples(index=False, name=None))


def _count(finite: int, rows: pd.DataFrame) -> str:
    return f"{finite} of {len(common.distinct(rows, 'seed', 'matrix'))}"


def _with_error(rows: pd.DataFrame, quantity: str, basis: str | None = None) -> str:
    mine = common.where(rows, quantity=quantity)
    mine = common.where(mine, basis=basis) if basis else mine
    value, error = (float(common.numbers(mine, c)[0]) for c in ("value", "standard_error"))
    if not math.isfinite(value):
        return markdown.DASH
    return f"{value:.3g} ± {error:.1g}" if math.isfinite(error) else f"{value:.3g}"
