"""``python -m impl validation-replay``: rank replays of the runs that a validation names, on this machine."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from impl.errors import ConfigError
from impl.harness import replay_run
from impl.harness.record import write_atomically
from impl.harness.replay_run import ReplaySpec
from impl.harness.run import Run
from impl.harness.setup import device_type
from impl.harness.spec import RunSpec, parse
from impl.harness.step_time_spec import StepTimeSpec
from impl.harness.validation_spec import Replayed, load, runs_of

HELP = "replay the ranks of the runs that a validation names and keep their times"
SHARED = ("model", "layers", "strategy", "optimizer", "optimizer_settings", "adamw_settings", "dp", "tp", "dtype")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--config", required=True, type=Path, help="the experiment, experiments/validation.yaml")
    parser.add_argument("--tier", default="laptop", help="ci, laptop (default), gpu1, node8 or cluster")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="JSON: a replay per run and system")


def run(args: argparse.Namespace) -> int:
    """Replay one system after the other; returns 0."""
    wanted = load(args.config).tier(args.tier).replay
    found: list[dict[str, Any]] = []
    for timed in _runs(args.config.parent, wanted, args.tier):
        assert isinstance(timed.spec, StepTimeSpec)
        for system in timed.spec.systems:
            if not system.live:
                spec = _spec(system.run_spec(timed.spec.base), wanted.repetitions)
                found.append({"run": timed.id, "system": system.id, **_replay(spec)})
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.out, json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from None
    print(f"validation-replay: {len(found)} replays -> {args.out}")
    return 0


def _runs(folder: Path, wanted: Replayed, tier: str) -> list[Run]:
    runs = runs_of(folder, (wanted.experiment,), tier)[wanted.experiment]
    chosen = [run for run in runs if run.name.startswith(wanted.runs)]
    if not chosen or not all(isinstance(run.spec, StepTimeSpec) for run in chosen):
        names = ", ".join(run.name for run in runs)
        raise ConfigError(f"{wanted.experiment} has no step-time run named like {wanted.runs}: it has {names}")
    return chosen


def _spec(base: RunSpec, samples: int) -> ReplaySpec:
    """Return the replay of a run: on a CPU as many ranks at the same time as the run has, on a GPU one by one."""
    shared = {name: getattr(base, name) for name in SHARED}
    together = base.world_size if device_type(base.runtime.device, 1) == "cpu" else 1
    settings = {**shared, "plan": base.plan.model_dump(mode="json"), "processes": together, "samples": samples}
    return parse(ReplaySpec, settings)


def _replay(spec: ReplaySpec) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        code, rows = replay_run.execute(spec, Path(folder))
    if code:
        raise ConfigError(f"the replay of {spec.strategy} ended with exit code {code}: see the lines above")
    return replay_run.summary(spec, rows)
