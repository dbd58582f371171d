"""``python -m impl step-time``: time one step of several systems, alternating between them in one job."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "time one step of several systems in one interleaved job"
TARGET = "impl.harness.step_time:run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder of the job")
    parser.add_argument(
        "--wait", action="store_true", help="wait for another process that runs this, instead of being refused"
    )
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="YAML of a StepTimeSpec")


def run(args: argparse.Namespace) -> int:
    """Check everything, then measure; returns the exit code.  Raises :class:`impl.errors.ConfigError` before that."""
    from impl.harness import launch, setup, worker
    from impl.harness.spec import load_yaml, parse
    from impl.harness.step_time import check_systems
    from impl.harness.step_time_spec import StepTimeSpec

    spec = parse(StepTimeSpec, load_yaml(args.config))
    check_systems(spec)
    mesh = f"dp x tp is {spec.base.dp} x {spec.base.tp}"
    if launch.inside_torchrun():
        setup.check(spec.base, local_ranks=launch.torchrun_ranks(spec.world_size, mesh))
        return worker.join_run(TARGET, spec, args.out, wait=args.wait)
    setup.check(spec.base, local_ranks=spec.world_size)
    ranks, runtime = spec.world_size, spec.base.runtime
    return launch.execute(TARGET, spec, args.out, ranks=ranks, runtime=runtime, wait=args.wait)
