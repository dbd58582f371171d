"""The record of the Hessian experiment as a tidy table: one number a row."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd

from impl.harness.hessian_run import BASES, INVARIANT, PER_BASIS, number, places
from impl.harness.hessian_spec import HessianRun
from impl.harness.record import RunFolder, read_rows

KEYS = ("run", "status", "error", "kind", "model", "method", "settings", "updates", "seed")
PLACE = ("matrix", "layer", "role", "group", "rows", "columns")
PROVENANCE = ("commit", "dirty", "config_digest", "torch", "hardware", "started")
COLUMNS = (*KEYS, *PLACE, "basis", "quantity", "value", "standard_error", "unit", *PROVENANCE)
"""Columns of the tidy table: one number a row."""


def table(run: HessianRun, out: Path) -> pd.DataFrame:
    """Return the tidy table of the record in ``out``; a number that is missing is a row with NaN and its status."""
    folder = RunFolder(out)
    manifest, rows = folder.manifest() or {}, read_rows(folder.metrics)
    measured = {(r["seed"], r["matrix"]): r for r in rows if r["event"] == "hessian"}
    diverged = {row["seed"] for row in rows if row["event"] == "training" and row["diverged"]}
    git, versions, hardware = (manifest.get(k) or {} for k in ("git", "versions", "hardware"))
    shared = {
        "kind": "measured",
        "model": run.training.model,
        "method": run.training.method,
        "settings": json.dumps(run.training.method_settings, sort_keys=True),
        "updates": run.training.steps,
        "commit": git.get("commit"),
        "dirty": git.get("dirty"),
        "config_digest": manifest.get("config_digest"),
        "torch": versions.get("torch"),
        "hardware": hardware.get("gpu") or hardware.get("cpu"),
        "started": manifest.get("started"),
    }
    nothing = [number(quantity, math.nan, basis=basis) for quantity in PER_BASIS for basis in BASES]
    nothing += [number(quantity, math.nan) for quantity in INVARIANT]
    found = []
    for seed in run.seeds:
        for place in places(run):
            row = measured.get((seed, place.name))
            status = "diverged" if seed in diverged else "done" if row else manifest.get("status", "missing")
            error = manifest.get("error") or ("the training diverged" if seed in diverged else "")
            keys = {"run": f"{run.id}-s{seed}", "status": status, "error": error, "seed": seed}
            where = {"matrix": place.name, "layer": place.layer, "role": place.role, "group": place.group}
            where |= dict(zip(("rows", "columns"), row["shape"] if row else (None, None), strict=True))
            found += [shared | keys | where | value for value in (row["numbers"] if row else nothing)]
    frame = pd.DataFrame(found, columns=list(COLUMNS))
    return frame.astype({"rows": "Int64", "columns": "Int64", "value": "float64", "standard_error": "float64"})
