"""``python -m impl balance``: the table of how even every plan of an experiment is."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from impl.harness.balance_spec import load, rows, table
from impl.harness.tables import write_table

HELP = "plan every model, mesh and system of an experiment and write the balance table"
HEARTBEAT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--config", required=True, type=Path, help="the experiment, experiments/balance.yaml")
    parser.add_argument("--tier", default="laptop", help="ci, laptop (default), gpu1, node8 or cluster")
    parser.add_argument("--out", required=True, type=Path, help="folder for balance.parquet and balance.csv")


def run(args: argparse.Namespace) -> int:
    """Write the table; returns 0."""
    spec = load(args.config)
    total = sum(1 for _ in spec.cases(args.tier))
    found, started, shown = [], time.monotonic(), time.monotonic()
    for row in rows(spec, args.tier):
        found.append(row)
        if time.monotonic() - shown >= HEARTBEAT_S:
            shown = time.monotonic()
            left = (shown - started) / len(found) * (total - len(found))
            print(f"balance: {len(found)} of {total} plans, about {left:.0f} s left", flush=True)
    frame = table(found)
    target = args.out / "balance.parquet"
    write_table(frame, target)
    for reason in dict.fromkeys(row["reason"] for row in found if row["status"] == "skipped"):
        print(f"balance: skipped {reason}")
    done = sum(row["status"] == "done" for row in found)
    print(f"balance: {done} plans [planned] in {time.monotonic() - started:.1f} s -> {target}")
    return 0
