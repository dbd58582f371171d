"""Records of runs in, one tidy table per experiment out: one number a row, each with its kind, status and run id."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from impl.harness.experiments import Experiment, PrecisionExperiment, StepTimeExperiment
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.run import Run
from impl.harness.step_time_spec import StepTimeSpec
from impl.harness.tiers import Label

Row = dict[str, Any]
KEYS = (
    *("run", "status", "error", "kind", "model", "optimizer", "optimizer_name", "dp", "tp", "seed"),
    *("system", "system_name", "reference"),
)
PROVENANCE = ("commit", "dirty", "config_digest", "torch", "hardware", "started")
STEP_TIME_COLUMNS = (
    *(*KEYS, "shared_cores", "params_digest", "repetitions", "quantity", "phase", "axis", "rank", "repetition"),
    *("step", "value", "unit"),
)
"""``repetitions`` is how many were asked for."""
PRECISION_COLUMNS = (*KEYS, "step", "loss", "heldout_loss", "params_digest")
PIPELINE_KEYS = (
    *("run", "status", "error", "kind", "model", "layers", "method", "settings", "mode", "stages", "seed", "lr"),
    *("steps", "batch", "system", "system_name", "reference", "shared_cores"),
)
PIPELINE_COLUMNS = (*PIPELINE_KEYS, "quantity", "update", "stage", "value", "unit")
PER_STAGE = {"staleness": "updates", "peak_stash_versions": "versions"}
"""What a pipeline's record says of every stage, with its unit."""
_COLUMNS = {"step-time": STEP_TIME_COLUMNS, "precision": PRECISION_COLUMNS, "pipeline": PIPELINE_COLUMNS}


