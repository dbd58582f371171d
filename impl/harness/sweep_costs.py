"""What a sweep costs, told before it starts: runs, GPU-hours or core-hours, disk, and what does not fit.

A number is measured (finished runs with the same work), projected (data sheets of a described device), or a question
mark.  Nothing of the planners is imported unless a device is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from impl.errors import unknown
from impl.harness import experiments, job_seconds
from impl.harness.job_costs import JobCosts, checkpoints_kept, record_bytes
from impl.harness.job_seconds import Seconds
from impl.harness.run import Run

if TYPE_CHECKING:
    from impl.projection.hardware import HardwareSpec

MEASURED, KEPT_TABLE, PROJECTED, UNKNOWN = "measured", "measured before", "projected", "?"
NOTES = {
    MEASURED: "from finished runs of this sweep with the same work",
    KEPT_TABLE: "from a table of finished runs with the same work, on another day or machine",
    PROJECTED: "from data sheets, one rank a GPU; starts, held-out losses, checkpoints and queues are left out",
}
NOT_KNOWN = {
    True: "a job that does not fit, or whose method's time is not modelled",
    False: "no finished run with the same work, and no device to project to",
}
"""What a question mark means, with and without a device."""
Hours = tuple[float, float, float]
"""A number and its band."""


@dataclass(frozen=True)
class Known:
    """Where times come from: ``here``, runs of this sweep; ``kept``, a table; by the runs' work."""

    here: Mapping[str, Seconds] = field(default_factory=dict)
    kept: Mapping[str, Seconds] = field(default_factory=dict)


@dataclass(frozen=True)
class RunCost:
    """What one run that is still to do costs.

    hours: of GPUs or cores, None if ``kind`` is '?'.
    disk: bytes; open: whether it writes checkpoints whose bytes are not known without a device.
    """

    ranks: int
    hours: Hours | None
    kind: str
    disk: int
    open: bool
    misfit: str | None


@dataclass(frozen=True)
class Line:
    """The cost of some runs: how many, and what those that are still to do cost."""

    name: str
    runs: int
    costs: tuple[RunCost, ...]

    @property
    def ranks(self) -> int:
        """Of the largest job that is still to do."""
        return max((cost.ranks for cost in self.costs), default=0)

    @property
    def disk(self) -> str:
        """Bytes, planned."""
        open_ = sum(cost.open for cost in self.costs)
        return size(sum(cost.disk for cost in self.costs)) + (f" + checkpoints of {open_} runs ?" if open_ else "")

    @property
    def hours(self) -> str:
        """The sum of each kind, and of how many runs nothing is known."""
        parts = []
        for kind in NOTES:
            found = [cost.hours for cost in self.costs if cost.kind == kind and cost.hours is not None]
            if found:
                value, low, high = (sum(numbers) for numbers in zip(*found, strict=True))
                band = f" [{amount(low)}, {amount(high)}]" if high > low else ""
                parts.append(f"{amount(value)}{band} {kind}")
        missing = sum(cost.hours is None for cost in self.costs)
        if missing == len(self.costs) and missing:
            return "?"
        return " + ".join([*parts, *([f"{missing} runs ?"] if missing else [])]) or "0"


@dataclass(frozen=True)
class SweepCost:
    """The cost of a tier: a line per experiment, and one for all, in which shared runs count once.

    device: of which the memory was checked and times are projected, None for a tier that runs on CPUs.
    checked: whether the jobs' memory was compared with the device's.
    """

    tier: str
    device: HardwareSpec | None
    lines: tuple[Line, ...]
    all: Line
    checked: bool

    @property
    def misfits(self) -> tuple[str, ...]:
        """A line for each job that is still to do and does not fit."""
        return tuple(cost.misfit for cost in self.all.costs if cost.misfit is not None)

    @property
    def unit(self) -> str:
        """What hours are of."""
        return "GPU-hours" if self.device else "core-hours"

    @property
    def memory(self) -> str:
        """What is known of memory."""
        if self.device is None:
            return "not checked: no device is named"
        have = f"{self.device.device.memory_bytes / 1e9:.1f} GB of one {self.device.display_name}"
        if not self.checked:
            return f"not checked against the {have}"
        many = f"{len(self.misfits)} of {len(self.all.costs)} jobs do not fit" if self.misfits else "every job fits"
        return f"{many} the {have} (planned)"

    def text(self) -> str:
        """Return the table, one line per experiment, and what its numbers rest on."""
        head = ["experiment", "runs", "to do", "largest job", self.unit, "disk (planned)"]
        rows = [head, *([_cells(line, self.unit) for line in (*self.lines, self.all)])]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        aligned = [[str.rjust, str.ljust][i in (0, 4, 5)] for i in range(len(head))]
        told = ["  ".join(align(cell, w) for align, cell, w in zip(aligned, row, widths, strict=True)) for row in rows]
        kinds = {cost.kind for cost in self.all.costs}
        notes = [f"{kind}: {text}" for kind, text in NOTES.items() if kind in kinds]
        notes += [f"{UNKNOWN}: {NOT_KNOWN[self.device is not None]}"] if UNKNOWN in kinds else []
        shared = sum(line.runs for line in self.lines) - self.all.runs
        notes += [f"runs that experiments share count once in the last line ({shared} fewer)"] if shared else []
        lines = [self._title(), "", *(line.rstrip() for line in told), "", *notes, f"memory: {self.memory}"]
        return "\n".join([*lines, *(f"does not fit: {line}" for line in self.misfits)])

    def summary(self) -> str:
        """Return the sum in five lines, and up to four of what does not fit."""
        line = self.all
        parts = {
            "jobs": f"{len(line.costs)} of {line.runs}, the largest of {line.ranks} processes",
            self.unit: line.hours,
            "disk": f"{line.disk} (planned)",
            "memory": self.memory,
        }
        told = [f"  {name:11}{value}" for name, value in parts.items()]
        more = [f"  and {len(self.misfits) - 3} more"] if len(self.misfits) > 3 else []
        return "\n".join([self._title(), *told, *(f"  does not fit: {m}" for m in self.misfits[:3]), *more])

    def _title(self) -> str:
        where = f" on {self.device.display_name}" if self.device else ""
        names = self.lines[0].name if len(self.lines) == 1 else f"{len(self.lines)} experiments"
        return f"cost of tier {self.tier}{where}, what is still to do of {names}"


