"""``python -m impl why``: what `make reproduce` would make again and why, in plain words.

It asks Snakemake for a dry run in the current folder and explains its reasons; nothing is started and nothing locked.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from impl.harness import experiments
from impl.harness.status import Status, Sweep, counts, failed
from impl.harness.tiers import TIERS
from impl.harness.why import Explainer, Job, parse, thing

HELP = "say what the workflow would make again and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="experiments or files; default: make reproduce's")
    parser.add_argument("--tier", default="laptop", help=f"one of {', '.join(TIERS)} (default laptop)")
    parser.add_argument("--experiments", default="experiments", type=Path, metavar="DIR", help="default experiments")


def run(args: argparse.Namespace) -> int:
    """Print what would be made and why; returns 0, or 2 if Snakemake refuses, whose words are then printed.

    Raises :class:`impl.errors.ConfigError` for an unknown tier.
    """
    runs = experiments.all_runs(args.experiments, args.tier)
    results = Path("results/generated", args.tier)
    done = subprocess.run(dry_run(args.tier, args.targets), capture_output=True, text=True)
    output = done.stdout + done.stderr
    if done.returncode:
        print(f"error: snakemake cannot plan this:\n{said(output)}", file=sys.stderr)
        return 2
    jobs = parse(output)
    print("\n".join([headline(args.tier, jobs), *Explainer(runs, results).lines(jobs)]))
    names = [name for name in args.targets if name in runs]
    if note := kept(Sweep(args.experiments, args.tier, results, names).read()):
        print(f"\n{note}")
    return 0


def dry_run(tier: str, targets: list[str]) -> list[str]:
    """Return the command line of the dry run."""
    options = ["--dryrun", "--cores", "1", "--workflow-profile", "none", "--rerun-incomplete", "--nolock"]
    return [sys.executable, "-m", "snakemake", *options, "--config", f"tier={tier}", "--", *targets]


def said(output: str) -> str:
    """Return what Snakemake says of an error, without what it says of itself."""
    lines = [line for line in output.splitlines() if line.strip()]
    begin = next((n for n, line in enumerate(lines) if line.startswith("Building DAG")), -1) + 1
    if not begin:  # before that: the Snakefile itself could not be read
        begin = next((n for n, line in enumerate(lines) if "Error" in line or "Exception" in line), 0)
    return "\n".join(lines[begin:] or lines)


def headline(tier: str, jobs: list[Job]) -> str:
    """Return how much would be made."""
    runs = sum(thing(job).kind == "run" for job in jobs)
    files = sum(thing(job).kind not in ("run", "settings") for job in jobs)
    if not jobs:
        return f"tier {tier}: nothing: everything is up to date"
    return f"tier {tier}: {runs} run(s) and {files} table(s), figure(s) or other files would be made:"


def kept(status: Status) -> str:
    """Return what is to be known of failed runs; empty if there are none."""
    found = counts(failed(status))
    if not any(found.values()):
        return ""
    what = ", ".join(f"{count} {name}" for name, count in found.items() if count)
    return f"failed runs are kept as results ({what}): `make retry` forgets them, `make reproduce` then runs them again"
