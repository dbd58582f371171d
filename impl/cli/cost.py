"""``python -m impl cost``: what a sweep costs, before it starts, and which of its jobs do not fit.

Runs that have ended are not counted.  GPU-hours are projected, or measured where finished runs of the sweep have the
same work; core-hours of tiers without GPUs are measured, here or as a table of finished runs remembers them; a
question mark is what nobody knows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from impl.errors import ConfigError
from impl.harness import experiments, job_seconds, sweep_costs
from impl.harness.job_costs import DEFAULT_HARDWARE
from impl.harness.tiers import TIERS
from impl.projection import hardware

HELP = "say what a sweep costs before it starts, and which jobs do not fit"
ROOT = Path(__file__).resolve().parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    devices = ", ".join(f"{name} on {tier}" for tier, name in DEFAULT_HARDWARE.items())
    add("experiment", nargs="*", metavar="EXPERIMENT", help="default: all that are made of runs")
    add("--tier", default="laptop", help=f"{', '.join(TIERS)}; default laptop")
    add("--hardware", metavar="NAME", help=f"file of experiments/hardware; default {devices}; none elsewhere")
    add("--experiments", type=Path, default=ROOT / "experiments", metavar="DIR", help="folder of the experiments")
    add("--results", type=Path, metavar="DIR", help="of the tier's runs; default results/generated/TIER")
    add("--seconds", type=Path, default=ROOT / "results/laptop/seconds.csv", metavar="FILE", help="table of times")
    add("--record", type=Path, metavar="FILE", help="write such a table from the runs in --results, and nothing else")
    add("--summary", action="store_true", help="only the sum")
    add("--no-fit", action="store_true", help="do not check that jobs fit the device's memory")


def run(args: argparse.Namespace) -> int:
    """Print the cost; returns 0.  Raises :class:`ConfigError` if a job does not fit."""
    results = args.results or Path("results/generated") / args.tier
    if args.record is not None:
        return _record(args, results)
    name = args.hardware or DEFAULT_HARDWARE.get(args.tier)
    device = hardware.load_kind(name, args.experiments / "hardware") if name else None
    found = sweep_costs.sweep(
        args.experiments,
        args.tier,
        results,
        device=device,
        names=args.experiment,
        kept=job_seconds.read(args.seconds),
        check=not args.no_fit,
    )
    print(found.summary() if args.summary else found.text(), flush=True)
    if found.misfits:
        raise ConfigError(
            f"{len(found.misfits)} of {len(found.all.costs)} jobs do not fit; the first is {found.misfits[0]} "
            "(--no-fit does not check)"
        )
    return 0


def _record(args: argparse.Namespace, results: Path) -> int:
    """Write the table of times; raises :class:`ConfigError` if there is no finished run."""
    runs = experiments.all_runs(args.experiments, args.tier)
    rows = job_seconds.of_records(runs, results, gpu=args.tier in DEFAULT_HARDWARE)
    if not rows:
        raise ConfigError(f"no finished run of tier {args.tier} in {results}: run some first")
    job_seconds.write(rows, args.record)
    print(f"cost: {len(rows)} kinds of work -> {args.record}")
    return 0
