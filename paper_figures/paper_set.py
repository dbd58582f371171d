"""The files that a paper includes: every figure as PDF and every table as LaTeX, in one folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from impl.errors import ConfigError
from paper_figures import style

MARK = "README.tex"
"""What tells a folder of this kind."""
NOTE = """\
% Made by `make report` from {source}.
% Figures are {one} in (one column) or {two} in wide (two columns): include them at their own size.
% Tables are bare tabulars with booktabs rules: \\usepackage{{booktabs}}, then \\input them.
"""


def gather(results: Path, out: Path) -> list[Path]:
    """Copy the figures and tables of one tier's ``results`` to the folder ``out``; return the copies.

    What an earlier call put there is replaced.  Raises :class:`ConfigError` if there is nothing to copy, or if ``out``
    holds anything else.
    """
    sources = [path for pattern in ("*/*.pdf", "*/*.tex") for path in sorted(results.glob(pattern))]
    if not sources:
        raise ConfigError(f"no tables in {results}: run `make reproduce` first")
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise ConfigError(f"{out} holds other files: give a new folder, or an empty one")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    note = NOTE.format(source=results, one=style.ONE_COLUMN_IN, two=style.TWO_COLUMNS_IN)
    (out / MARK).write_text(note)
    return [Path(shutil.copy(path, out / path.name)) for path in sources]
