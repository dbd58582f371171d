"""The settings of the pipeline projection: models on clusters, methods, and the published numbers to answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from impl.errors import ConfigError
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.spec import Frozen, load_yaml, parse
from impl.harness.tiers import Id, Label, Tier, merged, no_duplicates
from impl.projection.pipeline_flight import PipelineRecompute

Dtype = Literal["float32", "bfloat16"]
Measure = Literal["memory", "samples_per_s", "update_ratio", "memory_saved", "time_added", "words"]


class MethodEntry(Label):
    """A pipeline method as the experiment compares it."""

    method: str
    settings: dict[str, Any] = Field(default_factory=dict)


class Policy(Label):
    """What a backward computes again, and where stashed weights are."""

    recompute: PipelineRecompute = "none"
    stash_on_cpu: bool = False


class CaseEntry(Label):
    """A model on a cluster.

    hardware: with the number of devices, one a stage.  base: other settings of the run.
    methods, policies: ids of those to project, all if empty.
    """

    model: str
    hardware: str
    stages: int = Field(gt=0)
    dtype: Dtype = "bfloat16"
    base: dict[str, Any] = Field(default_factory=dict)
    methods: tuple[Id, ...] = ()
    policies: tuple[Id, ...] = ()


class Largest(Frozen):
    """Every combination of these for which the largest microbatch that fits is planned.

    hardware: kinds, without a number.
    """

    hardware: tuple[str, ...]
    models: tuple[str, ...]
    stages: tuple[int, ...]
    methods: tuple[Id, ...]
    policies: tuple[Id, ...]
    dtype: Dtype = "bfloat16"


class Cell(Frozen):
    """One case under one method and policy, by their ids."""

    case: Id
    method: Id
    policy: Id


class ClaimEntry(Frozen):
    """A published number and where ours stands.

    quantity: as in the table of published numbers.  measure: what is taken from ``of``, or from ``of`` against
        ``baseline``; ``words`` for a claim that no number answers.
    reason: why the two cannot agree, or what to know before comparing them.
    """

    id: str
    quantity: str
    measure: Measure
    of: Cell | None = None
    baseline: Cell | None = None
    reason: str


class PipelineProjectionTier(Frozen):
    """What one tier covers: ids of cases, and whether largest microbatches are planned and claims answered."""

    cases: tuple[Id, ...] = Field(min_length=1)
    largest: bool = True
    claims: bool = True


class PipelineProjectionSpec(Frozen):
    """The experiment's file.

    reference: method that time ratios refer to, under the policy with which it is fastest in the case.
    capacity_bytes: of the micro-groups in which matrices are updated (see :func:`pipeline_memory.memory`).
    """

    title: str
    reference: Id
    capacity_bytes: int = Field(gt=0)
    base: dict[str, Any] = Field(default_factory=dict)
    methods: tuple[MethodEntry, ...] = Field(min_length=1)
    policies: tuple[Policy, ...] = Field(min_length=1)
    cases: tuple[CaseEntry, ...] = Field(min_length=1)
    largest: Largest
    claims: tuple[ClaimEntry, ...] = ()
    tiers: dict[Tier, PipelineProjectionTier]

    @model_validator(mode="after")
    def _known(self) -> PipelineProjectionSpec:
        for labels in (self.methods, self.policies, self.cases):
            no_duplicates(labels)
        methods, policies, cases = ({x.id for x in labels} for labels in (self.methods, self.policies, self.cases))
        cells = [cell for claim in self.claims for cell in (claim.of, claim.baseline) if cell]
        used = {
            "method": (methods, {self.reference, *self.largest.methods, *(c.method for c in cells)}),
            "policy": (policies, {*self.largest.policies, *(c.policy for c in cells)}),
            "case": (cases, {c for tier in self.tiers.values() for c in tier.cases} | {c.case for c in cells}),
        }
        for case in self.cases:
            used["method"][1].update(case.methods)
            used["policy"][1].update(case.policies)
        for what, (known, named) in used.items():
            if missing := sorted(named - known):
                raise ValueError(f"unknown {what} {missing[0]!r}: known are {', '.join(sorted(known))}")
        return self

    def run(self, case: CaseEntry, method: MethodEntry, policy: Policy) -> PipelineSpec:
        """Return the settings of one cell; raises :class:`ConfigError` if they make none."""
        own = {"model": case.model, "stages": case.stages, "method": method.method, "method_settings": method.settings}
        chosen = policy.model_dump(exclude={"id", "name"})
        return parse(PipelineSpec, merged(self.base, case.base, own, chosen))


def load(path: str | Path) -> PipelineProjectionSpec:
    """Return the experiment of a YAML file; raises :class:`ConfigError` that names the file and the setting."""
    try:
        return parse(PipelineProjectionSpec, load_yaml(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
