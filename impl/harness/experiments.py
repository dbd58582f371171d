"""Experiments as data: one YAML file per table, expanded for a tier into the runs that it needs.

A run's id ends in the first digits of its settings' hash, so that a changed setting is another run in another folder,
and reordered keys are the same one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from impl.errors import ConfigError, unknown
from impl.harness.spec import Frozen, RunSpec, load_yaml, parse

Tier = Literal["ci", "laptop", "gpu1", "node8", "cluster"]
TIERS: tuple[str, ...] = get_args(Tier)
Id = Annotated[str, Field(pattern=r"^[a-z0-9-]+$")]


class System(Frozen):
    """One of the systems that an experiment compares.

    id: its name in paths and tables' keys; name: how it is displayed.
    nv_version: which published version of NV-layerwise.
    live: run megatron-core's own ``LayerWiseDistributedOptimizer`` instead of this project's engine.
    """

    id: Id
    name: str
    strategy: str
    nv_version: Literal["ping-pong", "lpt-numel", "lpt-ns"] | None = None
    live: bool = False

    def run_spec(self, base: RunSpec) -> RunSpec:
        """Return ``base`` with this system's strategy and version."""
        plan = {} if self.nv_version is None else {"plan": {"nv_version": self.nv_version}}
        return parse(RunSpec, merged(base.resolved(), {"strategy": self.strategy}, plan))


class StepTimeSpec(Frozen):
    """One interleaved timing job: every system in the same process group, one after the other in each repetition.

    base: the run that all systems share; its ``strategy`` and ``plan.nv_version`` are replaced by each system's.
    repetitions: timed steps per system; warmup: untimed steps per system before them.
    """

    base: RunSpec
    systems: tuple[System, ...] = Field(min_length=1)
    repetitions: int = Field(default=20, gt=0)
    warmup: int = Field(default=3, ge=0)

    @model_validator(mode="after")
    def _distinct(self) -> StepTimeSpec:
        _no_duplicates(self.systems)
        return self

    @property
    def world_size(self) -> int:
        """Number of rank processes."""
        return self.base.world_size

    def resolved(self) -> dict[str, Any]:
        """Return every setting as plain data, defaults included."""
        return self.model_dump(mode="json")

    @property
    def digest(self) -> str:
        """SHA-256 of the settings; independent of key order."""
        return canonical_digest(self.resolved() | {"base": self.base.digest})


class Mesh(Frozen):
    """A mesh of an experiment: DP x TP ranks, and the systems (by id) that are left out on it."""

    dp: int = Field(gt=0)
    tp: int = Field(gt=0)
    without: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Name in paths."""
        return f"dp{self.dp}-tp{self.tp}"


class StepTimeTier(Frozen):
    """What ``step-time`` runs on one tier; ``base`` overrides the experiment's base settings."""

    meshes: tuple[Mesh, ...] = Field(min_length=1)
    repetitions: int = Field(default=20, gt=0)
    warmup: int = Field(default=3, ge=0)
    base: dict[str, Any] = Field(default_factory=dict)


class PrecisionTier(Frozen):
    """What ``precision`` runs on one tier; ``base`` overrides the experiment's base settings."""

    meshes: tuple[Mesh, ...] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    base: dict[str, Any] = Field(default_factory=dict)


