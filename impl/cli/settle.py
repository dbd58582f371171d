"""``python -m impl settle``: decide whether a run has ended with a result, and mark it so for the workflow.

A run that is done, failed, diverged or ran out of memory and left its record has: the tables show its status in that
run's cells, and the workflow goes on.  A run that was interrupted, lost a process to a signal, was refused or left no
record has not: it goes on from its checkpoint when the workflow tries again.

The mark is a file of its own because snakemake removes a job's output before the job runs: a record must not be lost
because a rule has changed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HELP = "decide whether a run has ended with a result, and mark it so"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--out", required=True, type=Path, help="folder of the run")


def run(args: argparse.Namespace) -> int:
    """Return 0 and write the mark if the run's record is a result, else 1."""
    from impl.harness.record import RunFolder, write_atomically

    folder = RunFolder(args.out)
    manifest = folder.manifest() or {}
    status, error = str(manifest.get("status", "no manifest.json")), str(manifest.get("error") or "").strip()
    reason = f": {error.splitlines()[0]}" if error else ""
    if not folder.has_result():
        print(f"{args.out.name}: no result ({status}{reason})", file=sys.stderr)
        return 1
    if status != "done":
        print(f"{args.out.name}: {status}{reason}; its cells in the tables will say so")
    write_atomically(folder.ended, f"{manifest.get('run_id')} {status}\n")
    return 0
