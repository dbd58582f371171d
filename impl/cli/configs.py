"""``python -m impl configs``: write the configuration file of one run of the experiments."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from impl.errors import unknown
from impl.harness.experiments import all_runs
from impl.harness.record import write_atomically
from impl.harness.tiers import TIERS

HELP = "write the configuration file of one run of the experiments"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--experiments", required=True, type=Path, help="folder of the experiments")
    parser.add_argument("--tier", required=True, help=f"one of {', '.join(TIERS)}")
    parser.add_argument("--run", required=True, help="id of the run")
    parser.add_argument("--out", required=True, type=Path, help="file to write")


def run(args: argparse.Namespace) -> int:
    """Write the run's resolved settings, keys sorted; raises :class:`impl.errors.ConfigError` for an unknown run."""
    runs = {run.id: run for of_one in all_runs(args.experiments, args.tier).values() for run in of_one}
    if args.run not in runs:
        raise unknown("run", args.run, runs)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(args.out, yaml.safe_dump(runs[args.run].spec.resolved(), sort_keys=True))
    return 0