def sweep(
    folder: Path,
    tier: str,
    results: Path,
    *,
    device: HardwareSpec | None = None,
    names: Sequence[str] = (),
    kept: Mapping[str, Seconds] | None = None,
    check: bool = True,
) -> SweepCost:
    """Return what the experiments ``names`` (all if empty) in ``folder`` cost on ``tier``.

    results: of the tier, with the folders of finished runs.  device: that the jobs run on; None for CPU cores.
    kept: times to fall back to where no ``device`` is given.  check: whether jobs must fit the device's memory.

    Raises :class:`ConfigError` for an unknown tier or experiment.
    """
    runs = experiments.all_runs(folder, tier)
    for name in names:
        if name not in runs:
            raise unknown("experiment that is made of runs", name, runs)
    chosen = {name: runs[name] for name in runs if not names or name in names}
    here = job_seconds.by_work(job_seconds.of_records(chosen, results, gpu=device is not None))
    planner = JobCosts(device) if device else None
    known = Known(here, {} if device else kept or {})
    costs: dict[Path, RunCost | None] = {}
    lines = []
    for name, group in chosen.items():
        for run in group:
            place = run.place(results, name)
            if place not in costs:
                to_do = job_seconds.ended(place) is None
                costs[place] = of_run(run, known, planner, check=check) if to_do else None
        places = dict.fromkeys(run.place(results, name) for run in group)
        lines.append(Line(name, len(places), _present(costs[place] for place in places)))
    return SweepCost(tier, device, tuple(lines), Line("all", len(costs), _present(costs.values())), check)


def of_run(run: Run, known: Known, planner: JobCosts | None, *, check: bool = True) -> RunCost:
    """Return what ``run`` costs.

    planner: of the device it runs on; None for CPU cores.  check: whether it must fit the device's memory.
    """
    ranks, key = run.spec.world_size, job_seconds.work(run)
    planned = planner.of(run) if planner else None
    disk = planned.disk.total if planned else record_bytes(run)
    misfit = planned.misfit if planned and check else None
    hours: Hours | None = None
    kind = UNKNOWN
    for name, table in ((MEASURED, known.here), (KEPT_TABLE, known.kept)):
        if hours is None and key in table:
            devices = ranks if planned else table[key].cores
            value = devices * table[key].seconds / 3600
            hours, kind = (value, value, value), name
    if hours is None and planned and planned.seconds:
        band = planned.seconds
        hours, kind = (ranks * band.value / 3600, ranks * band.low / 3600, ranks * band.high / 3600), PROJECTED
    return RunCost(ranks, hours, kind, disk, planner is None and checkpoints_kept(run) > 0, misfit)


def summary(
    folder: Path, tier: str, results: Path, *, device: HardwareSpec | None = None, names: Sequence[str] = ()
) -> str:
    """Return the cost of a sweep in a few lines; arguments and errors as of :func:`sweep`."""
    return sweep(folder, tier, results, device=device, names=names).summary()


def size(count: float) -> str:
    """Return a number of bytes in a readable unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("the loop returns")


def amount(value: float) -> str:
    """Return hours with as many digits as say something."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def _present(costs: Iterable[RunCost | None]) -> tuple[RunCost, ...]:
    return tuple(cost for cost in costs if cost is not None)


def _cells(line: Line, unit: str) -> list[str]:
    job = f"{line.ranks} {'GPU' if unit == 'GPU-hours' else 'process'}" if line.costs else "-"
    if line.ranks > 1:
        job += "s" if unit == "GPU-hours" else "es"
    return [line.name, str(line.runs), str(len(line.costs)), job, line.hours, line.disk if line.costs else "0 B"]
