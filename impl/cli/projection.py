"""``python -m impl projection``: every projection of an experiment, as a table."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from impl.harness.projection_rows import rows, table
from impl.harness.projection_spec import load
from impl.harness.tables import write_table

HELP = "project every step of an experiment onto its hardware and write the table"
ROOT = Path(__file__).resolve().parents[2]
HEARTBEAT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--config", required=True, type=Path, help="the experiment, experiments/projection.yaml")
    parser.add_argument("--tier", default="laptop", help="ci, laptop (default), gpu1, node8 or cluster")
    parser.add_argument("--out", required=True, type=Path, help="folder for the table, as parquet and CSV")


def run(args: argparse.Namespace) -> int:
    """Write the table, named like the experiment; returns 0."""
    spec, name = load(args.config), args.config.stem
    total = sum(1 for _ in spec.cases(args.tier))
    found: list[dict[str, Any]] = []
    started = shown = time.monotonic()
    for row in rows(spec, args.tier, name, ROOT):
        found.append(row)
        if time.monotonic() - shown >= HEARTBEAT_S:
            shown = time.monotonic()
            print(f"{name}: {_cases(found)} of {total} projections", flush=True)
    frame = table(found)
    write_table(frame, args.out / f"{name}.parquet")
    left_out = [row["reason"] for row in found if row["status"] != "done"]
    seconds = time.monotonic() - started
    print(f"{name}: {total} projections [projected] in {seconds:.1f} s, {len(left_out)} without times -> {args.out}")
    return 0


def _cases(found: list[dict[str, Any]]) -> int:
    return len({(r["grid"], r["model"], r["dp"], r["tp"], r["optimizer"], r["varied"], r["system"]) for r in found})
