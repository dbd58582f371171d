"""One look for every figure: sizes for one and two columns, a colour-blind-safe palette, one colour per system."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

from impl.errors import ConfigError
from impl.harness.tables import write_atomically

Colour = tuple[float, float, float]
KNOWN = ("canzona", "nv-ping-pong", "nv-lpt-ns", "asc", "sc", "nv-live", "nv-lpt-numel")
"""Systems that have a fixed colour."""
METHODS = ("adamw", "pipedream-lr", "nesterov", "rotation", "rotation-nesterov", "muon", "soap", "adamw-beta1-0")
"""Pipeline methods that have a fixed colour."""
ONE_COLUMN_IN = 3.4
TWO_COLUMNS_IN = 7.0
SETTINGS = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "legend.title_fontsize": 7,
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


def palette(systems: Iterable[tuple[str, str]], known: Sequence[str] = KNOWN) -> dict[str, Colour]:
    """Return one colour-blind-safe colour per display name of (id, display name) pairs.

    A ``known`` id has the same colour in every figure; others take the next free ones in order of appearance.
    """
    pairs = list(dict.fromkeys(systems))
    order = [*known, *(system for system, _ in pairs if system not in known)]
    colours = sns.color_palette("colorblind") + sns.color_palette("cividis", max(len(order) - 10, 0))
    return {name: colours[order.index(system)] for system, name in pairs}


def save(figure: Figure, path: Path) -> None:
    """Write ``figure`` as PDF and PNG beside each other and close it; undated, so equal figures are equal files.

    Both have the figure's own size, so that it fits the column that it was made for.  Neither is ever half written.
    Raises :class:`ConfigError` that names what cannot be written.
    """
    take_literally(figure)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for suffix, undated in ((".pdf", "CreationDate"), (".png", "Software")):
            look = {"format": suffix[1:], "metadata": {undated: None}}
            write_atomically(path.with_suffix(suffix), lambda beside, look=look: figure.savefig(beside, **look))
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or path}: {error.strerror or error}") from None
    plt.close(figure)


def take_literally(figure: Figure) -> None:
    """Let ``figure`` show its texts as they are: a dollar sign in a name begins no formula, as it would in matplotlib.

    Powers of ten, which axes write as formulas, stay.
    """
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_ticklabels(which="both")  # makes them
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if "$" in text.get_text() and "\\mathdefault" not in text.get_text():
            text.set_parse_math(False)


def patch(label: str, colour: Colour) -> Patch:
    """Return a legend entry."""
    return Patch(facecolor=colour, label=label)


def line(label: str, look: dict[str, Any]) -> Line2D:
    """Return a legend entry for a line with ``look``."""
    return Line2D([], [], label=label, **look)
