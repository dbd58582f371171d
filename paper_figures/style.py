"""One look for every figure: sizes for one and two columns, a colour-blind-safe palette, one colour per system."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.figure import Figure

ONE_COLUMN_IN = 3.4
TWO_COLUMNS_IN = 7.0
SETTINGS = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.4,
    "lines.linewidth": 1.2,
    "figure.dpi": 150,
    "savefig.dpi": 200,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "svg.hashsalt": "ricercar",
}


def apply() -> None:
    """Set the style for the figures that follow."""
    sns.set_theme(context="paper", style="whitegrid", palette="colorblind", rc=SETTINGS)


def palette(names: Iterable[str]) -> dict[str, tuple[float, float, float]]:
    """Return one colour-blind-safe colour per name, in order of first appearance."""
    distinct = list(dict.fromkeys(names))
    return dict(zip(distinct, sns.color_palette("colorblind", max(len(distinct), 1)), strict=False))


def save(figure: Figure, path: Path) -> None:
    """Write ``figure`` as PDF and PNG beside each other and close it; undated, so equal figures are equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_suffix(".pdf"), bbox_inches="tight", metadata={"CreationDate": None})
    figure.savefig(path.with_suffix(".png"), bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def note(figure: Figure, text: str) -> None:
    """Write a line below the axes, for what is missing from the figure."""
    if text:
        figure.text(0.5, -0.02, text, ha="center", va="top", fontsize=7, style="italic")
