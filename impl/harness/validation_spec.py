"""The validation experiment: which measured runs are projected, and how good a projection should be."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from impl.errors import ConfigError, unknown
from impl.harness import experiments
from impl.harness.run import Run
from impl.harness.spec import Frozen, load_yaml, parse
from impl.harness.tiers import Tier, of_tier


class Replayed(Frozen):
    """Rank replays: of the systems of an experiment's runs (``runs``: how their names begin), so often."""

    experiment: str
    runs: tuple[str, ...] = Field(min_length=1)
    repetitions: int = Field(default=10, gt=0)


class ValidationTier(Frozen):
    """What is validated on one tier: experiments of timed runs, and replays."""

    experiments: tuple[str, ...] = Field(min_length=1)
    replay: Replayed

    @property
    def compared(self) -> tuple[str, ...]:
        """The experiments whose measurements are needed, each once."""
        return tuple(dict.fromkeys((*self.experiments, self.replay.experiment)))


class Limits(Frozen):
    """The share by which a prediction may be off: the median over all configurations, and a replay."""

    median: float = Field(gt=0)
    replay: float = Field(gt=0)


class ValidationSpec(Frozen):
    """The experiment's file."""

    title: str
    limits: Limits
    tiers: dict[Tier, ValidationTier]

    def tier(self, name: str) -> ValidationTier:
        """Return one tier; raises :class:`ConfigError` for an unknown or missing one."""
        return of_tier(self.tiers, name)


def load(path: str | Path) -> ValidationSpec:
    """Return the experiment of a YAML file; raises :class:`ConfigError` that names the file and the setting."""
    try:
        return parse(ValidationSpec, load_yaml(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def runs_of(folder: Path, names: tuple[str, ...], tier: str) -> dict[str, tuple[Run, ...]]:
    """Return the timed runs of the experiments ``names`` in ``folder``; raises :class:`ConfigError`."""
    known = experiments.all_runs(folder, tier)
    for name in names:
        if name not in known:
            raise unknown("experiment", name, known)
    return {name: known[name] for name in names}
