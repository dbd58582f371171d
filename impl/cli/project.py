"""``python -m impl project``: what a training step would take on a cluster that is described, not used.

Every time is projected from data sheets and stated assumptions, or from a table of measured kernels (``--kernels``),
and carries a band and what it rests on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from impl.cli.plan import planner_arguments, planner_options
from impl.errors import ConfigError
from impl.harness.planning import plan_workload, workload
from impl.harness.spec import parse
from impl.models import catalogue
from impl.projection import hardware, plot
from impl.projection.machine import Machine, Roofline
from impl.projection.report import readable, report
from impl.projection.training import Projection, TpUpdate, Uneven, Workload, project

HELP = "project a training step to a cluster from data sheets or measured kernels"
TRACED = 16
"""Ranks in a trace, at most."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    planner_arguments(parser)
    step = parser.add_argument_group("training step")
    step.add_argument("--sequence", type=int, help="tokens of a sequence (default 2048)")
    step.add_argument("--batch", type=int, help="sequences a step over all DP ranks (default 128)")
    step.add_argument("--microbatches", type=int, help="into how many a rank's share is accumulated (default 1)")
    step.add_argument("--dtype", help="of parameters and activations: bfloat16 (default) or float32")
    step.add_argument("--recompute", help="none (default), selective-attention or full")
    step.add_argument(
        "--no-sequence-parallel",
        dest="sequence_parallel",
        action="store_const",
        const=False,
        help="norms and residual sums on whole sequences, as the engine's own model has them",
    )
    step.add_argument(
        "--tp-update",
        default="exchange",
        choices=get_args(TpUpdate),
        help="of matrices that TP cuts: as the plan says (default); muon also blockwise (inexact) or distributed",
    )
    step.add_argument(
        "--uneven",
        default="rooted",
        choices=get_args(Uneven),
        help="collectives over unequal segments: rooted calls (default) or padded to the largest",
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument("--hardware", required=True, help="kind and number of devices, for example h100x256, or local")
    machine.add_argument("--kernels", type=Path, help="a table of measured kernels")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print the projection as JSON")
    output.add_argument("--trace", type=Path, help="write a Chrome trace (Perfetto opens it) to this file")
    output.add_argument("--draw", type=Path, help="draw the timeline to this file (.png or .pdf)")


def run(args: argparse.Namespace) -> int:
    """Plan, project, print, and write what was asked for; returns 0, also for a step that does not fit."""
    options = planner_options(args)
    given = {name: getattr(args, name) for name in Workload.model_fields if getattr(args, name, None) is not None}
    work = parse(Workload, given)
    if args.draw and args.draw.suffix not in plot.SUFFIXES:
        raise ConfigError(f"--draw {args.draw}: end the name in {' or '.join(plot.SUFFIXES)}")
    config = catalogue.load(args.model, args.layers)
    load = workload(config, args.optimizer, args.tp, options=options)
    machine = _machine(args)
    planned = plan_workload(load, args.strategy, args.dp, options)
    projection = project(
        planned.plan, planned.costs, config, work, machine, tp_update=args.tp_update, uneven=args.uneven
    )
    found: dict[str, Any] = {
        **report(projection),
        "model": load.model,
        "strategy": args.strategy,
        "nv_version": planned.plan.version,
        "optimizer": args.optimizer,
        "dp": args.dp,
        "tp": args.tp,
        "layers": config.arch.num_hidden_layers,
        "hardware": args.hardware,
        "kernels": str(args.kernels) if args.kernels else None,
        "workload": work.model_dump(mode="json"),
        "tp_update": args.tp_update,
        "uneven": args.uneven,
        "plan_options": planned.plan.options,
    }
    print(json.dumps(found, indent=2) if args.json else readable(found))
    _write(args, projection, f"{load.model}, {args.strategy}, {args.optimizer} on {args.hardware}")
    return 0


def _machine(args: argparse.Namespace) -> Machine:
    """Return the machine that the options name; raises :class:`ConfigError` unless it has dp x tp devices."""
    if args.hardware != hardware.LOCAL:
        described = hardware.load(args.hardware)
        kind, devices = described.spec.id, described.count
        if devices != args.dp * args.tp:
            raise ConfigError(
                f"--hardware {args.hardware} has {devices} devices, dp x tp needs {args.dp} x {args.tp} = "
                f"{args.dp * args.tp}: write {kind}x{args.dp * args.tp}"
            )
        if args.kernels is None:
            return Roofline(described)
    from impl.projection.measured import load_machine  # only where a table is read

    return load_machine(args.hardware, args.kernels, args.dp * args.tp)


def _write(args: argparse.Namespace, projection: Projection, title: str) -> None:
    """Write trace and picture; a step that does not fit has neither."""
    writers: list[tuple[Path | None, Callable[[Path], Any]]] = [
        (args.trace, lambda path: path.write_text(_trace(projection))),
        (args.draw, lambda path: plot.draw(projection.timeline, path, title=title)),
    ]
    for path, write in writers:
        if path is None:
            continue
        if projection.misfit is not None:
            raise ConfigError(f"{path} is not written: the step {projection.misfit}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
        except OSError as error:
            raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from None


def _trace(projection: Projection) -> str:
    timeline = projection.timeline
    shown = sorted(plot.telling(timeline, count=TRACED))
    return timeline.trace([plot.label(rank) for rank in shown], ranks=shown)
