"""``python -m impl job``: run another subcommand as a workflow job.

Its output goes to a log and, thinned out, to the terminal.  A run that ends badly but leaves its record (failed,
diverged, out of memory) is a result: the job then succeeds, and the tables show the status in that run's cells.
A run without a record, or one that was refused because of its configuration, fails the job.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

from impl.harness.tidy import read_record

HELP = "run another subcommand as a workflow job: log its output, judge it by its record"
ECHO_INTERVAL_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--out", required=True, type=Path, help="folder of the run, given to the subcommand too")
    parser.add_argument("--log", required=True, type=Path, help="file for everything that the subcommand prints")
    parser.add_argument("subcommand", nargs=argparse.REMAINDER, help="-- SUBCOMMAND OPTIONS")


def run(args: argparse.Namespace) -> int:
    """Return 0 if the run left its record, else the subcommand's exit code (at least 1)."""
    words = args.subcommand[1:] if args.subcommand[:1] == ["--"] else args.subcommand
    args.log.parent.mkdir(parents=True, exist_ok=True)
    with args.log.open("w") as log:
        code = logged([sys.executable, "-m", "impl", *words, "--out", str(args.out)], log, args.out.name)
    record = read_record(args.out)
    if record.status == "missing":
        print(f"{args.out.name}: ended with code {code} and no record, see {args.log}", file=sys.stderr)
        return code or 1
    if record.status != "done":
        print(f"{args.out.name}: {record.status}: {record.error}; its table cells will say so, see {args.log}")
        return 2 if code == 2 else 0
    return code


def logged(command: list[str], log: TextIO, name: str) -> int:
    """Run ``command``; every line goes to ``log``, one every few seconds and the last to the terminal.

    Returns the exit code, negative for a signal.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        shown, line = time.monotonic(), ""
        for line in process.stdout:
            log.write(line)
            log.flush()
            if time.monotonic() - shown >= ECHO_INTERVAL_S:
                print(f"{name}: {line.rstrip()}", flush=True)
                shown, line = time.monotonic(), ""
        if line.strip():
            print(f"{name}: {line.rstrip()}", flush=True)
    return process.returncode
