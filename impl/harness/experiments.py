"""Experiments as data: one YAML file per table, expanded for a tier into the runs that it needs.

A run's id ends in the first digits of its settings' hash, so that a changed setting is another run in another folder,
and reordered keys are the same one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from impl.errors import ConfigError, unknown
from impl.harness.optimizer_files import OptimizerEntry, with_optimizers
from impl.harness.pipeline_experiment import PipelineExperiment
from impl.harness.run import Run
from impl.harness.spec import Frozen, RunSpec, load_yaml, parse
from impl.harness.step_time_spec import StepTimeSpec, System
from impl.harness.tiers import TIERS, Id, Tier, canonical_digest, merged, no_duplicates, of_tier


class Mesh(Frozen):
    """A mesh of an experiment: DP x TP ranks, and the systems (by id) that are left out on it.

    model: trained there instead of the experiment's.
    pairs_with: of a timing job whose systems do not fit into a device's memory side by side: a system (by id) with
        which each of the others has a job of its own.  Ratios to that system are still of the same repetition of one
        job.  What is lost: two of the others are compared over two jobs, perhaps on other nodes.
    """

    dp: int = Field(gt=0)
    tp: int = Field(gt=0)
    model: str | None = None
    without: tuple[str, ...] = ()
    pairs_with: str | None = None

    @property
    def id(self) -> str:
        """Name in paths."""
        mesh = f"dp{self.dp}-tp{self.tp}"
        return mesh if self.model is None else f"{self.model.replace('.', '-')}-{mesh}"

    @property
    def settings(self) -> dict[str, Any]:
        """What it says about its runs."""
        return {"dp": self.dp, "tp": self.tp} | ({} if self.model is None else {"model": self.model})

    def jobs(self, systems: tuple[System, ...]) -> list[tuple[str, tuple[System, ...]]]:
        """Return the jobs of ``systems``: how the name of each goes on, and its systems.

        Raises :class:`ConfigError` if ``pairs_with`` is none of them.
        """
        if self.pairs_with is None:
            return [("", systems)]
        known = {system.id: system for system in systems}
        if self.pairs_with not in known:
            raise unknown("system on this mesh for pairs_with", self.pairs_with, known)
        first = known.pop(self.pairs_with)
        if not known:
            raise ConfigError(f"pairs_with {first.id} on {self.id}: there is no other system to pair it with")
        return [(f"-{first.id}-{other.id}", (first, other)) for other in known.values()]


class StepTimeTier(Frozen):
    """What ``step-time`` runs on one tier; ``base`` overrides the experiment's base settings.

    The counts are those of :class:`StepTimeSpec`.
    """

    meshes: tuple[Mesh, ...] = Field(min_length=1)
    repetitions: int = Field(default=20, gt=0)
    warmup: int = Field(default=3, ge=0)
    timed_steps: int = Field(default=1, gt=0)
    base: dict[str, Any] = Field(default_factory=dict)


class PrecisionTier(Frozen):
    """What ``precision`` runs on one tier; ``base`` overrides the experiment's base settings."""

    meshes: tuple[Mesh, ...] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    base: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _no_pairs(self) -> PrecisionTier:
        if any(mesh.pairs_with for mesh in self.meshes):
            raise ValueError("pairs_with is for timing jobs: every training run here has one system")
        return self


