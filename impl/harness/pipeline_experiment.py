"""Experiments made of pipeline runs: methods x stages x seeds x learning rates, each method with its own settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator

from impl.errors import ConfigError, unknown
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.run import Run
from impl.harness.spec import Frozen, parse
from impl.harness.tiers import Id, Label, Tier, merged, no_duplicates, of_tier


class Entry(Label):
    """A method with its settings, as one line of the tables.

    settings: of the method; base: of its runs, over those of the experiment.
    lr: learning rates, one run each; empty takes the run's own ``lr``, or the best of a recorded sweep.
    tuned: under which name that sweep is recorded, with the other settings that it chose; None is the entry's id.
    """

    method: str
    settings: dict[str, Any] = Field(default_factory=dict)
    base: dict[str, Any] = Field(default_factory=dict)
    lr: tuple[float, ...] = ()
    tuned: Id | None = None


class Tuned(Frozen):
    """The best of a recorded sweep.

    name: of what was tuned; stages, model, layers: where.  lr, settings: what was best; settings under ``settings`` of
        an entry give way to the entry's own.
    heldout_loss: the best one's at the end, None for a value that was not swept here; runs: how many were compared.
    edge: the best learning rate is the smallest or largest that was tried, so a better one may lie beyond.
    """

    name: Id
    stages: int = Field(gt=0)
    lr: float = Field(gt=0)
    model: str = "qwen3-tiny"
    layers: int | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    heldout_loss: float | None = None
    runs: int = 0
    edge: Literal["smallest", "largest"] | None = None

    @property
    def place(self) -> tuple[str, int, str, int | None]:
        """What is looked up: name, stages, model, layers."""
        return self.name, self.stages, self.model, self.layers


class Grid(Frozen):
    """Every one of ``methods`` (ids, empty for all) at every one of ``stages``.

    ``lr`` overrides the learning rates of the methods, ``base`` the settings of the tier.
    """

    stages: tuple[int, ...] = Field(min_length=1)
    methods: tuple[Id, ...] = ()
    lr: tuple[float, ...] = ()
    base: dict[str, Any] = Field(default_factory=dict)


class PipelineTier(Frozen):
    """What runs on one tier; ``base`` overrides the experiment's base settings."""

    grids: tuple[Grid, ...] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    base: dict[str, Any] = Field(default_factory=dict)


class PipelineExperiment(Frozen):
    """Loss curves of pipeline methods: one run per method, number of stages, seed and learning rate.

    reference: the method that the others are paired with, seed by seed.
    tuned: best learning rates and settings of recorded sweeps.

    A run is named by its settings alone, so experiments that want the same one share it.
    """

    kind: Literal["pipeline"]
    title: str
    reference: Id
    base: dict[str, Any]
    methods: tuple[Entry, ...] = Field(min_length=1)
    tuned: tuple[Tuned, ...] = ()
    tiers: dict[Tier, PipelineTier]

    @model_validator(mode="after")
    def _consistent(self) -> PipelineExperiment:
        no_duplicates(self.methods)
        ids = [entry.id for entry in self.methods]
        if self.reference not in ids:
            raise ValueError(f"reference {self.reference!r} is not one of the methods {', '.join(ids)}")
        return self

    def runs(self, tier: str) -> tuple[Run, ...]:
        """Return the runs of ``tier``; raises :class:`ConfigError` for settings that cannot be."""
        chosen: PipelineTier = of_tier(self.tiers, tier)
        return tuple(run for grid in chosen.grids for run in self._runs(chosen, grid))

    def _runs(self, tier: PipelineTier, grid: Grid) -> Iterator[Run]:
        entries = {entry.id: entry for entry in self.methods}
        for name in grid.methods:
            if name not in entries:
                raise unknown("method of this experiment", name, entries)
        for stages in grid.stages:
            for entry in (entries[name] for name in grid.methods or entries):
                base = merged(self.base, tier.base, grid.base, entry.base, {"stages": stages, "method": entry.method})
                for lr, settings in self._choices(entry, base, grid.lr or entry.lr):
                    for seed in tier.seeds:
                        own = {"lr": lr, "method_settings": settings, "seed": seed}
                        spec = parse(PipelineSpec, merged(base, own))
                        name = f"{spec.method}-p{spec.stages}-s{seed}"
                        yield Run(name=name, command="pipeline", spec=spec, system=entry)

    def _choices(
        self, entry: Entry, base: dict[str, Any], rates: tuple[float, ...]
    ) -> list[tuple[float, dict[str, Any]]]:
        """Return the learning rates of ``entry``, ``rates`` if there are any, each with the method's settings."""
        if rates or "lr" in base:
            return [(lr, entry.settings) for lr in rates or (base["lr"],)]
        name = entry.tuned or entry.id
        where = (name, base["stages"], base.get("model"), base.get("layers"))
        for tuned in self.tuned:
            if tuned.place == where:
                return [(tuned.lr, merged(tuned.settings, entry.settings))]
        layers = f" with {where[3]} layers" if where[3] else ""
        raise ConfigError(
            f"no learning rate for {name} on {base['stages']} stages of {base.get('model')}{layers}: "
            "give lr, or record a sweep"
        )
