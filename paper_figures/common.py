"""What the tables and figures of measured experiments share: labels, statuses, provenance."""

from __future__ import annotations

import json
import math
from typing import Any, cast

import numpy as np
import pandas as pd

from paper_figures.markdown import DASH, literal, table

DONE = "done"


def where(frame: pd.DataFrame, **equal: Any) -> pd.DataFrame:
    """Return the rows in which every named column has the given value."""
    mask = np.ones(len(frame), dtype=bool)
    for name, value in equal.items():
        mask &= (frame[name] == value).to_numpy(dtype=bool)
    return cast(pd.DataFrame, frame.loc[mask])


def distinct(frame: pd.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    """Return the distinct values of ``columns`` in order of first appearance; missing ones are None."""
    rows = frame.loc[:, list(columns)].itertuples(index=False)
    return list(dict.fromkeys(tuple(None if is_missing(v) else v for v in row) for row in rows))


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows as plain mappings."""
    return cast(list[dict[str, Any]], frame.to_dict(orient="records"))


def is_missing(value: Any) -> bool:
    """Whether a cell is None, NaN or pandas' NA."""
    return value is None or value is pd.NA or value is pd.NaT or (isinstance(value, float) and math.isnan(value))


def numbers(frame: pd.DataFrame, column: str) -> np.ndarray:
    """Return a column as floats ``[rows]``, NaN for what is missing."""
    return frame[column].to_numpy(dtype=float, na_value=math.nan)


def mesh_label(dp: int, tp: int, shared_cores: bool = False) -> str:
    """Return how a mesh is displayed; ranks that share CPU cores are marked, their times are no scaling result."""
    label = f"DP{dp} x TP{tp}"
    return f"{label} (shared cores)" if shared_cores else label


def meshes(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return the label and the rows of each mesh, in order of size; where there are several optimizers, of each.

    The label says the model where there are several, and the systems where each pair of them has a timing job.
    """
    several = optimizers(frame)
    if len(several) > 1:
        return [(f"{label}, {name}", rows) for name, own in several for label, rows in meshes(own)]
    models = [model for (model,) in distinct(frame, "model")] if "model" in frame else []
    if len(models) > 1:
        each = [(model, where(frame, model=model)) for model in models]
        return [(f"{model}, {label}", rows) for model, own in each for label, rows in meshes(own)]
    groups = []
    for dp, tp in sorted(distinct(frame, "dp", "tp")):
        for jobs, rows in _jobs(where(frame, dp=dp, tp=tp)):
            shared = "shared_cores" in rows and any(v for (v,) in distinct(rows, "shared_cores"))
            groups.append((mesh_label(dp, tp, shared) + jobs, rows))
    return groups


def _jobs(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return the rows of each timing job of one mesh, whose repetitions count for themselves, and what to call it."""
    found = [run for (run,) in distinct(rows, "run")] if "repetition" in rows and "run" in rows else []
    if len(found) < 2:
        return [("", rows)]
    each = [where(rows, run=run) for run in found]
    return [(f" ({' and '.join(name for _, name in systems(own))})", own) for own in each]


def optimizers(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return the display name and the rows of each optimizer, in the experiment's order."""
    column = "optimizer_name" if "optimizer_name" in frame else "optimizer"
    return [(str(name), where(frame, **{column: name})) for (name,) in distinct(frame, column)]


def systems(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """Return (id, display name) of every system, in the experiment's order."""
    return cast(list[tuple[str, str]], distinct(frame, "system", "system_name"))


def subject(frame: pd.DataFrame) -> str:
    """Return which model and optimizer the rows are about."""
    model, optimizer = (", ".join(sorted(str(v) for (v,) in distinct(frame, k))) for k in ("model", "optimizer"))
    return literal(f"Model {model}, optimizer {optimizer}")


def settings_text(settings: str) -> str:
    """Return a method's settings, JSON, for a cell."""
    return ", ".join(f"{key} {value}" for key, value in json.loads(settings).items()) or DASH


def status_of(rows: pd.DataFrame) -> str:
    """Return ``done`` if every row is done, else the statuses that are not, for a cell."""
    bad = sorted({s for (s,) in distinct(rows, "status")} - {DONE})
    return ", ".join(bad) if bad else DONE


def bullet(what: str, status: str, reason: str | None) -> str:
    """Return a line of a list that says why ``what``, Markdown, has no number."""
    return f"- {what}: **{status}**" + (f": {literal(reason)}" if reason else "")


def problems(frame: pd.DataFrame) -> str:
    """Return one line per run that is not done, with its reason; empty if all are."""
    bad = [row for row in distinct(frame, "run", "status", "error") if row[1] != DONE]
    lines = [bullet(f"`{run}`", status, error) for run, status, error in bad]
    return "\n".join(["## Runs that are not done\n", *lines]) if lines else ""


def provenance(frame: pd.DataFrame) -> str:
    """Return the table that leads every number back to its run: id, commit, settings' hash, versions, hardware."""
    columns = ("run", "status", "commit", "dirty", "config_digest", "torch", "hardware", "started")
    rows = []
    for row in distinct(frame, *columns):
        run, status, commit, dirty, digest, torch, hardware, started = ("" if v is None else str(v) for v in row)
        rows.append(
            [
                run,
                status,
                commit[:10] + (" + changes" if dirty == "True" else ""),
                digest[:12],
                torch,
                hardware,
                started,
            ]
        )
    header = ["run", "status", "commit", "settings", "torch", "hardware", "started"]
    return "## Runs\n\n" + table(header, rows)
