"""``python -m impl settle``: decide whether a run that did not end well is nevertheless a result.

A run that failed, diverged or ran out of memory and left its record is one: the tables show its status in that run's
cells, and the workflow goes on.  A run that was interrupted, lost a process to a signal, was refused or left no record
is not: it goes on from its checkpoint when the workflow tries again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from impl.harness.tidy import read_record

HELP = "decide whether a run that did not end well left a record that tables can show"
NO_RESULT = ("missing", "unfinished")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--out", required=True, type=Path, help="folder of the run")


def run(args: argparse.Namespace) -> int:
    """Return 0 if the run's record is a result, else 1."""
    record = read_record(args.out)
    if record.status in NO_RESULT or record.manifest.get("lost"):
        print(f"{args.out.name}: no result ({record.error or record.status})", file=sys.stderr)
        return 1
    print(f"{args.out.name}: {record.status}: {record.error}; its cells in the tables will say so")
    return 0
