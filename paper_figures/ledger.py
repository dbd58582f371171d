"""The ledger of claims: what was published, what we found, and by the rules whether it is reproduced."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

import pandas as pd

import paper_figures
from impl.errors import ConfigError, unknown
from paper_figures import verdicts
from paper_figures.findings import Answer, Finding, answers
from paper_figures.verdicts import AnswerEntry, ClaimEntry, Verdict

COLUMNS = (
    *("id", "system", "what", "setup", "published", "baseline", "unit", "ours", "ours_baseline", "low", "high"),
    *("ours_unit", "n", "kind", "scale", "effect", "effect_low", "effect_high", "ratio", "ratio_low", "ratio_high"),
    *("verdict", "reason", "setups", "experiment", "figure", "runs"),
)
"""Columns of the ledger, one claim a row.

published, baseline, unit: as published.  ours, ours_baseline, low, high, ours_unit, n, kind, scale: our number, of a
claim without one our effect.  effect: ours, above 1 in the claim's direction.  ratio: ours over the published number.
setups: how they compare.  figure: path relative to the ledger's folder.  runs: ids, with blanks between.
"""
NUMBERS = ("published", "baseline", "ours", "ours_baseline", "low", "high", "effect", "effect_low", "effect_high")
RATIOS = ("ratio", "ratio_low", "ratio_high")
Find = Callable[[pd.DataFrame], list[Finding]]


@dataclass(frozen=True)
class Judged:
    """A claim with everything that answers it, the one that decides first, and the verdict."""

    claim: ClaimEntry
    answers: tuple[Answer, ...]
    verdict: Verdict

    @property
    def answer(self) -> Answer | None:
        """What decides; None if nothing is known."""
        return next((a for a in self.answers if a.known), None)


@dataclass(frozen=True)
class Results:
    """The tidy tables of one tier in ``folder``, read when they are asked for."""

    folder: Path
    tier: str

    @cached_property
    def _read(self) -> dict[tuple[str, str], list[Finding] | str]:
        return {}

    def findings(self, entry: AnswerEntry) -> list[Finding] | str:
        """Return what an experiment's table says of all claims, or why there is nothing."""
        key = entry.experiment, entry.found_by
        if key not in self._read:
            self._read[key] = self._find(entry)
        return self._read[key]

    def _find(self, entry: AnswerEntry) -> list[Finding] | str:
        find = function(entry.found_by)
        path = self.folder / entry.experiment / f"{entry.experiment}.parquet"
        if not path.exists():
            return f"not run: {self._command(entry)}"
        try:
            table = pd.read_parquet(path)
        except (OSError, ValueError) as error:
            return f"{path.name} is corrupt: {str(error).splitlines()[0]}"
        try:
            return find(table)
        except KeyError as error:  # a table of an older version
            return f"the table of {entry.experiment} has no column {error}: make it again"
        except Exception as error:  # one table must not cost the whole ledger; its claims say what happened
            return f"{entry.found_by} failed on the table of {entry.experiment}: {type(error).__name__}: {error}"

    def answers(self, claim: ClaimEntry) -> Iterator[Answer]:
        """Yield what the experiments say of a claim, the best first; an answer without a number says why."""
        asked: set[str] = set()
        for entry in claim.answers:
            if entry.experiment in asked or not (entry.tiers is None or self.tier in entry.tiers):
                continue
            asked.add(entry.experiment)
            found = self.findings(entry)
            if isinstance(found, str):
                yield _nothing(claim, entry, found)
                continue
            mine = answers(found, claim.id, entry.experiment, entry.setup)
            yield from mine or [_nothing(claim, entry, f"{entry.experiment} has nothing on it on this tier")]

    def _command(self, entry: AnswerEntry) -> str:
        return f"make {entry.run}" + (f" TIER={self.tier}" if self.tier != "laptop" else "")


def _nothing(claim: ClaimEntry, entry: AnswerEntry, why: str) -> Answer:
    return Answer(entry.experiment, entry.setup, Finding(claim.id, "value", note=why))


def function(name: str) -> Find:
    """Return the function of this package that ``name``, as ``module.function``, stands for; raises ConfigError."""
    module, _, attribute = name.partition(".")
    folder = Path(paper_figures.__file__).parent
    known = sorted(path.stem for path in folder.glob("claims_of_*.py"))
    if module not in known:
        raise unknown("module of found_by", module, known)
    found = getattr(importlib.import_module(f"paper_figures.{module}"), attribute, None)
    if not callable(found):
        raise ConfigError(f"found_by: paper_figures/{module}.py has no function {attribute!r}")
    return cast(Find, found)


