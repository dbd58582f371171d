"""``python -m impl project-pipeline``: time and memory of one pipeline on a cluster that is described, not used."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from impl.errors import ConfigError

HELP = "project one pipeline's time and memory on a described cluster, for example rtx3090x8"
EPILOG = """\
Times are projected from the hardware's data sheet and stated efficiencies, with the band that 90 of 100 draws of these
lead to; bytes are planned from shapes and schedule.  A pipeline that does not fit has no times, and the reason.
--set takes any other setting of the run (clip=0) and of the method (period=100, geometry=unilateral)."""
SETTINGS = ("model", "method", "stages", "layers", "mode", "batch", "sequence", "microbatches", "recompute")
UNITS = {"update_s": "s", "samples_per_s": "samples/s", "exposed_communication_s": "s", "ratio_to_pipedream": "times"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="YAML with settings of a pipeline run; the options override it")
    add("--model", metavar="NAME", help="of the catalogue, for example llama-7b")
    add("--hardware", required=True, metavar="NAME", help="kind and number of devices, for example rtx3090x8")
    add("--kernels", type=Path, metavar="FILE", help="kernel table of such a device (impl kernels), before data sheets")
    add("--method", metavar="NAME", help="default basis-rotation; a wrong name lists all")
    add("--stages", type=int, metavar="P", help="pipeline stages, one a device, default 1")
    add("--layers", type=int, metavar="N", help="layers instead of the model's own number")
    add("--mode", metavar="NAME", help="stash, no-stash-recompute, 2bw, vertical-sync or sync; default is the method's")
    add("--batch", type=int, metavar="N", help="sequences of an update, default 16")
    add("--sequence", type=int, metavar="N", help="tokens of a sequence, default 48")
    add("--microbatches", type=int, metavar="N", help="of an update; default 1, of synchronous schedules and 2bw P")
    add("--recompute", metavar="POLICY", help="none (default), stage or selective-attention")
    add("--stash-on-cpu", action="store_true", help="stashed weights in host memory, with --recompute stage")
    add("--dtype", default="float32", help="of weights and activations: float32 (default), as the runtime, or bfloat16")
    add(
        "--capacity-bytes", type=int, metavar="N", help="of a micro-group whose equal matrices are updated as one batch"
    )
    add("--trace", type=Path, metavar="FILE", help="write the timeline for Perfetto or chrome://tracing")
    add("--draw", type=Path, metavar="FILE", help="write a Gantt chart, .png, .pdf or .svg")
    add("--json", action="store_true", help="print one JSON object")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting, repeatable")


def run(args: argparse.Namespace) -> int:
    """Print the projection; returns 0, also for a pipeline that does not fit."""
    from impl.canzona.strategies import DEFAULT_CAPACITY_BYTES
    from impl.cli.pipeline import settings
    from impl.harness.pipeline_answers import machine, summary
    from impl.harness.pipeline_spec import PipelineSpec
    from impl.harness.spec import parse

    for name in ("runtime", "steps", "seed", "lr", "target"):
        setattr(args, name, None)  # of a run, not of a projection
    data = settings(args)
    for name in ("batch", "sequence", "microbatches", "recompute"):
        if (value := getattr(args, name)) is not None:
            data[name] = value
    if args.stash_on_cpu:
        data["stash_on_cpu"] = True
    spec = parse(PipelineSpec, data)
    on = machine(args.hardware, spec.stages, args.kernels)
    capacity = args.capacity_bytes or DEFAULT_CAPACITY_BYTES
    found = summary(spec, on, args.dtype, capacity_bytes=capacity)
    if found["fits"]:
        _write(args, spec, on)
    elif args.trace or args.draw:
        raise ConfigError(f"nothing to trace or draw: {found['reason']}")
    print(json.dumps(found, indent=2, allow_nan=False) if args.json else readable(found))
    return 0


def readable(found: dict[str, Any]) -> str:
    """Return the projection as text."""
    head = "{model}, {method}, P = {stages}, batch {batch} x {sequence} tokens, {dtype}, recompute {recompute}"
    lines = [f"{head.format(**found)}, on {found['hardware']}"]
    if not found["fits"]:
        lines.append(f"does not fit: {found['reason']}")
    for name, (low, high) in found["band"].items():
        value = f"{found[name]:.4g} [{low:.4g}, {high:.4g}] {UNITS.get(name, '')}"
        lines.append(f"  {name:24} {value.rstrip()} [projected]")
    if found["fits"] and found["ratio_reason"]:
        lines.append(f"  {'ratio_to_pipedream':24} none: {found['ratio_reason']}")
    lines.append("  memory per stage, GB [planned]")
    for stage, parts in enumerate(found["memory_bytes"]):
        text = ", ".join(f"{name} {count / 1e9:.2f}" for name, count in parts.items() if count and name != "total")
        lines.append(f"    stage {stage}: {parts['total'] / 1e9:.2f} = {text}")
    lines += [f"  {share:5.1%} {source}" for source, share in sorted(found["evidence"].items(), key=lambda e: -e[1])]
    return "\n".join(lines)


def _write(args: argparse.Namespace, spec: Any, on: Any) -> None:
    """Write trace and chart, if asked for."""
    from impl.projection.pipeline import project
    from impl.rotation.gantt import draw_bars

    if not (args.trace or args.draw):
        return
    track = project(spec, on, args.dtype).track
    try:
        if args.trace:
            args.trace.parent.mkdir(parents=True, exist_ok=True)
            args.trace.write_text(track.trace())
        if args.draw:
            args.draw.parent.mkdir(parents=True, exist_ok=True)
            bars = track.bars()
            forward = min(bar.end - bar.start for bar in bars if bar.action.kind == "F")
            title = f"{spec.model}, {spec.method} on {on.name} (projected)"
            draw_bars(bars, title=title, label="seconds", unit=forward).savefig(args.draw, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {getattr(error, 'filename', None) or args.draw}: {error}") from None
