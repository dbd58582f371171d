"""``python -m impl replay``: each rank's own share of an optimizer step, one after the other on this device.

A Canzona or ASC step sends nothing over data-parallel ranks, so the slowest share is what the step takes.  Of the
tensor-parallel exchange the packing is included, the wire is not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from impl.errors import ConfigError

HELP = "time every rank's share of an optimizer step on this device, one after the other"
STRATEGIES = ("asc", "canzona", "nv-layerwise", "sc")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--model", help="a model of the catalogue, for example qwen3-1.7b")
    parser.add_argument(
        "--check", type=Path, metavar="FILE", help="instead: a step-time job whose steps and their replay take turns"
    )
    parser.add_argument("--layers", type=int, help="number of layers instead of the model's own")
    parser.add_argument("--optimizer", default="muon", help="of matrices (default muon); the rest uses adamw")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks (default 1)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (default 1)")
    parser.add_argument("--strategy", default="canzona", help=f"{', '.join(STRATEGIES)} (default canzona)")
    parser.add_argument("--ranks", default="all", help="all (default), heaviest by the plan, or numbers: 0,3")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the parameters")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: a GPU if any")
    parser.add_argument("--processes", type=int, default=1, help="that replay ranks at the same time (default 1)")
    parser.add_argument("--samples", type=int, default=10, help="steps, or refresh periods, of every rank (default 10)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for example plan.alpha=0.5")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON to this file")


def run(args: argparse.Namespace) -> int:
    """Replay and print what the ranks take; returns the exit code."""
    from impl.harness import replay_run
    from impl.harness.spec import assign, parse

    if args.check is not None:
        return _check(args)
    if args.model is None:
        raise ConfigError("no model given: write for example --model qwen3-1.7b, or --check FILE")
    names = ("model", "layers", "optimizer", "dp", "tp", "strategy", "dtype", "processes", "samples")
    data: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    data["runtime"] = {"device": args.device, "collective_timeout_s": 300.0}
    for assignment in args.set:
        assign(data, assignment)
    spec = parse(replay_run.ReplaySpec, data)
    if args.ranks != "all":
        spec = parse(replay_run.ReplaySpec, {**data, "ranks": _ranks(args.ranks, spec)})
    with tempfile.TemporaryDirectory(prefix="replay-") as folder, _progress_aside(args.json):
        code, rows = replay_run.execute(spec, Path(folder))
    found = replay_run.summary(spec, rows)
    if args.out is not None:
        _write(args.out, found)
    print(json.dumps(found, indent=1) if args.json else report(found))
    return code


@contextlib.contextmanager
def _progress_aside(aside: bool) -> Iterator[None]:
    """Let everything that is printed inside, by rank processes too, go to standard error if ``aside``."""
    if not aside:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _check(args: argparse.Namespace) -> int:
    """Run a step-time job in which real steps and replays take turns, and print how they agree."""
    from impl.harness import replay_check
    from impl.harness.spec import load_yaml, parse
    from impl.harness.step_time_spec import StepTimeSpec

    spec = parse(StepTimeSpec, load_yaml(args.check))
    with tempfile.TemporaryDirectory(prefix="replay-") as folder, _progress_aside(args.json):
        code, rows = replay_check.execute(spec, Path(folder))
    found = replay_check.summary(rows)
    if args.out is not None:
        _write(args.out, {"settings": spec.resolved(), "shares": [], "systems": found})
    if args.json:
        print(json.dumps(found, indent=1))
        return code
    print(
        f"{'system':>14} {'step ms':>9} {'replay ms':>10} {'replay / step':>14} {'quartiles':>14} {'n':>4}  [measured]"
    )
    for row in found:
        times = f"{row['real_s'] * 1e3:>9.2f} {row['replay_s'] * 1e3:>10.2f} {row['ratio']:>14.3f}"
        spread = f"{row['ratio_q25']:.3f} .. {row['ratio_q75']:.3f}"
        print(f"{row['system']:>14} {times} {spread:>14} {row['n']:>4}")
    return code


def _ranks(text: str, spec: Any) -> list[int]:
    from impl.projection import replay

    if text == "heaviest":
        setup = spec.setup()
        places = [share[0] for share in replay.distinct(setup.plan, spec.places())]
        heaviest = max(places, key=lambda place: replay.flops(setup.plan, setup.optimizers, place))
        return [heaviest.number(spec.tp)]
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--ranks {text}: write all, heaviest, or numbers such as 0,3") from None


def _write(path: Path, found: dict[str, Any]) -> None:
    from impl.harness import provenance
    from impl.harness.record import write_atomically

    shares = [{key: value for key, value in share.items() if key != "samples"} for share in found["shares"]]
    text = json.dumps({**found, "shares": shares, "date": provenance.now(), **provenance.collect()}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def report(found: dict[str, Any]) -> str:
    """Return the result as aligned text."""
    settings = found["settings"]
    title = f"{settings['model']}, {settings['optimizer']}, {settings['strategy']}"
    lines = [f"{title}, DP {settings['dp']} x TP {settings['tp']} [measured: rank replay]", ""]
    lines.append(f"{'rank':>6} {'alike':>6} {'ms':>10} {'quartiles':>19} {'n':>4} {'planned GFLOP':>14}")
    for share in found["shares"]:
        head = f"{share['rank']:>6} {len(share['ranks']):>6}"
        if "note" in share:
            lines.append(f"{head} {share['note']}")
            continue
        spread = f"{share['q25'] * 1e3:.2f} .. {share['q75'] * 1e3:.2f}"
        ends = f"{share['n']:>4} {share['flops'] / 1e9:>14.2f}"
        lines.append(f"{head} {share['seconds'] * 1e3:>10.2f} {spread:>19} {ends}")
    if "step_s" in found:
        planned = found["planned_flops_ratio"]
        ratio = "" if planned is None else f", planned FLOPs {planned:.4f}"
        lines += ["", f"optimizer step {found['step_s'] * 1e3:.2f} ms; slowest rank {found['slowest_rank']}"]
        lines.append(f"slowest over mean {found['ratio']:.4f}{ratio}")
    return "\n".join(lines)
