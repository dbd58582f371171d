"""``python -m impl pipeline-projection``: the table of what pipelines cost on clusters that are not at hand."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from impl.harness.tables import write_table

HELP = "project time and memory of pipelines on described clusters and write the table"
HEARTBEAT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--config", required=True, type=Path, help="the experiment, experiments/pipeline_projection.yaml"
    )
    parser.add_argument("--tier", default="laptop", help="ci, laptop (default), gpu1, node8 or cluster")
    parser.add_argument("--out", required=True, type=Path, help="folder for pipeline_projection.parquet and .csv")


def run(args: argparse.Namespace) -> int:
    """Write the table; returns 0."""
    from impl.harness.pipeline_projection import rows, table
    from impl.harness.pipeline_projection_spec import load

    spec = load(args.config)
    found, started, shown = [], time.monotonic(), time.monotonic()
    for row in rows(spec, args.tier):
        found.append(row)
        if time.monotonic() - shown >= HEARTBEAT_S:
            shown = time.monotonic()
            print(f"pipeline-projection: {len(found)} numbers, now {row['sweep']} {row.get('case') or ''}", flush=True)
    frame = table(found)
    target = args.out / "pipeline_projection.parquet"
    write_table(frame, target)
    seconds = time.monotonic() - started
    print(f"pipeline-projection: {len(frame)} numbers [projected, planned] in {seconds:.1f} s -> {target}")
    return 0
