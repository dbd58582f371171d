"""The ledger of claims as a document, and its head for the README and the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from paper_figures import common, markdown, render, verdicts
from paper_figures.findings import Answer, Finding
from paper_figures.ledger import Judged, run_folder

TITLE = "Claims, and what we found"
SYSTEMS = {"canzona": "Canzona", "rotation": "Basis rotation"}
INTRO = (
    "One row a claim of the papers, or of texts about them, with the number of ours that answers it best. Every number "
    "of ours says its kind: *measured*, *planned* (exact arithmetic on shapes) or *projected* (kernel times on a "
    "timeline). Two numbers with an arrow are the baseline's and the system's. *Ratio* is ours over the published "
    "number, for C3 to C5 and R8 that of the effects (baseline over system). The rules stand below."
)
FRONT_STYLE = """\
<style>
.prose { max-width: 72rem; }
.table { overflow-x: auto; }
.table table { border-collapse: collapse; font-size: 0.75rem; font-variant-numeric: tabular-nums; }
.table th, .table td { padding: 0.1rem 0.6rem; text-align: left; white-space: nowrap; }
.table td { border-bottom: 1px solid #c9c9c9; }
.table .number { text-align: right; }
</style>
"""
HEADER = ["claim", "what", "published", "ours", "n", "ratio", "verdict"]
ROW = dict[str, Any]


def head(frame: pd.DataFrame) -> str:
    """Return counts and the table of the claims on which there is a number of ours, as Markdown for the terminal."""
    rows = [row for row in common.records(frame) if not common.is_missing(row["ours"])]
    rest = len(frame) - len(rows)
    blocks = [verdicts.counts([str(v) for v in frame["verdict"]])]
    blocks += [markdown.table(HEADER, [cells(row) for row in rows])] if rows else []
    blocks += [f"On the other {rest} claims there is no number of ours; the ledger says why."] if rest else []
    return "\n\n".join(blocks)


def front(frame: pd.DataFrame, tier: str) -> str:
    """Return the first page of Snakemake's report as reStructuredText: the verdicts on ``tier``, claim by claim."""
    rows = common.records(frame)
    blocks = [
        f"# Was the paper reproduced?\n\n{verdicts.counts([str(v) for v in frame['verdict']])} Tier *{tier}*.",
        "Every number of ours says its kind: *measured* (this machine, this run), *planned* (exact arithmetic on "
        "shapes) or *projected* (kernel times on a timeline). The ledger, under *Results*, says by which rules a "
        "verdict is given, why a claim is not testable here, and leads from every number to its runs.",
        markdown.table(HEADER, [cells(row) for row in rows]),
    ]
    text = FRONT_STYLE + render.body("\n\n".join(blocks))
    return ".. raw:: html\n\n" + "\n".join(f"   {line}" for line in text.splitlines()) + "\n"


def document(judged: Sequence[Judged], frame: pd.DataFrame, results: Path, tier: str) -> str:
    """Return the ledger as Markdown: counts, table, figure, rules, and every claim in detail.

    Links are relative to the ledger's folder, ``claims`` in ``results``, the folder of ``tier``.
    """
    rows = common.records(frame)
    blocks = [
        f"{verdicts.counts([str(row['verdict']) for row in rows])} Tier *{tier}*.",
        INTRO,
    ]
    for system, name in SYSTEMS.items():
        mine = [row for row in rows if row["system"] == system]
        blocks += [
            f"## {name}",
            markdown.table([*HEADER, "from"], [[*cells(row), _source(row, results)] for row in mine]),
        ]
    if any(math.isfinite(row["ratio"]) for row in rows):
        blocks += ["![Ours over the published number, by claim](claims.png)"]
    blocks += ["## How a verdict is given", verdicts.rules(), "## Every claim"]
    blocks += [_details(one, results) for one in judged]
    return markdown.document(TITLE, *blocks)


def cells(row: ROW) -> list[str]:
    """Return the cells of one claim in the order of :data:`HEADER`."""
    n = str(row["n"]) if row["n"] else markdown.DASH
    return [str(row["id"]), str(row["what"]), published(row), ours(row), n, _ratio(row), str(row["verdict"])]


def published(row: ROW) -> str:
    """Return the published numbers with their unit, or the words that stand for them."""
    unit = "" if common.is_missing(row["unit"]) else str(row["unit"])
    if common.is_missing(row["published"]):
        return unit or markdown.DASH
    base = "" if common.is_missing(row["baseline"]) else f"{row['baseline']:g} -> "
    return f"{base}{row['published']:g} {unit}".strip()


def ours(row: ROW) -> str:
    """Return our number with interval, unit and kind; of a claim without one why there is none, if that is short."""
    if common.is_missing(row["ours"]):
        return markdown.DASH
    base = "" if common.is_missing(row["ours_baseline"]) else f"{_number(row['ours_baseline'])} -> "
    text = f"{base}{_band(row['ours'], row['low'], row['high'])}"
    return f"{text} {'' if common.is_missing(row['ours_unit']) else row['ours_unit']}".strip() + f", {row['kind']}"


def _ratio(row: ROW) -> str:
    return _band(row["ratio"], row["ratio_low"], row["ratio_high"]) if math.isfinite(row["ratio"]) else markdown.DASH


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _band(value: float, low: float, high: float) -> str:
    text = _number(value)
    return f"{text} [{_number(low)}, {_number(high)}]" if math.isfinite(low) and low < high else text


def _source(row: ROW, results: Path) -> str:
    return markdown.DASH if common.is_missing(row["experiment"]) else _table_link(str(row["experiment"]), results)


def _table_link(experiment: str, results: Path) -> str:
    """Return a link to an experiment's table, as HTML where there is one; its name where there is no table."""
    for suffix in (".html", ".md"):
        if (results / experiment / f"{experiment}{suffix}").exists():
            return markdown.link(experiment, f"../{experiment}/{experiment}{suffix}")
    return experiment


def _details(one: Judged, results: Path) -> str:
    claim, verdict = one.claim, one.verdict
    lines = [
        f"### {claim.id}: {claim.what}\n",
        f"- **{verdict.word}**: {markdown.literal(verdict.reason)}",
        f"- published for: {markdown.literal(claim.setup)}",
    ]
    lines += [f"- to know: {markdown.literal(claim.note)}"] if claim.note else []
    for answer in one.answers:
        lines += _answer(one, answer, results)
    return "\n".join(lines)


def _answer(one: Judged, answer: Answer, results: Path) -> Iterator[str]:
    place = f"{_table_link(answer.experiment, results)}" + (f" ({answer.scale})" if answer.scale else "")
    if not answer.known:
        yield f"- {place}: {markdown.literal(answer.note or 'no number')}"
        return
    numbers = ", ".join(_part(part) for part in answer.parts if part.known)
    note = f". {markdown.literal(answer.note)}" if answer.note else ""
    decides = one.answer is answer
    verdict = "" if decides or one.claim.not_testable else f"; alone: {verdicts.judge(one.claim, answer).word}"
    yield f"- {place}: {numbers}; setup *{answer.setup}*{verdict}{note}"
    figure = results / answer.experiment / f"{answer.experiment}.png"
    if figure.exists():
        yield f"    - {markdown.link('figure', f'../{answer.experiment}/{answer.experiment}.png')}"
    if answer.runs:
        yield f"    - runs: {', '.join(_run_link(run, answer.experiment, results) for run in answer.runs)}"


def _part(found: Finding) -> str:
    unit = f" {found.unit}" if found.unit else ""
    count = f", n = {found.n}" if found.n else ""
    return f"{found.part} {_band(found.value, found.low, found.high)}{unit} [{found.kind}{count}]"


def _run_link(run: str, experiment: str, results: Path) -> str:
    folder = run_folder(results, experiment, run)
    return markdown.code(run) if folder is None else markdown.link(run, folder)
