"""Run folders in the documented format, made up for the tests of tables and figures."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from impl.harness.experiments import PrecisionExperiment, StepTimeExperiment
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


def step_time_run(folder: Path, run: Run, **changed: Any) -> Path:
    """Write a finished step-time job in which each repetition has its own common drift."""
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
        }
    for repetition in range(run.spec.repetitions):
        drift = 1 + 0.3 * noise.random()
        for system in run.spec.systems:
            step = drift * SPEED[system.id] * (1 + 0.02 * noise.random())
            seconds = {"forward_backward": 0.1 * drift, "grad_norm": 0.001, "optimizer_step": step, "param_sync": 0.004}
            seconds["iteration"] = sum(seconds.values())
            event = {"event": "step_time", "repetition": repetition, "system": system.id, "seconds": seconds}
            rows.append(event)
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
