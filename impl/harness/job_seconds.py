"""How long runs took: from the records of finished ones, and from a table of such times that is kept.

What makes two runs take equally long is their work: all settings but seed, learning rate and the like.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from impl.errors import ConfigError
from impl.harness.record import write_atomically
from impl.harness.run import Run
from impl.harness.run_state import AGAIN
from impl.harness.tiers import canonical_digest

COLUMNS = ("experiment", "run", "work", "ranks", "cores", "seconds", "n")
"""Of the table: a row per kind of work.  run: the name of the first such run; seconds: median over ``n`` runs.

cores: that one of them held.
"""
NO_WORK = ("seed", "lr", "weight_decay", "checkpoint_every", "target", "init_from", "resume_from")
"""Settings that change no time, or hardly any."""


@dataclass(frozen=True)
class Seconds:
    """The measured time of a kind of work: median seconds of ``n`` finished runs, each on ``cores`` CPU cores."""

    seconds: float
    cores: int
    n: int


@dataclass(frozen=True)
class Ended:
    """What is needed of a manifest: how the run ended, how long it took, CPU cores of the machine, whether a GPU."""

    status: str
    seconds: float | None
    cores: int | None
    gpu: bool


def work(run: Run) -> str:
    """Return the first eight digits of the hash of what decides how long ``run`` takes."""
    settings = run.spec.resolved()
    for part in (settings, settings.get("base", {})):
        for name in NO_WORK:
            part.pop(name, None)
    return canonical_digest({"command": run.command, **settings})[:8]


def ended(folder: Path) -> Ended | None:
    """Return how the run in ``folder`` ended, None if it has not or should go on."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        manifest = {}
    if not isinstance(manifest, dict):
        manifest = {}
    status, hardware = str(manifest.get("status", "corrupt")), manifest.get("hardware") or {}
    if status in AGAIN or manifest.get("lost"):
        return None
    seconds = manifest.get("seconds")
    return Ended(
        status, float(seconds) if seconds is not None else None, hardware.get("cores"), bool(hardware.get("gpu"))
    )


def of_records(runs: Mapping[str, Iterable[Run]], results: Path, *, gpu: bool = False) -> list[dict[str, Any]]:
    """Return a row of :data:`COLUMNS` for every kind of work that a finished run below ``results`` did.

    gpu: of runs on GPUs, else of those without.  Shared runs count for the first experiment by name.
    """
    found: dict[str, list[Ended]] = defaultdict(list)
    first: dict[str, tuple[str, Run]] = {}
    seen = set()
    for experiment, group in sorted(runs.items()):
        for run in group:
            folder = run.place(results, experiment)
            if folder in seen:
                continue
            seen.add(folder)
            end = ended(folder)
            if end is not None and end.status == "done" and end.seconds is not None and end.gpu is gpu:
                key = work(run)
                found[key].append(end)
                first.setdefault(key, (experiment, run))
    return [_row(*first[key], key, ends) for key, ends in found.items()]


def by_work(rows: Iterable[Mapping[str, Any]]) -> dict[str, Seconds]:
    """Return the times of rows of :data:`COLUMNS` by their work."""
    return {str(row["work"]): Seconds(float(row["seconds"]), int(row["cores"]), int(row["n"])) for row in rows}


def write(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write rows of :data:`COLUMNS` as CSV, sorted; raises :class:`ConfigError` if it cannot."""
    ordered = sorted(rows, key=lambda row: (row["experiment"], row["run"], row["work"]))
    lines = [",".join(COLUMNS), *(",".join(str(row[name]) for name in COLUMNS) for row in ordered)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "\n".join(lines) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def read(path: Path) -> dict[str, Seconds]:
    """Return the times in a file that :func:`write` made, none if there is no file.

    Raises :class:`ConfigError` for one that cannot be read.
    """
    try:
        with path.open(newline="") as file:
            return by_work(list(csv.DictReader(file)))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no table of {', '.join(COLUMNS)}: {error}") from None


def _row(experiment: str, run: Run, key: str, ends: list[Ended]) -> dict[str, Any]:
    ranks = run.spec.world_size
    cores = max(min(ranks, end.cores or ranks) for end in ends)
    seconds = round(statistics.median(end.seconds for end in ends if end.seconds is not None), 1)
    values = (experiment, run.name, key, ranks, cores, seconds, len(ends))
    return dict(zip(COLUMNS, values, strict=True))
