"""Predicted beside measured: timed runs of some experiments, projected from kernels measured on the same machine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from impl.errors import ConfigError
from impl.harness import job_plans, setup
from impl.harness.pipeline_results import FILLING
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.run import Run
from impl.harness.spec import RunSpec
from impl.harness.step_time_spec import StepTimeSpec, System
from impl.harness.validation_spec import Limits
from impl.projection import pipeline
from impl.projection.measured import load_machine
from impl.projection.training import Projection, project
from impl.projection.uncertain import Range, Samples, band

PHASES = ("iteration", "optimizer_step", "forward_backward")
"""What is compared of a training step; the projection's quantity and the phase of the measurement have equal names."""
KEYS = ("experiment", "run", "model", "optimizer", "system", "system_name", "dp", "tp", "stages", "processes")
COLUMNS = (
    *(*KEYS, "shared_cores", "quantity", "method"),
    *("measured", "measured_low", "measured_high", "n", "predicted", "low", "high", "error", "unit"),
    *("evidence", "status", "reason", "kind", "limit", "replay_limit"),
)
"""Columns of the table: a row per run, system and quantity.

measured with its quartiles over ``n``; predicted with its band; error: predicted over measured, less 1.
method: ``timeline``, or ``replay`` of the slowest rank's own share.  limit, replay_limit: the experiment's
(:class:`impl.harness.validation_spec.Limits`), of the median size of the judged errors; the same in every row.
"""


@dataclass(frozen=True)
class Measurement:
    """A measured time: median or mean, and quartiles."""

    value: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: np.ndarray, *, mean: bool = False) -> Measurement:
        """Return that of repetitions; the ``mean`` where single ones differ by what they do."""
        if not len(values):
            return cls(math.nan, math.nan, math.nan, 0)
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
        return cls(float(values.mean()) if mean else float(middle), float(low), float(high), len(values))


def rows(runs: dict[str, tuple[Run, ...]], results: Path, kernels: Path) -> Iterator[dict[str, Any]]:
    """Yield the comparison of every run.

    results: folder of a tier's tidy tables; kernels: the kernel table of the machine that ran them.
    Raises :class:`ConfigError` if a table is missing or the kernels are another machine's.
    """
    for name, found in runs.items():
        frame = _table(results / name / f"{name}.parquet")
        for run in found:
            mine = frame.loc[frame["run"] == run.id]
            if isinstance(run.spec, StepTimeSpec):
                yield from _training(name, run, run.spec, mine, kernels)
            elif isinstance(run.spec, PipelineSpec):
                yield from _pipeline(name, run, run.spec, mine, kernels)


