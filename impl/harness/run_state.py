"""What one run is doing, told from its folder without disturbing it: nothing is locked and nothing is written."""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import time
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from impl.harness.processes import has_ended
from impl.harness.run import Run
from impl.harness.step_time_spec import StepTimeSpec

Row = dict[str, Any]
FAILED = ("failed", "out-of-memory", "corrupt")
ACTIVE = ("running", "silent")
"""An attempt has begun, and as far as can be told it goes on."""
AGAIN = ("waiting", "unfinished", "interrupted")
"""What the same command would start, or continue from the last checkpoint."""
STATES = ("done", "diverged", *FAILED, *ACTIVE, *AGAIN)
SILENT_S = 300.0
"""A run on another machine that has written nothing for so long is called silent; nobody here can know that it died."""
TAIL_BYTES = 1 << 16
RECENT = 20
"""Steps whose median time is the speed of a run."""


@dataclass(frozen=True)
class State:
    """What a run is doing.

    name: one of :data:`STATES`; detail: why, or what else is to be said, in a line.
    done, of, unit: how far it is; ``done`` is None before the first step of a run that is active, and for others.
    loss: of the last step.  samples_per_s: sequences, at the median speed of the last steps.
    eta_s: seconds, the steps that are left times that speed; None where that is not known.
    sign_s: seconds since an active run last wrote a file.
    started, ended: times in UTC of the attempt, ISO 8601, empty if unknown; seconds: how long a finished one took.
    """

    name: str
    detail: str = ""
    done: int | None = None
    of: int = 0
    unit: str = "step"
    loss: float | None = None
    samples_per_s: float | None = None
    eta_s: float | None = None
    sign_s: float | None = None
    started: str = ""
    ended: str = ""
    seconds: float | None = None


def read_state(run: Run, folder: Path) -> State:
    """Return what ``run`` is doing in ``folder``, which need not exist; never raises for what is in it."""
    of, unit = length(run)
    manifest = _object(folder / "manifest.json")
    attempt = _object(folder / ".attempt.json")
    if manifest is None and attempt is None:
        manifest = _object(folder / "manifest.json")  # it may have ended between the two looks
    if manifest is not None:
        name = "interrupted" if manifest.get("lost") else str(manifest.get("status"))  # a killed process is no result
        known = name in STATES and name not in ACTIVE
        seconds = manifest.get("seconds")
        return State(
            name if known else "corrupt",
            first_line(manifest.get("error")) if known else "manifest.json cannot be read",
            of=of,
            unit=unit,
            started=str(manifest.get("started") or ""),
            ended=str(manifest.get("ended") or ""),
            seconds=float(seconds) if isinstance(seconds, int | float) else None,
        )
    if attempt is None:
        begun = "begun, without a record: goes on from its last checkpoint" if (folder / "config.yaml").exists() else ""
        return State("waiting", begun, of=of, unit=unit)
    return _attempted(run, folder, str(attempt.get("started") or ""))


def _attempted(run: Run, folder: Path, started: str) -> State:
    """Return the state of a run whose last attempt has not ended with a manifest."""
    of, unit = length(run)
    holder = _text(folder / ".lock").strip()
    sign = _last_sign(folder)
    age = max(0.0, time.time() - sign) if sign is not None else None
    if has_ended(holder) or _is_another_process(holder, folder / ".lock"):
        return State("interrupted", f"{holder} is no more", of=of, unit=unit, started=started)
    name, detail = "running", holder
    if age is not None and age > SILENT_S:
        if not _is_here(holder):
            name = "silent"
        detail = f"nothing written for {age / 60:.0f} min by {holder or 'nobody that is named'}"
    done, loss, per_unit = progress_of(run, folder, started)
    speed = samples(run) / per_unit if per_unit else None
    eta = (of - done) * per_unit if per_unit and done is not None else None
    return State(name, detail, done, of, unit, loss, speed, eta, age, started)


def length(run: Run) -> tuple[int, str]:
    """Return how many units ``run`` has, and what a unit is called."""
    spec = run.spec
    if isinstance(spec, StepTimeSpec):
        return spec.repetitions, "repetition"
    return spec.steps, "update" if run.command == "pipeline" else "step"


def samples(run: Run) -> int:
    """Return the sequences that one unit of ``run`` trains on; of a timing job those of all systems together."""
    spec = run.spec
    if isinstance(spec, StepTimeSpec):
        return spec.base.batch * len(spec.systems) * (1 + spec.timed_steps)
    return spec.batch


