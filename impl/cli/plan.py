"""``python -m impl plan``: who owns and hosts what under a strategy, and how even that is."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from impl.canzona.drawing import SUFFIXES, draw
from impl.canzona.strategies import PlanOptions
from impl.errors import ConfigError
from impl.harness.planning import plan_workload, workload
from impl.harness.spec import parse
from impl.models import catalogue

HELP = "plan a run from shapes alone and report how even it is"
MAX_ROWS = 32
"""Ranks listed one by one in the readable report."""


def planner_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is planned and how."""
    parser.add_argument("--model", required=True, help="a model of the catalogue, for example qwen3-32b")
    parser.add_argument("--layers", type=int, help="number of layers instead of the model's own")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks (default 1)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (default 1)")
    parser.add_argument("--strategy", default="canzona", help="sc, nv-layerwise, asc or canzona (default)")
    parser.add_argument("--optimizer", default="muon", help="of matrices (default muon); the rest uses adamw")
    options = parser.add_argument_group("planner")
    options.add_argument(
        "--bucket-elements", type=int, help="a bucket closes at this size (default max(40e6, 1e6 * dp) elements)"
    )
    options.add_argument("--alpha", type=float, help="canzona: 0 cuts evenly, 1 fills gaps (default)")
    options.add_argument(
        "--no-fallback",
        dest="fallback",
        action="store_const",
        const=False,
        help="canzona: keep the alpha plan even where start-index is as good",
    )
    options.add_argument("--cost", help="canzona: numel (default), memory or flops, of whole matrices")
    options.add_argument("--tp-mode", help="canzona: micro-groups by no, single, slot or global (default)")
    options.add_argument(
        "--capacity-bytes", type=int, help="micro-group capacity, bytes of fp32 gradient shards per host and source"
    )
    options.add_argument("--nv-version", help="nv-layerwise: ping-pong, lpt-numel or lpt-ns (default)")
    options.add_argument("--split", help="fused QKV and gate/up matrices: none (default), update or atoms")
    options.add_argument("--split-qkv", help="split QKV into matrices (default) or heads")


def planner_options(args: argparse.Namespace) -> PlanOptions:
    """Return the planner's settings that were given; raises :class:`ConfigError` for a wrong one."""
    given = {name: getattr(args, name) for name in PlanOptions.model_fields if getattr(args, name, None) is not None}
    return parse(PlanOptions, given)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    planner_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print the report as JSON")
    output.add_argument("--out", type=Path, help="write the whole plan as JSON to this file")
    output.add_argument("--draw", type=Path, help="draw the plan to this file (.png or .pdf)")


def run(args: argparse.Namespace) -> int:
    """Plan, print the report, and write what was asked for; returns 0."""
    options = planner_options(args)
    if args.draw and args.draw.suffix not in SUFFIXES:
        raise ConfigError(f"--draw {args.draw}: end the name in {' or '.join(SUFFIXES)}")
    load = workload(catalogue.load(args.model, args.layers), args.optimizer, args.tp, options=options)
    planned = plan_workload(load, args.strategy, args.dp, options)
    print(json.dumps(planned.report, indent=2) if args.json else readable(planned.report))
    try:
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(planned.plan.to_json()))
        if args.draw:
            args.draw.parent.mkdir(parents=True, exist_ok=True)
            draw(planned.plan, planned.costs, args.draw, title=load.model)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from None
    return 0


def readable(report: dict[str, Any]) -> str:
    """Return the report as text."""
    version = f" {report['version']}" if report["version"] else ""
    bound = report["lower_bound"] or {}
    everything = report["all_parameters"]
    rows = [
        ("FLOPs, whole matrices", report["flops_ratio"], bound.get("dp")),
        ("FLOPs, TP-local shapes (published convention)", report["flops_ratio_tp_local"], None),
        ("master and state memory", report["memory_ratio"], None),
        ("busiest GPU's FLOPs over an even share", report["per_gpu_flops_ratio"], bound.get("gpu")),
        ("slice of the parameter all-gather", report["comm_ratio"], None),
        ("memory, all parameters", everything["memory_ratio"], None),
    ]
    lines = [
        f"{report['model']}, {report['strategy']}{version}, DP {report['dp']} x TP {report['tp']}, "
        f"{report['optimizer']}: {report['matrices']} matrices   [planned]",
        "",
        f"{'largest load / mean':<48}{'ratio':>9}{'at least':>10}",
        *(f"{name:<48}{_number(value):>9}{_number(least):>10}" for name, value, least in rows),
        "",
        *_ranks(report),
        "",
        f"micro-groups per DP rank: at most {report['micro_groups']}",
        f"padding of the matrices' buffer: {_number(report['padding'], '.1%')}",
    ]
    if report["fallback_used"]:
        lines.append("the alpha plan was no better, so the start-index plan was kept (--no-fallback to force it)")
    lines.append(f"planned in {report['plan_seconds']:.3f} s")
    return "\n".join([*lines, *(f"warning: {w}" for w in report["warnings"])])


def _ranks(report: dict[str, Any]) -> list[str]:
    loads = report["loads"]
    rows = list(zip(loads["flops"], loads["memory_bytes"], loads["elements"], strict=True))
    lines = [f"{'DP rank':>7}{'FLOP':>12}{'memory':>12}{'elements of a TP rank':>24}"]
    for rank, (flops, memory, elements) in enumerate(rows[:MAX_ROWS]):
        lines.append(f"{rank:>7}{_short(flops):>12}{_short(memory) + 'B':>12}{elements:>24,}")
    if len(rows) > MAX_ROWS:
        lines.append(f"    ... {len(rows) - MAX_ROWS} more ranks; --json lists all")
    return lines


def _short(value: float) -> str:
    """Return four digits and a decimal prefix."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.4g} {prefix}"
    return f"{value:.4g} "


def _number(value: float | None, style: str = ".4f") -> str:
    return "-" if value is None else format(value, style)
