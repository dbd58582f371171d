"""The result of a training run, put together from what it wrote and counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from impl.canzona.engine import Engine
from impl.harness.record import read_rows

PHASES = ("grad_reduce", "grad_norm", "optimizer_step", "tp_exchange", "param_sync", "loss")
"""Phases of which a record shows the bytes, also where they are zero; ``loss`` is the mean that is reported."""

NOTES = {"skipped_steps": "steps skipped", "alarms": "alarms"}
"""What a user should look at in a run that is done."""


def from_rows(metrics: Path) -> dict[str, Any]:
    """Return steps, final and held-out loss, the held-out curve and the seconds by phase of a metrics file.

    Steps before a resumed checkpoint count too.  Steps that were slowed, audited or measured, do not count in the
    seconds if there is any other.
    """
    rows = read_rows(metrics)
    steps = [row for row in rows if row["event"] == "step"]
    heldout = [[row["step"], row["loss"]] for row in rows if row["event"] == "heldout"]
    health = [row for row in rows if row["event"] == "health"]
    timed = [row["seconds"] for row in steps if not row["slowed"]] or [row["seconds"] for row in steps]
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "final_loss": steps[-1]["loss"] if steps else None,
        "heldout_loss": heldout[-1][1] if heldout else None,
        "heldout": heldout,
        "skipped_steps": [row["step"] for row in steps if "not_finite" in row],
        "health": health[-1]["worst"] if health else {},
        "alarms": [f"step {row['step']}: {alarm}" for row in health for alarm in row["alarms"]],
        "phase_seconds": {phase: quartiles([s[phase] for s in timed if phase in s]) for phase in _phases(timed)},
    }


def engine_facts(engine: Engine, audit: dict[str, Any] | None) -> dict[str, Any]:
    """Return what the ranks counted in their last step; every rank of the engine's mesh must call.

    audit: of a whole step in this process (:class:`impl.canzona.audit.Audit`), None if none ran.

    ``bytes`` are logical, by phase and mesh axis; those of ``optimizer_step`` over DP are what the audit saw, whoever
    sent it.  ``audit`` has calls and tensor bytes by phase and group.  Both are the largest over ranks, and None
    without an audit.  ``state_bytes`` has a row per rank.
    """
    mesh = engine.mesh
    mine = {"bytes": engine.ledger.bytes(), "audit": audit, "state_bytes": engine.state_bytes()}
    everyone: list[Any] = [None] * (mesh.dp * mesh.tp)
    dist.all_gather_object(everyone, mine, group=mesh.world_group)
    state = [rank["state_bytes"] for rank in everyone]
    if audit is None:
        return {"bytes": None, "audit": None, "state_bytes": state}
    seen = largest([rank["audit"] for rank in everyone])
    counted = largest([rank["bytes"] for rank in everyone])
    in_step = seen.get("optimizer_step", {})
    silent = {axis: in_step.get(axis, {}).get("tensor_bytes", 0) for axis in ("dp", "world")}
    counted["optimizer_step"] = {"dp": silent["dp"], "tp": 0, "world": silent["world"]}
    zero = {"dp": 0, "tp": 0, "world": 0}
    return {
        "bytes": {phase: counted.get(phase, zero) for phase in (*PHASES, *counted)},
        "audit": seen,
        "state_bytes": state,
    }


def largest(trees: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the largest value of every leaf of nested counts; what is missing counts as absent."""
    out: dict[str, Any] = {}
    for key in dict.fromkeys(key for tree in trees for key in tree):
        found = [tree[key] for tree in trees if key in tree]
        out[key] = largest(found) if isinstance(found[0], dict) else max(found)
    return out


def quartiles(values: list[float]) -> dict[str, float]:
    """Return median, quartiles (linear interpolation) and number of ``values``."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "q25": float(low), "q75": float(high), "n": len(values)}


def summary(status: str, result: dict[str, Any], manifest: Path) -> str:
    """Return the last line of a run."""
    if status == "diverged":
        return f"diverged at step {result['steps']}: loss or gradient norm is not finite; record in {manifest}"
    losses = f"loss {result['final_loss']:.4f}, held-out loss {result['heldout_loss']:.4f}"
    notes = [f"{len(result[key])} {what}" for key, what in NOTES.items() if result[key]]
    status = f"{status} ({', '.join(notes)})" if notes else status
    return (
        f"{status}: {result['steps']} steps, {losses}, parameters {result['params_digest'][:12]}; record in {manifest}"
    )


def _phases(timed: list[dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(phase for seconds in timed for phase in seconds))