def replay_rows(
    runs: dict[str, tuple[Run, ...]], results: Path, replays: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the optimizer step that each replay (``impl validation-replay``) predicts beside the measured one."""
    for name, found in runs.items():
        frame = _table(results / name / f"{name}.parquet")
        for run in found:
            spec = run.spec
            for replay in (r for r in replays if r["run"] == run.id):
                assert isinstance(spec, StepTimeSpec)
                system = next(s for s in spec.systems if s.id == replay["system"])
                settings = system.run_spec(spec.base)
                mine = frame.loc[(frame["run"] == run.id) & (frame["system"] == system.id)]
                times = mine.loc[(mine["phase"] == "optimizer_step") & (mine["quantity"] == "time"), "value"]
                keys = {**_training_keys(name, run, settings, system, mine), "method": "replay"}
                missing = next((share["note"] for share in replay["shares"] if "note" in share), None)
                if missing is not None:  # it may have been the slowest
                    yield {**keys, "status": "not projected", "reason": missing}
                    continue
                slowest = max(replay["shares"], key=lambda share: share["seconds"])
                low, high = (replay["step_s"] * slowest[q] / slowest["seconds"] for q in ("q25", "q75"))
                spread = Range.of_quartiles(low, replay["step_s"], high)
                evidence = {f"measured: replay of rank {slowest['rank']}, n={slowest['n']}": 1.0}
                measured = Measurement.of(times.dropna().to_numpy(float))
                yield _row(keys, "optimizer_step", measured, spread.draws("replay"), evidence)


def project_run(spec: RunSpec, kernels: Path) -> Projection:
    """Return the projection of a training run on the machine of ``kernels``; raises :class:`ConfigError`."""
    made = setup.prepare(spec)
    machine = load_machine("local", kernels, spec.world_size)
    return project(made.plan, job_plans.costs(made), made.model, job_plans.workload(spec), machine)


def _training(name: str, run: Run, spec: StepTimeSpec, frame: pd.DataFrame, kernels: Path) -> Iterator[dict[str, Any]]:
    for system in spec.systems:
        settings = system.run_spec(spec.base)
        keys = {**_training_keys(name, run, settings, system, frame), "method": "timeline"}
        if system.live:
            reason = "runs Megatron's own optimizer, whose work is not described by a plan of ours"
            yield {**keys, "status": "not projected", "reason": reason}
            continue
        mine = frame.loc[(frame["system"] == system.id) & (frame["quantity"] == "time")]
        try:
            found = project_run(settings, kernels)
        except ConfigError as error:
            yield {**keys, "status": "not projected", "reason": str(error)}
            continue
        for quantity in PHASES:
            times = mine.loc[(mine["phase"] == quantity) & (mine["status"] == "done"), "value"].to_numpy(float)
            yield _row(keys, quantity, Measurement.of(times), getattr(found, quantity), found.evidence(quantity))


def _training_keys(name: str, run: Run, settings: RunSpec, system: System, frame: pd.DataFrame) -> dict[str, Any]:
    return {
        **{"experiment": name, "run": run.id, "model": settings.model, "optimizer": settings.optimizer},
        **{"system": system.id, "system_name": system.name, "dp": settings.dp, "tp": settings.tp},
        **{"processes": settings.world_size, "shared_cores": _shared(frame)},
    }


def _pipeline(name: str, run: Run, spec: PipelineSpec, frame: pd.DataFrame, kernels: Path) -> Iterator[dict[str, Any]]:
    assert run.system is not None
    keys = {
        **{"experiment": name, "run": run.id, "model": spec.model, "optimizer": spec.method},
        **{"system": run.system.id, "system_name": run.system.name, "stages": spec.stages},
        **{"processes": spec.world_size, "shared_cores": _shared(frame), "method": "timeline"},
    }
    ends = frame.loc[(frame["quantity"] == "elapsed") & (frame["status"] == "done")].sort_values("update")
    gaps = np.diff(ends["value"].to_numpy(float))[FILLING:]
    try:
        # as_run: the measured run is finite, and behind a slower stage the last one still works off what piled up
        machine = load_machine("local", kernels, spec.world_size, pipeline=True)
        found = pipeline.project(spec, machine, as_run=True)
    except ConfigError as error:
        yield {**keys, "status": "not projected", "reason": str(error)}
        return
    yield _row(keys, "update", Measurement.of(gaps, mean=True), found.update_s, found.evidence)


def _row(
    keys: dict[str, Any], quantity: str, measured: Measurement, predicted: Samples, evidence: dict[str, float]
) -> dict[str, Any]:
    found = band(predicted)
    row = {**keys, "quantity": quantity, "unit": "s", "kind": "projected"}
    row |= {"measured": measured.value, "measured_low": measured.low, "measured_high": measured.high, "n": measured.n}
    row |= {"predicted": found.value, "low": found.low, "high": found.high, "evidence": json.dumps(evidence)}
    if not measured.n:
        return {**row, "status": "not measured", "reason": "the run left no times"}
    return {**row, "error": found.value / measured.value - 1, "status": "done"}


def _shared(frame: pd.DataFrame) -> bool | None:
    found = [bool(v) for v in frame["shared_cores"].dropna().unique()] if "shared_cores" in frame else []
    return found[0] if found else None


def _table(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except FileNotFoundError:
        raise ConfigError(f"no {path}: measure first, with `make reproduce TARGETS={path.stem}`") from None


def table(found: Sequence[dict[str, Any]], limits: Limits) -> pd.DataFrame:
    """Return the rows as a table with the columns of :data:`COLUMNS` and types that a missing value does not change."""
    frame = pd.DataFrame(list(found), columns=list(COLUMNS)).assign(limit=limits.median, replay_limit=limits.replay)
    counts = dict.fromkeys(("dp", "tp", "stages", "processes", "n"), "Int64")
    numbers = ("measured", "measured_low", "measured_high", "predicted", "low", "high", "error")
    return frame.astype({**counts, **dict.fromkeys(numbers, "float64"), "shared_cores": "boolean"})
