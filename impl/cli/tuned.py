"""``python -m impl tuned``: record the best learning rate and settings of each method from a finished sweep."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from impl.errors import ConfigError
from impl.harness.experiments import load
from impl.harness.pipeline_experiment import PipelineExperiment, Tuned
from impl.harness.record import write_atomically
from impl.harness.spec import load_yaml, parse
from impl.harness.sweeps import best
from impl.harness.tiers import TIERS

HELP = "record the best learning rate and settings of each method from a sweep"
HEADER = """\
# Best learning rate and settings of each method at each number of stages, for the experiments with `tuned`.
# Last written by: python -m impl tuned --sweep {sweep} --tier {tier} --runs {runs} --out {out}
# heldout_loss: the best run's; runs: how many were compared; edge: the best was the smallest or largest that was tried.
# Rows without heldout_loss are start values that no sweep has confirmed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--sweep", required=True, type=Path, help="YAML file of the sweep")
    parser.add_argument("--tier", required=True, help=f"one of {', '.join(TIERS)}")
    parser.add_argument("--runs", required=True, type=Path, help="folder that holds one folder per run id")
    parser.add_argument("--out", required=True, type=Path, help="file to write, experiments/learning_rates.yaml")


def run(args: argparse.Namespace) -> int:
    """Write the record, other rows kept; raises :class:`ConfigError` if the sweep has no finished run."""
    sweep = load(args.sweep)
    if not isinstance(sweep, PipelineExperiment):
        raise ConfigError(f"{args.sweep} is not a sweep: kind must be pipeline")
    before = (load_yaml(args.out) if args.out.exists() else None) or []
    if not isinstance(before, list):
        raise ConfigError(f"{args.out} is not a record of sweeps, a list of rows: give another --out")
    old = [parse(Tuned, row) for row in before]
    swept = {row.place: row for row in best(sweep, args.tier, args.runs)}
    kept = {row.place: row for row in old}
    found: list[dict[str, Any]] = [
        row.model_dump(mode="json", exclude_defaults=True) for row in (kept | swept).values()
    ]
    rows = [f"- {yaml.safe_dump(row, default_flow_style=True, sort_keys=False, width=1000).strip()}\n" for row in found]
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(args.out, HEADER.format(**vars(args)) + "".join(rows))
    except OSError as error:
        raise ConfigError(f"cannot write {args.out}: {error.strerror}") from None
    print(f"{len(swept)} best settings recorded in {args.out}, {len(found) - len(swept)} rows kept")
    return 0
