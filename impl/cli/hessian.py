"""``python -m impl hessian``: how far from diagonal the Hessian of trained matrices is, with and without rotation."""

from __future__ import annotations

import argparse
from pathlib import Path

from impl.errors import ConfigError

HELP = "measure the Hessian in single matrices before and after basis rotation and write the table"
EPILOG = """\
Trains once a seed, then measures matrix by matrix; what is there already is not measured again.
Exit codes: 0 done (a training that diverged is a row that says so), 1 failed, 2 bad input, 128 + signal
interrupted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("--config", required=True, type=Path, help="the experiment, experiments/hessian.yaml")
    parser.add_argument("--tier", default="laptop", help="ci, laptop (default), gpu1, node8 or cluster")
    parser.add_argument("--out", required=True, type=Path, help="folder for hessian.parquet, hessian.csv and runs/")


def run(args: argparse.Namespace) -> int:
    """Measure what is missing and write the table; returns the exit code.  Raises :class:`ConfigError`."""
    from impl.harness.hessian_run import execute
    from impl.harness.hessian_spec import load
    from impl.harness.hessian_table import table
    from impl.harness.record import CorruptRecord
    from impl.harness.tables import write_table

    settings = load(args.config, args.tier)
    folder = args.out / "runs" / settings.id
    code = execute(settings, folder)
    if code not in (0, 3):
        return code
    try:
        frame = table(settings, folder)
    except CorruptRecord as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None
    target = args.out / "hessian.parquet"
    write_table(frame, target)
    matrices = frame.loc[frame["status"] == "done", ["seed", "matrix"]].drop_duplicates()
    print(f"hessian: {len(matrices)} matrices [measured] -> {target}")
    return 0
