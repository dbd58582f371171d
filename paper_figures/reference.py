"""The committed reference run: tables, figures and the head of the ledger, copied from a finished laptop run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd

from impl.errors import ConfigError
from paper_figures import common, ledger_document, markdown, verdicts

LARGEST_CSV = 1 << 21
"""Bytes; larger tables are not committed."""
BEGIN, END = "<!-- head of results/laptop/claims.md -->", "<!-- end of head -->"
DECIDED = ("reproduced", "not reproduced")
"""Verdicts that the README shows claim by claim."""


def keep(results: Path, out: Path, readme: Path) -> list[Path]:
    """Copy every table and figure of one tier's ``results`` to ``out``, and the ledger's head into ``readme``.

    Returns what was written.  Raises :class:`ConfigError` if there are no tables, or no place for the head.
    """
    tables = [path for path in sorted(results.glob("*/*.md")) if path.stem == path.parent.name]
    if not tables:
        raise ConfigError(f"no tables in {results}: run `make reproduce` first")
    written = []
    for table in tables:
        sources = [table, table.with_suffix(".png"), *sorted(table.parent.glob("*.csv"))]
        for source in sources:
            if source.suffix == ".csv" and source.stat().st_size > LARGEST_CSV:
                (out / source.name).unlink(missing_ok=True)  # an older, smaller one
            elif source.exists():
                written.append(Path(shutil.copy(source, out / source.name)))
    claims = results / "claims" / "claims.parquet"
    if claims.exists():
        frame = pd.read_parquet(claims)
        picture = "![Ours over the published number, by claim](claims.png)"
        (out / "claims.md").write_text(markdown.document(ledger_document.TITLE, ledger_document.head(frame), picture))
        readme.write_text(with_head(readme.read_text(), frame, readme))
        written.append(readme)
    return written


def with_head(text: str, frame: pd.DataFrame, path: Path) -> str:
    """Return ``text`` with the ledger's short head between its two markers.

    path: of the file, for the message.  Raises :class:`ConfigError` if a marker is missing.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ConfigError(f"{path}: write the lines {BEGIN} and {END} where the head of the ledger belongs")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{short(frame)}\n\n{END}{rest.partition(END)[2]}"


def short(frame: pd.DataFrame) -> str:
    """Return the counts of verdicts and the claims that were decided for or against, as Markdown."""
    rows = [row for row in common.records(frame) if row["verdict"] in DECIDED]
    table = markdown.table(ledger_document.HEADER, [ledger_document.cells(row) for row in rows]) if rows else ""
    return "\n\n".join(filter(None, [verdicts.counts([str(v) for v in frame["verdict"]]), table]))