@dataclass(frozen=True)
class Record:
    """What a run left behind.

    status: the manifest's; without a manifest ``unfinished``, or ``missing`` if there are no metrics either; or
        ``corrupt`` (a manifest that cannot be read, or a finished run with lines that cannot).
    rows: the rows of ``metrics.jsonl``.
    """

    status: str
    error: str = ""
    manifest: dict[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()

    @property
    def result(self) -> dict[str, Any]:
        """The manifest's result, empty if there is none."""
        return self.manifest.get("result") or {}


def read_record(folder: Path) -> Record:
    """Return the record of the run in ``folder``; never raises for what a broken run leaves there."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        status = manifest["status"]
    except FileNotFoundError:
        return _without_manifest(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Record("corrupt", f"manifest.json: {error}")
    parts = [manifest.get(key) for key in ("result", "git", "versions", "hardware")]
    if not isinstance(status, str) or any(part is not None and not isinstance(part, dict) for part in parts):
        return Record("corrupt", "manifest.json: not what a run writes")
    rows, broken = _metrics(folder / "metrics.jsonl")
    if manifest.get("lost"):  # no result: it goes on from its checkpoint
        return Record("unfinished", _first_line(manifest.get("error")), manifest, rows)
    if broken and status == "done":
        return Record("corrupt", f"metrics.jsonl has {broken} unreadable line(s)", manifest, rows)
    return Record(status, _first_line(manifest.get("error")), manifest, rows)


def _without_manifest(folder: Path) -> Record:
    """Return what a run that has not started, or has not ended, left: a last line that was cut short does not count."""
    if not (folder / "metrics.jsonl").exists():
        return Record("missing", "no manifest.json")
    rows, _ = _metrics(folder / "metrics.jsonl")
    return Record("unfinished", f"no manifest.json; {len(rows)} rows of metrics so far", rows=rows)


def collect(experiment: Experiment, tier: str, runs: Path) -> pd.DataFrame:
    """Return the tidy table of ``experiment`` on ``tier`` from the run folders below ``runs``.

    Every run and system that was asked for has at least one row; without a usable record its value is NaN and its
    status says why.
    """
    rows: list[Row] = []
    for run in experiment.runs(tier):
        record = read_record(runs / run.id)
        if isinstance(experiment, StepTimeExperiment):
            found = _step_time_rows(run, record, _keys(experiment, run, record))
        elif isinstance(experiment, PrecisionExperiment):
            found = _precision_rows(run, record, _keys(experiment, run, record))
        else:
            found = _pipeline_rows(run, record, experiment.reference)
        rows += [row | _provenance(record) for row in found]
    return pd.DataFrame(rows, columns=[*_COLUMNS[experiment.kind], *PROVENANCE])


def _step_time_rows(run: Run, record: Record, shared: Row) -> Iterator[Row]:
    assert isinstance(run.spec, StepTimeSpec)
    cores = _shares_cores(record, run.base.world_size)
    for system in run.spec.systems:
        result = record.result.get("systems", {}).get(system.id) or {}
        keys = shared | _system(system) | {"shared_cores": cores, "params_digest": result.get("params_digest")}
        keys["repetitions"] = run.spec.repetitions
        found = False
        for event in record.rows:
            if event.get("event") == "step_time" and event.get("system") == system.id:
                for phase, seconds in event["seconds"].items():
                    found = True
                    yield keys | _value("time", phase, seconds, "s") | {"repetition": event["repetition"]}
                losses = event.get("losses", [])
                for step, loss in enumerate(losses, event.get("last_step", 0) - len(losses) + 1):
                    yield keys | _value("loss", "", loss, "nats") | {"repetition": event["repetition"], "step": step}
        if not found:
            status = "unfinished" if record.status == "done" else record.status
            yield keys | _value("time", "iteration", math.nan, "s") | {"status": status}
        for phase, axes in (result.get("bytes") or {}).items():
            for axis, count in axes.items():
                yield keys | _value("bytes", phase, count, "B") | {"axis": axis}
        for rank, state in enumerate(result.get("state_bytes") or []):
            for part, count in state.items():
                yield keys | _value("state", part, count, "B") | {"rank": rank}


def _precision_rows(run: Run, record: Record, shared: Row) -> Iterator[Row]:
    assert run.system is not None
    result = record.result
    keys = {
        **shared,
        **_system(run.system),
        "heldout_loss": result.get("heldout_loss"),
        "params_digest": result.get("params_digest"),
    }
    losses = {e["step"]: e["loss"] for e in record.rows if e.get("event") == "step"}  # a resumed step: the last counts
    if not losses:
        yield keys | {"step": None, "loss": math.nan}
    for step, loss in sorted(losses.items()):
        yield keys | {"step": step, "loss": _number(loss)}


def _pipeline_rows(run: Run, record: Record, reference: str) -> Iterator[Row]:
    """Losses and time by update, what the record says of each stage, and for processes what was planned."""
    spec, result = run.spec, record.result
    assert isinstance(spec, PipelineSpec)
    assert run.system is not None
    keys = {
        "run": run.id,
        "status": record.status,
        "error": record.error,
        "kind": "measured",
        **{
            k: getattr(spec, k) for k in ("model", "layers", "method", "mode", "stages", "seed", "lr", "steps", "batch")
        },
        "settings": json.dumps(spec.method_settings, sort_keys=True),
        "system": run.system.id,
        "system_name": run.system.name,
        "reference": reference,
        "shared_cores": _shares_cores(record, spec.world_size),
    }
    curves: dict[str, dict[int, float]] = {"heldout_loss": {}, "training_loss": {}}
    for event in record.rows:
        name = {"heldout": "heldout_loss", "step": "training_loss"}.get(str(event.get("event")))
        if name:  # a row that a resumed run wrote again: the last counts
            curves[name][event["step"]] = _number(event["loss"])
    for name, curve in curves.items():
        for update, loss in sorted(curve.items()) or [(None, math.nan)]:
            yield keys | {"quantity": name, "update": update, "value": loss, "unit": "nats"}
    for name, unit in PER_STAGE.items():
        for stage, count in enumerate(result.get(name) or ()):
            yield keys | {"quantity": name, "stage": stage, "value": float(count), "unit": unit}
    if spec.runtime == "processes":
        yield from (keys | row for row in _timed_rows(spec, record))


def _timed_rows(spec: PipelineSpec, record: Record) -> Iterator[Row]:
    """When each update was done, and the planned idle time and bytes; an update that was resumed counts last."""
    from impl.harness.pipeline_plan import planned  # imports torch

    elapsed = {e["step"]: e["elapsed"] for e in record.rows if e.get("event") == "step" and "elapsed" in e}
    for update, seconds in sorted(elapsed.items()):
        yield {"quantity": "elapsed", "update": update, "value": _number(seconds), "unit": "s"}
    for number in planned(spec):
        yield {"kind": "planned", **vars(number)}


def _keys(experiment: StepTimeExperiment | PrecisionExperiment, run: Run, record: Record) -> Row:
    base = run.base
    return {
        "run": run.id,
        "status": record.status,
        "error": record.error,
        "kind": "measured",
        "model": base.model,
        "optimizer": base.optimizer,
        "optimizer_name": experiment.optimizer_name(base.optimizer),
        "dp": base.dp,
        "tp": base.tp,
        "seed": base.seed,
        "reference": experiment.reference,
    }


def _system(system: Label) -> Row:
    return {"system": system.id, "system_name": system.name}


def _value(quantity: str, phase: str, value: float | None, unit: str) -> Row:
    return {"quantity": quantity, "phase": phase, "value": _number(value), "unit": unit}


def _number(value: float | None) -> float:
    """Return a number of a record, in which null stands for one that was not finite."""
    return math.nan if value is None else float(value)


def _provenance(record: Record) -> Row:
    manifest = record.manifest
    git, versions, hardware = (manifest.get(k) or {} for k in ("git", "versions", "hardware"))
    return {
        "commit": git.get("commit"),
        "dirty": git.get("dirty"),
        "config_digest": manifest.get("config_digest"),
        "torch": versions.get("torch"),
        "hardware": hardware.get("gpu") or hardware.get("cpu"),
        "started": manifest.get("started"),
    }


def _shares_cores(record: Record, ranks: int) -> bool | None:
    hardware = record.manifest.get("hardware") or {}
    if hardware.get("gpu"):
        return False
    cores = hardware.get("cores")
    return None if cores is None else ranks > cores


def _metrics(path: Path) -> tuple[tuple[Row, ...], int]:
    rows: list[Row] = []
    broken = 0
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return (), 0
    for line in lines:
        try:
            row = json.loads(line) if line.strip() else {}
        except ValueError:  # also of bytes that are no text
            row = None
        if isinstance(row, dict):
            rows += [row] if row else []
        else:
            broken += 1
    return tuple(rows), broken


def _first_line(error: Any) -> str:
    """Return the first line, which says what happened; the last if the text is a bare traceback."""
    lines = [line.strip() for line in str(error or "").splitlines() if line.strip()]
    if not lines:
        return ""
    return lines[-1] if "Traceback (most recent call last)" in lines[0] else lines[0]
