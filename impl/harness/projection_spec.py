"""Experiments of projections: which steps are projected."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from impl.canzona.strategies import PlanOptions
from impl.errors import ConfigError, unknown
from impl.harness.optimizer_files import OptimizerEntry, with_optimizers
from impl.harness.spec import Frozen, load_yaml, parse
from impl.harness.step_time_spec import System
from impl.harness.tiers import Id, Tier, no_duplicates, of_tier
from impl.models import catalogue
from impl.projection import hardware
from impl.projection.training import TpUpdate, Uneven, Workload


class ProjectedSystem(System):
    """A system with the ways of its execution that a plan leaves open (:func:`impl.projection.training.project`)."""

    tp_update: TpUpdate = "exchange"
    uneven: Uneven = "rooted"


class ProjectedMesh(Frozen):
    """DP x TP ranks, one device each."""

    dp: int = Field(gt=0)
    tp: int = Field(gt=0)


class Grid(Frozen):
    """Every combination of models, optimizers, systems and meshes; empty lists stand for all.

    id: which question it answers.  hardware: a kind, of which each mesh takes as many devices as it has ranks.
    vary: one planner option, workload setting or ``uneven`` with the values that it takes in turn.
    options, workload: over the experiment's.  per_rank: sequences of each DP rank, instead of the workload's batch.
    """

    id: Id
    models: tuple[str, ...] = Field(min_length=1)
    meshes: tuple[ProjectedMesh, ...] = Field(min_length=1)
    hardware: str
    optimizers: tuple[Id, ...] = ()
    systems: tuple[Id, ...] = ()
    options: dict[str, Any] = Field(default_factory=dict)
    workload: dict[str, Any] = Field(default_factory=dict)
    per_rank: int | None = Field(default=None, gt=0)
    vary: dict[str, tuple[Any, ...]] = Field(default_factory=dict, max_length=1)


class Claim(Frozen):
    """A published number that the experiment answers.

    id: in ``results/published``.  grid, optimizer, model, dp, tp: the case that is compared.
    quantity: what; baseline, system: whose values are published, baseline over system.
    reason: why the two need not, or cannot, agree.  comparable: whether a ratio of the two says anything.
    """

    id: str
    grid: Id
    quantity: str
    model: str
    optimizer: Id
    dp: int
    tp: int
    baseline: Id | None = None
    system: Id
    reason: str
    comparable: bool = True


class ProjectionTier(Frozen):
    """What is projected on one tier."""

    grids: tuple[Grid, ...] = Field(min_length=1)


class ProjectionSpec(Frozen):
    """The experiment's file.

    reference: the system whose values the others are divided by.
    kernels: a measured kernel table, relative to the project, for the hardware that it was measured on.
    notes: what a reader should know, by grid.
    """

    title: str
    optimizers: tuple[OptimizerEntry, ...] = Field(min_length=1)
    systems: tuple[ProjectedSystem, ...] = Field(min_length=1)
    reference: Id
    options: dict[str, Any] = Field(default_factory=dict)
    workload: dict[str, Any] = Field(default_factory=dict)
    kernels: str | None = None
    claims: tuple[Claim, ...] = ()
    notes: dict[str, str] = Field(default_factory=dict)
    tiers: dict[Tier, ProjectionTier]

    @model_validator(mode="after")
    def _consistent(self) -> ProjectionSpec:
        no_duplicates(self.systems)
        no_duplicates(self.optimizers)
        if self.reference not in {s.id for s in self.systems}:
            raise ValueError(f"reference {self.reference!r} is not one of the systems")
        grids = {grid.id for tier in self.tiers.values() for grid in tier.grids}
        varied = {grid.id for tier in self.tiers.values() for grid in tier.grids if grid.vary}
        for claim in self.claims:
            if claim.grid not in grids - varied:
                why = "varies something" if claim.grid in varied else "is none of the grids"
                given = ", ".join(sorted(grids - varied))
                raise ValueError(f"claim {claim.id} is about grid {claim.grid!r}, which {why}: write one of {given}")
        if lost := sorted(self.notes.keys() - grids):
            raise ValueError(f"notes are about grids, and {', '.join(lost)} is none of {', '.join(sorted(grids))}")
        return self

    def cases(self, tier: str) -> Iterator[Case]:
        """Return every projection of ``tier``, those of one comparison together.

        Raises :class:`ConfigError` for an unknown optimizer, system, setting or kind of hardware.
        """
        chosen: ProjectionTier = of_tier(self.tiers, tier)
        for grid in chosen.grids:
            hardware.split(f"{grid.hardware}x1")
            entries = _chosen("optimizer of this experiment", grid.optimizers, self.optimizers)
            systems = _chosen("system of this experiment", grid.systems, self.systems)
            varied = [(name, value) for name, values in grid.vary.items() for value in values] or [None]
            for model, mesh, entry, change in itertools.product(grid.models, grid.meshes, entries, varied):
                for system in systems:
                    yield self._case(grid, model, mesh, entry, system, change)

    def _case(
        self,
        grid: Grid,
        model: str,
        mesh: ProjectedMesh,
        entry: OptimizerEntry,
        system: ProjectedSystem,
        change: tuple[str, Any] | None,
    ) -> Case:
        options, load = {**self.options, **grid.options}, {**self.workload, **grid.workload}
        if system.nv_version:
            options["nv_version"] = system.nv_version
        if grid.per_rank is not None:
            load["batch"] = grid.per_rank * mesh.dp
        if change is not None:
            name, value = change
            if name == "uneven":
                system = parse(ProjectedSystem, {**system.model_dump(), "uneven": value})
            else:
                (options if name in PlanOptions.model_fields else load)[name] = value
        varied = "" if change is None else f"{change[0]}={change[1]}"
        plan, work = parse(PlanOptions, options), parse(Workload, load)
        return Case(grid, model, mesh.dp, mesh.tp, entry, system, plan, work, varied)


@dataclass(frozen=True)
class Case:
    """One projection."""

    grid: Grid
    model: str
    dp: int
    tp: int
    optimizer: OptimizerEntry
    system: ProjectedSystem
    options: PlanOptions
    workload: Workload
    varied: str

    @property
    def comparison(self) -> tuple[Any, ...]:
        """What it shares with the systems that it is compared with."""
        return self.grid.id, self.model, self.dp, self.tp, self.optimizer.id, self.varied

    @property
    def machine(self) -> str:
        """Name of its hardware."""
        return f"{self.grid.hardware}x{self.dp * self.tp}"

    def keys(self) -> dict[str, Any]:
        """Return the columns that say what was projected."""
        nv = self.system.strategy == "nv-layerwise"
        return {
            "grid": self.grid.id,
            "model": self.model,
            "model_name": catalogue.load(self.model).display_name,
            "optimizer": self.optimizer.id,
            "optimizer_name": self.optimizer.name,
            "system": self.system.id,
            "system_name": self.system.name,
            "strategy": self.system.strategy,
            "nv_version": self.options.nv_version if nv else None,
            "tp_update": self.system.tp_update,
            "dp": self.dp,
            "tp": self.tp,
            "gpus": self.dp * self.tp,
            "hardware": self.machine,
            **{name: getattr(self.workload, name) for name in ("sequence", "batch", "microbatches")},
            "varied": self.varied,
        }


def load(path: str | Path) -> ProjectionSpec:
    """Return the experiment of a YAML file; raises :class:`ConfigError` that names the file and the setting."""
    try:
        return parse(ProjectionSpec, with_optimizers(Path(path), load_yaml(path)))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _chosen(kind: str, wanted: Sequence[str], known: Sequence[Any]) -> list[Any]:
    by_id = {one.id: one for one in known}
    for name in wanted:
        if name not in by_id:
            raise unknown(kind, name, by_id)
    return [by_id[name] for name in wanted] or list(known)
