"""``python -m impl retry``: forget the records of failed runs, so that the workflow runs them again."""

from __future__ import annotations

import argparse
from pathlib import Path

from impl.harness.record import RunFolder
from impl.harness.tidy import read_record

HELP = "forget the records of failed runs, so that the workflow runs them again"
KEPT = ("done", "diverged")
"""A diverged run would diverge again: its record is a result."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--results", required=True, type=Path, help="folder to search for runs")


def run(args: argparse.Namespace) -> int:
    """Remove the manifest of every run that is neither done nor diverged; checkpoints stay and are resumed."""
    forgotten = 0
    for manifest in sorted(args.results.rglob("manifest.json")):
        record = read_record(manifest.parent)
        if record.status not in KEPT:
            print(f"forgot {manifest.parent.name} ({record.status}: {record.error})")
            manifest.unlink()
            RunFolder(manifest.parent).ended.unlink(missing_ok=True)
            forgotten += 1
    print(f"{forgotten} run(s) will be run again by the next `make reproduce`" if forgotten else "no failed runs")
    return 0
