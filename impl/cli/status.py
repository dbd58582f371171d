"""``python -m impl status``: how far a sweep is, without disturbing it.

Running is told from the run's folder and the process that its lock names.  A run on another machine that has written
nothing for five minutes is called silent: whether it died cannot be told from here.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from impl.errors import ConfigError
from impl.harness.progress import duration
from impl.harness.run_state import ACTIVE, AGAIN, FAILED
from impl.harness.status import HOW, Entry, Status, Sweep, counts, failed
from impl.harness.tiers import TIERS

HELP = "show how far a sweep is: runs done, running and failed, rate, ETA, and each running run"
LISTED = 20
"""Runs of a kind that are listed; ``--json`` has all."""
IN_LINE = 3
"""Running runs that a line of ``--watch`` names."""
Lines = list[tuple[str, ...]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "names", nargs="*", metavar="EXPERIMENT", help="default: those of make reproduce, and any begun"
    )
    parser.add_argument("--tier", default="laptop", help=f"one of {', '.join(TIERS)} (default laptop)")
    parser.add_argument("--experiments", default="experiments", type=Path, metavar="DIR", help="default experiments")
    parser.add_argument("--results", type=Path, metavar="DIR", help="default results/generated/TIER")
    parser.add_argument(
        "--watch",
        type=float,
        metavar="SECONDS",
        help="show it again and again until nothing runs or waits: live on a terminal, a line each elsewhere",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every run")


def run(args: argparse.Namespace) -> int:
    """Print the status; returns 0, 130 if interrupted.  Raises :class:`ConfigError` for an unknown name."""
    if args.watch is not None and not 0 < args.watch < float("inf"):
        raise ConfigError(f"--watch {args.watch:g}: write a number of seconds above 0")
    if args.watch is not None and args.json:
        raise ConfigError("--json prints one object and --watch goes on: leave one of them out")
    sweep = Sweep(args.experiments, args.tier, args.results or Path("results/generated", args.tier), args.names)
    if args.json:
        print(json.dumps(sweep.read().described(), indent=1, allow_nan=False))
    elif args.watch is not None:
        return watch(sweep, args.watch)
    elif sys.stdout.isatty():
        from rich.console import Console

        Console().print(rendered(sweep.read()))
    else:
        print(text(sweep.read()))
    return 0


def watch(sweep: Sweep, seconds: float) -> int:
    """Show ``sweep`` every ``seconds`` until nothing runs or waits; return 0, or 130 after Ctrl-C."""
    try:
        if sys.stdout.isatty():
            from rich.live import Live

            status = sweep.read()
            with Live(rendered(status), auto_refresh=False) as live:
                while status.goes_on:
                    time.sleep(seconds)
                    status = sweep.read()
                    live.update(rendered(status), refresh=True)
            return 0
        while True:
            status = sweep.read()
            print(line(status), flush=True)
            if not status.goes_on:
                return 0
            time.sleep(seconds)
    except KeyboardInterrupt:
        return 130


def line(status: Status) -> str:
    """Return the status in one line."""
    running = status.chosen(*ACTIVE)
    named = [f" | {e.run.id} {_how_far(e)}" for e in running[:IN_LINE]]
    more = f" | and {len(running) - IN_LINE} more" if len(running) > IN_LINE else ""
    return f"{time.strftime('%H:%M:%S', time.localtime(status.now))} {summary(status)}{''.join(named)}{more}"


def summary(status: Status) -> str:
    """Return counts, rate and ETA of the sweep."""
    found = counts(status.entries)
    said = [f"{found.pop('done')} of {len(status.entries)} runs done"]
    said += [f"{count} {name}" for name, count in found.items() if count or name in ("running", "failed", "waiting")]
    rate = status.runs_per_hour
    said += [f"{rate:.1f} runs/h"] if rate is not None else []
    said += [f"ETA {_duration(status.eta_s)}"] if status.chosen(*ACTIVE, *AGAIN) else []
    return f"tier {status.tier}: {', '.join(said)}"


def sections(status: Status) -> Iterator[tuple[str, Lines]]:
    """Yield the tables of a status: title, and rows of which the first is the header."""
    found = counts(status.entries)
    states = [name for name, count in found.items() if count or name in ("done", "running", "failed", "waiting")]
    rows: Lines = [("experiment", "runs", *states, "run time left")]
    for name in (*status.experiments, "all"):
        entries = status.entries if name == "all" else status.of(name)
        own = counts(entries)
        left = status.left_s(entries)
        rows.append((name, str(len(entries)), *(str(own[state]) for state in states), _duration(left)))
    yield "", rows
    if active := status.chosen(*ACTIVE):
        header = ("run", "experiment", "state", "at", "loss", "samples/s", "ETA", "last sign of life")
        yield "running", [header, *(_active_row(entry) for entry in active[:LISTED]), *_more(active, len(header))]
    for title, entries in (
        ("failed", failed(status)),
        ("diverged", status.chosen("diverged")),
        ("not finished", status.chosen("unfinished", "interrupted")),
    ):
        if entries:
            listed = [(e.run.id, ", ".join(e.experiments), e.state.name, e.state.detail[:90]) for e in entries[:LISTED]]
            yield title, [("run", "experiment", "state", "why"), *listed, *_more(entries, 4)]


def notes(status: Status) -> list[str]:
    """Return what a reader should know or can do."""
    said = []
    if status.chosen(*ACTIVE, *AGAIN):
        said.append(HOW)
    if status.chosen(*AGAIN) and not status.chosen(*ACTIVE):
        said.append("no run is active now: `make reproduce` continues where it was")
    if status.chosen(*FAILED):
        said.append("failed runs are kept as results: `make retry` forgets them, `make reproduce` runs them again")
    return said


def text(status: Status) -> str:
    """Return the status as plain text."""
    parts = [summary(status)]
    for title, rows in sections(status):
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        parts.append("\n".join([f"{title}:", *lines] if title else lines))
    return "\n\n".join([*parts, *(["\n".join(said)] if (said := notes(status)) else [])])


def rendered(status: Status) -> Any:
    """Return the status for a terminal, a renderable of ``rich``."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = [Text(summary(status), style="bold")]
    for title, rows in sections(status):
        table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
        for cell in rows[0]:
            table.add_column(cell, overflow="fold")
        for row in rows[1:]:
            table.add_row(*(Text(cell) for cell in row))
        parts += [Text(), table]
    return Group(*parts, Text(), *(Text(said, style="dim") for said in notes(status)))