class _Experiment(Frozen):
    title: str
    reference: Id = "sc"
    base: dict[str, Any]
    systems: tuple[System, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> _Experiment:
        _no_duplicates(self.systems)
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


class StepTimeExperiment(_Experiment):
    """Time, bytes and state of one step under every system: one job per mesh."""

    kind: Literal["step-time"]
    tiers: dict[Tier, StepTimeTier]

    def runs(self, tier: str) -> tuple[Run, ...]:
        """Return the jobs of ``tier``."""
        chosen = _of_tier(self.tiers, tier)
        runs = []
        for mesh in chosen.meshes:
            base = parse(RunSpec, merged(self.base, chosen.base, {"dp": mesh.dp, "tp": mesh.tp}))
            spec = StepTimeSpec(base=base, systems=self.on(mesh), repetitions=chosen.repetitions, warmup=chosen.warmup)
            for system in spec.systems:
                system.run_spec(base)
            runs.append(Run(name=mesh.id, command="step-time", spec=spec))
        return tuple(runs)


class PrecisionExperiment(_Experiment):
    """Loss curves of every system on the same data: one training run per mesh, seed and system."""

    kind: Literal["precision"]
    tiers: dict[Tier, PrecisionTier]

    def runs(self, tier: str) -> tuple[Run, ...]:
        """Return the training runs of ``tier``."""
        chosen = _of_tier(self.tiers, tier)
        runs = []
        for mesh in chosen.meshes:
            for seed in chosen.seeds:
                shared = {"dp": mesh.dp, "tp": mesh.tp, "seed": seed}
                base = parse(RunSpec, merged(self.base, chosen.base, shared))
                runs += [
                    Run(name=f"{s.id}-{mesh.id}-s{seed}", command="train", spec=s.run_spec(base), system=s)
                    for s in self.on(mesh)
                ]
        return tuple(runs)


class Run(Frozen):
    """One run of an experiment.

    name: what it is, in path characters; command: the subcommand of ``python -m impl`` that executes it.
    system: the system it runs, None when one job runs several.
    """

    name: Id
    command: Literal["train", "step-time"]
    spec: RunSpec | StepTimeSpec
    system: System | None = None

    @property
    def id(self) -> str:
        """Name and the first eight digits of the settings' hash: the name of the run's folder."""
        return f"{self.name}-{self.spec.digest[:8]}"

    @property
    def base(self) -> RunSpec:
        """The settings of the training run, shared by all systems of a step-time job."""
        return self.spec.base if isinstance(self.spec, StepTimeSpec) else self.spec


Experiment = StepTimeExperiment | PrecisionExperiment
_KINDS: dict[str, type[StepTimeExperiment] | type[PrecisionExperiment]] = {
    "step-time": StepTimeExperiment,
    "precision": PrecisionExperiment,
}


def load(path: str | Path) -> Experiment:
    """Return the experiment of a YAML file; raises :class:`ConfigError` that names the file and the setting."""
    data = load_yaml(path)
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in _KINDS:
        raise ConfigError(f"{path}: kind must be one of {', '.join(sorted(_KINDS))}, got {kind!r}")
    with _naming(path):
        return parse(_KINDS[kind], data)


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
    data = load_yaml(path)
    tiers = data.get("tiers") if isinstance(data, dict) else None
    if not isinstance(tiers, dict):
        raise ConfigError(f"{path}: expected a mapping with tiers")
    return canonical_digest({**data, "tiers": _of_tier(tiers, tier)})


def find_run(path: str | Path, tier: str, run_id: str) -> Run:
    """Return the run ``run_id`` of an experiment's file on ``tier``; raises :class:`ConfigError` if it has none."""
    runs = {run.id: run for run in runs_of(path, tier)}
    if run_id not in runs:
        raise unknown("run", run_id, runs)
    return runs[run_id]


def merged(*layers: dict[str, Any]) -> dict[str, Any]:
    """Return nested plain data in which later ``layers`` override earlier ones key by key."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def canonical_digest(data: Any) -> str:
    """SHA-256 of plain data in a form that does not depend on key order."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


@contextmanager
def _naming(path: str | Path) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _of_tier(tiers: Any, tier: str) -> Any:
    if tier not in TIERS:
        raise unknown("tier", tier, TIERS)
    if tier not in tiers:
        raise ConfigError(f"this experiment has no tier {tier!r}; it has {', '.join(tiers)}")
    return tiers[tier]


def _no_duplicates(systems: tuple[System, ...]) -> None:
    ids = [s.id for s in systems]
    for name in ids:
        if ids.count(name) > 1:
            raise ValueError(f"system {name!r} is listed twice")
