"""``python -m impl kernels``: how long the kernels of a run take on this machine, as a table for projections.

Either the kernels that experiments need, measured with as many busy processes as their runs have, or those of a model
at full scale on one device.  What the table has already, of the same device and versions, is not measured again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from impl.errors import ConfigError

if TYPE_CHECKING:
    from impl.projection.kernel_table import Row, Table

HELP = "measure the kernels of a run on this machine and keep them in a table"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the table, a CSV file")
    parser.add_argument("--fresh", action="store_true", help="measure what is there already too, into a new table")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which the rest is left out (default 600)")
    parser.add_argument("--case-seconds", type=float, default=0.2, help="about, for each kernel (default 0.2)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: a GPU if any")
    parser.add_argument("--processes", type=int, help="busy at a time (default: as the runs have; with --model 1)")
    some = parser.add_argument_group("what runs of experiments need")
    some.add_argument(
        "--experiment", action="append", default=[], type=Path, metavar="FILE", help="several may be given"
    )
    some.add_argument("--tier", default="laptop", help="of the experiments (default laptop)")
    full = parser.add_argument_group("what a model needs at full scale")
    full.add_argument("--model", help="a model of the catalogue, for example qwen3-32b")
    full.add_argument("--layers", type=int, help="number of layers instead of the model's own")
    full.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks: of which products are shards")
    full.add_argument("--optimizer", nargs="+", default=["muon"], help="of matrices (default muon); adamw is added")
    full.add_argument("--rows", type=int, default=1, help="sequences of a microbatch (default 1)")
    full.add_argument("--sequence", type=int, default=4096, help="tokens of a sequence (default 4096)")


def run(args: argparse.Namespace) -> int:
    """Find out what is needed, measure it and write the table; returns the exit code."""
    from impl.harness import kernels_run, provenance
    from impl.harness.setup import device_type
    from impl.harness.spec import parse
    from impl.projection import kernel_table
    from impl.projection.kernel_cases import KernelsSpec

    device = device_type(args.device, 1)
    table = kernel_table.Table((), args.out.name)
    if args.out.exists() and not args.fresh:
        table = kernel_table.read(args.out)
    threads = KernelsSpec(cases=()).runtime.threads
    here = tuple(kernels_run.place(device, threads).values())
    if table.rows and table.rows[0].place != here:
        raise ConfigError(
            f"{args.out} holds times of {table.device}, this is {here[1]}: give another --out, or --fresh"
        )
    left = args.seconds
    code = kept = measured = left_out = 0
    cores = provenance.hardware()["cores"] if device == "cpu" else None
    for processes, cases in sorted(_wanted(args, cores).items()):
        known = [all(table.find(k, key, processes, size) for k, key, size in case.names()) for case in cases]
        due = tuple(case for case, known_already in zip(cases, known, strict=True) if not known_already)
        kept += sum(known)
        if not due:
            continue
        print(f"{len(due)} kernels with {processes} busy process{'es' if processes > 1 else ''} on {here[1]}")
        settings = {"processes": processes, "seconds": max(left, 1e-9), "case_seconds": args.case_seconds}
        runtime = {"device": device, "collective_timeout_s": 120.0}
        spec = parse(KernelsSpec, {"cases": [case.model_dump() for case in due], **settings, "runtime": runtime})
        with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
            begin = time.monotonic()
            code, rows = kernels_run.execute(spec, Path(folder), partial(_keep, table, args.out))
            left -= time.monotonic() - begin
        table = table.merged(rows)
        table.write(args.out)
        measured += sum(row.n > 0 for row in rows)
        left_out += sum(row.n == 0 for row in rows)
        if code:
            break
    print(f"{measured} times measured, {left_out} left out, {kept} kernels known already: {args.out}")
    return code


def _keep(table: Table, out: Path, rows: list[Row]) -> None:
    """Write what a job that still runs has measured."""
    table.merged(rows).write(out)


def _wanted(args: argparse.Namespace, cores: int | None) -> dict[int, list]:
    """Return the cases by number of processes; raises :class:`ConfigError` if nothing was asked for."""
    from impl.harness import experiments
    from impl.models import catalogue
    from impl.projection import kernel_needs

    if bool(args.experiment) == (args.model is not None):
        raise ConfigError("say what to measure: --experiment experiments/step_time.yaml, or --model qwen3-32b --tp 8")
    if args.processes is not None and args.processes < 1:
        raise ConfigError(f"--processes {args.processes}: give a number of processes, at least 1")
    if args.seconds <= 0 or args.case_seconds <= 0:
        raise ConfigError("--seconds and --case-seconds must be above 0")
    if args.experiment:
        runs = [run for path in args.experiment for run in experiments.runs_of(path, args.tier)]
        found = kernel_needs.of_runs(runs, cores)
        chosen = {n: needs for n, needs in found.items() if args.processes in (None, n)}
        if not chosen:
            raise ConfigError(f"--processes {args.processes}: the runs have {', '.join(map(str, sorted(found)))} ranks")
        return {n: needs.cases() for n, needs in chosen.items()}
    config = catalogue.load(args.model, args.layers)
    needs = kernel_needs.of_model(config, args.optimizer, tp=args.tp, rows=args.rows, sequence=args.sequence)
    return {args.processes or 1: needs.cases()}
