"""What a pipeline run found, from its rows to what a user reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from impl.harness.record import read_rows

FILLING = 5
"""First updates of a run that are not timed: they fill the pipeline and compute first bases (docs/numbers.md)."""


def iterations_to(target: float, heldout: Sequence[Sequence[float]]) -> float | None:
    """Return where the curve ``[[update, loss], ...]`` first reaches ``target``, interpolated; None if never."""
    before: Sequence[float] | None = None
    for point in heldout:
        update, loss = point
        if loss is not None and loss <= target:
            if before is None or before[1] is None:
                return float(update)
            return before[0] + (update - before[0]) * (before[1] - target) / (before[1] - loss)
        before = point
    return None


def result(target: float | None, metrics: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a run from its rows and ``facts``; losses that are not finite are None."""
    rows = read_rows(metrics)
    losses = [row["loss"] for row in rows if row["event"] == "step"]
    heldout = [[row["step"], row["loss"]] for row in rows if row["event"] == "heldout"]
    return {
        "steps": len(losses),
        "final_loss": losses[-1] if losses else None,
        "losses": losses,
        "heldout_loss": heldout[-1][1] if heldout else None,
        "heldout": heldout,
        "target": target,
        "iterations_to_target": None if target is None else iterations_to(target, heldout),
        **facts,
    }


def report(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return what ``pipeline --json`` prints of a manifest."""
    config, found = manifest["config"], manifest["result"] or {}
    named = {key: config[key] for key in ("model", "method", "stages", "runtime", "seed", "lr")}
    return {"status": manifest["status"], **named, **found, "seconds": manifest["seconds"], "error": manifest["error"]}


def summary(manifest: dict[str, Any], out: Path | None) -> str:
    """Return the last lines of a run for a reader."""
    config, found, status = manifest["config"], manifest["result"], manifest["status"]
    where = f"; record in {out}" if out is not None else ""
    if not found:
        return f"{status}{where}" if where or status != "unfinished" else "unfinished; without --out nothing is kept"
    name = f"{config['method']} on {config['stages']} stage{'s' * (config['stages'] != 1)}"
    if status == "diverged":
        return f"diverged: {name}, a loss or the weights were not finite by update {found['steps']}{where}"
    heldout = "not taken" if found["heldout_loss"] is None else f"{found['heldout_loss']:.4f}"
    lines = [
        f"{status}: {name}, {found['steps']} updates in {manifest['seconds']:.0f} s{where}",
        f"training loss {found['final_loss']:.4f}, held-out loss {heldout}, parameters {found['params_digest'][:12]}",
        f"staleness per stage {found['staleness']}, weight versions kept {found['peak_stash_versions']}",
    ]
    if skipped := sum(found.get("skipped_updates", ())):
        lines.append(f"{skipped} updates of a stage skipped: their gradients were not finite")
    if config["target"] is not None:
        reached = found["iterations_to_target"]
        text = f"> {found['steps']} (not reached)" if reached is None else f"{reached:.1f}"
        lines.append(f"iterations to held-out loss {config['target']:g}: {text}")
    return "\n".join(lines)