class _Experiment(Frozen):
    """optimizers: each in runs of its own, beside the one that ``base`` names, if it does."""

    title: str
    reference: Id = "sc"
    base: dict[str, Any]
    systems: tuple[System, ...] = Field(min_length=1)
    optimizers: tuple[OptimizerEntry, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> _Experiment:
        no_duplicates(self.systems)
        no_duplicates(self.optimizers)
        ids = [s.id for s in self.systems]
        if self.reference not in ids:
            raise ValueError(f"reference {self.reference!r} is not one of the systems {', '.join(ids)}")
        return self

    def on(self, mesh: Mesh) -> tuple[System, ...]:
        """Return the systems that run on ``mesh``; raises :class:`ConfigError` for an unknown id in ``without``."""
        ids = [s.id for s in self.systems]
        for left_out in mesh.without:
            if left_out not in ids:
                raise unknown("system", left_out, ids)
        return tuple(s for s in self.systems if s.id not in mesh.without)

    def bases(self, *layers: dict[str, Any]) -> Iterator[tuple[str, RunSpec]]:
        """Yield the settings of every optimizer's runs, ``layers`` over the experiment's, and how their names begin."""
        shared = merged(self.base, *layers)
        if "optimizer" in shared or not self.optimizers:
            yield "", parse(RunSpec, shared)
        for entry in self.optimizers:
            if entry.id == shared.get("optimizer"):
                raise ConfigError(f"optimizer {entry.id!r} is listed twice: in base and in optimizers")
            yield f"{entry.id}-", parse(RunSpec, entry.over(shared))

    def optimizer_name(self, optimizer: str) -> str:
        """Return how ``optimizer`` is displayed."""
        return {entry.id: entry.name for entry in self.optimizers}.get(optimizer, optimizer)


class StepTimeExperiment(_Experiment):
    """Time, bytes and state of one step under every system: one job per mesh and optimizer, or one per pair of systems.

    compare_parameters: whether the systems' parameters are compared at the end of each job.
    """

    kind: Literal["step-time"]
    compare_parameters: bool = False
    tiers: dict[Tier, StepTimeTier]

    def runs(self, tier: str) -> tuple[Run, ...]:
        """Return the jobs of ``tier``."""
        chosen = of_tier(self.tiers, tier)
        runs = []
        for mesh in chosen.meshes:
            bases = list(self.bases(chosen.base, mesh.settings))
            for suffix, systems in mesh.jobs(self.on(mesh)):
                for prefix, base in bases:
                    spec = StepTimeSpec(
                        base=base,
                        systems=systems,
                        repetitions=chosen.repetitions,
                        warmup=chosen.warmup,
                        timed_steps=chosen.timed_steps,
                        compare_parameters=self.compare_parameters,
                    )
                    for system in spec.systems:
                        system.run_spec(base)
                    runs.append(Run(name=f"{prefix}{mesh.id}{suffix}", command="step-time", spec=spec))
        return tuple(runs)


class PrecisionExperiment(_Experiment):
    """Loss curves of every system on the same data: one training run per mesh, seed, optimizer and system."""

    kind: Literal["precision"]
    tiers: dict[Tier, PrecisionTier]

    def runs(self, tier: str) -> tuple[Run, ...]:
        """Return the training runs of ``tier``."""
        chosen = of_tier(self.tiers, tier)
        runs = []
        for mesh in chosen.meshes:
            for seed in chosen.seeds:
                shared = {**mesh.settings, "seed": seed}
                for prefix, base in self.bases(chosen.base, shared):
                    runs += [
                        Run(name=f"{prefix}{s.id}-{mesh.id}-s{seed}", command="train", spec=s.run_spec(base), system=s)
                        for s in self.on(mesh)
                    ]
        return tuple(runs)


Experiment = StepTimeExperiment | PrecisionExperiment | PipelineExperiment
_KINDS: dict[str, type[StepTimeExperiment] | type[PrecisionExperiment] | type[PipelineExperiment]] = {
    "step-time": StepTimeExperiment,
    "precision": PrecisionExperiment,
    "pipeline": PipelineExperiment,
}


def load(path: str | Path) -> Experiment:
    """Return the experiment of a YAML file; raises :class:`ConfigError` that names the file and the setting.

    Optimizers whose own file names the experiment are part of it (:func:`with_optimizers`).  Where a pipeline
    experiment's ``tuned`` is a file's name, beside its own, that file's list takes its place.
    """
    data = load_yaml(path)
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in _KINDS:
        raise ConfigError(f"{path}: kind must be one of {', '.join(sorted(_KINDS))}, got {kind!r}")
    with _naming(path):
        if isinstance(tuned := data.get("tuned"), str):
            data["tuned"] = load_yaml(Path(path).parent / tuned)
        return parse(_KINDS[kind], with_optimizers(Path(path), data))


def runs_of(path: str | Path, tier: str) -> tuple[Run, ...]:
    """Return the runs of an experiment's file on ``tier``; raises :class:`ConfigError` that names the file."""
    experiment = load(path)
    with _naming(path):
        return experiment.runs(tier)


def all_runs(folder: str | Path, tier: str) -> dict[str, tuple[Run, ...]]:
    """Return the runs of every experiment in ``folder`` on ``tier`` by the file's name.

    Files without ``kind`` are not made of runs and are left out.  Raises :class:`ConfigError`.
    """
    if tier not in TIERS:
        raise unknown("tier", tier, TIERS)
    return {
        path.stem: runs_of(path, tier)
        for path in sorted(Path(folder).glob("*.yaml"))
        if isinstance(data := load_yaml(path), dict) and "kind" in data
    }


def settings_digest(path: str | Path, tier: str) -> str:
    """Return a hash of what an experiment's file says about ``tier``, in any order; raises :class:`ConfigError`."""
    with _naming(path):
        data = with_optimizers(Path(path), load_yaml(path))
    tiers = data.get("tiers") if isinstance(data, dict) else None
    if not isinstance(tiers, dict):
        raise ConfigError(f"{path}: expected a mapping with tiers")
    return canonical_digest({**data, "tiers": of_tier(tiers, tier)})


@contextmanager
def _naming(path: str | Path) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