def progress_of(run: Run, folder: Path, started: str) -> tuple[int | None, float | None, float | None]:
    """Return the units that are done, the last loss, and the seconds of a unit; None for what is not known.

    Rows that are older than ``started`` belong to an earlier attempt and do not count.
    """
    path = folder / "metrics.jsonl"
    begun = _timestamp(started)
    try:
        written = path.stat().st_mtime
    except OSError:
        return None, None, None
    if begun is not None and written < begun:
        return None, None, None
    rows = tail(path)
    if isinstance(run.spec, StepTimeSpec):
        return _timed_progress(run.spec, rows)
    steps = [row for row in rows if row.get("event") == "step" and isinstance(row.get("step"), int)]
    if not steps:
        return None, None, None
    loss = steps[-1].get("loss")
    return steps[-1]["step"], loss if isinstance(loss, float) else None, _seconds_per_step(steps)


def tail(path: Path) -> list[Row]:
    """Return the last rows of a metrics file, as many as fit in :data:`TAIL_BYTES`; lines that are not whole left out.

    Raises nothing: a file that cannot be read has no rows.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    found = (_json(line) for line in lines[1 if begin else 0 : -1])
    return [row for row in found if row is not None]


def first_line(error: Any) -> str:
    """Return the first line of an error, which says what happened; the last if the text is a bare traceback."""
    lines = [line.strip() for line in str(error or "").splitlines() if line.strip()]
    if not lines:
        return ""
    return lines[-1] if "Traceback (most recent call last)" in lines[0] else lines[0]


def _timed_progress(spec: StepTimeSpec, rows: list[Row]) -> tuple[int | None, float | None, float | None]:
    """Return :func:`progress_of` for a timing job: a repetition is a row of every system."""
    times: dict[int, list[float]] = {}
    loss = None
    for row in rows:
        seconds = row.get("seconds")
        if row.get("event") != "step_time" or not isinstance(row.get("repetition"), int):
            continue
        iteration = seconds.get("iteration") if isinstance(seconds, dict) else None
        times.setdefault(row["repetition"], []).append(iteration or 0.0)
        losses = row.get("losses") or [None]
        loss = losses[-1] if isinstance(losses[-1], float) else loss
    if not times:
        return None, None, None
    whole = {number: found for number, found in times.items() if len(found) == len(spec.systems)}
    per_unit = [sum(found) * (1 + spec.timed_steps) for found in whole.values()][-RECENT:]
    done = max(whole) + 1 if whole else max(times)
    return done, loss, statistics.median(per_unit) if any(per_unit) else None


def _seconds_per_step(steps: list[Row]) -> float | None:
    """Return the median seconds of the last steps, from the times in their rows."""
    timed = [(row["seconds"].get("iteration"), row) for row in steps if isinstance(row.get("seconds"), dict)]
    usual = [seconds for seconds, row in timed if not row.get("slowed")]  # others were measured while they ran
    elapsed = [row["elapsed"] for row in steps if isinstance(row.get("elapsed"), float)]
    between = [b - a for a, b in pairwise(elapsed)]  # below 0 where the run was resumed
    for found in (usual, [seconds for seconds, _ in timed], between):
        known = [seconds for seconds in found if isinstance(seconds, float) and seconds > 0][-RECENT:]
        if known:
            return statistics.median(known)
    return None


def _last_sign(folder: Path) -> float | None:
    """Return when the run last wrote a file, in seconds of the epoch; None if it wrote none."""
    names = ("metrics.jsonl", ".attempt.json", "torchrun.log", "checkpoint")
    times = []
    for path in (*(folder / name for name in names), *folder.glob("rank-*.log")):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)


def _is_here(holder: str) -> bool:
    found = re.fullmatch(r"process (\d+) on (.+)", holder)
    return found is not None and found[2] == socket.gethostname()


def _is_another_process(holder: str, lock: Path) -> bool:
    """Return whether the process with the holder's number began after the lock was taken: numbers are used again.

    Linux tells; elsewhere the number is believed.
    """
    if not _is_here(holder):
        return False
    try:
        stat = Path(f"/proc/{holder.split()[1]}/stat").read_text()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        locked = time.time() - lock.stat().st_mtime
    except (OSError, ValueError):
        return False
    began = uptime - int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return began < locked - 5.0


def _object(path: Path) -> Row | None:
    """Return the JSON object of a file, empty if it cannot be read as one; None if there is no file."""
    try:
        return _json(path.read_bytes()) or {}
    except FileNotFoundError:
        return None
    except OSError:
        return {}


def _json(text: bytes) -> Row | None:
    try:
        data = json.loads(text)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _timestamp(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
