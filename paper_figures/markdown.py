"""Markdown tables that also read well in a terminal: aligned columns, numbers with intervals, statuses as words.

What a table's cell says is shown as it is, whatever characters it has: names of systems and messages of errors are no
markup.  Markup in a cell is made with :func:`bold`, :func:`emphasis`, :func:`code` and :func:`link`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from urllib.parse import quote

from paper_figures.statistics import Estimate, Paired

DASH = "–"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MARKUP = re.compile(
    r"[\\`*~$]"  # escapes, code, emphasis, GitHub's strikethrough and formulas
    r"|(?<![^\W_])_|_(?![^\W_])"  # inside of a word an underscore is one
    r"|<(?=[^\s=])|&(?=#|\w+;)|(?<=\])\("  # tags, entities, links
)


class Marked(str):
    """Text with markup of its own: a cell that is not taken literally."""

    __slots__ = ()


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


def paired(found: Paired, digits: int = 2) -> str:
    """Return a paired estimate and the p-value of its test; a dash without pairs."""
    text = estimate(found.estimate, digits)
    return text if math.isnan(found.p) else f"{text}, p = {found.p:.2g}"


def size(count: float | None) -> str:
    """Return a number of bytes in binary units; exactly zero stays ``0``."""
    if count is None or not math.isfinite(count):
        return DASH
    if count == 0:
        return "0"
    power = min(int(math.log(abs(count), 1024)), len(UNITS) - 1)
    return f"{count:.0f} B" if power == 0 else f"{count / 1024**power:.2f} {UNITS[power]}"


def literal(text: str) -> Marked:
    """Return ``text`` so that Markdown shows it as it is, on one line; text that is marked already stays."""
    if isinstance(text, Marked):
        return text
    return Marked(_MARKUP.sub(lambda found: "\\" + found[0], " ".join(text.splitlines())))


def bold(text: str) -> Marked:
    """Return ``text``, which must not be blank, in bold."""
    return Marked(f"**{literal(text).strip()}**")


def emphasis(text: str) -> Marked:
    """Return ``text``, which must not be blank, in italics."""
    return Marked(f"*{literal(text).strip()}*")


def code(text: str) -> Marked:
    """Return ``text`` as code, on one line."""
    line = " ".join(text.splitlines())
    fence = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    return Marked(f"{fence} {line} {fence}" if len(fence) > 1 else f"`{line}`")


def link(text: str, target: str) -> Marked:
    """Return a link: ``text`` to a web address or to a file's path relative to the document."""
    return Marked(f"[{literal(text)}]({quote(target, safe='/:?#=&%@+,;~-_.!')})")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with padded columns: the first flush left, the others flush right."""
    cells = [[literal(c).replace("|", "\\|") for c in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])])


def document(title: str, *blocks: str) -> str:
    """Return a Markdown document of ``blocks`` under a heading, empty blocks left out."""
    return "\n\n".join([f"# {title}", *(b for b in blocks if b)]) + "\n"