def _active_row(entry: Entry) -> tuple[str, ...]:
    state = entry.state
    sign = "none yet" if state.sign_s is None else f"{_ago(state.sign_s)} ago"
    loss = "-" if state.loss is None else f"{state.loss:.4f}"
    speed = "-" if state.samples_per_s is None else f"{state.samples_per_s:,.1f}"
    at = "starting" if state.done is None else f"{state.unit} {state.done}/{state.of}"
    asked = ", ".join(entry.experiments)
    return entry.run.id, asked, state.name, at, loss, speed, _duration(state.eta_s), sign


def _how_far(entry: Entry) -> str:
    state = entry.state
    if state.done is None:
        return "starting"
    loss = "" if state.loss is None else f" loss {state.loss:.4f}"
    speed = "" if state.samples_per_s is None else f" {state.samples_per_s:,.1f} samples/s"
    silent = "" if state.name == "running" or state.sign_s is None else f" silent for {_ago(state.sign_s)}"
    return f"{state.unit} {state.done}/{state.of}{loss}{speed} ETA {_duration(state.eta_s)}{silent}"


def _more(entries: Sequence[Entry], columns: int) -> Lines:
    if len(entries) <= LISTED:
        return []
    return [(f"and {len(entries) - LISTED} more, see --json", *[""] * (columns - 1))]


def _duration(seconds: float | None) -> str:
    return "?" if seconds is None else duration(seconds)


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
