"""The Hessian experiment: which training's weights and bases are looked at, in which matrices, with how many probes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from impl.errors import ConfigError
from impl.harness import pipeline_run
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.spec import Frozen, load_yaml, parse
from impl.harness.tiers import Tier, canonical_digest, merged, of_tier
from impl.optimizers.basis_rotation import BasisRotation


class Probes(Frozen):
    """How much is measured of each matrix.

    sequences: of the batch whose mean loss has the Hessian; drawn after those of the training.
    cauchy, normal: probes for the (1,1)-norm, of each basis, and for the Frobenius norm.
    iterations: most products of a power iteration.
    """

    sequences: int = Field(default=8, gt=0)
    cauchy: int = Field(default=65, ge=3)
    normal: int = Field(default=32, ge=2)
    iterations: int = Field(default=60, ge=1)


class HessianRun(Frozen):
    """Everything that decides the numbers: one training a seed, then the Hessian in the matrices of ``layers``."""

    training: PipelineSpec
    seeds: tuple[int, ...] = Field(min_length=1)
    layers: tuple[int, ...] = Field(min_length=1)
    probes: Probes

    @model_validator(mode="after")
    def _distinct(self) -> HessianRun:
        for name in ("seeds", "layers"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name} {list(values)} has a number twice")
        return self

    def of_seed(self, seed: int) -> PipelineSpec:
        """Return the training of ``seed``."""
        return self.training.model_copy(update={"seed": seed})

    def resolved(self) -> dict[str, Any]:
        """Return every setting as plain data, defaults included."""
        return self.model_dump(mode="json")

    @property
    def digest(self) -> str:
        """SHA-256 of the settings that decide the result."""
        return canonical_digest({**self.resolved(), "training": self.training.digest})

    @property
    def id(self) -> str:
        """Name of the run's folder; another setting is another run."""
        return f"hessian-{self.digest[:12]}"


class HessianTier(Frozen):
    """What is measured on one tier; ``base`` overrides the experiment's base settings."""

    seeds: tuple[int, ...] = (0,)
    layers: tuple[int, ...] = Field(min_length=1)
    probes: Probes = Probes()
    base: dict[str, Any] = Field(default_factory=dict)


class HessianSpec(Frozen):
    """The experiment's file; ``base`` holds settings of the training (:class:`PipelineSpec`)."""

    title: str
    base: dict[str, Any]
    tiers: dict[Tier, HessianTier]

    def run(self, tier: str) -> HessianRun:
        """Return what ``tier`` measures, checked; raises :class:`ConfigError` for what cannot work."""
        chosen: HessianTier = of_tier(self.tiers, tier)
        training = parse(PipelineSpec, merged(self.base, chosen.base))
        run = parse(HessianRun, {**chosen.model_dump(exclude={"base"}), "training": training})
        check(run)
        return run


def load(path: str | Path, tier: str) -> HessianRun:
    """Return what an experiment's file measures on ``tier``; raises :class:`ConfigError` that names the file."""
    try:
        return parse(HessianSpec, load_yaml(path)).run(tier)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def check(run: HessianRun) -> None:
    """Raise :class:`ConfigError` unless the training works, has bases, and has the layers."""
    training = run.training
    if training.runtime != "simulator":
        raise ConfigError("the Hessian is measured in one process: use runtime simulator")
    setup = pipeline_run.check(training, local_ranks=1)
    if any(setup.method.matrix_optimizer(context).name != BasisRotation.name for context in setup.contexts):
        raise ConfigError(f"method {training.method} has no bases to measure in: use basis-rotation")
    count = setup.model.arch.num_hidden_layers
    for layer in run.layers:
        if not 0 <= layer < count:
            raise ConfigError(f"there is no layer {layer}: {training.model} has layers 0 to {count - 1}")