def judge(claims: Sequence[ClaimEntry], results: Path, tier: str) -> list[Judged]:
    """Return every claim with its verdict from the tables in ``results``, the folder of ``tier``.

    A table that is missing, cannot be read, or has only failed runs makes a claim not testable, with the reason.
    """
    tables = Results(results, tier)
    return [_judged(claim, tuple(tables.answers(claim))) for claim in claims]


def _judged(claim: ClaimEntry, found: tuple[Answer, ...]) -> Judged:
    first = next((answer for answer in found if answer.known), None)
    why = "; ".join(dict.fromkeys(f"{a.experiment}: {a.note}" for a in found if a.note))
    return Judged(claim, found, verdicts.judge(claim, first, why))


def frame(judged: Sequence[Judged], results: Path) -> pd.DataFrame:
    """Return the ledger as a table with the columns of :data:`COLUMNS`, one claim a row.

    results: folder of the tier, to see which figures there are.
    """
    table = pd.DataFrame([_row(one, results) for one in judged], columns=list(COLUMNS))
    words = {name: "string" for name in COLUMNS if name not in (*NUMBERS, *RATIOS, "n")}
    return table.astype({**dict.fromkeys((*NUMBERS, *RATIOS), "float64"), "n": "int64", **words})


def _row(one: Judged, results: Path) -> dict[str, object]:
    claim, answer = one.claim, one.answer
    shared: dict[str, object] = {"id": claim.id, "system": claim.system, "what": claim.what, "setup": claim.setup}
    shared |= {"published": claim.value, "baseline": claim.baseline_value, "unit": claim.unit, "n": 0}
    shared |= {"verdict": one.verdict.word, "reason": one.verdict.reason}
    main = answer.main if answer else None
    if answer is None or main is None:
        return shared
    figure = f"{answer.experiment}/{answer.experiment}.png"
    return {
        **shared,
        **{"ours": main.value, "low": main.low, "high": main.high, "ours_unit": main.unit, "n": main.n},
        "ours_baseline": answer.baseline.value if answer.baseline else None,
        **dict(zip(("effect", "effect_low", "effect_high"), _numbers(answer.effect), strict=True)),
        **dict(zip(RATIOS, ratio(claim, answer), strict=True)),
        **{"kind": main.kind, "scale": answer.scale, "setups": answer.setup, "experiment": answer.experiment},
        "figure": f"../{figure}" if (results / figure).exists() else None,
        "runs": " ".join(answer.runs) or None,
    }


def ratio(claim: ClaimEntry, answer: Answer) -> tuple[float, float, float]:
    """Return ours over the published number with its interval; NaN where the two are not to be compared."""
    effect = claim.compare == "effect"
    ours, published = (answer.effect, claim.effect) if effect else (answer.value, claim.value)
    same = effect or (ours is not None and ours.unit == claim.unit)
    if not claim.comparable or not same or published is None or not published > 0:
        return math.nan, math.nan, math.nan
    value, low, high = (number / published for number in _numbers(ours))
    return value, low, high


def _numbers(found: Finding | None) -> tuple[float, float, float]:
    return (found.value, found.low, found.high) if found else (math.nan, math.nan, math.nan)


def run_folder(results: Path, experiment: str, run: str) -> str | None:
    """Return the folder of a run relative to the ledger's, None if it is not there.

    Runs of pipelines are shared; one job of the Hessian has all its seeds.
    """
    for name in (run, run.rpartition("-s")[0]):
        for owner in (experiment, "pipelines"):
            if name and (results / owner / "runs" / name).is_dir():
                return f"../{owner}/runs/{name}"
    return None


def write(claims: Path, results: Path, tier: str, out: Path) -> str:
    """Write the ledger to ``out`` and beside it: .md, .html, .tex, .parquet, .csv and the figure as .pdf and .png; and
    .rst, the first page of the report.

    Returns its head (:func:`paper_figures.ledger_document.head`).  Raises :class:`ConfigError`.
    """
    from impl.harness import tables
    from paper_figures import ledger_document, ledger_figure, render, style

    judged = judge(verdicts.load(claims), results, tier)
    table = frame(judged, results)
    tables.write_table(table, out.with_suffix(".parquet"))
    style.save(ledger_figure.figure(table), out)
    render.write(ledger_document.document(judged, table, results, tier), out)
    tables.write_atomically(out.with_suffix(".rst"), lambda path: path.write_text(ledger_document.front(table, tier)))
    return ledger_document.head(table)
