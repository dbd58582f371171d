"""Tables and figures of experiments of which some runs are missing, from what is there.

The workflow makes an experiment's table once all its runs have ended.  After a sweep that stopped half-way this module
makes it from the runs that did, in a folder of its own: at their own place such tables would count as made.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from impl.harness import experiments, tidy
from impl.harness.record import RunFolder
from impl.harness.run import Run
from impl.harness.tables import write_table

FOLDER = "partial"


@dataclass(frozen=True)
class Incomplete:
    """An experiment with ``there`` of its ``asked`` runs ended, and the folder of these runs."""

    name: str
    there: int
    asked: int
    runs: Path
    published: str


def incomplete(folder: Path, tier: str, results: Path) -> Iterator[Incomplete]:
    """Yield the experiments in ``folder`` of which some run has begun on ``tier`` and some has not ended.

    results: the tier's results.  Raises :class:`impl.errors.ConfigError` for a wrong experiment file.
    """
    for name, runs in experiments.all_runs(folder, tier).items():
        is_pipeline = runs[0].command == "pipeline"
        folders = _folders(name, runs, results)
        there = sum(RunFolder(folder).has_result() for folder in folders)
        if there < len(folders) and any(folder.exists() for folder in folders):
            yield Incomplete(name, there, len(folders), folders[0].parent, "rotation" if is_pipeline else "canzona")


def tabulate(found: Incomplete, folder: Path, tier: str, out: Path) -> Path:
    """Write the tidy table of ``found`` as the workflow's rule ``tidy`` does; return its parquet file in ``out``."""
    path = out / found.name / f"{found.name}.parquet"
    write_table(tidy.collect(experiments.load(folder / f"{found.name}.yaml"), tier, found.runs), path)
    return path


def open_folder(results: Path) -> Path:
    """Return the folder ``partial`` of the tier's ``results``, empty."""
    path = results / FOLDER
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def link_rest(folder: Path, tier: str, results: Path) -> None:
    """Link what is whole in ``results`` into its folder ``partial``, so that links between tables lead somewhere.

    A table of which any run is missing is older than its experiment, and left out.
    """
    stale = {
        name
        for name, runs in experiments.all_runs(folder, tier).items()
        if not all(RunFolder(path).has_result() for path in _folders(name, runs, results))
    }
    for path in sorted(results.iterdir()):
        link = results / FOLDER / path.name
        if path.is_dir() and path.name not in (FOLDER, "claims", *stale) and not link.exists():
            link.symlink_to(Path("..", path.name))


def _folders(name: str, runs: Sequence[Run], results: Path) -> list[Path]:
    return list(dict.fromkeys(run.place(results, name) for run in runs))
