"""``python -m impl train``: train a model on the ranks of this machine, or as a rank of the user's own torchrun."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

HELP = "train a model; resumes its own checkpoint"
EPILOG = """\
Exit codes: 0 done, 1 failed, 2 bad input (nothing was started), 3 diverged, 128 + signal interrupted.
Started by torchrun (several machines: torchrun --nnodes ... -m impl train ...), it becomes one of the ranks."""
SETTINGS = ("model", "strategy", "optimizer", "dp", "tp", "steps", "seed", "lr", "batch", "sequence", "microbatches")
TARGET = "impl.harness.training:train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options.  None has a default here: what is not given comes from the file, then from ``RunSpec``."""
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--out", required=True, type=Path, metavar="DIR", help="folder of the run; holds manifest.json at its end")
    add("--wait", action="store_true", help="wait for another process that runs this, instead of being refused")
    add("--config", type=Path, metavar="FILE", help="YAML with settings; the options below override it")
    add("--model", metavar="NAME", help="for example qwen3-tiny (bytes as tokens, for CPUs)")
    add("--strategy", metavar="NAME", help="sc, asc, nv-layerwise or canzona (default)")
    add("--nv-version", metavar="NAME", help="with nv-layerwise: ping-pong, lpt-numel or lpt-ns")
    add("--optimizer", metavar="NAME", help="for matrices, default muon; the rest uses adamw")
    add("--dp", type=int, metavar="N", help="data-parallel ranks, default 1")
    add("--tp", type=int, metavar="N", help="tensor-parallel ranks, default 1")
    add("--steps", type=int, metavar="N", help="optimizer steps, default 20")
    add("--seed", type=int, metavar="N", help="of weights and batches, default 0")
    add("--lr", type=float, metavar="X", help="peak learning rate, default 2e-3")
    add("--batch", type=int, metavar="N", help="sequences per step over all ranks, default 16")
    add("--sequence", type=int, metavar="N", help="tokens per sequence, default 48")
    add("--microbatches", type=int, metavar="N", help="gradient accumulation steps, default 1")
    add("--layers", type=int, metavar="N", help="layers, where the model allows another number")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other setting, repeatable: --set plan.alpha=0.5 --set checkpoint_every=10 --set data.source=my.txt",
    )


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return what file, options and ``--set`` ask for, in rising precedence.  Raises :class:`ConfigError`."""
    from impl.harness.options import require_model, settings_of
    from impl.harness.spec import assign

    data = settings_of(args, (*SETTINGS, "layers"))
    if args.nv_version is not None:
        assign(data, f"plan.nv_version={args.nv_version}")
    for assignment in args.set:
        assign(data, assignment)
    return require_model(data)


def run(args: argparse.Namespace) -> int:
    """Check everything, then train; returns the exit code.  Raises :class:`ConfigError` before anything is started."""
    from impl.harness import launch, resuming, setup, worker
    from impl.harness.spec import RunSpec, parse

    spec = parse(RunSpec, settings(args))
    if launch.inside_torchrun():
        ranks = launch.torchrun_ranks(spec.world_size, f"dp x tp is {spec.dp} x {spec.tp}")
        setup.check(spec, local_ranks=ranks)
        resuming.check(spec, args.out)
        return worker.join_run(TARGET, spec, args.out, wait=args.wait)
    setup.check(spec, local_ranks=spec.world_size)
    resuming.check(spec, args.out)
    ranks = spec.world_size
    return launch.execute(TARGET, spec, args.out, ranks=ranks, runtime=spec.runtime, wait=args.wait)
