"""How far a sweep is: the runs that the experiments of a tier ask for, and what each of them is doing.

Only looks: no lock is taken and nothing is written, so a status at any time disturbs no run.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from impl.errors import ConfigError, unknown
from impl.harness import experiments
from impl.harness.run import Run
from impl.harness.run_state import ACTIVE, AGAIN, FAILED, STATES, State, read_state

DEFAULT = ("step_time", "precision", "generality", "staleness", "rotation")
"""The experiments of ``make reproduce`` that are made of runs; others are shown once they have a run of their own."""
IDLE_S = 900.0
"""A pause in which nothing ran for longer than this separates two sweeps: the rate is that of the last one."""
HOW = (
    "ETA: the runs that are left x the median seconds of finished runs of the same experiment, and what running ones "
    "have left, over the runs that run now"
)


@dataclass(frozen=True)
class Entry:
    """A run, the experiments that ask for it, its folder and its state."""

    run: Run
    experiments: tuple[str, ...]
    folder: Path
    state: State

    def described(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "run": self.run.id,
            "experiments": list(self.experiments),
            "folder": str(self.folder),
            **asdict(self.state),
        }


@dataclass(frozen=True)
class Status:
    """The state of a sweep at a time.

    experiments: those that are looked at; entries: one for every run, also where experiments share it.
    now: seconds of the epoch.
    """

    tier: str
    experiments: tuple[str, ...]
    entries: tuple[Entry, ...]
    now: float

    def of(self, experiment: str) -> tuple[Entry, ...]:
        """Return the runs of an experiment."""
        return tuple(entry for entry in self.entries if experiment in entry.experiments)

    def chosen(self, *names: str) -> tuple[Entry, ...]:
        """Return the runs in one of the states ``names``."""
        return tuple(entry for entry in self.entries if entry.state.name in names)

    @property
    def goes_on(self) -> bool:
        """Whether a run is active or waits."""
        return bool(self.chosen(*ACTIVE, "waiting"))

    def left_s(self, entries: Iterable[Entry]) -> float | None:
        """Return the seconds that the unfinished ones of ``entries`` would take one after the other; None if unknown.

        A run that is left takes the median of the finished runs of its experiments; an active one what its speed says,
        or else what that median leaves.
        """
        total = 0.0
        for entry in entries:
            if entry.state.name not in (*ACTIVE, *AGAIN):
                continue
            seconds = self._left_of(entry)
            if seconds is None:
                return None
            total += seconds
        return total

    def _left_of(self, entry: Entry) -> float | None:
        if entry.state.eta_s is not None:
            return max(0.0, entry.state.eta_s)
        known = [
            other.state.seconds
            for other in self.entries
            if other.state.name == "done" and other.state.seconds and {*other.experiments} & {*entry.experiments}
        ]
        if not known:
            return None
        begun = _seconds(entry.state.started) if entry.state.name in ACTIVE else None
        return max(0.0, statistics.median(known) - (self.now - begun if begun is not None else 0.0))

    @property
    def eta_s(self) -> float | None:
        """Seconds until the sweep is done, see :data:`HOW`; None if unknown."""
        left = self.left_s(self.entries)
        return None if left is None else left / max(1, len(self.chosen(*ACTIVE)))

    @property
    def runs_per_hour(self) -> float | None:
        """Finished runs per hour of the last sweep, until now if it goes on; None if none has finished."""
        spans = [(_seconds(entry.state.started), _seconds(entry.state.ended)) for entry in self.entries]
        ended = sorted((e, s) for s, e in spans if s is not None and e is not None)
        if not ended:
            return None
        until, begin, count = ended[-1][0], ended[-1][1], 0
        for end, start in reversed(ended):
            if begin - end > IDLE_S:
                break
            begin, count = min(begin, start), count + 1
        if self.chosen(*ACTIVE):
            until = max(until, self.now)
        return count * 3600.0 / (until - begin) if until > begin else None

    def described(self) -> dict[str, Any]:
        """Return it as plain data: counts, rate and ETA of the sweep and of each experiment, and every run."""
        return {
            "tier": self.tier,
            "time": datetime.fromtimestamp(self.now).astimezone().isoformat(timespec="seconds"),
            "total": {"runs": len(self.entries), **counts(self.entries)},
            "runs_per_hour": self.runs_per_hour,
            "eta_s": self.eta_s,
            "eta_how": HOW,
            "experiments": {
                name: {"runs": len(of), **counts(of), "left_s": self.left_s(of)}
                for name in self.experiments
                for of in [self.of(name)]
            },
            "runs": [entry.described() for entry in self.entries],
        }


def counts(entries: Iterable[Entry]) -> dict[str, int]:
    """Return how many runs are in each state, every state of :data:`STATES` named."""
    found = Counter(entry.state.name for entry in entries)
    return {name: found[name] for name in STATES}


class Sweep:
    """The runs of ``names`` (all default ones if none) on ``tier``, looked at as often as wanted.

    runs: of every experiment of the tier, by its name.
    folder: of the experiments' files; results: ``results/generated/TIER``, which need not exist.  Raises
    :class:`ConfigError` for an unknown tier or experiment.
    """

    def __init__(self, folder: Path, tier: str, results: Path, names: Sequence[str] = ()) -> None:
        self._tier, self._results = tier, results
        self.runs = experiments.all_runs(folder, tier)
        if not self.runs:
            raise ConfigError(f"{folder} holds no experiment that is made of runs: give another --experiments")
        for name in names:
            if name not in self.runs:
                if (folder / f"{name}.yaml").exists():
                    raise ConfigError(f"{name} is not made of runs: name some of {', '.join(self.runs)}")
                raise unknown("experiment", name, self.runs)
        self._names = tuple(dict.fromkeys(names))
        self._ended: dict[Path, tuple[int, State]] = {}

    def read(self) -> Status:
        """Return the state of all runs now."""
        names = self._names or self._shown()
        asking: dict[Path, tuple[Run, list[str]]] = {}
        for name in names:
            for run in self.runs[name]:
                by = asking.setdefault(run.place(self._results, name), (run, []))[1]
                if name not in by:
                    by.append(name)
        entries = tuple(Entry(run, tuple(by), path, self._state(run, path)) for path, (run, by) in asking.items())
        return Status(self._tier, names, entries, time.time())

    def _shown(self) -> tuple[str, ...]:
        """Return the default experiments, and those that have a run which no smaller one that is shown asks for."""
        folders = {name: {run.place(self._results, name) for run in runs} for name, runs in self.runs.items()}
        shown = [name for name in DEFAULT if name in folders]
        wanted = set().union(*(folders[name] for name in shown))
        for name in sorted(folders.keys() - {*shown}, key=lambda name: (len(folders[name]), name)):
            if any(path.exists() for path in folders[name] - wanted):
                shown.append(name)
                wanted |= folders[name]
        return tuple(shown)

    def _state(self, run: Run, path: Path) -> State:
        """Return the state of a run; a manifest that has not changed is not read again."""
        try:
            stamp = (path / "manifest.json").stat().st_mtime_ns
        except OSError:
            return read_state(run, path)
        known = self._ended.get(path)
        if known is None or known[0] != stamp:
            known = self._ended[path] = (stamp, read_state(run, path))
        return known[1]


def failed(status: Status) -> tuple[Entry, ...]:
    """Return the runs whose record says that they failed."""
    return status.chosen(*FAILED)


def _seconds(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
