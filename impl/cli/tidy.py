"""``python -m impl tidy``: collect the records of an experiment's runs into one tidy table."""

from __future__ import annotations

import argparse
from pathlib import Path

from impl.harness.experiments import load
from impl.harness.tidy import collect
from impl.harness.tiers import TIERS

HELP = "collect the records of an experiment's runs into one tidy table (parquet and CSV)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--experiment", required=True, type=Path, help="YAML file of the experiment")
    parser.add_argument("--tier", required=True, help=f"one of {', '.join(TIERS)}")
    parser.add_argument("--runs", required=True, type=Path, help="folder that holds one folder per run id")
    parser.add_argument("--out", required=True, type=Path, help="parquet file; the CSV goes beside it")


def run(args: argparse.Namespace) -> int:
    """Write the table; runs without a usable record become rows with a status and no value."""
    table = collect(load(args.experiment), args.tier, args.runs)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(args.out, index=False)
    table.to_csv(args.out.with_suffix(".csv"), index=False)
    return 0
