"""``python -m impl pipeline``: train on an asynchronous (or synchronous) pipeline, simulated or on real processes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from impl.errors import ConfigError, unknown

HELP = "train on a pipeline with stale gradients: exact simulator or one process per stage"
EPILOG = """\
--set takes settings of the run (batch=8, microbatches=4, data.source=my.txt) and of the method (period=1, beta1=0.5).
With checkpoint_every=N and --out, the same command goes on where an interrupted run had its last checkpoint.
Exit codes: 0 done, 1 failed, 2 bad input (nothing was started), 3 diverged, 128 + signal interrupted."""
SETTINGS = ("model", "method", "stages", "runtime", "mode", "steps", "seed", "lr", "layers", "target")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options.  None has a default here: what is not given comes from the file, then from the spec."""
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--wait", action="store_true", help="wait for another process that runs this, instead of being refused")
    add("--config", type=Path, metavar="FILE", help="YAML with settings; the options below override it")
    add("--model", metavar="NAME", help="for example qwen3-tiny (bytes as tokens, for CPUs)")
    add("--method", metavar="NAME", help="default basis-rotation; a wrong name lists all")
    add("--stages", type=int, metavar="P", help="pipeline stages, default 1")
    add("--runtime", metavar="NAME", help="simulator (default) or processes: the same numbers from P processes")
    add("--mode", metavar="NAME", help="stash, no-stash-recompute, 2bw, vertical-sync or sync; default is the method's")
    add("--steps", type=int, metavar="N", help="updates of each stage, default 400")
    add("--seed", type=int, metavar="N", help="of weights and batches, default 0")
    add("--lr", type=float, metavar="X", help="peak learning rate, default 4e-3")
    add("--layers", type=int, metavar="N", help="layers, where the model allows another number")
    add("--target", type=float, metavar="LOSS", help="held-out loss whose iterations are counted")
    add("--out", type=Path, metavar="DIR", help="keep the run's record in this folder")
    add("--json", action="store_true", help="print one JSON object on standard output, progress on standard error")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting, repeatable")


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return what file, options and ``--set`` ask for, in rising precedence.  Raises :class:`ConfigError`."""
    from impl.harness.options import require_model, settings_of
    from impl.harness.spec import assign

    data = settings_of(args, SETTINGS)
    for assignment in args.set:
        assign(data, _qualified(assignment, data))
    return require_model(data)


def _qualified(assignment: str, data: dict[str, Any]) -> str:
    """Return ``assignment`` with ``method_settings.`` in front if its key is one of the method's and not the run's."""
    from impl.harness.pipeline_spec import PipelineSpec
    from impl.rotation.method import registry

    key = assignment.partition("=")[0].partition(".")[0]
    if key in PipelineSpec.model_fields or not key:
        return assignment
    name, methods = data.get("method", PipelineSpec.model_fields["method"].default), registry()
    if not isinstance(name, str) or name not in methods:
        raise unknown("method", str(name), methods)
    own = methods[name].Hyper.model_fields
    if key not in own:
        raise unknown(f"setting of the run or of {name}", key, [*PipelineSpec.model_fields, *own])
    return f"method_settings.{assignment}"


def run(args: argparse.Namespace) -> int:
    """Check everything, then train; returns the exit code.  Raises :class:`ConfigError` before anything is started."""
    from impl.harness import launch, pipeline_run, worker
    from impl.harness.pipeline_results import report, summary
    from impl.harness.pipeline_spec import PipelineSpec
    from impl.harness.record import EXIT_CODES, RunFolder
    from impl.harness.spec import parse

    spec = parse(PipelineSpec, settings(args))
    if spec.runtime == "processes" and launch.inside_torchrun():
        if args.out is None or args.json:
            raise ConfigError("under torchrun give --out DIR and no --json: the result is in DIR/manifest.json")
        ranks = launch.torchrun_ranks(spec.world_size, f"stages x replicas is {spec.stages} x {spec.replicas}")
        pipeline_run.check(spec, local_ranks=ranks)
        return worker.join_run(pipeline_run.PROCESSES, spec, args.out, wait=args.wait)
    pipeline_run.check(spec, local_ranks=spec.world_size)
    out = args.out or Path(tempfile.mkdtemp(prefix="pipeline-"))
    code = 2
    try:
        with _progress_on_stderr() if args.json else contextlib.nullcontext():
            code = pipeline_run.execute(spec, out, wait=args.wait)
        manifest = RunFolder(out).manifest()
        if manifest is not None:
            print(json.dumps(report(manifest), allow_nan=False) if args.json else summary(manifest, args.out))
        return code
    finally:
        if args.out is None and code != EXIT_CODES["failed"]:  # whose logs are worth keeping
            shutil.rmtree(out)


@contextlib.contextmanager
def _progress_on_stderr() -> Iterator[None]:
    """Send what this process and its children print on standard output to standard error instead."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
