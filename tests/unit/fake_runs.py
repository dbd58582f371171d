"""Run folders in the documented format, made up for the tests of tables and figures."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from impl.harness.experiments import PrecisionExperiment, StepTimeExperiment
from impl.harness.pipeline_experiment import PipelineExperiment
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.run import Run
from impl.harness.spec import parse
from impl.harness.step_time_spec import StepTimeSpec
from impl.harness.tiers import merged

SYSTEMS = [
    {"id": "sc", "name": "SC", "strategy": "sc"},
    {"id": "nv-lpt-ns", "name": "NV-layerwise (lpt-ns)", "strategy": "nv-layerwise", "nv_version": "lpt-ns"},
    {"id": "asc", "name": "ASC", "strategy": "asc"},
    {"id": "canzona", "name": "Canzona", "strategy": "canzona"},
]
SPEED = {"sc": 0.040, "nv-lpt-ns": 0.021, "asc": 0.024, "canzona": 0.020}
MESHES = [{"dp": 2, "tp": 1}, {"dp": 2, "tp": 2, "without": ["asc"]}]


def step_time_data(**tier: Any) -> dict[str, Any]:
    """Plain data of a small step-time experiment."""
    return {
        "kind": "step-time",
        "title": "Time of one step",
        "base": {"model": "qwen3-tiny", "plan": {"bucket_elements": 1000}},
        "systems": SYSTEMS,
        "tiers": {"ci": {"meshes": MESHES, "repetitions": 8, "warmup": 1, **tier}},
    }


def precision_data(**tier: Any) -> dict[str, Any]:
    """Plain data of a small precision experiment."""
    data = step_time_data() | {"kind": "precision", "title": "Loss curves"}
    return data | {"tiers": {"ci": {"meshes": MESHES, "seeds": [0, 1], "base": {"steps": 30}, **tier}}}


def step_time_experiment(**tier: Any) -> StepTimeExperiment:
    return parse(StepTimeExperiment, step_time_data(**tier))


def precision_experiment(**tier: Any) -> PrecisionExperiment:
    return parse(PrecisionExperiment, precision_data(**tier))


def write(folder: Path, run: Run, result: dict[str, Any], rows: list[dict[str, Any]], **changed: Any) -> Path:
    """Write the record of ``run``; ``changed`` replaces fields of its manifest."""
    target = folder / run.id
    target.mkdir(parents=True, exist_ok=True)
    manifest = {
        "schema": 1,
        "kind": "measured",
        "run_id": run.id,
        "status": "done",
        "config": run.spec.resolved(),
        "config_digest": run.spec.digest,
        "git": {"commit": "0123456789abcdef", "dirty": True},
        "versions": {"torch": "2.13.0"},
        "hardware": {"cpu": "test CPU", "cores": 2},
        "started": "2026-11-29T12:00:00+00:00",
        "ended": "2026-11-29T12:01:00+00:00",
        "seconds": 60.0,
        "result": result,
        "error": None,
    }
    (target / "manifest.json").write_text(json.dumps(merged(manifest, changed)))
    (target / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return target


def step_time_run(
    folder: Path, run: Run, *, offset: dict[str, float] | None = None, after: int = 0, **changed: Any
) -> Path:
    """Write a finished step-time job in which each repetition has its own common drift.

    offset: by system, how much its losses are too high from step ``after`` + 1 on; its parameters then differ too.
    """
    assert isinstance(run.spec, StepTimeSpec)
    noise = random.Random(run.id)
    rows: list[dict[str, Any]] = []
    systems = {}
    for system in run.spec.systems:
        size = 4_000_000 if system.id == "sc" else 2_000_000
        axes = {"dp": size, "tp": 0, "world": 0}
        none = {"dp": 0, "tp": 0, "world": 0}
        systems[system.id] = {
            "bytes": {
                "grad_reduce": axes,
                "grad_norm": none | {"world": 8},
                "optimizer_step": none,
                "param_sync": axes,
            },
            "state_bytes": [{"master": size, "state": size}] * run.base.world_size,
            "nv_version": system.nv_version,
            "params_digest": "of its own" if (offset or {}).get(system.id) else "of all",
        }
    for repetition in range(run.spec.repetitions):
        drift = 1 + 0.3 * noise.random()
        for system in run.spec.systems:
            step = drift * SPEED[system.id] * (1 + 0.02 * noise.random())
            seconds = {"forward_backward": 0.1 * drift, "grad_norm": 0.001, "optimizer_step": step, "param_sync": 0.004}
            seconds["iteration"] = sum(seconds.values())
            steps = range(
                repetition * (run.spec.timed_steps + 1) + 1, (repetition + 1) * (run.spec.timed_steps + 1) + 1
            )
            extra = (offset or {}).get(system.id, 0.0)
            losses = [5.5 / (1 + 0.05 * step) + (extra if step > after else 0.0) for step in steps]
            losses = [loss if math.isfinite(loss) else None for loss in losses]
            event = {"event": "step_time", "repetition": repetition, "system": system.id, "seconds": seconds}
            rows.append(event | {"losses": losses, "last_step": steps[-1]})
    return write(folder, run, {"systems": systems}, rows, **changed)


def precision_run(folder: Path, run: Run, *, offset: float = 0.0, after: int = 0, **changed: Any) -> Path:
    """Write a finished training run whose losses are ``offset`` too high from step ``after`` + 1 on."""
    steps = run.base.steps
    rows = [
        {"event": "step", "step": i, "loss": 5.5 / (1 + 0.05 * i) + (offset if i > after else 0.0)}
        for i in range(1, steps + 1)
    ]
    digest = f"digest of seed {run.base.seed}" + (" changed" if offset else "")
    result = {"heldout_loss": 2.5, "params_digest": digest, "final_loss": rows[-1]["loss"]}
    return write(folder, run, result, rows, **changed)


PIPELINE_METHODS = [
    {"id": "adamw", "name": "AdamW (PipeDream)", "method": "pipedream"},
    {"id": "pipedream-lr", "name": "PipeDream-LR", "method": "pipedream-lr", "lr": [8e-3]},
    {"id": "nesterov", "name": "Nesterov", "method": "nesterov", "lr": [8e-3]},
    {"id": "muon", "name": "Muon", "method": "muon"},
    {"id": "rotation", "name": "Basis rotation", "method": "basis-rotation", "settings": {"period": 1}},
]
TUNED = [
    {"name": "adamw", "stages": 1, "lr": 8e-3},
    {"name": "adamw", "stages": 8, "lr": 4e-3},
    {"name": "muon", "stages": 8, "lr": 8e-3, "settings": {"momentum": 0.8}, "heldout_loss": 1.8, "runs": 6},
    {"name": "rotation", "stages": 1, "lr": 8e-3},
    {"name": "rotation", "stages": 8, "lr": 4e-3},
]
RATES = {"adamw": 0.02, "pipedream-lr": 0.04, "nesterov": 0.05, "muon": 0.06, "rotation": 0.08}
"""How fast the made-up losses of a method fall."""


def pipeline_data(**tier: Any) -> dict[str, Any]:
    """Plain data of a small pipeline experiment."""
    grids = [{"stages": [1], "methods": ["adamw", "rotation"]}, {"stages": [8]}]
    return {
        "kind": "pipeline",
        "title": "Methods under delay",
        "reference": "adamw",
        "base": {"model": "qwen3-tiny", "steps": 400},
        "methods": PIPELINE_METHODS,
        "tuned": TUNED,
        "tiers": {"ci": {"grids": grids, "seeds": [0, 1, 2], **tier}},
    }


def pipeline_experiment(**tier: Any) -> PipelineExperiment:
    return parse(PipelineExperiment, pipeline_data(**tier))


def pipeline_loss(run: Run, update: int) -> float:
    """A made-up held-out loss: it falls with the method's rate, more slowly the more stages."""
    assert isinstance(run.spec, PipelineSpec)
    assert run.system is not None
    rate = RATES[run.system.id] / (1 + 0.3 * (run.spec.stages - 1))
    return 5.5 / (1 + rate * update) + 0.01 * run.spec.seed


def pipeline_run(folder: Path, run: Run, **changed: Any) -> Path:
    """Write a finished pipeline run."""
    spec = run.spec
    assert isinstance(spec, PipelineSpec)
    heldout = [[u, pipeline_loss(run, u)] for u in range(20, spec.steps + 1, 20)]
    first = 10.0 if spec.runtime == "processes" else 1.0  # seconds to the end of the first update
    rows = [
        {"event": "step", "step": u, "loss": 6.0, "lr": spec.lr, "elapsed": first + 0.02 * u}
        for u in range(1, spec.steps + 1)
    ]
    rows += [{"event": "heldout", "step": u, "loss": loss} for u, loss in heldout]
    per_stage = list(range(spec.stages - 1, -1, -1))
    result = {"heldout": heldout, "heldout_loss": heldout[-1][1], "staleness": per_stage}
    return write(folder, run, result | {"peak_stash_versions": [t + 1 for t in per_stage]}, rows, **changed)
