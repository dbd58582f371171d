"""``python -m impl validation``: predicted beside measured for every timed run of this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from impl.errors import ConfigError
from impl.harness import validation, validation_verdict
from impl.harness.tables import write_table
from impl.harness.validation_spec import load, runs_of

HELP = "project the timed runs of this machine from its own kernel times and compare"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--config", required=True, type=Path, help="the experiment, experiments/validation.yaml")
    parser.add_argument("--tier", default="laptop", help="ci, laptop (default), gpu1, node8 or cluster")
    parser.add_argument("--results", required=True, type=Path, help="folder of the tier's tables of measured runs")
    parser.add_argument("--kernels", required=True, type=Path, help="kernel table of this machine")
    parser.add_argument("--replays", type=Path, help="rank replays on this machine, written by `impl replay`")
    parser.add_argument("--out", required=True, type=Path, help="folder for the table, as parquet and CSV")


def run(args: argparse.Namespace) -> int:
    """Write the table; returns 0."""
    spec = load(args.config)
    tier = spec.tier(args.tier)
    runs = runs_of(args.config.parent, tier.experiments, args.tier)
    found = list(validation.rows(runs, args.results, args.kernels))
    if args.replays is not None:
        replayed = runs_of(args.config.parent, (tier.replay.experiment,), args.tier)
        found += validation.replay_rows(replayed, args.results, _replays(args.replays))
    frame = validation.table(found, spec.limits)
    write_table(frame, args.out / "validation.parquet")
    for method in validation_verdict.METHODS:
        verdict = validation_verdict.verdict(frame, method)
        if verdict is not None:
            holds = "within" if verdict.holds else "OUTSIDE"
            print(f"validation: {method}: {verdict}: {holds} the limit of {verdict.limit:.0%}")
    done, left = (frame["status"] == "done").sum(), (frame["status"] != "done").sum()
    print(f"validation: {done} comparisons, {left} without one -> {args.out / 'validation.parquet'}")
    return 0


def _replays(path: Path) -> list[dict[str, Any]]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
