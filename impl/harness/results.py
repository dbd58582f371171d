"""The result of a training run, put together from what it wrote and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from impl.canzona.collectives import all_gather_single
from impl.canzona.mesh import Mesh
from impl.harness.record import read_rows

PHASES = ("grad_reduce", "grad_norm", "optimizer_step", "tp_exchange", "param_sync", "loss")
"""Phases that could communicate; ``loss`` is the mean that is reported."""


def from_rows(metrics: Path) -> dict[str, Any]:
    """Return steps, final and held-out loss, the held-out curve and the seconds by phase of a metrics file.

    Steps before a resumed checkpoint count too.  The audited step, which is slow, does not count in the seconds if
    there is any other.
    """
    rows = read_rows(metrics)
    steps = [row for row in rows if row["event"] == "step"]
    heldout = [[row["step"], row["loss"]] for row in rows if row["event"] == "heldout"]
    timed = [row["seconds"] for row in steps if not row["audited"]] or [row["seconds"] for row in steps]
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "final_loss": steps[-1]["loss"] if steps else None,
        "heldout_loss": heldout[-1][1] if heldout else None,
        "heldout": heldout,
        "phase_seconds": {phase: quartiles([s[phase] for s in timed if phase in s]) for phase in _phases(timed)},
    }


def all_phases(counted: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Return the bytes by phase with a zero for every communication phase that sent nothing."""
    return {phase: counted.get(phase, {"dp": 0, "tp": 0, "world": 0}) for phase in (*PHASES, *counted)}


def quartiles(values: list[float]) -> dict[str, float]:
    """Return median, quartiles (linear interpolation) and number of ``values``."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "q25": float(low), "q75": float(high), "n": len(values)}


def gather_state_bytes(mine: dict[str, int], mesh: Mesh) -> list[dict[str, int]]:
    """Return the bytes of masters and optimizer state of every rank; all ranks must call."""
    own = torch.tensor([mine["master"], mine["state"]], device=mesh.device)
    rows = own.new_empty(2 * mesh.dp * mesh.tp)
    all_gather_single(rows, own, group=mesh.world_group)
    return [{"master": master, "state": state} for master, state in rows.view(-1, 2).tolist()]


def summary(status: str, result: dict[str, Any], manifest: Path) -> str:
    """Return the last line of a run."""
    if status == "diverged":
        return f"diverged at step {result['steps']}: loss or gradient norm is not finite; record in {manifest}"
    losses = f"loss {result['final_loss']:.4f}, held-out loss {result['heldout_loss']:.4f}"
    return (
        f"{status}: {result['steps']} steps, {losses}, parameters {result['params_digest'][:12]}; record in {manifest}"
    )


def _phases(timed: list[dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(phase for seconds in timed for phase in seconds))
