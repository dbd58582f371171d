"""``python -m impl configs``: write the configuration file of one run of an experiment."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from impl.harness.experiments import find_run
from impl.harness.tiers import TIERS

HELP = "write the configuration file of one run of an experiment"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--experiment", required=True, type=Path, help="YAML file of the experiment")
    parser.add_argument("--tier", required=True, help=f"one of {', '.join(TIERS)}")
    parser.add_argument("--run", required=True, help="id of the run")
    parser.add_argument("--out", required=True, type=Path, help="file to write")


def run(args: argparse.Namespace) -> int:
    """Write the run's resolved settings, keys sorted; raises :class:`impl.errors.ConfigError` for an unknown run."""
    settings = find_run(args.experiment, args.tier, args.run).spec.resolved()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(yaml.safe_dump(settings, sort_keys=True))
    return 0
