"""Markdown tables that also read well in a terminal: aligned columns, numbers with intervals, statuses as words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paper_figures.statistics import Estimate

DASH = "–"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """Return ``value`` with ``digits`` decimals, a dash when there is none."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value:.{digits}f}{' ' + unit if unit else ''}"


def estimate(value: Estimate, digits: int = 2) -> str:
    """Return ``value [low, high]``; a dash without observations, no bracket without an interval."""
    text = number(value.value, digits)
    if math.isfinite(value.low) and math.isfinite(value.high):
        text += f" [{number(value.low, digits)}, {number(value.high, digits)}]"
    return text


def size(count: float | None) -> str:
    """Return a number of bytes in binary units; exactly zero stays ``0``."""
    if count is None or not math.isfinite(count):
        return DASH
    if count == 0:
        return "0"
    power = min(int(math.log(abs(count), 1024)), len(UNITS) - 1)
    return f"{count:.0f} B" if power == 0 else f"{count / 1024**power:.2f} {UNITS[power]}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with padded columns: the first flush left, the others flush right."""
    cells = [[c.replace("|", "\\|").replace("\n", " ") for c in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])])


def document(title: str, *blocks: str) -> str:
    """Return a Markdown document of ``blocks`` under a heading, empty blocks left out."""
    return "\n\n".join([f"# {title}", *(b for b in blocks if b)]) + "\n"
